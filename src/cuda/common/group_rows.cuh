/* Results of a row of a student with teacher groups. */
#ifndef SKL_CUDA_COMMON_GROUP_ROWS_CUH
#define SKL_CUDA_COMMON_GROUP_ROWS_CUH

#include "cuda/common/row_stats.cuh"

namespace tensor_core
{

/* What other launches of the call need of a row. */
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

/* Writes what the call wants of a row, except for the teacher's LSEs, from its state: the teacher's logits are log2
 * P, made of inputs.lse_t. */
__device__ inline group_row_lses write_group_row(const skl_cuda_params &params, bool lse_computed,
                                                 const skl_sequence &s, int64_t head, int64_t query,
                                                 const skl_row_state &state)
{
    const skl_problem &p = params.problem;
    const skl_rows &rows = params.call.rows;
    if (params.call.op == SKL_OP_PARTIAL) {
        params.call.states[skl_state_index(&p, &s, head, query)] = partial_state(p, s, query, state);
        return {};
    }
    const bool reverse = p.direction == SKL_KL_REVERSE;
    const float m_t = reverse ? state.m_b : state.m_a, m_s = reverse ? state.m_a : state.m_b;
    const float mean_lse_t = skl_lse(m_t, reverse ? state.l_b : state.l_a);
    skl_row_set(&rows.kl, &s, head, query, one_pass_kl(p, s, query, state)); /* the shift of P is an LSE */
    /* Where all pairs are equal, the LSEs are, too, to the last bit: a backward finds gradients of 0. Pairs are equal
     * if they have the same distance from the first head's LSE; the only key of a row is its own maximum anyway. */
    const int64_t first = head * skl_group_size(&p);
    const skl_lse2 shift = split_lse2(skl_row_value(&params.call.inputs.lse_t, &s, first, query));
    const bool equal =
        m_s == shift.value && m_t == -shift.low && state.w == 0.0F && state.l_a == state.l_b && state.l_a > 0.0F;
    const float lse_s = equal ? visible_lse_t(params, lse_computed, s, first, query, mean_lse_t)
                              : skl_lse(m_s, reverse ? state.l_a : state.l_b);
    skl_row_set(&rows.lse_s, &s, head, query, lse_s);
    return {lse_s, mean_lse_t};
}

} // namespace tensor_core

#endif
