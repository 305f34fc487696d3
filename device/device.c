#include "device/device.h"

#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>

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

/* Every call begins with this. */
static skl_status device_begin(void)
{
    error_text[0] = '\0';
    return SKL_OK;
}

skl_status device_open(skl_device device, int32_t index)
{
    const skl_status cleared = device_begin();
    return device == SKL_CPU ? cleared : gpu_open(index);
}

static skl_status cpu_allocate(size_t size, const char *what, void **memory)
{
    const size_t whole = (size / SKL_WORKSPACE_ALIGNMENT + 1) * SKL_WORKSPACE_ALIGNMENT;
    *memory = aligned_alloc(SKL_WORKSPACE_ALIGNMENT, whole);
    return *memory ? SKL_OK : device_fail(SKL_ERROR_MEMORY, "out of memory: %s needs %zu bytes", what, size);
}

skl_status device_allocate(skl_device device, size_t size, const char *what, void **memory)
{
    device_begin();
    *memory = NULL;
    return device == SKL_CPU ? cpu_allocate(size, what, memory) : gpu_allocate(size ? size : 1, what, memory);
}

void device_free(skl_device device, void *memory)
{
    if (device == SKL_CPU)
        free(memory);
    else if (memory)
        gpu_free(memory);
}

skl_status device_copy(skl_device device, void *to, const void *from, size_t size)
{
    device_begin();
    if (device != SKL_CPU)
        return gpu_copy(to, from, size);
    memcpy(to, from, size);
    return SKL_OK;
}

skl_status device_timer_start(device_timer *timer, skl_device device)
{
    const skl_status cleared = device_begin();
    *timer = (device_timer){.device = device, .began = clock_seconds()};
    return device == SKL_CPU ? cleared : gpu_timer_start(timer->events);
}

skl_status device_timer_stop(device_timer *timer, double *seconds)
{
    *seconds = clock_seconds() - timer->began;
    const skl_status cleared = device_begin();
    return timer->device == SKL_CPU ? cleared : gpu_timer_stop(timer->events, seconds);
}

skl_status device_describe(skl_device device, char *name, size_t size)
{
    name[0] = '\0';
    const skl_status cleared = device_begin();
    return device == SKL_CPU ? cleared : gpu_describe(name, size);
}

char *explain_plan(const skl_plan *plan, const skl_inputs *inputs, skl_op op)
{
    device_begin();
    const size_t length = skl_plan_explain(plan, inputs, op, NULL, 0);
    if (length == 0)
        return NULL;
    char *const text = malloc(length + 1);
    if (text)
        skl_plan_explain(plan, inputs, op, text, length + 1);
    else
        device_fail(SKL_ERROR_MEMORY, "out of memory: the explanation needs %zu bytes", length + 1);
    return text;
}
