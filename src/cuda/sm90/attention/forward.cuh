/* Launches of the Hopper forward: one teacher head per student head. */
#ifndef SKL_CUDA_SM90_ATTENTION_FORWARD_CUH
#define SKL_CUDA_SM90_ATTENTION_FORWARD_CUH

#include <type_traits>

#include "cuda/sm90/attention/forward_narrow.cuh"
#include "cuda/sm90/attention/forward_short.cuh"
#include "cuda/sm90/attention/forward_wide.cuh"
#include "cuda/sm90/launch.cuh"

namespace sm90
{

typedef void forward_kernel(forward_params, forward_maps);

template <typename FORWARD>
cudaError_t launch_forward_blocks(forward_kernel *kernel, dim3 blocks, const forward_params &params,
                                  const forward_maps &maps)
{
    return launch_blocks(kernel, blocks, FORWARD::THREADS, sizeof(typename FORWARD::memory), params, maps);
}

/* One block per query tile and split. */
template <typename FORWARD>
cudaError_t launch_query_tiles(forward_kernel *kernel, const forward_params &params, const forward_maps &maps)
{
    constexpr int ROWS = FORWARD::tile_type::ROWS;
    const skl_problem &p = params.problem;
    const int64_t tiles = skl_ceil_div(p.len_q, ROWS);
    const cudaError_t error =
        launch_forward_blocks<FORWARD>(kernel, grid_of(p.batch, p.heads_s, tiles * params.num_splits), params, maps);
    return error == cudaSuccess && params.num_splits > 1 ? merge_splits<FORWARD::GROUPS>(params) : error;
}

template <typename ELEMENT, int DIM_A, int DIM_B, logit_form FORM>
cudaError_t launch_forward_of(const char *kernel, const forward_params &params, const skl_cuda_launch *launch)
{
    typedef typename operand<ELEMENT>::type element;
    constexpr int DIMS = DIM_A + DIM_B;
    constexpr bool CAPPED = FORM != PLAIN_LOGITS;
    constexpr bool NARROW = DIMS <= SKL_SM90_NARROW_DIMS_MAX && !operand<ELEMENT>::TWO_TERM;
    constexpr bool ALWAYS_PAIRED = NARROW && DIMS <= 128 && !CAPPED;
    using FORWARD = std::conditional_t<NARROW, narrow_forward<ELEMENT, DIM_A, DIM_B, FORM, false>,
                                       wide_forward<ELEMENT, DIM_A, DIM_B, CAPPED>>;
    constexpr int ROWS = FORWARD::tile_type::ROWS, BOX = NARROW ? 64 : ROWS; /* queries per tile, and per TMA load */
    static_assert(ROWS == (NARROW ? SKL_SM90_FORWARD_ROWS(DIMS) : SKL_SM90_WIDE_ROWS), "cuda/select counts tiles");
    static_assert(!NARROW || FORWARD::DEPTH <= SKL_SM90_FORWARD_STAGES(DIMS), "cuda/select counts stages");
    const skl_problem *const p = &params.problem;
    forward_maps maps;
    if (!encode_keys(&maps.keys_a, p, &params.a, STAGE_KEYS, element()) ||
        !encode_keys(&maps.keys_b, p, &params.b, STAGE_KEYS, element()) ||
        !encode_queries(&maps.queries_a, p, &params.a, BOX, element()) ||
        !encode_queries(&maps.queries_b, p, &params.b, BOX, element()))
        return encode_error();
    if constexpr (NARROW && !CAPPED) {
        using PERSISTENT = narrow_forward<ELEMENT, DIM_A, DIM_B, FORM, true>;
        using PAIRED = narrow_forward<ELEMENT, DIM_A, DIM_B, FORM, false, SKL_SM90_PAIRED_ROWS / 64>;
        using SHORT = short_forward<ELEMENT, DIM_A, DIM_B>;
        if (launch->persistent && launch->paired) {
            record_launch(kernel, SKL_VARIANT_SHORT, 1);
            return launch_forward_blocks<SHORT>(short_forward_kernel<SHORT>, dim3(2 * (unsigned)launch->sm_count),
                                                params, maps);
        }
        if (launch->persistent) {
            record_launch(kernel, SKL_VARIANT_PERSISTENT, 1);
            return launch_forward_blocks<PERSISTENT>(narrow_forward_kernel<PERSISTENT>,
                                                     dim3((unsigned)launch->sm_count), params, maps);
        }
        if (launch->paired || ALWAYS_PAIRED) {
            record_launch(kernel, SKL_VARIANT_PAIRED, params.num_splits);
            return launch_query_tiles<PAIRED>(narrow_forward_kernel<PAIRED>, params, maps);
        }
    }
    record_launch(kernel, CAPPED ? SKL_VARIANT_SOFTCAP : SKL_VARIANT_TILES, params.num_splits);
    if constexpr (ALWAYS_PAIRED)
        return cudaErrorInvalidValue;
    else if constexpr (NARROW)
        return launch_query_tiles<FORWARD>(narrow_forward_kernel<FORWARD>, params, maps);
    else
        return launch_query_tiles<FORWARD>(tile_kernel<FORWARD, forward_params, forward_maps>, params, maps);
}

template <typename ELEMENT, int DIM, bool SOFTCAP>
cudaError_t launch_forward(const char *kernel, const skl_cuda_params *params, const skl_cuda_launch *launch)
{
    const forward_params kernel_params = forward_params_of(params, launch);
    return with_softcap<SOFTCAP>(kernel_params, [&](auto capped) {
        constexpr bool NARROW = 2 * DIM <= SKL_SM90_NARROW_DIMS_MAX && !operand<ELEMENT>::TWO_TERM;
        if constexpr (capped() && NARROW)
            if (kernel_params.b.linear)
                return launch_forward_of<ELEMENT, DIM, DIM, LINEAR_LOGITS>(kernel, kernel_params, launch);
        constexpr logit_form FORM = capped() ? CAPPED_LOGITS : PLAIN_LOGITS;
        return launch_forward_of<ELEMENT, DIM, DIM, FORM>(kernel, kernel_params, launch);
    });
}

/* Head sizes that differ: one argument has at most SMALL dimensions, the other one at most LARGE. */
template <typename ELEMENT, int LARGE, int SMALL>
cudaError_t launch_forward_pair(const char *kernel, const skl_cuda_params *params, const skl_cuda_launch *launch)
{
    const forward_params kernel_params = forward_params_of(params, launch);
    if constexpr (LARGE > SMALL)
        if (kernel_params.b.dim > SMALL)
            return launch_forward_of<ELEMENT, SMALL, LARGE, PLAIN_LOGITS>(kernel, kernel_params, launch);
    return launch_forward_of<ELEMENT, LARGE, SMALL, PLAIN_LOGITS>(kernel, kernel_params, launch);
}

} // namespace sm90

#endif
