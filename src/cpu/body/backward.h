/* Backward: recomputes the probabilities of a tile from the LSEs and adds its logit gradients to dq and dk. */
#ifndef SKL_CPU_BODY_BACKWARD_H
#define SKL_CPU_BODY_BACKWARD_H

#include "cpu/body/gradient.h"

static int64_t keys_seen(const tile *t, int64_t i)
{
    return skl_max(0, t->visible[i].end - t->visible[i].begin);
}

/* Loads LSEs and upstream gradient and, where they are known, KL and dot_t. */
static void load_known_rows(const tile *t)
{
    const skl_call *const call = t->task->call;
    const skl_input kl = skl_known_rows(t->task->rows_known, &call->inputs.kl, &call->rows.kl);
    const skl_input dot_t = skl_known_rows(t->task->rows_known, &call->inputs.dot_t, &call->rows.dot_t);
    for (int64_t h = 0; h < t->group_size; h++) {
        const int64_t head = t->head * t->group_size + h;
        load_row_values(t, t->lse_t + h * t->height, &call->inputs.lse_t, head, 0.0F);
        load_row_values(t, t->dot_t + h * t->height, &dot_t, head, 0.0F);
    }
    load_row_values(t, t->lse_s, &call->inputs.lse_s, t->head, 0.0F);
    load_row_values(t, t->grad, &call->inputs.grad_kl, t->head, 1.0F);
    load_row_values(t, t->kl, &kl, t->head, 0.0F);
    /* If the LSEs are those of the visible keys, a row with one key has P = S = 1, and no gradient. */
    const bool lses_of_keys = skl_op_is_one_pass(call->op) && !t->task->problem->sinks;
    for (int64_t i = 0; lses_of_keys && i < t->count; i++)
        if (keys_seen(t, i) == 1)
            t->grad[i] = 0.0F;
    if (attends(t))
        load_outputs(t);
}

/* ---- Products with the logit gradients ---------------------------------------------------------------------- */

/* A row without an upstream gradient of its KL still has that of its output. */
static bool adds_gradient(const tile *t, int64_t i)
{
    return attends(t) || has_gradient(t, i);
}

/* In a tile with masked pairs, or with rows whose upstream gradient is 0, a logit gradient of 0 may meet a key or
 * query that is not finite. 0 * inf is NaN, so such a tile takes a slow path that skips those pairs. All others add
 * up to the same bits as without such keys and queries. */
static bool must_skip_pairs(const tile *t, const skl_side *side, const key_tile *keys, const float *rows,
                            int64_t count)
{
    bool zeros = !attends(t) && !all_have_gradient(t, 0, t->count);
    for (int64_t panel = 0; panel < panel_count(t) && !zeros; panel++)
        zeros = panel_visibility(t, panel, keys) != FULL;
    return zeros && (side->on_matrix ? any_nonfinite_halves(halves(rows), count, side->dim)
                                     : any_nonfinite(rows, count, side->dim));
}

/* Keys of a tile that row i sees, relative to the first key of the tile; none if its upstream gradient is 0. */
static skl_range keys_with_gradient(const tile *t, int64_t i, const key_tile *keys)
{
    const skl_range none = {0, 0};
    const skl_range seen = {skl_max(0, t->visible[i].begin - keys->first),
                            skl_min(keys->count, t->visible[i].end - keys->first)};
    return adds_gradient(t, i) ? seen : none;
}

/* Computes to += weight * row with the operations of the matrix product. */
static void add_weighted(float *to, float weight, const float *row, int64_t dim)
{
    for (int64_t c = 0; c < dim; c += SKL_LANES)
        vec_store(to + c, vec_fma(vec_of(weight), vec_load(row + c), vec_load(to + c)));
}

/* add_weighted() for halves; elements of the sum are `stride` apart. */
static void add_weighted_halves(float *to, int64_t stride, float weight, const uint16_t *row, int64_t dim)
{
    for (int64_t c = 0; c < dim; c++)
        to[c * stride] += weight * skl_from_bf16(row[c]);
}

/* Whether the slow path adds a row's pairs one by one. A matrix unit, which rounds in its own way, still multiplies
 * the rows that are finite. */
static bool is_added_by_pairs(const skl_side *side, const float *rows, int64_t row)
{
    return !side->on_matrix || any_nonfinite_halves(halves(rows) + row * padded(side->dim), 1, side->dim);
}

