/* Launches of a sparse indexer by mma.sync: one for rows, two per chunk for gradients, before dk is summed. */
#ifndef SKL_CUDA_SM80_INDEXER_SPARSE_CUH
#define SKL_CUDA_SM80_INDEXER_SPARSE_CUH

#include "cuda/common/indexer/sparse_layout.h"
#include "cuda/common/indexer/sparse_chunks.cuh"
#include "cuda/common/launch.cuh"
#include "cuda/sm80/indexer/sparse_gradients.cuh"
#include "cuda/sm80/indexer/sparse_scores.cuh"

namespace sm80
{

static_assert(sizeof(lse_row) + sizeof(float) == SKL_SPARSE_SCORE_SIZE, "cuda/select plans the workspace");

inline sparse_params sparse_params_for(const skl_cuda_params *params, const skl_sparse_layout &layout)
{
    const bool reverse = params->problem.direction == SKL_KL_REVERSE;
    const int64_t count = layout.num_blocks * params->problem.top_k;
    sparse_params kernel_params = {};
    (skl_cuda_params &)kernel_params = *params;
    kernel_params.teacher = reverse ? params->b : params->a;
    kernel_params.student = reverse ? params->a : params->b;
    kernel_params.with_teacher = !skl_only_lse_s(&params->call);
    kernel_params.least = params->problem.index_linear ? -INFINITY : 0.0F;
    kernel_params.resident = layout.resident;
    kernel_params.stage_size = layout.stage_size;
    kernel_params.mean = (lse_row *)(void *)((char *)params->call.workspace + layout.scores_at);
    kernel_params.logits = (float *)(void *)(kernel_params.mean + count);
    return kernel_params;
}

/* ---- Launches ----------------------------------------------------------------------------------------------- */

template <typename ELEMENT>
cudaError_t launch_sparse_scores(const char *kernel, const sparse_params &kernel_params,
                                 const skl_sparse_layout &layout)
{
    static_assert(sizeof(sparse_smem<ELEMENT>) == SKL_SPARSE_FIXED_SIZE, "cuda/select plans shared memory");
    const int64_t blocks = skl_min(layout.num_blocks, kernel_params.row_end - kernel_params.row_first);
    const size_t size = (size_t)layout.scores_smem;
    const bool computes_lse = kernel_params.with_teacher && kernel_params.call.inputs.lse_t.data == NULL;
    record_launch(kernel, kernel_params.resident ? SKL_VARIANT_RESIDENT : SKL_VARIANT_STREAMED, 1);
    return launch_blocks(computes_lse ? sparse_score_kernel<ELEMENT, true> : sparse_score_kernel<ELEMENT, false>,
                         blocks, SPARSE_THREADS, size, kernel_params);
}

template <typename ELEMENT>
cudaError_t launch_sparse_rows(const char *kernel, const skl_cuda_params *params, const skl_cuda_launch *launch)
{
    sparse_params kernel_params = sparse_params_for(params, launch->sparse);
    kernel_params.row_end = launch->sparse.chunk.rows;
    return launch_sparse_scores<ELEMENT>(kernel, kernel_params, launch->sparse);
}

template <typename ELEMENT, int DIM> cudaError_t launch_sparse_sums(const sparse_params &kernel_params)
{
    return launch_blocks(sparse_gradient_kernel<ELEMENT, DIM>, kernel_params.row_end - kernel_params.row_first,
                         SPARSE_THREADS, sizeof(sparse_gradient_smem<DIM>), kernel_params);
}

template <typename ELEMENT>
cudaError_t launch_sparse_gradients(const char *kernel, const skl_cuda_params *params, const skl_cuda_launch *launch)
{
    const skl_sparse_layout &layout = launch->sparse;
    return launch_sparse_chunks(params, launch, [&](skl_range rows) {
        char *const workspace = (char *)params->call.workspace;
        sparse_params kernel_params = sparse_params_for(params, layout);
        kernel_params.row_first = rows.begin;
        kernel_params.row_end = rows.end;
        kernel_params.dy = (float *)(void *)(workspace + layout.chunk.dy);
        kernel_params.entry_dk =
            params->call.gradients.dk_s.data != NULL ? (float *)(void *)(workspace + layout.chunk.entry_dk) : NULL;
        const cudaError_t error = launch_sparse_scores<ELEMENT>(kernel, kernel_params, layout);
        return error != cudaSuccess                 ? error
               : kernel_params.problem.dim_s <= 64  ? launch_sparse_sums<ELEMENT, 64>(kernel_params)
               : kernel_params.problem.dim_s <= 128 ? launch_sparse_sums<ELEMENT, 128>(kernel_params)
                                                    : launch_sparse_sums<ELEMENT, 256>(kernel_params);
    });
}

} // namespace sm80

#endif
