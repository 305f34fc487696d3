#include "cuda/select.h"

#include "base/needs.h"
#include "cuda/common/tensor_map.h"

enum { ELEMENTS_16_BYTES = 8 }; /* 16-bit elements in a 16-byte copy */

/* ---- Which kernel does a problem ----------------------------------------------------------------------------- */

bool skl_cuda_runs_on(const skl_cuda_kernel *kernel, int capability)
{
    return capability >= kernel->capability && capability < kernel->capability_end;
}

static bool fits_copies(int64_t dim)
{
    return dim % ELEMENTS_16_BYTES == 0;
}

static bool fits_attention(const skl_cuda_kernel *kernel, const skl_problem *p)
{
    const int64_t length = skl_max(p->len_q, p->len_k);
    return kernel->forward != NULL && skl_group_size(p) == 1 && p->dim_t <= kernel->dim_max &&
           p->dim_s <= kernel->dim_max && length < SKL_ROWS_MAX &&
           p->heads_s < INT32_MAX / skl_ceil_div(length + 1, SKL_SM80_TILE_MIN);
}

static bool fits_dense(const skl_cuda_kernel *kernel, const skl_problem *p)
{
    const int64_t heads = skl_max(p->heads_t, skl_query_heads_s(p));
    const int64_t tiles = skl_ceil_div(skl_max(p->len_q, p->len_k) + 1, SKL_INDEX_TILE);
    return kernel->dense_rows != NULL && p->softcap_t == 0.0F && p->dim_s <= kernel->dim_max &&
           p->direction == SKL_KL_FORWARD && tiles < INT32_MAX / SKL_INDEX_TILE &&
           p->batch < INT32_MAX / tiles / heads / SKL_INDEX_BLOCKS;
}

static bool fits_sparse(const skl_cuda_kernel *kernel, const skl_problem *p)
{
    const int64_t heads = skl_max(p->heads_t, skl_query_heads_s(p));
    return kernel->sparse_rows != NULL && p->softcap_t == 0.0F && p->dim_s <= kernel->dim_max &&
           heads < SKL_ROWS_MAX && p->len_k < SKL_ROWS_MAX && p->top_k < SKL_ROWS_MAX;
}

static bool fits_problem(const skl_cuda_kernel *kernel, const skl_problem *p)
{
    if (kernel == skl_cuda_general)
        return true;
    if (p->dtype_t != kernel->dtype || p->dtype_s != kernel->dtype || !fits_copies(p->dim_t) ||
        !fits_copies(p->dim_s))
        return false;
    if (!skl_is_indexer(p))
        return fits_attention(kernel, p);
    return p->top_k > 0 ? fits_sparse(kernel, p) : fits_dense(kernel, p);
}

const skl_cuda_kernel *skl_cuda_select_kernel(const skl_problem *p, int capability, const char *forced)
{
    const skl_cuda_kernel *kernel = NULL;
    for (int32_t i = 0; (kernel = skl_cuda_kernel_at(i)) != NULL; i++)
        if (skl_cuda_runs_on(kernel, capability) && fits_problem(kernel, p) &&
            (forced == NULL || skl_cuda_has_name(kernel, forced)))
            break;
    return kernel;
}

/* The best kernel that needs no TMA. */
static const skl_cuda_kernel *without_tma(const skl_problem *p)
{
    return skl_cuda_select_kernel(p, SKL_CAPABILITY_sm80, NULL);
}

/* Why a problem has no tensor-core kernel; the first reason that applies. */
static const char *why_general(const skl_problem *p)
{
    const bool indexer = skl_is_indexer(p);
    if (p->dtype_t == SKL_F32 || p->dtype_s == SKL_F32)
        return "f32 inputs: no tensor cores; bf16 or f16 has them";
    if (p->dtype_t != p->dtype_s)
        return "teacher and student have different types: no tensor cores";
    if (!fits_copies(p->dim_t) || !fits_copies(p->dim_s))
        return "a head size is not a multiple of 8: no tensor cores";
    if (!indexer && skl_group_size(p) > 1)
        return "heads_t > heads_s: teacher groups have no tensor cores yet";
    if (indexer && p->softcap_t != 0.0F)
        return "softcap_t of an indexer's teacher: no tensor cores";
    if (indexer && p->top_k == 0 && p->direction == SKL_KL_REVERSE)
        return "reverse KL of a dense indexer: no tensor cores";
    if (!indexer && skl_max(p->dim_t, p->dim_s) > 256)
        return "a head size above 256: no tensor cores";
    if (indexer && p->dim_s > SKL_INDEX_DIM_MAX)
        return "dim_s above 256: no tensor cores";
    return "sizes beyond 32-bit tile numbers: no tensor cores";
}

