/* AVX512-BF16: one instruction adds the products of 16 pairs of bf16 to 16 sums in f32. */
#define SKL_MATRIX_INTERLEAVE 2
#define SKL_MATRIX_ROWS       12
#define SKL_MATRIX_DEPTH      2

#include "cpu/avx512_vector.h"
#include "cpu/body/matrix.h"

enum { COLUMN_VECS = 2 };

/* C of MATRIX_ROWS rows and `vecs` vectors of columns, in registers. */
SKL_INLINE void multiply_block(const matrix_operands *m, int64_t row, int64_t column, const int vecs,
                               const bool accumulate)
{
    __m512 sum[MATRIX_ROWS][COLUMN_VECS];
    float *const c = m->c + row * m->c_stride + column;
#pragma GCC unroll 12
    for (int r = 0; r < MATRIX_ROWS; r++)
#pragma GCC unroll 2
        for (int v = 0; v < vecs; v++)
            sum[r][v] = accumulate ? (__m512)vec_load(c + r * m->c_stride + v * SKL_LANES) : (__m512)vec_of(0.0F);
    const uint16_t *a = m->a + row * m->a_stride;
    const uint16_t *b = m->b + column * MATRIX_INTERLEAVE;
    for (int64_t k = 0; k < m->depth; k += MATRIX_INTERLEAVE) {
        __m512bh columns[COLUMN_VECS];
#pragma GCC unroll 2
        for (int v = 0; v < vecs; v++)
            columns[v] = (__m512bh)_mm512_loadu_ps(b + v * SKL_LANES * MATRIX_INTERLEAVE);
#pragma GCC unroll 12
        for (int r = 0; r < MATRIX_ROWS; r++) {
            int32_t pair;
            memcpy(&pair, a + r * m->a_stride, sizeof pair);
            const __m512bh rows = (__m512bh)_mm512_set1_epi32(pair);
#pragma GCC unroll 2
            for (int v = 0; v < vecs; v++)
                sum[r][v] = _mm512_dpbf16_ps(sum[r][v], rows, columns[v]);
        }
        a += MATRIX_INTERLEAVE;
        b += MATRIX_INTERLEAVE * m->b_stride;
    }
#pragma GCC unroll 12
    for (int r = 0; r < MATRIX_ROWS; r++)
#pragma GCC unroll 2
        for (int v = 0; v < vecs; v++)
            vec_store(c + r * m->c_stride + v * SKL_LANES, (vec)sum[r][v]);
}

SKL_INLINE void multiply_matrices(const matrix_operands *m, const bool accumulate)
{
    int64_t column = 0;
    for (; column + SKL_LANES < m->columns; column += COLUMN_VECS * SKL_LANES)
        for (int64_t row = 0; row < m->rows; row += MATRIX_ROWS)
            multiply_block(m, row, column, COLUMN_VECS, accumulate);
    for (int64_t row = 0; column < m->columns && row < m->rows; row += MATRIX_ROWS)
        multiply_block(m, row, column, 1, accumulate);
}

#include "cpu/body/work.h"
#include "cpu/features.h"

const skl_cpu_kernel skl_cpu_avx512_bf16 = {
    .name = "cpu_avx512_bf16",
    .detail = "AVX512-BF16 for bf16, AVX-512, 192 x 96 tiles, 12 x 32 micro-kernel",
    .usable = skl_cpu_has_avx512_bf16,
    .on_matrix = true,
    .works = &works,
};
