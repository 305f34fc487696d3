#include "device/device.h"

#include <cuda_runtime_api.h>
#include <stdio.h>

static skl_status check(cudaError_t error, const char *doing)
{
    if (error == cudaSuccess)
        return SKL_OK;
    (void)cudaGetLastError(); /* reported here: clear it for the next call */
    return device_fail(SKL_ERROR_DEVICE, "%s: %s", doing, cudaGetErrorString(error));
}

/* cudaFree() creates the context now, so that no measurement includes it. */
skl_status gpu_open(int32_t index)
{
    cudaError_t error = cudaSetDevice(index);
    if (error == cudaSuccess)
        error = cudaFree(NULL);
    return check(error, "opening the GPU");
}

static double gib(size_t size)
{
    return (double)size / 0x1p30;
}

skl_status gpu_allocate(size_t size, const char *what, void **memory)
{
    const cudaError_t error = cudaMalloc(memory, size);
    if (error != cudaErrorMemoryAllocation)
        return check(error, what);
    (void)cudaGetLastError();
    *memory = NULL;
    size_t free_size = 0, total_size = 0;
    (void)cudaMemGetInfo(&free_size, &total_size);
    return device_fail(SKL_ERROR_MEMORY,
                       "out of memory on the GPU: %s needs %zu bytes (%.2f GiB), %.2f of its %.2f GiB are free", what,
                       size, gib(size), gib(free_size), gib(total_size));
}

void gpu_free(void *memory)
{
    (void)cudaFree(memory); /* any error was already reported by the call that caused it */
}

skl_status gpu_copy(void *to, const void *from, size_t size)
{
    return check(cudaMemcpy(to, from, size, cudaMemcpyDefault), "copying to or from the GPU");
}

/* ---- Time: events in the default stream, which the callers of the library use -------------------------------- */

skl_status gpu_timer_start(void *events[2])
{
    cudaEvent_t created[2] = {NULL, NULL};
    cudaError_t error = cudaEventCreate(&created[0]);
    if (error == cudaSuccess)
        error = cudaEventCreate(&created[1]);
    if (error == cudaSuccess)
        error = cudaEventRecord(created[0], NULL);
    events[0] = created[0];
    events[1] = created[1];
    return check(error, "starting a timer");
}

skl_status gpu_timer_stop(void *const events[2], double *seconds)
{
    float milliseconds = 0;
    cudaError_t error = cudaEventRecord(events[1], NULL);
    if (error == cudaSuccess)
        error = cudaEventSynchronize(events[1]);
    if (error == cudaSuccess)
        error = cudaEventElapsedTime(&milliseconds, events[0], events[1]);
    *seconds = 1e-3 * (double)milliseconds;
    (void)cudaEventDestroy(events[0]);
    (void)cudaEventDestroy(events[1]);
    return check(error, "waiting for the kernels");
}

skl_status gpu_describe(char *name, size_t size)
{
    int index = 0;
    struct cudaDeviceProp gpu = {.name = ""};
    cudaError_t error = cudaGetDevice(&index);
    if (error == cudaSuccess)
        error = cudaGetDeviceProperties(&gpu, index);
    snprintf(name, size, "%s", gpu.name);
    return check(error, "reading the properties of the GPU");
}
