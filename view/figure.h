/* A map as a PNG: title, axes in tokens, and a colour bar with numbers. */
#ifndef STREAMKL_VIEW_FIGURE_H
#define STREAMKL_VIEW_FIGURE_H

#include "view/picture.h"

#include <stdio.h>

typedef struct figure {
    const char *title; /* of the letters that view/glyphs.h has; others are left blank */
    palette_kind palette;
    const double *values; /* [rows, columns], at least one */
    int64_t rows, columns;
    double top; /* the value of the brightest colour */
    int64_t len_q, len_k;
} figure;

/* Margins of a picture around its map, in pixels. */
enum { FIGURE_LEFT = 96, FIGURE_TOP = 34, FIGURE_RIGHT = 132, FIGURE_BOTTOM = 60 };

/* The side of a cell in pixels: whole, so that the longer side of the map has at least 512 pixels. */
int figure_zoom(int64_t rows, int64_t columns);

/* Writes the picture to a stream. False: out of memory, or the stream failed. */
bool figure_png(FILE *file, const figure *drawn);

#endif
