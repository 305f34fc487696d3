/* LSEs of one side on Hopper's tensor cores (sm_90a), for callers that have none: of a teacher group, or of a student
 * whose LSEs are all that is wanted. The same pipelines as the scores (dense_scores.cuh), but a block has one head
 * and all keys that its 128 queries attend to. */
#ifndef SKL_CUDA_SM90_INDEXER_TEACHER_LSE_CUH
#define SKL_CUDA_SM90_INDEXER_TEACHER_LSE_CUH

#include "cuda/sm90/indexer/dense_scores.cuh"

namespace sm90
{

/* The side, and where its LSEs go. */
struct lse_side {
    int heads, heads_per_key, dim;
    float scale;
    skl_output to;
};

struct lse_maps {
    CUtensorMap q, k;
};

template <typename ELEMENT>
__global__ void __launch_bounds__(SCORE_THREADS, 1)
    lse_kernel(const __grid_constant__ index_params params, const __grid_constant__ lse_maps maps,
               const __grid_constant__ lse_side side)
{
#ifdef __CUDA_ARCH_FEAT_SM90_ALL
    extern __shared__ __align__(1024) unsigned char raw[];
    score_smem &smem = *(score_smem *)(void *)raw;
    if (threadIdx.x == 0) {
        smem.slot = slot_at(params, blockIdx.x, (unsigned)side.heads);
        init_pipelines(smem);
    }
    __syncthreads();
    const query_slot &slot = smem.slot;
    const head_list head = {slot.head, 1, side.heads_per_key, (side.dim + SLAB - 1) / SLAB, false};
    const int warpgroup = warpgroup_index();
    if (warpgroup == CONSUMERS) {
        reg_dealloc<24>();
        if (warp_index() == CONSUMERS * 4) {
            slab_producer producer = {smem, {0, 0}, {0, 0}};
            for (int tile = slot.tile_begin; tile < slot.tile_end; tile++)
                producer.load_heads(head, maps.q, maps.k, tile);
        }
        return;
    }
    reg_alloc<240>();
    slab_consumer<ELEMENT> consumer = make_consumer<ELEMENT>(smem, warpgroup);
    lse_row rows[2] = {{-INFINITY, 0.0F}, {-INFINITY, 0.0F}};
    for (int tile = slot.tile_begin; tile < slot.tile_end; tile++) {
        tile_logits x;
        consumer.multiply(x, head.slabs, false);
        const range32 sees[2] = {visible_range(params, slot, acc_row<1>(0, 0), tile * SIDE),
                                 visible_range(params, slot, acc_row<1>(0, 1), tile * SIDE)};
        if (is_full(slot, tile * SIDE, SIDE))
            add_tile<false>(rows, x, side.scale, sees);
        else
            add_tile<true>(rows, x, side.scale, sees);
    }
#pragma unroll
    for (int half = 0; half < 2; half++) {
        const int row = acc_row<1>(0, half);
        const float lse = lse_of_lanes(rows[half]);
        if (threadIdx.x % 4 == 0 && row < slot.count)
            skl_row_set(&side.to, &slot.sequence, slot.head, slot.first + row, lse);
    }
#endif
}

/* Writes the LSEs of the teacher to `to`, or those of the student (of_s). */
template <typename ELEMENT>
cudaError_t launch_lse(const index_params &params, bool of_s, const skl_output &to, ELEMENT element)
{
    const skl_problem *const p = &params.problem;
    const skl_cuda_argument &argument = of_s ? params.b : params.a;
    const int64_t heads = of_s ? p->heads_s : p->heads_t, key_heads = of_s ? p->key_heads_s : p->key_heads_t;
    const skl_dtype type = dtype_of_element(element);
    lse_maps maps;
    if (skl_tensor_map(&maps.q, type, &argument.q, argument.dim, heads, skl_query_rows(p), SIDE) != CUDA_SUCCESS ||
        skl_tensor_map(&maps.k, type, &argument.k, argument.dim, key_heads, skl_key_rows(p), SIDE) != CUDA_SUCCESS)
        return encode_error();
    const cudaError_t error = cudaFuncSetAttribute(lse_kernel<ELEMENT>, cudaFuncAttributeMaxDynamicSharedMemorySize,
                                                   (int)sizeof(score_smem));
    if (error != cudaSuccess)
        return error;
    const lse_side side = {(int)heads, argument.heads_per_key, argument.dim, argument.scale, to};
    lse_kernel<ELEMENT><<<(unsigned)(p->batch * heads * skl_ceil_div(p->len_q, SIDE)), SCORE_THREADS,
                          sizeof(score_smem), params.call.stream>>>(params, maps, side);
    return cudaPeekAtLastError();
}

} // namespace sm90

#endif
