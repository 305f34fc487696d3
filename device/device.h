/* Memory and time of the device that computes.
 *
 * The library takes addresses that its device can reach and never allocates: whoever calls it owns the memory. On the
 * CPU that is the memory of the process, and little is left to do here. A call that fails returns a status;
 * device_error() then says why.
 */
#ifndef STREAMKL_DEVICE_DEVICE_H
#define STREAMKL_DEVICE_DEVICE_H

#include "device/error.h"
#include "device/properties.h"
#include "streamkl.h"

/* Makes a GPU ready for this thread; to be called before anything else here, when a plan for it was made. */
skl_status device_open(skl_device device, int32_t index);

/* `what` is what a message calls it. Fit for tensors and workspaces. */
skl_status device_allocate(skl_device device, size_t size, const char *what, void **memory);
void device_free(skl_device device, void *memory); /* NULL is fine */

/* From host to device memory or back, whichever the addresses mean. */
skl_status device_copy(skl_device device, void *to, const void *from, size_t size);

/* Times what runs between start and stop: by the clock on the CPU, by events in the stream on a GPU. Zeroed, it is
 * one for the CPU. */
typedef struct device_timer {
    skl_device device;
    double began;
    void *events[2];
} device_timer;

skl_status device_timer_create(device_timer *timer, skl_device device);
void device_timer_destroy(device_timer *timer);
skl_status device_timer_start(device_timer *timer);
skl_status device_timer_stop(device_timer *timer, double *seconds); /* waits for what was launched */

skl_status device_describe(skl_device device, device_properties *properties);

#endif
