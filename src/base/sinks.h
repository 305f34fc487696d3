/* Sinks: one more outcome of both distributions, whose logit is known. All of it happens in rows, so kernels know
 * nothing of sinks: from the KL and the LSEs of the keys follow those of keys and sink,
 *
 *     lse = log(e^lse_keys + e^sink)       P_sink = e^(sink - lse)       P_keys = e^(lse_keys - lse) = 1 - P_sink
 *     KL  = P_sink (log P_sink - log S_sink) + P_keys (log P_keys - log S_keys + KL_keys)
 *
 * and a backward recomputes P and S of the keys from the LSEs that include the sink. With a teacher group, P_sink is
 * the mean over its heads. */
#ifndef SKL_BASE_SINKS_H
#define SKL_BASE_SINKS_H

#include "base/kl_math.h"
#include "base/side.h"

/* Logarithms of the probability of all keys together, and of the sink. */
typedef struct skl_shares {
    double keys, sink;
} skl_shares;

SKL_HOST_DEVICE double skl_lse_with_sink(double lse, double sink)
{
    const double largest = fmax(lse, sink);
    return largest == -INFINITY ? largest : largest + log(exp(lse - largest) + exp(sink - largest));
}

/* From a probability of the sink. Rounding of an LSE can make it larger than 1. */
SKL_HOST_DEVICE skl_shares skl_shares_of_sink(double log_sink)
{
    const skl_shares shares = {log_sink < 0.0    ? log1p(-exp(log_sink))
                               : log_sink >= 0.0 ? -INFINITY
                                                 : log_sink,
                               log_sink};
    return shares;
}

/* Shares of student head h in row i, from an LSE that includes the sink or not. */
SKL_HOST_DEVICE skl_shares skl_shares_of_head(double lse, double sink, int covers_sink)
{
    if (covers_sink)
        return skl_shares_of_sink(sink - lse);
    const double full = skl_lse_with_sink(lse, sink);
    const skl_shares shares = {lse - full, sink - full};
    return shares;
}

/* p (log ratio), but 0 if p is 0: 0 log 0 = 0. */
SKL_HOST_DEVICE double skl_share_times(double log_p, double value)
{
    return log_p == -INFINITY ? 0.0 : exp(log_p) * value;
}

/* One pass: keys of B without mass (SKL_NO_MASS) have an LSE of -inf, and kl_keys already contains -b.keys. */
SKL_HOST_DEVICE double skl_kl_with_sinks(skl_shares a, skl_shares b, double kl_keys)
{
    const double log_b_keys = b.keys == -INFINITY ? 0.0 : b.keys;
    return skl_share_times(a.sink, a.sink - b.sink) + skl_share_times(a.keys, a.keys - log_b_keys + kl_keys);
}

/* Shares of the teacher of student head h, from LSEs of its group. */
SKL_HOST_DEVICE skl_shares skl_teacher_shares(const skl_problem *p, const skl_input *lse_t, const float *sink_t,
                                              int covers_sink, const skl_sequence *s, int64_t head, int64_t i)
{
    const int64_t group = skl_group_size(p);
    if (group == 1)
        return skl_shares_of_head((double)skl_row_value(lse_t, s, head, i), (double)sink_t[head], covers_sink);
    double sum = 0.0;
    for (int64_t h = head * group; h < (head + 1) * group; h++) {
        const double lse = (double)skl_row_value(lse_t, s, h, i);
        sum += exp((double)sink_t[h] - (covers_sink ? lse : skl_lse_with_sink(lse, (double)sink_t[h])));
    }
    return skl_shares_of_sink(log(sum / (double)group));
}

/* One row of skl_sink_rows. */
SKL_HOST_DEVICE void skl_sink_row(const skl_problem *p, const skl_sink_rows *work, const skl_sequence *s,
                                  int64_t head, int64_t i)
{
    const int64_t group = skl_group_size(p);
    const skl_range sees = skl_visible(p, s, i);
    const float lse_s = work->lse_s.data != NULL ? skl_row_value(&work->lse_s, s, head, i) : 0.0F;
    const int empty = sees.begin >= sees.end;
    if (work->kl.data != NULL && !empty) {
        const skl_shares t = skl_teacher_shares(p, &work->lse_t, work->inputs.sink_t, work->covers_t, s, head, i);
        const skl_shares of_s = skl_shares_of_head((double)lse_s, (double)work->inputs.sink_s[head], work->covers_s);
        const skl_input of_keys = {work->kl.data, work->kl.stride_batch, work->kl.stride_head, work->kl.stride_row};
        const double kl_keys = (double)skl_row_value(&of_keys, s, head, i);
        const int reverse = p->direction == SKL_KL_REVERSE;
        skl_row_set(&work->kl, s, head, i,
                    skl_kl_report((float)skl_kl_with_sinks(reverse ? of_s : t, reverse ? t : of_s, kl_keys)));
    }
    if (work->out_s.data != NULL)
        skl_row_set(&work->out_s, s, head, i,
                    empty || lse_s == -INFINITY ? -INFINITY
                    : work->covers_s            ? lse_s
                                     : (float)skl_lse_with_sink((double)lse_s, (double)work->inputs.sink_s[head]));
    for (int64_t h = head * group; work->out_t.data != NULL && h < (head + 1) * group; h++) {
        const float lse = empty ? -INFINITY : skl_row_value(&work->lse_t, s, h, i);
        skl_row_set(&work->out_t, s, h, i,
                    lse == -INFINITY || work->covers_t
                        ? lse
                        : (float)skl_lse_with_sink((double)lse, (double)work->inputs.sink_t[h]));
    }
}

/* LSEs of a row after the last packed sequence. */
SKL_HOST_DEVICE void skl_sink_tail(const skl_problem *p, const skl_sink_rows *work, const skl_sequence *tail,
                                   int64_t head, int64_t i)
{
    const int64_t group = skl_group_size(p);
    skl_row_set(&work->out_s, tail, head, i, -INFINITY);
    for (int64_t h = head * group; h < (head + 1) * group; h++)
        skl_row_set(&work->out_t, tail, h, i, -INFINITY);
}

/* The contribution of a row to dsink_t or dsink_s of a student head, without the upstream gradient. The LSEs of
 * `inputs` include the sinks. */
SKL_HOST_DEVICE double skl_sink_gradient(const skl_problem *p, const skl_inputs *inputs, const skl_input *kl,
                                         const skl_sequence *s, int64_t head, int64_t i, int of_teacher)
{
    const double log_p = skl_teacher_shares(p, &inputs->lse_t, inputs->sink_t, 1, s, head, i).sink;
    const double log_s = (double)inputs->sink_s[head] - (double)skl_row_value(&inputs->lse_s, s, head, i);
    const int reverse = p->direction == SKL_KL_REVERSE;
    const double log_a = reverse ? log_s : log_p, log_b = reverse ? log_p : log_s;
    if (reverse == of_teacher) /* of B */
        return exp(log_b) - exp(log_a);
    return skl_share_times(log_a, log_a - log_b - (double)skl_row_value(kl, s, head, i));
}

#endif
