#include "cli/distill/matmul.h"
#include "device/device.h"

#include <string.h>

/* The compiler makes one function per instruction set, and the loader chooses. Clang has no such attribute in all of
 * its versions, and makes a slower function. */
#if defined(__x86_64__) && defined(__GNUC__) && !defined(__clang__)
#define PER_INSTRUCTION_SET __attribute__((target_clones("avx512f", "avx2", "default"), optimize("O3")))
#else
#define PER_INSTRUCTION_SET
#endif

enum {
    WIDTH = 64,
    BLOCK_INNER = 256 /* a slice of b that stays in the L2 cache */
};

typedef struct product {
    float *c;
    matrix a;
    const float *b;
    int64_t columns, inner;
} product;

/* c[columns] += a[depth] b[depth, columns]; 16 columns at a time stay in registers. */
PER_INSTRUCTION_SET static void add_row(float *restrict c, const float *a, int64_t a_stride, const float *restrict b,
                                        int64_t columns, int64_t depth)
{
    int64_t j = 0;
    for (; j + WIDTH <= columns; j += WIDTH) {
        float sum[WIDTH];
        memcpy(sum, c + j, sizeof sum);
        for (int64_t k = 0; k < depth; k++)
            for (int n = 0; n < WIDTH; n++)
                sum[n] += a[k * a_stride] * b[k * columns + j + n];
        memcpy(c + j, sum, sizeof sum);
    }
    for (; j < columns; j++)
        for (int64_t k = 0; k < depth; k++)
            c[j] += a[k * a_stride] * b[k * columns + j];
}

static void run_rows(void *context, int64_t row_begin, int64_t row_end)
{
    const product *const p = context;
    for (int64_t k = 0; k < p->inner; k += BLOCK_INNER)
        for (int64_t i = row_begin; i < row_end; i++)
            add_row(p->c + i * p->columns, p->a.data + i * p->a.row_stride + k * p->a.column_stride,
                    p->a.column_stride, p->b + k * p->columns, p->columns,
                    k + BLOCK_INNER < p->inner ? BLOCK_INNER : p->inner - k);
}

void matmul_add(float *c, matrix a, const float *b, int64_t rows, int64_t columns, int64_t inner, int threads)
{
    product work = {c, a, b, columns, inner};
    parallel_rows(threads, rows, run_rows, &work);
}
