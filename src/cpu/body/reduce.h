/* The forward reduction of a panel: five numbers per row, one row per lane. */
#ifndef SKL_CPU_BODY_REDUCE_H
#define SKL_CPU_BODY_REDUCE_H

#include "cpu/body/tile.h"

/* Logits of one argument of the KL: scale * data. */
typedef struct logits {
    const float *data; /* [key][PANEL] */
    float scale;
} logits;

/* A logit is rounded to f32 before a shift or an LSE is subtracted, and not fused with it: see row_sums.h. */
SKL_INLINE vec logit_at(logits x, int32_t key)
{
    return vec_load(x.data + key * PANEL) * x.scale;
}

typedef struct key_sums {
    vec l_a, l_b, w;
} key_sums;

/* p * value, but 0 if p is 0, where a logit of -inf makes the value infinite: 0 log 0 = 0. */
SKL_INLINE vec mass_times(vec p, vec value)
{
    return p * (vec)((ivec)value & (ivec)(p != 0.0F));
}

/* Adds p_a, p_b and p_a times the difference of their exponents; lanes that are not `seen` add 0. A logit of -inf
 * makes w NaN unless `masked` is set: full tiles do not test every p_a. */
SKL_INLINE void add_terms(key_sums *sums, vec p_a, vec p_b, vec difference, ivec seen, const bool masked)
{
    const vec seen_a = masked ? (vec)((ivec)p_a & seen) : p_a;
    const vec seen_b = masked ? (vec)((ivec)p_b & seen) : p_b;
    sums->l_a += seen_a;
    sums->l_b += seen_b;
    sums->w = vec_fma(seen_a, masked ? (vec)((ivec)difference & (ivec)(seen_a != 0.0F)) : difference, sums->w);
}

SKL_INLINE void add_sums(key_sums *to, const key_sums *from)
{
    to->l_a += from->l_a;
    to->l_b += from->l_b;
    to->w += from->w;
}

/* Adds one key: e^a, e^b and e^a (a - b), where a and b are logits minus their shifts m_a and m_b. */
SKL_INLINE void add_key(key_sums *sums, vec a, vec b, ivec seen, const bool masked)
{
    add_terms(sums, masked ? exp_vec(a) : exp_in_range(a), masked ? exp_vec(b) : exp_in_range(b), a - b, seen,
              masked);
}

/* Sums over keys in two interleaved chains: half the latency, and rounding errors grow half as fast. */
SKL_INLINE key_sums sum_keys(logits a, vec m_a, logits b, vec m_b, int32_t key_count, const lane_range *lanes,
                             const bool masked)
{
    key_sums even = {{0}, {0}, {0}};
    key_sums odd = even;
    const ivec all = ivec_of(-1);
    int32_t key = 0;
    for (; key + 1 < key_count; key += 2) {
        add_key(&even, logit_at(a, key) - m_a, logit_at(b, key) - m_b, masked ? lane_mask(lanes, key) : all, masked);
        add_key(&odd, logit_at(a, key + 1) - m_a, logit_at(b, key + 1) - m_b,
                masked ? lane_mask(lanes, key + 1) : all, masked);
    }
    if (key < key_count)
        add_key(&even, logit_at(a, key) - m_a, logit_at(b, key) - m_b, masked ? lane_mask(lanes, key) : all, masked);
    add_sums(&even, &odd);
    return even;
}

/* Maximum of m and the visible logits of each lane; at least -FLT_MAX in a lane that sees a key: see row_sums.h. */
static vec highest(vec m, logits a, int32_t key_count, const lane_range *lanes)
{
    m = vec_select((ivec)(lanes->begin < lanes->end) & (ivec)(m < -FLT_MAX), vec_of(-FLT_MAX), m);
    for (int32_t key = 0; key < key_count; key++) {
        const vec x = logit_at(a, key);
        m = vec_select(lane_mask(lanes, key) & (ivec)(x > m), x, m);
    }
    return m;
}

/* Change of a shift from m to `next`; 0 for a lane that has seen no key. */
SKL_INLINE vec shift_change(vec m, vec next)
{
    return vec_select(m == -INFINITY, vec_of(0.0F), m - next);
}

/* A shift that can be subtracted: it is -inf in a lane that has seen no key. */
SKL_INLINE vec finite_shift(vec m)
{
    return vec_select(m == -INFINITY, vec_of(0.0F), m);
}

/* Row states of SKL_LANES rows: see row_sums.h. */
typedef struct lane_state {
    float *m_a, *m_b;
    double *l_a, *l_b, *w;
} lane_state;

static lane_state lane_state_at(const tile *t, int64_t row)
{
    const lane_state state = {t->shifts + row, t->shifts + t->height + row, t->sums + row, t->sums + t->height + row,
                              t->sums + 2 * t->height + row};
    return state;
}

static row_sums sums_of(const tile *t, int64_t i)
{
    const lane_state s = lane_state_at(t, i);
    const row_sums sums = {(double)*s.m_a, *s.l_a, (double)*s.m_b, *s.l_b, *s.w};
    return sums;
}

