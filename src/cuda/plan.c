/* Plans of the CUDA backend: the device, the kernel, the launches of the usual calls and the workspace of all calls.
 */
#include "cuda/backend.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "base/stats.h"
#include "base/status.h"

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
    (void)cudaGetLastError(); /* clears the error: the CPU goes on */
}

/* Reads the facts about a device of this machine. Returns false and a reason if there is none. */
static bool read_device(int index, skl_cuda_device *device, char *reason, size_t reason_size)
{
    int count = 0, major = 0, minor = 0;
    cudaError_t error = cudaGetDeviceCount(&count);
    if (error != cudaSuccess || count == 0) {
        why_no_device(error, reason, reason_size);
        return false;
    }
    if (index < 0 || index >= count) {
        snprintf(reason, reason_size, "device_index=%d: must be 0..%d", index, count - 1);
        return false;
    }
    const struct {
        enum cudaDeviceAttr attribute;
        int *value;
    } attributes[] = {{cudaDevAttrComputeCapabilityMajor, &major},
                      {cudaDevAttrComputeCapabilityMinor, &minor},
                      {cudaDevAttrMultiProcessorCount, &device->sm_count},
                      {cudaDevAttrMaxSharedMemoryPerBlockOptin, &device->smem_per_block},
                      {cudaDevAttrMaxSharedMemoryPerMultiprocessor, &device->smem_per_sm}};
    for (size_t i = 0; i < sizeof attributes / sizeof attributes[0] && error == cudaSuccess; i++)
        error = cudaDeviceGetAttribute(attributes[i].value, attributes[i].attribute, index);
    if (error != cudaSuccess)
        snprintf(reason, reason_size, "device %d: %s", index, cudaGetErrorString(error));
    device->capability = major * 10 + minor;
    return error == cudaSuccess;
}

int skl_cuda_kernel_info_at(int32_t index, skl_kernel_info *info)
{
    static _Thread_local char reason[256];
    const skl_cuda_kernel *kernel = NULL;
    for (int32_t i = 0; (kernel = skl_cuda_kernel_at(i)) != NULL; i++)
        if (skl_cuda_has_plans(kernel) && index-- == 0)
            break;
    if (kernel == NULL)
        return 0;
    skl_cuda_device device = {0};
    const bool here = read_device(0, &device, reason, sizeof reason);
    const bool usable = here && skl_cuda_runs_on(kernel, device.capability);
    if (here && !usable)
        snprintf(reason, sizeof reason, "device 0 has compute capability %d.%d, the kernel needs %d.%d",
                 device.capability / 10, device.capability % 10, kernel->capability / 10, kernel->capability % 10);
    const bool rounds_gradients = kernel->dtype != SKL_F32;
    *info = (skl_kernel_info){sizeof *info,    kernel->name, SKL_CUDA, usable, usable ? kernel->detail : reason,
                              rounds_gradients};
    return 1;
}

/* ---- Plan --------------------------------------------------------------------------------------------------- */

static skl_status find_device(const skl_options *options, skl_cuda_device *device)
{
    char reason[256];
    if (options->gpu == NULL)
        return read_device(options->device_index, device, reason, sizeof reason)
                   ? SKL_OK
                   : skl_fail(SKL_ERROR_DEVICE, "%s", reason);
    const skl_cuda_device *const named = skl_cuda_device_named(options->gpu);
    if (named == NULL)
        return skl_fail(SKL_ERROR_ARGUMENT, "options.gpu=%s: must be %s", options->gpu, skl_cuda_device_names());
#ifdef SKL_WITHOUT_SM90
    if (named->capability == SKL_CAPABILITY_sm90)
        return skl_fail(SKL_ERROR_UNSUPPORTED, "options.gpu=%s: this build has no kernels for Hopper", options->gpu);
#endif
    *device = *named;
    return SKL_OK;
}

/* Returns the bytes of workspace that suffice for every call of an operation, whatever it requests and however its
 * tensors are laid out: the largest workspace of their launches. */
