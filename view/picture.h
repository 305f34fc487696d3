/* Maps in colour: one palette for attention, one for positive and negative contributions to the KL. */
#ifndef STREAMKL_VIEW_PICTURE_H
#define STREAMKL_VIEW_PICTURE_H

#include <stdbool.h>
#include <stdint.h>

typedef struct rgb {
    uint8_t red, green, blue;
} rgb;

typedef enum palette_kind {
    PALETTE_SHARE, /* from dark to light, with monotonic brightness */
    PALETTE_SIGNED /* dark in the middle, blue below, orange above: safe for colour-blind readers */
} palette_kind;

const rgb *palette_of(palette_kind kind); /* 256 colours */

/* The palette index of a value: proportional to sqrt(value / top), so that faint keys stay visible next to bright
 * ones. PALETTE_SIGNED has 0 in the middle. */
uint8_t palette_index(palette_kind kind, double value, double top);

/* The largest finite magnitude; 1 if that is 0. */
double picture_top(const double *values, int64_t count);

/* The 99th percentile of the magnitudes: a scale that a few bright cells do not dominate. */
double picture_bright(const double *values, int64_t count);

#endif
