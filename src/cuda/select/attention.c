/* Launches of attention with one teacher head per student head, and the parts that teacher groups share. */
#include "cuda/select/choice.h"

/* ---- Attention: forward -------------------------------------------------------------------------------------- */

/* Every row attends to every key of its sequence: no window ends before the keys do. */
static bool has_no_window(const skl_problem *p)
{
    return skl_is_unlimited(p->window_left) && skl_is_unlimited(p->window_right) && !p->row_bounds;
}

static int64_t query_tiles(const skl_problem *p, int64_t tile_rows)
{
    return p->batch * p->heads_s * skl_ceil_div(p->len_q, tile_rows);
}

int32_t skl_select_head_group_of(const choice *s, int64_t tiles, int64_t head_size)
{
    const int64_t l2_share = (int64_t)25 << 20, small_part = 32, few_heads_share = (int64_t)256 << 20;
    const bool few_tiles = !has_no_window(&s->plan->problem) && tiles < 2 * small_part * s->plan->sm_count;
    /* Where tiles differ in length and are few, the last group would end late. A few heads at a time are enough to
     * avoid that, and better than all of them if the rows of one do not fit. */
    if (few_tiles && head_size <= 2 * l2_share)
        return SKL_HEAD_GROUP_MAX;
    return (int32_t)skl_max(
        1, skl_min(SKL_HEAD_GROUP_MAX, (few_tiles ? few_heads_share : l2_share) / skl_max(1, head_size)));
}

int32_t skl_select_head_group_for(const choice *s, int64_t tile_rows, int64_t bytes_a, int64_t bytes_b)
{
    const skl_problem *const p = &s->plan->problem;
    const skl_cuda_argument *const a = &s->params->a, *const b = &s->params->b;
    const int64_t size_a = p->len_k * a->dim * bytes_a, size_b = p->len_k * b->dim * bytes_b;
    return skl_select_head_group_of(s, query_tiles(p, tile_rows),
                                    size_a * skl_group_size(p) / a->heads_per_key + size_b / b->heads_per_key);
}

/* As many splits as `blocks` allow, with enough keys for each. */
static int32_t num_splits_for(const skl_problem *p, int64_t tile_rows, int64_t blocks)
{
    const int64_t keys_min = 256;
    return (int32_t)skl_max(1, skl_min(blocks / query_tiles(p, tile_rows), p->len_k / keys_min));
}

int64_t skl_select_blocks_to_fill(const skl_problem *p)
{
    const bool one_sided = skl_is_unlimited(p->window_left) != skl_is_unlimited(p->window_right);
    return (one_sided || p->row_bounds) && 2 * p->len_q > p->len_k ? 2 : 1;
}

/* Head sizes of both arguments, as the kernel pads them. */
static int64_t dims_of(const skl_cuda_kernel *kernel)
{
    return kernel->dim_max + kernel->small_dim_max;
}

static bool has_narrow_forward(const skl_cuda_kernel *kernel)
{
    return dims_of(kernel) <= SKL_SM90_NARROW_DIMS_MAX && !skl_select_has_two_terms(kernel);
}

/* Resident blocks need tiles of equal length, more tiles than SMs, and more keys than the pipeline holds. */
static bool is_persistent(const choice *s)
{
    const skl_problem *const p = &s->plan->problem;
    const int64_t dims = dims_of(s->kernel), tiles = query_tiles(p, SKL_SM90_FORWARD_ROWS(dims));
    const int64_t keys = skl_min(p->len_k, s->call->keys.end) - skl_max(0, s->call->keys.begin);
    return has_narrow_forward(s->kernel) && has_no_window(p) && !p->packed && s->call->inputs.key_lengths == NULL &&
           keys > SKL_SM90_FORWARD_STAGES(dims) * SKL_SM90_STAGE_KEYS && tiles > s->plan->sm_count &&
           tiles < SKL_ROWS_MAX;
}

/* Two blocks of few queries per SM: one computes while the other begins or ends, and a mask cuts fewer pairs. */
static bool is_paired(const choice *s)
{
    return has_narrow_forward(s->kernel) && s->plan->problem.len_k <= SKL_SM90_PAIRED_KEYS_MAX(dims_of(s->kernel));
}

/* Resident blocks, two per SM: for more tiles than these with few keys, if all sequences have the same mask. Tiles of
 * all heads and sequences run together, so their keys have to fit into the L2 cache. */
