/* The one way to fail: a status and a message that names argument, value and what is accepted. */
#ifndef SKL_BASE_STATUS_H
#define SKL_BASE_STATUS_H

#include "streamkl.h"

/* Stores the message for skl_last_error() of this thread and returns `status`. */
__attribute__((format(printf, 2, 3))) skl_status skl_fail(skl_status status, const char *format, ...);

#endif
