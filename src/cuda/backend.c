/* The CUDA backend: chooses kernels, launches them on the caller's stream. It never allocates nor synchronises. */
#include "base/kl_math.h"
#include "base/status.h"
#include "cuda/index_layout.h"
#include "cuda/indexer_plan.h"
#include "cuda/launch.h"

#include <stdbool.h>
#include <stdio.h>
#include <string.h>

/* ---- Devices ------------------------------------------------------------------------------------------------ */

enum { CAPABILITY_MIN = 80, ANY = 1000 };

enum { COPY_ELEMENTS = 8 }; /* 16-bit elements of a 16-byte copy */

enum { GENERAL_RESIDENT = 2 }; /* blocks of a general kernel a multiprocessor */

/* Compute capability of a device, 90 for 9.0; 0 and a reason if there is none. */
static int capability_of(int device, char *reason, size_t reason_size)
{
    int count = 0;
    cudaError_t error = cudaGetDeviceCount(&count);
    if (error != cudaSuccess || count == 0) {
        (void)cudaGetLastError(); /* not sticky: the CPU goes on */
        snprintf(reason, reason_size, "no CUDA device: %s",
                 error != cudaSuccess ? cudaGetErrorString(error) : "none");
        return 0;
    }
    if (device < 0 || device >= count) {
        snprintf(reason, reason_size, "device_index=%d: must be 0..%d", device, count - 1);
        return 0;
    }
    int major = 0, minor = 0;
    error = cudaDeviceGetAttribute(&major, cudaDevAttrComputeCapabilityMajor, device);
    if (error == cudaSuccess)
        error = cudaDeviceGetAttribute(&minor, cudaDevAttrComputeCapabilityMinor, device);
    if (error != cudaSuccess) {
        snprintf(reason, reason_size, "device %d: %s", device, cudaGetErrorString(error));
        return 0;
    }
    return major * 10 + minor;
}

/* ---- Kernels ------------------------------------------------------------------------------------------------ */

/* What does one stage of an indexer. */
typedef struct indexer_kernel {
    skl_cuda_launcher rows;
    skl_cuda_launcher gradients; /* those of dq, dw and dk that are wanted */
    bool rows_in_gradients;      /* and the rows of one pass with them */
    bool (*fits)(const skl_problem *problem);
    size_t (*workspace_size)(const skl_plan *plan, skl_op op); /* also for the general one, if strides are odd */
} indexer_kernel;

typedef struct cuda_kernel {
    const char *name;
    const char *detail;
    int capability;     /* lowest compute capability */
    int capability_end; /* and the first one that it is not for */
    int64_t dim_max;    /* of a tensor-core kernel; 0: every type, size and stride */
    skl_dtype dtype;
    skl_cuda_launcher forward, queries, keys;
    skl_cuda_launcher gradients;          /* dq and dk in one sweep, in any order; may be NULL */
    bool kl_with_queries;                 /* dq of a second argument brings the KL along */
    const indexer_kernel *dense, *sparse; /* NULL: not for indexers */
} cuda_kernel;

/* LSEs of a group of teacher heads for each block of a general forward. */
static size_t lse_size(const skl_plan *plan)
{
    return (size_t)plan->block_count * (size_t)skl_group_size(&plan->problem) * SKL_GENERAL_TILE * sizeof(skl_lse2);
}

static bool has_gradients(skl_op op)
{
    return op == SKL_OP_BACKWARD || op == SKL_OP_FORWARD_BACKWARD;
}

static size_t larger(size_t a, size_t b)
{
    return a > b ? a : b;
}

static size_t general_dense_size(const skl_plan *plan, skl_op op)
{
    const skl_dense_band band = skl_dense_band_of(&plan->problem, plan->block_count / GENERAL_RESIDENT);
    return larger(lse_size(plan), has_gradients(op) ? band.end : 0);
}

static size_t general_sparse_size(const skl_plan *plan, skl_op op)
{
    return larger(lse_size(plan), has_gradients(op) ? skl_list_band_of(&plan->problem).end : 0);
}

