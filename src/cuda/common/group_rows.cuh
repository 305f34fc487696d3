/* Rows of a student with teacher groups: their results, and the sums of the kernels that know P and not log2 P. See
 * sm90/attention/group_heads.cuh for P. */
#ifndef SKL_CUDA_COMMON_GROUP_ROWS_CUH
#define SKL_CUDA_COMMON_GROUP_ROWS_CUH

#include <float.h>

#include "cuda/common/row_state.cuh"
#include "cuda/common/row_stats.cuh"

namespace tensor_core
{

/* ---- Results ------------------------------------------------------------------------------------------------ */

/* LSEs of a row for later launches of the call. */
struct group_row_lses {
    float lse_s;
    float mean_lse_t; /* log of the probability of the visible keys under the teacher's LSEs: 0 up to rounding, unless
                       * these cover more keys; -inf without visible keys */
};

/* The teacher's LSEs of the visible keys. `lse_computed`: an earlier launch has written them, for exactly these keys.
 */
__device__ inline float visible_lse_t(const skl_cuda_params &params, bool lse_computed, const skl_sequence &s,
                                      int64_t head, int64_t query, float mean_lse_t)
{
    const float lse = skl_row_value(&params.call.inputs.lse_t, &s, head, query);
    return lse_computed ? lse : mean_lse_t == -INFINITY ? mean_lse_t : lse + mean_lse_t;
}

__device__ inline void write_group_lse_t(const skl_cuda_params &params, bool lse_computed, const skl_sequence &s,
                                         int64_t head, int64_t query, float mean_lse_t)
{
    const skl_output &lse_t = params.call.rows.lse_t;
    const int64_t group = skl_group_size(&params.problem);
    for (int64_t h = head * group; lse_t.data != NULL && !lse_computed && h < (head + 1) * group; h++)
        skl_row_set(&lse_t, &s, h, query, visible_lse_t(params, lse_computed, s, h, query, mean_lse_t));
}

/* Writes the requested results of a row from its state, except for the teacher's LSEs: the teacher's logits are log2
 * P, made of inputs.lse_t. */
__device__ inline group_row_lses write_group_row(const skl_cuda_params &params, bool lse_computed,
                                                 const skl_sequence &s, int64_t head, int64_t query,
                                                 const skl_row_state &of_keys)
{
    const skl_problem &p = params.problem;
    const skl_rows &rows = params.call.rows;
    if (params.call.op == SKL_OP_PARTIAL) {
        params.call.states[skl_state_index(&p, &s, head, query)] = partial_state(p, s, query, of_keys);
        return {};
    }
    const skl_row_state state =
        with_sink(params, s, head, query, of_keys, group_lses(params, s, head, query, skl_group_size(&p)));
    const bool reverse = p.direction == SKL_KL_REVERSE;
    const float m_t = reverse ? state.m_b : state.m_a, m_s = reverse ? state.m_a : state.m_b;
    const float mean_lse_t = skl_lse(m_t, reverse ? state.l_b : state.l_a);
    /* If all pairs are equal, the KL is 0 and the LSEs are equal to the last bit: a backward finds gradients of 0.
     * Pairs are equal if they have the same distance from the first head's LSE; the only key of a row is its own
     * maximum anyway. First keys with next to no mass may have had another shift, which leaves a rest in w. */
    const int64_t first = head * skl_group_size(&p);
    const skl_lse2 shift = split_lse2(skl_row_value(&params.call.inputs.lse_t, &s, first, query));
    const bool equal = m_s == shift.value && m_t == -shift.low && fabsf(state.w) <= 0x1p-100F * state.l_a &&
                       state.l_a == state.l_b && state.l_a > 0.0F;
    const float kl =
        equal ? 0.0F : one_pass_kl(p, s, query, state, skl_state_kl(&state)); /* the shift of P is an LSE */
    skl_row_set(&rows.kl, &s, head, query, kl);
    const float lse_s = equal ? visible_lse_t(params, lse_computed, s, first, query, mean_lse_t)
                              : skl_lse(m_s, reverse ? state.l_a : state.l_b);
    skl_row_set(&rows.lse_s, &s, head, query, lse_s);
    return {lse_s, mean_lse_t};
}

__device__ inline void write_group_results(const forward_params &params, const skl_sequence &s, int64_t head,
                                           int64_t query, const skl_row_state &state)
{
    const group_row_lses lses = write_group_row(params, params.lse_computed, s, head, query, state);
    write_group_lse_t(params, params.lse_computed, s, head, query, lses.mean_lse_t);
}

template <int M> static __global__ void merge_group_splits(const __grid_constant__ forward_params params)
{
    merge_row_splits<M>(params, [&](const skl_sequence &s, int64_t head, int64_t query, const skl_row_state &state) {
        write_group_results(params, s, head, query, state);
    });
}

/* ---- Pairs of a forward with P ------------------------------------------------------------------------------ */

/* Adds a pair: p relative to the row's factor, log2 s and s = 2^log_s. Pairs with p = s add exactly 0 to w: p is
 * replaced by 0, because a choice between 0 and the logarithm would be compiled to a branch. */
__device__ inline void add_probabilities(row_sums &sums, float p, float s, float log_s)
{
    sums.l_a += p;
    sums.l_b += s;
    sums.w = fmaf(p == s ? 0.0F : p, log2_probability(p) - log_s, sums.w);
}

/* Whether a tile's sums can be added to a row with its shift. The sum of S must not be too large, and not too small:
 * a logit far below its shift is rounded to fewer digits. If all pairs are equal, S keeps the shift of P while it
 * does not underflow: with another shift, w would not be exactly 0. A shift that S has chosen alone, because P of all
 * keys so far is 0, ends with the first P above 0. */
__device__ inline bool keeps_shift(const skl_row_state &state, const row_sums &sums)
{
    const float smallest = sums.l_a == sums.l_b && sums.w == 0.0F ? FLT_MIN : 0x1p-16F;
    const bool alone = state.l_a == 0.0F && state.l_b > 0.0F;
    return sums.l_b < SKL_LAZY_BOUND && state.l_b + sums.l_b >= smallest && !is_huge(state.m_b) &&
           !(alone && sums.l_a > 0.0F);
}

/* Returns the state with a shift for a tile whose largest logit is `m` and largest P is `p`. The new shift may be
 * below the old one; a small sum of S says how far. If P is S, log2 p = m - reference up to the roundings of both,
 * and the shift becomes that of P again. Any other row keeps its own: next to the shift of P its logits would lose
 * digits. */
__device__ inline skl_row_state with_shift_for(const skl_row_state &state, float m, float p, float reference)
{
    const float largest = state.m_b + fminf(lg2(state.l_b), 0.0F);
    const float roundings = 0x1p-20F * (1.0F + fabsf(m) + fabsf(reference));
    const bool of_p = fabsf(lg2(p) - (m - reference)) <= roundings;
    return m > -INFINITY ? skl_state_move(state, state.m_a, of_p ? reference : fmaxf(largest, m)) : state;
}

/* Whether the thread's pair of a block of 8 columns is one of `sees`, which counts from the lane's first column: the
 * compiler then compares with constants, and needs no register per column. */
__device__ inline bool is_seen(const range32 &sees, int block, int parity)
{
    const int column = block * 8 + parity;
    return column >= sees.begin && column < sees.end;
}

__device__ inline range32 from_lane(const range32 &sees)
{
    return {sees.begin - acc_column(0, 0), sees.end - acc_column(0, 0)};
}

/* p = 0 for the thread's pairs of a row that it does not see. */
template <int BLOCKS> __device__ inline void clear_unseen(float (&p)[BLOCKS][4], int half, const range32 &sees)
{
    const range32 of_lane = from_lane(sees);
#pragma unroll
    for (int block = 0; block < BLOCKS; block++)
#pragma unroll
        for (int parity = 0; parity < 2; parity++)
            if (!is_seen(of_lane, block, parity))
                p[block][half * 2 + parity] = 0.0F;
}

/* Sums of the thread's pairs of a row, with the shift m_b. MASKED: only those in `sees`. CLEARED: p of the others is
 * 0, which saves registers. */
template <bool MASKED, bool CLEARED, int BLOCKS>
__device__ inline row_sums sum_group_row(const float (&p)[BLOCKS][4], const float (&y)[BLOCKS][4], float scale,
                                         float m_b, int half, const range32 &sees, bool huge = false)
{
    row_sums sums = {};
    const range32 of_lane = from_lane(sees);
#pragma unroll
    for (int block = 0; block < BLOCKS; block++)
#pragma unroll
        for (int parity = 0; parity < 2; parity++) {
            const int e = half * 2 + parity;
            const bool seen = !MASKED || is_seen(of_lane, block, parity);
            const float log_s = seen ? minus_shift(y[block][e], scale, m_b, huge) : -1e30F; /* finite: 0 log s is 0 */
            add_probabilities(sums, CLEARED || seen ? p[block][e] : 0.0F, ex2(log_s), log_s);
        }
    return sums;
}

template <bool MASKED, int BLOCKS>
__device__ inline float max_of_row(const float (&y)[BLOCKS][4], float scale, int half, const range32 &sees)
{
    float m = -INFINITY;
    const range32 of_lane = from_lane(sees);
#pragma unroll
    for (int block = 0; block < BLOCKS; block++)
#pragma unroll
        for (int parity = 0; parity < 2; parity++)
            if (!MASKED || is_seen(of_lane, block, parity))
                m = fmaxf(m, y[block][half * 2 + parity] * scale);
    return m;
}

/* Adds a tile to a row. A shift that does not fit the tile's logits is replaced by reference(), the LSE of the first
 * head in base 2, or by their maximum. */
template <bool MASKED, bool CLEARED, int BLOCKS, typename REFERENCE>
__device__ inline void add_group_tile(skl_row_state &state, const float (&p)[BLOCKS][4], const float (&y)[BLOCKS][4],
                                      float scale, int half, const range32 &sees, REFERENCE reference)
{
    row_sums sums = sum_group_row<MASKED, CLEARED>(p, y, scale, state.m_b, half, sees);
    const bool keeps = keeps_shift(state, sums);
    if (__any_sync(~0U, !keeps)) {
        const float m = max_of_row<MASKED>(y, scale, half, sees), p_max = max_of_row<MASKED>(p, 1.0F, half, sees);
        if (!keeps)
            state = with_shift_for(state, m, p_max, reference());
        sums = sum_group_row<MASKED, CLEARED>(p, y, scale, state.m_b, half, sees, is_huge(state.m_b));
    }
    add_sums(state, sums);
}

/* A thread without visible keys has the shift of its reference, to which no other state must move. */
__device__ inline skl_row_state without_shift_if_empty(skl_row_state state)
{
    state.m_b = state.l_b == 0.0F ? -INFINITY : state.m_b;
    return state;
}

} // namespace tensor_core

#endif
