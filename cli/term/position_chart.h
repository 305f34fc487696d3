/* A picture of KL along the sequence: people rather look than read. */
#ifndef STREAMKL_CLI_TERM_POSITION_CHART_H
#define STREAMKL_CLI_TERM_POSITION_CHART_H

#include <stdint.h>
#include <stdio.h>

/* Mean KL of the rows [sequence_count, length] by query position; rows without a key (lse_s = -inf) do not count. */
void position_chart_print(FILE *stream, const float *kl, const float *lse_s, int64_t sequence_count, int64_t length);

#endif
