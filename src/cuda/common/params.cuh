/* Parameters of the attention kernels, in the constant bank. The indexer's extend skl_cuda_params in indexer/. */
#ifndef SKL_CUDA_COMMON_PARAMS_CUH
#define SKL_CUDA_COMMON_PARAMS_CUH

#include "cuda/launch.h"

struct forward_params : skl_cuda_params {
    int32_t num_splits;          /* splits of the keys of a query tile */
    int32_t head_group;          /* heads whose tiles run together */
    skl_row_state *split_states; /* [tile][split][query], with more than one split */
    int32_t lse_computed;        /* teacher groups: an earlier launch wrote the teacher's LSEs, of the visible keys */
};

inline forward_params forward_params_of(const skl_cuda_params *params, const skl_cuda_launch *launch)
{
    return {*params, launch->num_splits, launch->head_group, (skl_row_state *)params->call.workspace,
            launch->lse_computed};
}

struct backward_params : skl_cuda_params {
    int32_t teacher_side;   /* gradients of q_t or k_t, not of q_s or k_s */
    int32_t kl_in_backward; /* rows.kl comes out of this kernel */
    int32_t rows_known;     /* an earlier launch of the same call stored kl and dot_t */
    int32_t head_group;     /* heads whose tiles run together */
    int64_t dim_first;      /* first dimension of the slice of the gradient that a launch computes */
    skl_output dk_sums;     /* f32 sums of dk of a fused backward; no data: no dk */
};

/* f32 sums of a side's dk: dk itself, or `at` bytes into the launch's workspace. */
inline skl_output dk_sums_of(const skl_cuda_params *params, bool of_teacher, size_t at)
{
    const skl_problem *const p = &params->problem;
    const skl_side side = of_teacher ? skl_teacher_of(p, &params->call) : skl_student_of(p, &params->call);
    const int64_t rows = of_teacher ? skl_key_rows(p).rows : skl_student_key_rows(p).rows;
    return side.grad_dtype == SKL_F32
               ? *side.dk
               : skl_output_contiguous((char *)params->call.workspace + at, side.key_heads, rows, side.dim);
}

inline backward_params backward_params_of(const skl_cuda_params *params, const skl_cuda_launch *launch)
{
    const skl_output none = {};
    return {*params,
            launch->teacher_side,
            launch->kl_in_backward,
            launch->rows_known,
            launch->head_group,
            0,
            launch->sums_dk ? dk_sums_of(params, launch->teacher_side != 0, 0) : none};
}

/* The side whose gradients a backward computes. */
__host__ __device__ inline skl_side side_of(const backward_params &params)
{
    return params.teacher_side ? skl_teacher_of(&params.problem, &params.call)
                               : skl_student_of(&params.problem, &params.call);
}

/* Whether the gradient's side is B, the second argument of the KL. */
__host__ __device__ inline bool is_grad_of_b(const backward_params &params)
{
    return (params.problem.direction == SKL_KL_REVERSE) == (params.teacher_side != 0);
}

/* The student's part of a call with a pooled teacher: an indexer of blocks. The tables at params->key_bounds, which
 * skl_cuda_bounds_of_blocks fills, take the place of all masks: the blocks of each row, then the rows of each block.
 */
inline skl_cuda_params block_params_of(const skl_cuda_params *params)
{
    const skl_problem *const p = &params->problem;
    const int64_t rows = p->batch * p->len_q;
    skl_cuda_params of_blocks = *params;
    skl_problem *const blocks = &of_blocks.problem;
    blocks->len_k = skl_student_keys(p, p->len_k);
    blocks->pool = SKL_POOL_NONE;
    blocks->window_left = blocks->window_right = 4 * SKL_LENGTH_MAX; /* unlimited */
    blocks->positions = SKL_POSITIONS_OFFSET;
    blocks->offset_q = blocks->offset_k = 0;
    blocks->row_bounds = 1;
    of_blocks.call.keys = {0, blocks->len_k};
    of_blocks.call.inputs.key_lengths = NULL;
    of_blocks.call.inputs.key_begin = params->key_bounds;
    of_blocks.call.inputs.key_end = params->key_bounds + rows;
    of_blocks.key_bounds = params->key_bounds + 2 * rows;
    return of_blocks;
}

/* Reports a launch to tests; see skl_cuda_launch_hook. */
inline void record_launch(const char *kernel, const char *variant, int32_t num_splits)
{
    if (skl_cuda_launch_hook != NULL)
        skl_cuda_launch_hook(kernel, variant, num_splits);
}

#endif
