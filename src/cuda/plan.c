/* Plans of the CUDA backend: the device, the kernel, the launches of the usual calls and the workspace of all calls.
 */
#include "cuda/backend.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>

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

int skl_cuda_kernel_info_at(int32_t index, skl_kernel_info *info)
{
    static _Thread_local char reason[256];
    const skl_cuda_kernel *kernel = NULL;
    for (int32_t i = 0; (kernel = skl_cuda_kernel_at(i)) != NULL; i++)
        if (skl_cuda_has_plans(kernel) && index-- == 0)
            break;
    if (kernel == NULL)
        return 0;
    const int capability = capability_of(0, reason, sizeof reason);
    const bool usable = skl_cuda_runs_on(kernel, capability);
    if (capability != 0 && !usable)
        snprintf(reason, sizeof reason, "device 0 has compute capability %d.%d, the kernel needs %d.%d",
                 capability / 10, capability % 10, kernel->capability / 10, kernel->capability % 10);
    const bool rounds_gradients = kernel->dtype != SKL_F32;
    *info = (skl_kernel_info){sizeof *info,    kernel->name, SKL_CUDA, usable, usable ? kernel->detail : reason,
                              rounds_gradients};
    return 1;
}

/* ---- Plan --------------------------------------------------------------------------------------------------- */

static skl_status read_device(int device_index, skl_cuda_device *device)
{
    char reason[256];
    device->capability = capability_of(device_index, reason, sizeof reason);
    if (device->capability == 0)
        return skl_fail(SKL_ERROR_DEVICE, "%s", reason);
    const struct {
        enum cudaDeviceAttr attribute;
        int32_t *value;
    } attributes[] = {{cudaDevAttrMultiProcessorCount, &device->sm_count},
                      {cudaDevAttrMaxSharedMemoryPerBlockOptin, &device->smem_per_block},
                      {cudaDevAttrMaxSharedMemoryPerMultiprocessor, &device->smem_per_sm}};
    for (size_t i = 0; i < sizeof attributes / sizeof attributes[0]; i++) {
        const cudaError_t error = cudaDeviceGetAttribute(attributes[i].value, attributes[i].attribute, device_index);
        if (error != cudaSuccess)
            return skl_fail(SKL_ERROR_DEVICE, "device %d: %s", device_index, cudaGetErrorString(error));
    }
    return SKL_OK;
}

