/* The row state: a summary of the keys that a query row has seen so far. docs/design/maths.md derives it.
 *
 *     m, l = shift and sum of 2^(logit - m), for A, the first argument of the KL, and B, the second
 *     w    = sum 2^(a - m_a) ((a - m_a) - (b - m_b))
 *
 * Logits are in base 2. An empty state has m = -inf and l = w = 0. */
#ifndef SKL_BASE_KL_MATH_H
#define SKL_BASE_KL_MATH_H

#include <math.h>

#include "base/host_device.h"
#include "streamkl.h"

#define SKL_LOG2E 1.44269504088896340736F
#define SKL_LN2   0.69314718055994530942F

#define SKL_LOG2E_DOUBLE 1.44269504088896340736
#define SKL_LN2_DOUBLE   0.69314718055994530942

/* The relative accuracy of an f32 sum does not depend on its scale, so a shift only has to keep the sum of a tile in
 * range. A tile whose sum passes this bound is redone with a new shift. */
#define SKL_LAZY_BOUND 4096.0F

/* Logits in base 2 from here on are too coarse for exponents: the rounding error of a product, which a shift by the
 * rounded maximum leaves, is no longer far below 1. Kernels on a GPU then round products before they subtract a
 * shift, as eager PyTorch does, and refuse, by NaN, to recover probabilities from an LSE. */
#define SKL_HUGE_LOGIT 1048576.0F

SKL_HOST_DEVICE skl_row_state skl_state_empty(void)
{
    const skl_row_state state = {-INFINITY, 0.0F, -INFINITY, 0.0F, 0.0F};
    return state;
}

/* Changes the shifts to m_a and m_b: w = 2^d_a (w + l_a (d_a - d_b)). An empty side stays empty. */
SKL_HOST_DEVICE skl_row_state skl_state_move(skl_row_state state, float m_a, float m_b)
{
    const float d_a = state.l_a == 0.0F ? 0.0F : state.m_a - m_a;
    const float d_b = state.l_b == 0.0F ? 0.0F : state.m_b - m_b;
    const float factor_a = exp2f(d_a);
    const skl_row_state moved = {m_a, factor_a * state.l_a, m_b, exp2f(d_b) * state.l_b,
                                 factor_a * (state.w + state.l_a * (d_a - d_b))};
    return moved;
}

SKL_HOST_DEVICE skl_row_state skl_state_merge(skl_row_state a, skl_row_state b)
{
    const float m_a = fmaxf(a.m_a, b.m_a);
    const float m_b = fmaxf(a.m_b, b.m_b);
    const skl_row_state to_a = skl_state_move(a, m_a, m_b);
    const skl_row_state to_b = skl_state_move(b, m_a, m_b);
    const skl_row_state sum = {m_a, to_a.l_a + to_b.l_a, m_b, to_a.l_b + to_b.l_b, to_a.w + to_b.w};
    return sum;
}

/* The row has seen no key. */
SKL_HOST_DEVICE int skl_state_is_empty(const skl_row_state *state)
{
    return state->l_a == 0.0F || state->l_b == 0.0F;
}

/* The state of a row that has seen one key: its KL is 0, whatever the rounding of the logits. Next to a shift that is
 * not its own logit, one of the sums may have underflowed; the other one still counts. Keep the larger
 * sum and fold the ratio into the other shift, where its rounding has little weight in the row. */
SKL_HOST_DEVICE skl_row_state skl_state_of_one_key(skl_row_state state)
{
    const float ratio = log2f(state.l_b) - log2f(state.l_a);
    const skl_row_state of_a = {state.m_a, state.l_a, state.m_b + ratio, state.l_a, 0.0F};
    const skl_row_state of_b = {state.m_a - ratio, state.l_b, state.m_b, state.l_b, 0.0F};
    return skl_state_is_empty(&state) ? state : ratio > 0.0F ? of_b : of_a;
}

