/* Backward of a sparse indexer: dq and dw row by row; dk per key block, from all rows with a key of the block. */
#ifndef SKL_CPU_BODY_SPARSE_BACKWARD_H
#define SKL_CPU_BODY_SPARSE_BACKWARD_H

#include "cpu/body/sparse.h"

/* Number of entries of `indices` in a range, at most `most`. */
static int64_t count_indices(const sparse_row *r, skl_range range, int64_t most)
{
    int64_t count = 0;
    for (int64_t n = 0; n < r->task->problem->top_k && count < most; n++)
        count += skl_index_is_visible(r->indices[n], range);
    return count;
}

/* Loads LSEs, upstream gradient and KL of the row. As in load_known_rows, a row with one key has no gradient. */
static void sparse_load_known(sparse_row *r)
{
    const skl_call *const call = r->task->call;
    const skl_input *const grad = &call->inputs.grad_kl;
    const skl_input kl = skl_known_rows(r->task->rows_known, &call->inputs.kl, &call->rows.kl);
    for (int64_t h = 0; h < r->group_size; h++)
        r->lse_t[h] = skl_row_value(&call->inputs.lse_t, &r->sequence, r->head * r->group_size + h, r->i);
    r->lse_s = skl_row_value(&call->inputs.lse_s, &r->sequence, r->head, r->i);
    r->grad = grad->data != NULL ? skl_row_value(grad, &r->sequence, r->head, r->i) : 1.0F;
    r->kl = kl.data != NULL ? skl_row_value(&kl, &r->sequence, r->head, r->i) : 0.0F;
    if (skl_op_is_one_pass(call->op) && count_indices(r, r->visible, 2) == 1)
        r->grad = 0.0F;
}

/* r->dy = scale dy, 0 after the last key. Then r->dots = dy w_g [a_g > 0] and dw_g += sum_j dy_j relu(a_gj). */
static void sparse_gradients(sparse_row *r)
{
    const float c = r->grad * r->student.scale;
    sparse_teacher(r);
    student_block(r);
    for (int64_t key = 0; key < r->count; key += SKL_LANES) {
        const vec log_p = vec_load(r->x + key);
        const vec log_s = vec_load(r->y + key) - r->lse_s;
        const vec s = exp_vec(log_s);
        const vec dy = r->reverse ? mass_times(s, log_s - log_p - r->kl) : s - exp_vec(log_p);
        vec_store(r->dy + key, (vec)((ivec)(dy * c) & lanes_active(r, key)));
    }
    for (int64_t g = 0; g < r->heads; g++) {
        vec sum = {0};
        for (int64_t key = 0; key < r->count; key += SKL_LANES) {
            float *const at = r->dots + g * INDEX_BLOCK + key;
            const vec dots = vec_load(at);
            const vec dy = vec_load(r->dy + key);
            const ivec pass = lanes_active(r, key) & dots_pass(r->relu, dots);
            sum += (vec)((ivec)(dy * dots) & pass);
            vec_store(at, (vec)((ivec)(dy * r->w[g]) & pass));
        }
        r->dw[g] += lane_sum(sum);
    }
}

static void store_sparse_gradients(const sparse_row *r)
{
    const skl_problem *const p = r->task->problem;
    const skl_side *const s = &r->student;
    const skl_output *const dw = &r->task->call->gradients.dw_s;
    const int64_t query = r->sequence.query_begin + r->i;
    if (s->dq->data != NULL)
        store_rows(s->dq->data, s->grad_dtype, SKL_ROW(*s->dq, r->sequence.batch, r->head * r->heads, query),
                   s->dq->stride_head, r->dq, r->heads, s->dim);
    for (int64_t g = 0; dw->data != NULL && g < r->heads; g++)
        skl_store(dw->data, skl_grad_dtype(p, p->dtype_w), SKL_ROW(*dw, r->sequence.batch, r->head, query) + g,
                  r->dw[g]);
}

static void sparse_backward_queries(const skl_task *task)
{
    sparse_row r;
    sparse_begin(&r, task);
    const skl_call *const call = task->call;
    const int64_t width = padded(r.student.dim);
    const int64_t begin = task->tile * task->tiles.queries;
    const int64_t end = skl_min(begin + task->tiles.queries, r.sequence.query_count);
    const bool one_pass = skl_op_is_one_pass(call->op) && !task->rows_known;
    for (int64_t i = begin; i < end; i++) {
        sparse_row_begin(&r, task->head, i, 0, INT64_MAX);
        sparse_load_row(&r);
        sparse_load_known(&r);
        clear_rows(r.dq, r.heads, r.student.dim);
        memset(r.dw, 0, (size_t)r.heads * sizeof *r.dw);
        while (next_block(&r)) {
            sparse_gradients(&r);
            if (call->gradients.dq_s.data != NULL && r.grad != 0.0F)
                gemm_add(r.dq, width, r.dots, INDEX_BLOCK, r.k, width, r.heads, r.student.dim, r.count);
            if (one_pass)
                reduce_block(&r);
        }
        if (r.grad == 0.0F) /* no gradient, even if the row holds NaN */
            memset(r.dw, 0, (size_t)r.heads * sizeof *r.dw);
        store_sparse_gradients(&r);
        if (one_pass)
            set_kl_and_entropy(&r);
    }
}

/* Adds the contribution of one row to the dk of the key block that starts at `first`. */
static void sparse_add_to_keys(sparse_row *r, int64_t first)
{
    const int64_t dim = r->student.dim, width = padded(dim);
    while (next_block(r)) {
        sparse_gradients(r);
        clear_rows(r->dk_block, INDEX_BLOCK, dim);
        gemm_transposed_add(r->dk_block, width, r->dots, INDEX_BLOCK, r->q_s, width, r->count, dim, r->heads);
        for (int64_t n = 0; n < r->count; n++)
            add_rows(r->dk + (r->keys[n] - first) * width, width, r->dk_block + n * width, 1, dim);
    }
}

static void sparse_backward_keys(const skl_task *task)
{
    sparse_row r;
    sparse_begin(&r, task);
    const skl_side *const s = &r.student;
    const skl_problem *const p = task->problem;
    const int64_t key_rows = p->packed ? r.sequence.key_count : skl_student_keys(p, p->len_k);
    const int64_t first = task->tile * KEY_BLOCK;
    const int64_t end = skl_min(first + KEY_BLOCK, key_rows);
    if (end <= first)
        return;
    clear_rows(r.dk, KEY_BLOCK, s->dim);
    memset(r.dw, 0, (size_t)r.heads * sizeof *r.dw);
    const int64_t sharing = s->heads / s->key_heads;
    for (int64_t head = task->head * sharing; head < (task->head + 1) * sharing; head++)
        for (int64_t i = 0; i < r.sequence.query_count; i++) {
            sparse_row_begin(&r, head, i, first, end);
            if (count_indices(&r, r.active, 1) == 0)
                continue;
            sparse_load_row(&r);
            sparse_load_known(&r);
            if (r.grad != 0.0F)
                sparse_add_to_keys(&r, first);
        }
    const int64_t offset = SKL_ROW(*s->dk, r.sequence.batch, task->head, r.sequence.key_begin + first);
    store_rows(s->dk->data, s->grad_dtype, offset, s->dk->stride_row, r.dk, end - first, s->dim);
}

#endif
