/* What the wgmma kernels share: a block owns 128 queries, 64 a warpgroup, and streams keys of both arguments through
 * shared memory, 64 a stage. Accumulators lie as those of mma m16n8, so rows and bands are the sm80 kernels' own. */
#ifndef SKL_CUDA_SM90_TILE_CUH
#define SKL_CUDA_SM90_TILE_CUH

#include "cuda/sm80/rows.cuh"
#include "cuda/sm90/ptx.cuh"

namespace sm90
{

using namespace sm80;

constexpr int CONSUMERS = 2;       /* warpgroups that own 64 queries each */
constexpr int KEYS = 64;           /* of a stage */
typedef query_place<2> tile_place; /* 128 queries, as the sm80 forward has them */
static_assert(tile_place::ROWS == CONSUMERS * 64, "a tile is the block's");

typedef float stage_logits[8][4]; /* 64 x 64 of a warpgroup: [8 keys][half * 2 + parity] of a thread */

template <int DIM> struct key_stage {
    unsigned char halves[DIM / 64][KEYS][128]; /* of 64 dimensions each */
};

/* ---- Keys --------------------------------------------------------------------------------------------------- */

/* What a tile streams: its keys, or a part of them, in stages. Those that some query sees in part come first, so that
 * the long loop over the others, an even number of them, has one simple body. */
struct key_stream {
    int row; /* of the tensor, where it begins */
    int stages;
    int edges;   /* stages that come first */
    int left;    /* of them at the beginning of the keys; the others are at the end */
    band32 band; /* what the tile's queries see of it */

    /* Place among the keys of the stage that comes as number n. */
    __device__ int place_of(int n) const
    {
        const int right = edges - left;
        return n < left ? n : n < edges ? n + stages - edges : n - right;
    }
};

__device__ inline key_stream keys_of_tile(const skl_cuda_params &params, const tile_place &place)
{
    const int64_t last = skl_min(place.first + tile_place::ROWS, place.sequence.query_count) - 1;
    const skl_band keys = skl_key_band(&params.problem, &place.sequence);
    const streamed_band streamed = cut(stream_for(keys, place.first, last), KEYS, place.part, params.splits);
    const range32 all = reach_of(streamed.band, 0, tile_place::ROWS).all;
    const int stages = (streamed.needed + KEYS - 1) / KEYS;
    const int left = min((all.begin + KEYS - 1) / KEYS, stages);
    const int whole = max(0, min(all.end / KEYS, stages) - left) / 2 * 2;
    return {(int)(place.sequence.key_begin + streamed.origin), stages, stages - whole, left, streamed.band};
}

/* ---- Logits ------------------------------------------------------------------------------------------------- */

/* The thread's rows as A operands; rows behind `count` become 0. */
template <int DIM, typename ELEMENT>
__device__ inline void load_queries(uint32_t (&q)[DIM / 16][4], const row_source<ELEMENT> &from, int count)
{
#pragma unroll
    for (int part = 0; part < 4; part++) {
        const int row = own_row<1>(0, part % 2);
        const ELEMENT *const source = from.rows + row * from.stride + (int)threadIdx.x % 4 * 2 + part / 2 * 8;
#pragma unroll
        for (int k = 0; k < DIM / 16; k++) {
            const bool inside = row < count && k * 16 + part / 2 * 8 < from.dim;
            q[k][part] = inside ? *(const uint32_t *)(const void *)(source + k * 16) : 0U;
        }
    }
}

template <typename ELEMENT, int DIM>
__device__ inline void start_products(stage_logits &x, const uint32_t (&q)[DIM / 16][4], uint32_t keys)
{
    constexpr int HALF = KEYS * 128; /* bytes; 16 dimensions are 32 bytes of a row */
#pragma unroll
    for (int k = 0; k < DIM / 16; k++)
        wgmma<false>(x, q[k], descriptor_of(keys + (k / 4 * HALF + k % 4 * 32) / 16), k > 0, ELEMENT());
}

/* Ties accumulators to this place: nothing that reads them moves in front of the wait. */
template <int N> __device__ inline void settle(float (&x)[N][4])
{
#pragma unroll
    for (int n = 0; n < N; n++)
#pragma unroll
        for (int e = 0; e < 4; e++)
            asm volatile("" : "+f"(x[n][e]));
}

} // namespace sm90

#endif
