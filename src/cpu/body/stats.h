/* Statistics of one attention. From the LSE of a row, the probabilities of a panel are exact at once:
 *
 *     p[key][lane] = e^(x - lse)
 *
 * A pass over the queries gives the results of rows and heads, a pass over the keys those of keys: a key block stays,
 * and all queries that see it go by. So every result has one writer, and its bits do not depend on threads. */
#ifndef SKL_CPU_BODY_STATS_H
#define SKL_CPU_BODY_STATS_H

#include "base/sinks.h"
#include "base/stats.h"
#include "cpu/body/forward.h"

/* A query tile of a statistics call. */
typedef struct stats_tile {
    tile t;
    const skl_stats *stats;
    uint32_t bits;              /* SKL_STATS_*: results that are requested */
    float *lse;                 /* [height]: of the keys and the sink */
    float *weight;              /* [height]: w_i; 0 outside the rows of the sums */
    float *most;                /* [height]: largest logit so far */
    double *entropy, *distance; /* [height] */
    double *range;              /* [height][SKL_STATS_RANGES_MAX] */
    float *top_x;               /* logits of the top keys, largest first: [height][SKL_STATS_TOP_MAX] */
    int32_t *top_key;           /* -1: none */
    skl_tile_sums *sums;        /* sums over the tile's rows, for the results of its head */
} stats_tile;

static float *stats_lay_out(stats_tile *s, const skl_problem *p, float *scratch)
{
    float *end = lay_out(&s->t, p, scratch);
    const int64_t height = s->t.height;
    s->lse = s->t.lse_s;
    s->weight = s->t.grad;
    s->most = cut(&end, height);
    s->entropy = cut_doubles(&end, height);
    s->distance = cut_doubles(&end, height);
    s->range = cut_doubles(&end, height * SKL_STATS_RANGES_MAX);
    s->top_x = cut(&end, height * SKL_STATS_TOP_MAX);
    s->top_key = (int32_t *)(void *)cut(&end, height * SKL_STATS_TOP_MAX);
    return end;
}

SCRATCH_SIZE(stats_scratch_size, stats_tile, stats_lay_out)

/* Prepares queries [first, first + height) of a head, and their weights. Returns whether one of these is not 0. */
static bool stats_begin(stats_tile *s, const skl_task *task, int64_t head, int64_t first)
{
    (void)stats_lay_out(s, task->problem, task->scratch);
    tile_begin(&s->t, task, head, first);
    s->stats = task->call->stats;
    s->bits = skl_stats_bits(s->stats);
    const skl_range rows = skl_stats_rows(s->stats, s->t.sequence.query_count);
    load_row_values(&s->t, s->weight, &s->stats->row_weights, head, 1.0F);
    bool any = false;
    for (int64_t i = 0; i < s->t.height; i++) {
        const bool empty = s->t.visible[i].begin >= s->t.visible[i].end;
        if (empty || i >= s->t.count || first + i < rows.begin || first + i >= rows.end)
            s->weight[i] = 0.0F;
        any = any || s->weight[i] != 0.0F;
    }
    return any;
}

/* log p = x - lse. A given LSE may be rounded to a number below a logit of the row. */
SKL_INLINE vec log_p_of(vec x, vec lse)
{
    return vec_at_most(vec_of(0.0F), x - lse);
}

/* p[key][lane] of a panel from its logits; 0 for pairs that are masked. */
static void panel_probabilities(const stats_tile *s, int64_t panel, logits x, const key_tile *keys, float *p)
{
    for (int64_t column = 0; column < panel_columns(&s->t, panel); column += SKL_LANES) {
        const int64_t row = panel * PANEL + column;
        const lane_range lanes = lanes_visible(&s->t, row, keys);
        const logits lane_x = {x.data + column, x.scale};
        const vec lse = vec_load(s->lse + row);
        for (int32_t key = 0; key < keys->count; key++) {
            const vec seen = (vec)((ivec)exp_vec(log_p_of(logit_at(lane_x, key), lse)) & lane_mask(&lanes, key));
            vec_store(p + key * PANEL + column, seen);
        }
    }
}

