#include "cuda/sm90/indexer/dense.cuh"

/* What the copy engine cannot read is for mma.sync, which follows the same plan. */

extern "C" cudaError_t skl_cuda_sm90_bf16_indexer_rows(const skl_cuda_params *params)
{
    return sm90::launch_index_rows(params, skl_cuda_sm80_bf16_indexer_rows);
}

extern "C" cudaError_t skl_cuda_sm90_bf16_indexer_gradients(const skl_cuda_params *params)
{
    return sm90::launch_index_gradients(params, skl_cuda_sm80_bf16_indexer_gradients);
}
