#include "cuda/sm90/forward.cuh"

extern "C" cudaError_t skl_cuda_sm90_bf16_192_forward(const skl_cuda_params *params)
{
    return sm90::launch_forward<__nv_bfloat16, 192>(params, skl_cuda_sm80_bf16_256_forward);
}
