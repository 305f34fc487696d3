/* Tiles of the mma.sync kernels. A warp keeps 16 M stationary rows in registers, as A operands. The block streams
 * rows of the other tensor through shared memory, and each step multiplies the warp's rows by 8 or 16 of them.
 *
 *                  streamed rows, 64 per stage
 *                  +----+----+----+----+
 *   warp 0, 16 M   |    |    |    |    |   forward, dq: stationary = queries, streamed = keys
 *   warp 1         |    |    |    |    |   dk:          stationary = keys, streamed = queries
 *   ...            +----+----+----+----+
 *
 * Rows of both arguments of the KL, A and B, are kept and streamed together. Steps are short so that their logits fit
 * into registers next to the stationary rows and the sums. Blocks are small so that two or three share an SM: the
 * exponentials of one overlap the products of another.
 *
 * Shared memory holds rows of DIM 16-bit elements in 16-byte chunks, swizzled by chunk ^= row % 8: ldmatrix, plain or
 * transposed, has no bank conflicts. */
#ifndef SKL_CUDA_SM80_MMA_TILE_CUH
#define SKL_CUDA_SM80_MMA_TILE_CUH

#include "base/kl_math.h"
#include "cuda/common/linear_link.cuh"
#include "cuda/common/ptx.cuh"
#include "cuda/common/tile_scheduler.cuh"

