/* Row states of the general forward kernels, and the LSEs of a teacher group. */
#ifndef SKL_CUDA_GENERAL_ROW_STATE_CUH
#define SKL_CUDA_GENERAL_ROW_STATE_CUH

#include "cuda/common/row_state.cuh"
#include "cuda/general/tile.cuh"

/* Adds the pairs of logits a(j) and b(j) that sees(j) selects, j < COUNT, to a row state. If `entropy` is not NULL,
 * also updates the sum from which the entropy of A follows: e = sum 2^(a - m_a) (a - m_a). */
template <int COUNT, typename A, typename B, typename SEES>
__device__ inline void add_pairs(skl_row_state &state, float *entropy, A a, B b, SEES sees)
{
    float m_a = state.m_a, m_b = state.m_b;
    bool any = false;
#pragma unroll
    for (int j = 0; j < COUNT; j++) {
        const bool seen = sees(j);
        m_a = seen ? fmaxf(m_a, a(j)) : m_a;
        m_b = seen ? fmaxf(m_b, b(j)) : m_b;
        any = any || seen;
    }
    if (!any)
        return;
    const float d = state.l_a == 0.0F ? 0.0F : state.m_a - m_a;
    float e = entropy != NULL ? exp2f(d) * fmaf(state.l_a, d, *entropy) : 0.0F;
    state = skl_state_move(state, m_a, m_b);
#pragma unroll
    for (int j = 0; j < COUNT; j++) {
        const bool seen = sees(j);
        const float shifted_a = a(j) - m_a;
        const float shifted_b = b(j) - m_b;
        const float exp_a = seen ? ex2(shifted_a) : 0.0F;
        state.l_a += exp_a;
        state.l_b += seen ? ex2(shifted_b) : 0.0F;
        state.w = fmaf(exp_a, seen ? shifted_a - shifted_b : 0.0F, state.w);
        e = fmaf(exp_a, seen ? shifted_a : 0.0F, e);
    }
    if (entropy != NULL)
        *entropy = e;
}

__device__ inline double lse2_of_state(const skl_row_state &state)
{
    return state.l_a == 0.0F ? -INFINITY : (double)state.m_a + log2((double)state.l_a);
}

/* Row states of each thread's rows over the columns of that thread. They are in shared memory, because the products
 * need the registers. A state of five floats makes no bank conflicts. */
typedef skl_row_state thread_states[ROWS][THREADS];

__device__ inline void clear(thread_states &states)
{
    for (int i = 0; i < ROWS; i++)
        states[i][threadIdx.x] = skl_state_empty();
}

/* Adds a tile of the logits of A and B to the thread's states. sees(i, j): whether row i attends to column j. */
template <int COLUMNS, typename SEES>
__device__ inline void add_columns(thread_states &states, const fragment<COLUMNS> &a, const fragment<COLUMNS> &b,
                                   SEES sees)
{
#pragma unroll
    for (int i = 0; i < ROWS; i++) {
        skl_row_state state = states[i][threadIdx.x];
        add_pairs<COLUMNS>(
            state, NULL, [&](int j) { return a.at[i][j]; }, [&](int j) { return b.at[i][j]; },
            [&](int j) { return sees(i, j); });
        states[i][threadIdx.x] = state;
    }
}

/* Adds a tile of the logits of A and B to memory.states. */
template <int COLUMNS, typename MEMORY>
static __device__ void add_tile(MEMORY &memory, const fragment<COLUMNS> &a, const fragment<COLUMNS> &b,
                                const skl_problem &p, const tile_position &tile)
{
    if (all_visible(p, tile, TILE, COLUMNS * LANES)) {
        add_columns(memory.states, a, b, [](int, int) { return true; });
        return;
    }
    find_spans(memory.spans, p, tile);
    add_columns(memory.states, a, b, [&](int i, int j) { return sees(memory.spans[acc_row(i)], acc_column(j)); });
}

/* ---- Reductions over the lanes of a row --------------------------------------------------------------------- */

__device__ inline float row_sum(float value)
{
    for (int offset = LANES / 2; offset > 0; offset /= 2)
        value += __shfl_xor_sync(~0U, value, offset);
    return value;
}

/* Merges the states of COUNT neighboring lanes; each of them gets the same bits. */
template <int COUNT = LANES> __device__ inline skl_row_state row_merge(skl_row_state state)
{
#pragma unroll 1
    for (int offset = COUNT / 2; offset > 0; offset /= 2)
        state = tensor_core::merge_with_lane(state, tensor_core::shuffle_xor(state, offset), offset);
    return state;
}

__device__ inline bool first_lane(void)
{
    return threadIdx.x % LANES == 0;
}

/* ---- LSEs of a teacher group -------------------------------------------------------------------------------- */

/* Returns the tile of the same queries and the next keys. After the last keys, all its rows read as 0. */
template <int COLUMNS> __device__ inline tile_position next_key_tile(tile_position tile)
{
    tile.key_first += COLUMNS * LANES;
    return tile;
}

/* log2-sum-exp2 of each teacher head of the group, given or computed: lse [group][TILE]. */
template <int COLUMNS, typename MEMORY>
static __device__ void find_group_lse(skl_lse2 *lse, MEMORY &memory, pipeline<COLUMNS> &pipe,
                                      const skl_cuda_params &params, const tile_position &first_tile, int64_t group)
{
    const skl_problem &p = params.problem;
    const skl_input &given = params.call.inputs.lse_t;
#pragma unroll 1
    for (int64_t h = 0; h < group; h++) {
        const int64_t head = first_tile.work.head * group + h, query = first_tile.query_first + threadIdx.x;
        if (given.data != NULL) {
            if (threadIdx.x < TILE && query < first_tile.work.queries.end)
                lse[h * TILE + threadIdx.x] =
                    skl_lse2_of(skl_row_value(&given, &first_tile.work.sequence, head, query));
            continue;
        }
        clear(memory.states);
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
            const skl_row_state row = row_merge(memory.states[i][threadIdx.x]);
            const double lse2 = lse2_of_state(row);
            const bool sink = has_sink(p, tile.work.sequence, tile.query_first + acc_row(i));
            if (first_lane())
                lse[h * TILE + acc_row(i)] = skl_lse2_split(
                    sink ? skl_lse_with_sink(lse2 * SKL_LN2_DOUBLE, (double)params.call.inputs.sink_t[head]) *
                               SKL_LOG2E_DOUBLE
                         : lse2);
        }
    }
}

#endif
