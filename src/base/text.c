#include "base/text.h"

#include <stdarg.h>
#include <stdio.h>

skl_text skl_text_start(char *buffer, size_t size)
{
    const skl_text text = {buffer, size, 0};
    if (size > 0)
        buffer[0] = '\0';
    return text;
}

void skl_text_add(skl_text *text, const char *format, ...)
{
    const size_t used = text->length < text->size ? text->length : text->size;
    va_list arguments;
    va_start(arguments, format);
    const int length =
        vsnprintf(used < text->size ? text->buffer + used : NULL, text->size - used, format, arguments);
    va_end(arguments);
    text->length += length > 0 ? (size_t)length : 0;
}
