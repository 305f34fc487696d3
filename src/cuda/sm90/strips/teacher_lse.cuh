/* LSEs of a teacher group on Hopper's tensor cores (sm_90a), for callers that have none. The same pipelines as the
 * scores (scores.cuh), but a block has one head and all keys that its 128 queries attend to. They go to
 * params.call.rows.lse_t. */
#ifndef SKL_CUDA_SM90_STRIPS_TEACHER_LSE_CUH
#define SKL_CUDA_SM90_STRIPS_TEACHER_LSE_CUH

#include "cuda/sm90/strips/scores.cuh"

namespace sm90
{

static __global__ void __launch_bounds__(SCORE_THREADS, 1)
    lse_kernel(const __grid_constant__ strip_params params, const __grid_constant__ score_maps maps)
{
#ifdef __CUDA_ARCH_FEAT_SM90_ALL
    extern __shared__ __align__(1024) unsigned char raw[];
    score_smem &smem = *(score_smem *)(void *)raw;
    if (threadIdx.x == 0) {
        smem.slot = slot_at(params, blockIdx.x, (unsigned)params.problem.heads_t);
        init_pipelines(smem);
    }
    __syncthreads();
    const query_slot &slot = smem.slot;
    const head_list head = {slot.head, 1, params.a.heads_per_key, (params.a.dim + SLAB - 1) / SLAB, false};
    const int warpgroup = warpgroup_index();
    if (warpgroup == CONSUMERS) {
        reg_dealloc<24>();
        if (warp_index() == CONSUMERS * 4) {
            slab_producer producer = {smem, {0, 0}, {0, 0}};
            for (int tile = slot.tile_begin; tile < slot.tile_end; tile++)
                producer.load_heads(head, maps.q_t, maps.k_t, tile);
        }
        return;
    }
    reg_alloc<240>();
    slab_consumer consumer = make_consumer(smem, warpgroup);
    lse_row rows[2] = {{-INFINITY, 0.0F}, {-INFINITY, 0.0F}};
    for (int tile = slot.tile_begin; tile < slot.tile_end; tile++) {
        tile_logits x;
        consumer.multiply(x, head.slabs, false);
        const range32 sees[2] = {visible_range(params, slot, acc_row<1>(0, 0), tile * SIDE),
                                 visible_range(params, slot, acc_row<1>(0, 1), tile * SIDE)};
        if (is_full(slot, tile * SIDE, SIDE))
            add_tile<false>(rows, x, params.a.scale, sees);
        else
            add_tile<true>(rows, x, params.a.scale, sees);
    }
#pragma unroll
    for (int half = 0; half < 2; half++) {
        const int row = acc_row<1>(0, half);
        const float lse = lse_of_lanes(rows[half]);
        if (threadIdx.x % 4 == 0 && row < slot.count)
            skl_row_set(&params.call.rows.lse_t, &slot.sequence, slot.head, slot.first + row, lse);
    }
#endif
}

} // namespace sm90

#endif
