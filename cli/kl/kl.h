/* streamkl kl: request (command line) -> inputs (files, shapes) -> results -> files and report. */
#ifndef STREAMKL_CLI_KL_KL_H
#define STREAMKL_CLI_KL_KL_H

#include "cli/common/runner.h"
#include "cli/io/file_write.h"
#include "cli/kl/files.h"
#include "cli/kl/reduction.h"
#include "streamkl.h"
#include <argp.h>

typedef enum kl_layout { LAYOUT_DEFAULT, LAYOUT_BHND, LAYOUT_BNHD } kl_layout; /* default: bhnd */

typedef struct kl_request {
    skl_problem problem; /* masks, scales, direction; the files determine shapes and types */
    skl_options options;
    char **files; /* FILE or ROLE=FILE */
    size_t file_count;
    const char *names[ROLE_COUNT]; /* name of the tensor for a role, or a list of numbers; NULL: default */
    kl_layout layout;
    kl_reduction reduction;
    const char *out_path, *grad_path; /* NULL: none */
    int32_t grad_teacher, explain, json;
} kl_request;

/* A child for a command's argp: files, and names and layout of their tensors. Input: the kl_request. */
extern const struct argp kl_input_argp;

/* A stored tensor viewed as [batch, heads, length, dim]. */
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
    kl_view w_s; /* of an indexer */
    /* Owned; NULL: not given. */
    int32_t *key_lengths, *cu_seqlens_q, *cu_seqlens_k, *indices, *key_begin, *key_end;
    float *sink_t, *sink_s;
} kl_inputs;

/* Row vectors and gradients, contiguous; a gradient has the layout of its tensor. */
typedef struct kl_results {
    plan_runner runner;
    float *kl, *lse_t, *lse_s, *dot_t;
    float *cross_entropy, *entropy, *mass; /* of an indexer */
    void *dw_s;
    float *dsink_t, *dsink_s;             /* NULL: not requested */
    void *gradients[ROLE_REQUIRED_COUNT]; /* by role: dq_t, dk_t, dq_s, dk_s; NULL: not requested */
    int64_t valid_rows;                   /* rows that attend to any key: the denominator of a mean */
    int64_t nonfinite_rows;               /* rows whose KL is NaN or infinite */
    double sum;                           /* of the KL over the valid rows */
} kl_results;

/* On failure these print why. They return an exit code. Call the matching free in any case; it accepts zeroed
 * structs. */
int kl_inputs_load(kl_inputs *inputs, const kl_request *request);
void kl_inputs_free(kl_inputs *inputs);

/* Checks lengths and indices before they are copied to a GPU or used outside the library. */
int kl_inputs_check(const kl_inputs *inputs, const skl_plan *plan);

int kl_compute(kl_results *results, const kl_inputs *inputs, const kl_request *request);
void kl_results_free(kl_results *results);

/* Refuses outputs that are inputs of the request, or equal. */
int kl_outputs_compare(const kl_request *request, const output_file *outputs, size_t count);

/* --out and --grad: both files or none. kl_outputs_check() reports problems before the computation. */
int kl_outputs_check(const kl_request *request);
int kl_outputs_write(const kl_results *results, const kl_inputs *inputs, const kl_request *request);

int kl_report(const kl_results *results, const kl_inputs *inputs, const kl_request *request);

/* Integers for a role, from a list in `text` ("3,5,8") or from a tensor with 1 dimension. Without either, *values is
 * NULL. */
int kl_lengths_load(const kl_files *files, kl_role role, const char *text, int32_t **values, int64_t *count);

/* The same for one integer per query: a tensor is [batch, length]; for a batch of 1 also [length]. */
int kl_bounds_load(const kl_files *files, kl_role role, const char *text, int64_t batch, int64_t length,
                   int32_t **values);

/* sink_t and sink_s of inputs whose shapes are known, and their gradients if those of q are requested. */
int kl_sinks_load(kl_inputs *inputs, const kl_request *request);

/* The elements of an I32 or I64 tensor of any shape, in row-major order. */
int kl_integers_load(kl_role role, const kl_found *found, int32_t **values, int64_t *count);

/* The extents of row vectors: [batch, heads, length], or packed [1, heads, total]. */
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
