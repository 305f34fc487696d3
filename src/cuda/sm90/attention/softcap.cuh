/* Softcapped logits: softcap tanh(scale product / softcap), in base 2.
 *
 * tanhf takes two special function instructions and a division of cases. Most logits are far below their cap. There an
 * odd polynomial, on the FMA pipes, is as accurate: a warp uses it for a stage whose products it covers, and tanhf for
 * the others. */
#ifndef SKL_CUDA_SM90_ATTENTION_SOFTCAP_CUH
#define SKL_CUDA_SM90_ATTENTION_SOFTCAP_CUH

#include "cuda/sm90/pipeline.cuh"

namespace sm90
{

/* With tanhf; right for every product. */
__device__ inline float exact_logit(float product, const skl_cuda_argument &argument)
{
    const float scaled = product * argument.scale;
    return argument.capped ? argument.softcap_2 * tanhf(scaled) : scaled;
}

/* Logits of a stage; `to` may be x. */
__device__ inline void cap_stage(stage_logits &to, const stage_logits &x, const skl_cuda_argument &argument)
{
#pragma unroll
    for (int e = 0; e < 32; e++)
        to[e / 4][e % 4] = exact_logit(x[e / 4][e % 4], argument);
}

/* Logit / scaled product by the polynomial. Its coefficients are those of an argument without a softcap, too. */
__device__ inline float polynomial_slope(float scaled, const skl_cuda_argument &argument)
{
    const float square = scaled * scaled;
    float slope = argument.tanh_terms[SKL_TANH_TERMS - 1];
#pragma unroll
    for (int term = SKL_TANH_TERMS - 2; term >= 0; term--)
        slope = fmaf(slope, square, argument.tanh_terms[term]);
    return slope;
}

__device__ inline float largest_product(const stage_logits &x)
{
    float largest[2] = {};
#pragma unroll
    for (int e = 0; e < 32; e++)
        largest[e % 2] = fmaxf(largest[e % 2], fabsf(x[e / 4][e % 4]));
    return fmaxf(largest[0], largest[1]);
}

/* Whether the polynomials cover all of the warp's products. NaN is covered: it remains NaN. */
__device__ inline bool polynomials_cover(const stage_logits &x, const skl_cuda_argument &of_x, const stage_logits &y,
                                         const skl_cuda_argument &of_y)
{
    return __all_sync(~0U, largest_product(x) <= of_x.product_max && largest_product(y) <= of_y.product_max);
}

} // namespace sm90

#endif
