/* The launches of an indexer's sparse stage by mma.sync: rows in one; gradients in two a chunk, before dk is
 * collected. */
#ifndef SKL_CUDA_SM80_INDEXER_SPARSE_CUH
#define SKL_CUDA_SM80_INDEXER_SPARSE_CUH

#include "cuda/common/indexer/strip_layout.h"
#include "cuda/common/indexer/sparse_chunks.cuh"
#include "cuda/sm80/indexer/sparse_gradients.cuh"
#include "cuda/sm80/indexer/sparse_scores.cuh"

namespace sm80
{

static_assert(sizeof(lse_row) + sizeof(float) == SKL_SPARSE_SCORE_SIZE, "the workspace has room for them");

/* Scores lie at `scores` in the workspace. */
inline sparse_params sparse_params_for(const skl_cuda_params *params, size_t scores)
{
    const bool reverse = params->problem.direction == SKL_KL_REVERSE;
    const int64_t count = params->block_count * params->problem.top_k;
    sparse_params own = {};
    (skl_cuda_params &)own = *params;
    own.teacher = reverse ? params->b : params->a;
    own.student = reverse ? params->a : params->b;
    own.with_teacher = !skl_only_lse_s(&params->call);
    own.least = params->problem.index_linear ? -INFINITY : 0.0F;
    own.mean = (lse_row *)(void *)((char *)params->scratch + scores);
    own.logits = (float *)(void *)(own.mean + count);
    return own;
}

/* ---- Shared memory of scores -------------------------------------------------------------------------------- */

struct sparse_shared {
    size_t size, most; /* of a launch, and that any launch may ask for: calls of other threads are not in its way */
};

/* Queries stay if there is room for them and for 64 KB of stages, which any product makes two stages of. A block that
 * has a multiprocessor to itself takes twice as much for stages, if there is. */
inline cudaError_t plan_sparse_memory(sparse_params *own, sparse_shared *memory)
{
    constexpr int STAGES_SIZE = 64 << 10, STREAMED_SIZE = 80 << 10; /* the latter: of queries too */
    const skl_problem *const p = &own->problem;
    int device = 0, block_most = 0, all = 0;
    cudaError_t error = cudaGetDevice(&device);
    if (error == cudaSuccess)
        error = cudaDeviceGetAttribute(&block_most, cudaDevAttrMaxSharedMemoryPerBlockOptin, device);
    if (error == cudaSuccess)
        error = cudaDeviceGetAttribute(&all, cudaDevAttrMaxSharedMemoryPerMultiprocessor, device);
    if (error != cudaSuccess)
        return error;
    const int sharing = (int)skl_min(skl_min(skl_group_size(p), own->teacher.heads_per_key), SPARSE_HEADS);
    const int index_heads = (int)skl_min(p->index_heads, SPARSE_HEADS);
    const int64_t teacher_size = skl_ceil_div(p->dim_t, SLAB) * tile_shape(sharing).query_size();
    const int64_t index_size = skl_ceil_div(p->dim_s, SLAB) * tile_shape(index_heads).query_size();
    const int64_t fixed = (int64_t)sizeof(sparse_smem<__half>);
    const int64_t resident = fixed + skl_max(own->with_teacher ? teacher_size : 0, index_size);
    const bool two_blocks = 2 * (resident + STAGES_SIZE + 1024) <= all;
    own->resident = resident + STAGES_SIZE <= block_most;
    own->stage_size = !own->resident                                            ? STREAMED_SIZE
                      : !two_blocks && resident + 2 * STAGES_SIZE <= block_most ? 2 * STAGES_SIZE
                                                                                : STAGES_SIZE;
    *memory = {(size_t)((own->resident ? resident : fixed) + own->stage_size), (size_t)block_most};
    return cudaSuccess;
}

/* ---- Launches ----------------------------------------------------------------------------------------------- */

template <typename KERNEL>
cudaError_t launch_sparse(KERNEL kernel, int64_t blocks, const sparse_shared &memory, const sparse_params &own)
{
    const cudaError_t error =
        cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, (int)memory.most);
    if (error != cudaSuccess)
        return error;
    const size_t size = memory.size;
    kernel<<<(unsigned)blocks, SPARSE_THREADS, size, own.call.stream>>>(own);
    return cudaPeekAtLastError();
}

template <typename ELEMENT> cudaError_t launch_sparse_scores(sparse_params *own)
{
    sparse_shared memory = {};
    const cudaError_t error = plan_sparse_memory(own, &memory);
    const int64_t blocks = skl_min(own->block_count, own->row_end - own->row_first);
    const bool finds_lse = own->with_teacher && own->call.inputs.lse_t.data == NULL;
    return error != cudaSuccess ? error
           : finds_lse          ? launch_sparse(sparse_score_kernel<ELEMENT, true>, blocks, memory, *own)
                                : launch_sparse(sparse_score_kernel<ELEMENT, false>, blocks, memory, *own);
}

template <typename ELEMENT> cudaError_t launch_sparse_rows(const skl_cuda_params *params)
{
    sparse_params own = sparse_params_for(params, 0);
    own.row_end = skl_sparse_chunk_of(&params->problem).rows;
    return launch_sparse_scores<ELEMENT>(&own);
}

template <typename ELEMENT, int DIM> cudaError_t launch_sparse_sums(const sparse_params &own)
{
    constexpr size_t SIZE = sizeof(sparse_gradient_smem<DIM>);
    return launch_sparse(sparse_gradient_kernel<ELEMENT, DIM>, own.row_end - own.row_first, {SIZE, SIZE}, own);
}

template <typename ELEMENT> cudaError_t launch_sparse_gradients(const skl_cuda_params *params)
{
    return launch_sparse_chunks(params, [](const skl_cuda_params &of, const skl_sparse_chunk &chunk, skl_range rows) {
        char *const workspace = (char *)of.scratch;
        sparse_params own = sparse_params_for(&of, chunk.end);
        own.row_first = rows.begin;
        own.row_end = rows.end;
        own.dy = (float *)(void *)(workspace + chunk.dy);
        own.entry_dk = of.call.gradients.dk_s.data != NULL ? (float *)(void *)(workspace + chunk.entry_dk) : NULL;
        const cudaError_t error = launch_sparse_scores<ELEMENT>(&own);
        return error != cudaSuccess      ? error
               : of.problem.dim_s <= 64  ? launch_sparse_sums<ELEMENT, 64>(own)
               : of.problem.dim_s <= 128 ? launch_sparse_sums<ELEMENT, 128>(own)
                                         : launch_sparse_sums<ELEMENT, 256>(own);
    });
}

} // namespace sm80

#endif
