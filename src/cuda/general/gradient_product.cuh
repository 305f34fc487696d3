/* Products of the general backward kernels: a tile of the logits' gradient times the rows that made the logits. */
#ifndef SKL_CUDA_GENERAL_GRADIENT_PRODUCT_CUH
#define SKL_CUDA_GENERAL_GRADIENT_PRODUCT_CUH

#include "cuda/general/tile.cuh"

constexpr int SLICE = TILE;               /* dimensions of the gradient that a launch gives */
constexpr int COLUMNS = 4;                /* streamed rows of a thread */
constexpr int STREAMED = COLUMNS * LANES; /* and of a block */

/* [streamed row][own row] */
typedef float gradient_tile[step_at(STREAMED)];

__device__ inline void store_gradients(float *to, const fragment<COLUMNS> &g)
{
#pragma unroll
    for (int j = 0; j < COLUMNS; j++)
#pragma unroll
        for (int i = 0; i < ROWS; i += 4)
            *(float4 *)&to[step_at(acc_column(j)) + row_of(i)] =
                make_float4(g.at[i][j], g.at[i + 1][j], g.at[i + 2][j], g.at[i + 3][j]);
}

/* sum += gradient . streamed rows. The first chunk of them has been loaded. */
template <bool MASKED, typename MEMORY>
__device__ inline void multiply_gradient(fragment<8> &sum, pipeline<COLUMNS> &line, MEMORY &memory,
                                         raw_quad (&rows)[OWN_QUADS], skl_dtype dtype, int dim_first)
{
#pragma unroll 1
    for (int step = 0; step < STREAMED; step += CHUNK, line.chunk ^= 1) {
        float *const streamed = memory.stage.chunks.streamed[line.chunk];
        store_steps(streamed, rows, dtype);
        __syncthreads(); /* also: the gradient is complete */
        if (step + CHUNK < STREAMED)
            load_steps(rows, memory.streamed, step + CHUNK, dim_first);
        multiply<MASKED>(sum, memory.gradient + step_at(step), streamed);
    }
}

/* Sums of the own rows from `first` on, dimensions from c_first on; the tensor's rows begin at element `base`. */
__device__ inline void store_sums(fragment<8> &sum, const skl_output &grad, skl_dtype dtype, int64_t base,
                                  int64_t first, int64_t row_end, int64_t c_first, int64_t dim)
{
#pragma unroll 1
    for (int turn = 0; turn < ROWS; turn++, rotate_rows(sum)) {
        const int64_t row = first + row_of(turn);
        const int64_t offset = base + row * grad.stride_row;
#pragma unroll
        for (int j = 0; j < 8; j++) {
            const int64_t c = c_first + acc_column(j);
            if (row < row_end && c < dim)
                skl_store(grad.data, dtype, offset + c, sum.at[0][j]);
        }
    }
}

__device__ inline int64_t key_rows(const skl_problem &p, const skl_sequence &s)
{
    return p.packed ? s.key_count : p.len_k; /* padding keys get a gradient of 0 */
}

#endif