/* ---- Row results ---------------------------------------------------------------------------------------------- */

/* The sums of p over keys [begin, end) of a tile. */
SKL_INLINE vec sum_of_keys(const float *p, int64_t begin, int64_t end)
{
    vec even = {0}, odd = {0};
    int64_t key = begin;
    for (; key + 1 < end; key += 2) {
        even += vec_load(p + key * PANEL);
        odd += vec_load(p + (key + 1) * PANEL);
    }
    return key < end ? even + odd + vec_load(p + key * PANEL) : even + odd;
}

/* entropy += sum p (lse - x) */
static void add_entropy(const stats_tile *s, int64_t row, logits x, const float *p, int32_t key_count)
{
    const vec lse = vec_load(s->lse + row);
    vec sum = {0};
    for (int32_t key = 0; key < key_count; key++)
        sum += mass_times(vec_load(p + key * PANEL), -log_p_of(logit_at(x, key), lse));
    dvec_store(s->entropy + row, dvec_load(s->entropy + row) + dvec_of(sum));
}

/* distance += sum p |d| */
static void add_distance(const stats_tile *s, int64_t row, const float *p, const key_tile *keys)
{
    const skl_sequence *const sequence = &s->t.sequence;
    vec offset; /* query position - position of the first key */
    for (int lane = 0; lane < SKL_LANES; lane++)
        offset[lane] = (float)(s->t.first + row + lane + sequence->diagonal - keys->first);
    vec sum = {0};
    for (int32_t key = 0; key < keys->count; key++) {
        const vec d = offset - (float)key;
        sum += vec_load(p + key * PANEL) * vec_max(d, -d);
    }
    dvec_store(s->distance + row, dvec_load(s->distance + row) + dvec_of(sum));
}

/* sums.bucket += w p. Far from the diagonal a vector of rows has all keys of the tile in one bucket. */
static void add_buckets(const stats_tile *s, int64_t row, const float *p, const key_tile *keys)
{
    const skl_sequence *const sequence = &s->t.sequence;
    const int32_t count = s->stats->distance_count;
    const int64_t i = s->t.first + row, last_i = i + SKL_LANES - 1, last_j = keys->first + keys->count - 1;
    const bool ahead = i + sequence->diagonal > last_j, behind = last_i + sequence->diagonal < keys->first;
    const int64_t corner = skl_stats_distance(sequence, i, last_j),
                  other = skl_stats_distance(sequence, last_i, keys->first);
    const int32_t bucket = skl_stats_bucket(corner, count);
    const bool same = (ahead || behind) && bucket == skl_stats_bucket(other, count);
    const vec sum = same ? sum_of_keys(p, 0, keys->count) : vec_of(0.0F);
    for (int lane = 0; lane < SKL_LANES; lane++) {
        const double w = (double)s->weight[row + lane];
        if (w == 0.0)
            continue;
        if (same)
            s->sums->bucket[bucket] += w * (double)sum[lane];
        for (int32_t key = 0; !same && key < keys->count; key++) {
            const int64_t d = skl_stats_distance(sequence, i + lane, keys->first + key);
            s->sums->bucket[skl_stats_bucket(d, count)] += w * (double)p[key * PANEL + lane];
        }
    }
}

static void add_ranges(const stats_tile *s, int64_t row, const float *p, const key_tile *keys)
{
    const int32_t *const ranges = s->stats->key_ranges + 2 * s->t.task->batch * s->stats->range_count;
    for (int32_t n = 0; n < s->stats->range_count; n++) {
        const int64_t begin = skl_max(0, ranges[2 * n] - keys->first);
        const int64_t end = skl_min(keys->count, ranges[2 * n + 1] - keys->first);
        if (begin >= end)
            continue;
        const vec sum = sum_of_keys(p, begin, end);
        for (int lane = 0; lane < SKL_LANES; lane++)
            s->range[(row + lane) * SKL_STATS_RANGES_MAX + n] += (double)sum[lane];
    }
}

