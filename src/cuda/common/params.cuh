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
    skl_output dk_sums;     /* where a fused backward adds up dk in f32; no data: no dk */
};

/* f32 sums of a side's dk: dk itself, or `at` bytes into the launch's workspace. */
inline skl_output dk_sums_of(const skl_cuda_params *params, bool of_teacher, size_t at)
{
    const skl_problem *const p = &params->problem;
    const skl_side side = of_teacher ? skl_teacher_of(p, &params->call) : skl_student_of(p, &params->call);
    return side.grad_dtype == SKL_F32 ? *side.dk
                                      : skl_output_contiguous((char *)params->call.workspace + at, side.key_heads,
                                                              skl_key_rows(p).rows, side.dim);
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

/* Whether it is B, the second argument of the KL. */
__host__ __device__ inline bool is_grad_of_b(const backward_params &params)
{
    return (params.problem.direction == SKL_KL_REVERSE) == (params.teacher_side != 0);
}

/* Reports a launch to tests; see skl_cuda_launch_hook. */
inline void record_launch(const char *kernel, const char *variant, int32_t num_splits)
{
    if (skl_cuda_launch_hook != NULL)
        skl_cuda_launch_hook(kernel, variant, num_splits);
}

#endif
