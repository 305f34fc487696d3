/* Launches of kernels. */
#ifndef SKL_CUDA_COMMON_LAUNCH_CUH
#define SKL_CUDA_COMMON_LAUNCH_CUH

#include "cuda/launch.h"

/* Launches a kernel whose blocks have `memory` bytes of dynamic shared memory, on the stream of the call that
 * `params` has. No blocks: there is nothing to launch. */
template <typename KERNEL, typename PARAMS, typename... OTHERS>
cudaError_t launch_blocks(KERNEL kernel, dim3 blocks, int threads, size_t memory, const PARAMS &params,
                          const OTHERS &...others)
{
    if (blocks.x == 0)
        return cudaSuccess;
    const cudaError_t error = skl_cuda_allow_memory((const void *)kernel, memory);
    if (error != cudaSuccess)
        return error;
    kernel<<<blocks, (unsigned)threads, memory, params.call.stream>>>(params, others...);
    return cudaPeekAtLastError();
}

template <typename KERNEL, typename PARAMS, typename... OTHERS>
cudaError_t launch_blocks(KERNEL kernel, int64_t blocks, int threads, size_t memory, const PARAMS &params,
                          const OTHERS &...others)
{
    return launch_blocks(kernel, dim3((unsigned)blocks), threads, memory, params, others...);
}

#endif
