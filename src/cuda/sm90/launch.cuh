/* Launches of the wgmma kernels. */
#ifndef SKL_CUDA_SM90_LAUNCH_CUH
#define SKL_CUDA_SM90_LAUNCH_CUH

#include <type_traits>

#include "cuda/common/launch.cuh"
#include "cuda/sm90/tensor_map.cuh"

namespace sm90
{

/* Calls launch(dim_t, dim_s) with the smallest compiled head sizes that hold both, as types: 64 and 64, 128 and 64,
 * or 128 and 128. */
template <typename LAUNCH> cudaError_t with_head_sizes(const skl_problem &p, const LAUNCH &launch)
{
    const std::integral_constant<int, 64> narrow;
    const std::integral_constant<int, 128> wide;
    return p.dim_s > 64 ? launch(wide, wide) : p.dim_t > 64 ? launch(wide, narrow) : launch(narrow, narrow);
}

} // namespace sm90

#endif
