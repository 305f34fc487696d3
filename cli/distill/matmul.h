/* Matrix products for projections: vectorised, multithreaded. Every sum runs over the inner index in order, so that
 * the result is bitwise equal for any number of threads. */
#ifndef STREAMKL_CLI_DISTILL_MATMUL_H
#define STREAMKL_CLI_DISTILL_MATMUL_H

#include <stdint.h>

/* An operand: element (i, k) is data[i * row_stride + k * column_stride]. */
typedef struct matrix {
    const float *data;
    int64_t row_stride, column_stride;
} matrix;

/* c[rows, columns] += a[rows, inner] b[inner, columns]; rows of b and c are contiguous, `columns` apart. */
void matmul_add(float *c, matrix a, const float *b, int64_t rows, int64_t columns, int64_t inner, int threads);

#endif
