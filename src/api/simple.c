/* The simple API: a plan and its memory for one call. */
#include "api/contiguous.h"

#include <assert.h>

#include "base/needs.h"
#include "base/status.h"
#include "base/structs.h"
#include "base/tensors.h"

/* The tensors of a call, contiguous; NULL: not requested. */
typedef struct simple_tensors {
    const void *q_t, *k_t, *q_s, *k_s;
    const float *grad_kl;
    float *kl;
    void *dq_s, *dk_s;
} simple_tensors;

static skl_status check_simple(const skl_problem *p)
{
    const struct {
        const char *name;
        int value;
    } others[] = {
        {"packed", p->packed}, {"row_bounds", p->row_bounds}, {"sinks", p->sinks}, {"student", (int)p->student}};
    for (size_t i = 0; i < sizeof others / sizeof others[0]; i++)
        if (others[i].value != 0)
            return skl_fail(SKL_ERROR_ARGUMENT,
                            "%s=%d: must be 0 in the simple API, which takes four tensors; use skl_plan_create",
                            others[i].name, others[i].value);
    return SKL_OK;
}

static skl_output like(void *data, const skl_input *shape)
{
    const skl_output output = {data, shape->stride_batch, shape->stride_head, shape->stride_row};
    return output;
}

/* Elements of a row vector. */
static int64_t row_count(const skl_problem *p, int64_t heads)
{
    return heads * p->batch * p->len_q;
}

/* `memory` holds the workspace and, after it, the row vectors that a backward reads: lse_t, lse_s and kl. */
static skl_status run(const skl_plan *plan, const simple_tensors *t, void *memory, size_t workspace_size,
                      skl_stream stream)
{
    const skl_problem *const p = &plan->problem;
    float *const lse_t = (float *)(void *)((char *)memory + workspace_size);
    float *const lse_s = lse_t + row_count(p, p->heads_t);
    float *const kl = t->kl != NULL ? t->kl : lse_s + row_count(p, p->heads_s);
    skl_inputs in = skl_contiguous_inputs(p);
    in.q_t.data = t->q_t, in.k_t.data = t->k_t, in.q_s.data = t->q_s, in.k_s.data = t->k_s;
    if (t->grad_kl != NULL) /* for the forward, too, which refuses a kl that overlaps it */
        in.grad_kl = skl_input_contiguous(t->grad_kl, p->heads_s, p->len_q, 1);
    skl_rows rows = {.struct_size = sizeof rows, .kl = skl_output_contiguous(kl, p->heads_s, p->len_q, 1)};
    if (p->gradients == 0)
        return skl_forward(plan, &in, &rows, memory, workspace_size, stream);
    rows.lse_t = skl_output_contiguous(lse_t, p->heads_t, p->len_q, 1);
    rows.lse_s = skl_output_contiguous(lse_s, p->heads_s, p->len_q, 1);
    skl_call backward = {.op = SKL_OP_BACKWARD,
                         .inputs = in,
                         .rows = {.struct_size = sizeof(skl_rows)},
                         .gradients = {.struct_size = sizeof(skl_gradients),
                                       .dq_s = like(t->dq_s, &in.q_s),
                                       .dk_s = like(t->dk_s, &in.k_s)},
                         .workspace = memory};
    backward.inputs.lse_t = skl_input_of(&rows.lse_t);
    backward.inputs.lse_s = skl_input_of(&rows.lse_s);
    backward.inputs.kl = skl_input_of(&rows.kl);
    SKL_TRY(skl_call_check(plan, &backward, workspace_size)); /* first: a call that fails has no effect */
    SKL_TRY(skl_forward(plan, &in, &rows, memory, workspace_size, stream));
    return skl_backward(plan, &backward.inputs, &backward.gradients, memory, workspace_size, stream);
}

static skl_status run_with_memory(const skl_plan *plan, const simple_tensors *tensors, skl_stream stream)
{
    const skl_problem *const p = &plan->problem;
    const size_t forward = plan->workspace_size[SKL_OP_FORWARD], backward = plan->workspace_size[SKL_OP_BACKWARD];
    const size_t workspace_size = p->gradients != 0 && backward > forward ? backward : forward;
    const int64_t kept_count = p->gradients != 0 ? row_count(p, p->heads_t) + 2 * row_count(p, p->heads_s) : 0;
    void *memory = NULL;
    assert(workspace_size % sizeof(float) == 0);
    SKL_TRY(plan->backend->allocate(plan, workspace_size + (size_t)kept_count * sizeof(float), &memory, stream));
    const skl_status status = run(plan, tensors, memory, workspace_size, stream);
    plan->backend->release(plan, memory, stream);
    return status;
}

static skl_status run_once(const skl_problem *problem, const skl_options *options, const simple_tensors *tensors,
                           skl_stream stream)
{
    skl_problem p;
    skl_plan *plan = NULL;
    SKL_TRY(skl_struct_read(&skl_struct_problem, &p, problem));
    SKL_TRY(check_simple(&p));
    p.gradients = (tensors->dq_s != NULL ? SKL_DQ_S : 0U) | (tensors->dk_s != NULL ? SKL_DK_S : 0U);
    SKL_TRY(skl_plan_create(&plan, &p, options));
    const skl_status status = run_with_memory(plan, tensors, stream);
    skl_plan_destroy(plan);
    return status;
}

skl_status skl_attention_kl(const skl_problem *problem, const skl_options *options, const void *q_t, const void *k_t,
                            const void *q_s, const void *k_s, float *kl, skl_stream stream)
{
    const simple_tensors tensors = {.q_t = q_t, .k_t = k_t, .q_s = q_s, .k_s = k_s, .kl = kl};
    return kl == NULL ? skl_fail(SKL_ERROR_ARGUMENT, "kl=NULL: must be given")
                      : run_once(problem, options, &tensors, stream);
}

skl_status skl_attention_kl_backward(const skl_problem *problem, const skl_options *options, const void *q_t,
                                     const void *k_t, const void *q_s, const void *k_s, const float *grad_kl,
                                     float *kl, void *dq_s, void *dk_s, skl_stream stream)
{
    const simple_tensors tensors = {q_t, k_t, q_s, k_s, grad_kl, kl, dq_s, dk_s};
    return dq_s == NULL && dk_s == NULL
               ? skl_fail(SKL_ERROR_ARGUMENT, "dq_s=NULL, dk_s=NULL: at least one must be given; skl_attention_kl "
                                              "computes the KL alone")
               : run_once(problem, options, &tensors, stream);
}
