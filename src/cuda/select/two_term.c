/* Two-term rows of the kernels that multiply f32 on tensor cores: where they are in the workspace. */
#include "cuda/select/choice.h"

bool skl_select_has_two_terms(const skl_cuda_kernel *kernel)
{
    return kernel != skl_cuda_general && kernel->dtype == SKL_F32;
}

/* Takes `size` bytes at *next. Without an address (when a plan is explained) it counts from 0. */
static const void *take(const void *workspace, size_t *next, size_t size)
{
    const void *const at = (const char *)workspace + *next;
    *next += skl_aligned_size(size);
    return at;
}

/* A tensor of two-term rows and its factors. `dim`: of a two-term row, high and low. */
static void lay_out(const void *workspace, size_t *next, int64_t heads, skl_tensor_rows shape, int64_t dim,
                    skl_input *rows, skl_input *factors)
{
    const int64_t count = heads * shape.rows;
    *rows = (skl_input){take(workspace, next, (size_t)(shape.batch * count * dim) * sizeof(uint16_t)), count * dim,
                        shape.rows * dim, dim};
    *factors =
        (skl_input){take(workspace, next, (size_t)(shape.batch * count) * sizeof(float)), count, shape.rows, 1};
}

static size_t lay_out_all(const skl_problem *p, int64_t dim_max, const void *workspace, skl_cuda_argument *teacher,
                          skl_cuda_argument *student)
{
    const skl_tensor_rows queries = skl_query_rows(p), keys = skl_key_rows(p);
    size_t next = 0;
    teacher->dim = student->dim = (int32_t)(2 * dim_max);
    lay_out(workspace, &next, p->heads_t, queries, teacher->dim, &teacher->q, &teacher->q_factors);
    lay_out(workspace, &next, p->heads_s, queries, student->dim, &student->q, &student->q_factors);
    lay_out(workspace, &next, p->key_heads_t, keys, teacher->dim, &teacher->k, &teacher->k_factors);
    lay_out(workspace, &next, p->key_heads_s, keys, student->dim, &student->k, &student->k_factors);
    return next;
}

size_t skl_select_two_term_size(const skl_problem *p, const skl_cuda_kernel *kernel)
{
    skl_cuda_argument teacher, student;
    return lay_out_all(p, kernel->dim_max, NULL, &teacher, &student);
}

void skl_select_two_term_rows(const choice *s, skl_cuda_params *params)
{
    const skl_problem *const p = &s->plan->problem;
    const bool reverse = p->direction == SKL_KL_REVERSE;
    const char *const at = (const char *)s->call->workspace + skl_select_two_term_at(s->plan, s->call->op);
    skl_cuda_launch *const launch =
        skl_select_add(s, "terms", s->kernel, skl_cuda_two_term_rows, SKL_VARIANT_TWO_TERM,
                       "f32 products on tensor cores are sums of three products of f16");
    launch->workspace_size =
        lay_out_all(p, s->kernel->dim_max, at, reverse ? &params->b : &params->a, reverse ? &params->a : &params->b);
}
