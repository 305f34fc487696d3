/* Forward on Hopper's tensor cores (sm_90a): 16-bit types, one teacher head a student head. */
#ifndef SKL_CUDA_SM90_FORWARD_CUH
#define SKL_CUDA_SM90_FORWARD_CUH

#include <type_traits>

#include "cuda/sm90/forward_narrow.cuh"
#include "cuda/sm90/forward_wide.cuh"
#include "cuda/sm90/sections.cuh"

namespace sm90
{

typedef void forward_kernel(skl_cuda_params, forward_maps);

constexpr int UNEVEN_BLOCKS = 2;

/* Blocks that keep a multiprocessor busy, one at a time. Where a mask leaves tiles half of the longest one's keys on
 * average, more than one: else the longest takes as long as all of them together. */
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

/* A block a tile of queries, or more, each with a part of its keys, where tiles are too few to fill the GPU. */
template <typename FORWARD>
cudaError_t launch_query_tiles(forward_kernel *kernel, const skl_cuda_params *params, const forward_maps *maps)
{
    constexpr int ROWS = FORWARD::place::ROWS;
    static_assert(UNEVEN_BLOCKS * ROWS <= SKL_PART_ROWS_MAX, "the workspace holds the parts");
    const skl_problem *const p = &params->problem;
    const int64_t tiles = skl_ceil_div(p->len_q, ROWS);
    skl_cuda_params own = *params;
    own.splits = splits_for(query_tiles(p, ROWS), params->multiprocessors * blocks_to_fill(p), p->len_k);
    const cudaError_t error =
        launch_blocks<FORWARD>(kernel, grid_of(p->batch, p->heads_s, tiles * own.splits), &own, maps);
    if (error != cudaSuccess || own.splits == 1)
        return error;
    merge_parts<FORWARD::GROUPS><<<grid_of(p->batch, p->heads_s, tiles), ROWS, 0, params->call.stream>>>(own);
    return cudaPeekAtLastError();
}

/* Blocks can stay and take tiles in turns: all tiles see all keys, more than a block has room for, and there are more
 * tiles than blocks at a time. Others are handed out by the hardware, longest first. */
template <typename FORWARD> bool tiles_in_turns(const skl_cuda_params *params)
{
    const skl_problem *const p = &params->problem;
    const int64_t tiles = query_tiles(p, FORWARD::place::ROWS);
    const int64_t keys = skl_min(p->len_k, params->call.keys.end) - skl_max(0, params->call.keys.begin);
    const bool all_seen = without_window(p) && !p->packed && params->call.inputs.key_lengths == NULL;
    return all_seen && keys > FORWARD::DEPTH * KEYS && tiles > params->multiprocessors && tiles < (int64_t)1 << 30;
}

template <typename ELEMENT, int DIM, bool CAPPED>
cudaError_t launch_forward_of(const skl_cuda_params *params, skl_cuda_launcher otherwise)
{
    constexpr bool NARROW = DIM <= 128;
    using FORWARD =
        std::conditional_t<NARROW, narrow_forward<ELEMENT, DIM, CAPPED, false>, wide_forward<ELEMENT, DIM, CAPPED>>;
    constexpr int ROWS = FORWARD::place::ROWS, BOX = NARROW ? 64 : ROWS; /* queries of a tile, and of a copy */
    const skl_problem *const p = &params->problem;
    forward_maps maps;
    if (!encode_keys(&maps.keys_a, p, &params->one, KEYS, ELEMENT()) ||
        !encode_keys(&maps.keys_b, p, &params->two, KEYS, ELEMENT()) ||
        !encode_queries(&maps.queries_a, p, &params->one, BOX, ELEMENT()) ||
        !encode_queries(&maps.queries_b, p, &params->two, BOX, ELEMENT()))
        return otherwise(params);
    skl_cuda_params own = *params;
    own.section = section_for(params, ROWS, 2, 2);
    own.splits = 1;
    if constexpr (NARROW && !CAPPED) {
        if (tiles_in_turns<FORWARD>(params))
            return launch_blocks<narrow_forward<ELEMENT, DIM, false, true>>(
                narrow_forward_kernel<ELEMENT, DIM, false, true>, dim3((unsigned)params->multiprocessors), &own,
                &maps);
    }
    if constexpr (NARROW)
        return launch_query_tiles<FORWARD>(narrow_forward_kernel<ELEMENT, DIM, CAPPED, false>, &own, &maps);
    else
        return launch_query_tiles<FORWARD>(wide_forward_kernel<ELEMENT, DIM, CAPPED>, &own, &maps);
}

template <typename ELEMENT, int DIM>
cudaError_t launch_forward(const skl_cuda_params *params, skl_cuda_launcher otherwise)
{
    return params->one.capped || params->two.capped ? launch_forward_of<ELEMENT, DIM, true>(params, otherwise)
                                                    : launch_forward_of<ELEMENT, DIM, false>(params, otherwise);
}

} // namespace sm90

#endif
