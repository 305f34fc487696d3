/* An operand of a matrix product. */
#ifndef STREAMKL_DISTILL_MATRIX_H
#define STREAMKL_DISTILL_MATRIX_H

#include <stdint.h>

/* Element (i, k) is data[i * row_stride + k * column_stride]. */
typedef struct matrix {
    const float *data;
    int64_t row_stride, column_stride;
} matrix;

#endif
