#include "cli/map/attention_map.h"
#include "cli/term/term.h"

#include <math.h>

static void print_color(FILE *stream, int ground, rgb color)
{
    enum { TRUE_COLOR = 2 };
    fprintf(stream, "\033[%d;%d;%d;%d;%dm", ground, TRUE_COLOR, color.red, color.green, color.blue);
}

/* Two rows of values per line: half blocks with the upper row as foreground and the lower row as background. */
static void print_blocks(FILE *stream, palette_kind kind, const double *values, int64_t rows, int64_t columns,
                         double top)
{
    enum { FOREGROUND = 38, BACKGROUND = 48 };
    const rgb *const palette = palette_of(kind);
    for (int64_t row = 0; row < rows; row += 2) {
        fputs("  ", stream);
        for (int64_t column = 0; column < columns; column++) {
            const double *const upper = &values[row * columns + column];
            print_color(stream, FOREGROUND, palette[palette_index(kind, *upper, top)]);
            if (row + 1 < rows)
                print_color(stream, BACKGROUND, palette[palette_index(kind, upper[columns], top)]);
            fputs("▀", stream);
        }
        fputs("\033[0m\n", stream);
    }
}

/* One line per two rows, because characters are about twice as tall as wide. */
static void print_characters(FILE *stream, palette_kind kind, const double *values, int64_t rows, int64_t columns,
                             double top)
{
    static const char shares[] = " .:-=+*#%@", negative[] = " ,;~<";
    const int64_t row_step = rows > columns / 2 ? 2 : 1;
    for (int64_t row = 0; row < rows; row += row_step) {
        fputs("  ", stream);
        for (int64_t column = 0; column < columns; column++) {
            double value = values[row * columns + column];
            if (row_step == 2 && row + 1 < rows)
                value = (value + values[(row + 1) * columns + column]) / 2;
            const double share = isnan(value) ? 0 : fmin(sqrt(fabs(value) / top), 1);
            const int is_negative = kind == PALETTE_SIGNED && value < 0;
            const int steps = is_negative ? (int)sizeof negative - 2 : (int)sizeof shares - 2;
            const int step = share > 0 ? (int)lround(share * steps) : 0;
            fputc(is_negative ? negative[step] : shares[step], stream);
        }
        fputc('\n', stream);
    }
}

void map_print(FILE *stream, palette_kind kind, const double *values, int64_t rows, int64_t columns, double top)
{
    const bool colored = term_style_for(stream).plain[0] != '\0';
    if (colored && term_has_blocks(stream))
        print_blocks(stream, kind, values, rows, columns, top);
    else
        print_characters(stream, kind, values, rows, columns, top);
}
