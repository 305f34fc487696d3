/* Why a call of the device layer failed. */
#ifndef STREAMKL_DEVICE_ERROR_H
#define STREAMKL_DEVICE_ERROR_H

#include "streamkl.h"

/* Why the last call of the device layer failed; "" if it succeeded. */
const char *device_error(void);

/* For the layer itself: sets the text of device_error() and returns `status`, for the caller to return. */
skl_status device_fail(skl_status status, const char *format, ...) __attribute__((format(printf, 2, 3)));

/* For the layer itself: every call begins with this. Returns SKL_OK. */
skl_status device_begin(void);

#endif
