/* Building blocks of the Hopper forward kernels: TMA loads, and the row sums of a stage of 64 keys.
 *
 * Row states, the lazy shift and split_kv work as in the sm80 forward. */
#ifndef SKL_CUDA_SM90_ATTENTION_FORWARD_STAGE_CUH
#define SKL_CUDA_SM90_ATTENTION_FORWARD_STAGE_CUH

#include <type_traits>

#include "cuda/sm90/attention/softcap.cuh"
#include "cuda/sm90/tensor_map.cuh"

namespace sm90
{

/* ---- Copies ------------------------------------------------------------------------------------------------- */

struct forward_maps {
    CUtensorMap keys_a, keys_b, queries_a, queries_b;
};

/* Keys of both arguments, [64 dimensions][64 keys] in TMA's 128-byte swizzle. */
template <int DIM_A, int DIM_B> struct key_stage {
    row_stage<DIM_A> a;
    row_stage<DIM_B> b;
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

template <int DIM_A, int DIM_B>
__device__ inline void load_keys(key_stage<DIM_A, DIM_B> &to, const forward_maps &maps, const tma_coord &coord,
                                 int row, uint64_t &full)
{
    constexpr int SLABS_A = SLABS_OF<DIM_A>, SLABS_B = SLABS_OF<DIM_B>;
    barrier_expect_tx(full, (int)sizeof to);
#pragma unroll
    for (int slab = 0; slab < (SLABS_A > SLABS_B ? SLABS_A : SLABS_B); slab++) {
        if (slab < SLABS_A)
            tma_load(to.a.slabs[slab], maps.keys_a, slab * 64, row, coord.head_a, coord.batch, full);
        if (slab < SLABS_B)
            tma_load(to.b.slabs[slab], maps.keys_b, slab * 64, row, coord.head_b, coord.batch, full);
    }
}

/* arrivals: of the consumers, when they have read a stage. */
template <typename FORWARD>
__device__ inline void init_barriers(typename FORWARD::memory &smem, int arrivals = FORWARD::GROUPS * 4)
{
    for (uint64_t &queries : smem.queries_full)
        barrier_init(queries, 1);
    for (int stage = 0; stage < FORWARD::DEPTH; stage++) {
        barrier_init(smem.full[stage], 1);
        barrier_init(smem.empty[stage], arrivals);
    }
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

/* Turns a product into a logit in base 2 minus its shift. */
struct plain_logit {
    float scale;

    __device__ float minus_shift(float product, float m) const
    {
        return fmaf(product, scale, -m);
    }
};

/* Caps a logit by the polynomial. */
struct capped_logit {
    const skl_cuda_argument &argument;

    __device__ float minus_shift(float product, float m) const
    {
        return fmaf(polynomial_tanh(product, argument), argument.tanh_factor, -m);
    }
};

/* Adds a full stage with the current shifts. Returns false and adds nothing if a sum exceeds the bound, which means
 * that its shift has to move. ptxas interleaves the exponentials with other instructions in this order of statements;
 * a warp stalls where two exponentials are adjacent. */
template <typename LOGIT, typename X, typename Y>
__device__ inline bool add_with_shift(skl_row_state (&state)[2], const X &x, const LOGIT &logit_a, const Y &y,
                                      const LOGIT &logit_b)
{
    row_sums sums[2], right[2]; /* sums of the first 32 keys, and of the last 32 */
#pragma unroll
    for (int n = 0; n < 4; n++) {
        const auto factors_x = factors_of(x, n), right_x = factors_of(x, n + 4);
        const auto factors_y = factors_of(y, n), right_y = factors_of(y, n + 4);
#pragma unroll
        for (int e = 0; e < 4; e++) {
            const int half = e / 2;
            const float m_a = state[half].m_a, m_b = state[half].m_b;
            const bool first = n == 0 && e % 2 == 0;
            add_pair(sums[half], logit_a.minus_shift(product_of(x, factors_x, n, e), m_a),
                     logit_b.minus_shift(product_of(y, factors_y, n, e), m_b), first);
            add_pair(right[half], logit_a.minus_shift(product_of(x, right_x, n + 4, e), m_a),
                     logit_b.minus_shift(product_of(y, right_y, n + 4, e), m_b), first);
        }
    }
    bool in_bounds = true;
#pragma unroll
    for (int half = 0; half < 2; half++) {
        add_sums(sums[half], right[half]);
        const float l_a = sums[half].l_a, l_b = sums[half].l_b, m_a = state[half].m_a, m_b = state[half].m_b;
        if constexpr (std::is_array_v<X>) /* && may become a branch; without it two-term rows spill */
            in_bounds = in_bounds & (l_a < SKL_LAZY_BOUND) & (l_b < SKL_LAZY_BOUND) & !is_huge(m_a) & !is_huge(m_b);
        else
            in_bounds = in_bounds && l_a < SKL_LAZY_BOUND && l_b < SKL_LAZY_BOUND && !is_huge(m_a) && !is_huge(m_b);
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

template <typename X, typename Y>
__device__ inline void add_full(skl_row_state (&state)[2], const X &x, float scale_a, const Y &y, float scale_b)
{
    if (add_with_shift(state, x, plain_logit{scale_a}, y, plain_logit{scale_b}))
        return;
#pragma unroll
    for (int half = 0; half < 2; half++)
        add_with_max<false, 8>(state[half], x, scale_a, y, scale_b, half, {});
}

/* Adds a full stage of a student with a linear link, with the current shifts. Its probability is the product over
 * 2^m_b, so its special function instruction is the logarithm of that. Returns false and adds nothing if a sum
 * exceeds the bound, or if a product is so small that its logarithm needs care. */
__device__ inline bool add_linear(skl_row_state (&state)[2], const stage_logits &x, float scale_a,
                                  const stage_logits &y)
{
    row_sums sums[2], right[2]; /* sums of the first 32 keys, and of the last 32 */
    float smallest[2] = {FLT_MAX, FLT_MAX};
    const float factor[2] = {ex2(-state[0].m_b), ex2(-state[1].m_b)};
    const auto add = [&](row_sums &to, float product_a, float product_b, int half, bool first) {
        const float a = fmaf(product_a, scale_a, -state[half].m_a), p_a = ex2(a), p_b = product_b * factor[half];
        const float difference = a - lg2(p_b);
        smallest[half] = fminf(smallest[half], p_b);
        to.l_b = first ? p_b : to.l_b + p_b;
        to.l_a = first ? p_a : to.l_a + p_a;
        to.w = first ? p_a * difference : fmaf(p_a, difference, to.w);
    };
#pragma unroll
    for (int n = 0; n < 4; n++)
#pragma unroll
        for (int e = 0; e < 4; e++) {
            const bool first = n == 0 && e % 2 == 0;
            add(sums[e / 2], x[n][e], y[n][e], e / 2, first);
            add(right[e / 2], x[n + 4][e], y[n + 4][e], e / 2, first);
        }
    bool in_bounds = true;
#pragma unroll
    for (int half = 0; half < 2; half++) {
        add_sums(sums[half], right[half]);
        in_bounds = in_bounds & (sums[half].l_a < SKL_LAZY_BOUND) & (sums[half].l_b < SKL_LAZY_BOUND) &
                    (smallest[half] >= FLT_MIN) & !is_huge(state[half].m_a);
    }
    if (__any_sync(~0U, !in_bounds))
        return false;
#pragma unroll
    for (int half = 0; half < 2; half++)
        add_sums(state[half], sums[half]);
    return true;
}

/* Adds a full stage with softcaps or a linear link, or returns false: then it has to be capped and added as above. */
template <logit_form FORM>
__device__ inline bool add_capped(skl_row_state (&state)[2], const stage_logits &x, const stage_logits &y,
                                  const forward_params &params)
{
    if (FORM == LINEAR_LOGITS)
        return !params.a.capped && add_linear(state, x, params.a.scale, y);
    return polynomials_cover(x, params.a, y, params.b) &&
           add_with_shift(state, x, capped_logit{params.a}, y, capped_logit{params.b});
}

/* Adds the columns of a masked stage that a row attends to, `sees`, with the current shift; an empty row takes the
 * thread's first logit as its shift. Returns false and adds nothing if a sum exceeds the bound, or if an empty row
 * attends to a later column and not to the first one. Each thread decides for itself: with a common decision the bits
 * of a row would depend on keys that only other rows see. A masked pair has the same logit in both arguments, whose
 * exponential is 0. */
template <typename X, typename Y>
__device__ inline bool add_masked_with_shift(skl_row_state &state, const X &x, float scale_a, const Y &y,
                                             float scale_b, int half, const range32 &sees)
{
    constexpr float MASKED_LOGIT = -1000.0F;
    const int begin = sees.begin - acc_column(0, 0), end = sees.end - acc_column(0, 0);
    const bool empty_a = state.l_a == 0.0F, empty_b = state.l_b == 0.0F;
    const float m_a = !empty_a ? state.m_a : product_of(x, factors_of(x, 0), 0, half * 2) * scale_a;
    const float m_b = !empty_b ? state.m_b : product_of(y, factors_of(y, 0), 0, half * 2) * scale_b;
    row_sums sums;
#pragma unroll
    for (int block = 0; block < 8; block++) {
        const auto factors_x = factors_of(x, block), factors_y = factors_of(y, block);
#pragma unroll
        for (int parity = 0; parity < 2; parity++) {
            const int column = block * 8 + parity, e = half * 2 + parity;
            const bool seen = column >= begin && column < end;
            const float a = fmaf(product_of(x, factors_x, block, e), scale_a, -m_a);
            const float b = fmaf(product_of(y, factors_y, block, e), scale_b, -m_b);
            add_pair(sums, seen ? a : MASKED_LOGIT, seen ? b : MASKED_LOGIT, column == 0);
        }
    }
    const bool sees_none = end <= 0, misses_first = begin > 0 && (empty_a || empty_b);
    const bool in_bounds = sums.l_a < SKL_LAZY_BOUND && sums.l_b < SKL_LAZY_BOUND && !is_huge(m_a) && !is_huge(m_b);
    if (!sees_none && (misses_first || !in_bounds))
        return false;
    state.m_a = empty_a && sees_none ? -INFINITY : m_a;
    state.m_b = empty_b && sees_none ? -INFINITY : m_b;
    add_sums(state, sums);
    return true;
}

/* Adds a stage whose first key is `first` of the stream: for each row, the keys that it attends to. `full`: these are
 * all, and the stage is added as a full one if the shifts allow it; so there is one copy of the slow path. */
template <typename X, typename Y, typename VISIBLE>
__device__ inline void add_masked(skl_row_state (&state)[2], const X &x, float scale_a, const Y &y, float scale_b,
                                  const VISIBLE &visible, int first, bool full = false)
{
    /* Two-term rows, whose columns have factors, have no lazy shift: an LSE of f32 would lose digits to it. */
    constexpr bool LAZY = std::is_same_v<decltype(factors_of(x, 0)), no_factors>;
    if constexpr (LAZY)
        if (full) {
            init_shift(state, x, scale_a, y, scale_b);
            if (add_with_shift(state, x, plain_logit{scale_a}, y, plain_logit{scale_b}))
                return;
        }
#pragma unroll
    for (int half = 0; half < 2; half++) {
        const range32 in_stream = visible.of(acc_row<1>(0, half));
        const range32 sees = {in_stream.begin - first, in_stream.end - first};
        if (!LAZY || full || !add_masked_with_shift(state[half], x, scale_a, y, scale_b, half, sees))
            add_with_max<true, 8>(state[half], x, scale_a, y, scale_b, half, sees);
    }
}

/* ---- Rows --------------------------------------------------------------------------------------------------- */

/* Writes one of a quad's two rows; `state` comes from merge_two_rows, even lanes have the first row and odd lanes the
 * second. Each of the four lanes takes one of the slow logarithms: two rows, two arguments. */
template <int M>
__device__ inline void write_row_of_two(const forward_params &params, const query_tile<M> &tile,
                                        const skl_row_state &state)
{
    const int lane = (int)(threadIdx.x % 4), row = acc_row<1>(0, lane % 2);
    const bool of_b = lane / 2 != 0;
    const int64_t query = tile.first + row;
    if (query >= tile.sequence.query_count)
        return;
    if (params.num_splits > 1) {
        if (!of_b)
            params.split_states[tile.index * tile.ROWS + row] = state;
    } else if (params.call.op == SKL_OP_PARTIAL) {
        if (!of_b)
            write_partial_state(params, tile.sequence, tile.head, query, state);
    } else {
        const skl_row_state with = with_sink(params, tile.sequence, tile.head, query, state);
        write_lse(params, tile.sequence, tile.head, query, with, of_b);
        if (!of_b)
            write_kl(params, tile.sequence, tile.head, query, with);
    }
}

} // namespace sm90

#endif
