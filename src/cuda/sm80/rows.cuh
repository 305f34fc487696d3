/* Row states of a forward on tensor cores, for every kernel whose accumulators lie as those of mma m16n8: a thread
 * has two rows of a warp's 16 and two columns of every 8, and keeps the state of its own columns of each row. */
#ifndef SKL_CUDA_SM80_ROWS_CUH
#define SKL_CUDA_SM80_ROWS_CUH

#include "cuda/sm80/tile.cuh"

namespace sm80
{

struct row_sums {
    float l_a, l_b, w;
};

/* `first`: there are no sums yet, and nothing is added to 0. */
__device__ inline void add_pair(row_sums &sums, float u, float v, bool first = false)
{
    const float q = ex2(v), p = ex2(u);
    sums.l_b = first ? q : sums.l_b + q;
    sums.l_a = first ? p : sums.l_a + p;
    sums.w = first ? p * (u - v) : fmaf(p, u - v, sums.w);
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
__device__ inline void add_exactly(skl_row_state &state, const float (&a)[BLOCKS][4], float scale_a,
                                   const float (&b)[BLOCKS][4], float scale_b, int half, const range32 &sees)
{
    float m_a = state.m_a, m_b = state.m_b;
    bool any = !MASKED;
#pragma unroll
    for (int block = 0; block < BLOCKS; block++)
#pragma unroll
        for (int parity = 0; parity < 2; parity++) {
            const int column = column_of(block, parity);
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
            const int column = column_of(block, parity);
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
__device__ inline skl_row_state one_of(const skl_row_state &first, const skl_row_state &second, bool is_second)
{
    return {is_second ? second.m_a : first.m_a, is_second ? second.l_a : first.l_a,
            is_second ? second.m_b : first.m_b, is_second ? second.l_b : first.l_b, is_second ? second.w : first.w};
}

/* Two rows that four lanes hold: even lanes get the first, odd ones the second, with the bits of merge_lanes. */
__device__ inline skl_row_state merge_two_rows(const skl_row_state &first, const skl_row_state &second)
{
    const bool odd = threadIdx.x % 2 != 0;
    const skl_row_state one =
        merge_with_lane(one_of(first, second, odd), from_lane(one_of(second, first, odd), 1), 1);
    return merge_with_lane(one, from_lane(one, 2), 2);
}

__device__ inline void write_kl(const skl_cuda_params &params, const skl_sequence &s, int64_t head, int64_t query,
                                const skl_row_state &state)
{
    skl_row_set(&params.call.rows.kl, &s, head, query, skl_kl_report(skl_state_kl(&state)));
}

/* Of either argument, by the same instructions: lanes may differ in which. */
__device__ inline void write_lse(const skl_cuda_params &params, const skl_sequence &s, int64_t head, int64_t query,
                                 const skl_row_state &state, bool of_second)
{
    const float lse = skl_lse(of_second ? state.m_b : state.m_a, of_second ? state.l_b : state.l_a);
    if (of_second != (params.problem.direction == SKL_KL_REVERSE))
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

template <int M> struct query_place {
    static constexpr int ROWS = WARPS * 16 * M;
    skl_sequence sequence;
    int64_t head, first; /* query */
    int64_t slot;        /* of the tile, or of the part, among all */
    int part;            /* of the tile's keys */

    __device__ static unsigned tiles(const skl_cuda_params &params) /* of a head */
    {
        return (unsigned)skl_ceil_div(params.problem.len_q, ROWS);
    }

    /* `parts` blocks a tile. False: there is nothing at this block's place. */
    __device__ bool find(const skl_cuda_params &params, int parts)
    {
        const unsigned heads = (unsigned)params.problem.heads_s, section = (unsigned)params.section;
        return take(params, work_of_block(heads, tiles(params) * parts, section), parts);
    }

    /* Of a block that stays: tile number `round`, and how many there are. */
    __device__ bool find_in_turn(const skl_cuda_params &params, int round)
    {
        const unsigned heads = (unsigned)params.problem.heads_s, section = (unsigned)params.section;
        return take(params, work_in_turn((unsigned)round, heads, tiles(params), section), 1);
    }

    __device__ static int rounds(const skl_cuda_params &params)
    {
        const unsigned all = (unsigned)(params.problem.batch * params.problem.heads_s) * tiles(params);
        return (int)((all - blockIdx.x + gridDim.x - 1) / gridDim.x);
    }

    __device__ bool take(const skl_cuda_params &params, const work &at, int parts)
    {
        const skl_problem &p = params.problem;
        if (at.sequence >= p.batch)
            return false;
        sequence = device_sequence(params, at.sequence);
        head = at.head;
        part = at.tile % parts;
        slot = (at.sequence * p.heads_s + head) * tiles(params) * parts + at.tile;
        first = (int64_t)(tiles(params) - 1 - at.tile / parts) * ROWS; /* causal: longest first */
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
