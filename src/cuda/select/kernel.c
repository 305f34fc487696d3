/* Which kernel a plan is made for, and why. */
#include "cuda/select/choice.h"

bool skl_cuda_runs_on(const skl_cuda_kernel *kernel, int capability)
{
    return capability >= kernel->capability && capability < kernel->capability_end;
}

static bool fits_copies(int64_t dim)
{
    return dim % ELEMENTS_16_BYTES == 0;
}

bool skl_select_is_attention_with_groups(const skl_problem *p)
{
    return !skl_is_indexer(p) && skl_group_size(p) > 1;
}

static bool has_softcap(const skl_problem *p)
{
    return p->softcap_t != 0.0F || p->softcap_s != 0.0F;
}

static bool fits_attention(const skl_cuda_kernel *kernel, const skl_problem *p)
{
    const int64_t length = skl_max(p->len_q, p->len_k);
    return kernel->forward != NULL && skl_max(p->dim_t, p->dim_s) <= kernel->dim_max &&
           skl_min(p->dim_t, p->dim_s) <= kernel->small_dim_max && (kernel->softcap || !has_softcap(p)) &&
           length < SKL_ROWS_MAX && p->heads_s < INT32_MAX / skl_ceil_div(length + 1, SKL_SM80_TILE_MIN);
}

/* On Hopper the queries of all teacher heads of a group have to fit into shared memory, with two stages of keys if
 * the heads do not share them. Softcaps are for 128 dimensions only. */
static bool fits_group_memory(const skl_problem *p, bool capped)
{
    const bool narrow = p->dim_s <= 64 && !capped, shared = p->heads_t / p->key_heads_t % skl_group_size(p) == 0;
    const int64_t padded_dim_t = p->dim_t <= 64 && narrow ? 64 : SKL_GROUP_DIM_MAX;
    const int64_t dims_max = shared || narrow ? SKL_GROUP_DIMS_MAX : SKL_GROUP_DIMS_MAX - SKL_GROUP_DIM_MAX;
    return skl_group_size(p) * padded_dim_t <= dims_max;
}

static bool fits_groups(const skl_cuda_kernel *kernel, const skl_problem *p)
{
    const bool capped = skl_caps_logits(p->softcap_t) || skl_caps_logits(p->softcap_s);
    const int64_t length = skl_max(p->len_q, p->len_k);
    return kernel->group_rows != NULL && (kernel->softcap || !capped) && p->direction == SKL_KL_FORWARD &&
           p->dim_t <= kernel->dim_max && p->dim_s <= kernel->dim_max &&
           (kernel->group_fused != NULL ? fits_group_memory(p, capped)
                                        : skl_group_size(p) <= SKL_GROUP_TILES_SIZE_MAX) &&
           length < SKL_ROWS_MAX && p->batch * p->heads_t < INT32_MAX / skl_ceil_div(length + 1, SKL_GROUP_TILE);
}

static bool fits_strips(const skl_problem *p)
{
    const int64_t heads = skl_max(p->heads_t, skl_query_heads_s(p));
    const int64_t tiles = skl_ceil_div(skl_max(p->len_q, p->len_k) + 1, SKL_INDEX_TILE);
    return tiles < INT32_MAX / SKL_INDEX_TILE && p->batch < INT32_MAX / tiles / heads / SKL_INDEX_BLOCKS;
}

