/* Terminal output: color, block characters and a progress line, if the terminal supports them. */
#ifndef STREAMKL_CLI_TERM_TERM_H
#define STREAMKL_CLI_TERM_TERM_H

#include <math.h>
#include <stdbool.h>
#include <stdint.h>
#include <stdio.h>

/* Escape sequences on a terminal; empty strings otherwise, and if NO_COLOR is set or TERM is dumb:
 * printf("%spass%s", style.good, style.plain). */
typedef struct term_style {
    const char *bold, *dim, *good, *bad, *accent, *plain;
} term_style;

term_style term_style_for(FILE *stream);

/* Is the stream a terminal with a UTF-8 locale? main() calls setlocale(). */
bool term_has_blocks(FILE *stream);

/* One line on stderr that shows the progress of a long call; nothing if stderr is not a terminal. */
void term_progress_begin(const char *label);                          /* not copied */
void term_progress_update(void *unused, int64_t done, int64_t total); /* an skl_progress */
void term_progress_end(void);                                         /* clears the line */

/* A column chart of values >= 0 with a height of `height` lines and its scale on the left. NaN leaves a gap. */
void term_chart(FILE *stream, const double *values, int count, int height);

/* A row without keys has an LSE of -infinity, as has one whose logits are all -infinity, and a KL of 0, not NaN. */
static inline bool row_attends(float lse_s, float kl)
{
    return lse_s != -INFINITY || kl != 0.0F;
}

/* The mean KL by position, of rows [sequence_count, length] that attend to any key. */
void term_position_chart(FILE *stream, const float *kl, const float *lse_s, int64_t sequence_count, int64_t length);

/* Text from files and arguments that is shown: replaces the bytes of every character by '?' that could drive the
 * terminal, break the line or change the order in which its text is shown: control characters (C0, DEL, C1), line
 * separators and bidirectional controls. */
void printable_make(char *text);

/* A copy, cut to fit. */
typedef struct printable {
    char text[4096];
} printable;
printable printable_of(const char *text);

#endif
