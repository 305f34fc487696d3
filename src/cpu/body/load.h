/* Loads rows of tensors into tile buffers and stores them. */
#ifndef SKL_CPU_BODY_LOAD_H
#define SKL_CPU_BODY_LOAD_H

#include "base/convert.h"
#include "cpu/body/vector.h"

#if defined(SKL_MATRIX_INTERLEAVE)
enum { ROW_UNIT = 32 }; /* 16-bit numbers of a cache line */
#else
enum { ROW_UNIT = 16 }; /* floats of a cache line */
#endif

/* Row stride of a tile buffer: room for full vectors, plus one cache line so that rows do not map to the same cache
 * sets when the dimension is a power of two. */
static inline int64_t padded(int64_t dim)
{
    return (dim + ROW_UNIT - 1) / ROW_UNIT * ROW_UNIT + ROW_UNIT;
}

/* Elements that a transposed query takes in its panel. */
static inline int64_t query_width(int64_t dim)
{
    return padded(dim) - ROW_UNIT;
}

static void load_row(float *to, const void *from, skl_dtype dtype, int64_t offset, int64_t dim)
{
    if (dtype == SKL_F32) {
        const float *const row = (const float *)from + offset;
        for (int64_t c = 0; c < dim; c++)
            to[c] = row[c];
        return;
    }
    const uint16_t *const row = (const uint16_t *)from + offset;
    if (dtype == SKL_BF16)
        for (int64_t c = 0; c < dim; c++)
            to[c] = skl_from_bf16(row[c]);
    else
        for (int64_t c = 0; c < dim; c++)
            to[c] = skl_from_f16(row[c]);
}

/* Loads `count` rows, starting at element `offset`, as f32. Columns from `dim` on are set to 0.
 *
 * The stride of a single row may be any number, so this and the functions below multiply it by the row and do not
 * step past the last one. */
static void load_rows(float *to, const void *from, skl_dtype dtype, int64_t offset, int64_t stride, int64_t count,
                      int64_t dim)
{
    const int64_t width = padded(dim);
    for (int64_t i = 0; i < count; i++, to += width) {
        load_row(to, from, dtype, offset + i * stride, dim);
        for (int64_t c = dim; c < width; c++)
            to[c] = 0.0F;
    }
}

/* Transposes loaded rows into panels: to[panel][c][lane] = from[panel * PANEL + lane][c], with zeros after the last
 * row. Done once per query tile, so that key tiles need no packing. */
static void transpose_to_panels(float *to, const float *from, int64_t count, int64_t dim, int64_t panel_width)
{
    const int64_t width = padded(dim);
    for (int64_t first = 0; first < count; first += panel_width, to += query_width(dim) * panel_width)
        for (int64_t lane = 0; lane < panel_width; lane++) {
            const float *const row = from + (first + lane) * width;
            const bool present = first + lane < count;
            for (int64_t c = 0; c < dim; c++)
                to[c * panel_width + lane] = present ? row[c] : 0.0F;
        }
}

/* Stores rows that are `from_stride` apart. */
static void store_rows_from(void *to, skl_dtype dtype, int64_t offset, int64_t stride, const float *from,
                            int64_t from_stride, int64_t count, int64_t dim)
{
    for (int64_t i = 0; i < count; i++, from += from_stride) {
        const int64_t row = offset + i * stride;
        if (dtype == SKL_BF16) /* a loop that vectorizes */
            for (int64_t c = 0; c < dim; c++)
                ((uint16_t *)to)[row + c] = skl_to_bf16(from[c]);
        else
            for (int64_t c = 0; c < dim; c++)
                skl_store(to, dtype, row + c, from[c]);
    }
}

static void store_rows(void *to, skl_dtype dtype, int64_t offset, int64_t stride, const float *from, int64_t count,
                       int64_t dim)
{
    store_rows_from(to, dtype, offset, stride, from, padded(dim), count, dim);
}

/* Adds rows to an f32 gradient. */
static void add_rows(float *to, int64_t stride, const float *from, int64_t count, int64_t dim)
{
    for (int64_t i = 0; i < count; i++, from += padded(dim)) {
        float *const row = to + i * stride;
        for (int64_t c = 0; c < dim; c++)
            row[c] += from[c];
    }
}

/* Whether a row holds an infinity or a NaN, whose exponent bits are all set. */
static bool any_nonfinite(const float *rows, int64_t count, int64_t dim)
{
    uint32_t highest = 0;
    for (int64_t i = 0; i < count; i++, rows += padded(dim))
        for (int64_t c = 0; c < dim; c++) {
            const uint32_t magnitude = skl_bits_of_float(rows[c]) & 0x7FFFFFFFU;
            highest = magnitude > highest ? magnitude : highest;
        }
    return highest >= 0x7F800000U;
}

#endif