static bool fits_any(const skl_problem *problem)
{
    (void)problem;
    return true;
}

static const indexer_kernel general_dense = {skl_cuda_indexer_rows, skl_cuda_indexer_gradients, false, fits_any,
                                             general_dense_size};
static const indexer_kernel general_sparse = {skl_cuda_listed_rows, skl_cuda_listed_gradients, false, fits_any,
                                              general_sparse_size};

/* Both stages on tensor cores. */
static bool fits_tensor_cores(const skl_problem *p, skl_dtype dtype)
{
    return p->dtype_t == dtype && p->dtype_s == dtype && p->softcap_t == 0.0F && p->dim_s <= SKL_INDEX_DIM_MAX &&
           p->dim_t % COPY_ELEMENTS == 0 && p->dim_s % COPY_ELEMENTS == 0;
}

static bool fits_dense(const skl_problem *p, skl_dtype dtype)
{
    const int64_t heads = skl_max(p->heads_t, skl_query_heads_s(p));
    const int64_t tiles = skl_ceil_div(skl_max(p->len_q, p->len_k) + 1, SKL_INDEX_TILE);
    return fits_tensor_cores(p, dtype) && p->direction == SKL_KL_FORWARD && tiles < INT32_MAX / SKL_INDEX_TILE &&
           p->batch < INT32_MAX / tiles / heads / SKL_INDEX_BLOCKS;
}

static bool fits_lists(const skl_problem *p, skl_dtype dtype)
{
    const int64_t heads = skl_max(p->heads_t, skl_query_heads_s(p));
    return fits_tensor_cores(p, dtype) && heads < SKL_SM80_ROWS_MAX && p->len_k < SKL_SM80_ROWS_MAX &&
           p->top_k < SKL_SM80_ROWS_MAX;
}

static bool fits_dense_bf16(const skl_problem *p)
{
    return fits_dense(p, SKL_BF16);
}

static bool fits_dense_f16(const skl_problem *p)
{
    return fits_dense(p, SKL_F16);
}

static bool fits_lists_bf16(const skl_problem *p)
{
    return fits_lists(p, SKL_BF16);
}

static bool fits_lists_f16(const skl_problem *p)
{
    return fits_lists(p, SKL_F16);
}

/* Also for the general kernel: it does what copies cannot read. */
static size_t dense_size(const skl_plan *plan, skl_op op)
{
    const int32_t multiprocessors = plan->block_count / GENERAL_RESIDENT;
    return larger(general_dense_size(plan, op),
                  skl_index_layout_of(&plan->problem, multiprocessors, has_gradients(op)).size);
}

static size_t lists_size(const skl_plan *plan, skl_op op)
{
    const size_t band_size = has_gradients(op) ? skl_list_band_of(&plan->problem).end : 0;
    return larger(general_sparse_size(plan, op), band_size + skl_list_scores_size(&plan->problem, plan->block_count));
}

#define TENSOR_CORES(kernel, type, call, stage)                                                                      \
    {                                                                                                                \
        skl_cuda_##kernel##_##type##_##call##_rows, skl_cuda_##kernel##_##type##_##call##_gradients, true,           \
            fits_##stage##_##type, stage##_size                                                                      \
    }
static const indexer_kernel sm90_dense_bf16 = TENSOR_CORES(sm90, bf16, indexer, dense);
static const indexer_kernel sm80_dense_bf16 = TENSOR_CORES(sm80, bf16, indexer, dense);
static const indexer_kernel sm80_dense_f16 = TENSOR_CORES(sm80, f16, indexer, dense);
static const indexer_kernel sm80_lists_bf16 = TENSOR_CORES(sm80, bf16, lists, lists);
static const indexer_kernel sm80_lists_f16 = TENSOR_CORES(sm80, f16, lists, lists);

