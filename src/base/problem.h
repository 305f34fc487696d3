/* Every rule about a problem lives here, once. Below this nothing is validated again. */
#ifndef SKL_BASE_PROBLEM_H
#define SKL_BASE_PROBLEM_H

#include "base/host_device.h"
#include "streamkl.h"

enum { SKL_OP_COUNT = 4 };

enum {
    SKL_DIM_MAX = 512,
    SKL_INDEXED_DIM_MAX = 576, /* of an indexer's teacher: the compressed keys of multi-head latent attention */
    SKL_INDEX_HEADS_MAX = 256
};

/* Lengths, windows and offsets stay below this, so that sums of a few of them cannot overflow. */
#define SKL_LENGTH_MAX ((int64_t)1 << 40)

/* Checks `given` and writes it to `problem` with the defaults filled in: key heads, scales, causal folded into
 * window_right, windows without limit as SKL_LENGTH_MAX * 4. */
skl_status skl_problem_check(skl_problem *problem, const skl_problem *given);

skl_status skl_op_check(skl_op op);

/* A window of a checked problem. */
SKL_HOST_DEVICE int skl_is_unlimited(int64_t window)
{
    return window > SKL_LENGTH_MAX;
}

/* Teacher heads averaged for each student head. */
SKL_HOST_DEVICE int64_t skl_group_size(const skl_problem *problem)
{
    return problem->heads_t / problem->heads_s;
}

SKL_HOST_DEVICE int skl_is_indexer(const skl_problem *problem)
{
    return problem->student == SKL_STUDENT_INDEXER;
}

/* The teacher is a mean of heads, whose LSEs come before everything else. An indexer's teacher always is, if only of
 * one head. */
SKL_HOST_DEVICE int skl_has_teacher_groups(const skl_problem *problem)
{
    return problem->heads_t != problem->heads_s || skl_is_indexer(problem);
}

/* Heads of q_s. */
SKL_HOST_DEVICE int64_t skl_query_heads_s(const skl_problem *problem)
{
    return problem->heads_s * (skl_is_indexer(problem) ? problem->index_heads : 1);
}

SKL_HOST_DEVICE size_t skl_dtype_size(skl_dtype dtype)
{
    return dtype == SKL_F32 ? 4 : 2;
}

/* Type of a gradient whose tensor has type `dtype`. */
SKL_HOST_DEVICE skl_dtype skl_grad_dtype(const skl_problem *problem, skl_dtype dtype)
{
    return problem->grad_f32 ? SKL_F32 : dtype;
}

#endif
