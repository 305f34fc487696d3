/* Bytes that grow: what files and pages are put together in. */
#ifndef STREAMKL_VIEW_BYTES_H
#define STREAMKL_VIEW_BYTES_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

/* Zeroed, it is empty. Once memory ran out it stays `failed`, and nothing more is added. */
typedef struct bytes {
    unsigned char *data;
    size_t size, room;
    bool failed;
} bytes;

void bytes_free(bytes *buffer);
void bytes_add(bytes *buffer, const void *data, size_t size);
void bytes_add_u8(bytes *buffer, uint8_t value);
void bytes_add_u32(bytes *buffer, uint32_t value); /* most significant byte first */
void bytes_add_base64(bytes *buffer, const void *data, size_t size);
void bytes_print(bytes *buffer, const char *format, ...) __attribute__((format(printf, 2, 3)));

/* The same with the five characters that HTML gives a meaning replaced. */
void bytes_add_escaped(bytes *buffer, const char *text);

#endif
