/* Types of 16-bit floats, for overloads and for storage. CUDA's own headers have hundreds of functions for them and
 * take half of the compile time of an otherwise empty translation unit. */
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
