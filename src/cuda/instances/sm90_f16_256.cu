#include "cuda/sm90/attention/forward.cuh"
#include "cuda/sm90/attention/backward_wide.cuh"

extern "C" cudaError_t skl_cuda_sm90_f16_256_forward(const skl_cuda_params *params)
{
    return sm90::launch_forward<__half, 256>(params, skl_cuda_sm80_f16_256_forward);
}

extern "C" cudaError_t skl_cuda_sm90_f16_256_queries(const skl_cuda_params *params)
{
    return sm90::launch_wide<__half, 256, false>(
        params, {skl_cuda_sm90_f16_256_forward, skl_cuda_sm80_f16_256_queries, skl_cuda_sm80_f16_256_keys});
}

extern "C" cudaError_t skl_cuda_sm90_f16_256_keys(const skl_cuda_params *params)
{
    return sm90::launch_wide<__half, 256, true>(
        params, {skl_cuda_sm90_f16_256_forward, skl_cuda_sm80_f16_256_queries, skl_cuda_sm80_f16_256_keys});
}
