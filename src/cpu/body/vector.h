/* Vectors as a compiler extension, and the few vector functions that the kernels need.
 *
 * The including file defines SKL_LANES, the floats per vector. It may define SKL_HAS_FMA and SKL_HAS_EXP2 and provide
 * vec_fma and exp2_vec itself. */
#ifndef SKL_CPU_BODY_VECTOR_H
#define SKL_CPU_BODY_VECTOR_H

#include <stdbool.h>
#include <stdint.h>

#include "base/kl_math.h"

typedef float vec __attribute__((vector_size(SKL_LANES * 4)));
typedef int32_t ivec __attribute__((vector_size(SKL_LANES * 4)));
typedef uint32_t uvec __attribute__((vector_size(SKL_LANES * 4))); /* bits: sums and shifts may wrap */
typedef vec vec_in_memory __attribute__((may_alias));              /* floats of a buffer, seen as a vector */

#define SKL_INLINE static inline __attribute__((always_inline))

SKL_INLINE vec vec_load(const float *from)
{
    return *(const vec_in_memory *)(const void *)from;
}

SKL_INLINE void vec_store(float *to, vec value)
{
    *(vec_in_memory *)(void *)to = value;
}

/* value - 0 equals value, also for -0, so the compiler removes the subtraction. */
SKL_INLINE vec vec_of(float value)
{
    const vec zero = {0};
    return value - zero;
}

SKL_INLINE ivec ivec_of(int32_t value)
{
    const ivec zero = {0};
    return zero + value;
}

/* mask ? a : b, lane by lane; masks are 0 or -1. It selects bits and never multiplies, so that no NaN leaks. */
SKL_INLINE vec vec_select(ivec mask, vec a, vec b)
{
    return (vec)((mask & (ivec)a) | (~mask & (ivec)b));
}

SKL_INLINE vec vec_max(vec a, vec b)
{
    return vec_select(a > b, a, b);
}

SKL_INLINE bool ivec_any(ivec mask)
{
    int32_t any = 0;
    for (int lane = 0; lane < SKL_LANES; lane++)
        any |= mask[lane];
    return any != 0;
}

/* a * b + c, fused explicitly. If the compiler fused only one of two equal expressions, the KL of equal models would
 * not be exactly 0. */
SKL_INLINE vec vec_fma(vec a, vec b, vec c);

#ifndef SKL_HAS_FMA
/* With two roundings, for machines without the instruction. */
SKL_INLINE vec vec_fma(vec a, vec b, vec c)
{
    return a * b + c;
}
#endif

/* p * x + c: a step of Horner's rule. */
SKL_INLINE vec horner(vec p, vec x, float c)
{
    return vec_fma(p, x, vec_of(c));
}

/* 2^f for |f| <= 1/2: minimax with 2^0 = 1 exact; 7.9e-8 in f32 arithmetic. */
SKL_INLINE vec exp2_fraction(vec f)
{
    vec p = vec_of(1.53533618e-4F);
    p = horner(p, f, 1.33988744e-3F);
    p = horner(p, f, 9.61843736e-3F);
    p = horner(p, f, 5.55033247e-2F);
    p = horner(p, f, 2.40226479e-1F);
    p = horner(p, f, 6.93147203e-1F);
    return horner(p, f, 1.0F);
}

SKL_INLINE vec exp2_vec(vec x);

#ifndef SKL_HAS_EXP2
/* 2^x: 0 below 2^-126, at most 2^127, NaN for NaN. Adding 1.5 * 2^23 rounds x to an integer n in the low bits, which
 * a left shift moves into the exponent. */
SKL_INLINE vec exp2_vec(vec x)
{
    const float round_magic = 12582912.0F;
    const vec bounded = vec_select(x > 127.0F, vec_of(127.0F), x);
    const vec shifted = bounded + round_magic;
    const vec power = (vec)(((uvec)shifted << 23) + 0x3F800000U);
    const vec value = exp2_fraction(bounded - (shifted - round_magic)) * power;
    return (vec)((ivec)value & ~(ivec)(x < -126.0F));
}
#endif

/* log2 of a positive normal number: the exponent plus the odd series of (m - 1) / (m + 1) on [1/sqrt 2, sqrt 2]. */
SKL_INLINE vec log2_vec(vec x)
{
    const ivec exponent = (ivec)((uvec)x - 0x3F3504F3U) >> 23; /* relative to 1/sqrt 2 */
    const vec m = (vec)((uvec)x - ((uvec)exponent << 23));
    const vec t = (m - 1.0F) / (m + 1.0F);
    const vec s = t * t;
    vec p = vec_of(0.43173588F);
    p = horner(p, s, 0.57671438F);
    p = horner(p, s, 0.96179885F);
    p = horner(p, s, 2.88539008F);
    return vec_fma(p, t, __builtin_convertvector(exponent, vec));
}

/* Uses a polynomial near 0, where 1 - 2 / (e^2z + 1) would cancel. */
SKL_INLINE vec tanh_vec(vec z)
{
    const ivec sign = (ivec)z & INT32_MIN;
    const vec magnitude = (vec)((ivec)z ^ sign);
    const vec s = z * z;
    vec p = vec_of(-0.00628247F);
    p = horner(p, s, 0.02107776F);
    p = horner(p, s, -0.05385386F);
    p = horner(p, s, 0.13332602F);
    p = horner(p, s, -0.33333318F);
    const vec near = vec_fma(magnitude * s, p, magnitude);
    const vec far = 1.0F - 2.0F / (exp2_vec(magnitude * (2.0F * SKL_LOG2E)) + 1.0F);
    return (vec)((ivec)vec_select(magnitude < 0.55F, near, far) | sign);
}

#endif