/* Inserts a logit that is larger than the last one of its row. Equal ones stay in the order of their keys. */
static void insert_top(const stats_tile *s, int64_t row, float x, int64_t key)
{
    float *const top_x = s->top_x + row * SKL_STATS_TOP_MAX;
    int32_t *const top_key = s->top_key + row * SKL_STATS_TOP_MAX;
    int32_t at = s->stats->top_k - 1;
    for (; at > 0 && top_x[at - 1] < x; at--) {
        top_x[at] = top_x[at - 1];
        top_key[at] = top_key[at - 1];
    }
    top_x[at] = x;
    top_key[at] = (int32_t)key;
}

/* A logit of -inf belongs to a key all the same, so it counts as -FLT_MAX next to places without a key. */
static void add_top(const stats_tile *s, int64_t row, logits x, const key_tile *keys)
{
    const lane_range lanes = lanes_visible(&s->t, row, keys);
    const int32_t last = s->stats->top_k - 1;
    vec least;
    for (int lane = 0; lane < SKL_LANES; lane++)
        least[lane] = s->top_x[(row + lane) * SKL_STATS_TOP_MAX + last];
    for (int32_t key = 0; key < keys->count; key++) {
        const vec logit = vec_at_least(vec_of(-FLT_MAX), logit_at(x, key));
        const ivec larger = lane_mask(&lanes, key) & (ivec)(logit > least);
        for (int lane = 0; ivec_any(larger) && lane < SKL_LANES; lane++)
            if (larger[lane]) {
                insert_top(s, row + lane, logit[lane], keys->first + key);
                least[lane] = s->top_x[(row + lane) * SKL_STATS_TOP_MAX + last];
            }
    }
}

/* Copies p of the chosen rows of a panel. */
static void store_weights(const stats_tile *s, int64_t panel, const float *p, const key_tile *keys)
{
    const skl_problem *const problem = s->t.task->problem;
    const int64_t count = s->stats->chosen_count, batch = s->t.task->batch;
    for (int64_t n = 0; n < count; n++) {
        const int64_t column = s->stats->chosen_rows[batch * count + n] - s->t.first - panel * PANEL;
        if (column < 0 || column >= skl_min(PANEL, s->t.count - panel * PANEL))
            continue;
        float *const to =
            s->stats->weights + ((batch * problem->heads_s + s->t.head) * count + n) * problem->len_k + keys->first;
        for (int64_t key = 0; key < keys->count; key++)
            to[key] = p[key * PANEL + column];
    }
}

/* Adds a panel of logits to everything that the call requests of its rows. */
static void add_panel(const stats_tile *s, int64_t panel, logits x, const key_tile *keys)
{
    float *const p = s->t.y;
    panel_probabilities(s, panel, x, keys, p);
    for (int64_t column = 0; column < panel_columns(&s->t, panel); column += SKL_LANES) {
        const int64_t row = panel * PANEL + column;
        const logits lane_x = {x.data + column, x.scale};
        const float *const lane_p = p + column;
        const lane_range lanes = lanes_visible(&s->t, row, keys);
        vec_store(s->most + row, highest(vec_load(s->most + row), lane_x, (int32_t)keys->count, &lanes));
        if (s->bits & SKL_STATS_ENTROPY)
            add_entropy(s, row, lane_x, lane_p, (int32_t)keys->count);
        if (s->bits & SKL_STATS_EXPECTED_DISTANCE)
            add_distance(s, row, lane_p, keys);
        if (s->bits & SKL_STATS_DISTANCE_MASS)
            add_buckets(s, row, lane_p, keys);
        if (s->bits & (SKL_STATS_RANGE_MASS | SKL_STATS_RANGE_SUM))
            add_ranges(s, row, lane_p, keys);
        if (s->bits & SKL_STATS_TOP)
            add_top(s, row, lane_x, keys);
    }
    if (s->bits & SKL_STATS_WEIGHTS)
        store_weights(s, panel, p, keys);
}