static bool is_short(const choice *s)
{
    const skl_problem *const p = &s->plan->problem;
    const skl_cuda_argument *const a = &s->params->a, *const b = &s->params->b;
    const int64_t l2_size = (int64_t)40 << 20, tiles = query_tiles(p, SKL_SM90_PAIRED_ROWS);
    const int64_t row_size = (p->heads_s / a->heads_per_key * a->dim + p->heads_s / b->heads_per_key * b->dim) * 2;
    return p->len_k <= SKL_SM90_SHORT_KEYS_MAX(dims_of(s->kernel)) && s->call->op != SKL_OP_PARTIAL && !p->packed &&
           !p->row_bounds && s->call->inputs.key_lengths == NULL && tiles > 2 * s->plan->sm_count &&
           tiles < SKL_ROWS_MAX && p->batch * p->len_k * row_size <= l2_size;
}

void skl_select_set_splits(skl_cuda_launch *launch, const skl_problem *p, int64_t tile_rows, int64_t blocks)
{
    launch->num_splits = num_splits_for(p, tile_rows, blocks);
    if (launch->num_splits == 1)
        return;
    launch->workspace_size =
        (size_t)(query_tiles(p, tile_rows) * launch->num_splits * tile_rows) * sizeof(skl_row_state);
    launch->reason = "too few query tiles to fill the GPU: their keys are split";
}

void skl_select_add_forward(const choice *s)
{
    const skl_problem *const p = &s->plan->problem;
    const skl_cuda_kernel *const kernel = s->kernel;
    skl_cuda_launch *const launch =
        skl_select_add(s, "forward", kernel, kernel->forward, SKL_VARIANT_TILES, s->reason);
    if (kernel == skl_cuda_general) {
        const bool groups = skl_group_size(p) > 1;
        launch->variant = groups ? SKL_VARIANT_GROUPS : SKL_VARIANT_GRID_STRIDE;
        launch->workspace_size = groups ? skl_select_group_lse_size(s->plan) : 0;
    } else if (!skl_select_is_tma_kernel(kernel)) {
        const int64_t blocks_per_sm = skl_min(kernel->blocks_per_sm(), SKL_SM80_BLOCKS_PER_SM_MAX);
        skl_select_set_splits(launch, p, SKL_SM80_FORWARD_ROWS(kernel->dim_max), s->plan->sm_count * blocks_per_sm);
    } else {
        const bool equal_tiles = !s->capped && is_persistent(s);
        launch->paired = !s->capped && !equal_tiles && is_paired(s);
        launch->persistent = equal_tiles || (launch->paired && is_short(s));
        const int64_t tile_rows = launch->paired               ? SKL_SM90_PAIRED_ROWS
                                  : has_narrow_forward(kernel) ? SKL_SM90_FORWARD_ROWS(dims_of(kernel))
                                                               : SKL_SM90_WIDE_ROWS;
        const int64_t blocks_per_sm = launch->paired ? 2 : 1;
        launch->head_group = skl_select_head_group_for(s, tile_rows, 2, 2);
        launch->variant = s->capped            ? SKL_VARIANT_SOFTCAP
                          : launch->persistent ? launch->paired ? SKL_VARIANT_SHORT : SKL_VARIANT_PERSISTENT
                          : launch->paired     ? SKL_VARIANT_PAIRED
                                               : SKL_VARIANT_TILES;
        if (!launch->persistent)
            skl_select_set_splits(launch, p, tile_rows,
                                  s->plan->sm_count * blocks_per_sm * skl_select_blocks_to_fill(p));
    }
}

/* ---- Attention: backward ------------------------------------------------------------------------------------- */

side_request skl_select_request_of(const choice *s, bool of_teacher)
{
    const skl_problem *const p = &s->plan->problem;
    side_request request = {.side = of_teacher ? skl_teacher_of(p, s->call) : skl_student_of(p, s->call),
                            .of_teacher = of_teacher,
                            .of_b = (p->direction == SKL_KL_REVERSE) == of_teacher};
    request.dq = s->gradients && request.side.dq->data != NULL;
    request.dk = s->gradients && request.side.dk->data != NULL;
    return request;
}

skl_output skl_select_dk_sums_of(const choice *s, const side_request *request)
{
    const skl_problem *const p = &s->plan->problem;
    if (request->side.dk->data == NULL || request->side.grad_dtype == SKL_F32)
        return *request->side.dk;
    return skl_output_contiguous(s->call->workspace, request->side.key_heads, p->packed ? p->total_k : p->len_k,
                                 request->side.dim);
}

bool skl_select_tma_adds_to(const choice *s, const side_request *request)
{
    const skl_output sums = skl_select_dk_sums_of(s, request);
    /* Workspace is aligned and contiguous; its address is not known when a plan is explained. */
    const skl_input tensor = {request->side.grad_dtype == SKL_F32 ? sums.data : (const void *)256, sums.stride_batch,
                              sums.stride_head, sums.stride_row};
    return skl_select_tma_reads(SKL_F32, &tensor, request->side.dim, request->side.key_heads,
                                skl_key_rows(&s->plan->problem));
}

