#include "base/status.h"

#include <stdarg.h>
#include <stdio.h>

static _Thread_local char last_error[512] = "no error";

skl_status skl_fail(skl_status status, const char *format, ...)
{
    va_list arguments;
    va_start(arguments, format);
    vsnprintf(last_error, sizeof last_error, format, arguments);
    va_end(arguments);
    return status;
}

const char *skl_last_error(void)
{
    return last_error;
}

const char *skl_status_name(skl_status status)
{
    static const char *const names[] = {
        "SKL_OK",           "SKL_ERROR_ARGUMENT", "SKL_ERROR_UNSUPPORTED", "SKL_ERROR_MEMORY", "SKL_ERROR_WORKSPACE",
        "SKL_ERROR_DEVICE", "SKL_ERROR_CANCELLED"};
    const size_t index = (size_t)status;
    return index < sizeof names / sizeof names[0] ? names[index] : "unknown status";
}