/* Address of element c of a row in the matrix unit's packed operand: of keys for dq, of queries for dk. */
static uint16_t *packed_element(const tile *t, const skl_side *side, const float *rows, int64_t row, int64_t c,
                                bool dk)
{
    if (!dk)
        return transposed_keys(side, rows) + c * TILE_K + row;
    const int64_t block = row / MATRIX_INTERLEAVE * MATRIX_INTERLEAVE;
    return interleaved_queries(t, side, rows) + block * padded(side->dim) + c * MATRIX_INTERLEAVE + row - block;
}

/* In the operand of the matrix unit, replaces rows that are not finite by 0, or restores them. */
static void set_nonfinite_rows(const tile *t, const skl_side *side, const float *rows, int64_t count, bool dk,
                               bool to_zero)
{
    for (int64_t row = 0; row < count; row++) {
        if (!is_added_by_pairs(side, rows, row))
            continue;
        for (int64_t c = 0; c < side->dim; c++)
            *packed_element(t, side, rows, row, c, dk) = to_zero ? 0 : halves(rows)[row * padded(side->dim) + c];
    }
}

/* dq += g^T k, pair by pair. */
static void add_pairs_to_dq(const tile *t, const skl_side *side, const key_tile *keys, float *dq, const float *g,
                            const float *k)
{
    const int64_t width = padded(side->dim);
    for (int64_t j = 0; j < keys->count; j++) {
        if (!is_added_by_pairs(side, k, j))
            continue;
        for (int64_t i = 0; i < t->count; i++)
            if (j < keys_with_gradient(t, i, keys).begin || j >= keys_with_gradient(t, i, keys).end)
                continue;
            else if (side->on_matrix)
                add_weighted_halves(dq + i, t->height, g[j * t->height + i], halves(k) + j * width, side->dim);
            else
                add_weighted(dq + i * width, g[j * t->height + i], k + j * width, side->dim);
    }
}

/* dk += g q, pair by pair. */
static void add_pairs_to_dk(const tile *t, const skl_side *side, const key_tile *keys, float *dk, const float *g,
                            const float *q)
{
    const int64_t width = padded(side->dim);
    for (int64_t i = 0; i < t->count; i++) {
        if (!is_added_by_pairs(side, q, i))
            continue;
        for (int64_t j = keys_with_gradient(t, i, keys).begin; j < keys_with_gradient(t, i, keys).end; j++)
            if (side->on_matrix)
                add_weighted_halves(dk + j * width, 1, g[j * t->height + i], halves(q) + i * width, side->dim);
            else
                add_weighted(dk + j * width, g[j * t->height + i], q + i * width, side->dim);
    }
}

/* On a side on the matrix unit: rounds g, the operand of the next products. Rows of keys and queries that do not
 * exist are 0. */
static void round_gradient(const tile *t, const skl_side *side, const key_tile *keys, const float *g)
{
    if (!side->on_matrix)
        return;
    const int64_t height = t->height, depth = round_up(keys->count, MATRIX_DEPTH);
    const int64_t columns = round_up(t->count, MATRIX_DEPTH);
    for (int64_t j = 0; j < keys->count; j++) {
        for (int64_t i = 0; i < t->count; i++)
            t->g_rows[j * height + i] = skl_to_bf16(g[j * height + i]);
        memset(t->g_rows + j * height + t->count, 0, (size_t)(columns - t->count) * sizeof *t->g_rows);
    }
    memset(t->g_rows + keys->count * height, 0, (size_t)((depth - keys->count) * height) * sizeof *t->g_rows);
    interleave_rows(t->g_interleaved, height, t->g_rows, height, depth, columns);
}

static void add_product_to_dq(const tile *t, const skl_side *side, const key_tile *keys, float *dq, const float *g,
                              const float *k)
{
    const int64_t width = padded(side->dim);
    const matrix_operands transposed = {dq,        t->height,        transposed_keys(side, k),
                                        TILE_K,    t->g_interleaved, t->height,
                                        side->dim, t->count,         keys->count};
    if (side->on_matrix)
        matrix_product(&transposed, true);
    else
        gemm_transposed_add(dq, width, g, t->height, k, width, t->count, side->dim, keys->count);
}

/* dk += g q for keys [first, first + count) of a tile. */
static void add_rows_to_dk(const tile *t, const skl_side *side, float *dk, int64_t first, int64_t count,
                           const float *g, const float *q)
{
    const int64_t width = padded(side->dim);
    const matrix_operands operands = {
        dk,        width,   t->g_rows + first * t->height, t->height, interleaved_queries(t, side, q), width, count,
        side->dim, t->count};
    if (side->on_matrix)
        matrix_product(&operands, true);
    else
        gemm_add(dk, width, g + first * t->height, t->height, q, width, count, side->dim, t->count);
}