static void state_reset(const tile *t)
{
    for (int64_t i = 0; i < t->height; i++) {
        const lane_state s = lane_state_at(t, i);
        *s.m_a = *s.m_b = -INFINITY;
        *s.l_a = *s.l_b = *s.w = 0.0;
    }
}

static void add_to_state(const lane_state *s, const key_sums *sums)
{
    dvec_store(s->l_a, dvec_load(s->l_a) + dvec_of(sums->l_a));
    dvec_store(s->l_b, dvec_load(s->l_b) + dvec_of(sums->l_b));
    dvec_store(s->w, dvec_load(s->w) + dvec_of(sums->w));
}

/* Moves the sums to new shifts: l = e^d l and w = e^d_a (w + l_a (d_a - d_b)), as in row_sums_merge. */
static void move_state(const lane_state *s, vec m_a, vec m_b)
{
    const vec d_a = shift_change(vec_load(s->m_a), m_a);
    const vec d_b = shift_change(vec_load(s->m_b), m_b);
    const vec factor_a = exp_vec(d_a);
    const dvec wide_a = dvec_of(factor_a);
    const dvec l_a = dvec_load(s->l_a);
    const dvec w = wide_a * (dvec_load(s->w) + l_a * (dvec_of(d_a) - dvec_of(d_b)));
    dvec_store(s->w, dvec_masked(w, (ivec)(factor_a != 0.0F)));
    dvec_store(s->l_a, wide_a * l_a);
    dvec_store(s->l_b, dvec_of(exp_vec(d_b)) * dvec_load(s->l_b));
    vec_store(s->m_a, m_a);
    vec_store(s->m_b, m_b);
}

/* Reduces with the row maximum as the shift: for the first tile of a row, and tiles whose sums outgrow
 * the lazy shift or that hold a logit of -inf. Lanes of `keeps` have the bits that they would have next to other
 * rows: their shift stays. */
static void reduce_exactly(const lane_state *s, logits a, logits b, int32_t key_count, const lane_range *lanes,
                           ivec keeps)
{
    const vec old_a = vec_load(s->m_a), old_b = vec_load(s->m_b);
    const vec m_a = vec_select(keeps, old_a, highest(old_a, a, key_count, lanes));
    const vec m_b = vec_select(keeps, old_b, highest(old_b, b, key_count, lanes));
    const key_sums sums = sum_keys(a, finite_shift(m_a), b, finite_shift(m_b), key_count, lanes, true);
    move_state(s, m_a, m_b);
    add_to_state(s, &sums);
}

/* The lanes whose sums over the current shifts can be added: none passes the bound, is negative or NaN. */
static ivec lanes_that_fit(const key_sums *sums)
{
    const ivec low = (ivec)(sums->l_a < SKL_LAZY_BOUND) & (ivec)(sums->l_b < SKL_LAZY_BOUND);
    const ivec positive = (ivec)(sums->l_a >= 0.0F) & (ivec)(sums->l_b >= 0.0F) & (ivec)(sums->w == sums->w);
    return low & positive;
}

/* Reduces with the current shifts. Returns false and changes nothing but `fits` if they do not fit all lanes. */
static bool reduce_lazily(const lane_state *s, logits a, logits b, int32_t key_count, const lane_range *lanes,
                          bool masked, ivec *fits)
{
    const vec m_a = vec_load(s->m_a), m_b = vec_load(s->m_b);
    const key_sums sums =
        masked ? sum_keys(a, m_a, b, m_b, key_count, lanes, true) : sum_keys(a, m_a, b, m_b, key_count, NULL, false);
    *fits = lanes_that_fit(&sums);
    if (ivec_any(~*fits))
        return false;
    add_to_state(s, &sums);
    return true;
}

/* Adds the keys of a panel to its row states; a and b are the logits of the two arguments of the KL. */
static void reduce_panel(const tile *t, int64_t panel, logits a, logits b, const key_tile *keys, visibility seen)
{
    const int32_t key_count = (int32_t)keys->count;
    for (int64_t column = 0; column < panel_columns(t, panel); column += SKL_LANES) {
        const int64_t row = panel * PANEL + column;
        const lane_state state = lane_state_at(t, row);
        const logits lane_a = {a.data + column, a.scale};
        const logits lane_b = {b.data + column, b.scale};
        const bool has_shift = *state.m_a != -INFINITY;
        ivec fits = {0};
        if (seen == FULL && has_shift && reduce_lazily(&state, lane_a, lane_b, key_count, NULL, false, &fits))
            continue;
        const lane_range lanes = lanes_visible(t, row, keys);
        if (seen == MASKED && has_shift && reduce_lazily(&state, lane_a, lane_b, key_count, &lanes, true, &fits))
            continue;
        reduce_exactly(&state, lane_a, lane_b, key_count, &lanes, fits);
    }
}

#endif
