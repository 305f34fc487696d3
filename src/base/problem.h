/* All rules about a problem. Code below the public API relies on them and checks nothing again. */
#ifndef SKL_BASE_PROBLEM_H
#define SKL_BASE_PROBLEM_H

#include "base/host_device.h"
#include "streamkl.h"

enum { SKL_OP_COUNT = 7 };

/* skl_states_finish as an operation. It needs no workspace. */
#define SKL_OP_FINISH ((skl_op)SKL_OP_COUNT)

enum {
    SKL_DIM_MAX = 512,
    SKL_INDEXED_DIM_MAX = 576, /* teacher of an indexer: compressed keys of multi-head latent attention */
    SKL_INDEX_HEADS_MAX = 256
};

/* Limit of lengths, windows and offsets: sums of a few of them do not overflow. */
#define SKL_LENGTH_MAX ((int64_t)1 << 40)

/* Checks `given` and copies it to `problem` with defaults filled in: key heads and scales; causal becomes
 * window_right = 0; a window without limit becomes SKL_LENGTH_MAX * 4. */
skl_status skl_problem_check(skl_problem *problem, const skl_problem *given);

skl_status skl_op_check(skl_op op);

/* Whether a checked problem is one for this operation. */
skl_status skl_op_check_for(const skl_problem *problem, skl_op op);

/* Whether an operation is one of the student's own attention. */
SKL_HOST_DEVICE int skl_op_is_attention(skl_op op)
{
    return op == SKL_OP_ATTENTION_FORWARD || op == SKL_OP_ATTENTION_BACKWARD;
}

/* Whether an operation has gradients. */
SKL_HOST_DEVICE int skl_op_has_gradients(skl_op op)
{
    return op == SKL_OP_BACKWARD || op == SKL_OP_FORWARD_BACKWARD || op == SKL_OP_ATTENTION_BACKWARD;
}

/* Whether an operation computes gradients and rows together, from both LSEs. */
SKL_HOST_DEVICE int skl_op_is_one_pass(skl_op op)
{
    return op == SKL_OP_FORWARD_BACKWARD || op == SKL_OP_ATTENTION_BACKWARD;
}

/* Whether a window of a checked problem has no limit. */
SKL_HOST_DEVICE int skl_is_unlimited(int64_t window)
{
    return window > SKL_LENGTH_MAX;
}

/* Teacher heads per student head. */
SKL_HOST_DEVICE int64_t skl_group_size(const skl_problem *problem)
{
    return problem->heads_t / problem->heads_s;
}

SKL_HOST_DEVICE int skl_is_indexer(const skl_problem *problem)
{
    return problem->student == SKL_STUDENT_INDEXER;
}

/* The teacher is the mean of a group of heads, whose LSEs are needed first. This always holds for the teacher of an
 * indexer, even for groups of one head. */
SKL_HOST_DEVICE int skl_has_teacher_groups(const skl_problem *problem)
{
    return problem->heads_t != problem->heads_s || skl_is_indexer(problem);
}

SKL_HOST_DEVICE int skl_is_pooled(const skl_problem *problem)
{
    return problem->pool != SKL_POOL_NONE;
}

/* Keys of the student for `keys` keys of the teacher: as many, or blocks. */
SKL_HOST_DEVICE int64_t skl_student_keys(const skl_problem *problem, int64_t keys)
{
    if (!skl_is_pooled(problem))
        return keys;
    const int64_t complete = keys / problem->pool_size;
    return complete + (problem->pool_blocks != SKL_POOL_COMPLETE && keys % problem->pool_size != 0);
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
