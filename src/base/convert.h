/* Converts 16-bit floats to and from f32 with integer operations: the same bits on every processor, and loops
 * vectorize. A GPU has an instruction for each, with the same result but for the payload of a NaN. */
#ifndef SKL_BASE_CONVERT_H
#define SKL_BASE_CONVERT_H

#include <stdint.h>
#include <string.h>

#include "base/host_device.h"
#include "streamkl.h"

SKL_HOST_DEVICE float skl_float_of_bits(uint32_t bits)
{
    float value;
    memcpy(&value, &bits, sizeof value);
    return value;
}

SKL_HOST_DEVICE uint32_t skl_bits_of_float(float value)
{
    uint32_t bits;
    memcpy(&bits, &value, sizeof bits);
    return bits;
}

SKL_HOST_DEVICE float skl_from_bf16(uint16_t half)
{
    return skl_float_of_bits((uint32_t)half << 16);
}

#ifdef __CUDA_ARCH__

SKL_HOST_DEVICE float skl_from_f16(uint16_t half)
{
    float value;
    asm("cvt.f32.f16 %0, %1;" : "=f"(value) : "h"(half));
    return value;
}

SKL_HOST_DEVICE uint16_t skl_to_bf16(float value)
{
    uint16_t half;
    asm("cvt.rn.bf16.f32 %0, %1;" : "=h"(half) : "f"(value));
    return half;
}

SKL_HOST_DEVICE uint16_t skl_to_f16(float value)
{
    uint16_t half;
    asm("cvt.rn.f16.f32 %0, %1;" : "=h"(half) : "f"(value));
    return half;
}

#else

/* Moves exponent and mantissa up by 13 bits; the factor 2^112 corrects the bias of the exponent, also for subnormals.
 * Infinities and NaNs keep all exponent bits set. */
SKL_HOST_DEVICE float skl_from_f16(uint16_t half)
{
    const uint32_t magnitude = half & 0x7FFFU;
    const uint32_t sign = (uint32_t)(half & 0x8000U) << 16;
    const float finite = skl_float_of_bits(magnitude << 13) * 0x1p112F;
    const uint32_t special = 0x7F800000U | (magnitude << 13);
    return skl_float_of_bits(sign | (magnitude >= 0x7C00U ? special : skl_bits_of_float(finite)));
}

/* Rounds to nearest even; a NaN becomes a quiet NaN. */
SKL_HOST_DEVICE uint16_t skl_to_bf16(float value)
{
    const uint32_t bits = skl_bits_of_float(value);
    if ((bits & 0x7FFFFFFFU) > 0x7F800000U)
        return (uint16_t)((bits >> 16) | 0x0040U);
    return (uint16_t)((bits + 0x7FFFU + ((bits >> 16) & 1U)) >> 16);
}

SKL_HOST_DEVICE uint16_t skl_to_f16(float value)
{
    const uint32_t bits = skl_bits_of_float(value);
    const uint32_t sign = (bits >> 16) & 0x8000U;
    const uint32_t magnitude = bits & 0x7FFFFFFFU;
    if (magnitude > 0x7F800000U)
        return (uint16_t)(sign | 0x7E00U);
    if (magnitude >= 0x477FF000U) /* 65520 and above round to infinity */
        return (uint16_t)(sign | 0x7C00U);
    if (magnitude < 0x38800000U) { /* below 2^-14: an f32 addition rounds to a multiple of 2^-24 */
        const float shifted = skl_float_of_bits(magnitude) + 0.5F;
        return (uint16_t)(sign | (skl_bits_of_float(shifted) - 0x3F000000U));
    }
    const uint32_t rounded = magnitude + 0xFFFU + ((magnitude >> 13) & 1U);
    return (uint16_t)(sign | ((rounded - 0x38000000U) >> 13));
}

#endif

SKL_HOST_DEVICE float skl_load(const void *data, skl_dtype dtype, int64_t index)
{
    if (dtype == SKL_F32)
        return ((const float *)data)[index];
    const uint16_t half = ((const uint16_t *)data)[index];
    return dtype == SKL_F16 ? skl_from_f16(half) : skl_from_bf16(half);
}

SKL_HOST_DEVICE void skl_store(void *data, skl_dtype dtype, int64_t index, float value)
{
    if (dtype == SKL_F32)
        ((float *)data)[index] = value;
    else
        ((uint16_t *)data)[index] = dtype == SKL_F16 ? skl_to_f16(value) : skl_to_bf16(value);
}

#endif
