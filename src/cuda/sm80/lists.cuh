/* The launches of an indexer's sparse stage by mma.sync: rows in one; gradients in two a band, before dk is
 * collected. */
#ifndef SKL_CUDA_SM80_LISTS_CUH
#define SKL_CUDA_SM80_LISTS_CUH

#include "cuda/index_layout.h"
#include "cuda/indexer_bands.cuh"
#include "cuda/sm80/list_gradients.cuh"
#include "cuda/sm80/list_scores.cuh"

namespace sm80
{

static_assert(sizeof(lse_row) + sizeof(float) == SKL_LIST_SCORE_SIZE, "the workspace has room for them");

/* Scores lie at `scores` in the workspace. */
inline list_params list_params_for(const skl_cuda_params *params, size_t scores)
{
    const bool reverse = params->problem.direction == SKL_KL_REVERSE;
    const int64_t count = params->block_count * params->problem.top_k;
    list_params own = {};
    (skl_cuda_params &)own = *params;
    own.teacher = reverse ? params->two : params->one;
    own.student = reverse ? params->one : params->two;
    own.with_teacher = !skl_only_lse_s(&params->call);
    own.least = params->problem.index_linear ? -INFINITY : 0.0F;
    own.mean = (lse_row *)(void *)((char *)params->scratch + scores);
    own.logits = (float *)(void *)(own.mean + count);
    return own;
}

/* ---- Shared memory of scores -------------------------------------------------------------------------------- */

struct list_shared {
    size_t size, most; /* of a launch, and that any launch may ask for: calls of other threads are not in its way */
};

/* Queries stay if there is room for them and for 64 KB of stages, which any product makes two stages of. A block that
 * has a multiprocessor to itself takes twice as much for stages, if there is. */
inline cudaError_t plan_list_memory(list_params *own, list_shared *memory)
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
    const int sharing = (int)skl_min(skl_min(skl_group_size(p), own->teacher.heads_per_key), LIST_HEADS);
    const int index_heads = (int)skl_min(p->index_heads, LIST_HEADS);
    const int64_t teacher_size = skl_ceil_div(p->dim_t, SLAB) * tile_shape(sharing).query_size();
    const int64_t index_size = skl_ceil_div(p->dim_s, SLAB) * tile_shape(index_heads).query_size();
    const int64_t fixed = (int64_t)sizeof(list_block<__half>);
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
cudaError_t launch_list(KERNEL kernel, int64_t blocks, const list_shared &memory, const list_params &own)
{
    const cudaError_t error =
        cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, (int)memory.most);
    if (error != cudaSuccess)
        return error;
    const size_t size = memory.size;
    kernel<<<(unsigned)blocks, LIST_THREADS, size, own.call.stream>>>(own);
    return cudaPeekAtLastError();
}

template <typename ELEMENT> cudaError_t launch_list_scores(list_params *own)
{
    list_shared memory = {};
    const cudaError_t error = plan_list_memory(own, &memory);
    const int64_t blocks = skl_min(own->block_count, own->row_end - own->row_first);
    const bool finds_lse = own->with_teacher && own->call.inputs.lse_t.data == NULL;
    return error != cudaSuccess ? error
           : finds_lse          ? launch_list(list_score_kernel<ELEMENT, true>, blocks, memory, *own)
                                : launch_list(list_score_kernel<ELEMENT, false>, blocks, memory, *own);
}

template <typename ELEMENT> cudaError_t launch_list_rows(const skl_cuda_params *params)
{
    list_params own = list_params_for(params, 0);
    own.row_end = skl_list_band_of(&params->problem).rows;
    return launch_list_scores<ELEMENT>(&own);
}

template <typename ELEMENT, int DIM> cudaError_t launch_list_sums(const list_params &own)
{
    constexpr size_t SIZE = sizeof(list_gradient_block<DIM>);
    return launch_list(list_gradient_kernel<ELEMENT, DIM>, own.row_end - own.row_first, {SIZE, SIZE}, own);
}

template <typename ELEMENT> cudaError_t launch_list_gradients(const skl_cuda_params *params)
{
    return launch_list_bands(params, [](const skl_cuda_params &of, const skl_list_band &band, skl_range rows) {
        char *const workspace = (char *)of.scratch;
        list_params own = list_params_for(&of, band.end);
        own.row_first = rows.begin;
        own.row_end = rows.end;
        own.dy = (float *)(void *)(workspace + band.dy);
        own.parts = of.call.gradients.dk_s.data != NULL ? (float *)(void *)(workspace + band.parts) : NULL;
        const cudaError_t error = launch_list_scores<ELEMENT>(&own);
        return error != cudaSuccess      ? error
               : of.problem.dim_s <= 64  ? launch_list_sums<ELEMENT, 64>(own)
               : of.problem.dim_s <= 128 ? launch_list_sums<ELEMENT, 128>(own)
                                         : launch_list_sums<ELEMENT, 256>(own);
    });
}

} // namespace sm80

#endif
