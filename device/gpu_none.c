/* A build without CUDA. The library refuses a plan for a GPU before any of these is called. */
#include "device/device.h"

#pragma GCC diagnostic ignored "-Wunused-parameter"

#define REFUSED(declaration)                                                                                         \
    skl_status declaration                                                                                           \
    {                                                                                                                \
        return device_fail(SKL_ERROR_UNSUPPORTED, "this build has no CUDA backend: it has %s", skl_build_info());    \
    }

REFUSED(gpu_open(int32_t index))
REFUSED(gpu_allocate(size_t size, const char *what, void **memory))
REFUSED(gpu_copy(void *to, const void *from, size_t size))
REFUSED(gpu_timer_start(void *events[2]))
REFUSED(gpu_timer_stop(void *const events[2], double *seconds))
REFUSED(gpu_describe(char *name, size_t size))

void gpu_free(void *memory)
{
}
