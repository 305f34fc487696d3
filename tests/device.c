#include "device.h"

#include "case_support.h"

#if defined(SKL_WITH_CUDA)

#include <cuda_runtime_api.h>

static void check(cudaError_t error)
{
    if (error != cudaSuccess)
        test_abandon("CUDA: %s", cudaGetErrorString(error));
}

void device_share(void *pages, size_t size)
{
    if (test_device() == SKL_CUDA)
        check(cudaHostRegister(pages, size, cudaHostRegisterDefault));
}

void device_unshare(void *pages)
{
    if (test_device() == SKL_CUDA)
        check(cudaHostUnregister(pages));
}

void device_wait(void)
{
    if (test_device() == SKL_CUDA)
        check(cudaDeviceSynchronize());
}

#else

void device_share(void *pages, size_t size)
{
    (void)pages;
    (void)size;
}

void device_unshare(void *pages)
{
    (void)pages;
}

void device_wait(void)
{
}

#endif
