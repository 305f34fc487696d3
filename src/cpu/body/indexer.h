/* A dense indexer as the student: y_j = scale sum_g w_g relu(a_gj) with a_gj = <q_g, k_j>.
 *
 * Masks, teacher and row states are the same as for attention. Index heads are processed one after another, with one
 * matrix product per panel for their dots. Once dy is known, the products of the backward are
 *
 *     G_g[j][i] = dy[j][i] w_g[i] [a_g[j][i] > 0]        dq_g += G_g^T k        dk += G_g q_g
 */
#ifndef SKL_CPU_BODY_INDEXER_H
#define SKL_CPU_BODY_INDEXER_H

#include "cpu/body/backward.h"

typedef struct index_tile {
    tile base;
    int64_t heads; /* index heads, G */
    bool relu;
    float *qT;             /* transposed queries: [G][panel][dim][PANEL] */
    float *q;              /* queries as rows: [G][height][padded] */
    float *w, *dw;         /* [G][height] */
    float *dq;             /* [G][height][padded] */
    float *dots;           /* products of one index head and panel: [TILE_K][PANEL] */
    float *zeros;          /* shaped like dots */
    float *entropy_shifts; /* row states of (A, zeros), for the entropy of A: as in tile */
    double *entropy_sums;
} index_tile;

/* ---- Buffers ------------------------------------------------------------------------------------------------ */

static float *index_lay_out(index_tile *x, const skl_problem *p, float *scratch)
{
    float *next = lay_out(&x->base, p, scratch);
    const int64_t height = x->base.height;
    const int64_t width = padded(p->dim_s);
    x->heads = p->index_heads;
    x->relu = !p->index_linear;
    x->qT = cut(&next, x->heads * height * query_width(p->dim_s));
    x->q = cut(&next, x->heads * height * width);
    x->w = cut(&next, x->heads * height);
    x->dw = cut(&next, x->heads * height);
    x->dq = cut(&next, p->gradients & SKL_DQ_S ? x->heads * height * width : 0);
    x->dots = cut(&next, TILE_K * PANEL);
    x->zeros = cut(&next, TILE_K * PANEL);
    x->entropy_shifts = cut(&next, 2 * height);
    x->entropy_sums = cut_doubles(&next, 3 * height);
    return next;
}

SCRATCH_SIZE(index_scratch_size, index_tile, index_lay_out)

static void index_begin(index_tile *x, const skl_task *task, int64_t head, int64_t first)
{
    tile_begin(&x->base, task, head, first);
    (void)index_lay_out(x, task->problem, task->scratch);
    memset(x->zeros, 0, TILE_K * PANEL * sizeof *x->zeros);
    memset(x->dw, 0, (size_t)(x->heads * x->base.height) * sizeof *x->dw);
}

/* Loads queries and weights. Rows after the last one have weight 0. */
static void index_load_student(const index_tile *x)
{
    const tile *const t = &x->base;
    const skl_input *const w = &t->task->call->inputs.w_s;
    const int64_t row = SKL_ROW(*w, t->sequence.batch, t->head, t->sequence.query_begin + t->first);
    for (int64_t g = 0; g < x->heads; g++) {
        load_queries(t, &t->student, t->head * x->heads + g, x->q + g * t->height * padded(t->student.dim),
                     x->qT + g * t->height * query_width(t->student.dim));
        for (int64_t i = 0; i < t->height; i++)
            x->w[g * t->height + i] =
                i < t->count ? skl_load(w->data, t->task->problem->dtype_w, row + i * w->stride_row + g) : 0.0F;
    }
}

static void index_load_keys(const index_tile *x, const key_tile *keys)
{
    const tile *const t = &x->base;
    load_keys(t, &t->student, skl_key_head(&t->student, t->head), keys->first, keys->count, t->k_s);
}

/* ---- Logits ------------------------------------------------------------------------------------------------- */