static bool fits_dense(const skl_cuda_kernel *kernel, const skl_problem *p)
{
    return kernel->dense_rows != NULL && !has_softcap(p) && p->dim_s <= kernel->dim_max &&
           p->direction == SKL_KL_FORWARD && fits_strips(p);
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
    /* Rows of any type and size. The attention backward of such rows runs on the general kernel: tensor cores
     * truncate sums, so its logits would not match LSEs of a forward that they computed. */
    if (skl_select_has_two_terms(kernel))
        return !skl_is_indexer(p) && !skl_select_is_attention_with_groups(p) && (p->gradients & SKL_DV_S) == 0 &&
               fits_attention(kernel, p);
    if (p->dtype_t != kernel->dtype || p->dtype_s != kernel->dtype || !fits_copies(p->dim_t) ||
        !fits_copies(p->dim_s))
        return false;
    if (!skl_is_indexer(p) && !skl_select_is_attention_with_groups(p))
        return fits_attention(kernel, p);
    if (skl_select_is_attention_with_groups(p) && kernel->group_rows != NULL)
        return fits_groups(kernel, p);
    if (skl_select_is_attention_with_groups(p) && kernel->strip_rows != NULL)
        return p->dim_t <= kernel->dim_max && p->dim_s <= kernel->dim_max && fits_strips(p);
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

const skl_cuda_kernel *skl_select_with_dk(const skl_cuda_kernel *kernel, const skl_problem *p)
{
    if (kernel->dk != NULL)
        return kernel;
    const skl_cuda_kernel *next = NULL;
    for (int32_t i = 0; (next = skl_cuda_kernel_at(i)) != NULL; i++)
        if (next->capability == kernel->capability && next->dk != NULL && fits_problem(next, p))
            break;
    return next;
}

const skl_cuda_kernel *skl_select_deterministic_kernel_of(const skl_problem *p)
{
    const skl_cuda_kernel *kernel = NULL;
    for (int32_t i = 0; (kernel = skl_cuda_kernel_at(i)) != NULL; i++)
        if (skl_cuda_runs_on(kernel, SKL_CAPABILITY_sm90) &&
            (kernel->group_dq != NULL || kernel->dense_rows != NULL || kernel->strip_rows != NULL) &&
            fits_problem(kernel, p))
            break;
    return kernel;
}

bool skl_select_has_teacher_gradients(const skl_problem *p)
{
    return (p->gradients & (SKL_DQ_T | SKL_DK_T)) != 0;
}

const skl_cuda_kernel *skl_select_teacher_kernel_of(const skl_problem *p)
{
    const skl_cuda_kernel *kernel = NULL;
    for (int32_t i = 0; skl_select_has_teacher_gradients(p) && (kernel = skl_cuda_kernel_at(i)) != NULL; i++)
        if (kernel->strip_rows != NULL && fits_problem(kernel, p))
            return kernel;
    return skl_cuda_general;
}

static bool fits_carrying(const skl_cuda_kernel *kernel, const skl_problem *p)
{
    const int64_t length = skl_max(p->len_q, p->len_k);
    return kernel->carrying != NULL && p->dtype_t == kernel->dtype && p->dtype_s == kernel->dtype &&
           fits_copies(p->dim_t) && fits_copies(p->dim_s) && p->dim_t <= kernel->dim_max &&
           p->dim_s <= kernel->dim_max && length < SKL_ROWS_MAX &&
           p->heads_s < INT32_MAX / skl_ceil_div(length + 1, SKL_SM80_TILE_MIN);
}

const skl_cuda_kernel *skl_select_carrying_kernel(const skl_problem *p, int capability)
{
    const skl_cuda_kernel *kernel = NULL;
    for (int32_t i = 0; (kernel = skl_cuda_kernel_at(i)) != NULL; i++)
        if (skl_cuda_runs_on(kernel, capability) && fits_carrying(kernel, p))
            break;
    return kernel;
}

const skl_cuda_kernel *skl_select_joint_kernel(const skl_problem *p, const skl_cuda_kernel *kernel)
{
    const unsigned all = SKL_DQ_T | SKL_DK_T | SKL_DQ_S | SKL_DK_S;
    const skl_cuda_kernel *joint = NULL;
    const bool is_pair = kernel->dk == NULL; /* two fused backwards of a pair are faster than padding */
    for (int32_t i = 0;
         kernel->fused != NULL && !is_pair && (p->gradients & all) == all && (joint = skl_cuda_kernel_at(i)) != NULL;
         i++)
        if (joint->joint != NULL && joint->capability == kernel->capability && joint->dtype == kernel->dtype &&
            kernel->dim_max <= joint->dim_max)
            break;
    return joint;
}

const skl_cuda_kernel *skl_select_without_tma(const skl_problem *p)
{
    return skl_cuda_select_kernel(p, SKL_CAPABILITY_sm80, NULL);
}

/* Why a problem has no tensor-core kernel; the first reason that applies. */
static const char *why_general(const skl_problem *p)
{
    const bool groups = skl_has_teacher_groups(p);
    const bool of_16_bits = p->dtype_t == p->dtype_s && p->dtype_t != SKL_F32;
    if (!of_16_bits && groups)
        return "f32 or mixed types with teacher groups: no tensor cores; bf16 or f16 has them";
    if (!of_16_bits && p->gradients & SKL_DV_S)
        return "f32 or mixed types with an attention backward: no tensor cores; bf16 or f16 has them";
    if (!of_16_bits && skl_max(p->dim_t, p->dim_s) > SKL_TWO_TERM_DIM_MAX)
        return "f32 or mixed types with a head size above 128: no tensor cores; bf16 or f16 has them";
    if (!of_16_bits)
        return "f32 or mixed types on a GPU other than Hopper: no tensor cores; bf16 or f16 has them";
    if (!fits_copies(p->dim_t) || !fits_copies(p->dim_s))
        return "a head size is not a multiple of 8: no tensor cores";
    if (skl_select_is_attention_with_groups(p) && skl_max(p->dim_t, p->dim_s) > SKL_GROUP_DIM_MAX &&
        (has_softcap(p) || p->direction == SKL_KL_REVERSE))
        return "softcap or reverse KL of teacher groups with a head size above 128: no tensor cores";
    if (skl_is_indexer(p) && p->softcap_t != 0.0F)
        return "softcap_t of an indexer's teacher: no tensor cores";
    if (skl_is_indexer(p) && p->top_k == 0 && p->direction == SKL_KL_REVERSE)
        return "reverse KL of a dense indexer: no tensor cores";
    if (!groups && skl_max(p->dim_t, p->dim_s) > 256)
        return "a head size above 256: no tensor cores";
    if (groups && p->dim_s > SKL_INDEX_DIM_MAX)
        return "dim_s above 256: no tensor cores";
    return "sizes beyond 32-bit tile numbers: no tensor cores";
}

const char *skl_select_why_kernel(const skl_plan *plan, const skl_cuda_kernel *kernel)
{
    if (plan->forced_by != NULL)
        return "the kernel was named by the caller";
    if (kernel == skl_cuda_general)
        return why_general(&plan->problem);
    return skl_select_has_two_terms(kernel) ? "f32, mixed types or an odd head size: two-term rows"
                                            : "best kernel for this type, head size and GPU";
}
