/* The terminal: colour, block characters and a progress line, each only where it can be shown. */
#ifndef STREAMKL_CLI_TERM_TERM_H
#define STREAMKL_CLI_TERM_TERM_H

#include <stdbool.h>
#include <stdint.h>
#include <stdio.h>

/* Styles are escape sequences on a terminal, and empty strings elsewhere, with NO_COLOR set or TERM=dumb:
 * printf("%spass%s", style.good, style.plain). */
typedef struct term_style {
    const char *bold, *dim, *good, *bad, *accent, *plain;
} term_style;

term_style term_style_for(FILE *stream);

/* True if the stream is a terminal of a UTF-8 locale. main has called setlocale. */
bool term_has_blocks(FILE *stream);

/* One line on stderr that shows how far a long call has come; nothing at all when stderr is no terminal. */
typedef struct term_progress {
    const char *label;
    double began, drawn; /* clock_seconds(); drawn is 0 while nothing is on the screen */
} term_progress;

void term_progress_begin(term_progress *progress, const char *label);
void term_progress_update(void *progress, int64_t done, int64_t total); /* an skl_progress */
void term_progress_end(term_progress *progress);                        /* clears the line */

/* A column chart of values >= 0, `height` lines tall, with its scale on the left. NaN leaves a gap. */
void term_chart(FILE *stream, const double *values, int count, int height);

#endif
