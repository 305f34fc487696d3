/* The kernel of matmul.c, compiled once per instruction set. */
#ifndef STREAMKL_DISTILL_MATMUL_KERNEL_H
#define STREAMKL_DISTILL_MATMUL_KERNEL_H

#include "distill/matrix.h"

/* Rows [row_begin, row_end) of c += a b. */
typedef void matmul_rows(float *c, matrix a, const float *b, int64_t row_begin, int64_t row_end, int64_t columns,
                         int64_t inner);

#endif
