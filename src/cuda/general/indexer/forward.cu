/* General forward of an indexer: KL, LSEs, entropies and mass of each row, with f32 FFMAs.
 *
 *   block   one tile of queries at a time (tile.cuh), grid stride over the tiles; dense: 1 resident per SM, sparse:
 * 2, with a pooled teacher 1 shared  81 KB: index_memory, row states of all threads: the products need the registers
 *
 *   each teacher head   its LSE over the keys, unless given
 *   for each 64 keys    all teacher heads -> x = log2 of their mean, all index heads -> y -> row states
 *
 * x and y go through shared memory, from one thread per pair to 2 (dense) or 32 (sparse) threads per row. */
#include "cuda/common/indexer/write_row.cuh"
#include "cuda/general/indexer/logits.cuh"

namespace indexer_forward
{

constexpr int X_STRIDE = KEY_TILE + 1;
static_assert(sizeof(operand_stages) >= TILE * X_STRIDE * sizeof(float), "x fits into the stages");

template <int QUERIES> struct forward_memory {
    index_memory<QUERIES> index;
    skl_row_state states[THREADS];
    float entropies[THREADS]; /* see add_pairs() */
};

/* LSEs of the tile's queries for each teacher head: given, or computed and in `computed` [head][query]. */
template <int QUERIES> struct head_lses {
    const skl_cuda_params &params;
    const index_tile &tile;
    skl_lse2 *computed;

    __device__ skl_lse2 operator()(int h, int query) const
    {
        const skl_input &given = params.call.inputs.lse_t;
        const int64_t head = tile.head * skl_group_size(&params.problem) + h;
        return given.data != NULL ? skl_lse2_of(skl_row_value(&given, &tile.sequence, head, tile.query_first + query))
                                  : computed[(int64_t)h * QUERIES + query];
    }
};

/* log2-sum-exp2 of each teacher head, two threads per row of a product. */
template <bool MAY_POOL, int QUERIES>
static __device__ void compute_lses(skl_lse2 *computed, forward_memory<QUERIES> &shared, const skl_problem &p)
{
    index_memory<QUERIES> &memory = shared.index;
    skl_row_state &state = shared.states[threadIdx.x];
    const int group = (int)skl_group_size(&p);
    const int row = (int)threadIdx.x / 2, lane = (int)threadIdx.x % 2, query = query_of_row<QUERIES>(row);
    const float *const dots = &memory.dots[row * DOT_STRIDE];
#pragma unroll 1
    for (int h = 0, heads; h < group; h += heads) {
        state = skl_state_empty();
        heads = teacher_heads_per_product(memory, group, h);
        for_each_teacher_keys<MAY_POOL>(memory, p, [&](int64_t) {
            const auto x = [&](int j) { return dots[j * 2 + lane]; };
            teacher_logits(memory, group, h, heads);
            if (row < product_rows(memory, heads))
                add_pairs<KEY_TILE / 2>(state, NULL, x, x,
                                        [&](int j) { return teacher_sees_key(memory, query, j * 2 + lane); });
        });
        const skl_row_state merged = row_merge<2>(state);
        if (lane == 0 && row < product_rows(memory, heads))
            computed[(int64_t)(h + head_of_row<QUERIES>(row)) * QUERIES + query] =
                skl_lse2_split(lse2_of_state(merged));
    }
    __syncthreads(); /* all threads may read the LSEs */
}

template <bool MAY_POOL, int QUERIES>
static __device__ void forward_tile(const index_params &params, forward_memory<QUERIES> &shared, skl_lse2 *computed)
{
    constexpr int ROW_LANES = QUERIES == SPARSE ? 32 : THREADS / QUERIES;
    const skl_problem &p = params.problem;
    index_memory<QUERIES> &memory = shared.index;
    const index_tile &tile = memory.tile;
    const bool with_teacher = !skl_only_lse_s(&params.call), reverse = p.direction == SKL_KL_REVERSE;
    const head_lses<QUERIES> lse_of = {params, tile, computed};
    if (with_teacher && params.call.inputs.lse_t.data == NULL)
        compute_lses<MAY_POOL>(computed, shared, p);

    const int query = (int)threadIdx.x / ROW_LANES, lane = (int)threadIdx.x % ROW_LANES;
    const bool has_row = query < tile.queries;
    float *const x = memory.stages.stationary[0], *const y = memory.dots;
    skl_row_state &state = shared.states[threadIdx.x];
    float &entropy = shared.entropies[threadIdx.x];
    state = skl_state_empty();
    entropy = 0.0F;
    for_each_keys(memory, 0, KEY_TILE, [&](int64_t) {
        index_logits<MAY_POOL>(memory, params, with_teacher, lse_of, [&](int i, int n, float x_in, float y_in) {
            x[i * X_STRIDE + n] = reverse ? y_in : x_in;
            y[i * DOT_STRIDE + n] = reverse ? x_in : y_in;
        });
        __syncthreads(); /* x and y are complete */
        if (has_row)
            add_pairs<KEY_TILE / ROW_LANES>(
                state, &entropy, [&](int j) { return x[query * X_STRIDE + j * ROW_LANES + lane]; },
                [&](int j) { return y[query * DOT_STRIDE + j * ROW_LANES + lane]; },
                [&](int j) { return sees_key(memory, query, j * ROW_LANES + lane); });
    });

    /* Row state of A against all-zero logits, as skl_state_entropy() expects it. */
    const skl_row_state alone = {state.m_a, state.l_a, 0.0F, state.l_a, entropy};
    const skl_row_state row = row_merge<ROW_LANES>(state), row_alone = row_merge<ROW_LANES>(alone);
    float mean_lse_t = 0.0F;
    if (has_row && lane == 0)
        mean_lse_t = write_row(params, tile.sequence, tile.head, tile.query_first + query, row, row_alone);
    mean_lse_t = __shfl_sync(~0U, mean_lse_t, 0, ROW_LANES);
    const int group = (int)skl_group_size(&p);
    for (int h = lane; has_row && params.call.rows.lse_t.data != NULL && h < group; h += ROW_LANES)
        write_lse_t(params, tile.sequence, tile.head * group + h, tile.query_first + query, lse_of(h, query),
                    mean_lse_t);
}

/* MAY_POOL: the kernel has the code for pooled teachers, whose registers leave no room for a second block. */
template <int QUERIES, bool MAY_POOL>
static __global__ void __launch_bounds__(THREADS, MAY_POOL ? 1 : 2)
    forward(const __grid_constant__ index_params params)
{
    extern __shared__ __align__(16) unsigned char raw[];
    forward_memory<QUERIES> &memory = *(forward_memory<QUERIES> *)(void *)raw;
    const skl_problem &p = params.problem;
    const int64_t tiles = p.batch * p.heads_s * skl_ceil_div(p.len_q, QUERIES);
    skl_lse2 *const computed = (skl_lse2 *)params.call.workspace + (int64_t)blockIdx.x * skl_group_size(&p) * QUERIES;
#pragma unroll 1
    for (int64_t n = blockIdx.x; n < tiles; n += gridDim.x)
        if (begin_tile(memory.index, params, tiles - 1 - n)) /* causal: longest first */
            forward_tile<MAY_POOL>(params, memory, computed);
}

template <int QUERIES, bool MAY_POOL>
static cudaError_t launch_forward(const skl_cuda_params *params, const skl_cuda_launch *launch)
{
    record_launch("cuda_general", SKL_VARIANT_ROWS, 1);
    const index_params of_launch = {*params, (float2 *)(void *)((char *)params->call.workspace + launch->pooled_at)};
    return launch_general(forward<QUERIES, MAY_POOL>, of_launch, launch, sizeof(forward_memory<QUERIES>));
}

extern "C" cudaError_t skl_cuda_general_dense_rows(const skl_cuda_params *params, const skl_cuda_launch *launch)
{
    return launch_forward<DENSE, true>(params, launch);
}

extern "C" cudaError_t skl_cuda_general_sparse_rows(const skl_cuda_params *params, const skl_cuda_launch *launch)
{
    return skl_is_pooled(&params->problem) ? launch_forward<SPARSE, true>(params, launch)
                                           : launch_forward<SPARSE, false>(params, launch);
}

} // namespace indexer_forward
