/* Forward: reduces the keys of a query tile to row states, then writes its row results. */
#ifndef SKL_CPU_BODY_FORWARD_H
#define SKL_CPU_BODY_FORWARD_H

#include "cpu/body/group.h"

/* A row vector of the caller; `absent` where there is none. */
static void load_row_values(const tile *t, float *to, const skl_input *rows, int64_t head, float absent)
{
    for (int64_t i = 0; i < t->height; i++) {
        const bool known = rows->data != NULL && i < t->count;
        to[i] = known ? skl_row_value(rows, &t->sequence, head, t->first + i) : absent;
    }
}

/* Loops over the key tiles that are visible to a query tile. */
#define FOR_KEY_TILES(t, keys)                                                                                       \
    for (key_tile keys = key_tile_at(t, tile_keys(t).begin / TILE_K); keys.first < tile_keys(t).end;                 \
         keys = key_tile_at(t, keys.index + 1))

/* Adds the logits x of a panel to m_a and l_a of its row states. */
static void reduce_lse(const tile *t, int64_t panel, logits x, const key_tile *keys)
{
    for (int64_t column = 0; column < panel_columns(t, panel); column += SKL_LANES) {
        const lane_state s = lane_state_at(t, panel * PANEL + column);
        const lane_range lanes = lanes_visible(t, panel * PANEL + column, keys);
        const logits lane_x = {x.data + column, x.scale};
        const vec m = highest(vec_load(s.m_a), lane_x, (int32_t)keys->count, &lanes);
        const vec factor = exp_vec(shift_change(vec_load(s.m_a), m));
        vec sum = {0};
        for (int32_t key = 0; key < keys->count; key++) {
            const vec p = exp_vec(logit_at(lane_x, key) - finite_shift(m));
            sum += (vec)((ivec)p & lane_mask(&lanes, key));
        }
        vec_store(s.m_a, m);
        dvec_store(s.l_a, dvec_of(factor) * dvec_load(s.l_a) + dvec_of(sum));
    }
}

/* The sums of a row with its sink, if it has one. */
static row_sums with_sink(const tile *t, int64_t i, row_sums sums, bool one_pass)
{
    const skl_problem *const p = t->task->problem;
    if (!p->sinks || t->visible[i].begin >= t->visible[i].end)
        return sums;
    const skl_row_lses lses = {t->group_size, one_pass || t->group_size > 1 ? t->lse_t + i : NULL, t->height,
                               one_pass ? t->lse_s + i : NULL};
    const skl_sink_logits sink = skl_sink_logits_of(&t->task->call->inputs, t->head, lses);
    return row_sums_merge(sums, row_sums_of_sink(sink, t->reverse));
}

/* LSEs of one head, with its sink, into lse[height]. */
static void head_lse(const tile *t, const skl_side *side, int64_t head, const float *qT, float *lse)
{
    const bool of_teacher = side->q == t->teacher.q;
    const skl_inputs *const inputs = &t->task->call->inputs;
    const float *const sinks = of_teacher ? inputs->sink_t : inputs->sink_s;
    float *const k = of_teacher ? t->k_t : t->k_s;
    state_reset(t);
    FOR_KEY_TILES(t, keys)
    {
        load_keys(t, side, skl_key_head(side, head), keys.first, keys.count, k);
        for (int64_t panel = 0; panel < panel_count(t); panel++) {
            if (panel_visibility(t, panel, &keys) == HIDDEN)
                continue;
            panel_logits(t->x, side, loaded_keys(side, k), panel_queries(qT, side, panel), panel_columns(t, panel),
                         keys.count);
            const logits x = {t->x, logit_scale(side)};
            reduce_lse(t, panel, x, &keys);
        }
    }
    for (int64_t i = 0; i < t->count; i++) {
        const row_sums sums = sums_of(t, i);
        const bool has_sink = sinks != NULL && sums.m_a > -INFINITY;
        lse[i] = has_sink ? (float)skl_lse_with_sink(sums.m_a + log(sums.l_a), (double)sinks[head])
                          : row_lse(sums.m_a, sums.l_a);
    }
}

/* LSEs of the heads of a teacher group: the caller's if given, else computed here. */
static void group_lse(const tile *t)
{
    const skl_input *const given = &t->task->call->inputs.lse_t;
    for (int64_t h = 0; h < t->group_size; h++) {
        const int64_t head = t->head * t->group_size + h;
        float *const lse = t->lse_t + h * t->height;
        load_row_values(t, lse, given, head, 0.0F);
        if (given->data == NULL)
            head_lse(t, &t->teacher, head, t->qT_t + h * t->height * query_width(t->teacher.dim), lse);
    }
}

