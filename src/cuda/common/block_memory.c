/* What the blocks of each kernel may have of shared memory, per device. */
#include <pthread.h>
#include <stdatomic.h>

#include "cuda/launch.h"

enum { KERNELS = 1024, DEVICES = 64 }; /* the library has a quarter as many kernels */

/* Entries are never removed, so readers need no lock. */
static struct {
    _Atomic(const void *) kernel;
    atomic_int memory[DEVICES];
} entries[KERNELS];
static pthread_mutex_t lock = PTHREAD_MUTEX_INITIALIZER;

/* The memory that a kernel may have on a device; NULL: there is no place for it. */
static atomic_int *memory_of(const void *kernel, int device)
{
    const unsigned first = (unsigned)((uintptr_t)kernel >> 4);
    for (unsigned n = 0; n < KERNELS && device < DEVICES; n++) {
        const unsigned at = (first + n) % KERNELS;
        const void *expected = NULL;
        if (atomic_load(&entries[at].kernel) == kernel ||
            atomic_compare_exchange_strong(&entries[at].kernel, &expected, kernel) || expected == kernel)
            return &entries[at].memory[device];
    }
    return NULL;
}

/* Sets the driver's limit where a launch needs more than all before it. It never falls, so that threads which launch
 * one kernel with different sizes do not interfere. A device that is reset (cudaDeviceReset) forgets its limits. */
cudaError_t skl_cuda_allow_memory(const void *kernel, size_t memory)
{
    int device = 0;
    if (memory == 0)
        return cudaSuccess;
    const cudaError_t known = cudaGetDevice(&device);
    if (known != cudaSuccess)
        return known;
    atomic_int *const allowed = memory_of(kernel, device);
    if (allowed != NULL && atomic_load(allowed) >= (int)memory)
        return cudaSuccess;
    pthread_mutex_lock(&lock);
    const bool raises = allowed == NULL || atomic_load(allowed) < (int)memory;
    const cudaError_t error =
        raises ? cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, (int)memory) : cudaSuccess;
    if (raises && allowed != NULL && error == cudaSuccess)
        atomic_store(allowed, (int)memory);
    pthread_mutex_unlock(&lock);
    return error;
}
