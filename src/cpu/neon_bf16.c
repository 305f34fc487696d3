/* BF16 of 64-bit Arm: BFMMLA adds the product of 2 x 4 and 4 x 2 numbers of bf16 to 2 x 2 sums in f32. Everything
 * else is NEON. */
#define SKL_MATRIX_INTERLEAVE 4
#define SKL_MATRIX_ROWS       8
#define SKL_MATRIX_DEPTH      4

#include "cpu/neon_vector.h"
#include "cpu/body/matrix.h"

enum { ROW_PAIRS = MATRIX_ROWS / 2, COLUMN_PAIRS = 4 };

static bfloat16x8_t two_rows(const uint16_t *first, const uint16_t *second)
{
    return vreinterpretq_bf16_u16(vcombine_u16(vld1_u16(first), vld1_u16(second)));
}

/* The 2 x 2 blocks of two rows of four columns, and back. */
static float32x4_t left_block(float32x4_t upper, float32x4_t lower)
{
    return vcombine_f32(vget_low_f32(upper), vget_low_f32(lower));
}

static float32x4_t right_block(float32x4_t upper, float32x4_t lower)
{
    return vcombine_f32(vget_high_f32(upper), vget_high_f32(lower));
}

/* C of MATRIX_ROWS rows and 2 * `column_pairs` columns, in registers. */
SKL_INLINE void multiply_block(const matrix_operands *m, int64_t row, int64_t column, const int column_pairs,
                               const bool accumulate)
{
    float32x4_t sum[ROW_PAIRS][COLUMN_PAIRS];
    float *const c = m->c + row * m->c_stride + column;
#pragma GCC unroll 4
    for (int r = 0; r < ROW_PAIRS; r++)
#pragma GCC unroll 4
        for (int v = 0; v < column_pairs; v += 2) {
            const float *const at = c + 2 * r * m->c_stride + 2 * v;
            const float32x4_t zero = vdupq_n_f32(0.0F);
            const float32x4_t upper = accumulate ? vld1q_f32(at) : zero;
            const float32x4_t lower = accumulate ? vld1q_f32(at + m->c_stride) : zero;
            sum[r][v] = left_block(upper, lower);
            sum[r][v + 1] = right_block(upper, lower);
        }
    const uint16_t *a = m->a + row * m->a_stride;
    const uint16_t *b = m->b + column * MATRIX_INTERLEAVE;
    for (int64_t k = 0; k < m->depth; k += MATRIX_DEPTH) {
        bfloat16x8_t columns[COLUMN_PAIRS];
#pragma GCC unroll 4
        for (int v = 0; v < column_pairs; v++)
            columns[v] = vreinterpretq_bf16_u16(vld1q_u16(b + 2 * v * MATRIX_INTERLEAVE));
#pragma GCC unroll 4
        for (int r = 0; r < ROW_PAIRS; r++) {
            const bfloat16x8_t rows = two_rows(a + 2 * r * m->a_stride, a + (2 * r + 1) * m->a_stride);
#pragma GCC unroll 4
            for (int v = 0; v < column_pairs; v++)
                sum[r][v] = vbfmmlaq_f32(sum[r][v], rows, columns[v]);
        }
        a += MATRIX_DEPTH;
        b += MATRIX_DEPTH * m->b_stride;
    }
#pragma GCC unroll 4
    for (int r = 0; r < ROW_PAIRS; r++)
#pragma GCC unroll 4
        for (int v = 0; v < column_pairs; v += 2) {
            float *const at = c + 2 * r * m->c_stride + 2 * v;
            vst1q_f32(at, left_block(sum[r][v], sum[r][v + 1]));
            vst1q_f32(at + m->c_stride, right_block(sum[r][v], sum[r][v + 1]));
        }
}

SKL_INLINE void multiply_matrices(const matrix_operands *m, const bool accumulate)
{
    int64_t column = 0;
    for (; column + SKL_LANES < m->columns; column += 2 * COLUMN_PAIRS)
        for (int64_t row = 0; row < m->rows; row += MATRIX_ROWS)
            multiply_block(m, row, column, COLUMN_PAIRS, accumulate);
    for (int64_t row = 0; column < m->columns && row < m->rows; row += MATRIX_ROWS)
        multiply_block(m, row, column, COLUMN_PAIRS / 2, accumulate);
}

#include "cpu/body/work.h"
#include "cpu/features.h"

const skl_cpu_kernel skl_cpu_neon_bf16 = {
    .name = "cpu_neon_bf16",
    .detail = "BFMMLA for bf16, NEON, 192 x 96 tiles, 8 x 8 micro-kernel",
    .usable = skl_cpu_has_neon_bf16,
    .on_matrix = true,
    .works = &works,
};