static const char *why_kernel(const skl_plan *plan, const skl_cuda_kernel *kernel)
{
    if (plan->forced_by != NULL)
        return "the kernel was named by the caller";
    return kernel == skl_cuda_general ? why_general(&plan->problem) : "best kernel for this type, head size and GPU";
}

/* ---- Workspace ---------------------------------------------------------------------------------------------- */

static size_t larger(size_t a, size_t b)
{
    return a > b ? a : b;
}

/* LSEs of a teacher group for each block of a general forward. */
static size_t group_lse_size(const skl_plan *plan)
{
    return (size_t)plan->sm_count * SKL_GENERAL_BLOCKS_PER_SM * (size_t)skl_group_size(&plan->problem) *
           SKL_GENERAL_TILE * sizeof(skl_lse2);
}

static bool computes_gradients(skl_op op)
{
    return op == SKL_OP_BACKWARD || op == SKL_OP_FORWARD_BACKWARD;
}

/* f32 sums of dk, unless they are dk itself: those of the larger side. */
static size_t dk_sums_size(const skl_problem *p)
{
    if (p->grad_f32)
        return 0;
    const int64_t rows = p->packed ? p->total_k : p->batch * p->len_k;
    const int64_t of_teacher = p->gradients & SKL_DK_T ? p->key_heads_t * p->dim_t : 0;
    const int64_t of_student = p->gradients & SKL_DK_S ? p->key_heads_s * p->dim_s : 0;
    return (size_t)rows * (size_t)skl_max(of_teacher, of_student) * sizeof(float);
}

static size_t attention_workspace_size(const skl_plan *plan, const skl_cuda_kernel *kernel, skl_op op)
{
    const size_t split_states = kernel != skl_cuda_general && op != SKL_OP_BACKWARD
                                    ? (size_t)plan->sm_count * SKL_SPLIT_ROWS_MAX * sizeof(skl_row_state)
                                    : 0;
    const size_t dk_sums =
        kernel->fused != NULL && computes_gradients(op) && !plan->deterministic ? dk_sums_size(&plan->problem) : 0;
    return larger(larger(group_lse_size(plan), split_states), dk_sums);
}

static skl_sparse_layout sparse_layout_of(const skl_plan *plan, bool gradients, bool with_teacher)
{
    const skl_problem *const p = &plan->problem;
    skl_sparse_layout layout = {.chunk = skl_sparse_chunk_of(p),
                                .num_blocks = (int64_t)plan->sm_count * SKL_GENERAL_BLOCKS_PER_SM};
    layout.scores_at = gradients ? layout.chunk.end : 0;
    layout.end = layout.scores_at + (size_t)layout.num_blocks * (size_t)p->top_k * SKL_SPARSE_SCORE_SIZE;
    skl_sparse_plan_memory(&layout, p, with_teacher, p->heads_t / p->key_heads_t, plan->smem_per_block,
                           plan->smem_per_sm);
    return layout;
}

/* Enough for the general kernel too: it does what strides keep from tensor cores. */
static size_t indexer_workspace_size(const skl_plan *plan, const skl_cuda_kernel *kernel, skl_op op)
{
    const skl_problem *const p = &plan->problem;
    const bool gradients = computes_gradients(op);
    size_t size = group_lse_size(plan);
    if (p->top_k > 0) {
        const skl_sparse_layout layout = sparse_layout_of(plan, gradients, true);
        size = larger(size, gradients ? layout.chunk.end : 0);
        return kernel == skl_cuda_general ? size : larger(size, layout.end);
    }
    size = larger(size, gradients ? skl_dense_chunk_of(p, plan->sm_count).end : 0);
    return kernel == skl_cuda_general ? size : larger(size, skl_index_layout_of(p, plan->sm_count, gradients).size);
}

