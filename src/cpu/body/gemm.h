/* The matrix product of all kernels: C[r][c] = or += sum_k A(r, k) B[k][c].
 *
 *     logits   X[j][i]  = sum_c k[j][c] qT[c][i]      A row-major (row_stride, 1)
 *     dq       dq[i][c] += sum_j G[j][i] k[j][c]      A transposed (1, step_stride)
 *     dk       dk[j][c] += sum_i G[j][i] q[i][c]      A row-major
 *
 * Operands are not packed: A is read by scalar broadcasts, B by full vectors along a row. The micro-kernel keeps
 * SKL_MICRO_ROWS x SKL_MICRO_VECS vectors of C in registers. */
#ifndef SKL_CPU_BODY_GEMM_H
#define SKL_CPU_BODY_GEMM_H

#include "cpu/body/vector.h"

enum {
    MICRO_ROWS = SKL_MICRO_ROWS,
    MICRO_VECS = SKL_MICRO_VECS,
    ROWS_PER_POINTER = 3 /* rows that x86 addresses from one base as base + index * {0, 1, 2} */
};

_Static_assert(MICRO_ROWS % ROWS_PER_POINTER == 0, "each row pointer serves ROWS_PER_POINTER rows");

typedef struct gemm_a {
    const float *data;
    int64_t row_stride, step_stride;
} gemm_a;

SKL_INLINE void micro_kernel(float *c, int64_t c_stride, gemm_a a, const float *b, int64_t b_stride, int64_t depth,
                             const int vecs, const bool accumulate)
{
    vec sum[MICRO_ROWS][MICRO_VECS];
#pragma GCC unroll 16
    for (int r = 0; r < MICRO_ROWS; r++)
#pragma GCC unroll 4
        for (int v = 0; v < vecs; v++)
            sum[r][v] = accumulate ? vec_load(c + r * c_stride + v * SKL_LANES) : vec_of(0.0F);

    const float *base[MICRO_ROWS / ROWS_PER_POINTER];
#pragma GCC unroll 16
    for (int g = 0; g < MICRO_ROWS / ROWS_PER_POINTER; g++)
        base[g] = a.data + g * ROWS_PER_POINTER * a.row_stride;

    for (int64_t k = 0; k < depth; k++) {
        vec row[MICRO_VECS];
#pragma GCC unroll 4
        for (int v = 0; v < vecs; v++)
            row[v] = vec_load(b + v * SKL_LANES);
        b += b_stride;
#pragma GCC unroll 16
        for (int r = 0; r < MICRO_ROWS; r++) {
            const float scalar = base[r / ROWS_PER_POINTER][r % ROWS_PER_POINTER * a.row_stride];
#pragma GCC unroll 4
            for (int v = 0; v < vecs; v++)
                sum[r][v] = vec_fma(vec_of(scalar), row[v], sum[r][v]);
        }
#pragma GCC unroll 16
        for (int g = 0; g < MICRO_ROWS / ROWS_PER_POINTER; g++)
            base[g] += a.step_stride;
    }

#pragma GCC unroll 16
    for (int r = 0; r < MICRO_ROWS; r++)
#pragma GCC unroll 4
        for (int v = 0; v < vecs; v++)
            vec_store(c + r * c_stride + v * SKL_LANES, sum[r][v]);
}

/* Rounds rows up to MICRO_ROWS and columns to SKL_LANES: the buffers have room for it, and the extra elements are
 * never read. The loop over rows is inside the loop over column panels, so that a panel of B stays in L1. */
SKL_INLINE void gemm_body(float *c, int64_t c_stride, gemm_a a, const float *b, int64_t b_stride, int64_t rows,
                          int64_t columns, int64_t depth, const bool accumulate)
{
    int64_t column = 0;
    for (; column + (MICRO_VECS - 1) * SKL_LANES < columns; column += MICRO_VECS * SKL_LANES)
        for (int64_t r = 0; r < rows; r += MICRO_ROWS) {
            const gemm_a block = {a.data + r * a.row_stride, a.row_stride, a.step_stride};
            micro_kernel(c + r * c_stride + column, c_stride, block, b + column, b_stride, depth, MICRO_VECS,
                         accumulate);
        }
    for (; column < columns; column += SKL_LANES)
        for (int64_t r = 0; r < rows; r += MICRO_ROWS) {
            const gemm_a block = {a.data + r * a.row_stride, a.row_stride, a.step_stride};
            micro_kernel(c + r * c_stride + column, c_stride, block, b + column, b_stride, depth, 1, accumulate);
        }
}

/* C = A B with A row-major. */
static void gemm(float *c, int64_t c_stride, const float *a, int64_t a_stride, const float *b, int64_t b_stride,
                 int64_t rows, int64_t columns, int64_t depth)
{
    const gemm_a row_major = {a, a_stride, 1};
    gemm_body(c, c_stride, row_major, b, b_stride, rows, columns, depth, false);
}

/* C += A B with A row-major. */
static void gemm_add(float *c, int64_t c_stride, const float *a, int64_t a_stride, const float *b, int64_t b_stride,
                     int64_t rows, int64_t columns, int64_t depth)
{
    const gemm_a row_major = {a, a_stride, 1};
    gemm_body(c, c_stride, row_major, b, b_stride, rows, columns, depth, true);
}

/* C += A^T B, where A(r, k) = a[k * a_stride + r]. */
static void gemm_transposed_add(float *c, int64_t c_stride, const float *a, int64_t a_stride, const float *b,
                                int64_t b_stride, int64_t rows, int64_t columns, int64_t depth)
{
    const gemm_a transposed = {a, 1, a_stride};
    gemm_body(c, c_stride, transposed, b, b_stride, rows, columns, depth, true);
}

#endif
