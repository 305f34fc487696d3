/* Row states of a forward on tensor cores, for every kernel whose accumulators lie as those of mma m16n8: a thread
 * has two rows of a warp's 16 and two columns of every 8, and keeps the state of its own columns of each row. */
#ifndef SKL_CUDA_SM80_ROWS_CUH
#define SKL_CUDA_SM80_ROWS_CUH

#include "cuda/sm80/tile.cuh"

namespace sm80
{

struct row_sums {
    float l_1, l_2, w;
};

/* `first`: there are no sums yet, and nothing is added to 0. */
__device__ inline void add_pair(row_sums &sums, float u, float v, bool first = false)
{
    const float p = ex2(u), q = ex2(v);
    sums.l_1 = first ? p : sums.l_1 + p;
    sums.l_2 = first ? q : sums.l_2 + q;
    sums.w = first ? p * (u - v) : fmaf(p, u - v, sums.w);
}

__device__ inline void add_sums(skl_row_state &state, const row_sums &sums)
{
    state.l_1 += sums.l_1;
    state.l_2 += sums.l_2;
    state.w += sums.w;
}

/* Adds a row's columns of one step with their true maximum; MASKED: those that it sees, counted from the step's first
 * key. */
template <bool MASKED, int BLOCKS>
__device__ inline void add_exactly(skl_row_state &state, const float (&a)[BLOCKS][4], float scale_1,
                                   const float (&b)[BLOCKS][4], float scale_2, int half, const range32 &sees)
{
    float m_1 = state.m_1, m_2 = state.m_2;
    bool any = !MASKED;
#pragma unroll
    for (int block = 0; block < BLOCKS; block++)
#pragma unroll
        for (int parity = 0; parity < 2; parity++) {
            const int column = column_of(block, parity);
            const bool seen = !MASKED || (column >= sees.begin && column < sees.end);
            m_1 = seen ? fmaxf(m_1, a[block][half * 2 + parity] * scale_1) : m_1;
            m_2 = seen ? fmaxf(m_2, b[block][half * 2 + parity] * scale_2) : m_2;
            any = any || seen;
        }
    if (!any)
        return;
    state = skl_state_move(state, m_1, m_2);
    row_sums sums = {};
#pragma unroll
    for (int block = 0; block < BLOCKS; block++)
#pragma unroll
        for (int parity = 0; parity < 2; parity++) {
            const int column = column_of(block, parity);
            if (!MASKED || (column >= sees.begin && column < sees.end))
                add_pair(sums, fmaf(a[block][half * 2 + parity], scale_1, -m_1),
                         fmaf(b[block][half * 2 + parity], scale_2, -m_2));
        }
    add_sums(state, sums);
}

/* Four lanes hold a row, unless told; the lower one goes first on both sides, so that all get the same bits. */
template <int LANES = 4> __device__ inline skl_row_state merge_lanes(skl_row_state state)
{
#pragma unroll
    for (int offset = 1; offset < LANES; offset *= 2) {
        skl_row_state other;
        other.m_1 = __shfl_xor_sync(~0U, state.m_1, offset);
        other.l_1 = __shfl_xor_sync(~0U, state.l_1, offset);
        other.m_2 = __shfl_xor_sync(~0U, state.m_2, offset);
        other.l_2 = __shfl_xor_sync(~0U, state.l_2, offset);
        other.w = __shfl_xor_sync(~0U, state.w, offset);
        const bool lower = (threadIdx.x & (unsigned)offset) == 0;
        state = lower ? skl_state_merge(state, other) : skl_state_merge(other, state);
    }
    return state;
}

__device__ inline void write_row(const skl_cuda_params &params, const skl_sequence &s, int64_t head, int64_t query,
                                 const skl_row_state &state)
{
    if (params.call.op == SKL_OP_PARTIAL) {
        params.call.states[skl_state_index(&params.problem, &s, head, query)] = state;
        return;
    }
    const bool reverse = params.problem.direction == SKL_KL_REVERSE;
    const float lse_1 = skl_lse(state.m_1, state.l_1);
    const float lse_2 = skl_lse(state.m_2, state.l_2);
    skl_row_set(&params.call.rows.kl, &s, head, query, skl_kl_report(skl_state_kl(&state)));
    skl_row_set(&params.call.rows.lse_t, &s, head, query, reverse ? lse_2 : lse_1);
    skl_row_set(&params.call.rows.lse_s, &s, head, query, reverse ? lse_1 : lse_2);
}

/* ---- Query tiles -------------------------------------------------------------------------------------------- */

template <int M> struct query_place {
    static constexpr int ROWS = WARPS * 16 * M;
    skl_sequence sequence;
    int64_t head, first; /* query */
    int64_t slot;        /* of the tile, or of the part, among all */
    int part;            /* of the tile's keys */

    /* `parts` blocks a tile. False: there is nothing at this block's place. */
    __device__ bool find(const skl_cuda_params &params, int parts)
    {
        const skl_problem &p = params.problem;
        const unsigned tiles = (unsigned)skl_ceil_div(p.len_q, ROWS);
        const work at = work_of_block((unsigned)p.heads_s, tiles * parts, (unsigned)params.section);
        if (at.sequence >= p.batch)
            return false;
        sequence = device_sequence(params, at.sequence);
        head = at.head;
        part = at.tile % parts;
        slot = (at.sequence * p.heads_s + head) * tiles * parts + at.tile;
        first = (int64_t)(tiles - 1 - at.tile / parts) * ROWS; /* causal: longest first */
        return first < sequence.query_count;
    }
};

/* A row of the tile, or of a part of its keys. */
template <int M>
__device__ inline void write_part(const skl_cuda_params &params, const query_place<M> &place, int row,
                                  const skl_row_state &state)
{
    if (params.splits > 1)
        ((skl_row_state *)params.scratch)[place.slot * place.ROWS + row] = state;
    else
        write_row(params, place.sequence, place.head, place.first + row, state);
}

/* The parts of a tile, in their order: a thread a query. */
template <int M> __global__ void merge_parts(const __grid_constant__ skl_cuda_params params)
{
    query_place<M> place;
    const int row = (int)threadIdx.x;
    if (!place.find(params, 1) || place.first + row >= place.sequence.query_count)
        return;
    const skl_row_state *const parts =
        (const skl_row_state *)params.scratch + place.slot * params.splits * place.ROWS;
    skl_row_state state = parts[row];
    for (int part = 1; part < params.splits; part++)
        state = skl_state_merge(state, parts[part * place.ROWS + row]);
    write_row(params, place.sequence, place.head, place.first + row, state);
}

/* As many parts as there may be for `blocks` in all, if there are keys enough for them. */
inline int32_t splits_for(int64_t tiles, int64_t blocks, int64_t keys)
{
    constexpr int64_t KEYS_MIN = 256;
    return (int32_t)skl_max(1, skl_min(blocks / tiles, keys / KEYS_MIN));
}

} // namespace sm80

#endif
