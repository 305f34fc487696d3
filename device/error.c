#include "device/error.h"

#include <stdarg.h>
#include <stdio.h>

static char error_text[512];

const char *device_error(void)
{
    return error_text;
}

skl_status device_fail(skl_status status, const char *format, ...)
{
    va_list arguments;
    va_start(arguments, format);
    vsnprintf(error_text, sizeof error_text, format, arguments);
    va_end(arguments);
    return status;
}

skl_status device_begin(void)
{
    error_text[0] = '\0';
    return SKL_OK;
}
