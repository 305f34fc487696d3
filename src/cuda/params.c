/* Parameters of launches: the tensors of a call, as the kernels read them. */
#include "cuda/backend.h"

#include <math.h>

static skl_cuda_argument argument_of(const skl_side *side)
{
    const bool capped = skl_caps_logits(side->softcap);
    /* Where only the other argument has a softcap, this one gets a cap so large that tanh u is u to the last bit. */
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

/* Where the teacher's LSEs of a group are computed: in rows.lse_t, or in the workspace. */
static skl_output computed_lse_of(const skl_problem *p, const skl_call *call, const skl_cuda_launches *launches)
{
    return call->rows.lse_t.data != NULL ? call->rows.lse_t
                                         : skl_output_contiguous((char *)call->workspace + launches->lse_at,
                                                                 p->heads_t, skl_query_rows(p).rows, 1);
}

static skl_input input_from(const skl_input *tensor, skl_dtype dtype, int64_t head)
{
    skl_input from = *tensor;
    from.data = (const char *)tensor->data + (size_t)(head * tensor->stride_head) * skl_dtype_size(dtype);
    return from;
}

static skl_cuda_params halves_of(const skl_problem *p, const skl_call *call, bool of_teacher, skl_output lse)
{
    const skl_side side = of_teacher ? skl_teacher_of(p, call) : skl_student_of(p, call);
    const skl_cuda_halves halves = skl_cuda_halves_of(p, of_teacher);
    skl_call forward = {.op = SKL_OP_FORWARD,
                        .inputs = call->inputs,
                        .keys = call->keys,
                        .workspace = call->workspace,
                        .stream = call->stream};
    const skl_input none = {0};
    forward.inputs.q_t = *side.q;
    forward.inputs.k_t = *side.k;
    forward.inputs.q_s = input_from(side.q, side.dtype, halves.apart ? halves.heads : 0);
    forward.inputs.k_s = input_from(side.k, side.dtype, halves.apart && side.key_heads > 1 ? halves.key_heads : 0);
    forward.inputs.lse_t = forward.inputs.lse_s = none;
    forward.rows.lse_t = forward.rows.lse_s = lse;
    forward.rows.lse_s.data = halves.apart ? (float *)lse.data + halves.heads * lse.stride_head : NULL;
    return params_of(&halves.problem, &forward);
}

skl_cuda_params skl_cuda_shared_params(const skl_problem *p, const skl_call *call, const skl_cuda_launches *launches)
{
    const bool reverse = p->direction == SKL_KL_REVERSE;
    skl_cuda_params params = params_of(p, call);
    if (launches->term_dim > 0)
        (void)skl_cuda_lay_out_terms(p, launches->term_dim, (char *)call->workspace + launches->terms_at,
                                     reverse ? &params.b : &params.a, reverse ? &params.a : &params.b);
    if (launches->has_key_bounds)
        params.key_bounds = (int32_t *)(void *)((char *)call->workspace + launches->key_bounds_at);
    return params;
}

skl_cuda_params skl_cuda_launch_params(const skl_cuda_params *shared, const skl_cuda_launches *launches,
                                       const skl_cuda_launch *launch)
{
    const skl_problem *const p = &shared->problem;
    const skl_output lse_t = computed_lse_of(p, &shared->call, launches);
    skl_cuda_params params = *shared;
    if (launch->halves)
        params =
            halves_of(p, &shared->call, launch->teacher_side, launch->teacher_side ? lse_t : shared->call.rows.lse_s);
    if (launch->lse_computed)
        params.call.inputs.lse_t = (skl_input){lse_t.data, lse_t.stride_batch, lse_t.stride_head, lse_t.stride_row};
    params.call.workspace = (char *)shared->call.workspace + launch->workspace_at;
    return params;
}
