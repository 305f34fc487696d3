/* Logits of an indexer's tile (tile.cuh): of the teacher, as one target, and of the student.
 *
 * With a pooled teacher (skl_pool), the tile has blocks of keys, and its target is
 *
 *   for each 64 keys of the tile's 64 blocks    all teacher heads -> log2 P_j, to shared memory
 *                                               log2 M_b of the blocks, to the block's scratch in the workspace
 *
 * so that nothing grows with the number of blocks. */
#ifndef SKL_CUDA_GENERAL_INDEXER_LOGITS_CUH
#define SKL_CUDA_GENERAL_INDEXER_LOGITS_CUH

#include "cuda/general/indexer/tile.cuh"

struct index_params : skl_cuda_params {
    float2 *pooled; /* pooled teacher: [block of threads][query of a tile][block of keys]; see add_in_log_space */
};

static_assert(SKL_POOL_SCRATCH_SIZE(TILE) == sizeof(float2[TILE][KEY_TILE]), "cuda/select plans the workspace");

/* ---- Pairs of a thread ---------------------------------------------------------------------------------------- */

/* Each pair of a query and one of memory.keys is in the registers of one thread; with one query, four threads share
 * the heads of a pair. */
template <int QUERIES> struct thread_pairs {
    static constexpr int SHARERS = QUERIES == SPARSE ? THREADS / KEY_TILE : 1;
    static constexpr int COUNT = QUERIES * KEY_TILE * SHARERS / THREADS;
    typedef float values[COUNT];

    __device__ static int key()
    {
        return (int)threadIdx.x / SHARERS % KEY_TILE;
    }

    __device__ static int sharer()
    {
        return (int)threadIdx.x % SHARERS;
    }

    __device__ static int query(int pair)
    {
        return QUERIES == SPARSE ? 0 : pair * (THREADS / KEY_TILE) + (int)threadIdx.x / KEY_TILE;
    }

    /* Calls add(pair, row) for the rows of a product of `heads` heads that the thread adds to its pairs. */
    template <typename ADD> __device__ static void for_rows(int heads, ADD add)
    {
        /* Loops over heads are not unrolled: sm_120 would spill registers. */
#pragma unroll
        for (int pair = 0; pair < COUNT; pair++)
#pragma unroll 1
            for (int head = sharer(); head < (QUERIES == SPARSE ? heads : 1); head += SHARERS)
                add(pair, QUERIES == SPARSE ? head : query(pair));
    }
};

/* ---- Teacher -------------------------------------------------------------------------------------------------- */

/* Initial value of maxima and sums in log space. For a sum it is finite: -inf - -inf would be NaN. */
__device__ inline float nothing_in_log_space(bool largest)
{
    return largest ? -INFINITY : -3e38F;
}

/* max(x, z) that propagates NaN. */
__device__ inline float larger_or_nan(float x, float z)
{
    return z > x || isnan(z) ? z : x;
}

/* x = log2 mean_h P_h, or log2 max_h P_h, over the heads of the teacher group. lse_of(h, query) returns the LSE of a
 * teacher head. */
template <int QUERIES, typename LSE>
__device__ inline void teacher_pairs(typename thread_pairs<QUERIES>::values &x, index_memory<QUERIES> &memory,
                                     const skl_problem &p, LSE lse_of)
{
    typedef thread_pairs<QUERIES> pairs;
    const int group = (int)skl_group_size(&p), row = (int)threadIdx.x;
    const bool largest = p.pool_heads == SKL_POOL_HEADS_MAX;
    typename pairs::values sum;
#pragma unroll
    for (int pair = 0; pair < pairs::COUNT; pair++) {
        x[pair] = nothing_in_log_space(largest);
        sum[pair] = 0.0F;
    }
#pragma unroll 1
    for (int h = 0, heads; h < group; h += heads) {
        heads = teacher_heads_per_product(memory, group, h);
        teacher_logits(memory, group, h, heads);
        if (row < product_rows(memory, heads))
            memory.lse[row] = lse_of(h + head_of_row<QUERIES>(row), query_of_row<QUERIES>(row));
        __syncthreads();
        pairs::for_rows(heads, [&](int pair, int of) {
            const float log_p = log_probability(memory.dots[of * DOT_STRIDE + pairs::key()], memory.lse[of]);
            if (largest)
                x[pair] = larger_or_nan(x[pair], log_p);
            else
                add_in_log_space(x[pair], sum[pair], log_p);
        });
        __syncthreads(); /* no thread reads this product any more */
    }
    const float mean = 1.0F / (float)group;
#pragma unroll
    for (int pair = 0; pair < pairs::COUNT; pair++) {
#pragma unroll
        for (int offset = 1; offset < pairs::SHARERS; offset *= 2) {
            const float other_x = __shfl_xor_sync(~0U, x[pair], offset);
            const float other_sum = __shfl_xor_sync(~0U, sum[pair], offset), larger = larger_or_nan(x[pair], other_x);
            sum[pair] = sum[pair] * ex2(x[pair] - larger) + other_sum * ex2(other_x - larger);
            x[pair] = larger;
        }
        x[pair] = largest ? x[pair] : x[pair] + log2f(sum[pair] * mean);
    }
}

/* ---- Pooled teacher ------------------------------------------------------------------------------------------- */

/* Adds the log2 P_j in memory.dots, [query][key], to M of their blocks. `first`: number of the first key among those
 * of memory.blocks, `size` keys each. */
