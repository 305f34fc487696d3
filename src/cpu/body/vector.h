/* Vectors as a compiler extension, and the few vector functions that the kernels need.
 *
 * The including file defines SKL_LANES, the floats per vector. It may define SKL_HAS_FMA, SKL_HAS_BOUNDS and
 * SKL_HAS_EXP and provide vec_fma, vec_at_least and vec_at_most, and exp_vec and exp_in_range itself. */
#ifndef SKL_CPU_BODY_VECTOR_H
#define SKL_CPU_BODY_VECTOR_H

#include <float.h>
#include <math.h>
#include <stdbool.h>
#include <stdint.h>

#include "base/kl_math.h"

typedef float vec __attribute__((vector_size(SKL_LANES * 4)));
typedef int32_t ivec __attribute__((vector_size(SKL_LANES * 4)));
typedef uint32_t uvec __attribute__((vector_size(SKL_LANES * 4))); /* bits: sums and shifts may wrap */
typedef vec vec_in_memory __attribute__((may_alias));              /* floats of a buffer, seen as a vector */
typedef double dvec __attribute__((vector_size(SKL_LANES * 8)));
typedef int64_t lvec __attribute__((vector_size(SKL_LANES * 8)));
typedef dvec dvec_in_memory __attribute__((may_alias, aligned(SKL_LANES * 4))); /* aligned as floats are */

#define SKL_INLINE static inline __attribute__((always_inline))

SKL_INLINE vec vec_load(const float *from)
{
    return *(const vec_in_memory *)(const void *)from;
}

SKL_INLINE void vec_store(float *to, vec value)
{
    *(vec_in_memory *)(void *)to = value;
}

/* A vector of doubles is wider than a register, so it is not passed by value: its type would depend on the ABI. */
#define dvec_of(value)      __builtin_convertvector(value, dvec)
#define dvec_load(from)     (*(const dvec_in_memory *)(const void *)(from))
#define dvec_store(to, sum) (*(dvec_in_memory *)(void *)(to) = (sum))

/* sum where the mask of floats is set, else 0. */
#define dvec_masked(sum, mask) ((dvec)((lvec)(sum) & __builtin_convertvector(mask, lvec)))

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

/* max(a, b); NaN if one of them is. */
SKL_INLINE vec larger_or_nan(vec a, vec b)
{
    return vec_select((ivec)(b <= a) | (ivec)(a != a), a, b);
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
/* Machines without the instruction round twice. */
SKL_INLINE vec vec_fma(vec a, vec b, vec c)
{
    return a * b + c;
}
#endif

/* max(low, x) and min(high, x); NaN for NaN. */
SKL_INLINE vec vec_at_least(vec low, vec x);
SKL_INLINE vec vec_at_most(vec high, vec x);

#ifndef SKL_HAS_BOUNDS
SKL_INLINE vec vec_at_least(vec low, vec x)
{
    return vec_select(x < low, low, x);
}

SKL_INLINE vec vec_at_most(vec high, vec x)
{
    return vec_select(x > high, high, x);
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

/* 2^(c x) for -127 <= c x <= 128, NaN for NaN. Adding 1.5 * 2^23 rounds c x to an integer n in the low bits, which a
 * left shift moves into the exponent. For n = -127 the power is 0, for n = 128 it is inf. */
SKL_INLINE vec exp2_of_product(float c, vec x)
{
    const float round_magic = 12582912.0F;
    const vec shifted = vec_fma(x, vec_of(c), vec_of(round_magic));
    const vec power = (vec)(((uvec)shifted << 23) + 0x3F800000U);
    return exp2_fraction(vec_fma(x, vec_of(c), round_magic - shifted)) * power;
}

SKL_INLINE vec exp_vec(vec x);

/* exp_vec() for x above -2^22; below, the result may also be NaN or an infinity. */
SKL_INLINE vec exp_in_range(vec x);

#ifndef SKL_HAS_EXP
/* e^x: 0 below 2^-126.5, inf from 2^127.5 on, NaN for NaN. */
SKL_INLINE vec exp_vec(vec x)
{
    const vec bounded = vec_at_least(vec_of(-127.0F * SKL_LN2), vec_at_most(vec_of(128.0F * SKL_LN2), x));
    return exp2_of_product(SKL_LOG2E, bounded);
}

SKL_INLINE vec exp_in_range(vec x)
{
    return exp_vec(x);
}
#endif

/* Logarithm of a positive normal number: ln 2 times the exponent plus the odd series of (m - 1) / (m + 1) on
 * [1/sqrt 2, sqrt 2]. NaN for NaN, whose bits the series would read as a number. */
SKL_INLINE vec log_vec(vec x)
{
    const ivec exponent = (ivec)((uvec)x - 0x3F3504F3U) >> 23; /* relative to 1/sqrt 2 */
    const vec m = (vec)((uvec)x - ((uvec)exponent << 23));
    const vec t = (m - 1.0F) / (m + 1.0F);
    const vec s = t * t;
    vec p = vec_of(0.43173588F);
    p = horner(p, s, 0.57671438F);
    p = horner(p, s, 0.96179885F);
    p = horner(p, s, 2.88539008F);
    return vec_fma(p, t, __builtin_convertvector(exponent, vec)) * SKL_LN2 + (x - x);
}

/* Logarithm of any number: -inf for 0, NaN below it. Subnormal numbers count as 0, as in the products of matrix
 * units. */
SKL_INLINE vec log_of_any(vec x)
{
    const vec log = vec_select(x < FLT_MIN, vec_of(-INFINITY), log_vec(x));
    const vec finite = vec_select(x > FLT_MAX, x, log);
    return vec_select((ivec)(x >= 0.0F), finite, vec_of(NAN));
}

/* cap tanh(z / cap) = cap - cap / (e^2r / 2 + 1/2) with r = z / cap. Near 0, where that would cancel, z plus a
 * polynomial: a large cap changes no bit, although 1 / cap may be too small for a normal number. */
SKL_INLINE vec softcap_vec(vec z, float cap)
{
    const ivec sign = (ivec)z & INT32_MIN;
    const vec ratio = (vec)((ivec)(z * (1.0F / cap)) ^ sign);
    const vec bounded = vec_at_most(vec_of(20.0F), ratio); /* tanh(20) rounds to 1 */
    const vec s = bounded * bounded;
    vec p = vec_of(-0.00628247F);
    p = horner(p, s, 0.02107776F);
    p = horner(p, s, -0.05385386F);
    p = horner(p, s, 0.13332602F);
    p = horner(p, s, -0.33333318F);
    const vec near = vec_fma(z * s, p, z);
    const vec far = cap - cap / horner(exp2_of_product(2.0F * SKL_LOG2E, bounded), vec_of(0.5F), 0.5F);
    return vec_select(ratio < 0.55F, near, (vec)((ivec)far ^ sign));
}

#endif
