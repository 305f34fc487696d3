/* Tiles of logits of an indexer, dense: heads of the teacher and of the indexer after one another, on the pipeline of
 * the general kernels. */
#ifndef SKL_CUDA_GENERAL_INDEXER_DENSE_TILE_CUH
#define SKL_CUDA_GENERAL_INDEXER_DENSE_TILE_CUH

#include "cuda/general/tile.cuh"
#include "cuda/common/indexer/row_chunks.h"

/* Whether a dot of an index head passes the ReLU; NaN does, to be seen. */
__device__ inline bool index_active(bool linear, float dot)
{
    return linear || !(dot <= 0.0F);
}

__device__ inline float index_weight(const skl_cuda_params &params, const skl_sequence &s, int64_t head, int64_t g,
                                     int64_t query)
{
    const skl_input &w = params.call.inputs.w_s;
    return skl_load(w.data, params.problem.dtype_w, SKL_ROW(w, s.batch, head, s.query_begin + query) + g);
}

template <bool KEYS>
__device__ inline tile_source index_source(const tile_position &at, int64_t index_heads, int64_t g)
{
    return source_of<KEYS>(at, STUDENT, at.in.head * index_heads + g);
}

/* x = log2 of the mean of the heads' probabilities. The tile at hand is that of the first head, what after() gives
 * follows the last one. lse_of(h): LSE of the thread's query of the tile; `lse` is shared memory for them. */
template <int COLUMNS, typename LSE, typename SOURCE>
__device__ inline void teacher_mean(fragment<COLUMNS> &x, pipeline<COLUMNS> &line, const tile_position &at,
                                    int64_t group, skl_lse2 (&lse)[TILE], LSE lse_of, SOURCE after)
{
    const float lowest = -3e38F; /* finite: the difference of two infinities is none */
    fragment<COLUMNS> sum, z;
#pragma unroll
    for (int i = 0; i < ROWS; i++)
#pragma unroll
        for (int j = 0; j < COLUMNS; j++) {
            x.at[i][j] = lowest;
            sum.at[i][j] = 0.0F;
        }
#pragma unroll 1
    for (int h = 0; h < group; h++) {
        line.prefetch(
            [&] { return h + 1 < group ? source_of<false>(at, TEACHER, at.in.head * group + h + 1) : after(); });
        line.multiply_tile(z);
        scale_products(z, at.in.sides[TEACHER]);
        if (threadIdx.x < TILE && at.query_first + threadIdx.x < at.in.queries.end)
            lse[threadIdx.x] = lse_of(h);
        __syncthreads();
#pragma unroll
        for (int i = 0; i < ROWS; i++)
#pragma unroll
            for (int j = 0; j < COLUMNS; j++)
                add_in_log_space(x.at[i][j], sum.at[i][j], log_probability(z.at[i][j], lse[row_of(i)]));
    }
    const float mean = 1.0F / (float)group;
#pragma unroll
    for (int i = 0; i < ROWS; i++)
#pragma unroll
        for (int j = 0; j < COLUMNS; j++)
            x.at[i][j] += log2f(sum.at[i][j] * mean);
}

/* z = dots of index head g, the tile at hand; what next() gives follows. Leaves the queries' weights in `weights`. */
template <int COLUMNS, typename SOURCE>
__device__ inline void index_dots(fragment<COLUMNS> &z, pipeline<COLUMNS> &line, const skl_cuda_params &params,
                                  const tile_position &at, int64_t g, float (&weights)[TILE], SOURCE next)
{
    line.prefetch(next);
    line.multiply_tile(z);
    const int64_t query = at.query_first + threadIdx.x;
    if (threadIdx.x < TILE && query < at.in.queries.end)
        weights[threadIdx.x] = index_weight(params, at.in.sequence, at.in.head, g, query);
    __syncthreads();
}

/* y = the indexer's logits in base 2. The tile at hand is that of its first head, what after() gives follows the last
 * one. */
template <int COLUMNS, typename SOURCE>
__device__ inline void index_logits(fragment<COLUMNS> &y, pipeline<COLUMNS> &line, const skl_cuda_params &params,
                                    const tile_position &at, float (&weights)[TILE], SOURCE after)
{
    const int heads = (int)params.problem.index_heads;
    const bool linear = params.problem.index_linear != 0;
    clear(y);
#pragma unroll 1
    for (int g = 0; g < heads; g++) {
        fragment<COLUMNS> z;
        index_dots(z, line, params, at, g, weights,
                   [&] { return g + 1 < heads ? index_source<false>(at, heads, g + 1) : after(); });
#pragma unroll
        for (int i = 0; i < ROWS; i++)
#pragma unroll
            for (int j = 0; j < COLUMNS; j++)
                if (index_active(linear, z.at[i][j]))
                    y.at[i][j] = fmaf(weights[row_of(i)], z.at[i][j], y.at[i][j]);
    }
    const float scale = at.in.sides[STUDENT].scale;
#pragma unroll
    for (int i = 0; i < ROWS; i++)
#pragma unroll
        for (int j = 0; j < COLUMNS; j++)
            y.at[i][j] = __fmul_rn(y.at[i][j], scale);
}

#endif
