/* A student with linear attention: its logit is the logarithm of the product a (SKL_LINK_LINEAR), in base 2. */
#ifndef SKL_CUDA_COMMON_LINEAR_LINK_CUH
#define SKL_CUDA_COMMON_LINEAR_LINK_CUH

#include <float.h>

#include "cuda/common/row_state.cuh"

/* -inf for a = 0, NaN for a < 0 and for numbers that are not finite. */
__device__ inline float linear_logit(float product)
{
    const float logit = tensor_core::log2_probability(product) + (product - product);
    const float without_mass = product < 0.0F ? NAN : -INFINITY;
    return product < FLT_MIN ? without_mass : logit;
}

/* 1 / a: the derivative of the logarithm. It is finite for a = 0, so that a pair without mass on either side has
 * gradient 0. */
__device__ inline float linear_slope(float product)
{
    return fminf(__frcp_rn(product), FLT_MAX);
}

/* linear_slope, from the logit. */
__device__ inline float linear_slope_of_logit(float logit)
{
    return fminf(ex2(-logit), FLT_MAX);
}

#endif
