/* The elementwise operations of the baseline: row softmax with a vectorized exponential, KL, logit gradient. One
 * source, compiled for several instruction sets; the benchmark uses the best that the CPU supports. */
#ifndef STREAMKL_BENCH_CPU_ROW_KERNELS_H
#define STREAMKL_BENCH_CPU_ROW_KERNELS_H

#include <stdint.h>

typedef struct row_kernels {
    /* Logits x, y of one row to probabilities p, s, which may be the same arrays; returns the row's KL(P || S).
     * Keys from `visible` on are masked: their logits are not read and their probabilities are 0. */
    float (*softmax_kl)(const float *x, const float *y, float *p, float *s, int64_t visible, int64_t count);

    /* dy = g (s - p); dy may be s. */
    void (*gradient)(float g, const float *p, const float *s, float *dy, int64_t count);
} row_kernels;

extern const row_kernels row_kernels_portable, row_kernels_avx2, row_kernels_avx512; /* the last two on x86 */

#endif
