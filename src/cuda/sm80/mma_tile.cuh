/* What the mma.sync kernels share: a warp owns 16 M rows of one tensor pair in registers, the block streams rows of
 * the other through shared memory, and every step multiplies the warp's rows with 16 of the streamed ones.
 *
 *                      streamed, 64 a stage
 *                    +----+----+----+----+
 *   warp 0, 16 M own |    |    |    |    |   forward, dq: own = queries, streamed = keys
 *   warp 1           |    |    |    |    |   dk:          own = keys, streamed = queries
 *   ...              +----+----+----+----+
 *
 * Both sides of the KL (first and second argument) are held and streamed together. Steps are short, 8 or 16 streamed
 * rows, so that their logits fit into registers beside own rows and sums. Blocks are small, so that two or three
 * share a multiprocessor: one's exponentials run beside another one's products.
 *
 * Shared memory holds rows of DIM 16-bit elements in 16-byte chunks, exchanged by chunk ^= row % 8: ldmatrix, plain
 * or transposed, meets no bank twice. */
#ifndef SKL_CUDA_SM80_MMA_TILE_CUH
#define SKL_CUDA_SM80_MMA_TILE_CUH

#include "base/kl_math.h"
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

/* The warp's own rows as A operands. */
template <int DIM, int M> struct own_rows {
    uint32_t a[M][DIM / 16][4];
};

/* ---- Streamed rows ------------------------------------------------------------------------------------------ */

template <int DIM> struct staged_rows {
    uint4 chunks[STAGE_ROWS<DIM>][DIM / 8];
};

/* A stage holds rows of the first and of the second argument. */
template <int DIM> struct stage_memory {
    staged_rows<DIM> a, b;
};

/* Starts copying rows [first, first + STAGE_ROWS<DIM>); rows behind `count` and dimensions that are not there become
 * 0. */
template <int DIM, typename ELEMENT>
__device__ inline void copy_rows(staged_rows<DIM> &to, const row_source<ELEMENT> &from, int first, int count)
{
    constexpr int CHUNKS = DIM / 8;
    constexpr int ROWS = THREADS / CHUNKS; /* that the block copies at once */
    static_assert(STAGE_ROWS<DIM> % ROWS == 0 && ROWS >= 4, "every thread copies as many chunks");
    const int row = (int)threadIdx.x / CHUNKS;
    const int chunk = (int)threadIdx.x % CHUNKS;
    const ELEMENT *const source = from.rows + (first + row) * from.stride + chunk * 8;
    const uint32_t target = shared_address(&to.chunks[row][chunk ^ (row & 7)]);
    const int left = chunk * 8 < from.dim ? count - first - row : 0;
#pragma unroll
    for (int n = 0; n < STAGE_ROWS<DIM> / ROWS; n++)
        cp_async_16((target ^ (uint32_t)(n * ROWS % 8 * 16)) + (uint32_t)(n * ROWS * DIM * 2),
                    source + n * ROWS * from.stride, n * ROWS < left ? 16 : 0);
}

/* Address of a lane's row for ldmatrix: the 8 x 8 matrices lie `down` rows and `right` chunks apart. With rows of
 * 128 bytes or more, chunk c of that row is the address with 16 c exchanged into bits 4..6. */
template <int DIM> __device__ inline uint32_t matrix_address(const staged_rows<DIM> &rows, int down, int right)
{
    const int lane = (int)threadIdx.x % 32;
    return shared_address(&rows.chunks[down * 8 + lane % 8][right ^ lane % 8]);
}

template <int DIM> __device__ inline uint32_t at_chunk(uint32_t address, int row, int chunk)
{
    return (address ^ (uint32_t)(chunk % 8 * 16)) + (uint32_t)(chunk / 8 * 128 + row * DIM * 2);
}

/* A operands: {rows 0..7, 8..15} x {dimensions 0..7, 8..15}, dimensions slowest. */
template <int DIM> __device__ inline uint32_t own_operand(const staged_rows<DIM> &rows)
{
    const int lane = (int)threadIdx.x % 32;
    return matrix_address(rows, lane / 8 % 2, lane / 16);
}

/* B operands of logits for steps of 8 BLOCKS streamed rows: {rows 0..7, 8..15} x {dimensions 0..7, 8..15}, or 8 rows
 * x four times 8 dimensions. */
template <int BLOCKS, int DIM> __device__ inline uint32_t logit_operand(const staged_rows<DIM> &rows)
{
    const int lane = (int)threadIdx.x % 32;
    return BLOCKS == 2 ? matrix_address(rows, lane / 16, lane / 8 % 2) : matrix_address(rows, 0, lane / 8);
}

/* B operands of a gradient, transposed: {dimensions 0..7, 8..15} x {rows 0..7, 8..15}. */
template <int DIM> __device__ inline uint32_t gradient_operand(const staged_rows<DIM> &rows)
{
    const int lane = (int)threadIdx.x % 32;
    return matrix_address(rows, lane / 8 % 2, lane / 16);
}