static skl_status find_device(const skl_options *options, skl_cuda_device *device)
{
    if (options->gpu == NULL)
        return read_device(options->device_index, device);
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

/* What all calls of an operation of a plan have in common. */
static skl_cuda_request request_of(const skl_cuda_plan *of_cuda, skl_op op)
{
    const skl_cuda_request request = {
        .op = op, .deterministic = of_cuda->deterministic, .named = of_cuda->named, .kernel = of_cuda->kernel};
    return request;
}

/* Bytes of workspace that suffice for every call of an operation, whatever it asks for and however its tensors are
 * laid out: the largest of what the launches of these calls ask for. */
static size_t workspace_size_of(const skl_problem *p, const skl_cuda_plan *of_cuda, skl_op op)
{
    const uint32_t rows[] = {SKL_ROW_KL, SKL_ROW_LSE_T | SKL_ROW_LSE_S, SKL_ROW_KL | SKL_ROW_DOT_T};
    const uint32_t of_teacher = SKL_DQ_T | SKL_DK_T;
    /* A kernel that computes dq may also give the KL: without dq, or without any gradient, a forward does. */
    const uint32_t gradients[] = {
        ~0U, of_teacher, ~of_teacher, ~(uint32_t)SKL_DQ_T, ~(uint32_t)SKL_DQ_S, ~(uint32_t)(SKL_DQ_T | SKL_DQ_S), 0};
    const skl_cuda_layout all = skl_cuda_aligned;
    const skl_cuda_layout layouts[] = {all,
                                       {all.copied, 0, all.paired, all.summed},
                                       {all.copied, all.addressed, all.paired, 0},
                                       {0, 0, all.paired, all.summed}};
    const bool groups = skl_has_teacher_groups(p);
    const int row_count = op == SKL_OP_BACKWARD ? 1 : groups && !skl_is_indexer(p) ? 3 : 2;
    const int set_count = skl_op_has_gradients(op) ? sizeof gradients / sizeof gradients[0] : 1;
    const int lse_count = groups ? 2 : 1; /* only the teacher's mean depends on given LSEs */
    size_t size = 0;
    skl_cuda_launches launches;
    for (int n = 0; n < row_count * set_count * lse_count * 4; n++) {
        skl_cuda_request request = request_of(of_cuda, op);
        request.rows = rows[n % row_count];
        request.gradients = p->gradients & gradients[n / row_count % set_count];
        request.lse_given = n / row_count / set_count % lse_count;
        request.keys = p->len_k;
        skl_cuda_select(p, &request, &layouts[n / row_count / set_count / lse_count], &of_cuda->device, &launches);
        size = launches.workspace_size > size ? launches.workspace_size : size;
    }
    return size;
}

/* A copy of the plan on the heap, followed by the launches of its usual calls; NULL: no memory. */
static skl_cuda_plan *keep_plan(const skl_problem *p, const skl_cuda_plan *made)
{
    skl_cuda_launches launches[SKL_OP_COUNT];
    skl_cuda_request usual[SKL_OP_COUNT];
    size_t sizes[SKL_OP_COUNT], size = sizeof *made;
    for (int op = 0; op < SKL_OP_COUNT; op++) {
        const uint32_t of_values = op == SKL_OP_ATTENTION_BACKWARD ? 0 : SKL_DV_S;
        skl_cuda_request request = request_of(made, (skl_op)op);
        request.rows = op == SKL_OP_BACKWARD || op == SKL_OP_PARTIAL ? 0 : SKL_ROW_KL;
        request.gradients = skl_op_has_gradients((skl_op)op) ? p->gradients & ~of_values : 0;
        request.lse_given = op != SKL_OP_FORWARD;
        request.keys = p->len_k;
        usual[op] = skl_cuda_normal_request(p, request);
        skl_cuda_select(p, &usual[op], &skl_cuda_aligned, &made->device, &launches[op]);
        sizes[op] = offsetof(skl_cuda_launches, at) + (size_t)launches[op].count * sizeof(skl_cuda_launch);
        size += sizes[op];
    }
    skl_cuda_plan *const kept = malloc(size);
    if (kept == NULL)
        return NULL;
    *kept = *made;
    memcpy(kept->usual, usual, sizeof usual);
    char *next = (char *)(kept + 1);
    for (int op = 0; op < SKL_OP_COUNT; next += sizes[op], op++)
        kept->usual_launches[op] = memcpy(next, &launches[op], sizes[op]);
    return kept;
}

skl_status skl_cuda_plan_create(skl_plan *plan, const skl_options *options, const char *forced)
{
    skl_cuda_plan made = {.deterministic = options->deterministic};
    const skl_status status = find_device(options, &made.device);
    if (status != SKL_OK)
        return status;
    const int capability = made.device.capability;
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
    made.kernel = kernel;
    made.named = forced != NULL;
    plan->kernel_name = kernel->name;
    plan->device_index = options->device_index;
    for (int op = 0; op < SKL_OP_COUNT; op++)
        plan->workspace_size[op] = workspace_size_of(&plan->problem, &made, (skl_op)op);
    plan->of_backend = keep_plan(&plan->problem, &made);
    return plan->of_backend != NULL ? SKL_OK
                                    : skl_fail(SKL_ERROR_MEMORY, "plan: its launches could not be allocated");
}

/* Requests of one plan: only what calls differ in is compared. */
static bool is_same_request(const skl_cuda_request *a, const skl_cuda_request *b)
{
    return a->op == b->op && a->rows == b->rows && a->gradients == b->gradients && a->lse_given == b->lse_given &&
           a->key_lengths == b->key_lengths && a->keys == b->keys;
}

const skl_cuda_launches *skl_cuda_plan_launches(const skl_plan *plan, const skl_call *call, skl_cuda_launches *other)
{
    const skl_cuda_plan *const of_cuda = plan->of_backend;
    const skl_cuda_layout layout = skl_cuda_layout_of(&plan->problem, call);
    skl_cuda_request request = skl_cuda_normal_request(&plan->problem, skl_cuda_request_of(&plan->problem, call));
    request.deterministic = of_cuda->deterministic;
    request.named = of_cuda->named;
    request.kernel = of_cuda->kernel;
    if (is_same_request(&request, &of_cuda->usual[call->op]) &&
        memcmp(&layout, &skl_cuda_aligned, sizeof layout) == 0)
        return of_cuda->usual_launches[call->op];
    skl_cuda_select(&plan->problem, &request, &layout, &of_cuda->device, other);
    return other;
}