#define SM80(type, TYPE, dim)                                                                                        \
    {                                                                                                                \
        "cuda_sm80_" #type "_" #dim, #type ", dim <= " #dim ": mma.sync", 80, ANY, dim, TYPE,                        \
            skl_cuda_sm80_##type##_##dim##_forward, skl_cuda_sm80_##type##_##dim##_queries,                          \
            skl_cuda_sm80_##type##_##dim##_keys, NULL, false, NULL, NULL                                             \
    }
#define SM90(type, TYPE, dim)                                                                                        \
    {                                                                                                                \
        "cuda_sm90_" #type "_" #dim, #type ", dim <= " #dim ": wgmma", 90, 91, dim, TYPE,                            \
            skl_cuda_sm90_##type##_##dim##_forward, skl_cuda_sm90_##type##_##dim##_gradients,                        \
            skl_cuda_sm90_##type##_##dim##_keys, skl_cuda_sm90_##type##_##dim##_gradients, true, NULL, NULL          \
    }
/* Without a sweep. */
#define SM90_SPLIT(type, TYPE, dim)                                                                                  \
    {                                                                                                                \
        "cuda_sm90_" #type "_" #dim, #type ", dim <= " #dim ": wgmma", 90, 91, dim, TYPE,                            \
            skl_cuda_sm90_##type##_##dim##_forward, skl_cuda_sm90_##type##_##dim##_queries,                          \
            skl_cuda_sm90_##type##_##dim##_keys, NULL, true, NULL, NULL                                              \
    }

/* Best first; the general one is last. */
static const cuda_kernel kernels[] = {
    SM90(bf16, SKL_BF16, 64),
    SM90(bf16, SKL_BF16, 128),
    SM90_SPLIT(bf16, SKL_BF16, 192),
    SM90_SPLIT(bf16, SKL_BF16, 256),
    SM90(f16, SKL_F16, 64),
    SM90(f16, SKL_F16, 128),
    SM90_SPLIT(f16, SKL_F16, 192),
    SM90_SPLIT(f16, SKL_F16, 256),
    SM80(bf16, SKL_BF16, 64),
    SM80(bf16, SKL_BF16, 128),
    SM80(bf16, SKL_BF16, 256),
    SM80(f16, SKL_F16, 64),
    SM80(f16, SKL_F16, 128),
    SM80(f16, SKL_F16, 256),
    {"cuda_sm90_bf16_indexer", "bf16 indexers: wgmma, over lists mma.sync", 90, 91, SKL_INDEX_DIM_MAX, SKL_BF16, NULL,
     NULL, NULL, NULL, false, &sm90_dense_bf16, &sm80_lists_bf16},
    {"cuda_sm80_bf16_indexer", "bf16 indexers: mma.sync", 80, ANY, SKL_INDEX_DIM_MAX, SKL_BF16, NULL, NULL, NULL,
     NULL, false, &sm80_dense_bf16, &sm80_lists_bf16},
    {"cuda_sm80_f16_indexer", "f16 indexers: mma.sync", 80, ANY, SKL_INDEX_DIM_MAX, SKL_F16, NULL, NULL, NULL, NULL,
     false, &sm80_dense_f16, &sm80_lists_f16},
    {"cuda_general", "any type, size and stride; f32 arithmetic, 128-row tiles", CAPABILITY_MIN, ANY, 0, SKL_F32,
     skl_cuda_general_forward, skl_cuda_general_queries, skl_cuda_general_keys, NULL, false, &general_dense,
     &general_sparse},
};

enum { KERNEL_COUNT = sizeof kernels / sizeof kernels[0] };

static const cuda_kernel *const general = &kernels[KERNEL_COUNT - 1];

static bool runs_on(const cuda_kernel *kernel, int capability)
{
    return capability >= kernel->capability && capability < kernel->capability_end;
}

/* What a kernel has for the stage of an indexer; NULL: nothing. */
static const indexer_kernel *indexer_of(const cuda_kernel *kernel, const skl_problem *p)
{
    return p->top_k > 0 ? kernel->sparse : kernel->dense;
}

