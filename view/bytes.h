/* A growing buffer, in which files and pages are assembled. */
#ifndef STREAMKL_VIEW_BYTES_H
#define STREAMKL_VIEW_BYTES_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

/* Zero-initialised, it is empty. After memory has run out it stays `failed`, and further bytes are dropped. */
typedef struct bytes {
    unsigned char *data;
    size_t size, room;
    bool failed;
} bytes;

void bytes_free(bytes *buffer);
void bytes_add(bytes *buffer, const void *data, size_t size);
void bytes_add_u8(bytes *buffer, uint8_t value);
void bytes_add_u32(bytes *buffer, uint32_t value); /* most significant byte first */
void bytes_print(bytes *buffer, const char *format, ...) __attribute__((format(printf, 2, 3)));

/* Text with the five special characters of HTML escaped. */
void bytes_add_escaped(bytes *buffer, const char *text);

#endif
