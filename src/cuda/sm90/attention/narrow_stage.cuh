/* Shared by the forward kernels of narrow heads: geometry, buffers, and the logits of a stage. */
#ifndef SKL_CUDA_SM90_ATTENTION_NARROW_STAGE_CUH
#define SKL_CUDA_SM90_ATTENTION_NARROW_STAGE_CUH

#include "cuda/sm90/attention/forward_stage.cuh"

namespace sm90
{

template <typename ELEMENT, int D_A, int D_B, int WARPGROUPS> struct narrow_shape {
    typedef ELEMENT element;
    static constexpr int DIM_A = D_A, DIM_B = D_B;
    static constexpr int GROUPS = WARPGROUPS;
    static constexpr int THREADS = 128 * GROUPS;
    static constexpr int BLOCKS_PER_SM = 4 / GROUPS;
    typedef query_tile<GROUPS> tile_type;
    static constexpr int REG_DIMS = 64; /* dimensions of A's queries in registers */
    static constexpr int PRODUCER_WARP = (GROUPS - 1) * 4;
    typedef smem_rows<SLABS_OF<DIM_B>, tile_type::ROWS> q_b_rows;
    typedef smem_rows<SLABS_OF<DIM_A> - REG_DIMS / 64, tile_type::ROWS> q_a_rows;
    static constexpr int SMEM = (SMEM_MAX + 1024) / BLOCKS_PER_SM - 1024; /* each block reserves 1,024 bytes */
    static constexpr int BOOKKEEPING = BLOCKS_PER_SM == 1 ? SMEM_BOOKKEEPING : 1024;
    static constexpr int DEPTH = depth_for(sizeof(key_stage<DIM_A, DIM_B>), q_b_rows::SIZE + q_a_rows::SIZE,
                                           8 / BLOCKS_PER_SM, SMEM - BOOKKEEPING); /* pipeline stages */
    /* Two stages: refills a buffer before the sums of a stage. After them its keys would be needed at once. */
    static constexpr bool REFILL_FIRST = DEPTH == 2;
};

/* Buffers in shared memory. */
template <typename SHAPE> struct narrow_buffers {
    key_stage<SHAPE::DIM_A, SHAPE::DIM_B> stages[SHAPE::DEPTH];
    typename SHAPE::q_b_rows q_b;
    typename SHAPE::q_a_rows q_a;
    uint64_t queries_full[SHAPE::GROUPS], full[SHAPE::DEPTH], empty[SHAPE::DEPTH];
};

/* Loads the queries of one warpgroup, except for the dimensions in registers. */
template <typename SHAPE>
__device__ inline void load_queries_of(narrow_buffers<SHAPE> &smem, const forward_maps &maps, int warpgroup,
                                       const tma_coord &tile)
{
    uint64_t &full = smem.queries_full[warpgroup];
    barrier_expect_tx(full, (smem.q_a.SIZE + smem.q_b.SIZE) / SHAPE::GROUPS);
    load_queries<SHAPE::REG_DIMS>(smem.q_a, maps.queries_a, tile, full, warpgroup * 64);
    load_queries<0>(smem.q_b, maps.queries_b, tile, full, warpgroup * 64);
}

/* Logits of the next stage. Releases the stage. */
template <typename SHAPE>
__device__ inline void compute_logits(stage_logits &x, stage_logits &y, narrow_buffers<SHAPE> &smem,
                                      const uint32_t (&q_frag)[SHAPE::REG_DIMS / 16][4], int warpgroup, int stage,
                                      int phase)
{
    constexpr int ROWS = SHAPE::tile_type::ROWS;
    typedef typename SHAPE::element ELEMENT;
    const uint32_t rows = warpgroup * (64 * 128 / 16);
    const uint32_t q_a = k_major_operand(&smem.q_a) + rows, q_b = k_major_operand(&smem.q_b) + rows;
    const uint32_t k_a = k_major_operand(&smem.stages[stage].a), k_b = k_major_operand(&smem.stages[stage].b);
    barrier_wait(smem.full[stage], phase);
    wgmma_fence();
    issue_logits<ELEMENT, SHAPE::DIM_A, SHAPE::REG_DIMS, ROWS>(x, q_frag, q_a, k_a);
    wgmma_slabs<ELEMENT, SHAPE::DIM_B, ROWS, STAGE_ROWS>(y, q_b, k_b);
    wgmma_commit();
    wgmma_wait<0>();
    fence_operand(x);
    fence_operand(y);
    barrier_arrive_if(smem.empty[stage], threadIdx.x % 32 == 0);
}

/* Releases a stage without computing it. */
template <typename SHAPE> __device__ inline void skip_stage(narrow_buffers<SHAPE> &smem, int stage, int phase)
{
    barrier_wait(smem.full[stage], phase);
    __syncwarp();
    barrier_arrive_if(smem.empty[stage], threadIdx.x % 32 == 0);
}

} // namespace sm90

#endif