static bool fits_problem(const cuda_kernel *kernel, const skl_problem *p)
{
    const indexer_kernel *const indexer = indexer_of(kernel, p);
    if (skl_is_indexer(p))
        return indexer != NULL && indexer->fits(p);
    if (kernel->dim_max == 0)
        return true;
    if (kernel->forward == NULL)
        return false; /* for indexers only */
    const int64_t length = skl_max(p->len_q, p->len_k);
    return p->dtype_t == kernel->dtype && p->dtype_s == kernel->dtype && skl_group_size(p) == 1 &&
           p->dim_t <= kernel->dim_max && p->dim_s <= kernel->dim_max && p->dim_t % COPY_ELEMENTS == 0 &&
           p->dim_s % COPY_ELEMENTS == 0 && length < SKL_SM80_ROWS_MAX &&
           p->heads_s < INT32_MAX / skl_ceil_div(length + 1, SKL_SM80_TILE_MIN);
}

static bool fits_copies(const skl_input *tensor)
{
    return (uintptr_t)tensor->data % 16 == 0 && tensor->stride_batch % COPY_ELEMENTS == 0 &&
           tensor->stride_head % COPY_ELEMENTS == 0 && tensor->stride_row % COPY_ELEMENTS == 0;
}

/* The plan's kernel, or the general one where strides or addresses are odd. */
static const cuda_kernel *kernel_for(const skl_plan *plan, const skl_inputs *in)
{
    const cuda_kernel *const kernel = plan->kernel;
    const bool even =
        fits_copies(&in->q_t) && fits_copies(&in->k_t) && fits_copies(&in->q_s) && fits_copies(&in->k_s);
    return kernel->dim_max == 0 || even ? kernel : general;
}

static int kernel_at(int32_t index, skl_kernel_info *info)
{
    static _Thread_local char reason[256];
    if (index >= KERNEL_COUNT)
        return 0;
    const cuda_kernel *const kernel = &kernels[index];
    const int capability = capability_of(0, reason, sizeof reason);
    const bool usable = runs_on(kernel, capability);
    if (capability != 0 && !usable)
        snprintf(reason, sizeof reason, "device 0 has compute capability %d.%d, the kernel needs %d.%d",
                 capability / 10, capability % 10, kernel->capability / 10, kernel->capability % 10);
    *info = (skl_kernel_info){kernel->name, SKL_CUDA, usable, usable ? kernel->detail : reason, kernel != general};
    return 1;
}

/* ---- Plan --------------------------------------------------------------------------------------------------- */

/* Bytes of the sums that a sweep adds up apart from the gradient: those of the larger side. */
static size_t sums_size(const cuda_kernel *kernel, const skl_problem *p)
{
    if (kernel->gradients == NULL || p->grad_f32)
        return 0;
    const int64_t rows = p->packed ? p->total_k : p->batch * p->len_k;
    const int64_t of_teacher = p->gradients & SKL_DK_T ? p->key_heads_t * p->dim_t : 0;
    const int64_t of_student = p->gradients & SKL_DK_S ? p->key_heads_s * p->dim_s : 0;
    return (size_t)rows * (size_t)skl_max(of_teacher, of_student) * sizeof(float);
}

static size_t attention_size(const skl_plan *plan, const cuda_kernel *kernel, skl_op op)
{
    const size_t states_size =
        (size_t)plan->block_count / GENERAL_RESIDENT * SKL_PART_ROWS_MAX * sizeof(skl_row_state);
    const bool parts = kernel->dim_max > 0 && op != SKL_OP_BACKWARD;
    const bool sums = has_gradients(op) && !plan->deterministic;
    return larger(larger(lse_size(plan), parts ? states_size : 0), sums ? sums_size(kernel, &plan->problem) : 0);
}

