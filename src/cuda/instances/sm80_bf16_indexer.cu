#include "cuda/sm80/indexer/dense.cuh"

extern "C" cudaError_t skl_cuda_sm80_bf16_indexer_rows(const skl_cuda_params *params)
{
    return sm80::launch_index_rows<__nv_bfloat16>(params);
}

extern "C" cudaError_t skl_cuda_sm80_bf16_indexer_gradients(const skl_cuda_params *params)
{
    return sm80::launch_index_gradients<__nv_bfloat16>(params);
}
