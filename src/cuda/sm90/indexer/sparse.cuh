/* Launches of a sparse indexer by wgmma: one for rows, two per chunk of rows for gradients. */
#ifndef SKL_CUDA_SM90_INDEXER_SPARSE_CUH
#define SKL_CUDA_SM90_INDEXER_SPARSE_CUH

#include "cuda/common/dk_sums.cuh"
#include "cuda/common/indexer/sparse_chunks.cuh"
#include "cuda/sm90/indexer/sparse_gradients.cuh"
#include "cuda/sm90/indexer/sparse_scores.cuh"
#include "cuda/sm90/launch.cuh"

namespace sm90
{

inline sparse_params sparse_params_for(const skl_cuda_params *params, const skl_cuda_launch *launch)
{
    const skl_problem &p = params->problem;
    const skl_call &call = params->call;
    const int64_t sharing = skl_min(skl_group_size(&p), params->a.heads_per_key);
    const bool row_results = call.rows.kl.data != NULL || call.rows.cross_entropy.data != NULL ||
                             call.rows.entropy.data != NULL || call.rows.mass.data != NULL ||
                             (call.rows.lse_t.data != NULL && call.inputs.lse_t.data != NULL);
    sparse_params result = {};
    (skl_cuda_params &)result = *params;
    result.least = p.index_linear ? -INFINITY : 0.0F;
    result.with_teacher = !skl_only_lse_s(&call);
    result.with_mean = result.with_teacher && (call.op != SKL_OP_FORWARD || row_results);
    result.splits_heads = sharing > 64;
    result.row_count = (int32_t)launch->sparse.chunk.rows;
    result.scores = (float *)(void *)((char *)call.workspace + launch->sparse.scores_at);
    return result;
}

template <typename SMEM, typename... PARAMS>
cudaError_t launch_sparse(void (*kernel)(PARAMS...), const skl_cuda_launch *launch, int threads,
                          const sparse_params &params)
{
    const int64_t blocks = skl_min(launch->sparse.num_blocks, params.row_count);
    return launch_blocks(kernel, blocks, threads, sizeof(SMEM), params);
}

template <typename ELEMENT, int DIM>
cudaError_t launch_scores_of(const skl_cuda_launch *launch, const sparse_params &params)
{
    return launch_sparse<score_smem<DIM>>(sparse_score_kernel<ELEMENT, DIM>, launch, SCORE_THREADS, params);
}

template <typename ELEMENT> cudaError_t launch_scores(const skl_cuda_launch *launch, const sparse_params &params)
{
    const int64_t dim = params.problem.dim_t;
    return dim <= 128   ? launch_scores_of<ELEMENT, 128>(launch, params)
           : dim <= 192 ? launch_scores_of<ELEMENT, 192>(launch, params)
           : dim <= 256 ? launch_scores_of<ELEMENT, 256>(launch, params)
           : dim <= 512 ? launch_scores_of<ELEMENT, 512>(launch, params)
                        : launch_scores_of<ELEMENT, 576>(launch, params);
}

template <typename ELEMENT, int DIM>
cudaError_t launch_gradients_of(const skl_cuda_launch *launch, const sparse_params &params)
{
    return launch_sparse<sparse_gradient_smem<DIM>>(sparse_gradient_kernel<ELEMENT, DIM>, launch,
                                                    SPARSE_GRADIENT_THREADS, params);
}

template <typename ELEMENT>
cudaError_t launch_sparse_rows(const char *kernel, const skl_cuda_params *params, const skl_cuda_launch *launch)
{
    record_launch(kernel, launch->variant, 1);
    return launch_scores<ELEMENT>(launch, sparse_params_for(params, launch));
}

/* dk is a sum in any order. */
template <typename ELEMENT>
cudaError_t launch_sparse_fused(const char *kernel, const skl_cuda_params *params, const skl_cuda_launch *launch)
{
    const skl_sparse_chunk &chunk = launch->sparse.chunk;
    const backward_params of_sums = backward_params_of(params, launch);
    record_launch(kernel, launch->variant, 1);
    cudaError_t error = clear_dk_sums(&of_sums);
    if (error == cudaSuccess)
        error = for_each_chunk(chunk.rows, chunk.count, [&](skl_range rows) {
            sparse_params of_chunk = sparse_params_for(params, launch);
            of_chunk.row_first = (int32_t)rows.begin;
            of_chunk.row_count = (int32_t)(rows.end - rows.begin);
            of_chunk.dy = (float *)(void *)((char *)params->call.workspace + chunk.dy);
            of_chunk.dk_sums = of_sums.dk_sums;
            const cudaError_t scored = launch_scores<ELEMENT>(launch, of_chunk);
            return scored != cudaSuccess          ? scored
                   : of_chunk.problem.dim_s <= 64 ? launch_gradients_of<ELEMENT, 64>(launch, of_chunk)
                                                  : launch_gradients_of<ELEMENT, 128>(launch, of_chunk);
        });
    return error == cudaSuccess ? store_dk_sums(&of_sums) : error;
}

} // namespace sm90

#endif
