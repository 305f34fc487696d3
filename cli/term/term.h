/* Terminal output: colour, block characters and a progress line, if the terminal supports them. */
#ifndef STREAMKL_CLI_TERM_TERM_H
#define STREAMKL_CLI_TERM_TERM_H

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
typedef struct term_progress {
    const char *label;
    double began, drawn; /* clock_seconds(); drawn is 0 if no line is on the screen */
} term_progress;

void term_progress_begin(term_progress *progress, const char *label);
void term_progress_update(void *progress, int64_t done, int64_t total); /* an skl_progress */
void term_progress_end(term_progress *progress);                        /* clears the line */

/* A column chart of values >= 0 with a height of `height` lines and its scale on the left. NaN leaves a gap. */
void term_chart(FILE *stream, const double *values, int count, int height);

#endif
