/* The vectors of AVX-512 for the shared body: 32 registers of 16 floats, of which 12 x 2 hold C; scalef multiplies by
 * a power of 2. */
#ifndef SKL_CPU_AVX512_VECTOR_H
#define SKL_CPU_AVX512_VECTOR_H

#include <immintrin.h>

#define SKL_LANES      16
#define SKL_MICRO_ROWS 12
#define SKL_MICRO_VECS 2
#define SKL_HAS_FMA
#define SKL_HAS_BOUNDS
#define SKL_HAS_EXP

#include "cpu/body/vector.h"

SKL_INLINE vec vec_fma(vec a, vec b, vec c)
{
    return (vec)_mm512_fmadd_ps((__m512)a, (__m512)b, (__m512)c);
}

/* vmaxps and vminps return their second operand if one is NaN. */
SKL_INLINE vec vec_at_least(vec low, vec x)
{
    return (vec)_mm512_max_ps((__m512)low, (__m512)x);
}

SKL_INLINE vec vec_at_most(vec high, vec x)
{
    return (vec)_mm512_min_ps((__m512)high, (__m512)x);
}

/* Adding 1.5 * 2^23 rounds x log2 e to an integer. */
SKL_INLINE vec exp_in_range(vec x)
{
    const vec log2e = vec_of(SKL_LOG2E), round_magic = vec_of(12582912.0F);
    const vec whole = vec_fma(x, log2e, round_magic) - round_magic;
    return (vec)_mm512_scalef_ps((__m512)exp2_fraction(vec_fma(x, log2e, -whole)), (__m512)whole);
}

/* The lower bound, where e^x is 0, keeps x in range. */
SKL_INLINE vec exp_vec(vec x)
{
    return exp_in_range(vec_at_least(vec_of(-200.0F), x));
}

#endif
