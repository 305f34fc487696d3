/* The CUDA backend: binds the launches of a call to its tensors and runs them on the caller's stream. A run neither
 * allocates nor synchronises. */
#include "cuda/backend.h"

#include "base/status.h"

/* ---- Run ---------------------------------------------------------------------------------------------------- */

skl_launch_hook skl_cuda_launch_hook = NULL;

/* Makes the plan's device current while a call launches, and the caller's again after it. Also where it is current
 * already: a thread's first cudaSetDevice gives it a context, without which the driver encodes no TMA descriptor. */
static skl_status enter_device(const skl_plan *plan, int *former)
{
    const skl_cuda_plan *const of_cuda = plan->of_backend;
    if (of_cuda->device.name != NULL)
        return skl_fail(SKL_ERROR_UNSUPPORTED, "options.gpu=%s: such a plan explains its launches and runs none",
                        of_cuda->device.name);
    cudaError_t error = cudaGetDevice(former);
    if (error == cudaSuccess)
        error = cudaSetDevice(plan->device_index);
    if (error == cudaSuccess)
        return SKL_OK;
    return skl_fail(SKL_ERROR_DEVICE, "device %d: %s", plan->device_index, cudaGetErrorString(error));
}

static void leave_device(int device, int former)
{
    if (former != device)
        (void)cudaSetDevice(former);
}

static skl_status refuse(const skl_cuda_launches *launches, skl_op op)
{
    const bool forward = op == SKL_OP_ATTENTION_FORWARD;
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
    const skl_cuda_params shared = skl_cuda_shared_params(&plan->problem, call, launches);
    cudaError_t error = cudaSuccess;
    const skl_cuda_launch *launch = launches->at;
    for (; launch < launches->at + launches->count && error == cudaSuccess; launch++) {
        const skl_cuda_params params = skl_cuda_launch_params(&shared, launches, launch);
        error = launch->launcher(&params, launch);
    }
    leave_device(plan->device_index, former);
    if (error == cudaSuccess)
        return SKL_OK;
    return skl_fail(SKL_ERROR_DEVICE, "%s, %s: %s", launch[-1].kernel, launch[-1].step, cudaGetErrorString(error));
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

typedef cudaError_t (*row_step)(const skl_cuda_params *params, const void *argument);

static skl_status run_step(const skl_plan *plan, const skl_call *call, const char *name, row_step step,
                           const void *argument)
{
    int former = 0;
    const skl_status status = enter_device(plan, &former);
    if (status != SKL_OK)
        return status;
    const skl_cuda_params params = {.problem = plan->problem, .call = *call};
    const cudaError_t error = step(&params, argument);
    leave_device(plan->device_index, former);
    return error == cudaSuccess ? SKL_OK : skl_fail(SKL_ERROR_DEVICE, "%s: %s", name, cudaGetErrorString(error));
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

static skl_status sink_rows(const skl_plan *plan, const skl_sink_rows *rows)
{
    const skl_call call = {.inputs = rows->inputs, .keys = {0, INT64_MAX}, .stream = rows->stream};
    return run_step(plan, &call, "sinks, rows", skl_cuda_sink_rows, rows);
}

static skl_status sink_gradients(const skl_plan *plan, const skl_call *call, const skl_input *kl)
{
    return run_step(plan, call, "sinks, gradients", skl_cuda_sink_gradients, kl);
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
                                           cudaGetErrorString(error));
}

static void release(const skl_plan *plan, void *memory, skl_stream stream)
{
    int former = 0;
    if (enter_device(plan, &former) != SKL_OK)
        return;
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
                                      .sink_rows = sink_rows,
                                      .sink_gradients = sink_gradients};
