/* Text that is written piece by piece into a buffer of any size, with the length that the whole would have. */
#ifndef SKL_BASE_TEXT_H
#define SKL_BASE_TEXT_H

#include <stddef.h>

typedef struct skl_text {
    char *buffer; /* may be NULL if size is 0 */
    size_t size;
    size_t length; /* length of the whole text, without the terminating zero */
} skl_text;

skl_text skl_text_start(char *buffer, size_t size);

/* Appends what fits; the buffer is always terminated. */
__attribute__((format(printf, 2, 3))) void skl_text_add(skl_text *text, const char *format, ...);

#endif
