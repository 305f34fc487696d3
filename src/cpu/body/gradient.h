/* Logit gradients of a tile from known LSEs. With A the first argument of the KL, B the second, and log_a and log_b
 * the logarithms of their probabilities:
 *
 *     g_a = c_a e^log_a (log_a - log_b - KL)        g_b = c_b (e^log_b - e^log_a)
 *
 * c is the upstream gradient times the scale of the side, times the slope of the link: see slope_of. */
#ifndef SKL_CPU_BODY_GRADIENT_H
#define SKL_CPU_BODY_GRADIENT_H

#include "cpu/body/attention.h"

/* One argument of the KL in a panel. */
typedef struct argument {
    logits x;
    const float *lse; /* [height] */
    float scale;      /* logit scale of the side, for the chain rule to q and k */
    logit_link link;
    float *gradient; /* [key][height] of the tile, or NULL */
} argument;

/* Equal keys have equal probabilities, and a long sum of them rounds in the same direction at every step. Summing
 * blocks avoids this. */
enum { SUM_BLOCK = 8 };

/* A row whose upstream gradient is 0 contributes no gradient, even if it holds NaN: it is skipped, since 0 * NaN is
 * NaN. */
static bool has_gradient(const tile *t, int64_t i)
{
    return t->grad[i] != 0.0F;
}

static bool all_have_gradient(const tile *t, int64_t first, int64_t count)
{
    for (int64_t i = first; i < first + count; i++)
        if (!has_gradient(t, i))
            return false;
    return true;
}

/* Keys visible to each lane; none for lanes whose upstream gradient is 0. */
static lane_range lanes_with_gradient(const tile *t, int64_t row, const key_tile *keys)
{
    lane_range lanes = lanes_visible(t, row, keys);
    for (int lane = 0; lane < SKL_LANES; lane++)
        if (!has_gradient(t, row + lane))
            lanes.end[lane] = lanes.begin[lane];
    return lanes;
}

/* Gradients of one vector of rows. The compiler specializes on the const flags. Returns false and changes no state if
 * a logit of -inf needs the general variant. */
SKL_INLINE bool gradient_lanes(const tile *t, int64_t row, int64_t column, const argument *a, const argument *b,
                               int32_t key_count, const lane_range *lanes, const lane_range *with_gradient,
                               const bool with_a, const bool with_b, const bool with_kl, const bool general)
{
    const vec lse_a = vec_load(a->lse + row);
    const vec lse_b = vec_load(b->lse + row);
    const vec grad = vec_load(t->grad + row);
    const vec c_a = grad * a->scale;
    const vec c_b = grad * b->scale;
    const vec kl = vec_load(t->kl + row);
    const logits lane_a = {a->x.data + column, a->x.scale};
    const logits lane_b = {b->x.data + column, b->x.scale};
    const key_sums none = {{0}, {0}, {0}};
    key_sums sums = none;
    key_sums block = none;
    for (int32_t key = 0; key < key_count; key++) {
        const vec x_a = logit_at(lane_a, key);
        const vec x_b = logit_at(lane_b, key);
        const vec log_a = x_a - lse_a;
        const vec log_b = x_b - lse_b;
        const vec p_a = exp_vec(log_a);
        const vec p_b = exp_vec(log_b);
        const ivec seen = general ? lane_mask(lanes, key) : ivec_of(-1);
        const ivec written = general ? lane_mask(with_gradient, key) : ivec_of(-1);
        if (with_a) {
            const vec slope = slope_of(x_a, a->link);
            const vec g = mass_times(c_a * p_a, log_a - log_b - kl) * slope;
            vec_store(a->gradient + key * t->height + row, (vec)((ivec)g & written));
        }
        if (with_b) {
            const vec g = c_b * (p_b - p_a);
            const vec slope = slope_of(x_b, b->link);
            const vec sloped = general ? g * slope : g;
            vec_store(b->gradient + key * t->height + row, (vec)((ivec)sloped & written));
        }
        if (!with_kl)
            continue;
        add_terms(&block, p_a, p_b, log_a - log_b, seen, general);
        if (key % SUM_BLOCK == SUM_BLOCK - 1) {
            add_sums(&sums, &block);
            block = none;
        }
    }
    if (!with_kl)
        return true;
    add_sums(&sums, &block);
    if (!general && ivec_any((ivec)(sums.w != sums.w)))
        return false;
    const lane_state state = lane_state_at(t, row);
    add_to_state(&state, &sums);
    return true;
}

static void gradient_panel(const tile *t, int64_t panel, const argument *a, const argument *b, const key_tile *keys,
                           visibility seen, bool with_kl)
{
    const bool with_a = a->gradient != NULL;
    const bool with_b = b->gradient != NULL;
    const bool may_be_plain = seen == FULL && with_b && !with_a && is_plain(b->link);
    const int32_t count = (int32_t)keys->count;
    for (int64_t column = 0; column < panel_columns(t, panel); column += SKL_LANES) {
        const int64_t row = panel * PANEL + column;
        const bool plain = may_be_plain && all_have_gradient(t, row, SKL_LANES);
        if (plain && with_kl && gradient_lanes(t, row, column, a, b, count, NULL, NULL, false, true, true, false))
            continue;
        if (plain && !with_kl && gradient_lanes(t, row, column, a, b, count, NULL, NULL, false, true, false, false))
            continue;
        const lane_range lanes = lanes_visible(t, row, keys), with_gradient = lanes_with_gradient(t, row, keys);
        (void)gradient_lanes(t, row, column, a, b, count, &lanes, &with_gradient, with_a, with_b, with_kl, true);
    }
}

