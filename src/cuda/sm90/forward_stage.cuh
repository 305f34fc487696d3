/* What both forwards on Hopper's tensor cores share: the sums of a stage of 64 keys, and what the copy engine brings.
 *
 * Row states, the blind and the exact way of adding, and keys cut into parts are those of the sm80 forward. */
#ifndef SKL_CUDA_SM90_FORWARD_STAGE_CUH
#define SKL_CUDA_SM90_FORWARD_STAGE_CUH

#include "cuda/sm90/tensor_map.cuh"
#include "cuda/sm90/tile.cuh"

namespace sm90
{

/* ---- Copies ------------------------------------------------------------------------------------------------- */

/* Keys and queries of both arguments. */
struct forward_maps {
    CUtensorMap keys_a, keys_b, queries_a, queries_b;
};

/* Keys of both arguments, [64 dimensions][64 keys] with the copy engine's 128-byte swizzle. */
template <int DIM> struct key_stage {
    row_stage<DIM> one, two;
};

/* Where a tile's tensors lie, for the copy engine. */
struct copy_place {
    int batch, query;         /* row of the tensor */
    int head, head_a, head_b; /* of the queries, of both keys */

    template <int M> __device__ static copy_place of(const skl_cuda_params &params, const query_place<M> &place)
    {
        const int head = (int)place.head;
        return {(int)place.sequence.batch, (int)(place.sequence.query_begin + place.first), head,
                head / params.one.heads_per_key, head / params.two.heads_per_key};
    }
};

__device__ inline copy_place common(const copy_place &place)
{
    return {common(place.batch), common(place.query), common(place.head), common(place.head_a), common(place.head_b)};
}

template <int DIM>
__device__ inline void copy_keys(key_stage<DIM> &to, const forward_maps &maps, const copy_place &place, int row,
                                 uint64_t &full)
{
    barrier_expect(full, (int)sizeof to);
#pragma unroll
    for (int half = 0; half < DIM / 64; half++) {
        copy_box(to.one.halves[half], maps.keys_a, half * 64, row, place.head_a, place.batch, full);
        copy_box(to.two.halves[half], maps.keys_b, half * 64, row, place.head_b, place.batch, full);
    }
}

template <typename FORWARD> __device__ inline void init_barriers(typename FORWARD::memory &block)
{
    for (uint64_t &queries : block.queries_full)
        barrier_init(queries, 1);
    for (int at = 0; at < FORWARD::DEPTH; at++) {
        barrier_init(block.full[at], 1);
        barrier_init(block.empty[at], FORWARD::GROUPS * 4);
    }
    barrier_init_fence();
}

/* Dimensions of the queries behind the first HELD, from row `first` of the tile on. */
template <int HELD, int PARTS, int ROWS>
__device__ inline void copy_queries(lying_rows<PARTS, ROWS> &to, const CUtensorMap &queries, const copy_place &place,
                                    uint64_t &full, int first = 0)
{
    if constexpr (PARTS > 0)
        for (int part = 0; part < PARTS; part++)
            copy_box(to.parts[part][first], queries, HELD + part * 64, place.query + first, place.head, place.batch,
                     full);
}

/* ---- Sums --------------------------------------------------------------------------------------------------- */

/* Adds a stage that every row of the warp sees whole; false, and nothing added, if a stabiliser has to move. The
 * order is one in which ptxas spreads the exponentials: where two of them meet, a warp waits. */
__device__ inline bool add_blindly(skl_row_state (&state)[2], const stage_logits &x, float scale_a,
                                   const stage_logits &y, float scale_b)
{
    row_sums sums[2], right[2]; /* of the first and of the last 32 keys */
#pragma unroll
    for (int e = 0; e < 16; e++) {
        const int n = e / 4, half = e / 2 % 2, at = half * 2 + e % 2;
        const float m_a = state[half].m_a, m_b = state[half].m_b;
        const bool first = n == 0 && e % 2 == 0;
        add_pair(sums[half], fmaf(x[n][at], scale_a, -m_a), fmaf(y[n][at], scale_b, -m_b), first);
        add_pair(right[half], fmaf(x[n + 4][at], scale_a, -m_a), fmaf(y[n + 4][at], scale_b, -m_b), first);
    }
    bool fine = true;
#pragma unroll
    for (int half = 0; half < 2; half++) {
        add_sums(sums[half], right[half]);
        fine = fine && sums[half].l_a < SKL_LAZY_BOUND && sums[half].l_b < SKL_LAZY_BOUND;
    }
    if (__any_sync(~0U, !fine))
        return false;
#pragma unroll
    for (int half = 0; half < 2; half++)
        add_sums(state[half], sums[half]);
    return true;
}

/* Rows to which nothing was added take the first of the logits that come for their stabilisers; mostly it will do. */
__device__ inline void begin_rows(skl_row_state (&state)[2], const stage_logits &x, float scale_a,
                                  const stage_logits &y, float scale_b)
{
#pragma unroll
    for (int half = 0; half < 2; half++) {
        state[half].m_a = state[half].l_a == 0.0F ? x[0][half * 2] * scale_a : state[half].m_a;
        state[half].m_b = state[half].l_b == 0.0F ? y[0][half * 2] * scale_b : state[half].m_b;
    }
}

__device__ inline void add_whole(skl_row_state (&state)[2], const stage_logits &x, float scale_a,
                                 const stage_logits &y, float scale_b)
{
    if (add_blindly(state, x, scale_a, y, scale_b))
        return;
#pragma unroll
    for (int half = 0; half < 2; half++)
        add_exactly<false>(state[half], x, scale_a, y, scale_b, half, {});
}

/* The keys from `first` on that each row sees. */
__device__ inline void add_edge(skl_row_state (&state)[2], const stage_logits &x, float scale_a,
                                const stage_logits &y, float scale_b, const band32 &band, int first)
{
#pragma unroll
    for (int half = 0; half < 2; half++) {
        const range32 sees = band.of(own_row<1>(0, half));
        add_exactly<true>(state[half], x, scale_a, y, scale_b, half, {sees.begin - first, sees.end - first});
    }
}

/* Logits of an argument in base 2, behind its cap if it has one. `to` may be x. */
__device__ inline void cap_stage(stage_logits &to, const stage_logits &x, const skl_cuda_argument &argument)
{
#pragma unroll
    for (int e = 0; e < 32; e++) {
        const float scaled = x[e / 4][e % 4] * argument.scale;
        to[e / 4][e % 4] = argument.capped ? argument.softcap_2 * tanhf(scaled) : scaled;
    }
}

/* ---- Rows --------------------------------------------------------------------------------------------------- */

/* Of the two rows of a thread in a tile of 64 M queries, merged: the four lanes that have them share the logarithms,
 * which are long. */
template <int M>
__device__ inline void write_row_of_two(const skl_cuda_params &params, const query_place<M> &place,
                                        const skl_row_state &state)
{
    const int lane = (int)threadIdx.x % 4, row = own_row<1>(0, lane % 2);
    const bool of_second = lane / 2 != 0;
    const int64_t query = place.first + row;
    if (query >= place.sequence.query_count)
        return;
    if (params.splits == 1 && params.call.op != SKL_OP_PARTIAL) {
        write_lse(params, place.sequence, place.head, query, state, of_second);
        if (!of_second)
            write_kl(params, place.sequence, place.head, query, state);
    } else if (!of_second) {
        write_part(params, place, row, state);
    }
}

} // namespace sm90

#endif