static void add_keys(const stats_tile *s)
{
    const tile *const t = &s->t;
    FOR_KEY_TILES(t, keys)
    {
        const key_view k = keys_for_logits(t, &t->student, &keys, t->k_s);
        for (int64_t panel = 0; panel < panel_count(t); panel++) {
            const key_tile seen_keys = panel_keys(t, panel, &keys);
            if (panel_visibility(t, panel, &seen_keys) == HIDDEN)
                continue;
            panel_logits(t->x, &t->student, k, panel_queries(t->qT_s, &t->student, panel), panel_columns(t, panel),
                         seen_keys.count);
            const logits x = {t->x, logit_scale(&t->student)};
            add_panel(s, panel, x, &seen_keys);
        }
    }
}

static bool stats_row_is_empty(const stats_tile *s, int64_t i)
{
    return s->t.visible[i].begin >= s->t.visible[i].end;
}

/* LSEs of the tile's rows, with their sinks: the caller's, or computed here. */
static void find_lses(const stats_tile *s)
{
    const tile *const t = &s->t;
    const skl_inputs *const in = &t->task->call->inputs;
    load_row_values(t, s->lse, &in->lse_s, t->head, 0.0F);
    if (in->lse_s.data != NULL)
        return;
    head_lse(t, &t->student, t->head, t->qT_s, s->lse);
    for (int64_t i = 0; i < t->count; i++) {
        skl_row_set(&t->task->stats.lse, &t->sequence, t->head, t->first + i, s->lse[i]);
        s->most[i] = t->shifts[i];
    }
}

static void clear_sums(const stats_tile *s)
{
    const skl_tile_sums none = {.max_logit = -INFINITY};
    *s->sums = none;
    for (int64_t i = 0; i < s->t.height; i++) {
        s->most[i] = -INFINITY;
        s->entropy[i] = s->distance[i] = 0.0;
        for (int n = 0; n < SKL_STATS_RANGES_MAX; n++)
            s->range[i * SKL_STATS_RANGES_MAX + n] = 0.0;
        for (int n = 0; n < SKL_STATS_TOP_MAX; n++) {
            s->top_x[i * SKL_STATS_TOP_MAX + n] = -INFINITY;
            s->top_key[i * SKL_STATS_TOP_MAX + n] = -1;
        }
    }
}

/* The address of row i in a tensor with more than one number per row; NULL: not requested. */
static void *stats_row(const stats_tile *s, const skl_output *rows, int64_t i)
{
    const int64_t row = s->t.sequence.query_begin + s->t.first + i;
    return rows->data == NULL ? NULL : (float *)rows->data + SKL_ROW(*rows, s->t.sequence.batch, s->t.head, row);
}

static void store_top(const stats_tile *s, int64_t i)
{
    int32_t *const keys = stats_row(s, &s->stats->top_keys, i);
    float *const p = stats_row(s, &s->stats->top_p, i);
    for (int32_t n = 0; n < s->stats->top_k; n++) {
        const int32_t key = s->top_key[i * SKL_STATS_TOP_MAX + n];
        if (keys != NULL)
            keys[n] = key;
        if (p != NULL)
            p[n] =
                key < 0 ? 0.0F : exp_vec(log_p_of(vec_of(s->top_x[i * SKL_STATS_TOP_MAX + n]), vec_of(s->lse[i])))[0];
    }
}

/* -p log p of an outcome; 0 log 0 is 0. */
static double entropy_term(double log_p)
{
    return log_p == -INFINITY ? 0.0 : -log_p * exp(log_p);
}

