/* Workspace of a plan. */
#include "cuda/select/choice.h"

static size_t larger(size_t a, size_t b)
{
    return a > b ? a : b;
}

size_t skl_select_group_lse_size(const skl_plan *plan)
{
    return (size_t)plan->sm_count * SKL_GENERAL_BLOCKS_PER_SM * (size_t)skl_group_size(&plan->problem) *
           SKL_GENERAL_TILE * sizeof(skl_lse2);
}

size_t skl_select_side_sums_size(const skl_problem *p, bool of_teacher)
{
    if (p->grad_f32 || (p->gradients & (of_teacher ? SKL_DK_T : SKL_DK_S)) == 0)
        return 0;
    const int64_t rows = p->packed ? p->total_k : p->batch * p->len_k;
    return (size_t)(rows * (of_teacher ? p->key_heads_t * p->dim_t : p->key_heads_s * p->dim_s)) * sizeof(float);
}

size_t skl_select_dk_sums_size(const skl_problem *p)
{
    return larger(skl_select_side_sums_size(p, true), skl_select_side_sums_size(p, false));
}

size_t skl_select_teacher_sums_at(const skl_problem *p)
{
    return skl_aligned_size(skl_select_side_sums_size(p, false));
}

static size_t fused_workspace_size(const skl_plan *plan, const skl_cuda_kernel *kernel, skl_op op)
{
    const skl_problem *const p = &plan->problem;
    if (kernel->fused == NULL || !skl_op_has_gradients(op) || plan->deterministic)
        return 0;
    return op == SKL_OP_BACKWARD && skl_select_joint_kernel(p, kernel) != NULL
               ? skl_select_teacher_sums_at(p) + skl_select_side_sums_size(p, true)
               : skl_select_dk_sums_size(p);
}

static size_t split_states_size(const skl_plan *plan)
{
    return (size_t)plan->sm_count * SKL_SPLIT_ROWS_MAX * sizeof(skl_row_state);
}

static size_t own_workspace_size(const skl_plan *plan, const skl_cuda_kernel *kernel, skl_op op)
{
    const size_t split_states = kernel != skl_cuda_general && op != SKL_OP_BACKWARD ? split_states_size(plan) : 0;
    return larger(larger(skl_select_group_lse_size(plan), split_states), fused_workspace_size(plan, kernel, op));
}

size_t skl_select_two_term_at(const skl_plan *plan, skl_op op)
{
    return skl_aligned_size(own_workspace_size(plan, plan->kernel, op));
}

static size_t attention_workspace_size(const skl_plan *plan, const skl_cuda_kernel *kernel, skl_op op)
{
    return skl_select_has_two_terms(kernel)
               ? skl_select_two_term_at(plan, op) + skl_select_two_term_size(&plan->problem, kernel)
               : own_workspace_size(plan, kernel, op);
}

size_t skl_select_teacher_lse_size(const skl_problem *p)
{
    const int64_t rows = p->packed ? p->total_q : p->batch * p->len_q;
    return skl_aligned_size((size_t)(rows * p->heads_t) * sizeof(float));
}

skl_sparse_layout skl_select_sparse_layout_of(const skl_plan *plan, bool gradients, bool with_teacher)
{
    const skl_problem *const p = &plan->problem;
    skl_sparse_layout layout = {.chunk = skl_sparse_chunk_of(p),
                                .num_blocks = (int64_t)plan->sm_count * SKL_GENERAL_BLOCKS_PER_SM};
    layout.scores_at = gradients ? layout.chunk.end : 0;
    layout.end = layout.scores_at + (size_t)layout.num_blocks * (size_t)p->top_k * SKL_SPARSE_SCORE_SIZE;
    skl_sparse_plan_memory(&layout, p, with_teacher, p->heads_t / p->key_heads_t, plan->smem_per_block,
                           plan->smem_per_sm);
    return layout;
}

/* Of the launches in strips of an attention with teacher groups; `own`: those of the plan's own kernel, too. Rows
 * come with and without dot_t, and either may take more. */
static size_t group_strips_size(const skl_plan *plan, bool own, skl_op op)
{
    const skl_problem *const p = &plan->problem;
    const bool teacher = skl_select_teacher_kernel_of(p) != skl_cuda_general, gradients = skl_op_has_gradients(op);
    const size_t lse_size = gradients ? 0 : skl_select_teacher_lse_size(p);
    size_t size = 0;
    if (op != SKL_OP_BACKWARD && own)
        size = lse_size + skl_group_rows_layout(p, plan->sm_count, false).size;
    if (op != SKL_OP_BACKWARD && teacher)
        size = larger(size, lse_size + skl_group_rows_layout(p, plan->sm_count, true).size);
    if (gradients && teacher)
        size = larger(size, skl_group_gradients_layout(p, plan->sm_count, true).size);
    return gradients && own ? larger(size, skl_group_gradients_layout(p, plan->sm_count, false).size) : size;
}

/* Of indexers and teacher groups. Enough for the general kernel too: it does what strides keep from tensor cores. */
static size_t group_workspace_size(const skl_plan *plan, const skl_cuda_kernel *kernel, skl_op op)
{
    const skl_problem *const p = &plan->problem;
    const bool gradients = skl_op_has_gradients(op);
    size_t size = skl_select_group_lse_size(plan);
    if (kernel->group_fused != NULL && gradients && plan->deterministic)
        return group_workspace_size(plan, skl_select_deterministic_kernel_of(p), op);
    if (skl_select_is_attention_with_groups(p) && kernel != skl_cuda_general) {
        const size_t lse_size = gradients ? 0 : skl_select_teacher_lse_size(p);
        size = larger(size, lse_size + split_states_size(plan));
        size = larger(size, group_strips_size(plan, kernel->strip_rows != NULL, op));
    }
    if (kernel->strip_rows != NULL || kernel->group_dq != NULL)
        return size;
    if (kernel->group_fused != NULL)
        return larger(size, gradients ? skl_select_dk_sums_size(p) : 0);
    if (p->top_k > 0) {
        const skl_sparse_layout layout = skl_select_sparse_layout_of(plan, gradients, true);
        size = larger(size, gradients ? layout.chunk.end : 0);
        return kernel == skl_cuda_general ? size : larger(size, layout.end);
    }
    if (skl_is_indexer(p))
        size = larger(size, gradients ? skl_dense_chunk_of(p, plan->sm_count).end : 0);
    return kernel == skl_cuda_general ? size : larger(size, skl_index_layout_of(p, plan->sm_count, gradients).size);
}

size_t skl_select_key_bounds_at(const skl_plan *plan, skl_op op)
{
    const skl_cuda_kernel *const kernel = plan->kernel;
    return skl_aligned_size(skl_has_teacher_groups(&plan->problem) ? group_workspace_size(plan, kernel, op)
                                                                   : attention_workspace_size(plan, kernel, op));
}

size_t skl_select_key_bounds_size(const skl_problem *p)
{
    const int64_t rows = p->packed ? p->total_k : p->batch * p->len_k;
    return 2 * (size_t)rows * sizeof(int32_t);
}

size_t skl_cuda_workspace_size(const skl_plan *plan, skl_op op)
{
    if (op == SKL_OP_ATTENTION_BACKWARD)
        return skl_select_attention_backward_size(plan);
    const bool bounds = plan->problem.row_bounds && skl_op_has_gradients(op);
    return skl_select_key_bounds_at(plan, op) + (bounds ? skl_select_key_bounds_size(&plan->problem) : 0);
}
