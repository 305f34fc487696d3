#include "cuda/sm90/forward.cuh"

extern "C" cudaError_t skl_cuda_sm90_f16_256_forward(const skl_cuda_params *params)
{
    return sm90::launch_forward<__half, 256>(params, skl_cuda_sm80_f16_256_forward);
}
