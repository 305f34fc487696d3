#include "view/bytes.h"

#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

void bytes_free(bytes *buffer)
{
    free(buffer->data);
    *buffer = (bytes){0};
}

static bool reserve(bytes *buffer, size_t more)
{
    if (buffer->failed || buffer->size + more <= buffer->room)
        return !buffer->failed;
    size_t room = buffer->room ? buffer->room : 1024;
    while (room < buffer->size + more)
        room *= 2;
    unsigned char *const data = realloc(buffer->data, room);
    buffer->failed = data == NULL;
    if (data == NULL)
        return false;
    buffer->data = data;
    buffer->room = room;
    return true;
}

void bytes_add(bytes *buffer, const void *data, size_t size)
{
    if (size == 0 || !reserve(buffer, size))
        return;
    memcpy(buffer->data + buffer->size, data, size);
    buffer->size += size;
}

void bytes_add_u8(bytes *buffer, uint8_t value)
{
    bytes_add(buffer, &value, 1);
}

void bytes_add_u32(bytes *buffer, uint32_t value)
{
    for (int shift = 24; shift >= 0; shift -= 8)
        bytes_add_u8(buffer, (uint8_t)(value >> shift));
}

void bytes_print(bytes *buffer, const char *format, ...)
{
    va_list arguments;
    va_start(arguments, format);
    va_list again;
    va_copy(again, arguments);
    const int length = vsnprintf(NULL, 0, format, arguments);
    va_end(arguments);
    if (length < 0)
        buffer->failed = true;
    else if (reserve(buffer, (size_t)length + 1)) {
        vsnprintf((char *)buffer->data + buffer->size, (size_t)length + 1, format, again);
        buffer->size += (size_t)length;
    }
    va_end(again);
}

void bytes_add_escaped(bytes *buffer, const char *text)
{
    for (; *text; text++) {
        const char *const special = strchr("&<>\"'", *text);
        if (special)
            bytes_print(buffer, "&#%d;", *text);
        else
            bytes_add_u8(buffer, (uint8_t)*text);
    }
}
