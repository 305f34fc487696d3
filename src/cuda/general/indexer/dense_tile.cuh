/* Logit tiles of a dense indexer: the pipeline of the general kernels runs through the teacher heads and then through
 * the index heads of a tile. */
#ifndef SKL_CUDA_GENERAL_INDEXER_DENSE_TILE_CUH
#define SKL_CUDA_GENERAL_INDEXER_DENSE_TILE_CUH

#include "cuda/general/tile.cuh"
#include "cuda/common/indexer/row_chunks.h"

/* Whether an index head's dot product is active: the ReLU passes it. NaN is active, so that it reaches the result. */
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

template <bool DK>
__device__ inline tile_operands index_operands(const tile_position &tile, int64_t index_heads, int64_t g)
{
    return operands_of<DK>(tile, STUDENT, tile.work.head * index_heads + g);
}

/* x = log2 mean_h P_h over the heads of the teacher group. The pipeline must have begun with the first head; after
 * the last one it continues with the operands that next() returns. lse_of(h) returns the LSE of head h for query
 * threadIdx.x of the tile; `lse` is shared memory for these. */
template <int COLUMNS, typename LSE, typename OPERANDS>
__device__ inline void teacher_mean(fragment<COLUMNS> &x, pipeline<COLUMNS> &pipe, const tile_position &tile,
                                    int64_t group, skl_lse2 (&lse)[TILE], LSE lse_of, OPERANDS next)
{
    const float lowest = -3e38F; /* finite: -inf - -inf would be NaN */
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
        pipe.prefetch([&] {
            return h + 1 < group ? operands_of<false>(tile, TEACHER, tile.work.head * group + h + 1) : next();
        });
        pipe.multiply_tile(z);
        scale_products(z, tile.work.sides[TEACHER]);
        if (threadIdx.x < TILE && tile.query_first + threadIdx.x < tile.work.queries.end)
            lse[threadIdx.x] = lse_of(h);
        __syncthreads();
#pragma unroll
        for (int i = 0; i < ROWS; i++)
#pragma unroll
            for (int j = 0; j < COLUMNS; j++)
                add_in_log_space(x.at[i][j], sum.at[i][j], log_probability(z.at[i][j], lse[acc_row(i)]));
    }
    const float mean = 1.0F / (float)group;
#pragma unroll
    for (int i = 0; i < ROWS; i++)
#pragma unroll
        for (int j = 0; j < COLUMNS; j++)
            x.at[i][j] += log2f(sum.at[i][j] * mean);
}

/* z = dot products of index head g, the pipeline's current tile; next() returns the operands of the next one. Loads
 * the weights of the queries for head g into `weights`. */
template <int COLUMNS, typename OPERANDS>
__device__ inline void index_dots(fragment<COLUMNS> &z, pipeline<COLUMNS> &pipe, const skl_cuda_params &params,
                                  const tile_position &tile, int64_t g, float (&weights)[TILE], OPERANDS next)
{
    pipe.prefetch(next);
    pipe.multiply_tile(z);
    const int64_t query = tile.query_first + threadIdx.x;
    if (threadIdx.x < TILE && query < tile.work.queries.end)
        weights[threadIdx.x] = index_weight(params, tile.work.sequence, tile.work.head, g, query);
    __syncthreads();
}

/* y = logits of the indexer in base 2. The pipeline must have begun with the first index head; after the last one it
 * continues with the operands that next() returns. */
template <int COLUMNS, typename OPERANDS>
__device__ inline void index_logits(fragment<COLUMNS> &y, pipeline<COLUMNS> &pipe, const skl_cuda_params &params,
                                    const tile_position &tile, float (&weights)[TILE], OPERANDS next)
{
    const int heads = (int)params.problem.index_heads;
    const bool linear = params.problem.index_linear != 0;
    clear(y);
#pragma unroll 1
    for (int g = 0; g < heads; g++) {
        fragment<COLUMNS> z;
        index_dots(z, pipe, params, tile, g, weights,
                   [&] { return g + 1 < heads ? index_operands<false>(tile, heads, g + 1) : next(); });
#pragma unroll
        for (int i = 0; i < ROWS; i++)
#pragma unroll
            for (int j = 0; j < COLUMNS; j++)
                if (index_active(linear, z.at[i][j]))
                    y.at[i][j] = fmaf(weights[acc_row(i)], z.at[i][j], y.at[i][j]);
    }
    const float scale = tile.work.sides[STUDENT].scale;
#pragma unroll
    for (int i = 0; i < ROWS; i++)
#pragma unroll
        for (int j = 0; j < COLUMNS; j++)
            y.at[i][j] = __fmul_rn(y.at[i][j], scale);
}

#endif
