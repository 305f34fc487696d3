#include "cuda/sm80/indexer/sparse.cuh"

extern "C" cudaError_t skl_cuda_sm80_f16_sparse_rows(const skl_cuda_params *params)
{
    return sm80::launch_sparse_rows<__half>(params);
}

extern "C" cudaError_t skl_cuda_sm80_f16_sparse_gradients(const skl_cuda_params *params)
{
    return sm80::launch_sparse_gradients<__half>(params);
}
