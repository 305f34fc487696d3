/* The launches of a call. */
#include "cuda/select/choice.h"

#include <string.h>

/* ---- Two-term rows --------------------------------------------------------------------------------------------- */

/* Takes `size` bytes at *next. */
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

size_t skl_cuda_lay_out_terms(const skl_problem *p, int64_t dim, const void *workspace, skl_cuda_argument *teacher,
                              skl_cuda_argument *student)
{
    const skl_tensor_rows queries = skl_query_rows(p), keys = skl_key_rows(p);
    size_t next = 0;
    teacher->dim = student->dim = (int32_t)(2 * dim);
    lay_out(workspace, &next, p->heads_t, queries, teacher->dim, &teacher->q, &teacher->q_factors);
    lay_out(workspace, &next, p->heads_s, queries, student->dim, &student->q, &student->q_factors);
    lay_out(workspace, &next, p->key_heads_t, keys, teacher->dim, &teacher->k, &teacher->k_factors);
    lay_out(workspace, &next, p->key_heads_s, keys, student->dim, &student->k, &student->k_factors);
    return next;
}

static void add_terms(const choice *s)
{
    skl_cuda_argument teacher, student;
    skl_cuda_launch *const launch =
        skl_select_add(s, "terms", s->kernel, skl_cuda_two_term_rows, SKL_VARIANT_TWO_TERM,
                       "f32 products on tensor cores are sums of three products of f16");
    skl_select_keep_workspace(s, launch,
                              skl_cuda_lay_out_terms(s->problem, s->kernel->dim_max, NULL, &teacher, &student));
    s->launches->terms_at = launch->workspace_at;
    s->launches->term_dim = (int32_t)s->kernel->dim_max;
}

/* ---- Row bounds ------------------------------------------------------------------------------------------------ */

/* The launch that tabulates row bounds by key comes before the others, where one of them needs it. */
static void add_bounds(const choice *s)
{
    const skl_problem *const p = s->problem;
    skl_cuda_launches *const launches = s->launches;
    bool needed = false;
    for (int n = 0; n < launches->count; n++)
        needed = needed || launches->at[n].streams_queries;
    if (!needed || !p->row_bounds)
        return;
    const int64_t keys = skl_all_rows(skl_key_rows(p));
    skl_cuda_launch *const added =
        skl_select_add(s, "bounds", &skl_cuda_general, skl_cuda_bounds_by_key, SKL_VARIANT_BOUNDS,
                       "kernels with tiles of keys need the queries that attend to each key");
    skl_select_keep_workspace(s, added, 2 * (size_t)keys * sizeof(int32_t));
    launches->key_bounds_at = added->workspace_at;
    launches->has_key_bounds = true;
    const skl_cuda_launch bounds = *added;
    memmove(&launches->at[1], &launches->at[0], (size_t)(launches->count - 1) * sizeof bounds);
    launches->at[0] = bounds;
}

/* ---- The call -------------------------------------------------------------------------------------------------- */

/* Puts the bytes of each launch after the kept part. */
static void lay_out_workspace(skl_cuda_launches *launches)
{
    for (int n = 0; n < launches->count; n++)
        if (!launches->at[n].keeps_workspace)
            launches->at[n].workspace_at = launches->kept_size;
    launches->workspace_size = launches->kept_size + launches->private_size;
}

void skl_cuda_select(const skl_problem *p, const skl_cuda_target *target, const skl_cuda_request *request,
                     const skl_cuda_layout *layout, skl_cuda_launches *launches)
{
    memset(launches, 0, offsetof(skl_cuda_launches, at));
    choice s = {.problem = p,
                .target = target,
                .device = &target->device,
                .request = request,
                .layout = layout,
                .launches = launches,
                .work = skl_cuda_work_of(p),
                .some_rows = p->batch > 0 && p->len_q > 0,
                .some_keys = p->batch > 0 && skl_student_keys(p, p->len_k) > 0,
                .rows = skl_op_has_rows(request->op, request->rows),
                .gradients = skl_op_has_gradients(request->op),
                .capped = skl_select_is_capped(p)};
    if (request->op == SKL_OP_ATTENTION_STATS) {
        s.kernel = target->kernel;
        skl_select_stats(&s);
        lay_out_workspace(launches);
        return;
    }
    skl_select_fit(&s);
    if (p->packed)
        skl_select_add(&s, "tails", &skl_cuda_general, skl_cuda_clear_tails, SKL_VARIANT_CLEAR,
                       "rows after the last packed sequence become 0");
    const bool carried = skl_op_is_attention(request->op);
    if (s.kernel->two_terms && !carried)
        add_terms(&s);
    if (carried)
        skl_select_carried(&s);
    else if (skl_is_indexer(p))
        skl_select_indexer(&s);
    else if (s.work == SKL_DOES_GROUPS && !s.kernel->general)
        skl_select_groups(&s);
    else
        skl_select_attention(&s);
    add_bounds(&s);
    lay_out_workspace(launches);
}