/* x->dots = <k, q_g> of a panel */
static void index_dots(const index_tile *x, int64_t g, int64_t panel, const key_tile *keys)
{
    const tile *const t = &x->base;
    const float *const qT = x->qT + g * t->height * query_width(t->student.dim);
    panel_dots(x->dots, &t->student, loaded_keys(&t->student, t->k_s), panel_queries(qT, &t->student, panel),
               panel_columns(t, panel), keys->count);
}

/* Lanes whose dot passes the ReLU, if there is one. NaN passes, so that it shows in the result. */
SKL_INLINE ivec dots_pass(bool relu, vec dots)
{
    return relu ? ~(ivec)(dots <= 0.0F) : ivec_of(-1);
}

/* t->y = sum_g w_g relu(a_g) of a panel */
static void index_logits(const index_tile *x, int64_t panel, const key_tile *keys)
{
    const tile *const t = &x->base;
    for (int64_t g = 0; g < x->heads; g++) {
        index_dots(x, g, panel, keys);
        for (int64_t column = 0; column < panel_columns(t, panel); column += SKL_LANES) {
            const vec w = vec_load(x->w + g * t->height + panel * PANEL + column);
            for (int64_t key = 0; key < keys->count; key++) {
                const int64_t at = key * PANEL + column;
                const vec dots = vec_load(x->dots + at);
                const vec passed = (vec)((ivec)dots & dots_pass(x->relu, dots));
                vec_store(t->y + at, g == 0 ? w * passed : vec_fma(w, passed, vec_load(t->y + at)));
            }
        }
    }
}

/* ---- Forward ------------------------------------------------------------------------------------------------ */

static bool entropy_wanted(const skl_call *call)
{
    return call->rows.entropy.data != NULL || call->rows.cross_entropy.data != NULL;
}

/* A tile whose row states are those for the entropy of A. */
static tile entropy_tile(const index_tile *x)
{
    tile for_entropy = x->base;
    for_entropy.shifts = x->entropy_shifts;
    for_entropy.sums = x->entropy_sums;
    return for_entropy;
}

static void entropy_panel(const index_tile *x, int64_t panel, logits a, const key_tile *keys, visibility seen)
{
    if (!entropy_wanted(x->base.task->call))
        return;
    const tile for_entropy = entropy_tile(x);
    const logits zero = {x->zeros, 1.0F};
    reduce_panel(&for_entropy, panel, a, zero, keys, seen);
}

static void reset_states(const index_tile *x)
{
    const tile for_entropy = entropy_tile(x);
    state_reset(&x->base);
    state_reset(&for_entropy);
}

/* Row states over all visible keys. Without the teacher, the student takes both places. */
static void index_reduce_states(const index_tile *x, bool with_teacher)
{
    const tile *const t = &x->base;
    reset_states(x);
    FOR_KEY_TILES(t, keys)
    {
        index_load_keys(x, &keys);
        if (with_teacher)
            teacher_logits(t, &keys);
        for (int64_t panel = 0; panel < panel_count(t); panel++) {
            const visibility seen = panel_visibility(t, panel, &keys);
            if (seen == HIDDEN)
                continue;
            index_logits(x, panel, &keys);
            const logits student = {t->y, t->student.scale};
            const logits mean = {t->x + panel * TILE_K * PANEL, 1.0F};
            const logits teacher = with_teacher ? mean : student;
            const logits a = t->reverse ? student : teacher;
            reduce_panel(t, panel, a, t->reverse ? teacher : student, &keys, seen);
            entropy_panel(x, panel, a, &keys, seen);
        }
    }
}

