/* Writes the row results of an indexer's forward: general kernels, and the sparse one on tensor cores. */
#ifndef SKL_CUDA_COMMON_INDEXER_WRITE_ROW_CUH
#define SKL_CUDA_COMMON_INDEXER_WRITE_ROW_CUH

#include "base/kl_math.h"
#include "cuda/launch.h"

/* Writes the results of a row, or its partial state. Returns the LSE of the mean of the teacher heads. entropy_state:
 * the state of argument A with all logits of B equal to 0. */
__device__ inline float write_row(const skl_cuda_params &params, const skl_sequence &s, int64_t head, int64_t query,
                                  const skl_row_state &state, const skl_row_state &entropy_state)
{
    const skl_call &call = params.call;
    const bool reverse = params.problem.direction == SKL_KL_REVERSE;
    if (call.op == SKL_OP_PARTIAL) {
        call.states[skl_state_index(&params.problem, &s, head, query)] = state;
        return 0.0F;
    }
    const float lse_a = skl_lse(state.m_a, state.l_a);
    const float lse_b = skl_lse(state.m_b, state.l_b);
    const float mean_lse_t = reverse ? lse_b : lse_a;
    const float kl = skl_state_kl(&state);
    const float entropy = skl_state_entropy(&entropy_state);
    skl_row_set(&call.rows.kl, &s, head, query, skl_kl_report(kl));
    skl_row_set(&call.rows.lse_s, &s, head, query, reverse ? lse_a : lse_b);
    skl_row_set(&call.rows.entropy, &s, head, query, entropy);
    skl_row_set(&call.rows.cross_entropy, &s, head, query, entropy + kl);
    const bool is_share = call.inputs.lse_t.data != NULL || skl_is_pooled(&params.problem);
    skl_row_set(&call.rows.mass, &s, head, query, skl_mass(mean_lse_t, is_share));
    return mean_lse_t;
}

/* Writes the LSE of a teacher head over the visible keys. `lse` may cover more keys: mean_lse_t, the LSE of the
 * teacher group's mean relative to it, restricts it to the visible ones. */
__device__ inline void write_lse_t(const skl_cuda_params &params, const skl_sequence &s, int64_t head, int64_t query,
                                   const skl_lse2 &lse, float mean_lse_t)
{
    const double total = (double)lse.value + (double)lse.low + (double)mean_lse_t * SKL_LOG2E_DOUBLE;
    skl_row_set(&params.call.rows.lse_t, &s, head, query,
                mean_lse_t == -INFINITY ? mean_lse_t : (float)(total * SKL_LN2_DOUBLE));
}

#endif
