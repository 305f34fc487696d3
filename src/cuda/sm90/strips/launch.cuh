/* Launches of an indexer on Hopper: one for the row outputs, three per strip for gradients. */
#ifndef SKL_CUDA_SM90_STRIPS_LAUNCH_CUH
#define SKL_CUDA_SM90_STRIPS_LAUNCH_CUH

#include "cuda/common/strips/launch.cuh"
#include "cuda/sm90/strips/gradients.cuh"
#include "cuda/sm90/strips/teacher_lse.cuh"

namespace sm90
{

/* False if TMA does not support one of the tensors. */
inline bool encode_teacher(score_maps *maps, const strip_params &params)
{
    const skl_problem *const p = &params.problem;
    const skl_dtype type = SKL_BF16;
    return skl_tensor_map(&maps->q_t, type, &params.call.inputs.q_t, p->dim_t, p->heads_t, skl_query_rows(p), SIDE) ==
               CUDA_SUCCESS &&
           skl_tensor_map(&maps->k_t, type, &params.call.inputs.k_t, p->dim_t, p->key_heads_t, skl_key_rows(p),
                          SIDE) == CUDA_SUCCESS;
}

/* Queries and keys of the indexer, in boxes of `query_box` and `key_box` rows. */
inline bool encode_indexer(CUtensorMap *q, CUtensorMap *k, const strip_params &params, int query_box, int key_box)
{
    const skl_problem *const p = &params.problem;
    const skl_dtype type = SKL_BF16;
    return skl_tensor_map(q, type, &params.call.inputs.q_s, p->dim_s, skl_query_heads_s(p), skl_query_rows(p),
                          query_box) == CUDA_SUCCESS &&
           skl_tensor_map(k, type, &params.call.inputs.k_s, p->dim_s, p->key_heads_s, skl_key_rows(p), key_box) ==
               CUDA_SUCCESS;
}

inline bool encode_scores(score_maps *maps, const strip_params &params)
{
    *maps = {};
    return encode_indexer(&maps->q_s, &maps->k_s, params, SIDE, SIDE) &&
           (!params.with_teacher || encode_teacher(maps, params));
}

/* ---- Launches ----------------------------------------------------------------------------------------------- */

template <typename KERNEL, typename MAPS>
cudaError_t launch_index(KERNEL kernel, int64_t blocks, int threads, size_t memory, const strip_params &params,
                         const MAPS &maps)
{
    if (blocks == 0)
        return cudaSuccess; /* there are no keys */
    const cudaError_t error = cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, (int)memory);
    if (error != cudaSuccess)
        return error;
    kernel<<<(unsigned)blocks, threads, memory, params.call.stream>>>(params, maps);
    return cudaPeekAtLastError();
}

inline cudaError_t launch_teacher_lse(strip_params *kernel_params, const skl_index_layout &layout)
{
    assign_teacher_lse(kernel_params, layout);
    score_maps maps = {};
    if (!encode_teacher(&maps, *kernel_params))
        return encode_error();
    const skl_problem *const p = &kernel_params->problem;
    return launch_index(lse_kernel, p->batch * p->heads_t * skl_ceil_div(p->len_q, SIDE), SCORE_THREADS,
                        sizeof(score_smem), *kernel_params, maps);
}

template <bool GRADIENTS> cudaError_t launch_scores(const strip_params &kernel_params, const score_maps &maps)
{
    const cudaError_t error =
        launch_index(score_kernel<GRADIENTS>, kernel_params.strip_count * kernel_params.num_splits, SCORE_THREADS,
                     sizeof(score_smem), kernel_params, maps);
    return error == cudaSuccess ? launch_rows(kernel_params) : error;
}

inline cudaError_t launch_dense_rows(const char *kernel, const skl_cuda_params *params, const skl_cuda_launch *launch)
{
    const skl_index_layout &layout = launch->strips;
    strip_params kernel_params = params_for(params, layout);
    score_maps maps;
    if (!encode_scores(&maps, kernel_params))
        return encode_error();
    record_launch(kernel, SKL_VARIANT_ROWS, layout.num_splits);
    const cudaError_t error = kernel_params.with_teacher && !kernel_params.lse_given
                                  ? launch_teacher_lse(&kernel_params, layout)
                                  : cudaSuccess;
    return error == cudaSuccess ? launch_scores<false>(kernel_params, maps) : error;
}

struct gradient_index_maps {
    index_maps queries, keys;
};

inline bool encode_gradients(gradient_index_maps *maps, const strip_params &params)
{
    return encode_indexer(&maps->queries.stationary, &maps->queries.streamed, params, SIDE, STAGE_KEYS) &&
           encode_indexer(&maps->keys.streamed, &maps->keys.stationary, params, STAGE_KEYS, SIDE);
}

template <int DIM>
cudaError_t launch_index_sums(const strip_params &kernel_params, const skl_index_layout &layout,
                              const gradient_index_maps &maps)
{
    const skl_gradients *const grads = &kernel_params.call.gradients;
    cudaError_t error = cudaSuccess;
    if (grads->dq_s.data != NULL || grads->dw_s.data != NULL)
        error = launch_index(index_query_kernel<DIM>, kernel_params.strip_count * kernel_params.problem.index_heads,
                             INDEX_THREADS, sizeof(index_smem<DIM>), kernel_params, maps.queries);
    strip_params key_params = kernel_params;
    key_params.num_splits = layout.num_dk_splits;
    if (error == cudaSuccess && grads->dk_s.data != NULL)
        error = launch_index(index_key_kernel<DIM>, layout.key_items * layout.num_dk_splits, INDEX_THREADS,
                             sizeof(index_smem<DIM>), key_params, maps.keys);
    return error;
}

/* Strip by strip: scores, query kernel, key kernel. */
inline cudaError_t launch_dense_gradients(const char *kernel, const skl_cuda_params *params,
                                          const skl_cuda_launch *launch)
{
    const skl_problem *const p = &params->problem;
    const skl_index_layout &layout = launch->strips;
    strip_params kernel_params = params_for(params, layout);
    score_maps scores;
    gradient_index_maps maps;
    if (!encode_scores(&scores, kernel_params) || !encode_gradients(&maps, kernel_params))
        return encode_error();
    record_launch(kernel, SKL_VARIANT_GRADIENTS, layout.num_splits);
    return launch_strips(&kernel_params, launch, [&](const strip_params &strip) {
        const cudaError_t error = launch_scores<true>(strip, scores);
        return error != cudaSuccess ? error
               : p->dim_s <= 64     ? launch_index_sums<64>(strip, layout, maps)
               : p->dim_s <= 128    ? launch_index_sums<128>(strip, layout, maps)
                                    : launch_index_sums<256>(strip, layout, maps);
    });
}

} // namespace sm90

#endif