/* Entropy, cross-entropy and mass of a row. */
static void finish_entropy(const index_tile *x, int64_t i, float kl)
{
    const tile *const t = &x->base;
    const tile for_entropy = entropy_tile(x);
    const skl_rows *const rows = &t->task->call->rows;
    const bool lse_given = t->task->call->inputs.lse_t.data != NULL || skl_is_pooled(t->task->problem);
    const row_sums sums = sums_of(t, i);
    const row_sums entropy_total = sums_of(&for_entropy, i);
    const float entropy = row_entropy(&entropy_total);
    const float lse_t = t->reverse ? row_lse(sums.m_b, sums.l_b) : row_lse(sums.m_a, sums.l_a);
    skl_row_set(&rows->entropy, &t->sequence, t->head, t->first + i, entropy);
    skl_row_set(&rows->cross_entropy, &t->sequence, t->head, t->first + i, entropy + kl);
    skl_row_set(&rows->mass, &t->sequence, t->head, t->first + i, skl_mass(lse_t, lse_given));
}

static void index_forward(const skl_task *task)
{
    index_tile x;
    index_begin(&x, task, task->head, task->tile * task->tiles.queries);
    const tile *const t = &x.base;
    const skl_call *const call = task->call;
    if (t->count == 0)
        return;
    index_load_student(&x);
    const bool with_teacher = !skl_only_lse_s(call);
    if (with_teacher) {
        const tile of_keys = teacher_tile(t);
        load_teacher_queries(t);
        group_lse(&of_keys);
    }
    index_reduce_states(&x, with_teacher);
    for (int64_t i = 0; !with_teacher && i < t->count; i++) {
        const row_sums sums = sums_of(t, i);
        skl_row_set(&call->rows.lse_s, &t->sequence, t->head, t->first + i, row_lse(sums.m_a, sums.l_a));
    }
    if (!with_teacher)
        return;
    if (call->op == SKL_OP_PARTIAL) {
        write_states(t);
        return;
    }
    for (int64_t i = 0; i < t->count; i++) {
        const row_sums sums = sums_of(t, i);
        finish_entropy(&x, i, row_kl(&sums));
    }
    finish_rows(t);
}

/* ---- Backward ----------------------------------------------------------------------------------------------- */

/* t->g_s = scale dy of all queries for one key tile. With `kl`, also adds the tile to the row states. */
static void index_gradients(const index_tile *x, const key_tile *keys, bool kl)
{
    const tile *const t = &x->base;
    teacher_logits(t, keys);
    for (int64_t panel = 0; panel < panel_count(t); panel++) {
        const visibility seen = panel_visibility(t, panel, keys);
        if (seen == HIDDEN) {
            clear_panel(t->g_s, t, panel, keys);
            continue;
        }
        index_logits(x, panel, keys);
        const argument teacher = {{t->x + panel * TILE_K * PANEL, 1.0F}, t->zero, 0.0F, PLAIN_LINK, NULL};
        const argument student = {{t->y, t->student.scale}, t->lse_s, t->student.scale, PLAIN_LINK, t->g_s};
        const argument *const a = t->reverse ? &student : &teacher;
        gradient_panel(t, panel, a, t->reverse ? &teacher : &student, keys, seen, kl);
        if (kl)
            entropy_panel(x, panel, a->x, keys, seen);
    }
}

/* t->g_t = G_g for one key tile, and dw_g += sum_j dy_j relu(a_gj). */
static void index_head_gradient(const index_tile *x, int64_t g, const key_tile *keys)
{
    const tile *const t = &x->base;
    for (int64_t panel = 0; panel < panel_count(t); panel++) {
        if (panel_visibility(t, panel, keys) == HIDDEN) {
            clear_panel(t->g_t, t, panel, keys);
            continue;
        }
        index_dots(x, g, panel, keys);
        for (int64_t column = 0; column < panel_columns(t, panel); column += SKL_LANES) {
            const int64_t row = panel * PANEL + column;
            const lane_range lanes = lanes_with_gradient(t, row, keys);
            const vec w = vec_load(x->w + g * t->height + row);
            float *const total = x->dw + g * t->height + row;
            vec sum = {0};
            for (int32_t key = 0; key < keys->count; key++) {
                const int64_t at = key * t->height + row;
                const vec dots = vec_load(x->dots + key * PANEL + column);
                const vec dy = vec_load(t->g_s + at);
                const ivec pass = dots_pass(x->relu, dots) & lane_mask(&lanes, key);
                sum += (vec)((ivec)(dy * dots) & pass);
                vec_store(t->g_t + at, (vec)((ivec)(dy * w) & pass));
            }
            vec_store(total, vec_load(total) + sum);
        }
    }
}