namespace sm80
{

using namespace tensor_core;

constexpr int WARPS = 4;
constexpr int THREADS = 32 * WARPS;
constexpr int STAGES = 2;
template <int DIM> constexpr int STAGE_ROWS = DIM > 128 ? 32 : 64; /* consumer cards have 99 KB of shared memory */

/* ---- Operands in registers ---------------------------------------------------------------------------------- */

/* The warp's stationary rows as A operands. */
template <int DIM, int M> struct row_frags {
    uint32_t a[M][DIM / 16][4];
};

/* ---- Streamed rows ------------------------------------------------------------------------------------------ */

template <int DIM> struct smem_rows {
    uint4 chunks[STAGE_ROWS<DIM>][DIM / 8];
};

/* A pipeline stage: rows of both arguments. */
template <int DIM> struct smem_stage {
    smem_rows<DIM> a, b;
};

/* A copy of rows [first, first + ROWS) into swizzled rows of shared memory, by all of the block's THREAD_COUNT
 * threads. Rows >= count and dimensions >= from.dim become 0. */
template <int DIM, int ROWS, int THREAD_COUNT, typename ELEMENT> struct chunk_copy {
    static constexpr int CHUNKS = DIM / 8;
    static constexpr int AT_ONCE = THREAD_COUNT / CHUNKS; /* rows per copy of the whole block */
    static_assert(ROWS % AT_ONCE == 0 && AT_ONCE >= 4, "every thread copies the same number of chunks");
    const ELEMENT *source;
    int64_t stride;
    uint32_t target;
    int left;

    __device__ chunk_copy(uint4 (*to)[CHUNKS], const row_source<ELEMENT> &from, int first, int count, int thread)
        : stride(from.stride)
    {
        const int row = thread / CHUNKS, chunk = thread % CHUNKS;
        source = from.rows + (first + row) * from.stride + chunk * 8;
        target = shared_address(&to[row][chunk ^ (row & 7)]);
        left = chunk * 8 < from.dim ? count - first - row : 0;
    }

    __device__ void start() const
    {
#pragma unroll
        for (int n = 0; n < ROWS / AT_ONCE; n++)
            cp_async_16((target ^ (uint32_t)(n * AT_ONCE % 8 * 16)) + (uint32_t)(n * AT_ONCE * DIM * 2),
                        source + n * AT_ONCE * stride, n * AT_ONCE < left ? 16 : 0);
    }
};

template <int DIM, int ROWS, int THREAD_COUNT, typename ELEMENT>
__device__ inline void copy_chunks(uint4 (*to)[DIM / 8], const row_source<ELEMENT> &from, int first, int count,
                                   int thread = (int)threadIdx.x)
{
    chunk_copy<DIM, ROWS, THREAD_COUNT, ELEMENT>(to, from, first, count, thread).start();
}

/* The rows of a stage. */
template <int DIM, typename ELEMENT>
__device__ inline void copy_rows(smem_rows<DIM> &to, const row_source<ELEMENT> &from, int first, int count)
{
    copy_chunks<DIM, STAGE_ROWS<DIM>, THREADS>(to.chunks, from, first, count);
}

__device__ inline int lane_index()
{
    return (int)(thread_index() % 32);
}

/* The lane's row address for ldmatrix, in the 8 x 8 matrix `down` matrices down and `right` chunks to the right. Rows
 * have 128 bytes or more, so the address of chunk c is this one with 16 c XORed into bits 4..6: at_chunk. */
template <int DIM>
__device__ inline uint32_t matrix_address(const smem_rows<DIM> &rows, int lane, int down, int right)
{
    return shared_address(&rows.chunks[down * 8 + lane % 8][right ^ lane % 8]);
}

template <int DIM> __device__ inline uint32_t at_chunk(uint32_t address, int row, int chunk)
{
    return (address ^ (uint32_t)(chunk % 8 * 16)) + (uint32_t)(chunk / 8 * 128 + row * DIM * 2);
}

/* Address of an A operand for ldmatrix: {rows 0..7, 8..15} x {dimensions 0..7, 8..15}, rows fastest. */
template <int DIM> __device__ inline uint32_t a_address(const smem_rows<DIM> &rows, int lane = lane_index())
{
    return matrix_address(rows, lane, lane / 8 % 2, lane / 16);
}

/* For the B operands of logits, in steps of 8 BLOCKS streamed rows: {rows 0..7, 8..15} x {dimensions 0..7, 8..15}, or
 * 8 rows x 4 times 8 dimensions. */
template <int BLOCKS, int DIM>
__device__ inline uint32_t logit_b_address(const smem_rows<DIM> &rows, int lane = lane_index())
{
    return BLOCKS == 2 ? matrix_address(rows, lane, lane / 16, lane / 8 % 2)
                       : matrix_address(rows, lane, 0, lane / 8);
}

/* Address of a gradient's B operand, transposed: {dimensions 0..7, 8..15} x {rows 0..7, 8..15}. */
template <int DIM> __device__ inline uint32_t gradient_b_address(const smem_rows<DIM> &rows, int lane = lane_index())
{
    return matrix_address(rows, lane, lane / 8 % 2, lane / 16);
}

/* Reads the warp's stationary rows, from warp_row on, from shared memory. */
template <int DIM, int M>
__device__ inline void read_frags(row_frags<DIM, M> &frags, const smem_rows<DIM> *smem, int warp_row,
                                  int lane = lane_index())
{
    const uint32_t address = a_address(smem[warp_row / STAGE_ROWS<DIM>], lane);
#pragma unroll
    for (int m = 0; m < M; m++)
#pragma unroll
        for (int k = 0; k < DIM / 16; k++)
            ldmatrix_x4(frags.a[m][k], at_chunk<DIM>(address, warp_row % STAGE_ROWS<DIM> + m * 16, 2 * k));
}

/* Loads the block's stationary rows through shared memory with room for all of them. Rows >= count become 0. */
template <int DIM, int M, typename ELEMENT>
__device__ inline void load_frags(row_frags<DIM, M> &frags, smem_rows<DIM> *smem, const row_source<ELEMENT> &from,
                                  int count)
{
    constexpr int ROWS = WARPS * 16 * M;
#pragma unroll
    for (int first = 0; first < ROWS; first += STAGE_ROWS<DIM>)
        copy_rows(smem[first / STAGE_ROWS<DIM>], from, first, count);
    cp_async_commit();
    cp_async_wait<0>();
    __syncthreads();
    read_frags(frags, smem, (int)(thread_index() / 32) * 16 * M);
    __syncthreads();
}

/* Loads the block's stationary rows through the memory of the pipeline, before its first stage is copied. */
template <int DIM, int M, typename ELEMENT>
__device__ inline void load_frags(row_frags<DIM, M> &frags, smem_stage<DIM> (&stages)[STAGES],
                                  const row_source<ELEMENT> &from, int count)
{
    static_assert(WARPS * 16 * M <= STAGES * 2 * STAGE_ROWS<DIM>, "the stationary rows fit into the stages");
    load_frags(frags, &stages[0].a, from, count);
}

/* ---- Logits ------------------------------------------------------------------------------------------------- */

/* Logits of one argument for a step of 8 BLOCKS streamed rows: [m][block][half * 2 + parity]. */
template <int M, int BLOCKS> struct logits {
    float at[M][BLOCKS][4];
};

/* x = stationary rows times the streamed rows from `row` on. */
template <typename ELEMENT, int DIM, int M, int BLOCKS>
__device__ inline void multiply(logits<M, BLOCKS> &x, const row_frags<DIM, M> &frags, uint32_t b_address, int row)
{
    constexpr int K = 2 / BLOCKS; /* one ldmatrix loads 16 K dimensions */
#pragma unroll
    for (int m = 0; m < M; m++)
#pragma unroll
        for (int e = 0; e < BLOCKS * 4; e++)
            x.at[m][e / 4][e % 4] = 0.0F;
#pragma unroll
    for (int k = 0; k < DIM / 16; k += K) {
        uint32_t b[4];
        ldmatrix_x4(b, at_chunk<DIM>(b_address, row, 2 * k));
#pragma unroll
        for (int pair = 0; pair < 2; pair++)
#pragma unroll
            for (int m = 0; m < M; m++)
                mma_m16n8k16(x.at[m][BLOCKS == 2 ? pair : 0], frags.a[m][BLOCKS == 2 ? k : k + pair], b[2 * pair],
                             b[2 * pair + 1], ELEMENT());
    }
}

/* x += 16 M stationary rows times 8 N streamed rows over DIM dimensions, both from shared memory; N is even. The
 * addresses point to the first row on each side. */
template <typename ELEMENT, int DIM, int M, int N>
__device__ inline void multiply_add_smem(float (&x)[M][N][4], uint32_t a_address, uint32_t b_address)
{
#pragma unroll
    for (int k = 0; k < DIM / 16; k++) {
        uint32_t a[M][4];
#pragma unroll
        for (int m = 0; m < M; m++)
            ldmatrix_x4(a[m], at_chunk<DIM>(a_address, m * 16, 2 * k));
#pragma unroll
        for (int pair = 0; pair < N / 2; pair++) {
            uint32_t b[4];
            ldmatrix_x4(b, at_chunk<DIM>(b_address, pair * 16, 2 * k));
#pragma unroll
            for (int m = 0; m < M; m++) {
                mma_m16n8k16(x[m][2 * pair], a[m], b[0], b[1], ELEMENT());
                mma_m16n8k16(x[m][2 * pair + 1], a[m], b[2], b[3], ELEMENT());
            }
        }
    }
}

/* Applies the softcap or the logarithm of the argument, if it has one. Returns the factor that logits still need. */
template <int M, int BLOCKS>
__device__ inline float cap_logits(float (&x)[M][BLOCKS][4], const skl_cuda_argument &argument)
{
    if (!argument.capped)
        return argument.scale;
#pragma unroll
    for (int m = 0; m < M; m++)
#pragma unroll
        for (int e = 0; e < BLOCKS * 4; e++)
            x[m][e / 4][e % 4] = argument.linear ? linear_logit(x[m][e / 4][e % 4])
                                                 : argument.softcap_2 * tanhf(x[m][e / 4][e % 4] * argument.scale);
    return 1.0F;
}

} // namespace sm80

#endif
