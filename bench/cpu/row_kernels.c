#include "bench/cpu/row_kernels.h"

#include <stddef.h>

/* Each is an instance of row_kernels_body.c. */
extern const row_kernels row_kernels_portable;

#if defined(__x86_64__)
extern const row_kernels row_kernels_avx2;
extern const row_kernels row_kernels_avx512;

const row_kernels *row_kernels_best(void)
{
    if (__builtin_cpu_supports("avx512f"))
        return &row_kernels_avx512;
    if (__builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma"))
        return &row_kernels_avx2;
    return &row_kernels_portable;
}
#else
const row_kernels *row_kernels_best(void)
{
    return &row_kernels_portable;
}
#endif
