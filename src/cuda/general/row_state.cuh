/* Rows of the general forward kernels: what a thread remembers of the keys it has seen, and LSEs of teacher heads. */
#ifndef SKL_CUDA_GENERAL_ROW_STATE_CUH
#define SKL_CUDA_GENERAL_ROW_STATE_CUH

#include "cuda/general/tile.cuh"

/* A thread's row states stay out of its registers while products are summed up in them. */
struct thread_states {
    static constexpr bool SPREAD = false;
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

/* With what the entropy of the first argument is made of: e = sum 2^(a - m_a) (a - m_a). */
struct spread_states : thread_states {
    static constexpr bool SPREAD = true;
    float e[ROWS][THREADS];

    __device__ void clear()
    {
        thread_states::clear();
        for (int i = 0; i < ROWS; i++)
            e[i][threadIdx.x] = 0.0F;
    }

    /* The first argument beside zeros, as skl_state_entropy takes it. */
    __device__ skl_row_state spread(int i) const
    {
        const unsigned thread = threadIdx.x;
        const skl_row_state state = {m_a[i][thread], l_a[i][thread], 0.0F, l_a[i][thread], e[i][thread]};
        return state;
    }
};

/* Adds a thread's columns of one row to its state. FULL: the row sees them all. */
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
    if constexpr (STATES::SPREAD) {
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
        const float u = a[j] - m_a;
        const float v = b[j] - m_b;
        const float p = seen ? ex2(u) : 0.0F;
        state.l_a += p;
        state.l_b += seen ? ex2(v) : 0.0F;
        state.w = fmaf(p, seen ? u - v : 0.0F, state.w);
    }
    states.set(i, state);
}

/* Adds a tile of logits of both arguments to memory.states. */
template <int COLUMNS, typename MEMORY>
static __device__ void add_tile(MEMORY &memory, const fragment<COLUMNS> &a, const fragment<COLUMNS> &b,
                                const skl_problem &p, const tile_position &at)
{
    const key_span all = {0, TILE};
    if (all_visible(p, at, TILE, COLUMNS * LANES)) {
#pragma unroll
        for (int i = 0; i < ROWS; i++)
            add_columns<true>(memory.states, i, a.at[i], b.at[i], all);
        return;
    }
    find_spans(memory.spans, p, at);
#pragma unroll
    for (int i = 0; i < ROWS; i++)
        add_columns<false>(memory.states, i, a.at[i], b.at[i], memory.spans[row_of(i)]);
}

/* ---- Rows of a block ---------------------------------------------------------------------------------------- */

/* Over the lanes of a row. */
__device__ inline float row_sum(float value)
{
    for (int offset = LANES / 2; offset > 0; offset /= 2)
        value += __shfl_xor_sync(~0U, value, offset);
    return value;
}

__device__ inline skl_row_state row_merge(skl_row_state state)
{
    for (int offset = LANES / 2; offset > 0; offset /= 2) {
        skl_row_state other;
        other.m_a = __shfl_xor_sync(~0U, state.m_a, offset);
        other.l_a = __shfl_xor_sync(~0U, state.l_a, offset);
        other.m_b = __shfl_xor_sync(~0U, state.m_b, offset);
        other.l_b = __shfl_xor_sync(~0U, state.l_b, offset);
        other.w = __shfl_xor_sync(~0U, state.w, offset);
        /* The lower lane goes first on both sides, so that both get the same bits. */
        const bool lower = (threadIdx.x & (unsigned)offset) == 0;
        state = lower ? skl_state_merge(state, other) : skl_state_merge(other, state);
    }
    return state;
}

__device__ inline bool first_lane(void)
{
    return threadIdx.x % LANES == 0;
}

/* ---- Teacher heads ------------------------------------------------------------------------------------------- */

/* The tile's next keys; behind the last ones there are none. */
template <int COLUMNS> __device__ inline tile_position next_keys(tile_position at)
{
    at.key_first += COLUMNS * LANES;
    return at;
}

/* LSEs of the group's heads as the caller gave them into lse [group][TILE]. */
__device__ inline void load_group_lse(skl_lse2 *lse, const skl_input &given, const tile_position &at, int64_t group)
{
    for (int64_t index = threadIdx.x; index < group * TILE; index += THREADS) {
        const int64_t row = at.query_first + index % TILE;
        if (row < at.in.queries.end)
            lse[index] = skl_lse2_of(skl_row_value(&given, &at.in.sequence, at.in.head * group + index / TILE, row));
    }
}

/* log2-sum-exp2 of every teacher head of the group into lse [group][TILE]. */
template <int COLUMNS, typename MEMORY>
static __device__ void compute_group_lse(skl_lse2 *lse, MEMORY &memory, pipeline<COLUMNS> &line,
                                         const skl_cuda_params &params, const tile_position &tile, int64_t group)
{
    const skl_problem &p = params.problem;
#pragma unroll 1
    for (int64_t h = 0; h < group; h++) {
        const int64_t head = tile.in.head * group + h;
        memory.states.clear();
        tile_position at = tile;
        line.begin([&] { return source_of<false>(at, TEACHER, head); });
#pragma unroll 1
        while (at.key_first < at.in.keys.end) {
            fragment<COLUMNS> x;
            line.prefetch([&] { return source_of<false>(next_keys<COLUMNS>(at), TEACHER, head); });
            line.multiply_tile(x);
            scale_products(x, at.in.sides[TEACHER]);
            add_tile(memory, x, x, p, at);
            at.key_first += COLUMNS * LANES;
        }
#pragma unroll 1
        for (int i = 0; i < ROWS; i++) {
            const skl_row_state row = row_merge(memory.states.get(i));
            if (first_lane())
                lse[h * TILE + row_of(i)] =
                    skl_lse2_split(row.l_a == 0.0F ? -INFINITY : (double)row.m_a + log2((double)row.l_a));
        }
    }
}

#endif