static skl_status plan_cuda(skl_plan *plan, const skl_options *options, const char *forced)
{
    char reason[256];
    const int capability = capability_of(options->device_index, reason, sizeof reason);
    if (capability == 0)
        return skl_fail(SKL_ERROR_DEVICE, "%s", reason);
    const cuda_kernel *chosen = NULL;
    for (int i = 0; i < KERNEL_COUNT && chosen == NULL; i++)
        if (runs_on(&kernels[i], capability) && fits_problem(&kernels[i], &plan->problem) &&
            (forced == NULL || strcmp(forced, kernels[i].name) == 0))
            chosen = &kernels[i];
    if (chosen == NULL && forced != NULL)
        return skl_fail(SKL_ERROR_ARGUMENT,
                        "kernel=%s: no CUDA kernel of this name does this problem here; streamkl info lists them",
                        forced);
    if (chosen == NULL)
        return skl_fail(
            SKL_ERROR_UNSUPPORTED, "device %d has compute capability %d.%d: the kernels of this build need %d.%d",
            options->device_index, capability / 10, capability % 10, CAPABILITY_MIN / 10, CAPABILITY_MIN % 10);
    int multiprocessors = 0;
    const cudaError_t error =
        cudaDeviceGetAttribute(&multiprocessors, cudaDevAttrMultiProcessorCount, options->device_index);
    if (error != cudaSuccess)
        return skl_fail(SKL_ERROR_DEVICE, "device %d: %s", options->device_index, cudaGetErrorString(error));
    plan->kernel = chosen;
    plan->kernel_name = chosen->name;
    plan->device_index = options->device_index;
    plan->block_count = multiprocessors * GENERAL_RESIDENT;
    plan->deterministic = options->deterministic;
    const bool indexer = skl_is_indexer(&plan->problem);
    for (int op = 0; op < SKL_OP_COUNT; op++)
        plan->workspace_size[op] = indexer ? indexer_of(chosen, &plan->problem)->workspace_size(plan, (skl_op)op)
                                           : attention_size(plan, chosen, (skl_op)op);
    return SKL_OK;
}

/* ---- Run ---------------------------------------------------------------------------------------------------- */

static skl_status launch(const skl_plan *plan, const char *step, skl_cuda_launcher launcher,
                         const skl_cuda_params *params)
{
    const cudaError_t error = launcher(params);
    if (error == cudaSuccess)
        return SKL_OK;
    return skl_fail(SKL_ERROR_DEVICE, "%s, %s: %s", plan->kernel_name, step, cudaGetErrorString(error));
}

/* Makes the plan's device current while a call launches, and the caller's again behind it. Also where it is current
 * already: a thread's first cudaSetDevice gives it a context, without which the driver describes no tensor. */
static skl_status enter_device(int device, int *former)
{
    cudaError_t error = cudaGetDevice(former);
    if (error == cudaSuccess)
        error = cudaSetDevice(device);
    if (error == cudaSuccess)
        return SKL_OK;
    return skl_fail(SKL_ERROR_DEVICE, "device %d: %s", device, cudaGetErrorString(error));
}

static void leave_device(int device, int former)
{
    if (former != device)
        (void)cudaSetDevice(former);
}

static skl_cuda_argument argument_of(const skl_side *side)
{
    const bool capped = side->softcap > 0.0F;
    const skl_cuda_argument argument = {.q = *side->q,
                                        .k = *side->k,
                                        .heads_per_key = (int32_t)(side->heads / side->key_heads),
                                        .dim = (int32_t)side->dim,
                                        .capped = capped,
                                        .scale = capped ? side->scale / side->softcap : side->scale * SKL_LOG2E,
                                        .softcap_2 = side->softcap * SKL_LOG2E,
                                        .inverse_softcap_2 = capped ? SKL_LN2 / side->softcap : 0.0F};
    return argument;
}

typedef struct step {
    bool wanted;
    const char *name;
    skl_cuda_launcher launcher;
    int32_t teacher_side;
    const skl_output *sums; /* of a sweep: the key gradient */
} step;

