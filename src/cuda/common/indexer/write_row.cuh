/* What a forward of an indexer wants of a row, and how it is written: the same for both stages. */
#ifndef SKL_CUDA_COMMON_INDEXER_WRITE_ROW_CUH
#define SKL_CUDA_COMMON_INDEXER_WRITE_ROW_CUH

#include "base/kl_math.h"
#include "cuda/launch.h"

/* Writes a row's numbers, or its state; returns the LSE of the mean of the teacher's heads. `spread`: the first
 * argument beside zeros. */
__device__ inline float write_row(const skl_cuda_params &params, const skl_sequence &s, int64_t head, int64_t query,
                                  const skl_row_state &state, const skl_row_state &spread)
{
    const skl_call &call = params.call;
    const bool reverse = params.problem.direction == SKL_KL_REVERSE;
    if (call.op == SKL_OP_PARTIAL) {
        call.states[skl_state_index(&params.problem, &s, head, query)] = state;
        return 0.0F;
    }
    const float lse_a = skl_lse(state.m_a, state.l_a);
    const float lse_b = skl_lse(state.m_b, state.l_b);
    const float own_t = reverse ? lse_b : lse_a;
    const float kl = skl_state_kl(&state);
    const float entropy = skl_state_entropy(&spread);
    skl_row_set(&call.rows.kl, &s, head, query, skl_kl_report(kl));
    skl_row_set(&call.rows.lse_s, &s, head, query, reverse ? lse_a : lse_b);
    skl_row_set(&call.rows.entropy, &s, head, query, entropy);
    skl_row_set(&call.rows.cross_entropy, &s, head, query, entropy + kl);
    skl_row_set(&call.rows.mass, &s, head, query, skl_mass(own_t, call.inputs.lse_t.data != NULL));
    return own_t;
}

/* The LSE of a teacher head on the keys that the row sees: the group's own sum renormalises a given one. */
__device__ inline void write_lse_t(const skl_cuda_params &params, const skl_sequence &s, int64_t head, int64_t query,
                                   const skl_lse2 &lse, float own_t)
{
    const double total = (double)lse.value + (double)lse.low + (double)own_t * SKL_LOG2E_DOUBLE;
    skl_row_set(&params.call.rows.lse_t, &s, head, query,
                own_t == -INFINITY ? own_t : (float)(total * SKL_LN2_DOUBLE));
}

#endif
