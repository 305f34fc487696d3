#include "cuda/forward_sm80.cuh"

extern "C" cudaError_t skl_cuda_forward_sm80_bf16_64(const skl_cuda_params *params)
{
    return forward_sm80::launch<__nv_bfloat16, 64>(params);
}
