/* A teacher group as one teacher: the logarithm of the mean probability of its heads serves as the logit. A pooled
 * teacher has one logit per block of keys. */
#ifndef SKL_CPU_BODY_GROUP_H
#define SKL_CPU_BODY_GROUP_H

#include "cpu/body/reduce.h"

/* Loads the keys of teacher head h of the group into t->k_t. Called in the order of heads, so that heads that share
 * keys load them once. */
static void load_group_keys(const tile *t, int64_t h, const key_tile *keys)
{
    const int64_t head = t->head * t->group_size + h;
    const int64_t key_head = skl_key_head(&t->teacher, head);
    if (h == 0 || skl_key_head(&t->teacher, head - 1) != key_head)
        load_keys(t, &t->teacher, key_head, keys->first, keys->count, t->k_t);
}

/* z = stored logits of teacher head h, for one panel: see logit_scale. */
static void head_logits(const tile *t, int64_t h, int64_t panel, const key_tile *keys, float *z)
{
    const float *const qT = t->qT_t + h * t->height * query_width(t->teacher.dim);
    panel_logits(z, &t->teacher, loaded_keys(&t->teacher, t->k_t), panel_queries(qT, &t->teacher, panel),
                 panel_columns(t, panel), keys->count);
}

/* z = logarithms of its probabilities. */
static void head_log_probabilities(const tile *t, int64_t h, int64_t panel, const key_tile *keys, float *z)
{
    const int64_t columns = panel_columns(t, panel);
    const float *const lse = t->lse_t + h * t->height + panel * PANEL;
    const float scale = logit_scale(&t->teacher);
    head_logits(t, h, panel, keys, z);
    for (int64_t key = 0; key < keys->count; key++)
        for (int64_t column = 0; column < columns; column += SKL_LANES) {
            float *const at = z + key * PANEL + column;
            vec_store(at, vec_load(at) * scale - vec_load(lse + column));
        }
}

/* (x, sum) represents x + log sum. Adds e^z with one exponential. */
SKL_INLINE void add_in_log_space(float *x, float *sum, vec z)
{
    const vec old = vec_load(x);
    const vec difference = vec_select(z == old, vec_of(0.0F), z - old); /* 0 also if both are -inf */
    const ivec larger = difference > 0.0F;
    const vec ratio = exp_vec(vec_select(larger, -difference, difference));
    const vec s = vec_load(sum);
    vec_store(x, vec_select(larger, z, old));
    vec_store(sum, vec_select(larger, horner(s, ratio, 1.0F), s + ratio));
}

/* t->x = log mean_h P_h, or log max_h P_h, for every panel that sees keys of the tile. t->lse_t holds the LSEs of the
 * heads. */
static void group_logits(const tile *t, const key_tile *keys)
{
    float *const z = t->g_t; /* g_t is not in use yet */
    const int64_t panel_size = TILE_K * PANEL;
    const bool largest = t->task->problem->pool_heads == SKL_POOL_HEADS_MAX;
    for (int64_t h = 0; h < t->group_size; h++) {
        load_group_keys(t, h, keys);
        for (int64_t panel = 0; panel < panel_count(t); panel++) {
            if (panel_visibility(t, panel, keys) == HIDDEN)
                continue;
            float *const x = t->x + panel * panel_size;
            float *const sum = t->sum + panel * panel_size;
            head_log_probabilities(t, h, panel, keys, h == 0 ? x : z);
            for (int64_t at = 0; at < keys->count * PANEL; at += SKL_LANES) {
                if (h == 0)
                    vec_store(sum + at, vec_of(1.0F));
                else if (largest)
                    vec_store(x + at, larger_or_nan(vec_load(x + at), vec_load(z + at)));
                else
                    add_in_log_space(x + at, sum + at, vec_load(z + at));
            }
        }
    }
    const float group_size = (float)t->group_size;
    if (largest)
        return;
    for (int64_t panel = 0; panel < panel_count(t); panel++) {
        if (panel_visibility(t, panel, keys) == HIDDEN)
            continue;
        float *const x = t->x + panel * panel_size;
        const float *const sum = t->sum + panel * panel_size;
        for (int64_t at = 0; at < keys->count * PANEL; at += SKL_LANES)
            vec_store(x + at, vec_load(x + at) + log_vec(vec_load(sum + at) / group_size));
    }
}

