/* Launches of teacher groups in tiles. */
#ifndef SKL_CUDA_SM80_ATTENTION_GROUP_TILES_CUH
#define SKL_CUDA_SM80_ATTENTION_GROUP_TILES_CUH

#include "cuda/sm80/attention/group_tile_backward.cuh"
#include "cuda/sm80/attention/group_tile_forward.cuh"

namespace sm80
{

inline bool has_narrow_heads(const skl_cuda_params *params)
{
    return params->problem.dim_t <= 64 && params->problem.dim_s <= 64;
}

template <typename ELEMENT>
cudaError_t launch_group_tile_rows(const char *kernel, const skl_cuda_params *params, const skl_cuda_launch *launch)
{
    return has_narrow_heads(params) ? launch_group_tile_forward<ELEMENT, 64>(kernel, params, launch)
                                    : launch_group_tile_forward<ELEMENT, 128>(kernel, params, launch);
}

template <typename ELEMENT, bool DK>
cudaError_t launch_group_tile_gradients(const char *kernel, const skl_cuda_params *params,
                                        const skl_cuda_launch *launch)
{
    return has_narrow_heads(params) ? launch_group_tile_gradient<ELEMENT, 64, DK>(kernel, params, launch)
                                    : launch_group_tile_gradient<ELEMENT, 128, DK>(kernel, params, launch);
}

} // namespace sm80

#endif
