/* The CUDA backend: binds the launches of a call to its tensors and runs them on the caller's stream. A run neither
 * allocates nor synchronizes. */
#include "cuda/backend.h"

#include <math.h>

#include "base/status.h"

/* ---- Parameters of launches ----------------------------------------------------------------------------------- */

static skl_cuda_argument argument_of(const skl_side *side)
{
    const bool capped = skl_caps_logits(side->softcap);
    skl_cuda_argument argument = {.q = *side->q,
                                  .k = *side->k,
                                  .heads_per_key = (int32_t)(side->heads / side->key_heads),
                                  .dim = (int32_t)side->dim,
                                  .capped = capped || side->linear,
                                  .linear = side->linear,
                                  .scale = 1.0F,
                                  .product_max = -1.0F}; /* the polynomial of a softcap covers no product */
    if (side->linear)
        return argument;
    /* If only the other argument has a softcap, this one gets a cap so large that tanh u is u to the last bit. */
    const float no_softcap = 0x1p22F, tanh_max = capped ? SKL_TANH_MAX : 1e-4F;
    argument.scale = capped ? side->scale / side->softcap : (float)((double)side->scale * SKL_LOG2E_DOUBLE);
    argument.softcap_2 = capped ? side->softcap * SKL_LOG2E : 0.0F;
    argument.inverse_softcap_2 = capped ? 1.0F / argument.softcap_2 : 0.0F;
    argument.tanh_factor = capped ? argument.softcap_2 : no_softcap;
    argument.tanh_scale = capped ? argument.scale : argument.scale / no_softcap;
    argument.product_max = tanh_max / fabsf(argument.tanh_scale);
    return argument;
}

/* Statistics describe the student, b, whatever the direction. */
static skl_cuda_params params_of(const skl_problem *p, const skl_call *call)
{
    const bool reverse = p->direction == SKL_KL_REVERSE && call->op != SKL_OP_ATTENTION_STATS;
    const skl_side teacher = skl_teacher_of(p, call), student = skl_student_of(p, call);
    const skl_cuda_params params = {.problem = *p,
                                    .call = *call,
                                    .a = argument_of(reverse ? &student : &teacher),
                                    .b = argument_of(reverse ? &teacher : &student)};
    return params;
}

static bool is_stats(const skl_call *call)
{
    return call->op == SKL_OP_ATTENTION_STATS;
}

/* Returns the place of LSEs that the call does not give and a launch computes, for a teacher group or for statistics:
 * the call's output, or the workspace. */
static skl_output computed_lse_of(const skl_problem *p, const skl_call *call, const skl_cuda_launches *launches)
{
    const skl_output *const out = is_stats(call) ? &call->stats->lse : &call->rows.lse_t;
    const int64_t heads = is_stats(call) ? p->heads_s : p->heads_t;
    return out->data != NULL
               ? *out
               : skl_output_contiguous((char *)call->workspace + launches->lse_at, heads, skl_query_rows(p).rows, 1);
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
    if (p->sinks) {
        forward.inputs.sink_t = of_teacher ? call->inputs.sink_t : call->inputs.sink_s;
        forward.inputs.sink_s = forward.inputs.sink_t + (halves.apart ? halves.heads : 0);
    }
    forward.rows.lse_t = forward.rows.lse_s = lse;
    forward.rows.lse_s.data = halves.apart ? (float *)lse.data + halves.heads * lse.stride_head : NULL;
    skl_cuda_params params = params_of(&halves.problem, &forward);
    skl_side first = skl_teacher_of(&halves.problem, &forward);
    first.linear = side.linear;
    params.a = argument_of(&first);
    return params;
}

/* Parameters that all launches of a call share. */
static skl_cuda_params shared_params(const skl_problem *p, const skl_call *call, const skl_cuda_launches *launches)
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

/* Parameters of one launch: its part of the workspace, and the LSEs that an earlier launch computed. */
static skl_cuda_params launch_params(const skl_cuda_params *shared, const skl_cuda_launches *launches,
                                     const skl_cuda_launch *launch)
{
    const skl_problem *const p = &shared->problem;
    const skl_output lse = computed_lse_of(p, &shared->call, launches);
    const bool stats = is_stats(&shared->call);
    skl_cuda_params params = *shared;
    if (launch->op != shared->call.op)
        params.call = skl_call_half(&shared->call, launch->op);
    if (launch->halves)
        params = halves_of(p, &shared->call, launch->teacher_side,
                           launch->teacher_side || stats ? lse : shared->call.rows.lse_s);
    if (launch->lse_computed)
        *(stats ? &params.call.inputs.lse_s : &params.call.inputs.lse_t) = skl_input_of(&lse);
    const bool shares_workspace = stats && !launch->halves;
    params.call.workspace =
        (char *)shared->call.workspace + (shares_workspace ? launches->stats_at : launch->workspace_at);
    return params;
}

/* ---- Run ---------------------------------------------------------------------------------------------------- */

skl_launch_hook skl_cuda_launch_hook = NULL;

/* Returns an error's text, and clears the error. Launchers peek at the last error of their thread, so an error that
 * stays would fail all later calls of the thread. */
static const char *take_error(cudaError_t error)
{
    (void)cudaGetLastError();
    return cudaGetErrorString(error);
}

/* Makes the plan's device current while a call launches, and the caller's again after it. Also where it is current
 * already: a thread's first cudaSetDevice gives it a context, without which the driver encodes no TMA descriptor. */
