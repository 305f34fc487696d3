#include "view/view.h"

#include <math.h>
#include <stdlib.h>

/* Equidistant colors; the palette interpolates between them. */
typedef struct palette_anchors {
    int count;
    rgb colors[9];
} palette_anchors;

static const palette_anchors anchors[] = {
    [PALETTE_SHARE] =
        {7,
         {{8, 10, 24}, {34, 28, 84}, {80, 36, 122}, {148, 52, 116}, {214, 84, 82}, {248, 158, 70}, {254, 244, 190}}},
    [PALETTE_SIGNED] = {5, {{120, 196, 255}, {42, 100, 190}, {12, 14, 26}, {200, 92, 24}, {255, 206, 120}}},
};

static uint8_t between(uint8_t from, uint8_t to, double share)
{
    return (uint8_t)lround((double)from + share * ((double)to - (double)from));
}

static void fill_palette(rgb *palette, const palette_anchors *from)
{
    for (int c = 0; c < 256; c++) {
        const double at = (double)c / 255 * (from->count - 1);
        const int left = at < from->count - 1 ? (int)at : from->count - 2;
        const rgb a = from->colors[left], b = from->colors[left + 1];
        const double share = at - left;
        palette[c] =
            (rgb){between(a.red, b.red, share), between(a.green, b.green, share), between(a.blue, b.blue, share)};
    }
}

const rgb *palette_of(palette_kind kind)
{
    static rgb palettes[2][256];
    fill_palette(palettes[kind], &anchors[kind]);
    return palettes[kind];
}

uint8_t palette_index(palette_kind kind, double value, double top)
{
    if (!(fabs(value) > 0)) /* 0, or NaN */
        return kind == PALETTE_SIGNED ? 128 : 0;
    const double share = fmin(sqrt(fabs(value) / top), 1);
    if (kind == PALETTE_SIGNED)
        return (uint8_t)lround(128 + (value < 0 ? -128 : 127) * share);
    return value < 0 ? 0 : (uint8_t)lround(255 * share);
}

double picture_top(const double *values, int64_t count)
{
    double top = 0;
    for (int64_t i = 0; i < count; i++)
        top = isfinite(values[i]) ? fmax(top, fabs(values[i])) : top;
    return top > 0 ? top : 1;
}

static int by_size(const void *a, const void *b)
{
    const double x = *(const double *)a, y = *(const double *)b;
    return (x > y) - (x < y);
}

double picture_bright(const double *values, int64_t count)
{
    double *const sorted = malloc(((size_t)count + 1) * sizeof *sorted);
    if (sorted == NULL)
        return picture_top(values, count);
    for (int64_t i = 0; i < count; i++)
        sorted[i] = isfinite(values[i]) ? fabs(values[i]) : 0;
    qsort(sorted, (size_t)count, sizeof *sorted, by_size);
    const double bright = count ? sorted[count - 1 - count / 100] : 0;
    free(sorted);
    return bright > 0 ? bright : picture_top(values, count);
}