/* Why the plan's fused backward computes no gradient of a side; NULL: it does. */
static const char *why_no_fused_kernel(const choice *s, const side_request *request)
{
    if (s->kernel->fused == NULL)
        return s->reason;
    if (request->side.dim > s->kernel->fused_dim_max)
        return "gradients of more than 128 dimensions: separate dq and dk";
    if (!request->of_b && s->kernel->dtype == SKL_F16)
        return "f16 gradients of the first argument have no bound: separate dq and dk";
    return NULL;
}

/* Why dq and dk of a side do not come out of one kernel; NULL: they do. */
static const char *why_not_fused(const choice *s, const side_request *request)
{
    const char *const no_kernel = why_no_fused_kernel(s, request);
    if (no_kernel != NULL)
        return no_kernel;
    if (s->plan->deterministic)
        return "deterministic: dk has a separate kernel";
    if (!s->some_rows || !s->some_keys)
        return "no queries or no keys: separate dq and dk";
    if (request->dk && !skl_select_tma_adds_to(s, request))
        return "TMA cannot add to dk: separate dq and dk";
    return NULL;
}

static const skl_cuda_kernel *dq_kernel_of(const choice *s, const side_request *request)
{
    if (s->kernel->fused != NULL && why_no_fused_kernel(s, request) == NULL)
        return s->kernel; /* it computes dq alone as well */
    const skl_cuda_kernel *const kernel = skl_select_with_dk(s->kernel, &s->plan->problem);
    const bool f16_of_a = !request->of_b && kernel->dtype == SKL_F16;
    return kernel->dq != NULL || !f16_of_a ? kernel : skl_select_without_tma(&s->plan->problem);
}

/* The Hopper kernel that computes dq or both gradients of B meets everything that the KL is made of. Gradients of A,
 * which read it, come later. */
static bool gives_kl(const choice *s, const side_request *of_b, bool fused)
{
    return s->gradients && s->rows && (of_b->dq || of_b->dk) && (fused || (s->some_keys && of_b->dq)) &&
           skl_select_is_tma_kernel(dq_kernel_of(s, of_b));
}

/* Keys of the side have their f32 dk sums streamed with them. */
static int32_t fused_head_group(const choice *s, const side_request *request)
{
    const int64_t keys = 2, keys_and_sums = 2 + 4;
    return skl_select_head_group_for(s, SKL_SM90_BACKWARD_ROWS, request->of_b ? keys : keys_and_sums,
                                     request->of_b ? keys_and_sums : keys);
}

/* A third dq warpgroup fits if the gradients have few dimensions. More of a taller tile is padding or masked, and
 * fewer tiles fill the last wave worse, so it must be a small part of a sequence and of all tiles. */
static bool has_tall_tiles(const choice *s, const skl_cuda_kernel *kernel, const side_request *request)
{
    const skl_problem *const p = &s->plan->problem;
    const int64_t queries = p->packed ? p->total_q / skl_max(1, p->batch) : p->len_q;
    const int64_t queries_min = 8192, waves_min = 8;
    return request->of_b && !s->capped && request->side.dim <= SKL_SM90_TALL_DIM &&
           kernel->small_dim_max == SKL_SM90_TALL_DIM && kernel->dim_max <= SKL_SM90_TALL_OTHER_DIM &&
           queries >= queries_min && query_tiles(p, SKL_SM90_TALL_ROWS) >= waves_min * s->plan->sm_count;
}

static void set_fused_tiles(const choice *s, skl_cuda_launch *launch, const skl_cuda_kernel *kernel,
                            const side_request *request)
{
    launch->head_group = fused_head_group(s, request);
    launch->tall_tiles = has_tall_tiles(s, kernel, request);
    if (launch->tall_tiles)
        launch->variant = SKL_VARIANT_FUSED_TALL;
}

void skl_select_add_dq(const choice *s, const side_request *request, const char *reason, bool kl)
{
    const skl_cuda_kernel *const kernel = dq_kernel_of(s, request);
    const bool fused = kernel->dq == NULL, softcap = skl_select_is_tma_kernel(kernel) && s->capped;
    const char *const variant = fused     ? (softcap ? SKL_VARIANT_FUSED_SOFTCAP : SKL_VARIANT_FUSED)
                                : softcap ? SKL_VARIANT_DQ_SOFTCAP
                                          : SKL_VARIANT_DQ;
    skl_cuda_launch *const launch = skl_select_add(s, request->of_teacher ? "dq_t" : "dq_s", kernel,
                                                   fused ? kernel->fused : kernel->dq, variant, reason);
    launch->teacher_side = request->of_teacher;
    launch->kl_in_backward = kl;
    if (fused)
        set_fused_tiles(s, launch, kernel, request);
}

