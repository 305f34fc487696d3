/* Row stats of a tensor-core backward, the gradient of a logit, and the range of f16 gradients. */
#ifndef SKL_CUDA_COMMON_ROW_STATS_CUH
#define SKL_CUDA_COMMON_ROW_STATS_CUH

#include "cuda/common/ptx.cuh"
#include "cuda/common/params.cuh"
#include "cuda/common/sequence.cuh"

namespace tensor_core
{

/* Both LSEs, the KL and the upstream gradient of a row: one 16-byte load. */
struct alignas(16) row_stats {
    float lse_a, lse_b, kl, grad;
};

/* The row vector with member `which` of row_stats. A vector without data means 0, or 1 for the upstream gradient. */
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

/* An LSE in base 2. */
__device__ inline float lse2_of(float lse)
{
    return skl_lse2_is_usable(lse * SKL_LOG2E) ? lse * SKL_LOG2E : NAN;
}

/* An LSE in base 2 as a float and the rest. */
__device__ inline skl_lse2 split_lse2(float lse)
{
    const float high = __fmul_rn(lse, SKL_LOG2E);
    const float low = fmaf(lse, (float)(SKL_LOG2E_DOUBLE - (double)SKL_LOG2E), fmaf(lse, SKL_LOG2E, -high));
    return {skl_lse2_is_usable(high) ? high : NAN, fabsf(lse) < INFINITY ? low : 0.0F};
}

/* KL of a one-pass kernel, whose shifts are the given LSEs. LSEs so large that no key has mass give NaN, not the KL 0
 * of a row without keys. */
__device__ inline float one_pass_kl(const skl_problem &problem, const skl_sequence &s, int64_t query,
                                    const skl_row_state &state)
{
    const skl_range sees = skl_visible(&problem, &s, query);
    return sees.begin < sees.end && skl_state_is_empty(&state) ? NAN
                                                               : reported_kl(problem, s, query, skl_state_kl(&state));
}

/* Row results of a one-pass kernel: the KL and, where it is requested for sinks, the LSE of the keys alone, of B. */
__device__ inline void write_one_pass_row(const backward_params &params, const skl_sequence &s, int64_t head,
                                          int64_t query, const skl_row_state &state)
{
    const skl_rows &rows = params.call.rows;
    const skl_output &of_b = params.problem.direction == SKL_KL_REVERSE ? rows.lse_t : rows.lse_s;
    if (of_b.data == NULL) {
        skl_row_set(&rows.kl, &s, head, query, one_pass_kl(params.problem, s, query, state));
        return;
    }
    /* Next to sinks the keys may have no mass: see skl_kl_with_sinks. */
    const bool no_mass_b = state.l_b < (float)SKL_NO_MASS;
    skl_row_state keys = state;
    keys.l_b = no_mass_b ? 1.0F : state.l_b;
    const float kl = state.l_a < (float)SKL_NO_MASS ? 0.0F
                     : no_mass_b                    ? skl_kl_report(skl_state_kl(&keys))
                                                    : one_pass_kl(params.problem, s, query, state);
    skl_row_set(&rows.kl, &s, head, query, kl);
    skl_row_set(&of_b, &s, head, query,
                row_stat(params, 1, s, head, query) + skl_lse(0.0F, no_mass_b ? 0.0F : state.l_b));
}

/* d KL / d logit of A, or of B (WRT_B), without the upstream gradient. log_p_a and log_p_b are in base 2.
 *
 *   wrt A   p_a (log p_a - log p_b - KL)       wrt B   p_b - p_a */
template <bool WRT_B> __device__ inline float pair_gradient(float log_p_a, float log_p_b, const row_stats &query)
{
    return WRT_B ? ex2(log_p_b) - ex2(log_p_a) : ex2(log_p_a) * fmaf(SKL_LN2, log_p_a - log_p_b, -query.kl);
}

/* 2^exponent for -126 .. 127; 0 for -127. */
__device__ inline float power_of_2(int exponent)
{
    return __uint_as_float((unsigned)(exponent + 127) << 23);
}

/* ---- Units of f16 -------------------------------------------------------------------------------------------- */

/* f16 covers only 2^-24 .. 2^16. So each warp keeps its gradient as a multiple of a unit, a power of two that grows
 * when a value exceeds the range. bf16 has the range of f32 and needs no unit. */
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

template <> struct gradient_unit<skl_f16> {
    static constexpr bool MOVES = true;
    int exponent = -127; /* the unit is 2^exponent, and 0 before the first fit() */

    /* Grows the unit for values up to `largest`, which is the same in all lanes of the warp, with headroom of 2^ROOM,
     * and rescales the gradient. */
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

/* ---- Non-finite values -------------------------------------------------------------------------------------- */

__device__ constexpr uint32_t exponent_of_infinity(skl_bf16)
{
    return 0x7F80U;
}

__device__ constexpr uint32_t exponent_of_infinity(skl_f16)
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
