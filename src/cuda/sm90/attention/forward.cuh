/* Launch of the forward on Hopper's tensor cores (sm_90a): 16-bit types, one teacher head per student head. */
#ifndef SKL_CUDA_SM90_ATTENTION_FORWARD_CUH
#define SKL_CUDA_SM90_ATTENTION_FORWARD_CUH

#include <type_traits>

#include "cuda/sm90/attention/forward_narrow.cuh"
#include "cuda/sm90/attention/forward_wide.cuh"
#include "cuda/sm90/attention/head_group.cuh"

namespace sm90
{

typedef void forward_kernel(skl_cuda_params, forward_maps);

constexpr int UNEVEN_BLOCKS = 2;

/* Blocks per SM to aim for with splits. A single resident block fills an SM. Under a one-sided window a tile has half
 * of the longest tile's keys on average: with one block per SM the longest tile would take twice the average time. */
inline int64_t blocks_to_fill(const skl_problem *p)
{
    const bool one_sided = skl_is_unlimited(p->window_left) != skl_is_unlimited(p->window_right);
    return one_sided && 2 * p->len_q > p->len_k ? UNEVEN_BLOCKS : 1;
}

template <typename FORWARD>
cudaError_t launch_blocks(forward_kernel *kernel, dim3 blocks, const skl_cuda_params *params,
                          const forward_maps *maps)
{
    constexpr int MEMORY = sizeof(typename FORWARD::memory);
    const cudaError_t error = cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, MEMORY);
    if (error != cudaSuccess)
        return error;
    kernel<<<blocks, FORWARD::THREADS, MEMORY, params->call.stream>>>(*params, *maps);
    return cudaPeekAtLastError();
}

/* One block per query tile, or one per split of its keys where there are too few tiles to fill the GPU. */
template <typename FORWARD>
cudaError_t launch_query_tiles(forward_kernel *kernel, const skl_cuda_params *params, const forward_maps *maps)
{
    constexpr int ROWS = FORWARD::tile_type::ROWS;
    static_assert(UNEVEN_BLOCKS * ROWS <= SKL_SPLIT_ROWS_MAX, "the workspace holds the parts");
    const skl_problem *const p = &params->problem;
    const int64_t tiles = skl_ceil_div(p->len_q, ROWS);
    skl_cuda_params own = *params;
    own.num_splits = num_splits_for(query_tiles(p, ROWS), params->sm_count * blocks_to_fill(p), p->len_k);
    const cudaError_t error =
        launch_blocks<FORWARD>(kernel, grid_of(p->batch, p->heads_s, tiles * own.num_splits), &own, maps);
    if (error != cudaSuccess || own.num_splits == 1)
        return error;
    merge_splits<FORWARD::GROUPS><<<grid_of(p->batch, p->heads_s, tiles), ROWS, 0, params->call.stream>>>(own);
    return cudaPeekAtLastError();
}

/* Whether the persistent kernel can be used: every query attends to all keys, the keys do not fit into one fill of
 * the pipeline, and there are more tiles than SMs. Otherwise the hardware schedules one block per tile, longest
 * first. */
template <typename FORWARD> bool is_persistent(const skl_cuda_params *params)
{
    const skl_problem *const p = &params->problem;
    const int64_t tiles = query_tiles(p, FORWARD::tile_type::ROWS);
    const int64_t keys = skl_min(p->len_k, params->call.keys.end) - skl_max(0, params->call.keys.begin);
    const bool all_seen = without_window(p) && !p->packed && params->call.inputs.key_lengths == NULL;
    return all_seen && keys > FORWARD::DEPTH * STAGE_KEYS && tiles > params->sm_count && tiles < (int64_t)1 << 30;
}

template <typename ELEMENT, int DIM, bool CAPPED>
cudaError_t launch_forward_of(const skl_cuda_params *params, skl_cuda_launcher otherwise)
{
    constexpr bool NARROW = DIM <= 128;
    using FORWARD =
        std::conditional_t<NARROW, narrow_forward<ELEMENT, DIM, CAPPED, false>, wide_forward<ELEMENT, DIM, CAPPED>>;
    constexpr int ROWS = FORWARD::tile_type::ROWS, BOX = NARROW ? 64 : ROWS; /* queries of a tile, and of a copy */
    const skl_problem *const p = &params->problem;
    forward_maps maps;
    if (!encode_keys(&maps.keys_a, p, &params->a, STAGE_KEYS, ELEMENT()) ||
        !encode_keys(&maps.keys_b, p, &params->b, STAGE_KEYS, ELEMENT()) ||
        !encode_queries(&maps.queries_a, p, &params->a, BOX, ELEMENT()) ||
        !encode_queries(&maps.queries_b, p, &params->b, BOX, ELEMENT()))
        return otherwise(params);
    skl_cuda_params own = *params;
    own.head_group = head_group_for(params, ROWS, 2, 2);
    own.num_splits = 1;
    if constexpr (NARROW && !CAPPED) {
        if (is_persistent<FORWARD>(params))
            return launch_blocks<narrow_forward<ELEMENT, DIM, false, true>>(
                narrow_forward_kernel<ELEMENT, DIM, false, true>, dim3((unsigned)params->sm_count), &own, &maps);
    }
    if constexpr (NARROW)
        return launch_query_tiles<FORWARD>(narrow_forward_kernel<ELEMENT, DIM, CAPPED, false>, &own, &maps);
    else
        return launch_query_tiles<FORWARD>(wide_forward_kernel<ELEMENT, DIM, CAPPED>, &own, &maps);
}

template <typename ELEMENT, int DIM>
cudaError_t launch_forward(const skl_cuda_params *params, skl_cuda_launcher otherwise)
{
    return params->a.capped || params->b.capped ? launch_forward_of<ELEMENT, DIM, true>(params, otherwise)
                                                : launch_forward_of<ELEMENT, DIM, false>(params, otherwise);
}

} // namespace sm90

#endif
