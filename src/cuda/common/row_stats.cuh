/* What a backward on tensor cores knows of a query, and what follows from it for the gradient of a logit. */
#ifndef SKL_CUDA_COMMON_ROW_STATS_CUH
#define SKL_CUDA_COMMON_ROW_STATS_CUH

#include "cuda/common/ptx.cuh"
#include "cuda/common/params.cuh"
#include "cuda/common/sequence.cuh"

namespace tensor_core
{

/* LSEs of both arguments, KL, upstream gradient; loaded at once. */
struct alignas(16) row_stats {
    float lse_a, lse_b, kl, grad;
};

/* The row vectors behind row_stats, in its order; without data: all 0, and upstream gradients all 1. */
__device__ inline skl_input row_stat_source(const backward_params &params, int which)
{
    const skl_inputs &in = params.call.inputs;
    const bool reverse = params.problem.direction == SKL_KL_REVERSE;
    switch (which) {
    case 0:
        return reverse ? in.lse_s : in.lse_t;
    case 1:
        return reverse ? in.lse_t : in.lse_s;
    case 2:
        return skl_known_rows(params.rows_known, &in.kl, &params.call.rows.kl);
    default:
        return in.grad_kl;
    }
}

__device__ inline float row_stat(const backward_params &params, int which, const skl_sequence &s, int64_t head,
                                 int64_t query)
{
    const skl_input source = row_stat_source(params, which);
    return source.data != NULL ? skl_row_value(&source, &s, head, query) : which == 3 ? 1.0F : 0.0F;
}

/* d KL / d logit, less the query's upstream gradient; u, v: log2 of the two probabilities. */
template <bool OF_B> __device__ inline float pair_gradient(float u, float v, const row_stats &query)
{
    return OF_B ? ex2(v) - ex2(u) : ex2(u) * fmaf(SKL_LN2, u - v, -query.kl);
}

/* 2^exponent for -127 (gives 0) .. 127. */
__device__ inline float power_of_2(int exponent)
{
    return __uint_as_float((unsigned)(exponent + 127) << 23);
}

/* ---- Units of f16 -------------------------------------------------------------------------------------------- */

/* f16 holds 2^-24 .. 2^16 only: a warp keeps its gradient in a unit of its own, a power of two that moves when values
 * outgrow it. bf16 has the range of f32. */
template <typename ELEMENT> struct gradient_unit {
    static constexpr bool MOVES = false;

    template <int ROOM = 0, typename GRADIENT> __device__ void fit(GRADIENT &, float)
    {
    }
    __device__ float value() const
    {
        return 1.0F;
    }
    __device__ float inverse() const
    {
        return 1.0F;
    }
};

template <> struct gradient_unit<__half> {
    static constexpr bool MOVES = true;
    int exponent = -127; /* the unit is 2^exponent; at first it is 0 */

    /* Makes room for values up to `largest`, the same for all lanes of the warp, and for some that are larger. */
    template <int ROOM = 3, typename GRADIENT> __device__ void fit(GRADIENT &gradient, float largest)
    {
        constexpr int LIMIT = 15;                                     /* values stay below 2^LIMIT units */
        const int size = (int)(__float_as_uint(largest) >> 23) - 126; /* largest < 2^size */
        if (size <= exponent + LIMIT)
            return;
        const int next = max(size - LIMIT + ROOM, -126);
        gradient.scale(power_of_2(max(exponent - next, -127)));
        exponent = next;
    }
    __device__ float value() const
    {
        return power_of_2(exponent);
    }
    __device__ float inverse() const
    {
        return power_of_2(-exponent);
    }
};

/* ---- Values that are not finite ----------------------------------------------------------------------------- */

__device__ constexpr uint32_t exponent_of_infinity(__nv_bfloat16)
{
    return 0x7F80U;
}

__device__ constexpr uint32_t exponent_of_infinity(__half)
{
    return 0x7C00U;
}

template <typename ELEMENT> __device__ inline bool all_finite(const uint4 &chunk)
{
    const uint32_t exponent = exponent_of_infinity(ELEMENT());
    const uint32_t words[4] = {chunk.x, chunk.y, chunk.z, chunk.w};
    bool finite = true;
#pragma unroll
    for (int i = 0; i < 4; i++)
        finite = finite && (words[i] & exponent) != exponent && (words[i] >> 16 & exponent) != exponent;
    return finite;
}

} // namespace tensor_core

#endif
