/* Products of 16-bit operands on a matrix unit: C[r][c] = or += sum_k A[r][k] B[k][c], summed in f32.
 *
 *     logits   X[j][i]   = sum_c k[j][c] q[i][c]       A keys as rows          B queries, interleaved along c
 *     dq       dqT[c][i] += sum_j k[j][c] G[j][i]      A keys, transposed      B G, interleaved along j
 *     dk       dk[j][c]  += sum_i G[j][i] q[i][c]      A G as rows             B queries, interleaved along i
 *
 * A is row-major. A matrix unit multiplies MATRIX_INTERLEAVE consecutive steps k at once, so they are neighbors in B
 * (the VNNI layout): b[k / MATRIX_INTERLEAVE][c][k % MATRIX_INTERLEAVE]. Queries are packed once per query tile, keys
 * once per key tile; the logit gradients G are rounded and packed once for both products. Only dq is stored
 * transposed, until it is complete.
 *
 * An instruction set with a matrix unit defines SKL_MATRIX_INTERLEAVE, SKL_MATRIX_ROWS and SKL_MATRIX_DEPTH and
 * provides multiply_matrices, which rounds rows up to MATRIX_ROWS, columns to SKL_LANES and the depth to
 * MATRIX_DEPTH: operands are 0 between the depth and its multiple, and rows and columns of C beyond the others are
 * never read. */
#ifndef SKL_CPU_BODY_MATRIX_H
#define SKL_CPU_BODY_MATRIX_H

#include "cpu/body/gemm.h"
#include "cpu/body/load.h"

#if defined(SKL_MATRIX_INTERLEAVE)
enum {
    HAS_MATRIX = 1,
    MATRIX_INTERLEAVE = SKL_MATRIX_INTERLEAVE,
    MATRIX_ROWS = SKL_MATRIX_ROWS,
    MATRIX_DEPTH = SKL_MATRIX_DEPTH
};
#else
enum { HAS_MATRIX = 0, MATRIX_INTERLEAVE = 2, MATRIX_ROWS = 1, MATRIX_DEPTH = 2 };
#endif

typedef struct matrix_operands {
    float *c;
    int64_t c_stride;
    const uint16_t *a;
    int64_t a_stride;
    const uint16_t *b;
    int64_t b_stride; /* columns of B in memory */
    int64_t rows, columns, depth;
} matrix_operands;

#if defined(SKL_MATRIX_INTERLEAVE)
SKL_INLINE void multiply_matrices(const matrix_operands *m, const bool accumulate);

static void matrix_product(const matrix_operands *m, bool accumulate)
{
    if (accumulate)
        multiply_matrices(m, true);
    else
        multiply_matrices(m, false);
}
#else
static void matrix_product(const matrix_operands *m, bool accumulate)
{
    (void)m, (void)accumulate; /* no side is on_matrix */
}
#endif

SKL_INLINE int64_t round_up(int64_t value, int64_t multiple)
{
    return (value + multiple - 1) / multiple * multiple;
}

/* A tile buffer holds floats or, if its side is on the matrix unit, 16-bit numbers: rows first, then their packed
 * form. */
static uint16_t *halves(const float *buffer)
{
    return (uint16_t *)(uintptr_t)buffer;
}

/* ---- Packing ------------------------------------------------------------------------------------------------ */

/* Copies `count` rows to rows of padded(dim) halves, with zeros after the last column and the last row, up to
 * `capacity` rows. */
static void copy_halves(uint16_t *to, const uint16_t *from, int64_t stride, int64_t count, int64_t capacity,
                        int64_t dim)
{
    const int64_t width = padded(dim);
    for (int64_t i = 0; i < count; i++) {
        memcpy(to + i * width, from + i * stride, (size_t)dim * sizeof *to);
        memset(to + i * width + dim, 0, (size_t)(width - dim) * sizeof *to);
    }
    memset(to + count * width, 0, (size_t)((capacity - count) * width) * sizeof *to);
}

/* to[r / MATRIX_INTERLEAVE][c][r % MATRIX_INTERLEAVE] = from[r][c]. */
static void interleave_rows(uint16_t *restrict to, int64_t to_stride, const uint16_t *restrict from, int64_t stride,
                            int64_t rows, int64_t columns)
{
    for (int64_t r = 0; r < rows;
         r += MATRIX_INTERLEAVE, to += to_stride * MATRIX_INTERLEAVE, from += stride * MATRIX_INTERLEAVE)
        for (int64_t c = 0; c < columns; c++)
            for (int64_t step = 0; step < MATRIX_INTERLEAVE; step++)
                to[c * MATRIX_INTERLEAVE + step] = from[step * stride + c];
}

