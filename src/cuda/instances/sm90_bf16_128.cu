#include "cuda/sm90/attention/fused_backward.cuh"
#include "cuda/sm90/attention/forward.cuh"
#include "cuda/sm90/attention/dk.cuh"

extern "C" cudaError_t skl_cuda_sm90_bf16_128_forward(const skl_cuda_params *params)
{
    return sm90::launch_forward<__nv_bfloat16, 128>(params, skl_cuda_sm80_bf16_128_forward);
}

extern "C" cudaError_t skl_cuda_sm90_bf16_128_keys(const skl_cuda_params *params)
{
    return sm90::launch_keys<__nv_bfloat16, 128>(params, skl_cuda_sm80_bf16_128_keys);
}

extern "C" cudaError_t skl_cuda_sm90_bf16_128_gradients(const skl_cuda_params *params)
{
    return sm90::launch_gradients<__nv_bfloat16, 128>(
        params, {skl_cuda_sm90_bf16_128_forward, skl_cuda_sm80_bf16_128_queries, skl_cuda_sm90_bf16_128_keys});
}