size_t skl_cuda_workspace_size(const skl_plan *plan, skl_op op)
{
    const skl_cuda_kernel *const kernel = plan->kernel;
    return skl_is_indexer(&plan->problem) ? indexer_workspace_size(plan, kernel, op)
                                          : attention_workspace_size(plan, kernel, op);
}

/* ---- Which kernel does a call -------------------------------------------------------------------------------- */

/* What the choice depends on besides the problem. */
typedef struct choice {
    const skl_plan *plan;
    const skl_call *call;
    const skl_cuda_params *params;
    skl_cuda_launches *launches;
    const skl_cuda_kernel *kernel; /* that the call's tensors allow */
    const char *reason;
    bool some_rows, some_keys;
    bool rows, gradients; /* that the call computes */
    bool capped;          /* an argument has a softcap */
} choice;

static bool is_aligned(const skl_input *tensor)
{
    return (uintptr_t)tensor->data % 16 == 0 && tensor->stride_batch % ELEMENTS_16_BYTES == 0 &&
           tensor->stride_head % ELEMENTS_16_BYTES == 0 && tensor->stride_row % ELEMENTS_16_BYTES == 0;
}

/* Why 16-byte copies cannot read the call's tensors; NULL: they can. */
static const char *why_misaligned(const skl_inputs *in)
{
    const struct {
        const skl_input *tensor;
        const char *why;
    } tensors[] = {{&in->q_t, "q_t: address or strides not a multiple of 16 bytes: general kernel"},
                   {&in->k_t, "k_t: address or strides not a multiple of 16 bytes: general kernel"},
                   {&in->q_s, "q_s: address or strides not a multiple of 16 bytes: general kernel"},
                   {&in->k_s, "k_s: address or strides not a multiple of 16 bytes: general kernel"}};
    for (size_t i = 0; i < sizeof tensors / sizeof tensors[0]; i++)
        if (!is_aligned(tensors[i].tensor))
            return tensors[i].why;
    return NULL;
}

static bool is_tma_kernel(const skl_cuda_kernel *kernel)
{
    return kernel->capability == SKL_CAPABILITY_sm90;
}

static bool tma_reads(skl_dtype dtype, const skl_input *tensor, int64_t dim, int64_t heads, skl_tensor_rows shape)
{
    CUtensorMap map;
    const CUresult result = skl_tensor_map(&map, dtype, tensor, dim, heads, shape, SKL_SM90_STAGE_KEYS);
    return result != CUDA_ERROR_INVALID_VALUE && result != CUDA_ERROR_NOT_SUPPORTED;
}

/* Why TMA cannot address the call's tensors; NULL: it can. The descriptors are made and dropped: only the driver
 * knows its limits, and it takes less than a microsecond. */
