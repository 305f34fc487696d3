/* Reports an error: a status, and a message with the argument, its value and the accepted values. */
#ifndef SKL_BASE_STATUS_H
#define SKL_BASE_STATUS_H

#include "streamkl.h"

/* Stores the message for skl_last_error() in this thread and returns `status`. */
__attribute__((format(printf, 2, 3))) skl_status skl_fail(skl_status status, const char *format, ...);

/* Returns the status of a call that fails from the calling function. */
#define SKL_TRY(call)                                                                                                \
    do {                                                                                                             \
        const skl_status status_ = (call);                                                                           \
        if (status_ != SKL_OK)                                                                                       \
            return status_;                                                                                          \
    } while (0)

#endif
