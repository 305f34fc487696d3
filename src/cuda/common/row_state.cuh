/* Row states (m, l, w) of a tensor-core forward, and the query tiles that they belong to.
 *
 * For every kernel with the accumulator layout of mma m16n8 and wgmma: a thread holds two of a warp's 16 rows and two
 * of every 8 columns. It keeps one state per row, over its own columns; four lanes merge theirs at the end. */
#ifndef SKL_CUDA_COMMON_ROW_STATE_CUH
#define SKL_CUDA_COMMON_ROW_STATE_CUH

#include "cuda/common/sinks.cuh"
#include "cuda/common/tile_scheduler.cuh"

namespace tensor_core
{

struct row_sums {
    float l_a, l_b, w;
};

/* A state of a one-pass kernel. Its logits are relative to the LSEs, so its shifts are 0. */
__device__ inline skl_row_state state_of(const row_sums &sums)
{
    return {0.0F, sums.l_a, 0.0F, sums.l_b, sums.w};
}

/* Sums of rows of any length, for each thread in shared memory. An f32 sum loses digits as a row grows
 * (docs/design/maths.md, section 13), so a kernel adds its sums to these once in FLUSH_STAGES stages of 64 keys. */
constexpr int FLUSH_STAGES = 64;

template <int THREADS> struct long_sums {
    double l_a[2][THREADS], l_b[2][THREADS], w[2][THREADS]; /* sums of a thread's two rows */

    __device__ void clear()
    {
        for (int half = 0; half < 2; half++)
            l_a[half][threadIdx.x] = l_b[half][threadIdx.x] = w[half][threadIdx.x] = 0.0;
    }

    /* Adds the sums and clears them. */
    __device__ void flush(row_sums (&sums)[2])
    {
        for (int half = 0; half < 2; half++) {
            l_a[half][threadIdx.x] += (double)sums[half].l_a;
            l_b[half][threadIdx.x] += (double)sums[half].l_b;
            w[half][threadIdx.x] += (double)sums[half].w;
            sums[half] = {};
        }
    }

    __device__ row_sums of(int half) const
    {
        return {(float)l_a[half][threadIdx.x], (float)l_b[half][threadIdx.x], (float)w[half][threadIdx.x]};
    }
};

/* Sum over the four lanes that hold a row; each of them gets the result. */
__device__ inline float quad_sum(float value)
{
    value += __shfl_xor_sync(~0U, value, 1);
    return value + __shfl_xor_sync(~0U, value, 2);
}

/* Maximum over the same lanes. */
__device__ inline float quad_max(float value)
{
    value = fmaxf(value, __shfl_xor_sync(~0U, value, 1));
    return fmaxf(value, __shfl_xor_sync(~0U, value, 2));
}

__device__ inline row_sums quad_sum(const row_sums &sums)
{
    return {quad_sum(sums.l_a), quad_sum(sums.l_b), quad_sum(sums.w)};
}

/* long_sums in a quarter of the memory: three of the four lanes that hold a row keep one of its sums each. */
template <int THREADS> struct quad_long_sums {
    double total[2][THREADS / 4][3]; /* l_a, l_b, w */

    __device__ void clear()
    {
        if (threadIdx.x % 4 < 3)
            total[0][threadIdx.x / 4][threadIdx.x % 4] = total[1][threadIdx.x / 4][threadIdx.x % 4] = 0.0;
    }

    __device__ void flush(row_sums (&sums)[2])
    {
        const int lane = (int)(threadIdx.x % 4);
        for (int half = 0; half < 2; half++) {
            const row_sums row = quad_sum(sums[half]);
            if (lane < 3)
                total[half][threadIdx.x / 4][lane] += (double)(lane == 0 ? row.l_a : lane == 1 ? row.l_b : row.w);
            sums[half] = {};
        }
        __syncwarp(); /* of() reads the totals of other lanes */
    }

    /* Returns the sums of the whole row in its first lane, 0 in the others. */
    __device__ row_sums of(int half) const
    {
        const double(&row)[3] = total[half][threadIdx.x / 4];
        const bool first = threadIdx.x % 4 == 0;
        return {first ? (float)row[0] : 0.0F, first ? (float)row[1] : 0.0F, first ? (float)row[2] : 0.0F};
    }
};

/* Adds a pair of logits in base 2, each minus its shift: l_a += 2^x, l_b += 2^y, w += 2^x (x - y). `first` starts the
 * sums with this pair, which saves the additions to 0. Returns 2^y. */
__device__ inline float add_pair(row_sums &sums, float x, float y, bool first = false)
{
    const float p_b = ex2(y), p_a = ex2(x);
    sums.l_b = first ? p_b : sums.l_b + p_b;
    sums.l_a = first ? p_a : sums.l_a + p_a;
    sums.w = first ? p_a * (x - y) : fmaf(p_a, x - y, sums.w);
    return p_b;
}

__device__ inline bool is_huge(float m)
{
    return !(fabsf(m) < SKL_HUGE_LOGIT);
}

/* A logit minus its shift. */
__device__ inline float minus_shift(float product, float scale, float m, bool huge)
{
    return huge ? __fsub_rn(__fmul_rn(product, scale), m) : fmaf(product, scale, -m);
}

/* log2 p. The special function unit has an absolute error of 2^-22 near 1, and a relative error of 2^-22 elsewhere.
 * So it gets the mantissa, and the exponent is added. For p = 0 it is -127, and below 2^-126 at most -126: 0 log 0 is
 * 0. */
__device__ inline float log2_probability(float p)
{
    const int bits = __float_as_int(p);
    const int exponent = (bits - __float_as_int(0.75F)) & 0xFF800000;
    return fmaf((float)exponent, 1.0F / (1 << 23), lg2(__int_as_float(bits - exponent)));
}

/* SUMS: skl_row_state or row_sums, with the same shifts. */
template <typename SUMS> __device__ inline void add_sums(SUMS &to, const row_sums &sums)
{
    to.l_a += sums.l_a;
    to.l_b += sums.l_b;
    to.w += sums.w;
}

/* A logit is a product times a scale. Products are accumulators, [block of 8 columns][half * 2 + parity], or a view
 * of them in which columns have factors (sm90/two_term.cuh). */
struct no_factors {
};

template <int BLOCKS> __device__ inline no_factors factors_of(const float (&)[BLOCKS][4], int)
{
    return {};
}

template <int BLOCKS>
__device__ inline float product_of(const float (&products)[BLOCKS][4], no_factors, int block, int e)
{
    return products[block][e];
}

/* Adds a row's columns of one step, with their true maximum as the shift. MASKED: only the columns in `sees`, which
 * counts from the step's first key. */
template <bool MASKED, int BLOCKS, typename A, typename B>
__device__ inline void add_with_max(skl_row_state &state, const A &a, float scale_a, const B &b, float scale_b,
                                    int half, const range32 &sees)
{
    float m_a = state.m_a, m_b = state.m_b;
    bool any = !MASKED;
#pragma unroll
    for (int block = 0; block < BLOCKS; block++) {
        const auto factors_a = factors_of(a, block), factors_b = factors_of(b, block);
#pragma unroll
        for (int parity = 0; parity < 2; parity++) {
            const int column = acc_column(block, parity), e = half * 2 + parity;
            const bool seen = !MASKED || (column >= sees.begin && column < sees.end);
            m_a = seen ? fmaxf(m_a, product_of(a, factors_a, block, e) * scale_a) : m_a;
            m_b = seen ? fmaxf(m_b, product_of(b, factors_b, block, e) * scale_b) : m_b;
            any = any || seen;
        }
    }
    if (!any)
        return;
    state = skl_state_move(state, m_a, m_b);
    const bool huge_a = is_huge(m_a), huge_b = is_huge(m_b);
    row_sums sums = {};
#pragma unroll
    for (int block = 0; block < BLOCKS; block++) {
        const auto factors_a = factors_of(a, block), factors_b = factors_of(b, block);
#pragma unroll
        for (int parity = 0; parity < 2; parity++) {
            const int column = acc_column(block, parity), e = half * 2 + parity;
            if (!MASKED || (column >= sees.begin && column < sees.end))
                add_pair(sums, minus_shift(product_of(a, factors_a, block, e), scale_a, m_a, huge_a),
                         minus_shift(product_of(b, factors_b, block, e), scale_b, m_b, huge_b));
        }
    }
    add_sums(state, sums);
}

__device__ inline skl_row_state shuffle_xor(const skl_row_state &state, int offset)
{
    return {__shfl_xor_sync(~0U, state.m_a, offset), __shfl_xor_sync(~0U, state.l_a, offset),
            __shfl_xor_sync(~0U, state.m_b, offset), __shfl_xor_sync(~0U, state.l_b, offset),
            __shfl_xor_sync(~0U, state.w, offset)};
}

/* Merges the lower lane's state first in both lanes, so that both get the same bits. */
__device__ inline skl_row_state merge_with_lane(const skl_row_state &mine, const skl_row_state &other, int offset)
{
    return (threadIdx.x & (unsigned)offset) == 0 ? skl_state_merge(mine, other) : skl_state_merge(other, mine);
}

/* Merges the LANES neighboring lanes that hold a row; each of them gets the result. */
template <int LANES = 4> __device__ inline skl_row_state merge_lanes(skl_row_state state)
{
#pragma unroll
    for (int offset = 1; offset < LANES; offset *= 2)
        state = merge_with_lane(state, shuffle_xor(state, offset), offset);
    return state;
}

/* Selects member by member. For a choice between two structs the compiler selects an address, which moves them to
 * local memory. */
__device__ inline skl_row_state select_state(const skl_row_state &first, const skl_row_state &second, bool is_second)
{
    return {is_second ? second.m_a : first.m_a, is_second ? second.l_a : first.l_a,
            is_second ? second.m_b : first.m_b, is_second ? second.l_b : first.l_b, is_second ? second.w : first.w};
}

/* Merges two rows that the same four lanes hold. Even lanes get the first row, odd lanes the second, with the same
 * bits as from merge_lanes. */
__device__ inline skl_row_state merge_two_rows(const skl_row_state &first, const skl_row_state &second)
{
    const bool odd = threadIdx.x % 2 != 0;
    const skl_row_state merged =
        merge_with_lane(select_state(first, second, odd), shuffle_xor(select_state(second, first, odd), 1), 1);
    return merge_with_lane(merged, shuffle_xor(merged, 2), 2);
}

__device__ inline void write_kl(const skl_cuda_params &params, const skl_sequence &s, int64_t head, int64_t query,
                                const skl_row_state &state)
{
    skl_row_set(&params.call.rows.kl, &s, head, query, reported_kl(params.problem, s, query, skl_state_kl(&state)));
}

/* skl_lse with an f32 logarithm instead of a slow one in double: it is accurate enough for a number in [0.75, 1.5), l
 * without its exponent. */
__device__ inline float fast_lse(float m, float l)
{
    if (!(l >= 0x1p-126F && l < INFINITY))
        return skl_lse(m, l);
    const unsigned bits = __float_as_uint(l);
    const int exponent = (int)(bits - 0x3F400000U) >> 23;
    const float significand = __uint_as_float(bits - ((unsigned)exponent << 23));
    return (float)(((double)m + (double)exponent) * SKL_LN2_DOUBLE + (double)logf(significand));
}

/* Writes the LSE of argument A, or of B (of_b). Lanes with different arguments execute the same instructions. */
__device__ inline void write_lse(const skl_cuda_params &params, const skl_sequence &s, int64_t head, int64_t query,
                                 const skl_row_state &state, bool of_b)
{
    const float lse = skl_lse(of_b ? state.m_b : state.m_a, of_b ? state.l_b : state.l_a);
    if (of_b != (params.problem.direction == SKL_KL_REVERSE))
        skl_row_set(&params.call.rows.lse_s, &s, head, query, lse);
    else
        skl_row_set(&params.call.rows.lse_t, &s, head, query, lse);
}

/* Writes a state of SKL_OP_PARTIAL. */
__device__ inline void write_partial_state(const skl_cuda_params &params, const skl_sequence &s, int64_t head,
                                           int64_t query, const skl_row_state &state)
{
    params.call.states[skl_state_index(&params.problem, &s, head, query)] =
        partial_state(params.problem, s, query, state);
}

__device__ inline void write_row(const skl_cuda_params &params, const skl_sequence &s, int64_t head, int64_t query,
                                 const skl_row_state &state)
{
    if (params.call.op == SKL_OP_PARTIAL) {
        write_partial_state(params, s, head, query, state);
        return;
    }
    const skl_row_state row = with_sink(params, s, head, query, state);
    write_kl(params, s, head, query, row);
    write_lse(params, s, head, query, row, false);
    write_lse(params, s, head, query, row, true);
}

/* ---- Query tiles -------------------------------------------------------------------------------------------- */

template <int M> struct query_tile {
    static constexpr int ROWS = TILE_ROWS<M>;
    skl_sequence sequence;
    int64_t head, first; /* query */
    int64_t index;       /* number of the tile and split among all tiles and splits */
    int split;           /* split of the tile's keys */

    __device__ static unsigned tiles(const skl_cuda_params &params) /* tiles per head */
    {
        return (unsigned)skl_ceil_div(params.problem.len_q, ROWS);
    }

    /* The tile of this block, of a grid with `splits` blocks per tile; false if the block has no tile. */
    __device__ bool find(const skl_cuda_params &params, int splits, unsigned head_group)
    {
        const unsigned heads = (unsigned)params.problem.heads_s;
        return set(params, tile_of_block(heads, tiles(params) * splits, head_group), splits);
    }

    /* The tile that a block of a persistent kernel computes in this iteration; false if there is none. */
    __device__ bool find_persistent(const skl_cuda_params &params, int iteration, unsigned head_group)
    {
        const unsigned heads = (unsigned)params.problem.heads_s;
        return set(params, persistent_tile((unsigned)iteration, heads, tiles(params), head_group), 1);
    }

    /* Iterations of this block in a persistent kernel. */
    __device__ static int iterations(const skl_cuda_params &params)
    {
        const unsigned all = (unsigned)(params.problem.batch * params.problem.heads_s) * tiles(params);
        return (int)((all - blockIdx.x + gridDim.x - 1) / gridDim.x);
    }

    __device__ bool set(const skl_cuda_params &params, const tile_coord &coord, int splits)
    {
        const skl_problem &p = params.problem;
        if (coord.sequence >= p.batch)
            return false;
        sequence = device_sequence(params, coord.sequence);
        head = coord.head;
        split = coord.tile % splits;
        index = (coord.sequence * p.heads_s + head) * tiles(params) * splits + coord.tile;
        first = (int64_t)(tiles(params) - 1 - coord.tile / splits) * ROWS; /* causal: longest first */
        return first < sequence.query_count;
    }
};

/* Writes the results of a row; or, with several splits, its partial state to the workspace. */
template <int M>
__device__ inline void write_split(const forward_params &params, const query_tile<M> &tile, int row,
                                   const skl_row_state &state)
{
    if (params.num_splits > 1)
        params.split_states[tile.index * tile.ROWS + row] = state;
    else
        write_row(params, tile.sequence, tile.head, tile.first + row, state);
}

/* In a kernel with a block per tile and a thread per query: merges the splits of a row in a fixed order, and calls
 * write(sequence, head, query, state). */
template <int M, typename WRITE> __device__ inline void merge_row_splits(const forward_params &params, WRITE write)
{
    query_tile<M> tile;
    const int row = (int)threadIdx.x;
    if (!tile.find(params, 1, (unsigned)params.head_group) || tile.first + row >= tile.sequence.query_count)
        return;
    const skl_row_state *const splits = params.split_states + tile.index * params.num_splits * tile.ROWS;
    skl_row_state state = splits[row];
    for (int split = 1; split < params.num_splits; split++)
        state = skl_state_merge(state, splits[split * tile.ROWS + row]);
    write(tile.sequence, tile.head, tile.first + row, state);
}

/* Merges the splits of all tiles of 64 M queries in a fixed order and writes their rows (merge_splits.cu). */
template <int M> cudaError_t merge_splits(const forward_params &params);

} // namespace tensor_core

#endif