/* KL in nats, not clamped: rounding can make it slightly negative. One logarithm of the ratio, instead of the
 * difference of two, keeps small KLs accurate and makes the KL of equal sides exactly 0. */
SKL_HOST_DEVICE float skl_state_kl(const skl_row_state *state)
{
    if (skl_state_is_empty(state))
        return 0.0F;
    return (state->w / state->l_a + log2f(state->l_b / state->l_a)) * SKL_LN2;
}

/* Entropy of A in nats, from a state whose logits of B are all 0: w is then sum 2^(a - m_a) (a - m_a). */
SKL_HOST_DEVICE float skl_state_entropy(const skl_row_state *state)
{
    return state->l_a == 0.0F ? 0.0F : (log2f(state->l_a) - state->w / state->l_a) * SKL_LN2;
}

/* Probability of the visible keys under the given LSEs, from the LSE of the mean over heads. Computed LSEs cover only
 * visible keys, so it is 1. */
SKL_HOST_DEVICE float skl_mass(float lse_of_mean, int lse_given)
{
    return lse_given || lse_of_mean == -INFINITY ? expf(lse_of_mean) : 1.0F;
}

/* dot_t of head h of a teacher group, from P_hj and phi_j = dKL / dP_j:
 *
 *     dot_h = mean + share * sum_j P_hj (phi_j - mean)
 *
 * `mean` is the mean of phi under P. `share` is the probability of the visible keys under given LSEs that may cover
 * more keys. Other LSEs are those of the visible keys, rounded to f32: then P_h sums to 1 only up to that rounding,
 * and a kernel that `normalizes` divides by the sum instead. At the peak of a row phi - dot_h may be far smaller than
 * either. */
typedef struct skl_dot_rule {
    float mean, share;
    int normalizes;
} skl_dot_rule;

SKL_HOST_DEVICE skl_dot_rule skl_dot_rule_of(const skl_row_state *state, int reverse, int wider_lse)
{
    const skl_dot_rule empty = {0.0F, 1.0F, 0};
    if (skl_state_is_empty(state))
        return empty;
    const float mass = reverse ? exp2f(state->m_b) * state->l_b : exp2f(state->m_a) * state->l_a;
    const skl_dot_rule rule = {reverse ? -1.0F : skl_state_kl(state), wider_lse ? mass : 1.0F, !wider_lse};
    return rule;
}

/* In double, because an error in an LSE affects all probabilities of the row in a backward. */
SKL_HOST_DEVICE float skl_lse(float m, float l)
{
    return l == 0.0F ? -INFINITY : (float)(((double)m + log2((double)l)) * SKL_LN2_DOUBLE);
}

/* An LSE in base 2 as a sum of two floats: `low` is the part that f32 cannot hold. */
typedef struct skl_lse2 {
    float value, low;
} skl_lse2;

SKL_HOST_DEVICE skl_lse2 skl_lse2_split(double lse2)
{
    const float value = (float)lse2;
    const skl_lse2 split = {value, isinf(value) ? 0.0F : (float)(lse2 - (double)value)};
    return split;
}

/* -inf, of a row without visible keys, stays; any other LSE beyond SKL_HUGE_LOGIT is NaN. */
SKL_HOST_DEVICE int skl_lse2_is_usable(float lse2)
{
    return lse2 < SKL_HUGE_LOGIT && (lse2 > -SKL_HUGE_LOGIT || lse2 == -INFINITY);
}

SKL_HOST_DEVICE skl_lse2 skl_lse2_of(float lse)
{
    const skl_lse2 nan = {NAN, 0.0F};
    return skl_lse2_is_usable(lse * SKL_LOG2E) ? skl_lse2_split((double)lse * SKL_LOG2E_DOUBLE) : nan;
}

/* max(kl, 0) that keeps NaN and -inf: rounding can make a KL slightly negative, but only sums that left the range of
 * floats make it infinite. */
SKL_HOST_DEVICE float skl_kl_report(float kl)
{
    return kl < 0.0F && kl > -INFINITY ? 0.0F : kl;
}

#endif
