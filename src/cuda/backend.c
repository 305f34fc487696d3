/* The CUDA backend: runs the launches that cuda/select chooses, on the caller's stream. It never allocates nor
 * synchronises. */
#include <stdbool.h>
#include <stdio.h>

#include "base/status.h"
#include "cuda/select.h"

/* ---- Devices ------------------------------------------------------------------------------------------------ */

/* Why the runtime finds no device. It reports a missing driver as it reports one of an older CUDA release. */
static void why_no_device(cudaError_t error, char *reason, size_t reason_size)
{
    int driver = 0; /* 12080 is CUDA 12.8; stays 0 where there is no driver */
    (void)cudaDriverGetVersion(&driver);
    if (error != cudaErrorInsufficientDriver)
        snprintf(reason, reason_size, "no CUDA device: %s",
                 error != cudaSuccess ? cudaGetErrorString(error) : "none");
    else if (driver == 0)
        snprintf(reason, reason_size, "no CUDA driver");
    else
        snprintf(reason, reason_size,
                 "the driver supports CUDA %d.%d at most, this build needs a driver for CUDA %d.0 or later",
                 driver / 1000, driver % 1000 / 10, CUDART_VERSION / 1000);
    (void)cudaGetLastError(); /* not sticky: the CPU goes on */
}

