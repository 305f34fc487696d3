/* Gradients of y_j = scale sum_g w_g relu(a_gj) with a_gj = <q_g, k_j>, as in docs/design/maths.md:
 *
 *     dw_g = scale sum_j dy_j relu(a_gj)
 *     dq_g = scale w_g sum_j dy_j [a_gj > 0] k_j
 *     dk_j = scale sum_i dy_ij sum_g w_ig [a_igj > 0] q_ig */
#include "cpu/reference_indexer.h"

#include <string.h>

#include "cpu/reference_row.h"

/* sum += weight * row of a student tensor */
static void add_row(float *sum, float weight, const known_row *r, const skl_input *tensor, int64_t row)
{
    for (int64_t c = 0; c < r->student.dim; c++)
        sum[c] += weight * skl_load(tensor->data, r->student.dtype, row + c);
}

/* dq[g] and dw[g] of one row, without the scale. */
static void sum_row(const known_row *r, const double *lse, float *dq, float *dw)
{
    const skl_side *const side = &r->student;
    const int64_t index_heads = r->task->problem->index_heads;
    memset(dq, 0, (size_t)(index_heads * side->dim) * sizeof *dq);
    memset(dw, 0, (size_t)index_heads * sizeof *dw);
    FOR_KEYS(r, j)
    {
        const float dy = student_gradient(r, lse, j);
        const int64_t k =
            SKL_ROW(*side->k, r->sequence.batch, skl_key_head(side, r->head), r->sequence.key_begin + j);
        for (int64_t g = 0; g < index_heads; g++) {
            const float dot = index_dot(r, g, j);
            if (!index_active(r, dot))
                continue;
            dw[g] += dy * dot;
            add_row(dq + g * side->dim, dy * index_weight(r, g), r, side->k, k);
        }
    }
}

static void store_row(const known_row *r, const float *dq, const float *dw)
{
    const skl_problem *const p = r->task->problem;
    const skl_side *const side = &r->student;
    const skl_output *const dw_s = &r->task->call->gradients.dw_s;
    const int64_t query = r->sequence.query_begin + r->i;
    for (int64_t g = 0; g < p->index_heads; g++) {
        if (dw_s->data != NULL)
            skl_store(dw_s->data, skl_grad_dtype(p, p->dtype_w),
                      SKL_ROW(*dw_s, r->sequence.batch, r->head, query) + g, side->scale * dw[g]);
        const int64_t row = SKL_ROW(*side->dq, r->sequence.batch, r->head * p->index_heads + g, query);
        for (int64_t c = 0; side->dq->data != NULL && c < side->dim; c++)
            skl_store(side->dq->data, side->grad_dtype, row + c, side->scale * dq[g * side->dim + c]);
    }
}

void skl_reference_indexer_queries(const skl_task *t)
{
    const skl_sequence sequence = skl_sequence_at(t->problem, &t->call->inputs, t->call->keys, t->batch);
    double *const lse = (double *)(void *)t->scratch;
    float *const dq = (float *)(void *)(lse + skl_group_size(t->problem));
    float *const dw = dq + t->problem->index_heads * t->problem->dim_s;
    const int64_t begin = t->tile * t->tiles.queries;
    const int64_t end = skl_min(begin + t->tiles.queries, sequence.query_count);
    for (int64_t i = begin; i < end; i++) {
        known_row r = row_at(t, &sequence, t->head, i);
        load_known(&r, lse);
        sum_row(&r, lse, dq, dw);
        store_row(&r, dq, dw);
    }
}

/* How often a key occurs in the indices of the row; once if the indexer is dense. */
static int64_t times_in_indices(const known_row *r, int64_t j)
{
    if (r->indices == NULL)
        return 1;
    int64_t times = 0;
    for (int64_t n = 0; n < r->key_count; n++)
        times += r->indices[n] == j;
    return times;
}

/* Adds the contribution of one row to dk_j, without the scale. */
static void add_to_key(const known_row *r, const double *lse, int64_t j, int64_t times, float *dk)
{
    const skl_side *const side = &r->student;
    const int64_t index_heads = r->task->problem->index_heads;
    const float dy = (float)times * student_gradient(r, lse, j);
    for (int64_t g = 0; g < index_heads; g++) {
        const int64_t q =
            SKL_ROW(*side->q, r->sequence.batch, r->head * index_heads + g, r->sequence.query_begin + r->i);
        if (index_active(r, index_dot(r, g, j)))
            add_row(dk, dy * index_weight(r, g), r, side->q, q);
    }
}

void skl_reference_indexer_keys(const skl_task *t)
{
    const skl_sequence sequence = skl_sequence_at(t->problem, &t->call->inputs, t->call->keys, t->batch);
    const skl_side side = skl_student_of(t->problem, t->call);
    const int64_t sharing = side.heads / side.key_heads;
    const int64_t key_rows = t->problem->packed ? sequence.key_count : t->problem->len_k;
    double *const lse = (double *)(void *)t->scratch;
    float *const dk = (float *)(void *)(lse + skl_group_size(t->problem));
    const int64_t begin = t->tile * t->tiles.keys;
    const int64_t end = skl_min(begin + t->tiles.keys, key_rows);
    for (int64_t j = begin; j < end; j++) {
        const skl_range queries = skl_queries_of_key(t->problem, &sequence, j);
        memset(dk, 0, (size_t)side.dim * sizeof *dk);
        for (int64_t head = t->head * sharing; head < (t->head + 1) * sharing; head++)
            for (int64_t i = queries.begin; i < queries.end; i++) {
                known_row r = row_at(t, &sequence, head, i);
                const int64_t times = times_in_indices(&r, j);
                if (times == 0)
                    continue;
                load_known(&r, lse);
                if (r.grad != 0.0F)
                    add_to_key(&r, lse, j, times, dk);
            }
        const int64_t row = SKL_ROW(*side.dk, sequence.batch, t->head, sequence.key_begin + j);
        for (int64_t c = 0; c < side.dim; c++)
            skl_store(side.dk->data, side.grad_dtype, row + c, side.scale * dk[c]);
    }
}
