/* What the wgmma kernels share: a block owns queries, 64 a warpgroup, 128 in most of them, and streams keys of both
 * arguments through shared memory, 64 a stage; for deterministic key gradients it owns keys and streams queries.
 * Accumulators lie as those of mma m16n8, so rows and bands are the sm80 kernels' own. */
#ifndef SKL_CUDA_SM90_PIPELINE_CUH
#define SKL_CUDA_SM90_PIPELINE_CUH

#include "cuda/common/row_state.cuh"
#include "cuda/sm90/ptx.cuh"

namespace sm90
{

using namespace tensor_core;

constexpr int CONSUMERS = 2;           /* warpgroups that own 64 rows each */
constexpr int STAGE_ROWS = 64;         /* rows that are streamed together */
constexpr int STAGE_KEYS = STAGE_ROWS; /* ... where they are keys */
typedef query_tile<2> block_tile;      /* 128 queries, as the sm80 forward has them */
static_assert(block_tile::ROWS == CONSUMERS * 64, "a tile is the block's");

typedef float stage_logits[8][4]; /* 64 x 64 of a warpgroup: [8 streamed rows][half * 2 + parity] of a thread */

template <int DIM> struct row_stage {
    unsigned char slabs[DIM / 64][STAGE_ROWS][128]; /* of 64 dimensions each */
};

/* Queries of the block in shared memory: as many times 64 dimensions. */
template <int SLABS, int ROWS = block_tile::ROWS> struct smem_rows {
    unsigned char slabs[SLABS][ROWS][128];
    static constexpr int SIZE = SLABS * ROWS * 128;
};

template <int ROWS> struct smem_rows<0, ROWS> {
    static constexpr int SIZE = 0;
};

/* ---- Streamed rows ------------------------------------------------------------------------------------------ */

/* What a warp's lanes, all of which come here, have in common, said so that ptxas knows: it then lies in uniform
 * registers, from which operands of products and copies are made. */
__device__ inline int warp_uniform(int value)
{
    return __shfl_sync(~0U, value, 0);
}

/* Numbers in the block, and in the warpgroup. */
__device__ inline int warpgroup_index()
{
    return warp_uniform((int)threadIdx.x / 128);
}

__device__ inline int warp_index()
{
    return warp_uniform((int)threadIdx.x / 32);
}

__device__ inline int warp_in_warpgroup()
{
    return warp_uniform((int)threadIdx.x % 128 / 32);
}

/* Stages in the order in which they come. Those that some own row meets in part come first, so that the long loop
 * over the others, an even number of them, has one simple body. */
struct stage_order {
    int row; /* of the tensor, where it begins */
    int stages;
    int masked_stages; /* stages that come first */
    int left;          /* of them at the beginning of the rows; the others are at the end */

    /* Place among the rows of the stage that comes as number n. */
    __device__ int place_of(int n) const
    {
        const int right = masked_stages - left;
        return n < left ? n : n < masked_stages ? n + stages - masked_stages : n - right;
    }

    /* Row of the tensor where it begins. */
    __device__ int row_of(int n) const
    {
        return row + place_of(n) * STAGE_ROWS;
    }
};

__device__ inline stage_order warp_uniform(const stage_order &order)
{
    return {warp_uniform(order.row), warp_uniform(order.stages), warp_uniform(order.masked_stages),
            warp_uniform(order.left)};
}

/* What a tile of own rows streams, in stages. */
struct row_stream : stage_order {
    band32 band; /* what the own rows meet of it */
};

/* `begin`: row of the tensor from which `streamed` counts. */
__device__ inline row_stream in_stages(const streamed_band &streamed, int64_t begin, int own_rows = CONSUMERS * 64)
{
    const range32 all = reach_of(streamed.band, 0, own_rows).all;
    const int stages = (streamed.needed + STAGE_ROWS - 1) / STAGE_ROWS;
    const int left = min((all.begin + STAGE_ROWS - 1) / STAGE_ROWS, stages);
    const int whole = max(0, min(all.end / STAGE_ROWS, stages) - left) / 2 * 2;
    return {{(int)(begin + streamed.origin), stages, stages - whole, left}, streamed.band};
}

/* The keys of a query tile, or a part of them. */
template <int M>
__device__ inline row_stream keys_of_tile(const skl_cuda_params &params, const query_tile<M> &place, int num_splits)
{
    const int64_t last = skl_min(place.first + place.ROWS, place.sequence.query_count) - 1;
    const skl_band keys = skl_key_band(&params.problem, &place.sequence);
    return in_stages(cut(stream_for(keys, place.first, last), STAGE_KEYS, place.split, num_splits),
                     place.sequence.key_begin, place.ROWS);
}

/* ---- Logits ------------------------------------------------------------------------------------------------- */

/* The thread's rows as A operands; rows behind `count` become 0. */
template <int DIM, typename ELEMENT>
__device__ inline void load_rows(uint32_t (&a)[DIM / 16][4], const row_source<ELEMENT> &from, int count)
{
#pragma unroll
    for (int part = 0; part < 4; part++) {
        const int row = acc_row<1>(0, part % 2);
        const ELEMENT *const source = from.rows + row * from.stride + (int)threadIdx.x % 4 * 2 + part / 2 * 8;
#pragma unroll
        for (int k = 0; k < DIM / 16; k++) {
            const bool inside = row < count && k * 16 + part / 2 * 8 < from.dim;
            a[k][part] = inside ? *(const uint32_t *)(const void *)(source + k * 16) : 0U;
        }
    }
}

/* Descriptor of 16 dimensions of a tensor in shared memory, [64 dimensions][rows]. */
__device__ inline uint64_t step_of(uint32_t operand, int step, int rows)
{
    return descriptor_of(operand + (step / 4 * rows * 128 + step % 4 * 32) / 16);
}

/* x = own rows times those of a stage. REG_DIMS dimensions of the warpgroup's rows are held in registers, the others
 * lie in shared memory, with whole 64s of those in front of them left out. */
template <typename ELEMENT, int DIM, int REG_DIMS>
__device__ inline void start_products(stage_logits &x, const uint32_t (*held)[4], uint32_t lying, uint32_t stage)
{
#pragma unroll
    for (int step = 0; step < REG_DIMS / 16; step++)
        wgmma<false>(x, held[step], step_of(stage, step, STAGE_ROWS), step > 0, ELEMENT());
#pragma unroll
    for (int step = REG_DIMS / 16; step < DIM / 16; step++)
        wgmma<false>(x, step_of(lying, step - REG_DIMS / 64 * 4, block_tile::ROWS), step_of(stage, step, STAGE_ROWS),
                     step > 0, ELEMENT());
}

/* Ties accumulators to this place: nothing that reads them moves in front of the wait. */
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