/* All index heads of one key tile, whose dy is in t->g_s: dw, dq, and dk if it is not NULL. */
static void index_products(const index_tile *x, const key_tile *keys, bool dq, float *dk)
{
    const tile *const t = &x->base;
    const int64_t dim = t->student.dim;
    for (int64_t g = 0; g < x->heads; g++) {
        index_head_gradient(x, g, keys);
        round_gradient(t, &t->student, keys, t->g_t);
        if (dq)
            add_to_dq(t, &t->student, keys, x->dq + g * t->height * padded(dim), t->g_t, t->k_s);
        if (dk != NULL)
            add_to_dk(t, &t->student, keys, dk, t->g_t, x->q + g * t->height * padded(dim));
    }
}

static void index_query_step(const index_tile *x, const key_tile *keys, bool kl)
{
    const tile *const t = &x->base;
    const skl_call *const call = t->task->call;
    const bool dk = call->gradients.dk_s.data != NULL;
    index_load_keys(x, keys);
    index_gradients(x, keys, kl);
    if (dk)
        clear_rows(t->dk_s, TILE_K, t->student.dim);
    index_products(x, keys, call->gradients.dq_s.data != NULL, dk ? t->dk_s : NULL);
    if (!dk)
        return;
    wait_for_order(t, keys);
    add_to_sums(t, &t->student, t->student.dk, t->task->key_sums.dk_s, t->head, keys, t->dk_s);
    skl_ordered_sum_advance(&t->task->ordered_sum, t->task->item, keys->index + 1);
}

static void store_index_gradients(const index_tile *x)
{
    const tile *const t = &x->base;
    const skl_problem *const p = t->task->problem;
    const skl_output *const dw = &t->task->call->gradients.dw_s;
    const int64_t row = SKL_ROW(*dw, t->sequence.batch, t->head, t->sequence.query_begin + t->first);
    for (int64_t g = 0; g < x->heads; g++) {
        if (t->student.dq->data != NULL)
            store_dq(t, &t->student, t->head * x->heads + g, x->dq + g * t->height * padded(t->student.dim));
        for (int64_t i = 0; dw->data != NULL && i < t->count; i++)
            skl_store(dw->data, skl_grad_dtype(p, p->dtype_w), row + i * dw->stride_row + g,
                      x->dw[g * t->height + i]);
    }
}

static void index_backward_query_tile(const index_tile *x)
{
    const tile *const t = &x->base;
    const skl_task *const task = t->task;
    const skl_call *const call = task->call;
    const bool one_pass = skl_op_is_one_pass(call->op) && !task->rows_known;
    const bool kl = one_pass && (call->rows.kl.data != NULL || entropy_wanted(call));
    load_teacher_queries(t);
    index_load_student(x);
    load_known_rows(t);
    reset_states(x);
    if (call->gradients.dq_s.data != NULL)
        clear_rows(x->dq, x->heads * t->height, t->student.dim);
    FOR_KEY_TILES(t, keys)
    index_query_step(x, &keys, kl);
    store_index_gradients(x);
    for (int64_t i = 0; kl && i < t->count; i++) {
        const row_sums sums = sums_of(t, i);
        const float row = one_pass_kl(&sums, keys_seen(t, i));
        skl_row_set(&call->rows.kl, &t->sequence, t->head, t->first + i, skl_kl_report(row));
        finish_entropy(x, i, row);
    }
}

static void index_backward_queries(const skl_task *task)
{
    index_tile x;
    index_begin(&x, task, task->head, task->tile * task->tiles.queries);
    begin_key_sums(&x.base);
    if (x.base.count > 0)
        index_backward_query_tile(&x);
    end_key_sums(&x.base);
}

#endif
