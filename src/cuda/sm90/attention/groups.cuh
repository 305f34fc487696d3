/* Launches of the Hopper kernels for teacher groups. */
#ifndef SKL_CUDA_SM90_ATTENTION_GROUPS_CUH
#define SKL_CUDA_SM90_ATTENTION_GROUPS_CUH

#include "cuda/sm90/attention/group_backward.cuh"
#include "cuda/sm90/attention/group_forward.cuh"

namespace sm90
{

/* Calls launch.template of<DIM_T, DIM_S, CAPPED>() with the smallest compiled sizes that hold both heads. */
template <bool SOFTCAP, typename LAUNCH>
cudaError_t with_head_sizes(const skl_cuda_params *params, const LAUNCH &launch)
{
    const skl_problem *const p = &params->problem;
    return with_softcap<SOFTCAP>(*params, [&](auto capped) {
        if constexpr (capped())
            return launch.template of<128, 128, true>();
        else if (p->dim_t <= 64 && p->dim_s <= 64)
            return launch.template of<64, 64, false>();
        else
            return p->dim_s <= 64 ? launch.template of<128, 64, false>() : launch.template of<128, 128, false>();
    });
}

template <typename ELEMENT> struct group_forward_launch {
    const char *kernel;
    const skl_cuda_params *params;
    const skl_cuda_launch *launch;

    template <int DIM_T, int DIM_S, bool CAPPED> cudaError_t of() const
    {
        return launch_group_forward<ELEMENT, DIM_T, DIM_S, CAPPED>(kernel, params, launch);
    }
};

template <typename ELEMENT> struct group_backward_launch {
    const char *kernel;
    const skl_cuda_params *params;
    const skl_cuda_launch *launch;

    template <int DIM_T, int DIM_S, bool CAPPED> cudaError_t of() const
    {
        return launch_group_backward<ELEMENT, DIM_T, DIM_S, CAPPED>(kernel, params, launch);
    }
};

template <typename ELEMENT, bool SOFTCAP>
cudaError_t launch_group_rows(const char *kernel, const skl_cuda_params *params, const skl_cuda_launch *launch)
{
    const skl_cuda_params known = with_computed_lse(params, launch);
    return with_head_sizes<SOFTCAP>(params, group_forward_launch<ELEMENT>{kernel, &known, launch});
}

template <typename ELEMENT, bool SOFTCAP>
cudaError_t launch_group_fused(const char *kernel, const skl_cuda_params *params, const skl_cuda_launch *launch)
{
    return with_head_sizes<SOFTCAP>(params, group_backward_launch<ELEMENT>{kernel, params, launch});
}

} // namespace sm90

#endif
