/* Launches of the student's attention backward, which carries the KL: one kernel where there is one. Elsewhere a
 * one-pass call gives f32 gradients of the KL, and a plain attention backward adds its own to them. */
#include "cuda/select/choice.h"

static size_t dots_size(const skl_problem *p)
{
    return skl_aligned_size((size_t)skl_state_count(p) * sizeof(float));
}

/* f32 gradients of the KL, unless they are the caller's own. */
static size_t dq_size(const skl_problem *p)
{
    const bool needed = !p->grad_f32 && p->dtype_s != SKL_F32 && p->gradients & SKL_DQ_S;
    return needed ? skl_aligned_size((size_t)(skl_state_count(p) * p->dim_s) * sizeof(float)) : 0;
}

static size_t dk_size(const skl_problem *p)
{
    const bool needed = !p->grad_f32 && p->dtype_s != SKL_F32 && p->gradients & SKL_DK_S;
    const int64_t rows = p->packed ? p->total_k : p->batch * p->len_k;
    return needed ? skl_aligned_size((size_t)(rows * p->key_heads_s * p->dim_s) * sizeof(float)) : 0;
}

/* The plan of the one-pass call. */
static skl_plan kl_plan_of(const skl_plan *plan)
{
    skl_plan kl_plan = *plan;
    kl_plan.problem.grad_f32 = 1;
    return kl_plan;
}

/* After the workspace of the one-pass call, which has room for a forward and for key bounds. */
static size_t sums_at(const skl_plan *plan)
{
    const skl_plan kl_plan = kl_plan_of(plan);
    return skl_aligned_size(skl_cuda_workspace_size(&kl_plan, SKL_OP_FORWARD_BACKWARD));
}

/* Of the kernel that does both: what it reads per row and about all rows, and sums of dq. */
static size_t rows_size(const skl_problem *p)
{
    return skl_aligned_size((size_t)skl_state_count(p) * SKL_CARRYING_ROW_SIZE + SKL_CARRYING_LARGEST_SIZE);
}

static size_t carrying_size(const skl_problem *p)
{
    return rows_size(p) + skl_aligned_size((size_t)(skl_state_count(p) * p->dim_s) * sizeof(float));
}

size_t skl_select_attention_backward_size(const skl_plan *plan)
{
    const skl_problem *const p = &plan->problem;
    const size_t apart = dots_size(p) + dq_size(p) + dk_size(p);
    const skl_cuda_kernel *const kernel = plan->kernel;
    const bool carried =
        skl_select_is_tma_kernel(kernel) && skl_select_carrying_kernel(p, kernel->capability) != NULL;
    return sums_at(plan) + (carried && carrying_size(p) > apart ? carrying_size(p) : apart);
}

/* The one-pass call: its gradients are f32, in the workspace where those of the caller are not. */
static skl_call kl_call_of(const skl_plan *plan, const skl_call *call)
{
    const skl_problem *const p = &plan->problem;
    skl_call kl_call = *call;
    skl_gradients *const grads = &kl_call.gradients;
    char *const dq = (char *)call->workspace + sums_at(plan) + dots_size(p), *const dk = dq + dq_size(p);
    kl_call.op = SKL_OP_FORWARD_BACKWARD;
    if (grads->dq_s.data != NULL && dq_size(p) > 0)
        grads->dq_s = skl_output_contiguous(dq, p->heads_s, p->packed ? p->total_q : p->len_q, p->dim_s);
    if (grads->dk_s.data != NULL && dk_size(p) > 0)
        grads->dk_s = skl_output_contiguous(dk, p->key_heads_s, p->packed ? p->total_k : p->len_k, p->dim_s);
    return kl_call;
}

/* Why the KL and the attention backward come apart; NULL: *kernel does both. */
static const char *why_apart(const choice *s, const skl_cuda_kernel **kernel)
{
    const skl_problem *const p = &s->plan->problem;
    if (skl_has_teacher_groups(p))
        return "teacher groups: the KL and the attention backward apart";
    if (p->direction == SKL_KL_REVERSE)
        return "reverse KL: the KL and the attention backward apart";
    if (s->capped)
        return "softcap: the KL and the attention backward apart";
    if (!skl_select_is_tma_kernel(s->kernel))
        return s->reason;
    if (!s->some_rows || !s->some_keys)
        return "no queries or no keys: the KL and the attention backward apart";
    if (s->plan->deterministic)
        return "deterministic: the KL and the attention backward apart";
    const skl_attention *const of = s->call->attention;
    if (!skl_select_tma_reads(p->dtype_s, &of->v_s, p->dim_s, p->key_heads_s, skl_key_rows(p)) ||
        !skl_select_tma_reads(p->dtype_s, &of->o_s, p->dim_s, p->heads_s, skl_query_rows(p)) ||
        !skl_select_tma_reads(p->dtype_s, &of->do_s, p->dim_s, p->heads_s, skl_query_rows(p)))
        return "TMA cannot address v_s, o_s or do_s: the KL and the attention backward apart";
    if (!skl_select_has_pairs(p, &of->dv_s, p->dtype_s))
        return "dv_s: a row begins at an odd element: the KL and the attention backward apart";
    *kernel = skl_select_carrying_kernel(p, s->kernel->capability);
    return *kernel == NULL ? "no kernel of this type and head size carries the KL" : NULL;
}

