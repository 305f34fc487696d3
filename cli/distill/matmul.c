#include "cli/distill/matmul.h"
#include "device/device.h"

extern matmul_rows matmul_rows_portable;

#if defined(__x86_64__)
extern matmul_rows matmul_rows_avx2;
extern matmul_rows matmul_rows_avx512;

static matmul_rows *best_instance(void)
{
    if (__builtin_cpu_supports("avx512f"))
        return matmul_rows_avx512;
    if (__builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma"))
        return matmul_rows_avx2;
    return matmul_rows_portable;
}
#else
static matmul_rows *best_instance(void)
{
    return matmul_rows_portable;
}
#endif

/* A multiple of every instance's TILE_ROWS, so that the division into blocks does not change the result. */
enum { BLOCK_ROWS = 48 };

typedef struct product {
    float *c;
    matrix a;
    const float *b;
    int64_t rows, columns, inner;
    matmul_rows *multiply;
} product;

static void run_blocks(void *context, int64_t block_begin, int64_t block_end)
{
    const product *const p = context;
    const int64_t end = block_end * BLOCK_ROWS;
    p->multiply(p->c, p->a, p->b, block_begin * BLOCK_ROWS, end < p->rows ? end : p->rows, p->columns, p->inner);
}

void matmul_add(float *c, matrix a, const float *b, int64_t rows, int64_t columns, int64_t inner, int threads)
{
    product work = {c, a, b, rows, columns, inner, best_instance()};
    parallel_rows(threads, (rows + BLOCK_ROWS - 1) / BLOCK_ROWS, run_blocks, &work);
}
