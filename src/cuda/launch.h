/* What the backend (C) hands to a kernel (CUDA C): one plain struct, by value, and one launcher a kernel. */
#ifndef SKL_CUDA_LAUNCH_H
#define SKL_CUDA_LAUNCH_H

#include <cuda_runtime_api.h>

#include "base/kl_math.h"
#include "base/side.h"

#ifdef __cplusplus
extern "C" {
#endif

/* One argument of the KL, as it lies in the constant bank. */
typedef struct skl_cuda_argument {
    skl_input q, k;
    int32_t heads_per_key; /* query heads that share a key head */
    int32_t dim;
    int32_t capped;
    float scale;     /* what multiplies a product to make it a logit in base 2; for capped ones what tanh gets */
    float softcap_2; /* cap in base 2, and its inverse */
    float inverse_softcap_2;
} skl_cuda_argument;

enum { SKL_SECTION_MAX = 16 };

typedef struct skl_cuda_params {
    skl_problem problem;
    skl_call call;
    skl_cuda_argument one, two; /* teacher and student, or student and teacher when the KL is reversed */
    int32_t kl_in_sweep;        /* rows.kl comes from the kernel that gives gradients */
    int32_t rows_known;         /* kl and dot_t were stored by an earlier kernel of the same call */
    int32_t teacher_side;       /* gradients of q_t or k_t, not of q_s or k_s */
    int64_t dim_first;          /* first dimension of the gradient that a launch gives */
    int32_t block_count;        /* blocks that run at once and have scratch memory each */
    int32_t multiprocessors;
    int32_t section; /* heads whose tiles are done together, so that their keys stay in the L2 cache */
    int32_t splits;  /* forward on tensor cores: parts that the keys of a query tile are cut into */
    /* General forward: skl_lse2 [block][group][tile], LSEs of a group of teacher heads. Forward on tensor cores, keys
     * in parts: skl_row_state [tile][part][query]. Backward of an indexer: see indexer_plan.h. */
    void *scratch;
    /* Where a sweep adds up a key gradient, f32: the gradient itself, or workspace. No data: no such gradient. */
    skl_output sums;
} skl_cuda_params;

/* The side whose gradients are wanted. */
SKL_HOST_DEVICE skl_side skl_cuda_side(const skl_cuda_params *params)
{
    return params->teacher_side ? skl_teacher_of(&params->problem, &params->call)
                                : skl_student_of(&params->problem, &params->call);
}

/* Whether it is the second argument of the KL. */
SKL_HOST_DEVICE int skl_cuda_of_second(const skl_cuda_params *params)
{
    return (params->problem.direction == SKL_KL_REVERSE) == (params->teacher_side != 0);
}

typedef cudaError_t (*skl_cuda_launcher)(const skl_cuda_params *params);

/* The general kernels: every type, size, stride and option, f32 arithmetic on the ordinary pipes. */
enum { SKL_GENERAL_TILE = 128 }; /* rows that a block owns */
cudaError_t skl_cuda_general_forward(const skl_cuda_params *params);
cudaError_t skl_cuda_general_queries(const skl_cuda_params *params); /* dq of one side */
cudaError_t skl_cuda_general_keys(const skl_cuda_params *params);    /* dk of one side */

/* The same for indexers. Dense: */
cudaError_t skl_cuda_indexer_rows(const skl_cuda_params *params);
cudaError_t skl_cuda_indexer_gradients(const skl_cuda_params *params); /* those of dq, dw and dk that are wanted */
/* Sparse: */
cudaError_t skl_cuda_listed_rows(const skl_cuda_params *params);
cudaError_t skl_cuda_listed_gradients(const skl_cuda_params *params);

/* The mma.sync kernels count rows in 32 bits, and own at least so many rows a block. */
#define SKL_SM80_ROWS_MAX ((int64_t)1 << 30)
enum { SKL_SM80_TILE_MIN = 64 };

/* Keys are cut into parts for at most so many blocks of an mma.sync kernel a multiprocessor, and their states are of
 * so many rows a multiprocessor: it bounds the workspace. */
enum { SKL_SM80_RESIDENT_MAX = 3, SKL_PART_ROWS_MAX = 512 };

/* Tensor cores by mma.sync: 16-bit types of one kind, r = 1, dimensions a multiple of 8, 16-byte aligned rows. */
#define SKL_CUDA_SM80(type_dim)                                                                                      \
    cudaError_t skl_cuda_sm80_##type_dim##_forward(const skl_cuda_params *params);                                   \
    cudaError_t skl_cuda_sm80_##type_dim##_queries(const skl_cuda_params *params);                                   \
    cudaError_t skl_cuda_sm80_##type_dim##_keys(const skl_cuda_params *params);
SKL_CUDA_SM80(bf16_64)
SKL_CUDA_SM80(bf16_128)
SKL_CUDA_SM80(bf16_256)
SKL_CUDA_SM80(f16_64)
SKL_CUDA_SM80(f16_128)
SKL_CUDA_SM80(f16_256)
#undef SKL_CUDA_SM80

/* The same on Hopper: wgmma and the copy engine. What those do not fit goes to the kernels above. */
#define SKL_CUDA_SM90(type)                                                                                          \
    cudaError_t skl_cuda_sm90_##type##_64_forward(const skl_cuda_params *params);                                    \
    cudaError_t skl_cuda_sm90_##type##_128_forward(const skl_cuda_params *params);                                   \
    cudaError_t skl_cuda_sm90_##type##_192_forward(const skl_cuda_params *params);                                   \
    cudaError_t skl_cuda_sm90_##type##_256_forward(const skl_cuda_params *params);                                   \
    cudaError_t skl_cuda_sm90_##type##_64_gradients(const skl_cuda_params *params); /* dq and dk of one side */      \
    cudaError_t skl_cuda_sm90_##type##_128_gradients(const skl_cuda_params *params);                                 \
    cudaError_t skl_cuda_sm90_##type##_192_queries(const skl_cuda_params *params); /* dq of one side */              \
    cudaError_t skl_cuda_sm90_##type##_256_queries(const skl_cuda_params *params);                                   \
    cudaError_t skl_cuda_sm90_##type##_64_keys(const skl_cuda_params *params); /* dk of one side */                  \
    cudaError_t skl_cuda_sm90_##type##_128_keys(const skl_cuda_params *params);                                      \
    cudaError_t skl_cuda_sm90_##type##_192_keys(const skl_cuda_params *params);                                      \
    cudaError_t skl_cuda_sm90_##type##_256_keys(const skl_cuda_params *params);
SKL_CUDA_SM90(bf16)
SKL_CUDA_SM90(f16)
#undef SKL_CUDA_SM90

/* An indexer's dense stage on tensor cores: 16-bit types of one kind, KL(P || S), no softcap; on Hopper bf16. */
cudaError_t skl_cuda_sm80_bf16_indexer_rows(const skl_cuda_params *params);
cudaError_t skl_cuda_sm80_bf16_indexer_gradients(const skl_cuda_params *params); /* dq, dw and dk, and rows */
cudaError_t skl_cuda_sm80_f16_indexer_rows(const skl_cuda_params *params);
cudaError_t skl_cuda_sm80_f16_indexer_gradients(const skl_cuda_params *params);
cudaError_t skl_cuda_sm90_bf16_indexer_rows(const skl_cuda_params *params);
cudaError_t skl_cuda_sm90_bf16_indexer_gradients(const skl_cuda_params *params);
/* Its sparse stage, in both directions: */
cudaError_t skl_cuda_sm80_bf16_lists_rows(const skl_cuda_params *params);
cudaError_t skl_cuda_sm80_bf16_lists_gradients(const skl_cuda_params *params); /* and rows */
cudaError_t skl_cuda_sm80_f16_lists_rows(const skl_cuda_params *params);
cudaError_t skl_cuda_sm80_f16_lists_gradients(const skl_cuda_params *params);

/* Before and behind a sweep that adds to sums: they become 0, and are stored as the gradient if they are not itself.
 */
cudaError_t skl_cuda_clear_sums(const skl_cuda_params *params);
cudaError_t skl_cuda_store_sums(const skl_cuda_params *params);

/* Rows and gradients behind the last packed sequence. */
cudaError_t skl_cuda_clear_tails(const skl_cuda_params *params);

cudaError_t skl_cuda_states_merge(int64_t count, skl_row_state *into, const skl_row_state *from, cudaStream_t stream);
cudaError_t skl_cuda_states_finish(const skl_cuda_params *params);

#ifdef __cplusplus
}
#endif

#endif
