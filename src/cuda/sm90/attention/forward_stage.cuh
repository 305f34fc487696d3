/* Building blocks of the Hopper forward kernels: TMA loads, and the row sums of a stage of 64 keys.
 *
 * Row states, the lazy shift and split_kv work as in the sm80 forward. */
#ifndef SKL_CUDA_SM90_ATTENTION_FORWARD_STAGE_CUH
#define SKL_CUDA_SM90_ATTENTION_FORWARD_STAGE_CUH

#include "cuda/sm90/tensor_map.cuh"
#include "cuda/sm90/pipeline.cuh"

namespace sm90
{

/* ---- Copies ------------------------------------------------------------------------------------------------- */

struct forward_maps {
    CUtensorMap keys_a, keys_b, queries_a, queries_b;
};

/* Keys of both arguments, [64 dimensions][64 keys] in TMA's 128-byte swizzle. */
template <int DIM> struct key_stage {
    row_stage<DIM> a, b;
};

/* TMA coordinates of a tile's queries and keys. */
struct tma_coord {
    int batch, query;         /* first row of the tile, in the tensor */
    int head, head_a, head_b; /* query head, key heads of the two arguments */

    template <int M> __device__ static tma_coord of(const forward_params &params, const query_tile<M> &tile)
    {
        const int head = (int)tile.head;
        return {(int)tile.sequence.batch, (int)(tile.sequence.query_begin + tile.first), head,
                head / params.a.heads_per_key, head / params.b.heads_per_key};
    }
};

__device__ inline tma_coord warp_uniform(const tma_coord &coord)
{
    return {warp_uniform(coord.batch), warp_uniform(coord.query), warp_uniform(coord.head),
            warp_uniform(coord.head_a), warp_uniform(coord.head_b)};
}

template <int DIM>
__device__ inline void load_keys(key_stage<DIM> &to, const forward_maps &maps, const tma_coord &coord, int row,
                                 uint64_t &full)
{
    barrier_expect_tx(full, (int)sizeof to);
#pragma unroll
    for (int slab = 0; slab < DIM / 64; slab++) {
        tma_load(to.a.slabs[slab], maps.keys_a, slab * 64, row, coord.head_a, coord.batch, full);
        tma_load(to.b.slabs[slab], maps.keys_b, slab * 64, row, coord.head_b, coord.batch, full);
    }
}

/* `loads`: arrivals that fill a stage of keys. */
template <typename FORWARD> __device__ inline void init_barriers(typename FORWARD::memory &smem, int loads = 1)
{
    for (uint64_t &queries : smem.queries_full)
        barrier_init(queries, 1);
    for (int stage = 0; stage < FORWARD::DEPTH; stage++) {
        barrier_init(smem.full[stage], loads);
        barrier_init(smem.empty[stage], FORWARD::GROUPS * 4);
    }
    barrier_init_fence();
}

/* Loads the dimensions after the first REG_DIMS, from row `first` of the tile on. */
template <int REG_DIMS, int SLABS, int ROWS>
__device__ inline void load_queries(smem_rows<SLABS, ROWS> &to, const CUtensorMap &queries, const tma_coord &coord,
                                    uint64_t &full, int first = 0)
{
    if constexpr (SLABS > 0)
        for (int slab = 0; slab < SLABS; slab++)
            tma_load(to.slabs[slab][first], queries, REG_DIMS + slab * 64, coord.query + first, coord.head,
                     coord.batch, full);
}

/* ---- Sums --------------------------------------------------------------------------------------------------- */

/* Scale of one of a thread's two rows: all rows of a tile have the same, except those of split rows. */
__device__ inline float scale_of(float scale, int)
{
    return scale;
}

/* Adds a full stage with the current shifts. Returns false and adds nothing if a sum exceeds the bound, which means
 * that its shift has to move. ptxas interleaves the exponentials with other instructions in this order of statements;
 * a warp stalls where two exponentials are adjacent. */
template <typename X, typename Y, typename SCALE>
__device__ inline bool add_with_shift(skl_row_state (&state)[2], const X &x, const SCALE &scale_a, const Y &y,
                                      const SCALE &scale_b)
{
    row_sums sums[2], right[2]; /* of the first 32 keys and of the last 32 */
#pragma unroll
    for (int n = 0; n < 4; n++) {
        const auto factors_x = factors_of(x, n), factors_y = factors_of(y, n);
        const auto right_x = factors_of(x, n + 4), right_y = factors_of(y, n + 4);
#pragma unroll
        for (int e = 0; e < 4; e++) {
            const int half = e / 2;
            const float a = scale_of(scale_a, half), b = scale_of(scale_b, half);
            const float m_a = state[half].m_a, m_b = state[half].m_b;
            const bool first = n == 0 && e % 2 == 0;
            add_pair(sums[half], fmaf(product_of(x, factors_x, n, e), a, -m_a),
                     fmaf(product_of(y, factors_y, n, e), b, -m_b), first);
            add_pair(right[half], fmaf(product_of(x, right_x, n + 4, e), a, -m_a),
                     fmaf(product_of(y, right_y, n + 4, e), b, -m_b), first);
        }
    }
    bool in_bounds = true;
#pragma unroll
    for (int half = 0; half < 2; half++) {
        add_sums(sums[half], right[half]);
        in_bounds = in_bounds && sums[half].l_a < SKL_LAZY_BOUND && sums[half].l_b < SKL_LAZY_BOUND &&
                    !is_huge(state[half].m_a) && !is_huge(state[half].m_b);
    }
    if (__any_sync(~0U, !in_bounds))
        return false;
#pragma unroll
    for (int half = 0; half < 2; half++)
        add_sums(state[half], sums[half]);
    return true;
}

/* Shifts of rows that are still empty: the thread's first logit, which usually is close enough to the maximum. */
__device__ inline void init_shift(skl_row_state (&state)[2], const stage_logits &x, float scale_a,
                                  const stage_logits &y, float scale_b)
{
#pragma unroll
    for (int half = 0; half < 2; half++) {
        state[half].m_a = state[half].l_a == 0.0F ? x[0][half * 2] * scale_a : state[half].m_a;
        state[half].m_b = state[half].l_b == 0.0F ? y[0][half * 2] * scale_b : state[half].m_b;
    }
}

template <typename X, typename Y, typename SCALE>
__device__ inline void add_full(skl_row_state (&state)[2], const X &x, const SCALE &scale_a, const Y &y,
                                const SCALE &scale_b)
{
    if (add_with_shift(state, x, scale_a, y, scale_b))
        return;
#pragma unroll
    for (int half = 0; half < 2; half++)
        add_with_max<false, 8>(state[half], x, scale_of(scale_a, half), y, scale_of(scale_b, half), half, {});
}

/* Adds a masked stage, whose first key is `first` of the stream: for each row, the keys that it attends to. */
template <typename X, typename Y, typename SCALE, int ROWS>
__device__ inline void add_masked(skl_row_state (&state)[2], const X &x, const SCALE &scale_a, const Y &y,
                                  const SCALE &scale_b, const row_ranges<ROWS> &visible, int first)
{
#pragma unroll
    for (int half = 0; half < 2; half++) {
        const range32 sees = visible.of(acc_row<1>(0, half));
        add_with_max<true, 8>(state[half], x, scale_of(scale_a, half), y, scale_of(scale_b, half), half,
                              {sees.begin - first, sees.end - first});
    }
}

/* Logits in base 2, after the softcap if the argument has one. `to` may be x. */
template <typename PRODUCTS, typename SCALE>
__device__ inline void cap_stage(stage_logits &to, const PRODUCTS &x, const SCALE &scale,
                                 const skl_cuda_argument &argument)
{
#pragma unroll
    for (int n = 0; n < 8; n++) {
        const auto factors = factors_of(x, n);
#pragma unroll
        for (int e = 0; e < 4; e++) {
            const float scaled = product_of(x, factors, n, e) * scale_of(scale, e / 2);
            to[n][e] = argument.capped ? argument.softcap_2 * tanhf(scaled) : scaled;
        }
    }
}

/* ---- Rows --------------------------------------------------------------------------------------------------- */

/* Writes one of a quad's two rows; `state` comes from merge_two_rows, even lanes have the first row and odd lanes the
 * second. Each of the four lanes takes one of the slow logarithms: two rows, two arguments. */
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