static size_t workspace_size_of(const skl_problem *p, const skl_cuda_target *target, skl_op op)
{
    const uint32_t rows[] = {SKL_ROW_KL, SKL_ROW_LSE_T | SKL_ROW_LSE_S, SKL_ROW_KL | SKL_ROW_DOT_T};
    const uint32_t of_teacher = SKL_DQ_T | SKL_DK_T, inputs = SKL_TENSOR_INPUTS;
    /* A kernel that computes dq may also give the KL: without dq, or without any gradient, a forward does. */
    const uint32_t gradients[] = {
        ~0U, of_teacher, ~of_teacher, ~(uint32_t)SKL_DQ_T, ~(uint32_t)SKL_DQ_S, ~(uint32_t)(SKL_DQ_T | SKL_DQ_S), 0};
    const skl_cuda_layout layouts[] = {skl_cuda_aligned, {~0U, ~inputs}, {~0U, inputs}, {~inputs, ~inputs}};
    const bool groups = skl_has_teacher_groups(p);
    const int row_count = op == SKL_OP_BACKWARD ? 1 : groups && !skl_is_indexer(p) ? 3 : 2;
    const int set_count = skl_op_has_gradients(op) ? sizeof gradients / sizeof gradients[0] : 1;
    const int lse_count = groups ? 2 : 1; /* only the teacher's mean depends on given LSEs */
    const uint32_t lse = SKL_STATS_LSE;   /* requested LSEs need no workspace */
    size_t size = 0;
    skl_cuda_launches launches;
    for (int n = 0; n < row_count * set_count * lse_count * 4; n++) {
        const skl_cuda_request request = {.op = op,
                                          .rows = rows[n % row_count],
                                          .gradients = p->gradients & gradients[n / row_count % set_count],
                                          .stats = op == SKL_OP_ATTENTION_STATS ? SKL_STATS_ALL & ~lse : 0,
                                          .lse_given = n / row_count / set_count % lse_count,
                                          .keys = p->len_k};
        skl_cuda_select(p, target, &request, &layouts[n / row_count / set_count / lse_count], &launches);
        size = launches.workspace_size > size ? launches.workspace_size : size;
    }
    return size;
}

static void select_usual(const skl_problem *p, skl_cuda_plan *of_cuda, skl_op op)
{
    const uint32_t of_values = op == SKL_OP_ATTENTION_BACKWARD ? 0 : SKL_DV_S;
    const uint32_t rows = SKL_ROW_KL | (skl_op_has_halves(p, op) ? SKL_ROW_LSE_T | SKL_ROW_LSE_S : 0U);
    const skl_cuda_request request = {.op = op,
                                      .rows = op == SKL_OP_BACKWARD || op == SKL_OP_PARTIAL ? 0 : rows,
                                      .gradients = skl_op_has_gradients(op) ? p->gradients & ~of_values : 0,
                                      .stats = op == SKL_OP_ATTENTION_STATS ? SKL_STATS_ALL : 0,
                                      .lse_given = op != SKL_OP_FORWARD,
                                      .keys = p->len_k};
    of_cuda->usual[op] = skl_cuda_normal_request(p, request);
    skl_cuda_select(p, &of_cuda->target, &of_cuda->usual[op], &skl_cuda_aligned, &of_cuda->launches[op]);
}

skl_status skl_cuda_plan_create(skl_plan *plan, const skl_options *options, const char *forced)
{
    const skl_problem *const p = &plan->problem;
    skl_cuda_target target = {.named = forced != NULL, .deterministic = options->deterministic};
    const skl_status status = find_device(options, &target.device);
    if (status != SKL_OK)
        return status;
    const int capability = target.device.capability;
    target.kernel = skl_cuda_find_kernel(p, capability, skl_cuda_work_of(p), forced);
    if (target.kernel == NULL && forced != NULL)
        return skl_fail(SKL_ERROR_ARGUMENT,
                        "%s=%s: no CUDA kernel of this name does this problem here; streamkl info lists them",
                        plan->forced_by, forced);
    if (target.kernel == NULL)
        return skl_fail(SKL_ERROR_UNSUPPORTED,
                        "device %d has compute capability %d.%d: the kernels of this build need %d.%d",
                        options->device_index, capability / 10, capability % 10, SKL_CAPABILITY_sm80 / 10,
                        SKL_CAPABILITY_sm80 % 10);
    skl_cuda_plan *const of_cuda = malloc(sizeof *of_cuda);
    if (of_cuda == NULL)
        return skl_fail(SKL_ERROR_MEMORY, "plan: its launches could not be allocated");
    of_cuda->target = target;
    for (int op = 0; op < SKL_OP_COUNT; op++) {
        plan->workspace_size[op] = workspace_size_of(p, &target, (skl_op)op);
        select_usual(p, of_cuda, (skl_op)op);
    }
    plan->kernel_name = target.kernel->name;
    plan->device_index = options->device_index;
    plan->of_backend = of_cuda;
    return SKL_OK;
}

const skl_cuda_launches *skl_cuda_plan_launches(const skl_plan *plan, const skl_call *call, skl_cuda_launches *other)
{
    const skl_problem *const p = &plan->problem;
    const skl_cuda_plan *const of_cuda = plan->of_backend;
    const skl_cuda_layout layout = skl_cuda_layout_of(p, call);
    const skl_cuda_request request = skl_cuda_normal_request(p, skl_cuda_request_of(p, call));
    _Static_assert(sizeof request == 6 * 4 + 8, "no padding: requests are compared as bytes");
    if (memcmp(&request, &of_cuda->usual[call->op], sizeof request) == 0 &&
        memcmp(&layout, &skl_cuda_aligned, sizeof layout) == 0)
        return &of_cuda->launches[call->op];
    skl_cuda_select(p, &of_cuda->target, &request, &layout, other);
    return other;
}
