#include "cuda/sm90/attention/fused_backward.cuh"
#include "cuda/sm90/attention/forward.cuh"
#include "cuda/sm90/attention/dk.cuh"

extern "C" cudaError_t skl_cuda_sm90_f16_64_forward(const skl_cuda_params *params)
{
    return sm90::launch_forward<__half, 64>(params, skl_cuda_sm80_f16_64_forward);
}

extern "C" cudaError_t skl_cuda_sm90_f16_64_keys(const skl_cuda_params *params)
{
    return sm90::launch_keys<__half, 64>(params, skl_cuda_sm80_f16_64_keys);
}

extern "C" cudaError_t skl_cuda_sm90_f16_64_gradients(const skl_cuda_params *params)
{
    return sm90::launch_gradients<__half, 64>(
        params, {skl_cuda_sm90_f16_64_forward, skl_cuda_sm80_f16_64_queries, skl_cuda_sm90_f16_64_keys});
}
