/* A build without CUDA. The library refuses a plan for a GPU before any of these is called. */
#include "device/gpu.h"

static skl_status refuse(void)
{
    return device_fail(SKL_ERROR_UNSUPPORTED, "this build has no CUDA backend: it has %s", skl_build_info());
}

skl_status gpu_open(int32_t index)
{
    (void)index;
    return refuse();
}

skl_status gpu_allocate(size_t size, const char *what, void **memory)
{
    (void)size, (void)what, (void)memory;
    return refuse();
}

void gpu_free(void *memory)
{
    (void)memory;
}

skl_status gpu_copy(void *to, const void *from, size_t size)
{
    (void)to, (void)from, (void)size;
    return refuse();
}

skl_status gpu_event_create(void **event)
{
    (void)event;
    return refuse();
}

void gpu_event_destroy(void *event)
{
    (void)event;
}

skl_status gpu_event_record(void *event)
{
    (void)event;
    return refuse();
}

skl_status gpu_event_wait(void *event)
{
    (void)event;
    return refuse();
}

skl_status gpu_event_seconds(void *begin, void *end, double *seconds)
{
    (void)begin, (void)end, (void)seconds;
    return refuse();
}

skl_status gpu_describe(device_properties *properties)
{
    (void)properties;
    return refuse();
}