static void finish_stats_row(const stats_tile *s, int64_t i)
{
    const tile *const t = &s->t;
    const float *const sink = t->task->call->inputs.sink_s;
    const double log_given =
        sink != NULL && !stats_row_is_empty(s, i) ? (double)sink[t->head] - (double)s->lse[i] : -INFINITY;
    const double log_sink = log_given > 0.0 ? 0.0 : log_given; /* a given LSE may be below the sink */
    const float max_logit = s->most[i] <= -FLT_MAX ? -INFINITY : s->most[i];
    const int64_t row = t->first + i;
    skl_row_set(&s->stats->entropy, &t->sequence, t->head, row, (float)(s->entropy[i] + entropy_term(log_sink)));
    skl_row_set(&s->stats->expected_distance, &t->sequence, t->head, row, (float)s->distance[i]);
    skl_row_set(&s->stats->max_logit, &t->sequence, t->head, row, max_logit);
    float *const range_mass = stats_row(s, &s->stats->range_mass, i);
    for (int32_t n = 0; n < s->stats->range_count; n++) {
        const double mass = s->range[i * SKL_STATS_RANGES_MAX + n];
        if (range_mass != NULL)
            range_mass[n] = (float)mass;
        if (s->weight[i] != 0.0F)
            s->sums->range[n] += (double)s->weight[i] * mass;
    }
    if (s->weight[i] != 0.0F && max_logit > s->sums->max_logit)
        s->sums->max_logit = max_logit;
    if (s->bits & SKL_STATS_TOP)
        store_top(s, i);
}

static void stats_rows(const skl_task *task)
{
    const skl_tile_sums none = {.max_logit = -INFINITY};
    stats_tile s;
    const bool weighs = stats_begin(&s, task, task->head, task->tile * task->tiles.queries);
    const bool lse_given = task->call->inputs.lse_s.data != NULL;
    s.sums = task->stats.sums + (task->batch * task->problem->heads_s + task->head) * task->stats.tiles + task->tile;
    *s.sums = none;
    if (s.t.count == 0 || !(weighs || s.bits & SKL_STATS_OF_EVERY_ROW))
        return;
    clear_sums(&s);
    load_queries(&s.t, &s.t.student, s.t.head, s.t.q_s, s.t.qT_s);
    find_lses(&s);
    const uint32_t of_lse = SKL_STATS_LSE | (lse_given ? 0U : SKL_STATS_MAX_LOGIT | SKL_STATS_HEAD_MAX_LOGIT);
    if (s.bits & SKL_STATS_OF_ROWS & ~of_lse)
        add_keys(&s);
    for (int64_t i = 0; i < s.t.count; i++)
        finish_stats_row(&s, i);
}

/* ---- Key results ---------------------------------------------------------------------------------------------- */

/* Adds the columns of one panel to lane sums and maxima of the keys of a tile: [key][lane]. */
static void add_key_panel(const stats_tile *s, int64_t panel, const float *p, int64_t key_count, float *sums,
                          float *maxima)
{
    for (int64_t column = 0; column < panel_columns(&s->t, panel); column += SKL_LANES) {
        const vec w = vec_load(s->weight + panel * PANEL + column);
        const ivec counts = (ivec)(w != 0.0F);
        for (int64_t key = 0; key < key_count; key++) {
            const vec counted = (vec)((ivec)vec_load(p + key * PANEL + column) & counts);
            vec_store(sums + key * SKL_LANES, vec_fma(w, counted, vec_load(sums + key * SKL_LANES)));
            vec_store(maxima + key * SKL_LANES, vec_max(counted, vec_load(maxima + key * SKL_LANES)));
        }
    }
}

