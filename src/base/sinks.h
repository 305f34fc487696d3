/* Sinks: one more outcome of both distributions, whose logit is a number per head. A kernel reduces the keys of a row
 * to its state and merges the sink's state into it before it finishes the row (docs/design/maths.md, section 14). Its
 * exponentials, sums and logarithms are then those of any other key: nothing is computed as 1 - P_sink. A backward
 * recomputes P and S of the keys from LSEs that include the sink. */
#ifndef SKL_BASE_SINKS_H
#define SKL_BASE_SINKS_H

#include "base/kl_math.h"
#include "base/side.h"

/* Logits of a row's sink in natural units, as its keys have them. In f32: a GPU kernel has few registers here. */
typedef struct skl_sink_logits {
    float t, s;
} skl_sink_logits;

/* (largest, sum) represents largest + log sum. Adds e^x. A NaN becomes the largest, which fmaxf() would not let it.
 */
typedef struct skl_log_sum {
    float largest, sum;
} skl_log_sum;

SKL_HOST_DEVICE skl_log_sum skl_log_sum_add(skl_log_sum to, float x)
{
    const float largest = to.largest >= x ? to.largest : x;
    const skl_log_sum added = {largest, to.sum * expf(to.largest - largest) + expf(x - largest)};
    return x == -INFINITY ? to : added;
}

/* log(e^lse + e^sink) */
SKL_HOST_DEVICE double skl_lse_with_sink(double lse, double sink)
{
    const double largest = fmax(lse, sink);
    return largest == -INFINITY ? largest : largest + log(exp(lse - largest) + exp(sink - largest));
}

/* The LSEs to which the logits of a row are relative, all with sinks. */
typedef struct skl_row_lses {
    int64_t group;    /* teacher heads of the student head */
    const float *t;   /* LSE of the first of them; NULL: logits are not relative */
    int64_t stride_t; /* stride between teacher heads */
    const float *s;   /* LSE of the student; NULL: logits are not relative */
} skl_row_lses;

/* The LSEs that a one-pass call is given. */
SKL_HOST_DEVICE skl_row_lses skl_given_lses(const skl_problem *p, const skl_inputs *inputs, const skl_sequence *s,
                                            int64_t head, int64_t i)
{
    const int64_t group = skl_group_size(p);
    const skl_row_lses lses = {group, skl_row_at(&inputs->lse_t, s, head * group, i), inputs->lse_t.stride_head,
                               skl_row_at(&inputs->lse_s, s, head, i)};
    return lses;
}

/* Sink logits of a row. A teacher group needs lses.t: its logit is log mean_h e^(sink_h - lse_h). */
SKL_HOST_DEVICE skl_sink_logits skl_sink_logits_of(const skl_inputs *inputs, int64_t head, skl_row_lses lses)
{
    const float *const sink_t = inputs->sink_t + head * lses.group;
    skl_log_sum sum = {-INFINITY, 0.0F};
    for (int64_t h = 0; h < lses.group; h++)
        sum = skl_log_sum_add(sum, sink_t[h] - (lses.t != NULL ? lses.t[h * lses.stride_t] : 0.0F));
    const skl_sink_logits logits = {lses.group == 1 ? sum.largest : sum.largest + logf(sum.sum / (float)lses.group),
                                    inputs->sink_s[head] - (lses.s != NULL ? lses.s[0] : 0.0F)};
    return logits;
}

/* The contribution of a row to dsink_t or dsink_s of a student head, without the upstream gradient. The LSEs of
 * `inputs` include the sinks. */
SKL_HOST_DEVICE double skl_sink_gradient(const skl_problem *p, const skl_inputs *inputs, const skl_input *kl,
                                         const skl_sequence *s, int64_t head, int64_t i, int of_teacher)
{
    const skl_sink_logits log_p = skl_sink_logits_of(inputs, head, skl_given_lses(p, inputs, s, head, i));
    const int reverse = p->direction == SKL_KL_REVERSE;
    const double log_a = (double)(reverse ? log_p.s : log_p.t), log_b = (double)(reverse ? log_p.t : log_p.s);
    if (reverse == of_teacher) /* gradient of B's sink */
        return exp(log_b) - exp(log_a);
    return log_a == -INFINITY ? 0.0 /* 0 log 0 */
                              : exp(log_a) * (log_a - log_b - (double)skl_row_value(kl, s, head, i));
}

#endif
