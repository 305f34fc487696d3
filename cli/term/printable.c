#include "cli/term/term.h"

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>
#include <stdio.h>

typedef struct code_range {
    uint32_t first, last;
} code_range;

static const code_range refused[] = {
    {0x0000, 0x001f}, /* C0 */
    {0x007f, 0x009f}, /* DEL and C1 */
    {0x061c, 0x061c}, /* Arabic letter mark */
    {0x200e, 0x200f}, /* left-to-right and right-to-left marks */
    {0x2028, 0x202e}, /* line and paragraph separators, bidirectional embeddings and overrides */
    {0x2066, 0x2069}, /* bidirectional isolates */
};

static bool is_refused(uint32_t code)
{
    for (size_t r = 0; r < sizeof refused / sizeof refused[0]; r++)
        if (code >= refused[r].first && code <= refused[r].last)
            return true;
    return false;
}

/* Bytes of the UTF-8 character at `text`, and its code. A byte that begins no character stands for itself, as in
 * terminals that are not set to UTF-8: then 0x80 to 0x9f are C1. */
static int decode(const unsigned char *text, uint32_t *code)
{
    const unsigned char first = text[0];
    const int size = first >= 0xf0 && first < 0xf8 ? 4 : first >= 0xe0 ? 3 : first >= 0xc0 ? 2 : 1;
    *code = first;
    if (size == 1 || first >= 0xf8)
        return 1;
    uint32_t whole = first & (0xffU >> (size + 1));
    for (int i = 1; i < size; i++) {
        if ((text[i] & 0xc0) != 0x80) /* also at the end of the text */
            return 1;
        whole = whole << 6 | (text[i] & 0x3fU);
    }
    *code = whole; /* an overlong encoding counts as what it encodes */
    return size;
}

void printable_make(char *text)
{
    unsigned char *at = (unsigned char *)text;
    while (*at) {
        uint32_t code;
        const int size = decode(at, &code);
        for (int i = 0; i < size && is_refused(code); i++)
            at[i] = '?';
        at += size;
    }
}

printable printable_of(const char *text)
{
    printable out;
    snprintf(out.text, sizeof out.text, "%s", text);
    printable_make(out.text);
    return out;
}
