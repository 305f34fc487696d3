/* Logit gradients of a tile, from the known LSEs. With u = log2 of the first argument, v = of the second:
 *
 *     first   g_1 = c_1 2^u (ln2 (u - v) - KL)        second   g_2 = c_2 (2^v - 2^u)
 *
 * c is the upstream gradient times the side's scale, and with a softcap times 1 - (logit / cap)^2. */
#ifndef SKL_CPU_BODY_GRADIENT_H
#define SKL_CPU_BODY_GRADIENT_H

#include "cpu/body/forward.h"

/* One argument of the KL in a panel. */
typedef struct argument {
    logits x;
    const float *lse, *low; /* [height], base 2 */
    float scale;            /* of the side: the chain rule to q and k */
    float inverse_cap;      /* 1 / softcap in base 2; 0: none */
    float *gradient;        /* [key][height] of the tile, or NULL */
} argument;

SKL_INLINE vec slope_of(vec logit, float inverse_cap)
{
    const vec ratio = inverse_cap == 0.0F ? vec_of(0.0F) : logit * inverse_cap; /* an infinite one has no cap */
    return vec_fma(-ratio, ratio, vec_of(1.0F));
}

/* Probabilities of like keys are equal, and a long sum of them rounds the same way again and again: sums of short
 * sums do not. */
enum { SUM_BLOCK = 8 };

/* A row whose upstream gradient is 0 has no gradients, whatever it holds: 0 * NaN is NaN, so it is left out. */
static bool pulls(const tile *t, int64_t i)
{
    return t->grad[i] != 0.0F;
}

static bool all_pull(const tile *t, int64_t first, int64_t count)
{
    for (int64_t i = first; i < first + count; i++)
        if (!pulls(t, i))
            return false;
    return true;
}

/* Keys that a lane sees and pulls at. */
static lane_range lanes_pulling(const tile *t, int64_t row, const key_tile *keys)
{
    lane_range lanes = lanes_visible(t, row, keys);
    for (int lane = 0; lane < SKL_LANES; lane++)
        if (!pulls(t, row + lane))
            lanes.end[lane] = lanes.begin[lane];
    return lanes;
}

/* One vector of rows. The const flags are what the compiler specialises on. False, with no state changed: a logit of
 * -inf needs the general one. */