/* The block's own rows, through memory for as many of them; rows behind `count` become 0. */
template <int DIM, int M, typename ELEMENT>
__device__ inline void load_own(own_rows<DIM, M> &own, staged_rows<DIM> *area, const row_source<ELEMENT> &from,
                                int count)
{
    constexpr int ROWS = WARPS * 16 * M;
#pragma unroll
    for (int first = 0; first < ROWS; first += STAGE_ROWS<DIM>)
        copy_rows(area[first / STAGE_ROWS<DIM>], from, first, count);
    cp_async_commit();
    cp_async_wait<0>();
    __syncthreads();
    const int warp_row = (int)threadIdx.x / 32 * 16 * M;
    const uint32_t operand = own_operand(area[warp_row / STAGE_ROWS<DIM>]);
#pragma unroll
    for (int m = 0; m < M; m++)
#pragma unroll
        for (int k = 0; k < DIM / 16; k++)
            ldmatrix_x4(own.a[m][k], at_chunk<DIM>(operand, warp_row % STAGE_ROWS<DIM> + m * 16, 2 * k));
    __syncthreads();
}

/* Through all of the stages' memory. */
template <int DIM, int M, typename ELEMENT>
__device__ inline void load_own(own_rows<DIM, M> &own, stage_memory<DIM> (&stages)[STAGES],
                                const row_source<ELEMENT> &from, int count)
{
    static_assert(WARPS * 16 * M <= STAGES * 2 * STAGE_ROWS<DIM>, "own rows fit into the stages");
    load_own(own, &stages[0].a, from, count);
}

/* ---- Logits ------------------------------------------------------------------------------------------------- */

/* Logits of one side for a step of 8 BLOCKS streamed rows: [m][block][half * 2 + parity]. */
template <int M, int BLOCKS> struct logits {
    float at[M][BLOCKS][4];
};

/* x = own rows times the streamed rows from `row` on. */
template <typename ELEMENT, int DIM, int M, int BLOCKS>
__device__ inline void multiply(logits<M, BLOCKS> &x, const own_rows<DIM, M> &own, uint32_t operand, int row)
{
    constexpr int K = 2 / BLOCKS; /* times 16 dimensions that one ldmatrix brings */
#pragma unroll
    for (int m = 0; m < M; m++)
#pragma unroll
        for (int e = 0; e < BLOCKS * 4; e++)
            x.at[m][e / 4][e % 4] = 0.0F;
#pragma unroll
    for (int k = 0; k < DIM / 16; k += K) {
        uint32_t b[4];
        ldmatrix_x4(b, at_chunk<DIM>(operand, row, 2 * k));
#pragma unroll
        for (int part = 0; part < 2; part++)
#pragma unroll
            for (int m = 0; m < M; m++)
                mma_m16n8k16(x.at[m][BLOCKS == 2 ? part : 0], own.a[m][BLOCKS == 2 ? k : k + part], b[2 * part],
                             b[2 * part + 1], ELEMENT());
    }
}

/* x += 16 M own rows times 8 N streamed ones, both staged, DIM dimensions of them; N is even. Operands are those of
 * the first own and streamed row. */
template <typename ELEMENT, int DIM, int M, int N>
__device__ inline void add_staged(float (&x)[M][N][4], uint32_t own, uint32_t streamed)
{
#pragma unroll
    for (int k = 0; k < DIM / 16; k++) {
        uint32_t a[M][4];
#pragma unroll
        for (int m = 0; m < M; m++)
            ldmatrix_x4(a[m], at_chunk<DIM>(own, m * 16, 2 * k));
#pragma unroll
        for (int pair = 0; pair < N / 2; pair++) {
            uint32_t b[4];
            ldmatrix_x4(b, at_chunk<DIM>(streamed, pair * 16, 2 * k));
#pragma unroll
            for (int m = 0; m < M; m++) {
                mma_m16n8k16(x[m][2 * pair], a[m], b[0], b[1], ELEMENT());
                mma_m16n8k16(x[m][2 * pair + 1], a[m], b[2], b[3], ELEMENT());
            }
        }
    }
}

/* Caps logits if the argument has a cap; returns what still scales them. */
template <int M, int BLOCKS>
__device__ inline float cap_logits(logits<M, BLOCKS> &x, const skl_cuda_argument &argument)
{
    if (!argument.capped)
        return argument.scale;
#pragma unroll
    for (int m = 0; m < M; m++)
#pragma unroll
        for (int e = 0; e < BLOCKS * 4; e++)
            x.at[m][e / 4][e % 4] = argument.softcap_2 * tanhf(x.at[m][e / 4][e % 4] * argument.scale);
    return 1.0F;
}

} // namespace sm80

#endif