/* dk += g q for all keys of a tile. The product rounds its rows up to whole micro-kernels. Sums of other keys follow
 * the last key, so the remainder goes through a separate buffer. */
static void add_product_to_dk(const tile *t, const skl_side *side, const key_tile *keys, float *dk, const float *g,
                              const float *q)
{
    const int64_t width = padded(side->dim), unit = side->on_matrix ? MATRIX_ROWS : MICRO_ROWS;
    const int64_t whole = keys->count / unit * unit;
    const size_t rest_size = (size_t)((keys->count - whole) * width) * sizeof *dk;
    add_rows_to_dk(t, side, dk, 0, whole, g, q);
    if (rest_size > 0) {
        memcpy(t->rest, dk + whole * width, rest_size);
        add_rows_to_dk(t, side, t->rest, whole, unit, g, q);
        memcpy(dk + whole * width, t->rest, rest_size);
    }
}

typedef void gradient_step(const tile *t, const skl_side *side, const key_tile *keys, float *gradient, const float *g,
                           const float *rows);

static void add_to_gradient(const tile *t, const skl_side *side, const key_tile *keys, float *gradient,
                            const float *g, const float *rows, bool dk)
{
    const int64_t count = dk ? t->count : keys->count;
    const bool by_pairs = must_skip_pairs(t, side, keys, rows, count), by_both = by_pairs && side->on_matrix;
    gradient_step *const add_product = dk ? add_product_to_dk : add_product_to_dq;
    gradient_step *const add_pairs = dk ? add_pairs_to_dk : add_pairs_to_dq;
    if (by_both)
        set_nonfinite_rows(t, side, rows, count, dk, true);
    if (!by_pairs || by_both)
        add_product(t, side, keys, gradient, g, rows);
    if (by_both)
        set_nonfinite_rows(t, side, rows, count, dk, false);
    if (by_pairs)
        add_pairs(t, side, keys, gradient, g, rows);
}

/* dq += g^T k */
static void add_to_dq(const tile *t, const skl_side *side, const key_tile *keys, float *dq, const float *g,
                      const float *k)
{
    add_to_gradient(t, side, keys, dq, g, k, false);
}

/* dk += g q */
static void add_to_dk(const tile *t, const skl_side *side, const key_tile *keys, float *dk, const float *g,
                      const float *q)
{
    add_to_gradient(t, side, keys, dk, g, q, true);
}

static void clear_rows(float *rows, int64_t count, int64_t dim)
{
    memset(rows, 0, (size_t)(count * padded(dim)) * sizeof *rows);
}

/* ---- Queries: dq and, in a fused backward, the contribution of the tile to dk ------------------------------- */

/* One gradient in key_sums. */
typedef struct summed_gradient {
    float *sums;
    const skl_side *side;
    const skl_output *to;
} summed_gradient;

enum { SUMMED_GRADIENTS = 3 };

static summed_gradient summed_gradient_at(const tile *t, int n)
{
    const skl_key_sums *const sums = &t->task->key_sums;
    const skl_attention *const attention = t->task->call->attention;
    const summed_gradient all[SUMMED_GRADIENTS] = {{sums->dk_t, &t->teacher, t->teacher.dk},
                                                   {sums->dk_s, &t->student, t->student.dk},
                                                   {sums->dv_s, &t->student, attention ? &attention->dv_s : NULL}};
    const summed_gradient none = {NULL, NULL, NULL};
    const bool requested = all[n].sums != NULL && all[n].to != NULL && all[n].to->data != NULL;
    return requested ? all[n] : none;
}

/* The sums of a key head. */
static float *sums_of_head(const tile *t, const skl_side *side, float *sums, int64_t key_head)
{
    const skl_problem *const p = t->task->problem;
    return sums + key_head % skl_summed_heads(p, side->key_heads) * skl_student_keys(p, p->len_k) * side->dim;
}

