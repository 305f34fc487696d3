/* Matrix products for projections: blocked, vectorised, multithreaded. Every sum runs over the inner index in order,
 * so that the result is bitwise equal for any number of threads. */
#ifndef STREAMKL_DISTILL_MATMUL_H
#define STREAMKL_DISTILL_MATMUL_H

#include "distill/matrix.h"

/* c[rows, columns] += a[rows, inner] b[inner, columns]; rows of b and c are contiguous, `columns` apart. */
void matmul_add(float *c, matrix a, const float *b, int64_t rows, int64_t columns, int64_t inner, int threads);

#endif