static skl_status enter_device(const skl_plan *plan, int *former)
{
    const char *const named = ((const skl_cuda_plan *)plan->of_backend)->target.device.name;
    if (named != NULL)
        return skl_fail(SKL_ERROR_UNSUPPORTED, "options.gpu=%s: such a plan explains its launches and runs none",
                        named);
    cudaError_t error = cudaGetDevice(former);
    if (error == cudaSuccess)
        error = cudaSetDevice(plan->device_index);
    const char *const text = take_error(error); /* also of the caller, whose error launchers would take for theirs */
    return error == cudaSuccess ? SKL_OK : skl_fail(SKL_ERROR_DEVICE, "device %d: %s", plan->device_index, text);
}

static void leave_device(int device, int former)
{
    if (former != device)
        (void)cudaSetDevice(former);
}

static skl_status refuse(const skl_cuda_launches *launches, skl_op op)
{
    const bool forward = op == SKL_OP_ATTENTION_FORWARD;
    if (op == SKL_OP_ATTENTION_STATS)
        return skl_fail(SKL_ERROR_UNSUPPORTED,
                        "skl_attention_stats on a GPU: no kernel does this (%s); call it on the CPU, with "
                        "options.device=SKL_CPU and "
                        "tensors in host memory",
                        launches->refusal);
    return skl_fail(SKL_ERROR_UNSUPPORTED, "skl_attention_%s on a GPU: no kernel carries the KL here (%s); call %s",
                    forward ? "forward" : "backward", launches->refusal,
                    forward ? "your attention and skl_forward"
                            : "skl_forward_backward and the backward of your attention, and add their gradients");
}

static skl_status run(const skl_plan *plan, const skl_call *call)
{
    skl_cuda_launches other;
    const skl_cuda_launches *const launches = skl_cuda_plan_launches(plan, call, &other);
    if (launches->refusal != NULL)
        return refuse(launches, call->op);
    int former = 0;
    const skl_status status = enter_device(plan, &former);
    if (status != SKL_OK)
        return status;
    const skl_cuda_params shared = shared_params(&plan->problem, call, launches);
    cudaError_t error = cudaSuccess;
    const skl_cuda_launch *launch = launches->at;
    for (; launch < launches->at + launches->count && error == cudaSuccess; launch++) {
        const skl_cuda_params params = launch_params(&shared, launches, launch);
        error = launch->launcher(&params, launch);
    }
    leave_device(plan->device_index, former);
    if (error == cudaSuccess)
        return SKL_OK;
    return skl_fail(SKL_ERROR_DEVICE, "%s, %s: %s", launch[-1].kernel, launch[-1].step, take_error(error));
}

static skl_status explain(const skl_plan *plan, const skl_call *call, skl_text *text)
{
    skl_cuda_launches other;
    const skl_cuda_launches *const launches = skl_cuda_plan_launches(plan, call, &other);
    if (launches->refusal != NULL)
        return refuse(launches, call->op);
    for (int i = 0; i < launches->count; i++) {
        const skl_cuda_launch *const launch = &launches->at[i];
        skl_text_add(text, "%s: %s, %s, %d split%s, %zu bytes of workspace (%s)\n", launch->step, launch->kernel,
                     launch->variant, (int)launch->num_splits, launch->num_splits == 1 ? "" : "s",
                     launch->workspace_size, launch->reason);
    }
    return SKL_OK;
}

/* ---- States and sinks: steps over rows ------------------------------------------------------------------------ */

static skl_status run_step(const skl_plan *plan, const skl_call *call, const char *name, skl_cuda_row_step *step,
                           const void *argument)
{
    int former = 0;
    const skl_status status = enter_device(plan, &former);
    if (status != SKL_OK)
        return status;
    const skl_cuda_params params = {.problem = plan->problem, .call = *call};
    const cudaError_t error = step(&params, argument);
    leave_device(plan->device_index, former);
    return error == cudaSuccess ? SKL_OK : skl_fail(SKL_ERROR_DEVICE, "%s: %s", name, take_error(error));
}

static skl_status states_merge(const skl_plan *plan, skl_row_state *into, const skl_row_state *from,
                               skl_stream stream)
{
    const skl_call call = {.states = into, .stream = stream};
    return run_step(plan, &call, "states, merge", skl_cuda_states_merge, from);
}

static skl_status states_finish(const skl_plan *plan, const skl_call *call)
{
    return skl_state_count(&plan->problem) == 0
               ? SKL_OK
               : run_step(plan, call, "states, finish", skl_cuda_states_finish, NULL);
}

static skl_status sink_gradients(const skl_plan *plan, const skl_call *call)
{
    return run_step(plan, call, "sinks, gradients", skl_cuda_sink_gradients, NULL);
}

/* ---- Memory of one call --------------------------------------------------------------------------------------- */

static skl_status allocate(const skl_plan *plan, size_t size, void **memory, skl_stream stream)
{
    int former = 0;
    SKL_TRY(enter_device(plan, &former));
    const cudaError_t error = cudaMallocAsync(memory, size > 0 ? size : 1, stream);
    leave_device(plan->device_index, former);
    return error == cudaSuccess ? SKL_OK
                                : skl_fail(SKL_ERROR_MEMORY, "workspace: %zu bytes could not be allocated: %s", size,
                                           take_error(error));
}

static void release(const skl_plan *plan, void *memory, skl_stream stream)
{
    int former = 0;
    if (cudaGetDevice(&former) != cudaSuccess || cudaSetDevice(plan->device_index) != cudaSuccess)
        return; /* the call has failed, and its message stays */
    (void)cudaFreeAsync(memory, stream);
    leave_device(plan->device_index, former);
}

const skl_backend skl_cuda_backend = {.device = SKL_CUDA,
                                      .plan = skl_cuda_plan_create,
                                      .run = run,
                                      .states_merge = states_merge,
                                      .states_finish = states_finish,
                                      .allocate = allocate,
                                      .release = release,
                                      .explain = explain,
                                      .kernel_at = skl_cuda_kernel_info_at,
                                      .sink_gradients = sink_gradients};
