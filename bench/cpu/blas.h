/* OpenBLAS, loaded at run time: the tool builds and works without it. */
#ifndef STREAMKL_BENCH_CPU_BLAS_H
#define STREAMKL_BENCH_CPU_BLAS_H

#include <stdbool.h>
#include <stdint.h>

typedef struct blas blas;

/* NULL if it is not installed. */
blas *blas_open(void);
void blas_close(blas *library); /* may be NULL */

/* "OpenBLAS 0.3.21, SkylakeX kernels" */
const char *blas_description(const blas *library);

void blas_set_threads(const blas *library, int threads);

/* A row-major operand; `stride` elements from one stored row to the next. */
typedef struct blas_operand {
    const float *data;
    int64_t stride;
    bool transposed;
} blas_operand;

/* c[rows, columns] = scale * a[rows, inner] b[inner, columns]; c is contiguous. */
void blas_multiply(const blas *library, float scale, blas_operand a, blas_operand b, float *c, int64_t rows,
                   int64_t columns, int64_t inner);

#endif
