/* What both forwards on Hopper's tensor cores share: the sums of a stage of 64 keys, and what the copy engine brings.
 *
 * Row states, the blind and the exact way of adding, and keys cut into parts are those of the sm80 forward. */
#ifndef SKL_CUDA_SM90_ATTENTION_FORWARD_STAGE_CUH
#define SKL_CUDA_SM90_ATTENTION_FORWARD_STAGE_CUH

#include "cuda/sm90/tensor_map.cuh"
#include "cuda/sm90/pipeline.cuh"

namespace sm90
{

/* ---- Copies ------------------------------------------------------------------------------------------------- */

/* Keys and queries of both arguments. */
struct forward_maps {
    CUtensorMap keys_a, keys_b, queries_a, queries_b;
};

/* Keys of both arguments, [64 dimensions][64 keys] with the copy engine's 128-byte swizzle. */
template <int DIM> struct key_stage {
    row_stage<DIM> a, b;
};

/* Where a tile's tensors lie, for the copy engine. */
struct tma_coord {
    int batch, query;         /* row of the tensor */
    int head, head_a, head_b; /* of the queries, of both keys */

    template <int M> __device__ static tma_coord of(const forward_params &params, const query_tile<M> &tile)
    {
        const int head = (int)tile.head;
        return {(int)tile.sequence.batch, (int)(tile.sequence.query_begin + tile.first), head,
                head / params.a.heads_per_key, head / params.b.heads_per_key};
    }
};

__device__ inline tma_coord warp_uniform(const tma_coord &tile)
{
    return {warp_uniform(tile.batch), warp_uniform(tile.query), warp_uniform(tile.head), warp_uniform(tile.head_a),
            warp_uniform(tile.head_b)};
}

template <int DIM>
__device__ inline void load_keys(key_stage<DIM> &to, const forward_maps &maps, const tma_coord &tile, int row,
                                 uint64_t &full)
{
    barrier_expect_tx(full, (int)sizeof to);
#pragma unroll
    for (int half = 0; half < DIM / 64; half++) {
        tma_load(to.a.slabs[half], maps.keys_a, half * 64, row, tile.head_a, tile.batch, full);
        tma_load(to.b.slabs[half], maps.keys_b, half * 64, row, tile.head_b, tile.batch, full);
    }
}

template <typename FORWARD> __device__ inline void init_barriers(typename FORWARD::memory &smem)
{
    for (uint64_t &queries : smem.queries_full)
        barrier_init(queries, 1);
    for (int stage = 0; stage < FORWARD::DEPTH; stage++) {
        barrier_init(smem.full[stage], 1);
        barrier_init(smem.empty[stage], FORWARD::GROUPS * 4);
    }
    barrier_init_fence();
}

/* Dimensions of the queries behind the first REG_DIMS, from row `first` of the tile on. */
template <int REG_DIMS, int PARTS, int ROWS>
__device__ inline void load_queries(smem_rows<PARTS, ROWS> &to, const CUtensorMap &queries, const tma_coord &tile,
                                    uint64_t &full, int first = 0)
{
    if constexpr (PARTS > 0)
        for (int part = 0; part < PARTS; part++)
            tma_load(to.slabs[part][first], queries, REG_DIMS + part * 64, tile.query + first, tile.head, tile.batch,
                     full);
}

/* ---- Sums --------------------------------------------------------------------------------------------------- */

/* Adds a stage that every row of the warp sees whole; false, and nothing added, if a stabiliser has to move. The
 * order is one in which ptxas spreads the exponentials: where two of them meet, a warp waits. */
__device__ inline bool add_with_shift(skl_row_state (&state)[2], const stage_logits &x, float scale_a,
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
__device__ inline void init_shift(skl_row_state (&state)[2], const stage_logits &x, float scale_a,
                                  const stage_logits &y, float scale_b)
{
#pragma unroll
    for (int half = 0; half < 2; half++) {
        state[half].m_a = state[half].l_a == 0.0F ? x[0][half * 2] * scale_a : state[half].m_a;
        state[half].m_b = state[half].l_b == 0.0F ? y[0][half * 2] * scale_b : state[half].m_b;
    }
}

__device__ inline void add_full(skl_row_state (&state)[2], const stage_logits &x, float scale_a,
                                const stage_logits &y, float scale_b)
{
    if (add_with_shift(state, x, scale_a, y, scale_b))
        return;
#pragma unroll
    for (int half = 0; half < 2; half++)
        add_with_max<false>(state[half], x, scale_a, y, scale_b, half, {});
}

/* The keys from `first` on that each row sees. */
__device__ inline void add_masked(skl_row_state (&state)[2], const stage_logits &x, float scale_a,
                                  const stage_logits &y, float scale_b, const band32 &band, int first)
{
#pragma unroll
    for (int half = 0; half < 2; half++) {
        const range32 sees = band.of(acc_row<1>(0, half));
        add_with_max<true>(state[half], x, scale_a, y, scale_b, half, {sees.begin - first, sees.end - first});
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
__device__ inline void write_row_of_two(const forward_params &params, const query_tile<M> &tile,
                                        const skl_row_state &state)
{
    const int lane = (int)threadIdx.x % 4, row = acc_row<1>(0, lane % 2);
    const bool of_b = lane / 2 != 0;
    const int64_t query = tile.first + row;
    if (query >= tile.sequence.query_count)
        return;
    if (params.num_splits == 1 && params.call.op != SKL_OP_PARTIAL) {
        write_lse(params, tile.sequence, tile.head, query, state, of_b);
        if (!of_b)
            write_kl(params, tile.sequence, tile.head, query, state);
    } else if (!of_b) {
        write_split(params, tile, row, state);
    }
}

} // namespace sm90

#endif