/* Adds dk of a key tile to its sums, in the caller's buffer or in key_sums. */
static void add_to_sums(const tile *t, const skl_side *side, const skl_output *to, float *sums, int64_t head,
                        const key_tile *keys, const float *dk)
{
    const int64_t key_head = skl_key_head(side, head);
    if (sums != NULL) {
        add_rows(sums_of_head(t, side, sums, key_head) + keys->first * side->dim, side->dim, dk, keys->count,
                 side->dim);
        return;
    }
    const int64_t offset = SKL_ROW(*to, t->sequence.batch, key_head, t->sequence.key_begin + keys->first);
    add_rows((float *)to->data + offset, to->stride_row, dk, keys->count, side->dim);
}

/* The first item of a key head clears its sums. Items of a head go from the last tile to the first. */
static void begin_key_sums(const tile *t)
{
    const skl_task *const task = t->task;
    const int64_t heads = task->problem->heads_s;
    if (!task->fused || task->tile != skl_ceil_div(task->problem->len_q, task->tiles.queries) - 1)
        return;
    for (int n = 0; n < SUMMED_GRADIENTS; n++) {
        const summed_gradient of = summed_gradient_at(t, n);
        const int64_t key_heads = of.sums != NULL ? of.side->key_heads : 0;
        const int64_t end = skl_ceil_div((task->head + 1) * key_heads, heads);
        for (int64_t key_head = skl_ceil_div(task->head * key_heads, heads); key_head < end; key_head++) {
            skl_ordered_sum_wait(&task->ordered_sum, task->before, SKL_ALL_TILES);
            memset(sums_of_head(t, of.side, of.sums, key_head), 0,
                   (size_t)(t->sequence.key_count * of.side->dim) * sizeof *of.sums);
        }
    }
}

/* The last one rounds them into the caller's buffer. */
static void end_key_sums(const tile *t)
{
    const skl_task *const task = t->task;
    const int64_t heads = task->problem->heads_s;
    if (!task->fused || task->tile != 0)
        return;
    for (int n = 0; n < SUMMED_GRADIENTS; n++) {
        const summed_gradient of = summed_gradient_at(t, n);
        const int64_t key_heads = of.sums != NULL ? of.side->key_heads : 0, dim = of.sums != NULL ? of.side->dim : 0;
        const int64_t end = (task->head + 1) * key_heads / heads;
        for (int64_t key_head = task->head * key_heads / heads; key_head < end; key_head++) {
            const int64_t offset = SKL_ROW(*of.to, t->sequence.batch, key_head, t->sequence.key_begin);
            skl_ordered_sum_wait(&task->ordered_sum, task->previous, SKL_ALL_TILES);
            store_rows_from(of.to->data, of.side->grad_dtype, offset, of.to->stride_row,
                            sums_of_head(t, of.side, of.sums, key_head), dim, t->sequence.key_count, dim);
        }
    }
}

static void wait_for_order(const tile *t, const key_tile *keys)
{
    skl_ordered_sum_wait(&t->task->ordered_sum, t->task->previous, keys->index + 1);
}

/* dq_t and dk_t, head by head. Heads of a group have gradients of their own. */
static void teacher_step(const tile *t, const key_tile *keys, bool dq, bool dk)
{
    const int64_t rows = t->height * padded(t->teacher.dim);
    for (int64_t h = 0; h < t->group_size; h++) {
        if (t->group_size > 1) {
            load_group_keys(t, h, keys);
            head_gradient(t, h, keys);
        }
        round_gradient(t, &t->teacher, keys, t->g_t);
        if (dq)
            add_to_dq(t, &t->teacher, keys, t->dq_t + h * rows, t->g_t, t->k_t);
        if (!dk)
            continue;
        clear_rows(t->dk_t, TILE_K, t->teacher.dim);
        add_to_dk(t, &t->teacher, keys, t->dk_t, t->g_t, t->q_t + h * rows);
        wait_for_order(t, keys);
        add_to_sums(t, &t->teacher, t->teacher.dk, t->task->key_sums.dk_t, t->head * t->group_size + h, keys,
                    t->dk_t);
    }
}

