/* A chart of the KL by query position. */
#ifndef STREAMKL_CLI_TERM_POSITION_CHART_H
#define STREAMKL_CLI_TERM_POSITION_CHART_H

#include <stdint.h>
#include <stdio.h>

/* Mean KL of rows [sequence_count, length] by query position, without rows that attend to no key (lse_s = -inf). */
void position_chart_print(FILE *stream, const float *kl, const float *lse_s, int64_t sequence_count, int64_t length);

#endif
