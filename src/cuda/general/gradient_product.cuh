/* Last product of the general backward kernels: the gradient of a logit tile times the streamed rows. */
#ifndef SKL_CUDA_GENERAL_GRADIENT_PRODUCT_CUH
#define SKL_CUDA_GENERAL_GRADIENT_PRODUCT_CUH

#include "cuda/general/tile.cuh"

constexpr int SLICE = TILE;                    /* dimensions of the gradient that are computed together */
constexpr int COLUMNS = 4;                     /* streamed rows per thread */
constexpr int STREAMED_ROWS = COLUMNS * LANES; /* streamed rows per tile */

/* [streamed row][stationary row] */
typedef float gradient_tile[step_offset(STREAMED_ROWS)];

__device__ inline void store_gradients(float *to, const fragment<COLUMNS> &g)
{
#pragma unroll
    for (int j = 0; j < COLUMNS; j++)
#pragma unroll
        for (int i = 0; i < ROWS; i += 4)
            *(float4 *)&to[step_offset(acc_column(j)) + acc_row(i)] =
                make_float4(g.at[i][j], g.at[i + 1][j], g.at[i + 2][j], g.at[i + 3][j]);
}

/* sum += gradient . streamed rows, SLICE dimensions from dim_first. `rows` holds the first stage of streamed rows.
 * MASKED: a gradient of 0 is skipped, because a masked row may not be finite. */
template <bool MASKED, typename MEMORY>
__device__ inline void multiply_gradient(fragment<8> &sum, pipeline<COLUMNS> &pipe, MEMORY &memory,
                                         raw_quad (&rows)[TILE_QUADS], skl_dtype dtype, int dim_first)
{
#pragma unroll 1
    for (int step = 0; step < STREAMED_ROWS; step += STAGE_STEPS, pipe.stage ^= 1) {
        float *const streamed = memory.pipe.stages.streamed[pipe.stage];
        store_steps(streamed, rows, dtype);
        __syncthreads(); /* the stage and memory.gradient are complete */
        if (step + STAGE_STEPS < STREAMED_ROWS)
            load_steps(rows, memory.streamed, step + STAGE_STEPS, dim_first);
        multiply_steps<MASKED>(sum, rows_of(memory.gradient + step_offset(step)), columns_of(streamed));
    }
}

/* Stores the sums of rows [row_first, row_end) and of dimensions from c_first to `grad`, whose head begins at element
 * `base`. */
__device__ inline void store_sums(fragment<8> &sum, const skl_output &grad, skl_dtype dtype, int64_t base,
                                  int64_t row_first, int64_t row_end, int64_t c_first, int64_t dim)
{
#pragma unroll 1
    for (int i = 0; i < ROWS; i++, rotate_rows(sum)) {
        const int64_t row = row_first + acc_row(i);
        const int64_t offset = base + row * grad.stride_row;
#pragma unroll
        for (int j = 0; j < 8; j++) {
            const int64_t c = c_first + acc_column(j);
            if (row < row_end && c < dim)
                skl_store(grad.data, dtype, offset + c, sum.at[0][j]);
        }
    }
}

/* Keys of a sequence that have a gradient: padding keys get 0. */
__device__ inline int64_t key_rows(const skl_problem &p, const skl_sequence &s)
{
    return p.packed ? s.key_count : p.len_k;
}

#endif
