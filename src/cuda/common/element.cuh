/* 16-bit floats, which choose among overloads and are stored. CUDA's own headers for them have hundreds of functions
 * more: they are half of what an otherwise empty translation unit takes to compile. */
#ifndef SKL_CUDA_COMMON_ELEMENT_CUH
#define SKL_CUDA_COMMON_ELEMENT_CUH

#include "base/convert.h"

struct skl_bf16 {
    uint16_t bits;

    skl_bf16() = default;
    __device__ explicit skl_bf16(float value) : bits(skl_to_bf16(value))
    {
    }
};

struct skl_f16 {
    uint16_t bits;

    skl_f16() = default;
    __device__ explicit skl_f16(float value) : bits(skl_to_f16(value))
    {
    }
};

#endif