#if SKL_LANES == 16
/* Swaps the blocks of `size` x `size` next to the diagonal, of a pair of rows that are `size` apart. */
#define FROM_FIRST(lane, size)  ((lane) & (size) ? 16 + (lane) - (size) : (lane))
#define FROM_SECOND(lane, size) ((lane) & (size) ? 16 + (lane) : (lane) + (size))
#define ALL_LANES(pick, size)                                                                                        \
    pick(0, size), pick(1, size), pick(2, size), pick(3, size), pick(4, size), pick(5, size), pick(6, size),         \
        pick(7, size), pick(8, size), pick(9, size), pick(10, size), pick(11, size), pick(12, size), pick(13, size), \
        pick(14, size), pick(15, size)
#define SWAP_BLOCKS(rows, size)                                                                                      \
    _Pragma("GCC unroll 16") for (int r = 0; r < 16; r++) if (!(r & (size)))                                         \
    {                                                                                                                \
        const uvec first = rows[r], second = rows[r + (size)];                                                       \
        rows[r] = __builtin_shufflevector(first, second, ALL_LANES(FROM_FIRST, size));                               \
        rows[r + (size)] = __builtin_shufflevector(first, second, ALL_LANES(FROM_SECOND, size));                     \
    }

SKL_INLINE void transpose_block(float *to, int64_t to_stride, const float *from, int64_t from_stride)
{
    uvec rows[16];
#pragma GCC unroll 16
    for (int r = 0; r < 16; r++)
        rows[r] = (uvec)vec_load(from + r * from_stride);
    SWAP_BLOCKS(rows, 1)
    SWAP_BLOCKS(rows, 2)
    SWAP_BLOCKS(rows, 4)
    SWAP_BLOCKS(rows, 8)
#pragma GCC unroll 16
    for (int r = 0; r < 16; r++)
        vec_store(to + r * to_stride, (vec)rows[r]);
}

enum { TRANSPOSED_BLOCK = 16 };
#else
enum { TRANSPOSED_BLOCK = 4 };

SKL_INLINE void transpose_block(float *to, int64_t to_stride, const float *from, int64_t from_stride)
{
    for (int r = 0; r < TRANSPOSED_BLOCK; r++)
        for (int c = 0; c < TRANSPOSED_BLOCK; c++)
            to[c * to_stride + r] = from[r * from_stride + c];
}
#endif

/* to[c][r] = from[r][c] of floats or other 32-bit elements. Rows and columns are rounded up to TRANSPOSED_BLOCK. */
static void transpose_floats(float *to, int64_t to_stride, const float *from, int64_t from_stride, int64_t rows,
                             int64_t columns)
{
    for (int64_t c = 0; c < columns; c += TRANSPOSED_BLOCK)
        for (int64_t r = 0; r < rows; r += TRANSPOSED_BLOCK)
            transpose_block(to + c * to_stride + r, to_stride, from + r * from_stride + c, from_stride);
}

/* Transposes groups of MATRIX_INTERLEAVE halves; strides are in halves. */
static void transpose_interleaved(uint16_t *to, int64_t to_stride, const uint16_t *from, int64_t from_stride,
                                  int64_t rows, int64_t columns)
{
    if (MATRIX_INTERLEAVE == 2) {
        transpose_floats((float *)(void *)to, to_stride / 2, (const float *)(const void *)from, from_stride / 2, rows,
                         columns);
        return;
    }
    for (int64_t c = 0; c < columns; c++)
        for (int64_t r = 0; r < rows; r++)
            memcpy(to + c * to_stride + r * MATRIX_INTERLEAVE, from + r * from_stride + c * MATRIX_INTERLEAVE,
                   MATRIX_INTERLEAVE * sizeof *to);
}

/* Whether a row holds an infinity or a NaN. */
static bool any_nonfinite_halves(const uint16_t *rows, int64_t count, int64_t dim)
{
    uint16_t highest = 0;
    for (int64_t i = 0; i < count; i++, rows += padded(dim))
        for (int64_t c = 0; c < dim; c++) {
            const uint16_t magnitude = rows[c] & 0x7FFFU;
            highest = magnitude > highest ? magnitude : highest;
        }
    return highest >= 0x7F80U;
}

#endif
