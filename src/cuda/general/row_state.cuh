/* Row states of the general forward kernels, and the LSEs of a teacher group. */
#ifndef SKL_CUDA_GENERAL_ROW_STATE_CUH
#define SKL_CUDA_GENERAL_ROW_STATE_CUH

#include "cuda/general/tile.cuh"

/* Row states of each thread's rows over the columns of that thread. They are in shared memory, because the products
 * need the registers. */
struct thread_states {
    static constexpr bool WITH_ENTROPY = false;
    float m_a[ROWS][THREADS], l_a[ROWS][THREADS], m_b[ROWS][THREADS], l_b[ROWS][THREADS], w[ROWS][THREADS];

    __device__ skl_row_state get(int i) const
    {
        const unsigned thread = threadIdx.x;
        const skl_row_state state = {m_a[i][thread], l_a[i][thread], m_b[i][thread], l_b[i][thread], w[i][thread]};
        return state;
    }

    __device__ void set(int i, const skl_row_state &state)
    {
        m_a[i][threadIdx.x] = state.m_a;
        l_a[i][threadIdx.x] = state.l_a;
        m_b[i][threadIdx.x] = state.m_b;
        l_b[i][threadIdx.x] = state.l_b;
        w[i][threadIdx.x] = state.w;
    }

    __device__ void clear()
    {
        for (int i = 0; i < ROWS; i++)
            set(i, skl_state_empty());
    }
};

/* Also the sum from which the entropy of A follows: e = sum 2^(a - m_a) (a - m_a). */
struct entropy_states : thread_states {
    static constexpr bool WITH_ENTROPY = true;
    float e[ROWS][THREADS];

    __device__ void clear()
    {
        thread_states::clear();
        for (int i = 0; i < ROWS; i++)
            e[i][threadIdx.x] = 0.0F;
    }

    /* Row state of A against all-zero logits, as skl_state_entropy() expects it. */
    __device__ skl_row_state entropy_state(int i) const
    {
        const unsigned thread = threadIdx.x;
        const skl_row_state state = {m_a[i][thread], l_a[i][thread], 0.0F, l_a[i][thread], e[i][thread]};
        return state;
    }
};

/* Adds a thread's columns of one row to its state. FULL: the row attends to all of them. */
template <bool FULL, int COLUMNS, typename STATES>
static __device__ void add_columns(STATES &states, int i, const float (&a)[COLUMNS], const float (&b)[COLUMNS],
                                   const key_span &span)
{
    skl_row_state state = states.get(i);
    float m_a = state.m_a, m_b = state.m_b;
    bool any = FULL;
#pragma unroll
    for (int j = 0; j < COLUMNS; j++) {
        const bool seen = FULL || sees(span, acc_column(j));
        m_a = seen ? fmaxf(m_a, a[j]) : m_a;
        m_b = seen ? fmaxf(m_b, b[j]) : m_b;
        any = any || seen;
    }
    if (!any)
        return;
    if constexpr (STATES::WITH_ENTROPY) {
        float &e = states.e[i][threadIdx.x];
        const float d = state.l_a == 0.0F ? 0.0F : state.m_a - m_a;
        float sum = exp2f(d) * fmaf(state.l_a, d, e);
#pragma unroll
        for (int j = 0; j < COLUMNS; j++) {
            const bool seen = FULL || sees(span, acc_column(j));
            sum = seen ? fmaf(ex2(a[j] - m_a), a[j] - m_a, sum) : sum;
        }
        e = sum;
    }
    state = skl_state_move(state, m_a, m_b);
#pragma unroll
    for (int j = 0; j < COLUMNS; j++) {
        const bool seen = FULL || sees(span, acc_column(j));
        const float shifted_a = a[j] - m_a;
        const float shifted_b = b[j] - m_b;
        const float exp_a = seen ? ex2(shifted_a) : 0.0F;
        state.l_a += exp_a;
        state.l_b += seen ? ex2(shifted_b) : 0.0F;
        state.w = fmaf(exp_a, seen ? shifted_a - shifted_b : 0.0F, state.w);
    }
    states.set(i, state);
}

