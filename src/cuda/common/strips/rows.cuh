/* Merges the splits of a strip: row states over splits of the keys, dk over splits of the queries. */
#ifndef SKL_CUDA_COMMON_STRIPS_ROWS_CUH
#define SKL_CUDA_COMMON_STRIPS_ROWS_CUH

#include "base/convert.h"
#include "cuda/common/strips/strip.cuh"
#include "cuda/common/row_stats.cuh"

namespace tensor_core
{

/* ---- Rows --------------------------------------------------------------------------------------------------- */

/* Writes the results of a row, or its partial state. Kernels with other parameters have their own. */
__device__ inline void write_strip_row(const strip_params &params, const query_slot &slot, int64_t query,
                                       const index_row &row)
{
    const skl_problem &p = params.problem;
    const skl_sequence &s = slot.sequence;
    const int64_t head = slot.head;
    const skl_rows &rows = params.call.rows;
    const skl_input &lse_t = params.call.inputs.lse_t;
    if (params.call.op == SKL_OP_PARTIAL) {
        params.call.states[skl_state_index(&p, &s, head, query)] = partial_state(p, s, query, row.state);
        return;
    }
    const int64_t group = skl_group_size(&p);
    const skl_row_state state = with_sink(params, s, head, query, row.state,
                                          params.with_teacher ? group_lses(params, s, head, query, group) : NO_LSES);
    if (rows.lse_s.data != NULL)
        skl_row_set(&rows.lse_s, &s, head, query, skl_lse(state.m_b, state.l_b));
    if (!params.with_teacher)
        return;
    const skl_row_state entropy_state = {row.state.m_a, row.state.l_a, 0.0F, 0.0F, row.p_log_p};
    const float kl = skl_state_kl(&state), entropy = skl_state_entropy(&entropy_state);
    const float mean_lse_t = skl_lse(state.m_a, state.l_a);
    skl_row_set(&rows.kl, &s, head, query, one_pass_kl(p, s, query, state, kl)); /* P is made of LSEs */
    skl_row_set(&rows.entropy, &s, head, query, entropy);
    skl_row_set(&rows.cross_entropy, &s, head, query, entropy + kl);
    skl_row_set(&rows.mass, &s, head, query, skl_mass(mean_lse_t, params.lse_given));
    if (params.call.op != SKL_OP_FORWARD || rows.lse_t.data == NULL || !params.lse_given)
        return; /* computed LSEs have been written already */
    for (int64_t h = head * group; h < (head + 1) * group; h++)
        skl_row_set(&rows.lse_t, &s, h, query,
                    mean_lse_t == -INFINITY ? mean_lse_t : skl_row_value(&lse_t, &s, h, query) + mean_lse_t);
}

/* Calls write(slot, query) for the thread's query, if there is one: one block per slot, one thread per query. */
template <typename WRITE> __device__ inline void for_query_of_thread(const strip_params &params, WRITE write)
{
    const query_slot slot =
        slot_at(params, (unsigned)params.strip_first + blockIdx.x, (unsigned)params.problem.heads_s);
    if ((int)threadIdx.x < slot.count)
        write(slot, slot.first + (int)threadIdx.x);
}

template <typename PARAMS>
static __global__ void __launch_bounds__(SIDE) finish_rows(const __grid_constant__ PARAMS params)
{
    for_query_of_thread(params, [&](const query_slot &slot, int64_t query) {
        const index_row *const splits =
            params.split_rows + (int64_t)blockIdx.x * params.num_splits * SIDE + threadIdx.x;
        index_row row = splits[0];
        for (int split = 1; split < params.num_splits; split++)
            row = merge_rows(row, splits[split * SIDE]);
        if (params.target_scale != NULL)
            params.target_scale[blockIdx.x * SIDE + threadIdx.x] = exp2f(-row.state.m_a) / row.state.l_a;
        write_strip_row(params, slot, query, row);
    });
}

/* ---- Key gradients ------------------------------------------------------------------------------------------ */

constexpr int STORE_THREADS = 256;

/* dk = scale * sum over the splits, in a fixed order. */
static __global__ void __launch_bounds__(STORE_THREADS) store_key_sums(const __grid_constant__ strip_params params)
{
    const strip_side &wrt = params.wrt;
    const int64_t count = params.sum_batches * wrt.key_heads * params.sum_rows * wrt.dim;
    for (int64_t index = (int64_t)blockIdx.x * STORE_THREADS + threadIdx.x; index < count;
         index += (int64_t)gridDim.x * STORE_THREADS) {
        float sum = 0.0F;
        for (int64_t split = 0; split < params.num_splits; split++)
            sum += params.key_sums[split * count + index];
        const int64_t row = index / wrt.dim, head = row / params.sum_rows;
        skl_store(wrt.dk.data, wrt.dk_dtype,
                  SKL_ROW(wrt.dk, head / wrt.key_heads, head % wrt.key_heads, row % params.sum_rows) +
                      index % wrt.dim,
                  sum * wrt.scale);
    }
}

} // namespace tensor_core

#endif
