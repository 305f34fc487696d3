/* Launches of strips on Hopper: one for rows, three per strip for gradients. */
#ifndef SKL_CUDA_SM90_STRIPS_LAUNCH_CUH
#define SKL_CUDA_SM90_STRIPS_LAUNCH_CUH

#include "cuda/common/strips/launch.cuh"
#include "cuda/sm90/strips/gradients.cuh"
#include "cuda/sm90/strips/pool.cuh"
#include "cuda/sm90/strips/scores.cuh"

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

/* Queries and keys of the student, in boxes of `query_box` and `key_box` rows. */
inline bool encode_student(CUtensorMap *q, CUtensorMap *k, const strip_params &params, int query_box, int key_box)
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
    const bool streams_teacher = params.with_teacher && params.target == NULL;
    return encode_student(&maps->q_s, &maps->k_s, params, SIDE, SIDE) &&
           (!streams_teacher || encode_teacher(maps, params));
}

/* ---- Launches ----------------------------------------------------------------------------------------------- */

/* Kernels and maps for launch_differences. */
struct difference_kernels {
    score_maps score;
    gradient_maps query, key;

    cudaError_t encode(const tensor_core::difference_sides &sides)
    {
        const strip_params &params = sides.student;
        const bool gradients = params.g != NULL;
        const bool encoded =
            encode_scores(&score, params) && (params.target == NULL || encode_teacher(&score, sides.teacher)) &&
            (!gradients || (encode_student(&query.stationary, &query.streamed, params, SIDE, STAGE_KEYS) &&
                            encode_student(&key.streamed, &key.stationary, params, STAGE_KEYS, SIDE)));
        return encoded ? cudaSuccess : encode_error();
    }

    cudaError_t pool(const strip_params &params) const
    {
        const bool largest = params.problem.pool_heads == SKL_POOL_HEADS_MAX;
        return launch_blocks(largest ? pool_kernel<true> : pool_kernel<false>, params.strip_count * params.num_splits,
                             SCORE_THREADS, sizeof(pool_smem), params, score);
    }

    cudaError_t teacher_lse(const strip_params &params, int64_t blocks) const
    {
        return launch_blocks(lse_kernel, blocks, SCORE_THREADS, sizeof(score_smem), params, score);
    }

    cudaError_t scores(const strip_params &params) const
    {
        return launch_blocks(params.g != NULL ? score_kernel<true> : score_kernel<false>,
                             params.strip_count * params.num_splits, SCORE_THREADS, sizeof(score_smem), params,
                             score);
    }

    template <int DIM> cudaError_t queries(const strip_params &params) const
    {
        return launch_blocks(query_gradient_kernel<DIM>, params.strip_count * params.wrt.heads, GRADIENT_THREADS,
                             sizeof(gradient_smem<DIM>), params, query);
    }

    template <int DIM> cudaError_t keys(const strip_params &params, int64_t items) const
    {
        return launch_blocks(key_gradient_kernel<DIM>, items, GRADIENT_THREADS, sizeof(gradient_smem<DIM>), params,
                             key);
    }
};

} // namespace sm90

#endif
