/* What the backend (C) hands to a kernel (CUDA C): one plain struct, by value, and one launcher a kernel. */
#ifndef SKL_CUDA_LAUNCH_H
#define SKL_CUDA_LAUNCH_H

#include <cuda_runtime_api.h>

#include "base/side.h"

#ifdef __cplusplus
extern "C" {
#endif

typedef struct skl_cuda_params {
    skl_problem problem;
    skl_call call;
    int32_t rows_known;   /* kl and dot_t were stored by an earlier kernel of the same call */
    int32_t teacher_side; /* gradients of q_t or k_t, not of q_s or k_s */
    int64_t dim_first;    /* first dimension of the gradient that a launch gives */
    int32_t block_count;  /* blocks that run at once and have scratch memory each */
    float *scratch;       /* [block][group][tile]: LSEs of a group of teacher heads */
} skl_cuda_params;

typedef cudaError_t (*skl_cuda_launcher)(const skl_cuda_params *params);

/* The general kernels: every type, size, stride and option, f32 arithmetic on the ordinary pipes. */
enum { SKL_GENERAL_TILE = 64 };
cudaError_t skl_cuda_general_forward(const skl_cuda_params *params);
cudaError_t skl_cuda_general_queries(const skl_cuda_params *params); /* dq of one side */
cudaError_t skl_cuda_general_keys(const skl_cuda_params *params);    /* dk of one side */

/* Tensor cores by mma.sync: 16-bit types of one kind, r = 1, dimensions a multiple of 8, 16-byte aligned rows. */
cudaError_t skl_cuda_forward_sm80_bf16_64(const skl_cuda_params *params);
cudaError_t skl_cuda_forward_sm80_bf16_128(const skl_cuda_params *params);
cudaError_t skl_cuda_forward_sm80_f16_64(const skl_cuda_params *params);
cudaError_t skl_cuda_forward_sm80_f16_128(const skl_cuda_params *params);

/* Rows and gradients behind the last packed sequence. */
cudaError_t skl_cuda_clear_tails(const skl_cuda_params *params);

cudaError_t skl_cuda_states_merge(int64_t count, skl_row_state *into, const skl_row_state *from, cudaStream_t stream);
cudaError_t skl_cuda_states_finish(const skl_cuda_params *params);

#ifdef __cplusplus
}
#endif

#endif
