/* The GPU functions that device.c uses: gpu_cuda.c implements them, gpu_none.c is for builds without CUDA. */
#ifndef STREAMKL_DEVICE_GPU_H
#define STREAMKL_DEVICE_GPU_H

#include "device/error.h"
#include "device/properties.h"

skl_status gpu_open(int32_t index);
skl_status gpu_allocate(size_t size, const char *what, void **memory);
void gpu_free(void *memory);
skl_status gpu_copy(void *to, const void *from, size_t size);
skl_status gpu_event_create(void **event);
void gpu_event_destroy(void *event);
skl_status gpu_event_record(void *event);
skl_status gpu_event_wait(void *event);
skl_status gpu_event_seconds(void *begin, void *end, double *seconds);
skl_status gpu_describe(device_properties *properties);

#endif
