/* streamkl kl: request (command line) -> inputs (files, shapes) -> results -> files and report. */
#ifndef STREAMKL_CLI_KL_KL_H
#define STREAMKL_CLI_KL_KL_H

#include "cli/common/options.h"
#include "cli/common/runner.h"
#include "cli/io/file_write.h"
#include "streamkl.h"

/* ---- Files -------------------------------------------------------------------------------------------------- */

/* The purpose of a tensor. The first four are required. */
typedef enum kl_role {
    ROLE_Q_T,
    ROLE_K_T,
    ROLE_Q_S,
    ROLE_K_S,
    ROLE_LSE_T,
    ROLE_KEY_LENGTHS,
    ROLE_CU_SEQLENS_Q,
    ROLE_CU_SEQLENS_K,
    ROLE_W_S,
    ROLE_INDICES,
    ROLE_KEY_BEGIN,
    ROLE_KEY_END,
    ROLE_SINK_T,
    ROLE_SINK_S,
    ROLE_COUNT,
    ROLE_REQUIRED_COUNT = ROLE_LSE_T
} kl_role;

extern const char *const kl_role_names[ROLE_COUNT]; /* "q_t", ...: also the default names in files */

typedef struct kl_file {
    const char *path;
    tensor_file contents;
    int role; /* of ROLE=FILE; -1: any, by name */
} kl_file;

typedef struct kl_files {
    kl_file *files;
    size_t count;
} kl_files;

typedef struct kl_found {
    kl_file *file;
    const stored_tensor *tensor; /* NULL: not found */
} kl_found;

/* Opens arguments of the form FILE or ROLE=FILE. */
kl_files kl_files_open(char *const *arguments, size_t count);
void kl_files_close(kl_files *files);

/* Call it after the computation and before its results are used: refuses files that changed during it. */
void kl_files_unchanged(const kl_files *files);

/* Finds the tensor for a role, by its name in the files; NULL: the name of the role. A missing tensor is an error if
 * it is required or named. */
kl_found kl_files_find(const kl_files *files, kl_role role, const char *name, bool required);

/* ---- The command line --------------------------------------------------------------------------------------- */

typedef enum kl_layout { LAYOUT_BHND, LAYOUT_BNHD, LAYOUT_DEFAULT } kl_layout; /* default: bhnd */
typedef enum kl_reduction { REDUCTION_MEAN, REDUCTION_SUM, REDUCTION_NONE } kl_reduction;

extern const char *const kl_layout_names[];    /* by kl_layout */
extern const char *const kl_reduction_names[]; /* by kl_reduction */

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
    int32_t one_model; /* only q_s, k_s and sink_s are read, and stand for the teacher's, too */
} kl_request;

/* Parses a command line into `request`, which contains `input`, with the defaults of a kl_request. */
void kl_request_parse(kl_request *input, const command_line *command, int argc, char **argv, void *request);

/* Options of a kl_request. */
extern const cli_option kl_pair_options[];     /* names of the queries and keys of both models */
extern const cli_option kl_sequence_options[]; /* layout, key lengths, packed sequences and row bounds */

/* Refuses outputs that are inputs of the request, equal, or not writable. */
void kl_outputs_check(const kl_request *request, const output_file *outputs, size_t count);

/* ---- Inputs ------------------------------------------------------------------------------------------------- */

/* A stored tensor viewed as [batch, heads, length, dim]. */
enum { AXIS_BATCH, AXIS_HEADS, AXIS_LENGTH, AXIS_DIM, AXIS_COUNT };
typedef struct kl_view {
    const stored_tensor *stored;
    int64_t extent[AXIS_COUNT];
    skl_input input;
} kl_view;

typedef struct kl_inputs {
    kl_files files;
    kl_view views[ROLE_COUNT]; /* all required roles, and w_s for an indexer */
    skl_problem problem;       /* complete */
    skl_inputs tensors;
    /* Owned; NULL: not given. */
    int32_t *key_lengths, *cu_seqlens_q, *cu_seqlens_k, *indices, *key_begin, *key_end;
    float *sink_t, *sink_s;
} kl_inputs;

void kl_inputs_load(kl_inputs *inputs, const kl_request *request);
void kl_inputs_free(kl_inputs *inputs);

/* Integers for a role: a list ("3,5,8"), or a tensor with 1 dimension. NULL: neither is given. */
int32_t *kl_lengths_load(const kl_files *files, kl_role role, const char *text, int64_t *count);

/* One integer per query: a list, or a tensor [batch, length]; for a batch of 1 also [length]. NULL: neither is given.
 */
int32_t *kl_bounds_load(const kl_files *files, kl_role role, const char *text, int64_t batch, int64_t length);

/* One logit per head: a list, or a tensor. NULL: neither is given. */
float *kl_sinks_load(const kl_files *files, kl_role role, const char *text, int64_t heads);

/* The elements of an I32 or I64 tensor of any shape, in row-major order. */
int32_t *kl_integers_load(kl_role role, const kl_found *found, int64_t *count);

/* ---- Results ------------------------------------------------------------------------------------------------ */

/* Row vectors and gradients, contiguous; a gradient has the layout of its tensor. */
typedef struct kl_results {
    plan_runner runner;
    float *kl, *lse_t, *lse_s, *dot_t;
    float *cross_entropy, *entropy, *mass; /* of an indexer */
    void *gradients[ROLE_COUNT];           /* by the role of their input; NULL: not requested */
    int64_t valid_rows;                    /* rows that attend to any key: the denominator of a mean */
    int64_t nonfinite_rows;                /* rows whose KL is NaN or infinite */
    double sum;                            /* the KL summed over the valid rows */
} kl_results;

/* Zeroed, resident memory for a result; fails without it. Free it with free(). */
void *kl_allocate_output(size_t size, const char *name);

void kl_compute(kl_results *results, const kl_inputs *inputs, const kl_request *request);
void kl_results_free(kl_results *results);

/* Writes --out and --grad: both files or none. */
void kl_outputs_write(const kl_results *results, const kl_inputs *inputs, const kl_request *request);

void kl_report(const kl_results *results, const kl_inputs *inputs, const kl_request *request);

/* The extents of row vectors: [batch, heads, length], or packed [1, heads, total]. */
static inline int64_t kl_row_batches(const skl_problem *problem)
{
    return problem->packed ? 1 : problem->batch;
}

static inline int64_t kl_row_length(const skl_problem *problem)
{
    return problem->packed ? problem->total_q : problem->len_q;
}

static inline int64_t kl_key_length(const skl_problem *problem)
{
    return problem->packed ? problem->total_k : problem->len_k;
}

static inline int64_t kl_row_count(const skl_problem *problem, int64_t heads)
{
    return kl_row_batches(problem) * heads * kl_row_length(problem);
}

static inline bool kl_is_indexer(const skl_problem *problem)
{
    return problem->student == SKL_STUDENT_INDEXER;
}

#endif
