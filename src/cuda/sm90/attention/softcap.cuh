/* Logits of softcaps and linear links. Softcapped ones are softcap tanh(scale product / softcap), in base 2.
 *
 * tanhf takes two special function instructions and a branch. Most logits are far below their cap. There
 * an odd polynomial, on the FMA pipes, is as accurate: a warp uses it for a stage whose products it covers, and tanhf
 * for the others.
 *
 *   logit = tanh_factor tanh(tanh_scale product)      for |product| <= product_max
 *
 * holds for an argument without a softcap, too, so that one polynomial path serves all softcapped problems. */
#ifndef SKL_CUDA_SM90_ATTENTION_SOFTCAP_CUH
#define SKL_CUDA_SM90_ATTENTION_SOFTCAP_CUH

#include <type_traits>

#include "cuda/common/linear_link.cuh"
#include "cuda/sm90/pipeline.cuh"

namespace sm90
{

/* The logits of an instance: multiples of products; softcapped, or exact ones of a linear link; or those of a B with
 * a linear link, which have a faster path for most stages. */
enum logit_form { PLAIN_LOGITS, CAPPED_LOGITS, LINEAR_LOGITS };

/* Calls launch(std::true_type) for a problem with a softcap and launch(std::false_type) for the others. An instance
 * without SOFTCAP has kernels for these alone (sm90/attention/rows.cuh). */
template <bool SOFTCAP, typename LAUNCH>
inline cudaError_t with_softcap(const skl_cuda_params &params, const LAUNCH &launch)
{
    if (!params.a.capped && !params.b.capped)
        return launch(std::false_type());
    if constexpr (SOFTCAP)
        return launch(std::true_type());
    else
        return cudaErrorInvalidValue;
}

/* The logit by tanhf, or by the logarithm of a linear link: right for every product. */
__device__ inline float exact_logit(float product, const skl_cuda_argument &argument)
{
    if (argument.linear)
        return linear_logit(product);
    const float scaled = product * argument.scale;
    return argument.capped ? argument.softcap_2 * tanhf(scaled) : scaled;
}

/* Logits of a stage; `to` may be x. */
template <typename X>
__device__ inline void cap_stage(stage_logits &to, const X &x, const skl_cuda_argument &argument)
{
#pragma unroll
    for (int n = 0; n < 8; n++) {
        const auto factors = factors_of(x, n);
#pragma unroll
        for (int e = 0; e < 4; e++)
            to[n][e] = exact_logit(product_of(x, factors, n, e), argument);
    }
}

/* tanh(tanh_scale product). The minimax polynomial for |u| <= SKL_TANH_MAX, relative error 2^-24.9. */
__device__ inline float polynomial_tanh(float product, const skl_cuda_argument &argument)
{
    const float u = product * argument.tanh_scale, square = u * u;
    float ratio = fmaf(square, -0.00476945797F, 0.0196648687F);
    ratio = fmaf(ratio, square, -0.0533902384F);
    ratio = fmaf(ratio, square, 0.133265212F);
    ratio = fmaf(ratio, square, -0.333330691F);
    ratio = fmaf(ratio, square, 1.0F);
    return u * ratio;
}

__device__ inline float largest_product(const stage_logits &x)
{
    float largest[2] = {};
#pragma unroll
    for (int e = 0; e < 32; e++)
        largest[e % 2] = fmaxf(largest[e % 2], fabsf(x[e / 4][e % 4]));
    return fmaxf(largest[0], largest[1]);
}

/* Whether the polynomial covers all of the warp's products. NaN is covered: it remains NaN. */
__device__ inline bool polynomial_covers(const stage_logits &x, const skl_cuda_argument &argument)
{
    return __all_sync(~0U, largest_product(x) <= argument.product_max);
}

/* Whether B has a linear link, with products whose logarithms and inverses need no care, and A no softcap. */
__device__ inline bool is_linear(const stage_logits &y, const skl_cuda_params &params)
{
    if (!params.b.linear || params.a.capped)
        return false;
    float smallest[2] = {FLT_MAX, FLT_MAX};
#pragma unroll
    for (int e = 0; e < 32; e++)
        smallest[e % 2] = fminf(smallest[e % 2], y[e / 4][e % 4]);
    return __all_sync(~0U, fminf(smallest[0], smallest[1]) >= FLT_MIN);
}

/* Whether the polynomials cover all of the warp's products of both arguments. */
__device__ inline bool polynomials_cover(const stage_logits &x, const skl_cuda_argument &of_x, const stage_logits &y,
                                         const skl_cuda_argument &of_y)
{
    return __all_sync(~0U, largest_product(x) <= of_x.product_max && largest_product(y) <= of_y.product_max);
}

} // namespace sm90

#endif
