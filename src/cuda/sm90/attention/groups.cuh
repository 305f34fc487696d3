/* Launches of the Hopper kernels for teacher groups. */
#ifndef SKL_CUDA_SM90_ATTENTION_GROUPS_CUH
#define SKL_CUDA_SM90_ATTENTION_GROUPS_CUH

#include "cuda/sm90/attention/group_backward.cuh"
#include "cuda/sm90/attention/group_forward.cuh"

namespace sm90
{

/* Calls launch(dim_t, dim_s, capped), as types. Softcapped heads are padded to 128 dimensions. */
template <bool SOFTCAP, typename LAUNCH>
cudaError_t with_group_sizes(const skl_cuda_params *params, const LAUNCH &launch)
{
    return with_softcap<SOFTCAP>(*params, [&](auto capped) {
        const std::integral_constant<int, 128> wide;
        if constexpr (capped())
            return launch(wide, wide, capped);
        else
            return with_head_sizes(params->problem,
                                   [&](auto dim_t, auto dim_s) { return launch(dim_t, dim_s, capped); });
    });
}

template <typename ELEMENT, bool SOFTCAP>
cudaError_t launch_group_rows(const char *kernel, const skl_cuda_params *params, const skl_cuda_launch *launch)
{
    return with_group_sizes<SOFTCAP>(params, [&](auto dim_t, auto dim_s, auto capped) {
        return launch_group_forward<ELEMENT, dim_t(), dim_s(), capped()>(kernel, params, launch);
    });
}

template <typename ELEMENT, bool SOFTCAP>
cudaError_t launch_group_fused(const char *kernel, const skl_cuda_params *params, const skl_cuda_launch *launch)
{
    return with_group_sizes<SOFTCAP>(params, [&](auto dim_t, auto dim_s, auto capped) {
        return launch_group_backward<ELEMENT, dim_t(), dim_s(), capped()>(kernel, params, launch);
    });
}

} // namespace sm90

#endif