/* Adds the queries of a tile to the keys of a tile. */
static void add_key_tile(const stats_tile *s, const float *k, const key_tile *keys, double *key_sum, float *key_max)
{
    const tile *const t = &s->t;
    float *const sums = t->g_t, *const maxima = t->g_s; /* otherwise unused without gradients */
    for (int64_t n = 0; n < keys->count * SKL_LANES; n++)
        sums[n] = maxima[n] = 0.0F;
    for (int64_t panel = 0; panel < panel_count(t); panel++) {
        if (panel_visibility(t, panel, keys) == HIDDEN)
            continue;
        panel_logits(t->x, &t->student, loaded_keys(&t->student, k), panel_queries(t->qT_s, &t->student, panel),
                     panel_columns(t, panel), keys->count);
        const logits x = {t->x, logit_scale(&t->student)};
        panel_probabilities(s, panel, x, keys, t->y);
        add_key_panel(s, panel, t->y, keys->count, sums, maxima);
    }
    for (int64_t key = 0; key < keys->count; key++)
        for (int lane = 0; lane < SKL_LANES; lane++) {
            key_sum[key] += (double)sums[key * SKL_LANES + lane];
            key_max[key] =
                maxima[key * SKL_LANES + lane] > key_max[key] ? maxima[key * SKL_LANES + lane] : key_max[key];
        }
}

static void store_keys(const skl_output *to, const skl_task *task, const skl_sequence *s, int64_t key, float value)
{
    if (to->data != NULL)
        ((float *)to->data)[SKL_ROW(*to, s->batch, task->head, s->key_begin + key)] = value;
}

/* Adds all queries of a head to the keys [first, end). */
static void add_key_head(stats_tile *s, const skl_task *task, int64_t head, int64_t first, int64_t end,
                         double *key_sum, float *key_max)
{
    const skl_input *const given = &task->call->inputs.lse_s;
    const skl_output *const found = &task->stats.lse;
    const skl_input lse = {given->data != NULL ? given->data : found->data,
                           given->data != NULL ? given->stride_batch : found->stride_batch,
                           given->data != NULL ? given->stride_head : found->stride_head,
                           given->data != NULL ? given->stride_row : found->stride_row};
    const int64_t query_count = s->t.sequence.query_count;
    load_keys(&s->t, &s->t.student, skl_key_head(&s->t.student, head), first, end - first, s->t.k_s);
    for (int64_t row = 0; row < query_count; row += s->t.height) {
        const bool weighs = stats_begin(s, task, head, row);
        const skl_range seen = tile_keys(&s->t);
        const int64_t seen_end = skl_min(end, seen.end);
        if (!weighs || seen.begin >= end || seen.end <= first)
            continue;
        load_queries(&s->t, &s->t.student, head, s->t.q_s, s->t.qT_s);
        load_row_values(&s->t, s->lse, &lse, head, 0.0F);
        for (int64_t key = 0; first + key < seen_end; key += TILE_K) {
            const key_tile keys = {(first + key) / TILE_K, first + key, skl_min(TILE_K, seen_end - first - key)};
            add_key_tile(s, key_rows(&s->t.student, s->t.k_s, key), &keys, key_sum + key, key_max + key);
        }
    }
}

static void stats_keys(const skl_task *task)
{
    stats_tile s;
    double key_sum[KEY_BLOCK] = {0};
    float key_max[KEY_BLOCK] = {0};
    (void)stats_begin(&s, task, 0, 0);
    const skl_sequence sequence = s.t.sequence;
    const int64_t key_count = task->problem->packed ? sequence.key_count : task->problem->len_k;
    const int64_t first = task->tile * KEY_BLOCK, row_end = skl_min(first + KEY_BLOCK, key_count);
    const int64_t end = skl_min(row_end, sequence.key_count);
    const int64_t sharing = s.stats->per_key_head ? s.t.student.heads / s.t.student.key_heads : 1;
    for (int64_t head = task->head * sharing; first < end && head < (task->head + 1) * sharing; head++)
        add_key_head(&s, task, head, first, end, key_sum, key_max);
    for (int64_t key = first; key < row_end; key++) {
        store_keys(&s.stats->key_sum, task, &sequence, key, (float)key_sum[key - first]);
        store_keys(&s.stats->key_max, task, &sequence, key, key_max[key - first]);
    }
}

#endif
