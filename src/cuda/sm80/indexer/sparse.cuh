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

inline sparse_params sparse_params_for(const skl_cuda_params *params, const skl_sparse_layout &layout)
{
    const bool reverse = params->problem.direction == SKL_KL_REVERSE;
    const int64_t count = layout.block_count * params->problem.top_k;
    sparse_params own = {};
    (skl_cuda_params &)own = *params;
    own.teacher = reverse ? params->b : params->a;
    own.student = reverse ? params->a : params->b;
    own.with_teacher = !skl_only_lse_s(&params->call);
    own.least = params->problem.index_linear ? -INFINITY : 0.0F;
    own.resident = layout.resident;
    own.stage_size = layout.stage_size;
    own.mean = (lse_row *)(void *)((char *)params->call.workspace + layout.scores_at);
    own.logits = (float *)(void *)(own.mean + count);
    return own;
}

/* ---- Launches ----------------------------------------------------------------------------------------------- */

/* `most`: what any launch of the kernel may ask for, so that calls of several threads do not disturb each other. */
template <typename KERNEL>
cudaError_t launch_sparse(KERNEL kernel, int64_t blocks, size_t size, size_t most, const sparse_params &own)
{
    const cudaError_t error = cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, (int)most);
    if (error != cudaSuccess)
        return error;
    kernel<<<(unsigned)blocks, SPARSE_THREADS, size, own.call.stream>>>(own);
    return cudaPeekAtLastError();
}

template <typename ELEMENT>
cudaError_t launch_sparse_scores(const char *kernel, const sparse_params &own, const skl_sparse_layout &layout)
{
    static_assert(sizeof(sparse_smem<ELEMENT>) == SKL_SPARSE_FIXED_SIZE, "select.c plans shared memory");
    const int64_t blocks = skl_min(layout.block_count, own.row_end - own.row_first);
    const size_t size = (size_t)(layout.scores_smem), most = (size_t)layout.block_smem_max;
    const bool finds_lse = own.with_teacher && own.call.inputs.lse_t.data == NULL;
    record_launch(kernel, own.resident ? SKL_VARIANT_RESIDENT : SKL_VARIANT_STREAMED, 1);
    return finds_lse ? launch_sparse(sparse_score_kernel<ELEMENT, true>, blocks, size, most, own)
                     : launch_sparse(sparse_score_kernel<ELEMENT, false>, blocks, size, most, own);
}

template <typename ELEMENT>
cudaError_t launch_sparse_rows(const char *kernel, const skl_cuda_params *params, const skl_cuda_launch *launch)
{
    sparse_params own = sparse_params_for(params, launch->sparse);
    own.row_end = launch->sparse.chunk.rows;
    return launch_sparse_scores<ELEMENT>(kernel, own, launch->sparse);
}

template <typename ELEMENT, int DIM> cudaError_t launch_sparse_sums(const sparse_params &own)
{
    constexpr size_t SIZE = sizeof(sparse_gradient_smem<DIM>);
    return launch_sparse(sparse_gradient_kernel<ELEMENT, DIM>, own.row_end - own.row_first, SIZE, SIZE, own);
}

template <typename ELEMENT>
cudaError_t launch_sparse_gradients(const char *kernel, const skl_cuda_params *params, const skl_cuda_launch *launch)
{
    const skl_sparse_layout &layout = launch->sparse;
    return launch_sparse_chunks(params, launch, [&](skl_range rows) {
        char *const workspace = (char *)params->call.workspace;
        sparse_params own = sparse_params_for(params, layout);
        own.row_first = rows.begin;
        own.row_end = rows.end;
        own.dy = (float *)(void *)(workspace + layout.chunk.dy);
        own.entry_dk =
            params->call.gradients.dk_s.data != NULL ? (float *)(void *)(workspace + layout.chunk.parts) : NULL;
        const cudaError_t error = launch_sparse_scores<ELEMENT>(kernel, own, layout);
        return error != cudaSuccess       ? error
               : own.problem.dim_s <= 64  ? launch_sparse_sums<ELEMENT, 64>(own)
               : own.problem.dim_s <= 128 ? launch_sparse_sums<ELEMENT, 128>(own)
                                          : launch_sparse_sums<ELEMENT, 256>(own);
    });
}

} // namespace sm80

#endif
