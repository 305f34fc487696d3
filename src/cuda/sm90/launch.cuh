/* Launches of the wgmma kernels. */
#ifndef SKL_CUDA_SM90_LAUNCH_CUH
#define SKL_CUDA_SM90_LAUNCH_CUH

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

} // namespace sm90

#endif