template <int QUERIES>
__device__ inline void pool_keys(float2 *pooled, const index_memory<QUERIES> &memory, int64_t first, int64_t size,
                                 bool largest)
{
    const int begin = (int)(first / size), end = (int)((first + KEY_TILE - 1) / size) + 1;
    const int count = min(end, KEY_TILE) - begin;
#pragma unroll 1
    for (int item = (int)threadIdx.x; item < count * QUERIES; item += THREADS) {
        const int query = item / count, block = begin + item % count;
        const int n_begin = (int)skl_max(0, block * size - first);
        const int n_end = (int)skl_min(KEY_TILE, (block + 1) * size - first);
        float2 &to = pooled[query * KEY_TILE + block];
        float2 sum = to;
        for (int n = n_begin; n < n_end; n++) {
            const float log_p = memory.dots[query * DOT_STRIDE + n];
            if (!teacher_sees_key(memory, query, n))
                continue;
            if (largest)
                sum.x = larger_or_nan(sum.x, log_p);
            else
                add_in_log_space(sum.x, sum.y, log_p);
        }
        to = sum;
    }
}

/* x = log2 M_b of the blocks in memory.keys. */
template <int QUERIES, typename LSE>
__device__ inline void pooled_pairs(typename thread_pairs<QUERIES>::values &x, index_memory<QUERIES> &memory,
                                    const index_params &params, LSE lse_of)
{
    typedef thread_pairs<QUERIES> pairs;
    const skl_problem &p = params.problem;
    const bool largest = p.pool == SKL_POOL_MAX;
    const int64_t size = skl_min(p.pool_size, p.len_k);
    const int block_count = memory.count;
    float2 *const pooled = params.pooled + (int64_t)blockIdx.x * QUERIES * KEY_TILE;
    for (int item = (int)threadIdx.x; item < QUERIES * KEY_TILE; item += THREADS)
        pooled[item] = make_float2(nothing_in_log_space(largest), 0.0F);
    if (threadIdx.x < KEY_TILE)
        memory.blocks[threadIdx.x] = memory.keys[threadIdx.x];
    __syncthreads();
    const auto key_at = [&](int64_t n) { return key_of_block(memory, memory.blocks[n / size], n, size); };
    for_each_of(memory, 0, KEY_TILE, block_count * size, key_at, [&](int64_t first) {
        teacher_pairs(x, memory, p, lse_of);
#pragma unroll
        for (int pair = 0; pair < pairs::COUNT; pair++)
            if (pairs::sharer() == 0)
                memory.dots[pairs::query(pair) * DOT_STRIDE + pairs::key()] = x[pair];
        __syncthreads(); /* log2 P is complete */
        pool_keys(pooled, memory, first, size, largest);
    });
    if (threadIdx.x < KEY_TILE)
        memory.keys[threadIdx.x] = memory.blocks[threadIdx.x];
#pragma unroll
    for (int pair = 0; pair < pairs::COUNT; pair++) {
        const float2 sum = pooled[pairs::query(pair) * KEY_TILE + pairs::key()];
        x[pair] = largest ? sum.x : sum.x + log2f(sum.y);
    }
    __syncthreads(); /* memory.keys are the blocks again */
}

/* ---- Student -------------------------------------------------------------------------------------------------- */

/* y = logit of the indexer in base 2. */
template <int QUERIES>
__device__ inline void student_pairs(typename thread_pairs<QUERIES>::values &y, index_memory<QUERIES> &memory,
                                     const skl_cuda_params &params)
{
    typedef thread_pairs<QUERIES> pairs;
    const int index_heads = (int)params.problem.index_heads;
    const bool linear = params.problem.index_linear != 0;
#pragma unroll
    for (int pair = 0; pair < pairs::COUNT; pair++)
        y[pair] = 0.0F;
#pragma unroll 1
    for (int g = 0; g < index_heads; g += HEADS<QUERIES>) {
        const int heads = min(index_heads - g, HEADS<QUERIES>);
        index_dots(memory, params, g, heads);
        pairs::for_rows(heads, [&](int pair, int of) {
            const float dot = memory.dots[of * DOT_STRIDE + pairs::key()];
            y[pair] = index_active(linear, dot) ? fmaf(memory.weights[of], dot, y[pair]) : y[pair];
        });
        __syncthreads(); /* no thread reads this product any more */
    }
    const float scale = memory.sides[STUDENT].scale;
#pragma unroll
    for (int pair = 0; pair < pairs::COUNT; pair++) {
#pragma unroll
        for (int offset = 1; offset < pairs::SHARERS; offset *= 2)
            y[pair] += __shfl_xor_sync(~0U, y[pair], offset);
        y[pair] = __fmul_rn(y[pair], scale);
    }
}

/* ---- Both ----------------------------------------------------------------------------------------------------- */

/* Calls use(query, n, x, y) for each visible pair of the tile's queries and memory.keys: x = log2 of the teacher's
 * target, y = logit of the indexer in base 2; without the teacher x = y. MAY_POOL: the teacher may be pooled. */
template <bool MAY_POOL, int QUERIES, typename LSE, typename USE>
__device__ inline void index_logits(index_memory<QUERIES> &memory, const index_params &params, bool with_teacher,
                                    LSE lse_of, USE use)
{
    typedef thread_pairs<QUERIES> pairs;
    typename pairs::values x, y;
    if (MAY_POOL && with_teacher && skl_is_pooled(&params.problem))
        pooled_pairs(x, memory, params, lse_of);
    else if (with_teacher)
        teacher_pairs(x, memory, params.problem, lse_of);
    student_pairs(y, memory, params);
#pragma unroll
    for (int pair = 0; pair < pairs::COUNT; pair++)
        if (pairs::sharer() == 0 && sees_key(memory, pairs::query(pair), pairs::key()))
            use(pairs::query(pair), pairs::key(), with_teacher ? x[pair] : y[pair], y[pair]);
}

#endif
