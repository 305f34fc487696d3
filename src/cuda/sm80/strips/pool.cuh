/* Targets of a pooled teacher by mma.sync (common/strips/pool.cuh), with the block, shared memory and pipeline of the
 * scores: P of a tile of 128 queries and 64 keys stays in registers while all teacher heads stream past. */
#ifndef SKL_CUDA_SM80_STRIPS_POOL_CUH
#define SKL_CUDA_SM80_STRIPS_POOL_CUH

#include "cuda/common/strips/pool.cuh"
#include "cuda/sm80/strips/scores.cuh"

namespace sm80
{

typedef pool_tiles<TILE_KEYS> key_blocks;

struct block_tiles : key_blocks {
    __device__ explicit block_tiles(const strip_params &params) : key_blocks(params.problem)
    {
    }
};

template <typename ELEMENT, bool LARGEST_HEAD>
__global__ void __launch_bounds__(THREADS, 2) pool_kernel(const __grid_constant__ strip_params params)
{
    typedef head_pool<LARGEST_HEAD> heads_of;
    extern __shared__ __align__(128) unsigned char raw[];
    score_smem &smem = *(score_smem *)(void *)raw;
    const block_tiles tiles(params);
    if (threadIdx.x == 0) {
        const slot_split work = slot_split_of_block(params);
        smem.slot_index = work.slot;
        smem.slot = slot_at(params, work.slot, (unsigned)params.problem.heads_s);
        smem.streamed[0] = group_heads(params, smem.slot.head);
        smem.streamed_count = 1;
        const range32 of_split = smem.slot.count > 0
                                     ? tiles.of_split(params.problem, smem.slot, work.split, params.num_splits)
                                     : range32{0, 0};
        smem.tile_begin = of_split.begin;
        smem.tile_end = of_split.end;
    }
    __syncthreads();
    if (smem.tile_begin >= smem.tile_end)
        return;
    const query_slot &slot = smem.slot;
    slab_stream<ELEMENT, block_tiles> slabs = {params, smem, {smem.tile_begin, 0, 0, 0}, 0, tiles};
    slabs.prefetch();
    const head_list &heads = smem.streamed[0];
    const typename heads_of::reader lses = {lse_of(params, slot, heads.first, query_of(slot, (int)threadIdx.x))};
    const typename heads_of::combine combine = {params.a.scale};
#pragma unroll 1
    for (int tile = smem.tile_begin; tile < smem.tile_end; tile++) {
        tile_logits p;
        fill(p, heads_of::NOTHING);
        slabs.for_heads(heads, lses,
                        [&](int, const tile_logits &x, const auto &lse) { combine_tile(p, x, lse, combine); });
#pragma unroll
        for (int m = 0; m < M_TILES; m++) {
            const int rows[2] = {acc_row<M_TILES>(m, 0), acc_row<M_TILES>(m, 1)};
            pool_tile_keys<heads_of>(params, slot, smem.slot_index, tiles, tile, p[m], rows);
        }
    }
}

} // namespace sm80

#endif
