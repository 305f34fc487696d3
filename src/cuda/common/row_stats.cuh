/* Row stats of a tensor-core backward, the gradient of a logit, and the range of f16 gradients. */
#ifndef SKL_CUDA_COMMON_ROW_STATS_CUH
#define SKL_CUDA_COMMON_ROW_STATS_CUH

#include "cuda/common/ptx.cuh"
#include "cuda/common/params.cuh"
#include "cuda/common/row_state.cuh"
#include "cuda/common/sequence.cuh"

namespace tensor_core
{

/* Row statistics: both LSEs, the KL and the upstream gradient, in one 16-byte load. */
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
    const skl_lse2 lse2 = in_base_2(lse);
    return {skl_lse2_is_usable(lse2.value) ? lse2.value : NAN, lse2.low};
}

/* The KL to report of a one-pass kernel, whose shifts are the given LSEs; `kl`: of `state`. LSEs so large that no key
 * has mass give NaN, not the KL 0 of a row without keys. */
__device__ inline float one_pass_kl(const skl_problem &problem, const skl_sequence &s, int64_t query,
                                    const skl_row_state &state, float kl)
{
    const skl_range sees = skl_visible(&problem, &s, query);
    return sees.begin < sees.end && skl_state_is_empty(&state) ? NAN : reported_kl(problem, s, query, kl);
}

/* The KL of a one-pass kernel's row. */
__device__ inline void write_one_pass_row(const backward_params &params, const skl_sequence &s, int64_t head,
                                          int64_t query, const skl_row_state &of_keys)
{
    const skl_problem &p = params.problem;
    const skl_row_state state =
        p.sinks ? with_sink(params, s, head, query, of_keys, skl_given_lses(&p, &params.call.inputs, &s, head, query))
                : of_keys;
    skl_row_set(&params.call.rows.kl, &s, head, query, one_pass_kl(p, s, query, state, skl_state_kl(&state)));
}

/* The KLs of a warp's rows, from their sums in each lane. The first two lanes of a quad write one of its two rows
 * each, so that the code is there once. `count`: rows of the tile. */
template <typename TILE>
__device__ inline void write_one_pass_rows(const backward_params &params, const TILE &tile, int count,
                                           const row_sums (&sums)[2])
{
    const row_sums first = quad_sum(sums[0]), second = quad_sum(sums[1]);
    const bool is_second = threadIdx.x % 4 == 1;
    const int row = acc_row<1>(0, is_second);
    const row_sums mine = {is_second ? second.l_a : first.l_a, is_second ? second.l_b : first.l_b,
                           is_second ? second.w : first.w};
    if (threadIdx.x % 4 < 2 && row < count)
        write_one_pass_row(params, tile.sequence, tile.head, tile.first + row, state_of(mine));
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

/* Zero times a non-finite value is NaN: after four of these, only finite pairs have left zeros. */
__device__ inline uint32_t add_zero_times(uint32_t pair, uint32_t sum, skl_bf16)
{
    asm("fma.rn.bf16x2 %0, %1, %2, %0;" : "+r"(sum) : "r"(pair), "r"(0U));
    return sum;
}

__device__ inline uint32_t add_zero_times(uint32_t pair, uint32_t sum, skl_f16)
{
    asm("fma.rn.f16x2 %0, %1, %2, %0;" : "+r"(sum) : "r"(pair), "r"(0U));
    return sum;
}

template <typename ELEMENT> __device__ inline bool all_finite(const uint4 &chunk)
{
    const uint32_t words[4] = {chunk.x, chunk.y, chunk.z, chunk.w};
    uint32_t sum = 0;
#pragma unroll
    for (int i = 0; i < 4; i++)
        sum = add_zero_times(words[i], sum, ELEMENT());
    return (sum & 0x7FFF7FFFU) == 0;
}

} // namespace tensor_core

#endif