void skl_select_add_dk(const choice *s, const side_request *request, const char *reason)
{
    const bool softcap = skl_select_is_tma_kernel(s->kernel) && s->capped;
    const skl_cuda_kernel *const kernel = skl_select_with_dk(s->kernel, &s->plan->problem);
    skl_cuda_launch *const launch = skl_select_add(s, request->of_teacher ? "dk_t" : "dk_s", kernel, kernel->dk,
                                                   softcap ? SKL_VARIANT_DK_SOFTCAP : SKL_VARIANT_DK, reason);
    launch->teacher_side = request->of_teacher;
    launch->streams_queries = true;
}

static void add_fused(const choice *s, const side_request *request, bool kl)
{
    skl_cuda_launch *const launch =
        skl_select_add(s, request->of_teacher ? "dq_t and dk_t" : "dq_s and dk_s", s->kernel, s->kernel->fused,
                       s->capped ? SKL_VARIANT_FUSED_SOFTCAP : SKL_VARIANT_FUSED, s->reason);
    launch->teacher_side = request->of_teacher;
    launch->kl_in_backward = kl;
    launch->dk_sums = skl_select_dk_sums_of(s, request);
    launch->workspace_size =
        request->dk && request->side.grad_dtype != SKL_F32 ? skl_select_dk_sums_size(&s->plan->problem) : 0;
    set_fused_tiles(s, launch, s->kernel, request);
}

/* One kernel for the gradients of both sides: six products instead of eight, and the logits' exponentials once. It
 * reads the KL, so a one-pass call, whose KL comes out of the gradients of B, does not use it. */
static const skl_cuda_kernel *joint_kernel_of(const choice *s)
{
    const skl_gradients *const out = &s->call->gradients;
    const bool all =
        out->dq_t.data != NULL && out->dk_t.data != NULL && out->dq_s.data != NULL && out->dk_s.data != NULL;
    return all && s->gradients && s->call->op == SKL_OP_BACKWARD && !s->capped
               ? skl_select_joint_kernel(&s->plan->problem, s->kernel)
               : NULL;
}

static void add_joint(const choice *s, const skl_cuda_kernel *kernel)
{
    const skl_problem *const p = &s->plan->problem;
    const side_request of_teacher = skl_select_request_of(s, true), of_student = skl_select_request_of(s, false);
    const int64_t keys_and_sums = 2 + 4;
    skl_cuda_launch *const launch = skl_select_add(s, "dq and dk of both sides", kernel, kernel->joint,
                                                   SKL_VARIANT_JOINT, "one kernel for all four gradients");
    launch->dk_sums = skl_select_dk_sums_of(s, &of_student);
    launch->dk_sums_t = skl_select_dk_sums_of(s, &of_teacher);
    if (!p->grad_f32)
        launch->dk_sums_t.data = (char *)launch->dk_sums_t.data + skl_select_teacher_sums_at(p);
    launch->workspace_size = p->grad_f32 ? 0 : skl_select_teacher_sums_at(p) + skl_select_side_sums_size(p, true);
    launch->head_group = skl_select_head_group_for(s, SKL_SM90_BACKWARD_ROWS, keys_and_sums, keys_and_sums);
}

/* `why_split`: why dq and dk do not come out of one kernel; NULL: they do. */
static void add_gradients(const choice *s, const side_request *request, const char *why_split, bool kl)
{
    if ((request->dq || request->dk) && why_split == NULL)
        add_fused(s, request, kl);
    if (request->dq && why_split != NULL && s->some_rows)
        skl_select_add_dq(s, request, why_split, kl);
    if (request->dk && why_split != NULL && s->some_keys)
        skl_select_add_dk(s, request, why_split);
}

void skl_select_attention(choice *s)
{
    const bool reverse = s->plan->problem.direction == SKL_KL_REVERSE;
    const side_request of_a = skl_select_request_of(s, !reverse), of_b = skl_select_request_of(s, reverse);
    const char *const split_a = why_not_fused(s, &of_a), *const split_b = why_not_fused(s, &of_b);
    const bool kl = gives_kl(s, &of_b, split_b == NULL);
    if (s->rows && !kl && s->some_rows)
        skl_select_add_forward(s);
    const skl_cuda_kernel *const joint = split_a == NULL && split_b == NULL ? joint_kernel_of(s) : NULL;
    if (joint != NULL) {
        add_joint(s, joint);
        return;
    }
    add_gradients(s, &of_b, split_b, kl);
    add_gradients(s, &of_a, split_a, false);
}
