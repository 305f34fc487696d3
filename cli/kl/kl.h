/* streamkl kl: request (the command line) -> inputs (files, shapes) -> results -> files and report. */
#ifndef STREAMKL_CLI_KL_KL_H
#define STREAMKL_CLI_KL_KL_H

#include "cli/common/runner.h"
#include "cli/kl/files.h"
#include "cli/kl/reduction.h"
#include "streamkl.h"
#include <argp.h>

typedef enum kl_layout { LAYOUT_BHND = 0, LAYOUT_BNHD = 1 } kl_layout;

typedef struct kl_request {
    skl_problem problem; /* masks, scales, direction; shapes and types come from the files */
    skl_options options;
    char **files; /* FILE or ROLE=FILE */
    size_t file_count;
    const char *names[ROLE_COUNT]; /* what a role's tensor is called, or a list of integers; NULL: not said */
    kl_layout layout;
    kl_reduction reduction;
    const char *out_path, *grad_path; /* NULL: not wanted */
    int32_t grad_teacher, json;
} kl_request;

/* A child for a command's argp: the files and what is in them. Input: the kl_request. */
extern const struct argp kl_input_argp;

/* A stored tensor seen as [batch, heads, length, dim]. */
enum { AXIS_BATCH, AXIS_HEADS, AXIS_LENGTH, AXIS_DIM, AXIS_COUNT };
typedef struct kl_view {
    const stored_tensor *stored;
    int64_t extent[AXIS_COUNT];
    skl_input input;
} kl_view;

typedef struct kl_inputs {
    kl_files files;
    kl_view views[ROLE_REQUIRED_COUNT];
    skl_problem problem; /* complete */
    skl_inputs tensors;
    int32_t *key_lengths, *cu_seqlens_q, *cu_seqlens_k; /* owned; NULL: not given */
    kl_view w_s;                                        /* of an indexer */
    int32_t *indices;                                   /* owned; NULL: not given */
} kl_inputs;

/* Row results and gradients, contiguous; a gradient lies as its tensor does. */
typedef struct kl_results {
    plan_runner runner;
    float *kl, *lse_t, *lse_s, *dot_t;
    float *cross_entropy, *entropy, *mass; /* of an indexer */
    void *dw_s;
    void *gradients[ROLE_REQUIRED_COUNT]; /* by role: dq_t, dk_t, dq_s, dk_s; NULL: not asked for */
    int64_t valid_rows;                   /* rows that see a key: what a mean is over */
    int64_t nonfinite_rows;               /* of which the KL is NaN or infinite */
    double sum;                           /* of the KL over the valid rows */
} kl_results;

/* Each prints why and returns an exit code; the matching free is right after any of them, and on zeroed structs. */
int kl_inputs_load(kl_inputs *inputs, const kl_request *request);
void kl_inputs_free(kl_inputs *inputs);

/* Has the CPU's backend look at lengths that a call can no longer check: because they will lie in the memory of a
 * GPU, or because they are used before it. */
int kl_inputs_check_lengths(const kl_inputs *inputs);

int kl_compute(kl_results *results, const kl_inputs *inputs, const kl_request *request);
void kl_results_free(kl_results *results);

/* --out and --grad: both files or none. kl_outputs_check() finds before the work what would fail after it. */
int kl_outputs_check(const kl_request *request);
int kl_outputs_write(const kl_results *results, const kl_inputs *inputs, const kl_request *request);

int kl_report(const kl_results *results, const kl_inputs *inputs, const kl_request *request);

/* Integers for a role: from a list in `text` ("3,5,8"), or from a tensor. *count is 0 and *values NULL if neither. */
int kl_lengths_load(const kl_files *files, kl_role role, const char *text, int32_t **values, int64_t *count);

/* All integers of an I32 or I64 tensor of any shape, in row-major order. */
int kl_integers_load(kl_role role, const kl_found *found, int32_t **values, int64_t *count);

/* What follows from a problem: the extents of row vectors, [batch, heads, length] or packed [1, heads, total]. */
static inline int64_t kl_row_batches(const skl_problem *problem)
{
    return problem->packed ? 1 : problem->batch;
}

static inline int64_t kl_row_length(const skl_problem *problem)
{
    return problem->packed ? problem->total_q : problem->len_q;
}

static inline bool kl_is_indexer(const skl_problem *problem)
{
    return problem->student == SKL_STUDENT_INDEXER;
}

#endif