/* The tile with the teacher's keys instead of blocks. */
static tile teacher_tile(const tile *t)
{
    tile of_keys = *t;
    of_keys.visible = t->seen;
    of_keys.x = t->key_x;
    return of_keys;
}

/* Adds the keys of a tile to the blocks that they belong to: (t->x, t->block_sum) represents t->x + log t->block_sum.
 */
static void pool_keys(const tile *t, const tile *of_keys, const key_tile *blocks, const key_tile *keys)
{
    const int64_t size = t->task->problem->pool_size;
    const bool largest = t->task->problem->pool == SKL_POOL_MAX;
    for (int64_t panel = 0; panel < panel_count(t); panel++) {
        if (panel_visibility(of_keys, panel, keys) == HIDDEN)
            continue;
        for (int64_t column = 0; column < panel_columns(t, panel); column += SKL_LANES) {
            const lane_range lanes = lanes_visible(of_keys, panel * PANEL + column, keys);
            const int64_t first = panel * TILE_K * PANEL + column;
            for (int32_t key = 0; key < keys->count; key++) {
                const int64_t to = first + ((keys->first + key) / size - blocks->first) * PANEL;
                const vec z =
                    vec_select(lane_mask(&lanes, key), vec_load(of_keys->x + first + key * PANEL), vec_of(-INFINITY));
                if (largest)
                    vec_store(t->x + to, larger_or_nan(vec_load(t->x + to), z));
                else
                    add_in_log_space(t->x + to, t->block_sum + to, z);
            }
        }
    }
}

/* t->x = log M_b of a tile of blocks. */
static void pooled_logits(const tile *t, const key_tile *blocks)
{
    const int64_t size = t->task->problem->pool_size, floats = panel_count(t) * TILE_K * PANEL;
    const tile of_keys = teacher_tile(t);
    const int64_t end = skl_min((blocks->first + blocks->count) * size, tile_keys(&of_keys).end);
    for (int64_t at = 0; at < floats; at += SKL_LANES) {
        vec_store(t->x + at, vec_of(-INFINITY));
        vec_store(t->block_sum + at, vec_of(0.0F));
    }
    for (int64_t first = skl_max(blocks->first * size, tile_keys(&of_keys).begin); first < end; first += TILE_K) {
        const key_tile keys = {0, first, skl_min(TILE_K, end - first)};
        group_logits(&of_keys, &keys);
        pool_keys(t, &of_keys, blocks, &keys);
    }
    for (int64_t at = 0; t->task->problem->pool == SKL_POOL_SUM && at < floats; at += SKL_LANES)
        vec_store(t->x + at, vec_load(t->x + at) + log_vec(vec_load(t->block_sum + at)));
}

/* t->x = logarithms of the teacher's target for the keys, or blocks, of a tile. */
static void teacher_logits(const tile *t, const key_tile *keys)
{
    if (skl_is_pooled(t->task->problem))
        pooled_logits(t, keys);
    else
        group_logits(t, keys);
}

/* P_h (phi - origin) of a head, with phi = dKL/dP: log P - log S, or -S/P for the reverse KL, where P_h S/P is one
 * exponential. Takes logarithms of P_h, P and S. */
SKL_INLINE vec head_excess(vec log_p_head, vec log_p, vec log_s, vec origin, bool reverse)
{
    const vec p_head = exp_vec(log_p_head);
    return reverse ? vec_fma(-p_head, origin, -exp_vec(log_p_head - log_p + log_s))
                   : mass_times(p_head, log_p - log_s - origin);
}

#endif