/* Row states over all visible keys. */
static void reduce_states(const tile *t)
{
    const bool teacher_group = t->group_size > 1;
    state_reset(t);
    FOR_KEY_TILES(t, keys)
    {
        const key_view k_s = keys_for_logits(t, &t->student, &keys, t->k_s);
        key_view k_t = {NULL, 0};
        if (teacher_group)
            group_logits(t, &keys);
        else
            k_t = keys_for_logits(t, &t->teacher, &keys, t->k_t);
        for (int64_t panel = 0; panel < panel_count(t); panel++) {
            const key_tile seen_keys = panel_keys(t, panel, &keys);
            const visibility seen = panel_visibility(t, panel, &seen_keys);
            if (seen == HIDDEN)
                continue;
            const int64_t columns = panel_columns(t, panel);
            float *const x = teacher_group ? t->x + panel * TILE_K * PANEL : t->x;
            if (!teacher_group)
                panel_logits(x, &t->teacher, k_t, panel_queries(t->qT_t, &t->teacher, panel), columns,
                             seen_keys.count);
            panel_logits(t->y, &t->student, k_s, panel_queries(t->qT_s, &t->student, panel), columns,
                         seen_keys.count);
            const logits teacher = {x, teacher_group ? 1.0F : logit_scale(&t->teacher)};
            const logits student = {t->y, logit_scale(&t->student)};
            reduce_panel(t, panel, t->reverse ? student : teacher, t->reverse ? teacher : student, &seen_keys, seen);
        }
    }
}

static void write_states(const tile *t)
{
    for (int64_t i = 0; i < t->count; i++) {
        const row_sums sums = sums_of(t, i);
        t->task->call->states[skl_state_index(t->task->problem, &t->sequence, t->head, t->first + i)] =
            row_state_of(&sums);
    }
}

/* Writes KL and LSEs, and stores the LSEs of the visible keys in t->lse_t and t->lse_s. */
static void finish_rows(const tile *t)
{
    const skl_rows *const rows = &t->task->call->rows;
    for (int64_t i = 0; i < t->count; i++) {
        const row_sums sums = with_sink(t, i, sums_of(t, i), false);
        const float lse_a = row_lse(sums.m_a, sums.l_a);
        const float lse_b = row_lse(sums.m_b, sums.l_b);
        const float lse_t = t->reverse ? lse_b : lse_a;
        t->lse_s[i] = t->reverse ? lse_a : lse_b;
        skl_row_set(&rows->kl, &t->sequence, t->head, t->first + i, skl_kl_report(row_kl(&sums)));
        skl_row_set(&rows->lse_s, &t->sequence, t->head, t->first + i, t->lse_s[i]);
        for (int64_t h = 0; h < t->group_size; h++) {
            float *const lse = t->lse_t + h * t->height + i;
            /* The sum over visible keys renormalizes LSEs that cover more keys. */
            const bool renormalize = skl_has_teacher_groups(t->task->problem) && lse_t != -INFINITY;
            *lse = renormalize ? *lse + lse_t : lse_t;
            skl_row_set(&rows->lse_t, &t->sequence, t->head * t->group_size + h, t->first + i, *lse);
        }
    }
}

static skl_dot_rule dot_rule_of(const tile *t, int64_t i)
{
    const row_sums sums = sums_of(t, i);
    const skl_call *const call = t->task->call;
    return row_dot_rule(&sums, t->reverse, call->inputs.lse_t.data != NULL && !skl_op_is_one_pass(call->op));
}

/* Loads the LSEs of a one-pass call. Its gradients are made of them, and dot_t cancels most of these gradients where
 * P is close to S: it must be made of the same LSEs, to the last bit. */
static void load_given_lses(const tile *t)
{
    const skl_inputs *const inputs = &t->task->call->inputs;
    group_lse(t);
    load_row_values(t, t->lse_s, &inputs->lse_s, t->head, 0.0F);
}