static const char *why_no_tma(const choice *s)
{
    const skl_problem *const p = &s->plan->problem;
    const skl_inputs *const in = &s->call->inputs;
    const skl_tensor_rows queries = skl_query_rows(p), keys = skl_key_rows(p);
    if (queries.rows == 0 || keys.rows == 0)
        return "no queries or no keys: mma.sync kernel";
    if (!tma_reads(p->dtype_s, &in->q_s, p->dim_s, skl_query_heads_s(p), queries) ||
        !tma_reads(p->dtype_s, &in->k_s, p->dim_s, p->key_heads_s, keys))
        return "TMA cannot address q_s or k_s: mma.sync kernel";
    if (skl_is_indexer(p) && skl_only_lse_s(s->call))
        return NULL;
    if (!tma_reads(p->dtype_t, &in->q_t, p->dim_t, p->heads_t, queries) ||
        !tma_reads(p->dtype_t, &in->k_t, p->dim_t, p->key_heads_t, keys))
        return "TMA cannot address q_t or k_t: mma.sync kernel";
    return NULL;
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

static skl_cuda_params params_of(const skl_problem *p, const skl_call *call)
{
    const bool reverse = p->direction == SKL_KL_REVERSE;
    const skl_side teacher = skl_teacher_of(p, call), student = skl_student_of(p, call);
    const skl_cuda_params params = {.problem = *p,
                                    .call = *call,
                                    .a = argument_of(reverse ? &student : &teacher),
                                    .b = argument_of(reverse ? &teacher : &student)};
    return params;
}

static skl_cuda_launch *add(const choice *s, const char *step, const skl_cuda_kernel *kernel,
                            skl_cuda_launcher launcher, const char *variant, const char *reason)
{
    skl_cuda_launch *const launch = &s->launches->at[s->launches->count++];
    *launch = (skl_cuda_launch){.step = step,
                                .kernel = kernel->name,
                                .variant = variant,
                                .launcher = launcher,
                                .sm_count = s->plan->sm_count,
                                .num_splits = 1,
                                .head_group = SKL_HEAD_GROUP_MAX,
                                .rows_known = s->gradients && s->rows,
                                .reason = reason};
    return launch;
}

/* ---- Attention: forward -------------------------------------------------------------------------------------- */

/* Every row attends to every key of its sequence: no window ends before the keys do. */
static bool has_no_window(const skl_problem *p)
{
    return skl_is_unlimited(p->window_left) && skl_is_unlimited(p->window_right);
}

static int64_t query_tiles(const skl_problem *p, int64_t tile_rows)
{
    return p->batch * p->heads_s * skl_ceil_div(p->len_q, tile_rows);
}

/* Heads whose keys, and what else is streamed with them, fill half of the L2 cache: with more of them at once they
 * are read from memory again for every wave of tiles, and dk sums are read and written there. But where tiles differ
 * in length, each group begins with its longest ones: there may be several groups only where the longest tile is a
 * small part of an SM's work.
 *
 * `bytes_a`, `bytes_b`: per element of an argument's keys, with what else is streamed for it. */
static int32_t head_group_for(const choice *s, int64_t tile_rows, int64_t bytes_a, int64_t bytes_b)
{
    const int64_t l2_share = (int64_t)25 << 20, small_part = 32;
    const skl_problem *const p = &s->plan->problem;
    const skl_cuda_argument *const a = &s->params->a, *const b = &s->params->b;
    if (!has_no_window(p) && query_tiles(p, tile_rows) < 2 * small_part * s->plan->sm_count)
        return SKL_HEAD_GROUP_MAX;
    const int64_t size_a = p->len_k * a->dim * bytes_a, size_b = p->len_k * b->dim * bytes_b;
    const int64_t head_size = size_a / a->heads_per_key + size_b / b->heads_per_key;
    return (int32_t)skl_max(1, skl_min(SKL_HEAD_GROUP_MAX, l2_share / skl_max(1, head_size)));
}

/* As many splits as `blocks` allow, with enough keys for each. */
static int32_t num_splits_for(const skl_problem *p, int64_t tile_rows, int64_t blocks)
{
    const int64_t keys_min = 256;
    return (int32_t)skl_max(1, skl_min(blocks / query_tiles(p, tile_rows), p->len_k / keys_min));
}

/* Blocks that keep an SM busy on Hopper, one at a time. A one-sided mask leaves tiles half of the longest one's keys
 * on average: then two, or the longest tile takes as long as all of them together. */
static int64_t blocks_to_fill(const skl_problem *p)
{
    const bool one_sided = skl_is_unlimited(p->window_left) != skl_is_unlimited(p->window_right);
    return one_sided && 2 * p->len_q > p->len_k ? 2 : 1;
}

/* Resident blocks need tiles of equal length, more tiles than SMs, and more keys than the pipeline holds. */
static bool is_persistent(const choice *s)
{
    const skl_problem *const p = &s->plan->problem;
    const int64_t dim = s->kernel->dim_max, tiles = query_tiles(p, SKL_SM90_FORWARD_ROWS(dim));
    const int64_t keys = skl_min(p->len_k, s->call->keys.end) - skl_max(0, s->call->keys.begin);
    return dim <= SKL_SM90_NARROW_DIM_MAX && has_no_window(p) && !p->packed && s->call->inputs.key_lengths == NULL &&
           keys > SKL_SM90_FORWARD_STAGES(dim) * SKL_SM90_STAGE_KEYS && tiles > s->plan->sm_count &&
           tiles < SKL_ROWS_MAX;
}

static void set_splits(skl_cuda_launch *launch, const skl_problem *p, int64_t tile_rows, int64_t blocks)
{
    launch->num_splits = num_splits_for(p, tile_rows, blocks);
    if (launch->num_splits == 1)
        return;
    launch->workspace_size =
        (size_t)(query_tiles(p, tile_rows) * launch->num_splits * tile_rows) * sizeof(skl_row_state);
    launch->reason = "too few query tiles to fill the GPU: their keys are split";
}

static void add_forward(const choice *s)
{
    const skl_problem *const p = &s->plan->problem;
    const skl_cuda_kernel *const kernel = s->kernel;
    skl_cuda_launch *const launch = add(s, "forward", kernel, kernel->forward, SKL_VARIANT_TILES, s->reason);
    if (kernel == skl_cuda_general) {
        const bool groups = skl_group_size(p) > 1;
        launch->variant = groups ? SKL_VARIANT_GROUPS : SKL_VARIANT_GRID_STRIDE;
        launch->workspace_size = groups ? group_lse_size(s->plan) : 0;
    } else if (!is_tma_kernel(kernel)) {
        const int64_t blocks_per_sm = skl_min(kernel->blocks_per_sm(), SKL_SM80_BLOCKS_PER_SM_MAX);
        set_splits(launch, p, SKL_SM80_FORWARD_ROWS(kernel->dim_max), s->plan->sm_count * blocks_per_sm);
    } else {
        const int64_t tile_rows = SKL_SM90_FORWARD_ROWS(kernel->dim_max);
        launch->head_group = head_group_for(s, tile_rows, 2, 2);
        launch->persistent = !s->capped && is_persistent(s);
        if (s->capped)
            launch->variant = SKL_VARIANT_SOFTCAP;
        if (launch->persistent)
            launch->variant = SKL_VARIANT_PERSISTENT;
        else
            set_splits(launch, p, tile_rows, s->plan->sm_count * blocks_to_fill(p));
    }
}

/* ---- Attention: backward ------------------------------------------------------------------------------------- */

/* One side of the KL, and what is wanted of it. */
typedef struct side_request {
    skl_side side;
    bool of_teacher, of_b;
    bool dq, dk;
} side_request;

static side_request request_of(const choice *s, bool of_teacher)
{
    const skl_problem *const p = &s->plan->problem;
    side_request request = {.side = of_teacher ? skl_teacher_of(p, s->call) : skl_student_of(p, s->call),
                            .of_teacher = of_teacher,
                            .of_b = (p->direction == SKL_KL_REVERSE) == of_teacher};
    request.dq = s->gradients && request.side.dq->data != NULL;
    request.dk = s->gradients && request.side.dk->data != NULL;
    return request;
}

/* Where a fused backward adds up dk. */
static skl_output dk_sums_of(const choice *s, const side_request *request)
{
    const skl_problem *const p = &s->plan->problem;
    if (request->side.dk->data == NULL || request->side.grad_dtype == SKL_F32)
        return *request->side.dk;
    return skl_output_contiguous(s->call->workspace, request->side.key_heads, p->packed ? p->total_k : p->len_k,
                                 request->side.dim);
}

static bool tma_adds_to(const choice *s, const side_request *request)
{
    const skl_output sums = dk_sums_of(s, request);
    /* Workspace is aligned and contiguous; its address is not known when a plan is explained. */
    const skl_input tensor = {request->side.grad_dtype == SKL_F32 ? sums.data : (const void *)256, sums.stride_batch,
                              sums.stride_head, sums.stride_row};
    return tma_reads(SKL_F32, &tensor, request->side.dim, request->side.key_heads, skl_key_rows(&s->plan->problem));
}

/* Why dq and dk of a side do not come out of one kernel; NULL: they do. */
static const char *why_not_fused(const choice *s, const side_request *request)
{
    if (s->kernel->fused == NULL)
        return s->reason;
    if (!request->of_b && s->kernel->dtype == SKL_F16)
        return "f16 gradients of the first argument have no bound: separate dq and dk";
    if (s->plan->deterministic)
        return "deterministic: dk has a separate kernel";
    if (!s->some_rows || !s->some_keys)
        return "no queries or no keys: separate dq and dk";
    if (request->dk && !tma_adds_to(s, request))
        return "TMA cannot add to dk: separate dq and dk";
    return NULL;
}

static const skl_cuda_kernel *dq_kernel_of(const choice *s, const side_request *request)
{
    const bool f16_of_a = !request->of_b && s->kernel->dtype == SKL_F16;
    /* The fused kernel computes dq alone as well. */
    return s->kernel->dq != NULL || !f16_of_a ? s->kernel : without_tma(&s->plan->problem);
}

/* The kernel that computes dq or both gradients of B meets everything that the KL is made of. */
static bool gives_kl(const choice *s, const side_request *request, bool fused, bool alone)
{
    return s->gradients && s->rows && alone && request->of_b && (request->dq || request->dk) &&
           is_tma_kernel(s->kernel) && (fused || (s->some_keys && request->dq));
}

/* Keys of the side have their f32 dk sums streamed with them. */
static int32_t fused_head_group(const choice *s, const side_request *request)
{
    const int64_t keys = 2, keys_and_sums = 2 + 4;
    return head_group_for(s, SKL_SM90_BACKWARD_ROWS, request->of_b ? keys : keys_and_sums,
                          request->of_b ? keys_and_sums : keys);
}

static void add_dq(const choice *s, const side_request *request, const char *reason, bool kl)
{
    const skl_cuda_kernel *const kernel = dq_kernel_of(s, request);
    const bool fused = kernel->dq == NULL, softcap = is_tma_kernel(kernel) && s->capped;
    const char *const variant = fused     ? (softcap ? SKL_VARIANT_FUSED_SOFTCAP : SKL_VARIANT_FUSED)
                                : softcap ? SKL_VARIANT_DQ_SOFTCAP
                                          : SKL_VARIANT_DQ;
    skl_cuda_launch *const launch =
        add(s, request->of_teacher ? "dq_t" : "dq_s", kernel, fused ? kernel->fused : kernel->dq, variant, reason);
    launch->teacher_side = request->of_teacher;
    launch->kl_in_backward = kl;
    if (fused)
        launch->head_group = fused_head_group(s, request);
}

static void add_dk(const choice *s, const side_request *request, const char *reason)
{
    const bool softcap = is_tma_kernel(s->kernel) && s->capped;
    add(s, request->of_teacher ? "dk_t" : "dk_s", s->kernel, s->kernel->dk,
        softcap ? SKL_VARIANT_DK_SOFTCAP : SKL_VARIANT_DK, reason)
        ->teacher_side = request->of_teacher;
}

static void add_fused(const choice *s, const side_request *request, bool kl)
{
    skl_cuda_launch *const launch =
        add(s, request->of_teacher ? "dq_t and dk_t" : "dq_s and dk_s", s->kernel, s->kernel->fused,
            s->capped ? SKL_VARIANT_FUSED_SOFTCAP : SKL_VARIANT_FUSED, s->reason);
    launch->teacher_side = request->of_teacher;
    launch->kl_in_backward = kl;
    launch->dk_sums = dk_sums_of(s, request);
    launch->workspace_size = request->dk && request->side.grad_dtype != SKL_F32 ? dk_sums_size(&s->plan->problem) : 0;
    launch->head_group = fused_head_group(s, request);
}

static void select_attention(choice *s)
{
    const side_request student = request_of(s, false), teacher = request_of(s, true);
    const bool of_s = student.dq || student.dk, of_t = teacher.dq || teacher.dk;
    const char *const split_s = why_not_fused(s, &student), *const split_t = why_not_fused(s, &teacher);
    const bool kl_s = gives_kl(s, &student, split_s == NULL, !of_t);
    const bool kl_t = gives_kl(s, &teacher, split_t == NULL, !of_s);
    if (s->rows && !kl_s && !kl_t && s->some_rows)
        add_forward(s);
    if (of_s && split_s == NULL)
        add_fused(s, &student, kl_s);
    if (of_t && split_t == NULL)
        add_fused(s, &teacher, kl_t);
    if (student.dq && split_s != NULL && s->some_rows)
        add_dq(s, &student, split_s, kl_s);
    if (teacher.dq && split_t != NULL && s->some_rows)
        add_dq(s, &teacher, split_t, kl_t);
    if (student.dk && split_s != NULL && s->some_keys)
        add_dk(s, &student, split_s);
    if (teacher.dk && split_t != NULL && s->some_keys)
        add_dk(s, &teacher, split_t);
}

/* ---- Indexer ------------------------------------------------------------------------------------------------- */

static void add_indexer(const choice *s, const char *step, bool gradients)
{
    const skl_problem *const p = &s->plan->problem;
    const skl_cuda_kernel *const kernel = s->kernel;
    const bool sparse = p->top_k > 0;
    const skl_cuda_launcher rows = sparse ? kernel->sparse_rows : kernel->dense_rows;
    const skl_cuda_launcher grads = sparse ? kernel->sparse_gradients : kernel->dense_gradients;
    skl_cuda_launch *const launch = add(s, step, kernel, gradients ? grads : rows,
                                        gradients ? SKL_VARIANT_GRADIENTS : SKL_VARIANT_ROWS, s->reason);
    if (sparse)
        launch->sparse = sparse_layout_of(s->plan, gradients, !skl_only_lse_s(s->call));
    if (sparse && kernel != skl_cuda_general) {
        launch->variant = launch->sparse.resident ? SKL_VARIANT_RESIDENT : SKL_VARIANT_STREAMED;
        launch->workspace_size = launch->sparse.end;
    } else if (sparse) {
        launch->workspace_size = gradients ? launch->sparse.chunk.end : group_lse_size(s->plan);
    } else if (kernel != skl_cuda_general) {
        launch->strips = skl_index_layout_of(p, s->plan->sm_count, gradients);
        launch->num_splits = launch->strips.num_splits;
        launch->workspace_size = launch->strips.size;
    } else {
        launch->dense = skl_dense_chunk_of(p, s->plan->sm_count);
        launch->workspace_size = gradients ? launch->dense.end : group_lse_size(s->plan);
    }
}

static void select_indexer(choice *s)
{
    const skl_gradients *const grads = &s->call->gradients;
    const bool of_queries = s->gradients && s->some_rows && (grads->dq_s.data != NULL || grads->dw_s.data != NULL);
    const bool of_keys = s->gradients && s->some_keys && grads->dk_s.data != NULL;
    /* On tensor cores one launch gives gradients and rows. */
    const bool rows_in_gradients = s->kernel != skl_cuda_general && (of_queries || of_keys);
    if (s->rows && s->some_rows && !rows_in_gradients)
        add_indexer(s, "forward", false);
    if (of_queries || of_keys)
        add_indexer(s, rows_in_gradients && s->rows ? "forward and gradients" : "gradients", true);
}

void skl_cuda_select(const skl_plan *plan, const skl_call *call, skl_cuda_params *params, skl_cuda_launches *launches)
{
    const skl_problem *const p = &plan->problem;
    *params = params_of(p, call);
    launches->count = 0;
    choice s = {.plan = plan,
                .call = call,
                .params = params,
                .launches = launches,
                .kernel = plan->kernel,
                .some_rows = p->batch > 0 && p->len_q > 0,
                .some_keys = p->batch > 0 && p->len_k > 0,
                .rows = skl_call_has_rows(call),
                .gradients = skl_call_needs(p, call).gradients,
                .capped = params->a.capped || params->b.capped};
    s.reason = why_kernel(plan, s.kernel);
    const char *const misaligned = s.kernel != skl_cuda_general ? why_misaligned(&call->inputs) : NULL;
    if (misaligned != NULL) {
        s.kernel = skl_cuda_general;
        s.reason = misaligned;
    }
    const char *const no_tma = is_tma_kernel(s.kernel) ? why_no_tma(&s) : NULL;
    if (no_tma != NULL) {
        s.kernel = without_tma(p);
        s.reason = no_tma;
    }
    if (p->packed)
        add(&s, "tails", skl_cuda_general, skl_cuda_clear_tails, SKL_VARIANT_CLEAR,
            "rows after the last packed sequence become 0");
    if (skl_is_indexer(p))
        select_indexer(&s);
    else
        select_attention(&s);
}
