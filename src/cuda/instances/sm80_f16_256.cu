#include "cuda/sm80/attention/backward.cuh"
#include "cuda/sm80/attention/forward.cuh"

extern "C" cudaError_t skl_cuda_sm80_f16_256_forward(const skl_cuda_params *params)
{
    return sm80::launch_forward<__half, 256, 1>(params);
}

extern "C" cudaError_t skl_cuda_sm80_f16_256_queries(const skl_cuda_params *params)
{
    return sm80::launch_gradient<__half, 256, 1, false>(params);
}

extern "C" cudaError_t skl_cuda_sm80_f16_256_keys(const skl_cuda_params *params)
{
    return sm80::launch_gradient<__half, 256, 1, true>(params);
}
