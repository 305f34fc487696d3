#include "cuda/sm80/lists.cuh"

extern "C" cudaError_t skl_cuda_sm80_bf16_lists_rows(const skl_cuda_params *params)
{
    return sm80::launch_list_rows<__nv_bfloat16>(params);
}

extern "C" cudaError_t skl_cuda_sm80_bf16_lists_gradients(const skl_cuda_params *params)
{
    return sm80::launch_list_gradients<__nv_bfloat16>(params);
}
