#include "cli/term/position_chart.h"
#include "cli/term/term.h"

#include <inttypes.h>
#include <math.h>

enum { CHART_WIDTH = 64, CHART_HEIGHT = 6 };

/* Mean over positions [begin, end) of all sequences; NaN if no row attends to a key. */
static double mean_between(const float *kl, const float *lse_s, int64_t sequence_count, int64_t length, int64_t begin,
                           int64_t end)
{
    double sum = 0;
    int64_t rows = 0;
    for (int64_t sequence = 0; sequence < sequence_count; sequence++) {
        for (int64_t i = begin; i < end; i++) {
            const int64_t row = sequence * length + i;
            if (isinf(lse_s[row]))
                continue;
            sum += (double)kl[row];
            rows++;
        }
    }
    return rows ? sum / (double)rows : NAN;
}

void position_chart_print(FILE *stream, const float *kl, const float *lse_s, int64_t sequence_count, int64_t length)
{
    double columns[CHART_WIDTH];
    const int count = length < CHART_WIDTH ? (int)length : CHART_WIDTH;
    for (int c = 0; c < count; c++)
        columns[c] = mean_between(kl, lse_s, sequence_count, length, length * c / count, length * (c + 1) / count);
    term_chart(stream, columns, count, CHART_HEIGHT);
    fprintf(stream, "  %9s  0%*" PRId64 "\n", "query", count - 1, length - 1);
}