static void clear_panel(float *gradient, const tile *t, int64_t panel, const key_tile *keys)
{
    for (int64_t key = 0; gradient != NULL && key < keys->count; key++)
        memset(gradient + key * t->height + panel * PANEL, 0, PANEL * sizeof *gradient);
}

/* Results that a pass requests of each key tile. */
typedef struct wanted {
    bool student, teacher; /* logit gradients of a side; a teacher group's follow head by head: see head_gradient */
    bool kl;
    bool keep_logits; /* t->x and t->y of every panel, for head_gradient */
} wanted;

/* Logit gradients of all queries of the tile for one key tile, whose keys are in t->k_t and t->k_s. */
static void tile_gradients(const tile *t, const key_tile *keys, const wanted *want)
{
    const bool teacher_group = t->group_size > 1;
    if (teacher_group)
        group_logits(t, keys);
    float *const g_t = want->teacher && !teacher_group ? t->g_t : NULL;
    float *const g_s = want->student ? t->g_s : NULL;
    for (int64_t panel = 0; panel < panel_count(t); panel++) {
        const visibility seen = panel_visibility(t, panel, keys);
        if (seen == HIDDEN) {
            clear_panel(g_t, t, panel, keys);
            clear_panel(g_s, t, panel, keys);
            clear_panel(attends(t) ? t->s : NULL, t, panel, keys);
            continue;
        }
        const int64_t columns = panel_columns(t, panel);
        float *const x = teacher_group || want->keep_logits ? t->x + panel * TILE_K * PANEL : t->x;
        float *const y = want->keep_logits ? t->y + panel * TILE_K * PANEL : t->y;
        if (!teacher_group)
            panel_logits(x, &t->teacher, loaded_keys(&t->teacher, t->k_t), panel_queries(t->qT_t, &t->teacher, panel),
                         columns, keys->count);
        panel_logits(y, &t->student, loaded_keys(&t->student, t->k_s), panel_queries(t->qT_s, &t->student, panel),
                     columns, keys->count);
        const argument teacher = {{x, teacher_group ? 1.0F : logit_scale(&t->teacher)},
                                  teacher_group ? t->zero : t->lse_t,
                                  t->teacher.scale,
                                  teacher_group ? PLAIN_LINK : link_of(&t->teacher),
                                  g_t};
        const argument student = {
            {y, logit_scale(&t->student)}, t->lse_s, t->student.scale, link_of(&t->student), g_s};
        if (g_t != NULL || g_s != NULL || want->kl)
            gradient_panel(t, panel, t->reverse ? &student : &teacher, t->reverse ? &teacher : &student, keys, seen,
                           want->kl);
        if (attends(t))
            attention_panel(t, panel, y, x, keys, g_s);
    }
}

/* Logit gradient of one head of a teacher group into t->g_t, from the kept logits: c P_h (phi - dot_t[h]) / r */
static void head_gradient(const tile *t, int64_t h, const key_tile *keys)
{
    const float scale_t = logit_scale(&t->teacher);
    const float scale_s = logit_scale(&t->student);
    const logit_link link = link_of(&t->teacher);
    float *const z = t->sum; /* group_logits no longer needs it */
    for (int64_t panel = 0; panel < panel_count(t); panel++) {
        if (panel_visibility(t, panel, keys) == HIDDEN) {
            clear_panel(t->g_t, t, panel, keys);
            continue;
        }
        head_logits(t, h, panel, keys, z);
        for (int64_t column = 0; column < panel_columns(t, panel); column += SKL_LANES) {
            const int64_t row = panel * PANEL + column;
            const lane_range lanes = lanes_with_gradient(t, row, keys);
            const vec c = vec_load(t->grad + row) * (t->teacher.scale / (float)t->group_size);
            const vec dot = vec_load(t->dot_t + h * t->height + row);
            const vec lse_t = vec_load(t->lse_t + h * t->height + row);
            const vec lse_s = vec_load(t->lse_s + row);
            for (int32_t key = 0; key < keys->count; key++) {
                const int64_t at = panel * TILE_K * PANEL + key * PANEL + column;
                const vec x = vec_load(z + key * PANEL + column) * scale_t;
                const vec log_p = vec_load(t->x + at);
                const vec log_s = vec_load(t->y + at) * scale_s - lse_s;
                const vec g = c * head_excess(x - lse_t, log_p, log_s, dot, t->reverse) * slope_of(x, link);
                vec_store(t->g_t + key * t->height + row, (vec)((ivec)g & lane_mask(&lanes, key)));
            }
        }
    }
}

#endif
