/* The row state: what a query row remembers of the keys it has seen. docs/maths.md derives it.
 *
 *     m, l = stabiliser and sum of 2^(logit - m), for A, the first argument of the KL, and B, the second
 *     w    = sum 2^(a - m_a) ((a - m_a) - (b - m_b))
 *
 * Logits are in base 2. An empty state has m = -inf, l = w = 0. */
#ifndef SKL_BASE_KL_MATH_H
#define SKL_BASE_KL_MATH_H

#include <math.h>

#include "base/host_device.h"
#include "streamkl.h"

#define SKL_LOG2E 1.44269504088896340736F
#define SKL_LN2   0.69314718055994530942F

#define SKL_LOG2E_DOUBLE 1.44269504088896340736
#define SKL_LN2_DOUBLE   0.69314718055994530942

/* fp32 sums are scale-free, so a stabiliser only has to keep a tile's sum in range: past this bound it is renewed. */
#define SKL_LAZY_BOUND 4096.0F

SKL_HOST_DEVICE skl_row_state skl_state_empty(void)
{
    const skl_row_state state = {-INFINITY, 0.0F, -INFINITY, 0.0F, 0.0F};
    return state;
}

/* Moves the stabilisers to m_a, m_b: w = 2^d_a (w + l_a (d_a - d_b)). An empty side has nothing to move. */
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

/* Adds one pair of logits. */
SKL_HOST_DEVICE skl_row_state skl_state_add(skl_row_state state, float a, float b)
{
    const skl_row_state pair = {a, 1.0F, b, 1.0F, 0.0F};
    return skl_state_merge(state, pair);
}

/* No key was seen. */
SKL_HOST_DEVICE int skl_state_is_empty(const skl_row_state *state)
{
    return state->l_a == 0.0F || state->l_b == 0.0F;
}

/* KL in nats, not clamped: rounding can leave it a little below 0. One logarithm of the ratio, not the difference of
 * two, keeps small KLs accurate, and equal sides cancel exactly. */
SKL_HOST_DEVICE float skl_state_kl(const skl_row_state *state)
{
    if (skl_state_is_empty(state))
        return 0.0F;
    return (state->w / state->l_a + log2f(state->l_b / state->l_a)) * SKL_LN2;
}

/* Entropy of the first argument in nats, from a state whose second logits were all 0: w is then sum 2^u u. */
SKL_HOST_DEVICE float skl_state_entropy(const skl_row_state *state)
{
    return state->l_a == 0.0F ? 0.0F : (log2f(state->l_a) - state->w / state->l_a) * SKL_LN2;
}

/* What the visible keys hold of the attention that given LSEs cover, from the LSE of the mean of heads. LSEs that
 * were computed cover what is visible, no more. */
SKL_HOST_DEVICE float skl_mass(float lse_of_mean, int lse_given)
{
    return lse_given || lse_of_mean == -INFINITY ? expf(lse_of_mean) : 1.0F;
}

/* What makes the dot of a teacher head in a group of its P_hj and phi_j = dKL / dP_j:
 *
 *     dot_h = mean + share * sum_j P_hj (phi_j - mean)
 *
 * with the mean of phi under P, and the share that the visible keys have of what the given LSEs cover. LSEs that were
 * computed have a share of 1 and P_h sums to 1: any mean will do, and 0 costs no rounding. */
typedef struct skl_dot_rule {
    float mean, share;
} skl_dot_rule;

SKL_HOST_DEVICE skl_dot_rule skl_dot_rule_of(const skl_row_state *state, int reverse, int lse_given)
{
    const skl_dot_rule plain = {0.0F, 1.0F};
    if (!lse_given || skl_state_is_empty(state))
        return plain;
    const skl_dot_rule forward_rule = {skl_state_kl(state), exp2f(state->m_a) * state->l_a};
    const skl_dot_rule reverse_rule = {-1.0F, exp2f(state->m_b) * state->l_b};
    return reverse ? reverse_rule : forward_rule;
}

/* In double: a backward feels every rounding of an LSE in all probabilities of its row. */
SKL_HOST_DEVICE float skl_lse(float m, float l)
{
    return l == 0.0F ? -INFINITY : (float)(((double)m + log2((double)l)) * SKL_LN2_DOUBLE);
}

/* A natural LSE in base 2, with what f32 cannot hold of it beside it. */
typedef struct skl_lse2 {
    float value, low;
} skl_lse2;

SKL_HOST_DEVICE skl_lse2 skl_lse2_split(double lse2)
{
    const float value = (float)lse2;
    const skl_lse2 split = {value, isinf(value) ? 0.0F : (float)(lse2 - (double)value)};
    return split;
}

SKL_HOST_DEVICE skl_lse2 skl_lse2_of(float lse)
{
    return skl_lse2_split((double)lse * SKL_LOG2E_DOUBLE);
}

/* max(kl, 0) that lets NaN through. */
SKL_HOST_DEVICE float skl_kl_report(float kl)
{
    return kl < 0.0F ? 0.0F : kl;
}

#endif
