/* The launches of a call. */
#include "cuda/select/choice.h"

#include <math.h>
#include <string.h>

#include "base/needs.h"
#include "cuda/common/tensor_map.h"

static bool is_aligned(const skl_input *tensor)
{
    return (uintptr_t)tensor->data % 16 == 0 && tensor->stride_batch % ELEMENTS_16_BYTES == 0 &&
           tensor->stride_head % ELEMENTS_16_BYTES == 0 && tensor->stride_row % ELEMENTS_16_BYTES == 0;
}

bool skl_select_has_pairs(const skl_problem *p, const skl_output *gradient, skl_dtype dtype)
{
    const uintptr_t pair_size = skl_grad_dtype(p, dtype) == SKL_F32 ? 8 : 4;
    return gradient->data == NULL || ((uintptr_t)gradient->data % pair_size == 0 && gradient->stride_batch % 2 == 0 &&
                                      gradient->stride_head % 2 == 0 && gradient->stride_row % 2 == 0);
}

/* Why kernels with tensor cores cannot copy the call's tensors, 16 bytes at a time, or store its gradients; NULL:
 * they can. */
static const char *why_misaligned(const skl_problem *p, const skl_call *call)
{
    const skl_inputs *const in = &call->inputs;
    const skl_gradients *const out = &call->gradients;
    const struct {
        bool aligned;
        const char *why;
    } tensors[] = {
        {is_aligned(&in->q_t), "q_t: address or strides not a multiple of 16 bytes: general kernel"},
        {is_aligned(&in->k_t), "k_t: address or strides not a multiple of 16 bytes: general kernel"},
        {is_aligned(&in->q_s), "q_s: address or strides not a multiple of 16 bytes: general kernel"},
        {is_aligned(&in->k_s), "k_s: address or strides not a multiple of 16 bytes: general kernel"},
        {skl_select_has_pairs(p, &out->dq_t, p->dtype_t), "dq_t: a row begins at an odd element: general kernel"},
        {skl_select_has_pairs(p, &out->dk_t, p->dtype_t), "dk_t: a row begins at an odd element: general kernel"},
        {skl_select_has_pairs(p, &out->dq_s, p->dtype_s), "dq_s: a row begins at an odd element: general kernel"},
        {skl_select_has_pairs(p, &out->dk_s, p->dtype_s), "dk_s: a row begins at an odd element: general kernel"}};
    for (size_t i = 0; i < sizeof tensors / sizeof tensors[0]; i++)
        if (!tensors[i].aligned)
            return tensors[i].why;
    return NULL;
}

bool skl_select_is_tma_kernel(const skl_cuda_kernel *kernel)
{
    return kernel->capability == SKL_CAPABILITY_sm90;
}

bool skl_select_tma_reads(skl_dtype dtype, const skl_input *tensor, int64_t dim, int64_t heads, skl_tensor_rows shape)
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
    if (skl_select_has_two_terms(s->kernel))
        return NULL; /* two-term rows are contiguous */
    if (queries.rows == 0 || keys.rows == 0)
        return "no queries or no keys: mma.sync kernel";
    if (!skl_select_tma_reads(p->dtype_s, &in->q_s, p->dim_s, skl_query_heads_s(p), queries) ||
        !skl_select_tma_reads(p->dtype_s, &in->k_s, p->dim_s, p->key_heads_s, keys))
        return "TMA cannot address q_s or k_s: mma.sync kernel";
    if (skl_is_indexer(p) && skl_only_lse_s(s->call))
        return NULL;
    if (!skl_select_tma_reads(p->dtype_t, &in->q_t, p->dim_t, p->heads_t, queries) ||
        !skl_select_tma_reads(p->dtype_t, &in->k_t, p->dim_t, p->key_heads_t, keys))
        return "TMA cannot address q_t or k_t: mma.sync kernel";
    return NULL;
}

static skl_cuda_argument argument_of(const skl_side *side)
{
    const bool capped = skl_caps_logits(side->softcap);
    /* Where only the other argument has a softcap, one so large that tanh u is u to the last bit. */
    const float no_softcap = 0x1p22F, tanh_max = capped ? SKL_TANH_MAX : 1e-4F;
    skl_cuda_argument argument = {.q = *side->q,
                                  .k = *side->k,
                                  .heads_per_key = (int32_t)(side->heads / side->key_heads),
                                  .dim = (int32_t)side->dim,
                                  .capped = capped,
                                  .scale = capped ? side->scale / side->softcap : side->scale * SKL_LOG2E,
                                  .softcap_2 = capped ? side->softcap * SKL_LOG2E : 0.0F,
                                  .inverse_softcap_2 = capped ? 1.0F / (side->softcap * SKL_LOG2E) : 0.0F};
    argument.tanh_factor = capped ? argument.softcap_2 : no_softcap;
    argument.tanh_scale = capped ? argument.scale : argument.scale / no_softcap;
    argument.product_max = tanh_max / fabsf(argument.tanh_scale);
    return argument;
}

