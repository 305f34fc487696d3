/* Launches of the Hopper kernels for teacher groups. */
#ifndef SKL_CUDA_SM90_ATTENTION_GROUPS_CUH
#define SKL_CUDA_SM90_ATTENTION_GROUPS_CUH

#include "cuda/sm90/attention/group_backward.cuh"
#include "cuda/sm90/attention/group_forward.cuh"

namespace sm90
{

template <int N> using size_constant = std::integral_constant<int, N>;

/* Calls launch(dim_t, dim_s, capped) with the smallest compiled sizes that hold both heads, as types. */
template <bool SOFTCAP, typename LAUNCH>
cudaError_t with_head_sizes(const skl_cuda_params *params, const LAUNCH &launch)
{
    const skl_problem *const p = &params->problem;
    return with_softcap<SOFTCAP>(*params, [&](auto capped) {
        if constexpr (capped())
            return launch(size_constant<128>(), size_constant<128>(), capped);
        else if (p->dim_t <= 64 && p->dim_s <= 64)
            return launch(size_constant<64>(), size_constant<64>(), capped);
        else
            return p->dim_s <= 64 ? launch(size_constant<128>(), size_constant<64>(), capped)
                                  : launch(size_constant<128>(), size_constant<128>(), capped);
    });
}

template <typename ELEMENT, bool SOFTCAP>
cudaError_t launch_group_rows(const char *kernel, const skl_cuda_params *params, const skl_cuda_launch *launch)
{
    return with_head_sizes<SOFTCAP>(params, [&](auto dim_t, auto dim_s, auto capped) {
        return launch_group_forward<ELEMENT, dim_t(), dim_s(), capped()>(kernel, params, launch);
    });
}

template <typename ELEMENT, bool SOFTCAP>
cudaError_t launch_group_fused(const char *kernel, const skl_cuda_params *params, const skl_cuda_launch *launch)
{
    return with_head_sizes<SOFTCAP>(params, [&](auto dim_t, auto dim_s, auto capped) {
        return launch_group_backward<ELEMENT, dim_t(), dim_s(), capped()>(kernel, params, launch);
    });
}

} // namespace sm90

#endif
