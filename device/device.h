/* Memory and timing on the device that computes.
 *
 * The library works on the caller's memory, which its device must be able to access, and never allocates. On failure
 * a call returns a status other than SKL_OK, and device_error() says why.
 */
#ifndef STREAMKL_DEVICE_DEVICE_H
#define STREAMKL_DEVICE_DEVICE_H

#include "device/error.h"
#include "device/properties.h"
#include "streamkl.h"

/* Initialises a GPU for this thread. Call it first, after a plan for the device was created. */
skl_status device_open(skl_device device, int32_t index);

/* Aligned for tensors and workspaces. Error messages call the memory `what`. */
skl_status device_allocate(skl_device device, size_t size, const char *what, void **memory);
void device_free(skl_device device, void *memory); /* may be NULL */

/* Between host and device memory, in the direction that the addresses imply. */
skl_status device_copy(skl_device device, void *to, const void *from, size_t size);

/* Measures the time between start and stop: with the clock on the CPU, with events in the stream on a GPU.
 * Zero-initialised, it is a timer for the CPU. */
typedef struct device_timer {
    skl_device device;
    double began;
    void *events[2];
} device_timer;

skl_status device_timer_create(device_timer *timer, skl_device device);
void device_timer_destroy(device_timer *timer);
skl_status device_timer_start(device_timer *timer);
skl_status device_timer_stop(device_timer *timer, double *seconds); /* synchronises */

skl_status device_describe(skl_device device, device_properties *properties);

/* The text of skl_plan_explain(), one line per launch; the caller frees it. `inputs` are those of the call, in device
 * memory, or NULL for aligned, contiguous tensors. On failure returns NULL, and device_error() or, if that is empty,
 * skl_last_error() says why. */
char *explain_plan(const skl_plan *plan, const skl_inputs *inputs, skl_op op);

#endif
