#include "cuda/sm80/attention/backward.cuh"
#include "cuda/sm80/attention/forward.cuh"

extern "C" cudaError_t skl_cuda_sm80_bf16_64_forward(const skl_cuda_params *params)
{
    return sm80::launch_forward<__nv_bfloat16, 64, 2>(params);
}

extern "C" cudaError_t skl_cuda_sm80_bf16_64_queries(const skl_cuda_params *params)
{
    return sm80::launch_gradient<__nv_bfloat16, 64, 2, false>(params);
}

extern "C" cudaError_t skl_cuda_sm80_bf16_64_keys(const skl_cuda_params *params)
{
    return sm80::launch_gradient<__nv_bfloat16, 64, 2, true>(params);
}
