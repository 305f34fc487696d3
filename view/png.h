/* PNG files of at most 256 colours. */
#ifndef STREAMKL_VIEW_PNG_H
#define STREAMKL_VIEW_PNG_H

#include "view/bytes.h"

typedef struct rgb {
    uint8_t red, green, blue;
} rgb;

/* Appends a complete PNG file: width x height pixels, each a byte that indexes the palette. */
void png_encode(bytes *file, const uint8_t *pixels, uint32_t width, uint32_t height, const rgb palette[256]);

/* Exposed for tests. */
uint32_t png_crc32(const void *data, size_t size);
uint32_t png_adler32(const void *data, size_t size);

#endif