/* Adds the gradients of one key tile to dq in the tile's buffers, and to dk. */
static void query_step(const tile *t, const key_tile *keys)
{
    const skl_call *const call = t->task->call;
    const skl_key_sums *const sums = &t->task->key_sums;
    const bool dk_t = call->gradients.dk_t.data != NULL, dk_s = call->gradients.dk_s.data != NULL;
    const bool dq_t = call->gradients.dq_t.data != NULL, dq_s = call->gradients.dq_s.data != NULL;
    const bool dv_s = attends(t) && call->attention->dv_s.data != NULL, teacher_group = t->group_size > 1;
    const bool kl = skl_op_is_one_pass(call->op) && !t->task->rows_known && call->rows.kl.data != NULL;
    const wanted want = {dq_s || dk_s, dq_t || dk_t, kl, teacher_group && (dq_t || dk_t)};
    load_keys(t, &t->student, skl_key_head(&t->student, t->head), keys->first, keys->count, t->k_s);
    if (attends(t))
        load_values(t, skl_key_head(&t->student, t->head), keys->first, keys->count);
    if (!teacher_group)
        load_keys(t, &t->teacher, skl_key_head(&t->teacher, t->head), keys->first, keys->count, t->k_t);
    tile_gradients(t, keys, &want);
    if (dq_s || dk_s)
        round_gradient(t, &t->student, keys, t->g_s);
    if (dq_s)
        add_to_dq(t, &t->student, keys, t->dq_s, t->g_s, t->k_s);
    if (dk_s) {
        clear_rows(t->dk_s, TILE_K, t->student.dim);
        add_to_dk(t, &t->student, keys, t->dk_s, t->g_s, t->q_s);
    }
    if (dv_s) {
        clear_rows(t->dv, TILE_K, t->student.dim);
        round_gradient(t, &t->student, keys, t->s);
        add_to_dk(t, &t->student, keys, t->dv, t->s, t->d_o);
    }
    if (dq_t || dk_t)
        teacher_step(t, keys, dq_t, dk_t);
    if (t->task->fused)
        wait_for_order(t, keys);
    if (dk_s)
        add_to_sums(t, &t->student, t->student.dk, sums->dk_s, t->head, keys, t->dk_s);
    if (dv_s)
        add_to_sums(t, &t->student, &call->attention->dv_s, sums->dv_s, t->head, keys, t->dv);
    if (t->task->fused)
        skl_ordered_sum_advance(&t->task->ordered_sum, t->task->item, keys->index + 1);
}

static void store_dq(const tile *t, const skl_side *side, int64_t head, const float *dq)
{
    const int64_t offset = SKL_ROW(*side->dq, t->sequence.batch, head, t->sequence.query_begin + t->first);
    if (!side->on_matrix) {
        store_rows(side->dq->data, side->grad_dtype, offset, side->dq->stride_row, dq, t->count, side->dim);
        return;
    }
    for (int64_t first = 0; first < t->count; first += TRANSPOSED_BLOCK) {
        transpose_floats(t->x, padded(side->dim), dq + first, t->height, side->dim, TRANSPOSED_BLOCK);
        store_rows(side->dq->data, side->grad_dtype, offset + first * side->dq->stride_row, side->dq->stride_row,
                   t->x, skl_min(TRANSPOSED_BLOCK, t->count - first), side->dim);
    }
}

static void backward_query_tile(const tile *t)
{
    const skl_call *const call = t->task->call;
    const int64_t rows = t->height * padded(t->teacher.dim);
    const bool dq_t = call->gradients.dq_t.data != NULL;
    const bool dq_s = call->gradients.dq_s.data != NULL;
    tile_load_queries(t);
    load_known_rows(t);
    state_reset(t);
    if (dq_t)
        clear_rows(t->dq_t, t->group_size * t->height, t->teacher.dim);
    if (dq_s)
        clear_rows(t->dq_s, t->height, t->student.dim);
    FOR_KEY_TILES(t, keys)
    query_step(t, &keys);
    if (dq_s)
        store_dq(t, &t->student, t->head, t->dq_s);
    for (int64_t h = 0; dq_t && h < t->group_size; h++)
        store_dq(t, &t->teacher, t->head * t->group_size + h, t->dq_t + h * rows);
    for (int64_t i = 0; skl_op_is_one_pass(call->op) && !t->task->rows_known && i < t->count; i++) {
        const int64_t key_count = keys_seen(t, i);
        row_sums sums = sums_of(t, i);
        sums.m_a = sums.m_b = 0.0; /* logits are relative to the LSEs */
        sums = with_sink(t, i, sums, true);
        const float kl = one_pass_kl(&sums, key_count > 0 && t->task->problem->sinks ? key_count + 1 : key_count);
        skl_row_set(&call->rows.kl, &t->sequence, t->head, t->first + i, skl_kl_report(kl));
    }
}

static void backward_queries(const skl_task *task)
{
    tile t;
    tile_begin(&t, task, task->head, task->tile * task->tiles.queries);
    begin_key_sums(&t);
    if (t.count > 0)
        backward_query_tile(&t);
    end_key_sums(&t);
}

#endif