/* Compute capability of a device, 90 for 9.0; 0 and a reason if there is none. */
static int capability_of(int device, char *reason, size_t reason_size)
{
    int count = 0;
    cudaError_t error = cudaGetDeviceCount(&count);
    if (error != cudaSuccess || count == 0) {
        why_no_device(error, reason, reason_size);
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

static int kernel_at(int32_t index, skl_kernel_info *info)
{
    static _Thread_local char reason[256];
    /* Plans of the other kernels use one that carries the KL, or the joint backward; a plan cannot be made for it. */
    const skl_cuda_kernel *kernel = NULL;
    for (int32_t i = 0; (kernel = skl_cuda_kernel_at(i)) != NULL; i++)
        if (kernel->carrying == NULL && kernel->joint == NULL && index-- == 0)
            break;
    if (kernel == NULL)
        return 0;
    const int capability = capability_of(0, reason, sizeof reason);
    const bool usable = skl_cuda_runs_on(kernel, capability);
    if (capability != 0 && !usable)
        snprintf(reason, sizeof reason, "device 0 has compute capability %d.%d, the kernel needs %d.%d",
                 capability / 10, capability % 10, kernel->capability / 10, kernel->capability % 10);
    const bool rounds_gradients = kernel->dtype != SKL_F32;
    *info = (skl_kernel_info){kernel->name, SKL_CUDA, usable, usable ? kernel->detail : reason, rounds_gradients};
    return 1;
}

/* ---- Plan --------------------------------------------------------------------------------------------------- */

static skl_status read_device(skl_plan *plan)
{
    const struct {
        enum cudaDeviceAttr attribute;
        int32_t *value;
    } attributes[] = {{cudaDevAttrMultiProcessorCount, &plan->sm_count},
                      {cudaDevAttrMaxSharedMemoryPerBlockOptin, &plan->smem_per_block},
                      {cudaDevAttrMaxSharedMemoryPerMultiprocessor, &plan->smem_per_sm}};
    for (size_t i = 0; i < sizeof attributes / sizeof attributes[0]; i++) {
        const cudaError_t error =
            cudaDeviceGetAttribute(attributes[i].value, attributes[i].attribute, plan->device_index);
        if (error != cudaSuccess)
            return skl_fail(SKL_ERROR_DEVICE, "device %d: %s", plan->device_index, cudaGetErrorString(error));
    }
    return SKL_OK;
}

static skl_status plan_cuda(skl_plan *plan, const skl_options *options, const char *forced)
{
    char reason[256];
    const int capability = capability_of(options->device_index, reason, sizeof reason);
    if (capability == 0)
        return skl_fail(SKL_ERROR_DEVICE, "%s", reason);
    const skl_cuda_kernel *const kernel = skl_cuda_select_kernel(&plan->problem, capability, forced);
    if (kernel == NULL && forced != NULL)
        return skl_fail(SKL_ERROR_ARGUMENT,
                        "kernel=%s: no CUDA kernel of this name does this problem here; streamkl info lists them",
                        forced);
    if (kernel == NULL)
        return skl_fail(SKL_ERROR_UNSUPPORTED,
                        "device %d has compute capability %d.%d: the kernels of this build need %d.%d",
                        options->device_index, capability / 10, capability % 10, SKL_CAPABILITY_sm80 / 10,
                        SKL_CAPABILITY_sm80 % 10);
    plan->kernel = kernel;
    plan->kernel_name = kernel->name;
    plan->device_index = options->device_index;
    plan->capability = capability;
    plan->deterministic = options->deterministic;
    const skl_status status = read_device(plan);
    for (int op = 0; op < SKL_OP_COUNT && status == SKL_OK; op++)
        plan->workspace_size[op] = skl_cuda_workspace_size(plan, (skl_op)op);
    return status;
}

/* ---- Run ---------------------------------------------------------------------------------------------------- */

skl_launch_hook skl_cuda_launch_hook = NULL;

/* Makes the plan's device current while a call launches, and the caller's again after it. Also where it is current
 * already: a thread's first cudaSetDevice gives it a context, without which the driver encodes no TMA descriptor. */
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

static skl_status run(const skl_plan *plan, const skl_call *call)
{
    int former = 0;
    const skl_status status = enter_device(plan->device_index, &former);
    if (status != SKL_OK)
        return status;
    skl_cuda_params params, halves;
    skl_cuda_launches launches;
    skl_cuda_select(plan, call, &params, &launches);
    cudaError_t error = cudaSuccess;
    int i = 0;
    for (; i < launches.count && error == cudaSuccess; i++)
        error = launches.at[i].launcher(skl_cuda_launch_params(&params, &launches.at[i], &halves), &launches.at[i]);
    leave_device(plan->device_index, former);
    if (error == cudaSuccess)
        return SKL_OK;
    return skl_fail(SKL_ERROR_DEVICE, "%s, %s: %s", launches.at[i - 1].kernel, launches.at[i - 1].step,
                    cudaGetErrorString(error));
}

static skl_status explain(const skl_plan *plan, const skl_call *call, skl_text *text)
{
    int former = 0;
    const skl_status status = enter_device(plan->device_index, &former);
    if (status != SKL_OK)
        return status;
    skl_cuda_params params;
    skl_cuda_launches launches;
    skl_cuda_select(plan, call, &params, &launches);
    leave_device(plan->device_index, former);
    for (int i = 0; i < launches.count; i++) {
        const skl_cuda_launch *const launch = &launches.at[i];
        skl_text_add(text, "%s: %s, %s, %d split%s, %zu bytes of workspace (%s)\n", launch->step, launch->kernel,
                     launch->variant, (int)launch->num_splits, launch->num_splits == 1 ? "" : "s",
                     launch->workspace_size, launch->reason);
    }
    return SKL_OK;
}

/* ---- States ------------------------------------------------------------------------------------------------- */

/* Runs one launch outside of skl_cuda_select on the plan's device. */
typedef struct row_step {
    cudaError_t (*launch)(const skl_cuda_params *params, const void *argument);
    const char *name;
} row_step;

static skl_status run_step(const skl_plan *plan, const skl_call *call, row_step step, const void *argument)
{
    int former = 0;
    const skl_status status = enter_device(plan->device_index, &former);
    if (status != SKL_OK)
        return status;
    const skl_cuda_params params = {.problem = plan->problem, .call = *call};
    const cudaError_t error = step.launch(&params, argument);
    leave_device(plan->device_index, former);
    return error == cudaSuccess ? SKL_OK : skl_fail(SKL_ERROR_DEVICE, "%s: %s", step.name, cudaGetErrorString(error));
}

static cudaError_t launch_merge(const skl_cuda_params *params, const void *from)
{
    return skl_cuda_states_merge(skl_state_count(&params->problem), params->call.states, from, params->call.stream);
}

static skl_status states_merge(const skl_plan *plan, skl_row_state *into, const skl_row_state *from,
                               skl_stream stream)
{
    const skl_call call = {.states = into, .stream = stream};
    const row_step merge = {launch_merge, "states, merge"};
    return run_step(plan, &call, merge, from);
}

static cudaError_t launch_finish(const skl_cuda_params *params, const void *unused)
{
    (void)unused;
    return skl_cuda_states_finish(params);
}

static skl_status states_finish(const skl_plan *plan, const skl_call *call)
{
    const row_step finish = {launch_finish, "states, finish"};
    return skl_state_count(&plan->problem) == 0 ? SKL_OK : run_step(plan, call, finish, NULL);
}

/* ---- Sinks -------------------------------------------------------------------------------------------------- */

static cudaError_t launch_sink_rows(const skl_cuda_params *params, const void *rows)
{
    return skl_cuda_sink_rows(params, rows);
}

static skl_status sink_rows(const skl_plan *plan, const skl_sink_rows *rows)
{
    const skl_call call = {.inputs = rows->inputs, .keys = {0, INT64_MAX}, .stream = rows->stream};
    const row_step step = {launch_sink_rows, "sinks, rows"};
    return run_step(plan, &call, step, rows);
}

static cudaError_t launch_sink_gradients(const skl_cuda_params *params, const void *kl)
{
    return skl_cuda_sink_gradients(params, kl);
}

static skl_status sink_gradients(const skl_plan *plan, const skl_call *call, const skl_input *kl)
{
    const row_step step = {launch_sink_gradients, "sinks, gradients"};
    return run_step(plan, call, step, kl);
}

const skl_backend skl_cuda_backend = {SKL_CUDA, plan_cuda, run,       states_merge,  states_finish,
                                      explain,  kernel_at, sink_rows, sink_gradients};