/* Adds a tile of the logits of A and B to memory.states. */
template <int COLUMNS, typename MEMORY>
static __device__ void add_tile(MEMORY &memory, const fragment<COLUMNS> &a, const fragment<COLUMNS> &b,
                                const skl_problem &p, const tile_position &tile)
{
    const key_span all = {0, TILE};
    if (all_visible(p, tile, TILE, COLUMNS * LANES)) {
#pragma unroll
        for (int i = 0; i < ROWS; i++)
            add_columns<true>(memory.states, i, a.at[i], b.at[i], all);
        return;
    }
    find_spans(memory.spans, p, tile);
#pragma unroll
    for (int i = 0; i < ROWS; i++)
        add_columns<false>(memory.states, i, a.at[i], b.at[i], memory.spans[acc_row(i)]);
}

/* ---- Reductions over the lanes of a row --------------------------------------------------------------------- */

__device__ inline float row_sum(float value)
{
    for (int offset = LANES / 2; offset > 0; offset /= 2)
        value += __shfl_xor_sync(~0U, value, offset);
    return value;
}

__device__ inline skl_row_state row_merge(skl_row_state state)
{
#pragma unroll 1
    for (int offset = LANES / 2; offset > 0; offset /= 2) {
        skl_row_state other;
        other.m_a = __shfl_xor_sync(~0U, state.m_a, offset);
        other.l_a = __shfl_xor_sync(~0U, state.l_a, offset);
        other.m_b = __shfl_xor_sync(~0U, state.m_b, offset);
        other.l_b = __shfl_xor_sync(~0U, state.l_b, offset);
        other.w = __shfl_xor_sync(~0U, state.w, offset);
        /* Both lanes merge in the same order, so both get the same bits. */
        const bool lower = (threadIdx.x & (unsigned)offset) == 0;
        state = lower ? skl_state_merge(state, other) : skl_state_merge(other, state);
    }
    return state;
}

__device__ inline bool first_lane(void)
{
    return threadIdx.x % LANES == 0;
}

/* ---- LSEs of a teacher group -------------------------------------------------------------------------------- */

/* The same queries and the next keys. After the last keys, all its rows read as 0. */
template <int COLUMNS> __device__ inline tile_position next_key_tile(tile_position tile)
{
    tile.key_first += COLUMNS * LANES;
    return tile;
}

/* Writes the given LSEs of the group's heads to lse [group][TILE]. */
__device__ inline void load_group_lse(skl_lse2 *lse, const skl_input &given, const tile_position &tile, int64_t group)
{
    for (int64_t index = threadIdx.x; index < group * TILE; index += THREADS) {
        const int64_t row = tile.query_first + index % TILE;
        if (row < tile.work.queries.end)
            lse[index] =
                skl_lse2_of(skl_row_value(&given, &tile.work.sequence, tile.work.head * group + index / TILE, row));
    }
}

/* Computes the log2-sum-exp2 of each teacher head of the group: lse [group][TILE]. */
template <int COLUMNS, typename MEMORY>
static __device__ void compute_group_lse(skl_lse2 *lse, MEMORY &memory, pipeline<COLUMNS> &pipe,
                                         const skl_cuda_params &params, const tile_position &first_tile,
                                         int64_t group)
{
    const skl_problem &p = params.problem;
#pragma unroll 1
    for (int64_t h = 0; h < group; h++) {
        const int64_t head = first_tile.work.head * group + h;
        memory.states.clear();
        tile_position tile = first_tile;
        pipe.begin([&] { return operands_of<false>(tile, TEACHER, head); });
#pragma unroll 1
        while (tile.key_first < tile.work.keys.end) {
            fragment<COLUMNS> x;
            pipe.prefetch([&] { return operands_of<false>(next_key_tile<COLUMNS>(tile), TEACHER, head); });
            pipe.multiply_tile(x);
            scale_products(x, tile.work.sides[TEACHER]);
            add_tile(memory, x, x, p, tile);
            tile.key_first += COLUMNS * LANES;
        }
#pragma unroll 1
        for (int i = 0; i < ROWS; i++) {
            const skl_row_state row = row_merge(memory.states.get(i));
            if (first_lane())
                lse[h * TILE + acc_row(i)] =
                    skl_lse2_split(row.l_a == 0.0F ? -INFINITY : (double)row.m_a + log2((double)row.l_a));
        }
    }
}

#endif
