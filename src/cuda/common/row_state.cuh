/* Row states of a forward on tensor cores, for every kernel whose accumulators lie as those of mma m16n8: a thread
 * has two rows of a warp's 16 and two columns of every 8, and keeps the state of its own columns of each row. */
#ifndef SKL_CUDA_COMMON_ROW_STATE_CUH
#define SKL_CUDA_COMMON_ROW_STATE_CUH

#include "cuda/common/tile_scheduler.cuh"

namespace tensor_core
{

struct row_sums {
    float l_a, l_b, w;
};

/* `first`: there are no sums yet, and nothing is added to 0. */
__device__ inline void add_pair(row_sums &sums, float u, float v, bool first = false)
{
    const float p_b = ex2(v), p_a = ex2(u);
    sums.l_b = first ? p_b : sums.l_b + p_b;
    sums.l_a = first ? p_a : sums.l_a + p_a;
    sums.w = first ? p_a * (u - v) : fmaf(p_a, u - v, sums.w);
}

/* To a state, or to other sums. */
template <typename SUMS> __device__ inline void add_sums(SUMS &to, const row_sums &sums)
{
    to.l_a += sums.l_a;
    to.l_b += sums.l_b;
    to.w += sums.w;
}

/* Adds a row's columns of one step with their true maximum; MASKED: those that it sees, counted from the step's first
 * key. */
template <bool MASKED, int BLOCKS>
__device__ inline void add_with_max(skl_row_state &state, const float (&a)[BLOCKS][4], float scale_a,
                                    const float (&b)[BLOCKS][4], float scale_b, int half, const range32 &sees)
{
    float m_a = state.m_a, m_b = state.m_b;
    bool any = !MASKED;
#pragma unroll
    for (int block = 0; block < BLOCKS; block++)
#pragma unroll
        for (int parity = 0; parity < 2; parity++) {
            const int column = acc_column(block, parity);
            const bool seen = !MASKED || (column >= sees.begin && column < sees.end);
            m_a = seen ? fmaxf(m_a, a[block][half * 2 + parity] * scale_a) : m_a;
            m_b = seen ? fmaxf(m_b, b[block][half * 2 + parity] * scale_b) : m_b;
            any = any || seen;
        }
    if (!any)
        return;
    state = skl_state_move(state, m_a, m_b);
    row_sums sums = {};
#pragma unroll
    for (int block = 0; block < BLOCKS; block++)
#pragma unroll
        for (int parity = 0; parity < 2; parity++) {
            const int column = acc_column(block, parity);
            if (!MASKED || (column >= sees.begin && column < sees.end))
                add_pair(sums, fmaf(a[block][half * 2 + parity], scale_a, -m_a),
                         fmaf(b[block][half * 2 + parity], scale_b, -m_b));
        }
    add_sums(state, sums);
}

__device__ inline skl_row_state from_lane(const skl_row_state &state, int offset)
{
    return {__shfl_xor_sync(~0U, state.m_a, offset), __shfl_xor_sync(~0U, state.l_a, offset),
            __shfl_xor_sync(~0U, state.m_b, offset), __shfl_xor_sync(~0U, state.l_b, offset),
            __shfl_xor_sync(~0U, state.w, offset)};
}

/* The lower lane's goes first on both sides, so that both get the same bits. */
__device__ inline skl_row_state merge_with_lane(const skl_row_state &own, const skl_row_state &other, int offset)
{
    return (threadIdx.x & (unsigned)offset) == 0 ? skl_state_merge(own, other) : skl_state_merge(other, own);
}

/* Four lanes hold a row, unless told. */
template <int LANES = 4> __device__ inline skl_row_state merge_lanes(skl_row_state state)
{
#pragma unroll
    for (int offset = 1; offset < LANES; offset *= 2)
        state = merge_with_lane(state, from_lane(state, offset), offset);
    return state;
}

/* Value by value: of a choice between two states ptxas would take addresses. */
__device__ inline skl_row_state select_state(const skl_row_state &first, const skl_row_state &of_b, bool is_b)
{
    return {is_b ? of_b.m_a : first.m_a, is_b ? of_b.l_a : first.l_a, is_b ? of_b.m_b : first.m_b,
            is_b ? of_b.l_b : first.l_b, is_b ? of_b.w : first.w};
}

/* Two rows that four lanes hold: even lanes get the first, odd ones the second, with the bits of merge_lanes. */
__device__ inline skl_row_state merge_two_rows(const skl_row_state &first, const skl_row_state &of_b)
{
    const bool odd = threadIdx.x % 2 != 0;
    const skl_row_state merged =
        merge_with_lane(select_state(first, of_b, odd), from_lane(select_state(of_b, first, odd), 1), 1);
    return merge_with_lane(merged, from_lane(merged, 2), 2);
}

__device__ inline void write_kl(const skl_cuda_params &params, const skl_sequence &s, int64_t head, int64_t query,
                                const skl_row_state &state)
{
    skl_row_set(&params.call.rows.kl, &s, head, query, skl_kl_report(skl_state_kl(&state)));
}

/* Of either argument, by the same instructions: lanes may differ in which. */
__device__ inline void write_lse(const skl_cuda_params &params, const skl_sequence &s, int64_t head, int64_t query,
                                 const skl_row_state &state, bool of_b)
{
    const float lse = skl_lse(of_b ? state.m_b : state.m_a, of_b ? state.l_b : state.l_a);
    if (of_b != (params.problem.direction == SKL_KL_REVERSE))
        skl_row_set(&params.call.rows.lse_s, &s, head, query, lse);
    else
        skl_row_set(&params.call.rows.lse_t, &s, head, query, lse);
}

__device__ inline void write_row(const skl_cuda_params &params, const skl_sequence &s, int64_t head, int64_t query,
                                 const skl_row_state &state)
{
    if (params.call.op == SKL_OP_PARTIAL) {
        params.call.states[skl_state_index(&params.problem, &s, head, query)] = state;
        return;
    }
    write_kl(params, s, head, query, state);
    write_lse(params, s, head, query, state, false);
    write_lse(params, s, head, query, state, true);
}

/* ---- Query tiles -------------------------------------------------------------------------------------------- */

template <int M> struct query_tile {
    static constexpr int ROWS = TILE_ROWS<M>;
    skl_sequence sequence;
    int64_t head, first; /* query */
    int64_t slot;        /* of the tile, or of the part, among all */
    int split;           /* of the tile's keys */

    __device__ static unsigned tiles(const skl_cuda_params &params) /* of a head */
    {
        return (unsigned)skl_ceil_div(params.problem.len_q, ROWS);
    }

    /* `parts` blocks a tile. False: there is nothing at this block's place. */
    __device__ bool find(const skl_cuda_params &params, int splits, unsigned head_group)
    {
        const unsigned heads = (unsigned)params.problem.heads_s;
        return take(params, tile_of_block(heads, tiles(params) * splits, head_group), splits);
    }

    /* Of a block that stays: tile number `round`, and how many there are. */
    __device__ bool find_persistent(const skl_cuda_params &params, int iteration, unsigned head_group)
    {
        const unsigned heads = (unsigned)params.problem.heads_s;
        return take(params, persistent_tile((unsigned)iteration, heads, tiles(params), head_group), 1);
    }

    __device__ static int iterations(const skl_cuda_params &params)
    {
        const unsigned all = (unsigned)(params.problem.batch * params.problem.heads_s) * tiles(params);
        return (int)((all - blockIdx.x + gridDim.x - 1) / gridDim.x);
    }

    __device__ bool take(const skl_cuda_params &params, const tile_coord &at, int splits)
    {
        const skl_problem &p = params.problem;
        if (at.sequence >= p.batch)
            return false;
        sequence = device_sequence(params, at.sequence);
        head = at.head;
        split = at.tile % splits;
        slot = (at.sequence * p.heads_s + head) * tiles(params) * splits + at.tile;
        first = (int64_t)(tiles(params) - 1 - at.tile / splits) * ROWS; /* causal: longest first */
        return first < sequence.query_count;
    }
};

/* A row of the tile, or of a part of its keys. */
template <int M>
__device__ inline void write_split(const forward_params &params, const query_tile<M> &place, int row,
                                   const skl_row_state &state)
{
    if (params.num_splits > 1)
        params.split_states[place.slot * place.ROWS + row] = state;
    else
        write_row(params, place.sequence, place.head, place.first + row, state);
}

/* The parts of a tile, in their order: a thread a query. */
template <int M> __global__ void merge_splits(const __grid_constant__ forward_params params)
{
    query_tile<M> place;
    const int row = (int)threadIdx.x;
    if (!place.find(params, 1, (unsigned)params.head_group) || place.first + row >= place.sequence.query_count)
        return;
    const skl_row_state *const splits = params.split_states + place.slot * params.num_splits * place.ROWS;
    skl_row_state state = splits[row];
    for (int split = 1; split < params.num_splits; split++)
        state = skl_state_merge(state, splits[split * place.ROWS + row]);
    write_row(params, place.sequence, place.head, place.first + row, state);
}

} // namespace tensor_core

#endif
