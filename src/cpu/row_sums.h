/* The row state of the CPU kernels: as in base/kl_math.h, but in natural units and with sums in double.
 *
 *     m, l = shift and sum of e^(logit - m)
 *     w    = sum e^(a - m_a) ((a - m_a) - (b - m_b))
 *
 * Natural units: a logit is the f32 number that eager PyTorch has, and so is a shift. Their difference is exact near
 * the peak of a row however large they are, and if the peak dominates, the LSE is the same number again. In base 2 it
 * would be rounded on the way there and on the way back, by hundreds at logits of 2^31.
 *
 * Double: kernels sum the keys of a tile in f32 and add the tile here, so that no error grows with the number of
 * tiles.
 *
 * A row that has seen no key has m = -inf. One whose logits are all -inf has m = -FLT_MAX and l = 0. */
#ifndef SKL_CPU_ROW_SUMS_H
#define SKL_CPU_ROW_SUMS_H

#include <float.h>
#include <math.h>
#include <stdbool.h>

#include "base/sinks.h"

typedef struct row_sums {
    double m_a, l_a, m_b, l_b, w;
} row_sums;

static inline row_sums row_sums_empty(void)
{
    const row_sums empty = {-INFINITY, 0.0, -INFINITY, 0.0, 0.0};
    return empty;
}

static inline bool row_sums_is_empty(const row_sums *s)
{
    return s->m_a == -INFINITY && s->l_a == 0.0 && s->m_b == -INFINITY && s->l_b == 0.0;
}

/* w after a change of the shifts by d_a and d_b. Keys without mass add nothing, even to a w that is infinite. */
static inline double moved_w(const row_sums *s, double d_a, double d_b)
{
    const double factor = exp(d_a);
    return factor == 0.0 ? 0.0 : factor * (s->w + s->l_a * (d_a - d_b));
}

static inline row_sums row_sums_merge(row_sums x, row_sums y)
{
    if (row_sums_is_empty(&x))
        return y;
    if (row_sums_is_empty(&y))
        return x;
    const double m_a = fmax(x.m_a, y.m_a), m_b = fmax(x.m_b, y.m_b);
    const row_sums sum = {m_a, exp(x.m_a - m_a) * x.l_a + exp(y.m_a - m_a) * y.l_a, m_b,
                          exp(x.m_b - m_b) * x.l_b + exp(y.m_b - m_b) * y.l_b,
                          moved_w(&x, x.m_a - m_a, x.m_b - m_b) + moved_w(&y, y.m_a - m_a, y.m_b - m_b)};
    return sum;
}

/* The state of a sink, as if it were a row's only key. Where only A gives it mass, the KL is infinite. */
static inline row_sums row_sums_of_sink(skl_sink_logits sink, bool reverse)
{
    const double a = (double)(reverse ? sink.s : sink.t), b = (double)(reverse ? sink.t : sink.s);
    const row_sums sums = {a, a == -INFINITY ? 0.0 : 1.0, b, b == -INFINITY ? 0.0 : 1.0,
                           b == -INFINITY && a > -INFINITY ? INFINITY : 0.0};
    return sums;
}

/* KL of sums that are not empty. It is NaN if one side has no mass. */
static inline double kl_of_sums(double l_a, double l_b, double w)
{
    return w / l_a + log(l_b / l_a);
}

static inline float row_kl(const row_sums *s)
{
    return row_sums_is_empty(s) ? 0.0F : (float)kl_of_sums(s->l_a, s->l_b, s->w);
}

/* KL of a one-pass call, whose shifts are the given LSEs, over `key_count` keys. Over a single key it is 0, whatever
 * the rounding of the LSEs; infinity and NaN still show. */
static inline float one_pass_kl(const row_sums *s, int64_t key_count)
{
    const float kl = key_count == 0 ? 0.0F : (float)kl_of_sums(s->l_a, s->l_b, s->w);
    return key_count == 1 && isfinite(kl) ? 0.0F : kl;
}

static inline float row_lse(double m, double l)
{
    return l == 0.0 ? -INFINITY : (float)(m + log(l));
}

/* Entropy of A, from sums whose logits of B are all 0. */
static inline float row_entropy(const row_sums *s)
{
    return s->l_a == 0.0 ? 0.0F : (float)(log(s->l_a) - s->w / s->l_a);
}

/* skl_dot_rule of a row. */
static inline skl_dot_rule row_dot_rule(const row_sums *s, bool reverse, bool wider_lse)
{
    const skl_dot_rule empty = {0.0F, 1.0F, 0};
    if (row_sums_is_empty(s))
        return empty;
    const double mass = reverse ? exp(s->m_b) * s->l_b : exp(s->m_a) * s->l_a;
    const skl_dot_rule rule = {reverse ? -1.0F : row_kl(s), wider_lse ? (float)mass : 1.0F, !wider_lse};
    return rule;
}

/* ---- Public states: base 2 and f32 -------------------------------------------------------------------------- */

/* A shift in base 2. Rounding it moves all logits of the state by at most one rounding of the largest. */
static inline float shift2_of(double m, double l)
{
    return l == 0.0 && m > -INFINITY ? -FLT_MAX : (float)(m * SKL_LOG2E_DOUBLE);
}

static inline skl_row_state row_state_of(const row_sums *s)
{
    const skl_row_state state = {shift2_of(s->m_a, s->l_a), (float)s->l_a, shift2_of(s->m_b, s->l_b), (float)s->l_b,
                                 (float)(s->w * SKL_LOG2E_DOUBLE)};
    return state;
}

/* The inverse, in bits. */
static inline row_sums row_sums_of_state(const skl_row_state *s)
{
    const row_sums sums = {(double)s->m_a * SKL_LN2_DOUBLE, (double)s->l_a, (double)s->m_b * SKL_LN2_DOUBLE,
                           (double)s->l_b, (double)s->w * SKL_LN2_DOUBLE};
    return sums;
}

#endif
