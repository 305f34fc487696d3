/* AVX2 and FMA: 16 registers of 8 floats, of which 6 x 2 hold C. */
#include <immintrin.h>

#define SKL_LANES      8
#define SKL_MICRO_ROWS 6
#define SKL_MICRO_VECS 2
#define SKL_HAS_FMA
#define SKL_HAS_BOUNDS

#include "cpu/body/vector.h"

SKL_INLINE vec vec_fma(vec a, vec b, vec c)
{
    return (vec)_mm256_fmadd_ps((__m256)a, (__m256)b, (__m256)c);
}

/* vmaxps and vminps return their second operand if one is NaN. */
SKL_INLINE vec vec_at_least(vec low, vec x)
{
    return (vec)_mm256_max_ps((__m256)low, (__m256)x);
}

SKL_INLINE vec vec_at_most(vec high, vec x)
{
    return (vec)_mm256_min_ps((__m256)high, (__m256)x);
}

#include "cpu/body/work.h"
#include "cpu/features.h"

const skl_cpu_kernel skl_cpu_avx2 = {
    .name = "cpu_avx2",
    .detail = "AVX2 and FMA, 192 x 96 tiles, 6 x 16 micro-kernel",
    .usable = skl_cpu_has_avx2,
    .works = &works,
};