skl_cuda_params skl_select_params_of(const skl_problem *p, const skl_call *call)
{
    const bool reverse = p->direction == SKL_KL_REVERSE;
    const skl_side teacher = skl_teacher_of(p, call), student = skl_student_of(p, call);
    const skl_cuda_params params = {.problem = *p,
                                    .call = *call,
                                    .a = argument_of(reverse ? &student : &teacher),
                                    .b = argument_of(reverse ? &teacher : &student)};
    return params;
}

skl_cuda_launch *skl_select_add(const choice *s, const char *step, const skl_cuda_kernel *kernel,
                                skl_cuda_launcher launcher, const char *variant, const char *reason)
{
    skl_cuda_launch *const launch = &s->launches->at[s->launches->count++];
    *launch = (skl_cuda_launch){.step = step,
                                .kernel = kernel->name,
                                .variant = variant,
                                .launcher = launcher,
                                .sm_count = s->plan->sm_count,
                                .smem_per_block = s->plan->smem_per_block,
                                .smem_per_sm = s->plan->smem_per_sm,
                                .num_splits = 1,
                                .head_group = SKL_HEAD_GROUP_MAX,
                                .rows_known = s->gradients && s->rows,
                                .reason = reason};
    return launch;
}

static bool has_unbounded_gradients(const skl_cuda_kernel *kernel)
{
    return skl_select_is_tma_kernel(kernel) && kernel->dq != NULL && kernel->dtype == SKL_F16 &&
           kernel->dim_max == SKL_SM90_UNBOUNDED_F16_DIM;
}

void skl_select_add_bounds(const choice *s, skl_cuda_params *params)
{
    skl_cuda_launches *const launches = s->launches;
    bool needed = false;
    for (int n = 0; n < launches->count; n++)
        needed = needed || launches->at[n].streams_queries;
    if (!needed || !s->plan->problem.row_bounds)
        return;
    const size_t at = skl_select_key_bounds_at(s->plan, s->call->op);
    params->key_bounds = (int32_t *)(void *)((char *)s->call->workspace + at);
    skl_select_add(s, "bounds", skl_cuda_general, skl_cuda_bounds_by_key, SKL_VARIANT_BOUNDS,
                   "kernels with tiles of keys need the queries that attend to each key");
    const skl_cuda_launch bounds = launches->at[launches->count - 1];
    memmove(&launches->at[1], &launches->at[0], (size_t)(launches->count - 1) * sizeof bounds);
    launches->at[0] = bounds;
    launches->at[0].workspace_size = skl_select_key_bounds_size(&s->plan->problem);
}

choice skl_select_begin(const skl_plan *plan, const skl_call *call, skl_cuda_params *params,
                        skl_cuda_launches *launches)
{
    const skl_problem *const p = &plan->problem;
    *params = skl_select_params_of(p, call);
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
    s.reason = skl_select_why_kernel(plan, s.kernel);
    const bool has_two_terms = skl_select_has_two_terms(s.kernel), copies = s.kernel != skl_cuda_general;
    const char *const misaligned = copies && !has_two_terms ? why_misaligned(p, call) : NULL;
    if (misaligned != NULL) {
        s.kernel = skl_cuda_general;
        s.reason = misaligned;
    }
    const char *no_tma = skl_select_is_tma_kernel(s.kernel) ? why_no_tma(&s) : NULL;
    if (no_tma == NULL && p->row_bounds && s.gradients && has_unbounded_gradients(s.kernel))
        no_tma = "f16 gradients of heads above 128 dimensions with row bounds: mma.sync kernel";
    if (no_tma != NULL) {
        s.kernel = s.kernel->group_rows != NULL ? skl_cuda_general : skl_select_without_tma(p);
        s.reason = no_tma;
    }
    const bool of_groups = s.kernel->group_rows != NULL || s.kernel->strip_rows != NULL;
    if ((of_groups || has_two_terms) && (!s.some_rows || !s.some_keys)) {
        s.kernel = skl_cuda_general;
        s.reason = "no queries or no keys: general kernel";
    }
    return s;
}

void skl_select_add_tails(const choice *s)
{
    skl_select_add(s, "tails", skl_cuda_general, skl_cuda_clear_tails, SKL_VARIANT_CLEAR,
                   "rows after the last packed sequence become 0");
}

void skl_select_kl(choice *s, skl_cuda_params *params)
{
    const skl_problem *const p = &s->plan->problem;
    if (p->packed)
        skl_select_add_tails(s);
    if (skl_select_has_two_terms(s->kernel))
        skl_select_two_term_rows(s, params);
    if (skl_is_indexer(p))
        skl_select_indexer(s);
    else if (skl_select_is_attention_with_groups(p) && s->kernel != skl_cuda_general)
        skl_select_groups(s);
    else
        skl_select_attention(s);
}

void skl_cuda_select(const skl_plan *plan, const skl_call *call, skl_cuda_params *params, skl_cuda_launches *launches)
{
    if (call->op == SKL_OP_ATTENTION_BACKWARD) {
        skl_select_attention_backward(plan, call, params, launches);
        return;
    }
    choice s = skl_select_begin(plan, call, params, launches);
    skl_select_kl(&s, params);
    skl_select_add_bounds(&s, params);
}