/* Where a sweep adds up a key gradient. */
static skl_output sums_for(const skl_problem *p, const skl_output *dk, const skl_side *side, void *workspace)
{
    if (dk->data == NULL || side->grad_dtype == SKL_F32)
        return *dk;
    const int64_t rows = p->packed ? p->total_k : p->len_k;
    return skl_output_contiguous(workspace, side->key_heads, rows, side->dim);
}

static skl_cuda_params params_of(const skl_plan *plan, const skl_call *call, bool rows_known)
{
    const skl_problem *const p = &plan->problem;
    const bool reverse = p->direction == SKL_KL_REVERSE;
    const skl_side teacher = skl_teacher_of(p, call), student = skl_student_of(p, call);
    const skl_cuda_params params = {.problem = *p,
                                    .call = *call,
                                    .one = argument_of(reverse ? &student : &teacher),
                                    .two = argument_of(reverse ? &teacher : &student),
                                    .rows_known = rows_known,
                                    .block_count = plan->block_count,
                                    .multiprocessors = plan->block_count / GENERAL_RESIDENT,
                                    .section = SKL_SECTION_MAX,
                                    .scratch = call->workspace};
    return params;
}

static skl_status run_steps(const skl_plan *plan, skl_cuda_params *params, const step *steps, size_t count)
{
    const skl_problem *const p = &plan->problem;
    const skl_side teacher = skl_teacher_of(p, &params->call), student = skl_student_of(p, &params->call);
    const skl_output none = {NULL, 0, 0, 0};
    skl_status status = SKL_OK;
    for (size_t i = 0; i < count && status == SKL_OK; i++) {
        const step *const now = &steps[i];
        params->teacher_side = now->teacher_side;
        params->sums = now->sums == NULL
                           ? none
                           : sums_for(p, now->sums, now->teacher_side ? &teacher : &student, params->scratch);
        if (now->wanted)
            status = launch(plan, now->name, now->launcher, params);
    }
    return status;
}

static skl_status run_attention(const skl_plan *plan, const skl_call *call)
{
    const skl_problem *const p = &plan->problem;
    const cuda_kernel *const kernel = kernel_for(plan, &call->inputs);
    const skl_gradients *const grads = &call->gradients;
    const bool reverse = p->direction == SKL_KL_REVERSE;
    const bool some_rows = p->batch > 0 && p->len_q > 0;
    const bool some_keys = p->batch > 0 && p->len_k > 0;
    const bool sweeps = kernel->gradients != NULL && !plan->deterministic && some_rows && some_keys;
    const bool of_t = grads->dq_t.data != NULL || grads->dk_t.data != NULL;
    const bool of_s = grads->dq_s.data != NULL || grads->dk_s.data != NULL;

    const bool gradients = has_gradients(call->op);
    const bool rows_wanted = call->rows.kl.data != NULL || call->rows.dot_t.data != NULL;
    const bool rows = !gradients || (call->op == SKL_OP_FORWARD_BACKWARD && rows_wanted);
    /* What gives the second argument's gradients meets all that a KL is made of; the first's need it. */
    const bool of_queries = some_keys && (reverse ? grads->dq_t.data : grads->dq_s.data) != NULL;
    const bool kl_in_sweep = gradients && rows && (reverse ? of_t && !of_s : of_s && !of_t) &&
                             (sweeps || (kernel->kl_with_queries && of_queries));
    const step steps[] = {
        {p->packed != 0, "tails", skl_cuda_clear_tails, 0, NULL},
        {rows && !kl_in_sweep && some_rows, "forward", kernel->forward, 0, NULL},
        {sweeps && of_s, "dq_s and dk_s", kernel->gradients, 0, &grads->dk_s},
        {sweeps && of_t, "dq_t and dk_t", kernel->gradients, 1, &grads->dk_t},
        {!sweeps && some_rows && grads->dq_s.data != NULL, "dq_s", kernel->queries, 0, NULL},
        {!sweeps && some_rows && grads->dq_t.data != NULL, "dq_t", kernel->queries, 1, NULL},
        {!sweeps && some_keys && grads->dk_s.data != NULL, "dk_s", kernel->keys, 0, NULL},
        {!sweeps && some_keys && grads->dk_t.data != NULL, "dk_t", kernel->keys, 1, NULL},
    };
    skl_cuda_params params = params_of(plan, call, gradients && rows);
    params.kl_in_sweep = kl_in_sweep;
    return run_steps(plan, &params, steps, sizeof steps / sizeof steps[0]);
}

