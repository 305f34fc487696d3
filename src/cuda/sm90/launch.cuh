/* Launches of the wgmma kernels. */
#ifndef SKL_CUDA_SM90_LAUNCH_CUH
#define SKL_CUDA_SM90_LAUNCH_CUH

#include <type_traits>

#include "cuda/sm90/tensor_map.cuh"

namespace sm90
{

/* Launches a kernel whose blocks have `memory` bytes of dynamic shared memory, which may be more than the default
 * limit. */
template <typename... PARAMS>
cudaError_t launch_blocks(void (*kernel)(PARAMS...), dim3 blocks, int threads, size_t memory, cudaStream_t stream,
                          const PARAMS &...params)
{
    const cudaError_t error = cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, (int)memory);
    if (error != cudaSuccess)
        return error;
    kernel<<<blocks, threads, memory, stream>>>(params...);
    return cudaPeekAtLastError();
}

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
