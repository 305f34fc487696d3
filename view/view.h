/* Pictures and pages: maps in color, as PNG, and the page of every report. */
#ifndef STREAMKL_VIEW_VIEW_H
#define STREAMKL_VIEW_VIEW_H

#include <stdbool.h>
#include <stdint.h>
#include <stdio.h>

/* ---- Palettes: one for attention, one for positive and negative contributions to the KL ---------------------- */

typedef struct rgb {
    uint8_t red, green, blue;
} rgb;

typedef enum palette_kind {
    PALETTE_SHARE, /* from dark to light, with monotonic brightness */
    PALETTE_SIGNED /* dark in the middle, blue below, orange above: safe for color-blind readers */
} palette_kind;

const rgb *palette_of(palette_kind kind); /* 256 colors */

/* The palette index of a value: proportional to sqrt(value / top), so that faint keys stay visible next to bright
 * ones. PALETTE_SIGNED has 0 in the middle. */
uint8_t palette_index(palette_kind kind, double value, double top);

/* The largest finite magnitude; 1 if that is 0. */
double picture_top(const double *values, int64_t count);

/* The 99th percentile of the magnitudes: a scale that a few bright cells do not dominate. */
double picture_bright(const double *values, int64_t count);

/* ---- A map as a PNG: title, axes in tokens, and a color bar with numbers ------------------------------------- */

typedef struct figure {
    const char *title; /* view/glyphs.h has its letters; others are left blank */
    palette_kind palette;
    const double *values; /* [rows, columns], at least one */
    int64_t rows, columns;
    double top; /* the value of the brightest color */
    int64_t len_q, len_k;
} figure;

/* Margins of a picture around its map, in pixels. */
enum { FIGURE_LEFT = 96, FIGURE_TOP = 34, FIGURE_RIGHT = 132, FIGURE_BOTTOM = 60 };

/* Writes the picture to a stream. False: out of memory, or the stream failed. */
bool figure_png(FILE *file, const figure *drawn);

/* ---- The page of a report ------------------------------------------------------------------------------------- */

/* Writes the page of a document: view/report.html, which draws JSON and says what documents consist of. It needs no
 * network. */
void page_print(FILE *page, const char *json);

#endif
