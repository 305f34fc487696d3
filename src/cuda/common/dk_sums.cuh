/* f32 sums of dk around a fused backward, which adds to them by TMA. */
#ifndef SKL_CUDA_COMMON_DK_SUMS_CUH
#define SKL_CUDA_COMMON_DK_SUMS_CUH

#include "cuda/common/params.cuh"

cudaError_t clear_dk_sums(const backward_params *params);

/* Rounds the sums to dk's type; nothing to do where they are dk itself. */
cudaError_t store_dk_sums(const backward_params *params);

#endif
