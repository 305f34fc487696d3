/* The launchers of one line of instances.def. */
#define SKL_SIGNED_THREAD_INDEX /* see thread_index */

#include "cuda/common/instance.cuh"
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
    const skl_cuda_params known = with_computed_lse(params, launch);
    return has_narrow_heads(params) ? launch_group_tile_forward<ELEMENT, 64>(kernel, &known, launch)
                                    : launch_group_tile_forward<ELEMENT, 128>(kernel, &known, launch);
}

template <typename ELEMENT, bool DK>
cudaError_t launch_group_tile_gradients(const char *kernel, const skl_cuda_params *params,
                                        const skl_cuda_launch *launch)
{
    return has_narrow_heads(params) ? launch_group_tile_gradient<ELEMENT, 64, DK>(kernel, params, launch)
                                    : launch_group_tile_gradient<ELEMENT, 128, DK>(kernel, params, launch);
}

} // namespace sm80

#define GROUP_TILES(arch, dtype, name)                                                                               \
    SKL_LAUNCHER(arch, dtype, name, rows, sm80::launch_group_tile_rows<SKL_ELEMENT(dtype)>)                          \
    SKL_LAUNCHER(arch, dtype, name, dq, sm80::launch_group_tile_gradients<SKL_ELEMENT(dtype), false>)                \
    SKL_LAUNCHER(arch, dtype, name, dk, sm80::launch_group_tile_gradients<SKL_ELEMENT(dtype), true>)