static skl_status run_indexer(const skl_plan *plan, const skl_call *call)
{
    const skl_problem *const p = &plan->problem;
    const indexer_kernel *const kernel = indexer_of(kernel_for(plan, &call->inputs), p);
    const bool some_rows = p->batch > 0 && p->len_q > 0;
    const bool some_keys = p->batch > 0 && p->len_k > 0;
    const bool gradients = has_gradients(call->op);
    const bool of_queries = some_rows && (call->gradients.dq_s.data != NULL || call->gradients.dw_s.data != NULL);
    const bool of_keys = some_keys && call->gradients.dk_s.data != NULL;
    const bool rows_wanted =
        call->rows.kl.data != NULL || call->rows.cross_entropy.data != NULL || call->rows.entropy.data != NULL;
    const bool rows = !gradients || (call->op == SKL_OP_FORWARD_BACKWARD && rows_wanted);
    const bool rows_first = !(kernel->rows_in_gradients && (of_queries || of_keys));
    const step steps[] = {
        {p->packed != 0, "tails", skl_cuda_clear_tails, 0, NULL},
        {rows && some_rows && rows_first, "forward", kernel->rows, 0, NULL},
        {of_queries || of_keys, "gradients", kernel->gradients, 0, NULL},
    };
    skl_cuda_params params = params_of(plan, call, gradients && rows);
    return run_steps(plan, &params, steps, sizeof steps / sizeof steps[0]);
}

static skl_status run(const skl_plan *plan, const skl_call *call)
{
    int former = 0;
    skl_status status = enter_device(plan->device_index, &former);
    if (status != SKL_OK)
        return status;
    status = skl_is_indexer(&plan->problem) ? run_indexer(plan, call) : run_attention(plan, call);
    leave_device(plan->device_index, former);
    return status;
}

static skl_status states_merge(const skl_plan *plan, skl_row_state *into, const skl_row_state *from,
                               skl_stream stream)
{
    int former = 0;
    const skl_status status = enter_device(plan->device_index, &former);
    if (status != SKL_OK)
        return status;
    const cudaError_t error = skl_cuda_states_merge(skl_state_count(&plan->problem), into, from, stream);
    leave_device(plan->device_index, former);
    return error == cudaSuccess ? SKL_OK : skl_fail(SKL_ERROR_DEVICE, "states, merge: %s", cudaGetErrorString(error));
}

static skl_status states_finish(const skl_plan *plan, const skl_call *call)
{
    if (skl_state_count(&plan->problem) == 0)
        return SKL_OK;
    int former = 0;
    skl_status status = enter_device(plan->device_index, &former);
    if (status != SKL_OK)
        return status;
    const skl_cuda_params params = {.problem = plan->problem, .call = *call};
    status = launch(plan, "finish", skl_cuda_states_finish, &params);
    leave_device(plan->device_index, former);
    return status;
}

static skl_status explain(const skl_plan *plan, const skl_call *call, skl_text *text)
{
    static const char *const steps[SKL_OP_COUNT] = {"forward", "backward", "forward and backward", "partial states"};
    skl_text_add(text, "%s: %s, %zu bytes of workspace (%s%s)\n", steps[call->op], plan->kernel_name,
                 plan->workspace_size[call->op], plan->forced_by != NULL ? plan->forced_by : "best kernel",
                 plan->forced_by != NULL ? " names the kernel" : " that fits the problem");
    return SKL_OK;
}

const skl_backend skl_cuda_backend = {SKL_CUDA, plan_cuda, run, states_merge, states_finish, explain, kernel_at};