static skl_cuda_launch *add_launch(const choice *s, const char *step, skl_cuda_launcher launcher, const char *variant,
                                   const char *reason)
{
    skl_cuda_launch *const launch = skl_select_add(s, step, skl_cuda_general, launcher, variant, reason);
    launch->gradient_dtype = skl_grad_dtype(&s->plan->problem, s->plan->problem.dtype_s);
    launch->output_dots = (float *)(void *)((char *)s->call->workspace + sums_at(s->plan));
    return launch;
}

/* The plain attention backward. `of_kl`: the gradients that it adds to. */
static void add_output_gradients(const choice *s, const skl_gradients *of_kl, const char *reason)
{
    const skl_problem *const p = &s->plan->problem;
    const skl_gradients *const grads = &s->call->gradients;
    const skl_output *const dv = &s->call->attention->dv_s;
    /* Each launch also clears the rows after the last packed sequence, which may be all rows. */
    const bool of_rows = s->some_rows || p->packed, of_keys = s->some_keys || p->packed;
    if (s->some_rows)
        add_launch(s, "<do, o>", skl_cuda_general_output_dots, SKL_VARIANT_DOTS, reason)->workspace_size =
            dots_size(p);
    if (grads->dq_s.data != NULL && of_rows) {
        skl_cuda_launch *const launch =
            add_launch(s, "dq_s", skl_cuda_general_output_dq, SKL_VARIANT_OUTPUT_DQ, reason);
        launch->gradient = grads->dq_s;
        launch->added = of_kl->dq_s;
        launch->workspace_size = dq_size(p);
    }
    if (grads->dk_s.data != NULL && of_keys) {
        skl_cuda_launch *const launch =
            add_launch(s, "dk_s", skl_cuda_general_output_dk, SKL_VARIANT_OUTPUT_DK, reason);
        launch->gradient = grads->dk_s;
        launch->added = of_kl->dk_s;
        launch->workspace_size = dk_size(p);
        launch->streams_queries = s->some_keys;
    }
    if (dv->data != NULL && of_keys) {
        skl_cuda_launch *const launch =
            add_launch(s, "dv_s", skl_cuda_general_output_dv, SKL_VARIANT_OUTPUT_DV, reason);
        launch->gradient = *dv;
        launch->streams_queries = s->some_keys;
    }
}

/* Key heads whose tiles fill the GPU twice; more of them only if the L2 cache holds what they stream. */
static int32_t head_group_of(const choice *s)
{
    const skl_problem *const p = &s->plan->problem;
    const int64_t bytes = 2 * p->dim_t + (2 + 2 + 4) * p->dim_s; /* of a query: q_t; q_s, do_s and the sums of dq_s */
    const int64_t head_size = p->heads_s / p->key_heads_s * p->len_q * bytes, l2_share = (int64_t)44 << 20;
    const int64_t full = 2 * s->plan->sm_count / skl_ceil_div(p->len_k, SKL_CARRYING_KEYS);
    return (int32_t)skl_max(1, skl_min(SKL_HEAD_GROUP_MAX, skl_max(full, l2_share / head_size)));
}

/* The kernel that does both. Its tiles are keys: it has no KL of a row, which is a sum over tiles. */
static void add_carrying(const choice *s, const skl_cuda_kernel *kernel)
{
    static const char *const reason = "one kernel for the attention backward and the gradient of the KL";
    const skl_problem *const p = &s->plan->problem;
    if (p->packed)
        skl_select_add_tails(s);
    if (s->rows)
        skl_select_add_forward(s);
    skl_cuda_launch *const launch =
        skl_select_add(s, "dq_s, dk_s and dv_s", kernel, kernel->carrying, SKL_VARIANT_CARRYING, reason);
    char *const rows = (char *)s->call->workspace + sums_at(s->plan);
    launch->attention_rows = rows;
    launch->dq_sums =
        skl_output_contiguous(rows + rows_size(p), p->heads_s, p->packed ? p->total_q : p->len_q, p->dim_s);
    launch->workspace_size = carrying_size(p);
    launch->head_group = head_group_of(s);
    launch->streams_queries = true;
}

void skl_select_attention_backward(const skl_plan *plan, const skl_call *call, skl_cuda_params *params,
                                   skl_cuda_launches *launches)
{
    const choice both = skl_select_begin(plan, call, params, launches);
    const skl_plan kl_plan = kl_plan_of(plan);
    const skl_call kl_call = kl_call_of(plan, call);
    const skl_cuda_kernel *kernel = NULL;
    const char *const apart = why_apart(&both, &kernel);
    choice kl = both;
    if (apart == NULL) {
        add_carrying(&both, kernel);
        kl.plan = &kl_plan, kl.call = &kl_call; /* whose workspace has the key bounds */
    } else {
        kl = skl_select_begin(&kl_plan, &kl_call, params, launches);
        skl_select_kl(&kl, params);
        add_output_gradients(&both, &kl_call.gradients, apart);
    }
    skl_select_add_bounds(&kl, params);
}
