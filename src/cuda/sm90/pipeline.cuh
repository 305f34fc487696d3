/* Building blocks of the wgmma kernels.
 *
 * A block keeps a tile of rows stationary, 64 per consumer warpgroup and 128 in most kernels. It streams rows of the
 * other tensor through a pipeline in shared memory, 64 per stage. Stationary rows are queries and streamed rows keys,
 * except in the kernels that keep dk in registers: there the roles are swapped.
 *
 * Accumulators have the layout of mma m16n8, so these kernels share row states and masks with the sm80 kernels. */
#ifndef SKL_CUDA_SM90_PIPELINE_CUH
#define SKL_CUDA_SM90_PIPELINE_CUH

#include "cuda/common/row_state.cuh"
#include "cuda/sm90/ptx.cuh"
#include "cuda/sm90/wgmma.cuh"

namespace sm90
{

using namespace tensor_core;

constexpr int CONSUMERS = 2;           /* consumer warpgroups, 64 stationary rows each */
constexpr int STAGE_ROWS = 64;         /* streamed rows per pipeline stage */
constexpr int STAGE_KEYS = STAGE_ROWS; /* name for streamed rows that are keys */
typedef query_tile<2> block_tile;      /* 128 queries */
static_assert(block_tile::ROWS == CONSUMERS * 64, "the consumer warpgroups cover the tile");

/* A thread's accumulators of a warpgroup's 64 x 64 logits: [8 streamed rows][half * 2 + parity]. */
typedef float stage_logits[8][4];

/* A slab is 64 dimensions of some rows: 128 bytes per row, one TMA box. */
template <int DIM> constexpr int SLABS_OF = (DIM + 63) / 64;

/* Streamed rows of one argument. */
template <int DIM> struct row_stage {
    unsigned char slabs[SLABS_OF<DIM>][STAGE_ROWS][128];
};

/* Stationary rows in shared memory. */
template <int SLABS, int ROWS = block_tile::ROWS> struct smem_rows {
    unsigned char slabs[SLABS][ROWS][128];
    static constexpr int SIZE = SLABS * ROWS * 128;
};

template <int ROWS> struct smem_rows<0, ROWS> {
    static constexpr int SIZE = 0;
};

/* Loads all slabs of some rows, from dimension first_dim on. `row`: the first one, in the tensor. */
template <int SLABS, int ROWS>
__device__ inline void load_slabs(unsigned char (&to)[SLABS][ROWS][128], const CUtensorMap &map, int row, int head,
                                  int batch, uint64_t &full, int first_dim = 0)
{
#pragma unroll
    for (int slab = 0; slab < SLABS; slab++)
        tma_load(to[slab], map, first_dim + slab * 64, row, head, batch, full);
}

/* Barriers of a pipeline. */
template <int DEPTH> struct ring_barriers {
    uint64_t full[DEPTH], empty[DEPTH];

    /* `releases`: arrivals that release a stage. */
    __device__ void init(int releases)
    {
        for (int stage = 0; stage < DEPTH; stage++) {
            barrier_init(full[stage], 1);
            barrier_init(empty[stage], releases);
        }
    }
};

/* Waits until stage n of a pipeline is free, and loads it. */
template <int DIM, int DEPTH>
__device__ inline void load_stage(row_stage<DIM> (&to)[DEPTH], ring_barriers<DEPTH> &barriers, const CUtensorMap &map,
                                  int n, int row, int head, int batch)
{
    const int stage = n % DEPTH;
    barrier_wait(barriers.empty[stage], n / DEPTH % 2 ^ 1);
    barrier_expect_tx(barriers.full[stage], (int)sizeof to[stage]);
    load_slabs(to[stage].slabs, map, row, head, batch, barriers.full[stage]);
}

constexpr int SMEM_MAX = 227 * 1024;           /* bytes of a block */
constexpr int SMEM_BOOKKEEPING = 5 * 1024 / 2; /* barriers, the tile, visible ranges */

/* Stages that fit into shared memory next to `fixed` bytes, at most `most`. */
constexpr int depth_for(int stage_size, int fixed, int most, int smem = SMEM_MAX - SMEM_BOOKKEEPING)
{
    const int depth = (smem - fixed) / stage_size;
    return depth < most ? depth : most;
}

/* ---- Streamed rows ------------------------------------------------------------------------------------------ */

/* Returns lane 0's value to all lanes of a converged warp. The value is the same in all of them already; the shuffle
 * tells ptxas so, which then keeps it in a uniform register. wgmma descriptors and TMA operands are built from
 * those. */
__device__ inline int warp_uniform(int value)
{
    return __shfl_sync(~0U, value, 0);
}

__device__ inline int warpgroup_index()
{
    return warp_uniform((int)(threadIdx.x / 128));
}

__device__ inline int warp_index()
{
    return warp_uniform((int)(threadIdx.x / 32));
}

__device__ inline int warp_in_warpgroup()
{
    return warp_uniform((int)(threadIdx.x % 128 / 32));
}

/* The order in which a block processes the stages of its streamed rows. Masked stages come first, so that the main
 * loop, over an even number of full stages, has one simple body:
 *
 *   memory order    | L L |  F  F  F  F  F  F  | R |       L, R: masked stages at the left and right end
 *   schedule        | L L | R |  F  F  F  F  F  F  |       F: full stages (R takes one if their number is odd)
 */
struct stage_schedule {
    int row; /* first streamed row, in the tensor */
    int stages;
    int masked_stages;
    int left; /* masked stages at the left end */