SKL_INLINE bool gradient_lanes(const tile *t, int64_t row, int64_t column, const argument *one, const argument *two,
                               int32_t key_count, const lane_range *lanes, const lane_range *pulling,
                               const bool first, const bool second, const bool with_kl, const bool general)
{
    const vec lse_a = vec_load(one->lse + row);
    const vec lse_b = vec_load(two->lse + row);
    const vec grad = vec_load(t->grad + row);
    /* What f32 could not hold of the LSEs is the same for all keys of a row: it goes into the row's factors. Equal
     * sides have a ratio of exactly 1. */
    const vec low_a = vec_load(one->low + row);
    const vec low_b = vec_load(two->low + row);
    const vec factor = exp2_vec(-low_a);
    const vec ratio = exp2_vec(low_a - low_b);
    const vec c_1 = grad * one->scale * factor;
    const vec c_2 = grad * two->scale * factor;
    const vec ln2 = vec_of(SKL_LN2);
    const vec kl = first ? vec_fma(low_a - low_b, ln2, vec_load(t->kl + row)) : vec_of(0.0F);
    const key_sums none = {{0}, {0}, {0}};
    key_sums sums = none;
    key_sums block = none;
    for (int32_t key = 0; key < key_count; key++) {
        const float *const at_a = one->x.data + key * PANEL + column;
        const float *const at_b = two->x.data + key * PANEL + column;
        const vec u = logit_less(at_a, one->x.scale, lse_a);
        const vec v = logit_less(at_b, two->x.scale, lse_b);
        const vec p = exp2_vec(u);
        const vec s = exp2_vec(v);
        const ivec seen = general ? lane_mask(lanes, key) : ivec_of(-1);
        const ivec pulled = general ? lane_mask(pulling, key) : ivec_of(-1);
        if (first) {
            const vec slope = slope_of(vec_load(at_a) * one->x.scale, one->inverse_cap);
            const vec g = mass_times(c_1 * p, vec_fma(u - v, ln2, -kl)) * slope;
            vec_store(one->gradient + key * t->height + row, (vec)((ivec)g & pulled));
        }
        if (second) {
            const vec g = c_2 * vec_fma(s, ratio, -p);
            const vec slope = slope_of(vec_load(at_b) * two->x.scale, two->inverse_cap);
            const vec sloped = general ? g * slope : g;
            vec_store(two->gradient + key * t->height + row, (vec)((ivec)sloped & pulled));
        }
        if (!with_kl)
            continue;
        add_terms(&block, p, s, u - v, seen, general);
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
    vec_store(state.l_a, vec_load(state.l_a) + sums.l_a);
    vec_store(state.l_b, vec_load(state.l_b) + sums.l_b);
    vec_store(state.w, vec_load(state.w) + sums.w);
    return true;
}

static void gradient_panel(const tile *t, int64_t panel, const argument *one, const argument *two,
                           const key_tile *keys, sight seen, bool with_kl)
{
    const bool first = one->gradient != NULL;
    const bool second = two->gradient != NULL;
    const bool like_all = seen == SEES_ALL && second && !first && two->inverse_cap == 0.0F;
    const int32_t count = (int32_t)keys->count;
    for (int64_t column = 0; column < panel_columns(t, panel); column += SKL_LANES) {
        const int64_t row = panel * PANEL + column;
        const bool plain = like_all && all_pull(t, row, SKL_LANES);
        if (plain && with_kl && gradient_lanes(t, row, column, one, two, count, NULL, NULL, false, true, true, false))
            continue;
        if (plain && !with_kl &&
            gradient_lanes(t, row, column, one, two, count, NULL, NULL, false, true, false, false))
            continue;
        const lane_range lanes = lanes_visible(t, row, keys), pulling = lanes_pulling(t, row, keys);
        (void)gradient_lanes(t, row, column, one, two, count, &lanes, &pulling, first, second, with_kl, true);
    }
}

static void clear_panel(float *gradient, const tile *t, int64_t panel, const key_tile *keys)
{
    for (int64_t key = 0; gradient != NULL && key < keys->count; key++)
        memset(gradient + key * t->height + panel * PANEL, 0, PANEL * sizeof *gradient);
}

static float inverse_cap(const skl_side *side)
{
    return side->softcap > 0.0F ? 1.0F / (side->softcap * SKL_LOG2E) : 0.0F;
}

/* What a sweep wants of each key tile. */
typedef struct wanted {
    bool student, teacher; /* logit gradients of a side; a grouped teacher's come head by head: see head_gradient */
    bool kl;
    bool keep_logits; /* t->x and t->y of every panel, for head_gradient */
} wanted;

/* Logit gradients of all queries of the tile for one key tile, whose rows are in t->k_t and t->k_s. */
static void tile_gradients(const tile *t, const key_tile *keys, const wanted *want)
{
    const bool grouped = t->group > 1;
    if (grouped)
        group_logits(t, keys);
    float *const g_t = want->teacher && !grouped ? t->g_t : NULL;
    float *const g_s = want->student ? t->g_s : NULL;
    for (int64_t panel = 0; panel < panel_count(t); panel++) {
        const sight seen = panel_sight(t, panel, keys);
        if (seen == SEES_NONE) {
            clear_panel(g_t, t, panel, keys);
            clear_panel(g_s, t, panel, keys);
            continue;
        }
        const int64_t columns = panel_columns(t, panel);
        float *const x = grouped || want->keep_logits ? t->x + panel * TILE_K * PANEL : t->x;
        float *const y = want->keep_logits ? t->y + panel * TILE_K * PANEL : t->y;
        if (!grouped)
            panel_logits(x, &t->teacher, loaded_keys(&t->teacher, t->k_t), panel_queries(t->qT_t, &t->teacher, panel),
                         columns, keys->count);
        panel_logits(y, &t->student, loaded_keys(&t->student, t->k_s), panel_queries(t->qT_s, &t->student, panel),
                     columns, keys->count);
        const argument teacher = {{x, grouped ? 1.0F : logit_scale(&t->teacher)},
                                  grouped ? t->zero : t->lse_t,
                                  grouped ? t->zero : t->low_t,
                                  t->teacher.scale,
                                  grouped ? 0.0F : inverse_cap(&t->teacher),
                                  g_t};
        const argument student = {{y, logit_scale(&t->student)}, t->lse_s, t->low_s, t->student.scale,
                                  inverse_cap(&t->student),      g_s};
        if (g_t != NULL || g_s != NULL || want->kl)
            gradient_panel(t, panel, t->reverse ? &student : &teacher, t->reverse ? &teacher : &student, keys, seen,
                           want->kl);
    }
}

/* Logit gradient of one head of a grouped teacher into t->g_t, from the kept logits: c P_h (phi - dot_t[h]) / r */
static void head_gradient(const tile *t, int64_t h, const key_tile *keys)
{
    const float scale_s = logit_scale(&t->student);
    const float cap = inverse_cap(&t->teacher);
    float *const z = t->sum; /* consumed by group_logits before */
    for (int64_t panel = 0; panel < panel_count(t); panel++) {
        if (panel_sight(t, panel, keys) == SEES_NONE) {
            clear_panel(t->g_t, t, panel, keys);
            continue;
        }
        head_log_probabilities(t, h, panel, keys, z);
        for (int64_t column = 0; column < panel_columns(t, panel); column += SKL_LANES) {
            const int64_t row = panel * PANEL + column;
            const lane_range lanes = lanes_pulling(t, row, keys);
            const vec c = vec_load(t->grad + row) * (t->teacher.scale / (float)t->group);
            const vec dot = vec_load(t->dot_t + h * t->height + row);
            const vec lse_t = vec_load(t->lse_t + h * t->height + row);
            const vec lse_s = vec_load(t->lse_s + row);
            const vec low_s = vec_load(t->low_s + row);
            for (int32_t key = 0; key < keys->count; key++) {
                const int64_t at = panel * TILE_K * PANEL + key * PANEL + column;
                const vec log_p = vec_load(z + key * PANEL + column);
                const vec u = vec_load(t->x + at);
                const vec v = logit_less(t->y + at, scale_s, lse_s) - low_s;
                const vec g = c * head_excess(log_p, u, v, dot, t->reverse) * slope_of(log_p + lse_t, cap);
                vec_store(t->g_t + key * t->height + row, (vec)((ivec)g & lane_mask(&lanes, key)));
            }
        }
    }
}

#endif
