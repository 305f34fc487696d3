#include "cuda/forward_sm80.cuh"

extern "C" cudaError_t skl_cuda_forward_sm80_f16_128(const skl_cuda_params *params)
{
    return forward_sm80::launch<__half, 128>(params);
}
