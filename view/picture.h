/* Maps in colour: one palette for shares of attention, one for what adds to the KL and what takes from it. */
#ifndef STREAMKL_VIEW_PICTURE_H
#define STREAMKL_VIEW_PICTURE_H

#include "view/png.h"

typedef enum palette_kind {
    PALETTE_SHARE, /* 0 is black, 1 is light: even in grey its steps go one way */
    PALETTE_SIGNED /* 0.5 is dark; blue below, orange above: told apart by colour-blind eyes too */
} palette_kind;

const rgb *palette_of(palette_kind kind); /* 256 colours */

/* Where a value stands in the palette: the square root of its share of `top`, so that faint keys can be seen beside
 * bright ones; signed about the middle in PALETTE_SIGNED. */
uint8_t palette_index(palette_kind kind, double value, double top);

/* The largest finite magnitude; 1 if there is none above 0. */
double picture_top(const double *values, int64_t count);

/* What one value in a hundred is above: a scale on which a few bright cells do not hide all others. */
double picture_bright(const double *values, int64_t count);

/* One PNG of rows x columns values, `zoom` pixels a side each. */
void picture_png(bytes *file, palette_kind kind, const double *values, int64_t rows, int64_t columns, double top,
                 int zoom);

#endif
