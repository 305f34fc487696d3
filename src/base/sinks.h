/* Sinks: one more outcome of both distributions, whose logit is a number per head. A kernel reduces the keys of a row to
 * its state and merges the sink's state into it before it finishes the row (docs/design/maths.md, section 5). Its
 * exponentials, sums and logarithms are then those of any other key: nothing is computed as 1 - P_sink. A backward
 * recomputes P and S of the keys from LSEs that include the sink. */
#ifndef SKL_BASE_SINKS_H
#define SKL_BASE_SINKS_H

#include "base/kl_math.h"
#include "base/side.h"

/* Logits of a row's sink in natural units, as its keys have them. */
typedef struct skl_sink_logits {
    double t, s;
} skl_sink_logits;

/* (largest, sum) represents largest + log sum. Adds e^x. */
typedef struct skl_log_sum {
    double largest, sum;
} skl_log_sum;

SKL_HOST_DEVICE skl_log_sum skl_log_sum_add(skl_log_sum to, double x)
{
    const double largest = fmax(to.largest, x);
    const skl_log_sum added = {largest, to.sum * exp(to.largest - largest) + exp(x - largest)};
    return x == -INFINITY ? to : added;
}

/* log(e^lse + e^sink) */
SKL_HOST_DEVICE double skl_lse_with_sink(double lse, double sink)
{
    const skl_log_sum none = {-INFINITY, 0.0}, both = skl_log_sum_add(skl_log_sum_add(none, lse), sink);
    return both.largest + log(both.sum);
}

/* The LSEs to which the logits of a row are relative, all with sinks. */
typedef struct skl_row_lses {
    const float *t;   /* of the first teacher head; NULL: logits are not relative */
    int64_t stride_t; /* from teacher head to teacher head */
    const float *s;   /* of the student; NULL: logits are not relative */
} skl_row_lses;

/* Those of a one-pass call. */
SKL_HOST_DEVICE skl_row_lses skl_given_lses(const skl_problem *p, const skl_inputs *inputs, const skl_sequence *s,
                                            int64_t head, int64_t i)
{
    const skl_row_lses lses = {skl_row_at(&inputs->lse_t, s, head * skl_group_size(p), i), inputs->lse_t.stride_head,
                               skl_row_at(&inputs->lse_s, s, head, i)};
    return lses;
}

/* With a teacher group, lses.t must be given: the logit is log mean_h e^(sink_h - lse_h). */
SKL_HOST_DEVICE skl_sink_logits skl_sink_logits_of(const skl_problem *p, const skl_inputs *inputs, int64_t head,
                                                   skl_row_lses lses)
{
    const int64_t group = skl_group_size(p);
    const float *const sink_t = inputs->sink_t + head * group;
    const double sink_s = (double)inputs->sink_s[head];
    skl_log_sum mean = {-INFINITY, 0.0};
    for (int64_t h = 0; group > 1 && h < group; h++)
        mean = skl_log_sum_add(mean, (double)sink_t[h] - (double)lses.t[h * lses.stride_t]);
    const skl_sink_logits logits = {group > 1        ? mean.largest + log(mean.sum / (double)group)
                                    : lses.t != NULL ? (double)sink_t[0] - (double)lses.t[0]
                                                     : (double)sink_t[0],
                                    lses.s != NULL ? sink_s - (double)lses.s[0] : sink_s};
    return logits;
}

/* The contribution of a row to dsink_t or dsink_s of a student head, without the upstream gradient. The LSEs of
 * `inputs` include the sinks. */
SKL_HOST_DEVICE double skl_sink_gradient(const skl_problem *p, const skl_inputs *inputs, const skl_input *kl,
                                         const skl_sequence *s, int64_t head, int64_t i, int of_teacher)
{
    const skl_sink_logits log_p = skl_sink_logits_of(p, inputs, head, skl_given_lses(p, inputs, s, head, i));
    const int reverse = p->direction == SKL_KL_REVERSE;
    const double log_a = reverse ? log_p.s : log_p.t, log_b = reverse ? log_p.t : log_p.s;
    if (reverse == of_teacher) /* of B */
        return exp(log_b) - exp(log_a);
    return log_a == -INFINITY ? 0.0 /* 0 log 0 */
                              : exp(log_a) * (log_a - log_b - (double)skl_row_value(kl, s, head, i));
}

#endif