/* dot_t of every teacher head: see skl_dot_rule. finish_rows must have run. */
static void reduce_dots(const tile *t)
{
    if (skl_op_is_one_pass(t->task->call->op))
        load_given_lses(t);
    for (int64_t i = 0; i < t->group_size * t->height; i++)
        t->dot_sum[i] = t->head_sum[i] = 0.0;
    float *const mean = t->kl; /* otherwise unused in a forward */
    for (int64_t i = 0; i < t->height; i++)
        mean[i] = i < t->count ? dot_rule_of(t, i).mean : 0.0F;
    const float scale_s = logit_scale(&t->student);
    float *const z = t->g_s; /* otherwise unused in a forward */
    FOR_KEY_TILES(t, keys)
    {
        group_logits(t, &keys);
        load_keys(t, &t->student, skl_key_head(&t->student, t->head), keys.first, keys.count, t->k_s);
        for (int64_t h = 0; h < t->group_size; h++) {
            load_group_keys(t, h, &keys);
            for (int64_t panel = 0; panel < panel_count(t); panel++) {
                if (panel_visibility(t, panel, &keys) == HIDDEN)
                    continue;
                const int64_t columns = panel_columns(t, panel);
                head_log_probabilities(t, h, panel, &keys, z);
                panel_logits(t->y, &t->student, loaded_keys(&t->student, t->k_s),
                             panel_queries(t->qT_s, &t->student, panel), columns, keys.count);
                for (int64_t column = 0; column < columns; column += SKL_LANES) {
                    const int64_t row = panel * PANEL + column;
                    const lane_range lanes = lanes_visible(t, row, &keys);
                    const vec lse_s = vec_load(t->lse_s + row);
                    const vec origin = vec_load(mean + row);
                    vec dot = {0}, mass = {0};
                    for (int32_t key = 0; key < keys.count; key++) {
                        const int64_t at = key * PANEL + column;
                        const vec log_p = vec_load(t->x + panel * TILE_K * PANEL + at);
                        const vec log_s = vec_load(t->y + at) * scale_s - lse_s;
                        const vec term = head_excess(vec_load(z + at), log_p, log_s, origin, t->reverse);
                        dot += (vec)((ivec)term & lane_mask(&lanes, key));
                        mass += (vec)((ivec)exp_vec(vec_load(z + at)) & lane_mask(&lanes, key));
                    }
                    double *const total = t->dot_sum + h * t->height + row;
                    double *const head_total = t->head_sum + h * t->height + row;
                    dvec_store(total, dvec_load(total) + dvec_of(dot));
                    dvec_store(head_total, dvec_load(head_total) + dvec_of(mass));
                }
            }
        }
    }
    for (int64_t i = 0; i < t->count; i++) {
        const skl_dot_rule rule = dot_rule_of(t, i);
        for (int64_t h = 0; h < t->group_size; h++) {
            const int64_t at = h * t->height + i;
            const double share =
                rule.normalizes && t->head_sum[at] > 0.0 ? 1.0 / t->head_sum[at] : (double)rule.share;
            skl_row_set(&t->task->call->rows.dot_t, &t->sequence, t->head * t->group_size + h, t->first + i,
                        (float)((double)rule.mean + share * t->dot_sum[at]));
        }
    }
}

/* Only LSEs are requested: each side is computed without the other. */
static void lse_only(const tile *t)
{
    const skl_rows *const rows = &t->task->call->rows;
    for (int64_t h = -1; h < t->group_size; h++) { /* -1: the student; then the teacher heads of its group */
        const skl_side *const side = h < 0 ? &t->student : &t->teacher;
        const skl_output *const out = h < 0 ? &rows->lse_s : &rows->lse_t;
        const int64_t head = h < 0 ? t->head : t->head * t->group_size + h;
        if (out->data == NULL)
            continue;
        float *const lse = h < 0 ? t->lse_s : t->lse_t + h * t->height;
        head_lse(t, side, head, h < 0 ? t->qT_s : t->qT_t + h * t->height * query_width(side->dim), lse);
        for (int64_t i = 0; i < t->count; i++)
            skl_row_set(out, &t->sequence, head, t->first + i, lse[i]);
    }
}

static void forward(const skl_task *task)
{
    tile t;
    tile_begin(&t, task, task->head, task->tile * task->tiles.queries);
    if (t.count == 0)
        return;
    tile_load_queries(&t);
    const skl_call *const call = task->call;
    const bool wider_lse = t.group_size > 1 && call->inputs.lse_t.data != NULL;
    if (call->op == SKL_OP_FORWARD && call->rows.kl.data == NULL && call->rows.dot_t.data == NULL && !wider_lse) {
        lse_only(&t);
        return;
    }
    if (t.group_size > 1)
        group_lse(&t);
    reduce_states(&t);
    if (call->op == SKL_OP_PARTIAL) {
        write_states(&t);
        return;
    }
    finish_rows(&t);
    if (call->rows.dot_t.data != NULL)
        reduce_dots(&t);
}

#endif