    /* Index in memory order of the n-th stage of the schedule. */
    __device__ int stage_at(int n) const
    {
        const int right = masked_stages - left;
        return n < left ? n : n < masked_stages ? n + stages - masked_stages : n - right;
    }

    /* First row of the n-th stage, in the tensor. */
    __device__ int row_at(int n, int stage_rows = STAGE_ROWS) const
    {
        return row + stage_at(n) * stage_rows;
    }
};

__device__ inline stage_schedule warp_uniform(const stage_schedule &schedule)
{
    return {warp_uniform(schedule.row), warp_uniform(schedule.stages), warp_uniform(schedule.masked_stages),
            warp_uniform(schedule.left)};
}

/* The rows that a tile streams, and the mask. */
struct row_stream : stage_schedule {
    bounded_band band; /* streamed rows that each stationary row is paired with */
};

/* `begin`: row of the tensor that `streamed` counts from. */
__device__ inline row_stream make_row_stream(const streamed_band &streamed, int64_t begin,
                                             int stationary_rows = CONSUMERS * 64, int stage_rows = STAGE_ROWS)
{
    const range32 all = reach_of(streamed.band, 0, stationary_rows).all;
    const int stages = (streamed.needed + stage_rows - 1) / stage_rows;
    const int left = min((all.begin + stage_rows - 1) / stage_rows, stages);
    const int full = max(0, min(all.end / stage_rows, stages) - left) / 2 * 2;
    return {{(int)(begin + streamed.origin), stages, stages - full, left}, streamed.band};
}

/* The keys that a query tile attends to, or one split of them. */
template <int M>
__device__ inline row_stream keys_of_tile(const skl_cuda_params &params, const query_tile<M> &tile, int num_splits,
                                          int stage_keys = STAGE_KEYS)
{
    const int64_t last = skl_min(tile.first + tile.ROWS, tile.sequence.query_count) - 1;
    const skl_band keys = skl_key_band(&params.problem, &tile.sequence);
    return make_row_stream(streamed_split(stream_for(keys, tile.first, last), stage_keys, tile.split, num_splits),
                           tile.sequence.key_begin, tile.ROWS, stage_keys);
}

/* ---- Logits ------------------------------------------------------------------------------------------------- */

/* Loads the thread's elements of A operands from global memory; rows from `count` on become 0. */
template <int DIM, typename ELEMENT>
__device__ inline void load_a_frag(uint32_t (&a)[DIM / 16][4], const row_source<ELEMENT> &from, int count)
{
#pragma unroll
    for (int reg = 0; reg < 4; reg++) {
        const int row = acc_row<1>(0, reg % 2);
        const ELEMENT *const source = from.rows + row * from.stride + (int)(threadIdx.x % 4) * 2 + reg / 2 * 8;
#pragma unroll
        for (int k = 0; k < DIM / 16; k++) {
            const bool inside = row < count && k * 16 + reg / 2 * 8 < from.dim;
            a[k][reg] = inside ? *(const uint32_t *)(const void *)(source + k * 16) : 0U;
        }
    }
}

/* Descriptor of the 16 dimensions of a k step, in a K-major operand [64 dimensions][rows]. */
__device__ inline uint64_t k_step_descriptor(uint32_t operand, int step, int rows)
{
    return smem_descriptor(operand + (step / 4 * rows * 128 + step % 4 * 32) / 16);
}

/* STEPS wgmmas of c = a b, or c += a b if `add`: MN-major operands of consecutive steps, or a in registers. */
template <bool MN_MAJOR, int STEPS, bool A_MN_MAJOR = MN_MAJOR, int BLOCKS, typename ELEMENT>
__device__ inline void wgmma_steps(float (&c)[BLOCKS][4], uint32_t a, uint32_t b, int add, ELEMENT element)
{
    static_assert(STEPS % 4 == 0, "four at a time");
#pragma unroll
    for (int step = 0; step < STEPS; step += 4)
        wgmma_4<MN_MAJOR, A_MN_MAJOR>(c, a + step * OPERAND_STEP<A_MN_MAJOR>, b + step * OPERAND_STEP<MN_MAJOR>,
                                      step > 0 ? 1 : add, element);
}

template <bool MN_MAJOR, int STEPS, int BLOCKS, typename ELEMENT>
__device__ inline void wgmma_steps(float (&c)[BLOCKS][4], const uint32_t (*a)[4], uint32_t b, int add,
                                   ELEMENT element)
{
#pragma unroll
    for (int step = 0; step < STEPS / 4 * 4; step += 4)
        wgmma_4<MN_MAJOR>(c, a + step, b + step * OPERAND_STEP<MN_MAJOR>, step > 0 ? 1 : add, element);
    if constexpr (STEPS % 4 != 0)
#pragma unroll
        for (int step = STEPS / 4 * 4; step < STEPS; step++)
            wgmma<MN_MAJOR>(c, a[step], smem_descriptor(b + step * OPERAND_STEP<MN_MAJOR>), step > 0 ? 1 : add,
                            element);
}

/* The wgmmas of x = a b over DIM dimensions, from dimension FIRST on: K-major operands of slabs of 64 dimensions,
 * with A_ROWS and B_ROWS rows. */
template <typename ELEMENT, int DIM, int A_ROWS, int B_ROWS, int FIRST = 0, int BLOCKS>
__device__ inline void wgmma_slabs(float (&x)[BLOCKS][4], uint32_t a, uint32_t b)
{
    constexpr int SLABS_END = FIRST % 64 == 0 ? DIM / 64 * 64 : FIRST; /* whole slabs come first */
#pragma unroll
    for (int dim = FIRST; dim < SLABS_END; dim += 64)
        wgmma_4<false>(x, a + (dim / 64 - FIRST / 64) * A_ROWS * 128 / 16, b + dim / 64 * B_ROWS * 128 / 16, dim > 0,
                       ELEMENT());
#pragma unroll
    for (int step = SLABS_END / 16; step < DIM / 16; step++)
        wgmma<false>(x, k_step_descriptor(a, step - FIRST / 64 * 4, A_ROWS), k_step_descriptor(b, step, B_ROWS),
                     step > 0, ELEMENT());
}

/* The wgmmas of x = a b over DIM dimensions, with a in registers. */
template <typename ELEMENT, int DIM, int BLOCKS>
__device__ inline void wgmma_frags(float (&x)[BLOCKS][4], const uint32_t (*a)[4], uint32_t b)
{
#pragma unroll
    for (int dim = 0; dim < DIM / 64 * 64; dim += 64)
        wgmma_4<false>(x, a + dim / 16, b + dim / 64 * STAGE_ROWS * 128 / 16, dim > 0, ELEMENT());
#pragma unroll
    for (int step = DIM / 64 * 4; step < DIM / 16; step++)
        wgmma<false>(x, a[step], k_step_descriptor(b, step, STAGE_ROWS), step > 0, ELEMENT());
}

/* Issues the wgmmas of x = stationary rows times streamed rows. The first REG_DIMS dimensions of the warpgroup's rows
 * are in registers (rows_frag). The others are in shared memory (rows_smem), which leaves out the slabs that are
 * completely in registers. */
template <typename ELEMENT, int DIM, int REG_DIMS, int ROWS = block_tile::ROWS>
__device__ inline void issue_logits(stage_logits &x, const uint32_t (*rows_frag)[4], uint32_t rows_smem,
                                    uint32_t stage_smem)
{
    wgmma_frags<ELEMENT, REG_DIMS>(x, rows_frag, stage_smem);
    wgmma_slabs<ELEMENT, DIM, ROWS, STAGE_ROWS, REG_DIMS>(x, rows_smem, stage_smem);
}

/* Keeps reads of the accumulators after the preceding wgmma_wait. */
template <int N> __device__ inline void fence_operand(float (&x)[N][4])
{
#pragma unroll
    for (int n = 0; n < N; n++)
#pragma unroll
        for (int e = 0; e < 4; e++)
            asm volatile("" : "+f"(x[n][e]));
}

} // namespace sm90

#endif
