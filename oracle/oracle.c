/* KL(P || S) or KL(S || P) of every row, and the gradients, from whole rows of logits.
 *
 * Every number has a `_rounding`: how much it changes, in units of a relative rounding error, if each number it is
 * computed from is rounded once, all in the worst direction. docs/design/maths.md derives them. */
#ifndef REAL
#define REAL                 double
#define ORACLE_RUN           oracle_run
#define ORACLE_RUN_ATTENTION oracle_run_attention
#endif
#include "memory.h"

/* The current row: student head h_s, query row_q, and the keys that it sees, as rows of the key buffers. With a
 * pooled teacher `keys` are blocks, and the teacher has its own keys. */
struct row {
    int64_t batch, h_s, row_q, key_count;
    const int64_t *keys;
    int64_t seen_count; /* keys of the teacher, run->seen */
    int64_t at_s, at_t; /* its index in row vectors; teacher head h of the group has at_t + h * length_q */
};

/* Offsets of the query of a row and of the first key of the buffer, in the tensors of a model. */
struct offsets {
    int64_t q, k;
    int64_t head;
};

/* The key that stands for a sink: one more outcome, whose logit is a number per head. */
enum { SINK = -1 };

static struct offsets find_offsets(const struct run *run, const struct row *row, const struct model *model,
                                   int64_t head)
{
    const int64_t key_head = head / (model->heads / model->key_heads);
    const int64_t line_q = (row->batch * model->heads + head) * run->length_q + row->row_q;
    const int64_t line_k = (row->batch * model->key_heads + key_head) * model->length_k;
    return (struct offsets){line_q * model->dim, line_k * model->dim, head};
}

/* Derivative of a logit with respect to the scaled product: of the softcap, or of the logarithm. */
static real slope_of(const struct model *model, real logit)
{
    if (model->linear)
        return exp(-logit);
    const real capped = model->softcap > 0 ? logit / model->softcap : 0;
    return 1 - capped * capped;
}

/* logits[j] = softcap(scale * <q, k[j]>), or the logarithm. Roundings: every product, the logit. */
static void compute_logits(const struct model *model, struct offsets at, const int64_t *keys, int64_t count,
                           real *logits, real *roundings)
{
    const real *const q = model->q + at.q;
    for (int64_t j = 0; j < count; j++) {
        if (keys[j] == SINK) {
            logits[j] = model->sink[at.head];
            roundings[j] = fabs(logits[j]);
            continue;
        }
        const struct dot dot = dot_of(q, model->k + at.k + keys[j] * model->dim, model->dim, model->orders);
        logits[j] = model->scale * dot.sum;
        if (model->softcap > 0)
            logits[j] = model->softcap * tanh(logits[j] / model->softcap);
        if (model->linear)
            logits[j] = log(logits[j]);
        roundings[j] = fabs(model->scale) * dot.products * slope_of(model, logits[j]) + fabs(logits[j]);
    }
}

/* to += factor * x. `restrict` lets the compiler use vector instructions: half of the oracle's time is spent here. */
static void add_multiple(real *restrict to, const real *restrict x, real factor, int64_t dim)
{
    for (int64_t d = 0; d < dim; d++)
        to[d] += factor * x[d];
}

/* to += factor * |x| */
static void add_magnitudes(real *restrict to, const real *restrict x, real factor, int64_t dim)
{
    for (int64_t d = 0; d < dim; d++)
        to[d] += factor * fabs(x[d]);
}

/* Notes the size of the gradient of a scaled product that is multiplied with a weight. */
static void note_size(const struct model *model, real size, real weight)
{
    if (!isfinite(size))
        return;
    model->largest[0] = fmax(model->largest[0], size);
    model->largest[1] = fmax(model->largest[1], size * fabs(weight));
}

/* dq += scale * gradient[j] * k[j];  dk[j] += scale * gradient[j] * q;  both times the slope of the logit. The
 * slope is rounded and changes with the logit; a slope of 0 still counts as one rounding. `parts`: sizes of the
 * parts that a gradient is the sum of; NULL: it has no parts. */
static void add_gradients(const struct run *run, const struct model *model, struct offsets at, const struct row *row,
                          const real *logits, const real *logit_roundings, const real *parts)
{
    const real *const q = model->q + at.q;
    real *const dq = model->dq + at.q, *const dq_rounding = model->dq_rounding + at.q;
    real *const dq_terms = model->dq_terms + at.q;
    for (int64_t j = 0; j < row->key_count; j++) {
        if (row->keys[j] == SINK) {
            model->dsink[at.head] += run->gradient[j];
            model->dsink_rounding[at.head] += run->gradient_rounding[j] + fabs(run->gradient[j]);
            continue;
        }
        const int64_t at_k = at.k + row->keys[j] * model->dim;
        const real *const k = model->k + at_k;
        real *const dk = model->dk + at_k;
        real *const dk_rounding = model->dk_rounding + at_k;
        real *const dk_terms = model->dk_terms + at_k;
        const real slope = slope_of(model, logits[j]);
        const real capped = model->softcap > 0 ? fabs(logits[j]) / model->softcap : 0;
        const real slope_rounding = model->linear        ? slope * (1 + logit_roundings[j])
                                    : model->softcap > 0 ? 1 + 2 * capped * logit_roundings[j] / model->softcap
                                                         : 0;
        const real dot_gradient = model->scale * run->gradient[j] * slope;
        const real size = parts ? fabs(model->scale) * parts[j] * slope : fabs(dot_gradient);
        const real of_gradient = run->gradient_rounding[j] * (slope + (real)ORACLE_ROUNDING * slope_rounding);
        const real of_slope = fabs(run->gradient[j]) * slope_rounding;
        const real rounding = fabs(model->scale) * (of_gradient + of_slope);
        add_multiple(dq, k, dot_gradient, model->dim);
        add_multiple(dk, q, dot_gradient, model->dim);
        add_magnitudes(dq_rounding, k, rounding + run->key_sum * size, model->dim);
        add_magnitudes(dk_rounding, q, rounding + run->query_sum * size, model->dim);
        add_magnitudes(dq_terms, k, size, model->dim);
        add_magnitudes(dk_terms, q, size, model->dim);
        if (model->smallest > 0) {
            add_magnitudes(model->dq_factors + at.q, k, fabs(model->scale), model->dim);
            add_magnitudes(model->dk_factors + at_k, q, fabs(model->scale), model->dim);
        }
        note_size(model, slope * (parts ? parts[j] : fabs(run->gradient[j])), 1);
    }
}

#include "indexer.h"
#include "log_sum.h"
#include "attention.h"

/* The teacher is a mean of heads. An indexer always has a teacher group, possibly of one head. */
static int has_teacher_groups(const struct run *run)
{
    return run->group_size > 1 || is_indexer(run);
}

static int uses_given_lse(const struct run *run)
{
    return has_teacher_groups(run) && run->given_lse_t;
}

/* LSEs that are not those of the outcomes: the teacher's target is divided by its sum. */
static int is_renormalized(const struct run *run)
{
    return uses_given_lse(run) || is_pooled(run);
}

#include "pool.h"

/* log S from lse_s; log P of each teacher head from lse_t; log P of their mean. An LSE is rounded like a logit. An
 * exponential that is wrong by more than one rounding is that of an exponent with a larger error. The rounding of the
 * mean is that of the heads, weighted by their share of the mean. */
static void distributions(const struct run *run, const struct row *row)
{
    const int64_t group_size = run->group_size, count = row->key_count, seen_count = row->seen_count;
    real *const log_p = is_pooled(run) ? run->log_p_key : run->log_p;
    real *const log_p_rounding = is_pooled(run) ? run->log_p_key_rounding : run->log_p_rounding;
    const real exponential = (real)(oracle_exponential_roundings() - 1);
    const struct log_sum lse_s = run->lses[group_size];
    for (int64_t j = 0; j < count; j++) {
        run->log_s[j] = minus_lse(run->y[j], lse_s);
        run->log_s_rounding[j] = run->y_rounding[j] + lse_rounding(lse_s, 0) + exponential;
    }
    for (int64_t h = 0; h < group_size; h++) {
        const int64_t line = h * run->row_length;
        for (int64_t j = line; j < line + seen_count; j++) {
            run->log_p_head[j] = minus_lse(run->x[j], run->lses[h]);
            run->log_p_head_rounding[j] =
                run->x_rounding[j] + lse_rounding(run->lses[h], is_renormalized(run)) + exponential;
        }
    }
    for (int64_t j = 0; j < seen_count; j++) {
        if (run->problem->pool_heads == SKL_POOL_HEADS_MAX) {
            log_p[j] = largest_of(run->log_p_head + j, run->log_p_head_rounding + j, group_size, run->row_length,
                                  log_p_rounding + j);
            continue;
        }
        mark_undetermined(run->log_p_head + j, run->log_p_head_rounding + j, group_size, run->row_length);
        struct log_sum mean = log_sum_exp(run->log_p_head + j, group_size, run->row_length);
        mean.rest -= log((real)group_size);
        mean = as_stored(mean);
        log_p[j] = value_of(mean);
        log_p_rounding[j] = 0;
        for (int64_t h = 0; h < group_size; h++) {
            const int64_t at = h * run->row_length + j;
            run->log_ratio[at] = minus_lse(run->log_p_head[at], mean);
            log_p_rounding[j] += exp(run->log_ratio[at]) / (real)group_size * run->log_p_head_rounding[at];
        }
    }
    if (is_pooled(run))
        pool_keys(run, row);
}

/* Roundings of a log-sum-exp: the exponents, weighted by their terms; the exponentials; the sum. */
static real log_sum_rounding(const struct run *run, const real *log_terms, const real *roundings, int64_t count)
{
    real rounding = 1 + run->key_sum;
    for (int64_t j = 0; j < count; j++)
        rounding += exp(log_terms[j]) * roundings[j];
    return rounding;
}

/* The same for head h of the teacher, whose terms add up to 1 / z if it is pooled. */
static real head_sum_rounding(const struct run *run, const struct row *row, int64_t h, const real *roundings,
                              real log_z)
{
    real rounding = 1 + run->key_sum;
    for (int64_t j = h * run->row_length; j < h * run->row_length + row->seen_count; j++)
        rounding += exp(run->log_p_head[j] + (is_pooled(run) ? log_z : 0)) * roundings[j];
    return rounding;
}

/* Of log z, an LSE of the mean of the heads that is stored. A coarse one does not determine z: its exponential. */
static real log_z_rounding(const struct run *run, const struct row *row, real log_z)
{
    const real rounding = log_sum_rounding(run, run->log_p, run->log_p_rounding, row->key_count) + fabs(log_z);
    return rounding >= COARSE ? (real)INFINITY : rounding;
}

/* LSEs and the distributions that follow from them. A given LSE may cover more keys than the visible ones: then the
 * mean of the teacher heads is divided by z, its sum over the visible keys. Returns log z. */
static real normalize(const struct run *run, const struct row *row)
{
    const int use_given = uses_given_lse(run);
    const int64_t seen_count = row->seen_count;
    real log_z = 0;
    run->lses[run->group_size] = log_sum_exp(run->y, row->key_count, 1);
    for (int64_t h = 0; h < run->group_size; h++)
        run->lses[h] = use_given ? (struct log_sum){run->given_lse_t[row->at_t + h * run->length_q], 0}
                                 : log_sum_exp(run->x + h * run->row_length, seen_count, 1);
    distributions(run, row);
    if (is_renormalized(run)) {
        log_z = value_of(log_sum_exp(run->log_p, row->key_count, 1));
        for (int64_t h = 0; h < run->group_size; h++)
            run->lses[h] = as_stored((struct log_sum){run->lses[h].largest, run->lses[h].rest + log_z});
        distributions(run, row);
        /* With sinks log z is the rounding of the given LSEs, and a kernel need not divide by z. */
        for (int64_t j = 0; run->problem->sinks && j < row->key_count; j++)
            run->log_p_rounding[j] += fabs(log_z) / (real)ORACLE_ROUNDING;
    }

    run->lse_s[row->at_s] = value_of(run->lses[run->group_size]);
    for (int64_t h = 0; h < run->group_size; h++)
        run->lse_t[row->at_t + h * run->length_q] = value_of(run->lses[h]);
    run->lse_s_rounding[row->at_s] = log_sum_rounding(run, run->log_s, run->log_s_rounding, row->key_count);
    const real of_mean =
        has_teacher_groups(run) ? log_sum_rounding(run, run->log_p, run->log_p_rounding, row->key_count) : 0;
    for (int64_t h = 0; h < run->group_size; h++)
        run->lse_t_rounding[row->at_t + h * run->length_q] =
            of_mean + head_sum_rounding(run, row, h, run->log_p_head_rounding, log_z);
    return log_z;
}

/* If this is not 0, a backward takes each of several equal logits for all of the mass. A one-pass KL is still right:
 * its logarithms are off by this much, and the KL is the difference of two sums. */
static real lost_parts(const struct run *run)
{
    real lost = 0;
    for (int64_t n = 0; n <= run->group_size; n++)
        lost += lost_part(run->lses[n]);
    return lost;
}

/* The two distributions of KL(A || B). */
struct arguments {
    const real *log_a, *log_b, *a_rounding, *b_rounding;
};

static struct arguments arguments_of(const struct run *run)
{
    if (run->problem->direction == SKL_KL_FORWARD)
        return (struct arguments){run->log_p, run->log_s, run->log_p_rounding, run->log_s_rounding};
    return (struct arguments){run->log_s, run->log_p, run->log_s_rounding, run->log_p_rounding};
}

/* sum_j A_j (log A_j - log B_j) */
static real divergence(const struct arguments *args, int64_t count)
{
    real kl = 0;
    for (int64_t j = 0; j < count; j++)
        kl += exp(args->log_a[j]) * (args->log_a[j] - args->log_b[j]);
    return kl;
}

/* Roundings of the logits change the KL through its gradients. Its terms are rounded too, and it contains the
 * logarithm of a ratio of two sums of exponentials: two exponentials, two sums, one ratio. */
static real divergence_rounding(const struct run *run, const struct arguments *args, real kl, int64_t count)
{
    real rounding = 2 * (real)oracle_exponential_roundings() + 2 * run->key_sum + 1;
    for (int64_t j = 0; j < count; j++) {
        const real a = exp(args->log_a[j]), b = exp(args->log_b[j]);
        const real log_ratio = args->log_a[j] - args->log_b[j];
        rounding += run->key_sum * a * fabs(log_ratio) + a * fabs(log_ratio - kl) * args->a_rounding[j] +
                    fabs(b - a) * args->b_rounding[j];
    }
    return rounding;
}

/* P_hj phi_j with phi = dKL / dP: log P_j - log S_j or -S_j / P_j. One exponential avoids 0 * inf. */
static real weighted_phi(const struct run *run, int64_t h, int64_t j)
{
    const real log_p_head = run->log_p_head[h * run->row_length + j];
    if (run->problem->direction == SKL_KL_FORWARD)
        return exp(log_p_head) * (run->log_p[j] - run->log_s[j]);
    return -exp(run->log_ratio[h * run->row_length + j] + run->log_s[j]);
}

static real weighted_phi_rounding(const struct run *run, int64_t h, int64_t j)
{
    const real head = run->log_p_head_rounding[h * run->row_length + j];
    const real both = run->log_p_rounding[j] + run->log_s_rounding[j];
    if (run->problem->direction == SKL_KL_REVERSE)
        return fabs(weighted_phi(run, h, j)) * (1 + head + both) + UNDERFLOW;
    return fabs(weighted_phi(run, h, j)) * (1 + head) + exp(run->log_p_head[h * run->row_length + j]) * both +
           UNDERFLOW * fabs(run->log_p[j] - run->log_s[j]);
}

/* P_hj (phi_j - origin) */
static real weighted_excess(const struct run *run, int64_t h, int64_t j, real origin)
{
    return weighted_phi(run, h, j) - exp(run->log_p_head[h * run->row_length + j]) * origin;
}

static real weighted_excess_rounding(const struct run *run, int64_t h, int64_t j, real origin, real origin_rounding)
{
    const int64_t at = h * run->row_length + j;
    return weighted_phi_rounding(run, h, j) + UNDERFLOW * fabs(origin) +
           exp(run->log_p_head[at]) * (fabs(origin) * (1 + run->log_p_head_rounding[at]) + origin_rounding);
}

/* g A (log A - log B - KL) */
static void gradient_of_a(const struct run *run, const struct row *row, real g)
{
    const struct arguments args = arguments_of(run);
    for (int64_t j = 0; j < row->key_count; j++) {
        const real a = exp(args.log_a[j]);
        const real excess = args.log_a[j] - args.log_b[j] - run->kl[row->at_s];
        run->gradient[j] = g * a * excess;
        run->gradient_rounding[j] = fabs(g) * (a * (fabs(excess) * (1 + args.a_rounding[j]) + args.a_rounding[j] +
                                                    args.b_rounding[j] + run->kl_rounding[row->at_s]) +
                                               UNDERFLOW * fabs(excess));
    }
}

/* g (B - A) */
static void gradient_of_b(const struct run *run, const struct row *row, real g)
{
    const struct arguments args = arguments_of(run);
    for (int64_t j = 0; j < row->key_count; j++) {
        const real a = exp(args.log_a[j]), b = exp(args.log_b[j]);
        run->gradient[j] = g * (b - a);
        run->gradient_rounding[j] =
            fabs(g) * (b * (1 + args.b_rounding[j]) + a * (1 + args.a_rounding[j]) + 2 * UNDERFLOW);
    }
}

/* One head of a teacher group: g / group_size P_h (phi - dot_h) */
static void head_gradient(const struct run *run, const struct row *row, int64_t h, real g)
{
    const int64_t at = row->at_t + h * run->length_q;
    const real of_mean = g / (real)run->group_size;
    for (int64_t j = 0; j < row->key_count; j++) {
        run->gradient[j] = of_mean * weighted_excess(run, h, j, run->dot_t[at]);
        run->gradient_rounding[j] =
            fabs(of_mean) * weighted_excess_rounding(run, h, j, run->dot_t[at], run->dot_t_rounding[at]);
    }
}

static void mark_lost_gradients(const struct run *run, const struct row *row)
{
    if (lost_parts(run) == 0)
        return;
    for (int64_t j = 0; j < row->key_count; j++)
        run->gradient_rounding[j] = INFINITY;
}

static void teacher_gradients(const struct run *run, const struct row *row, int64_t h, real g)
{
    if (run->group_size > 1)
        head_gradient(run, row, h, g);
    else if (run->problem->direction == SKL_KL_FORWARD)
        gradient_of_a(run, row, g);
    else
        gradient_of_b(run, row, g);
    mark_lost_gradients(run, row);
    const struct offsets at = find_offsets(run, row, &run->teacher, row->h_s * run->group_size + h);
    const int64_t line = h * run->row_length;
    add_gradients(run, &run->teacher, at, row, run->x + line, run->x_rounding + line, NULL);
}

static void student_gradients(const struct run *run, const struct row *row, real g)
{
    if (run->problem->direction == SKL_KL_FORWARD)
        gradient_of_b(run, row, g);
    else
        gradient_of_a(run, row, g);
    mark_lost_gradients(run, row);
    if (is_indexer(run)) {
        add_index_gradients(run, row);
        return;
    }
    const struct offsets at = find_offsets(run, row, &run->student, row->h_s);
    if (run->v)
        add_attention_gradients(run, row, run->parts);
    add_gradients(run, &run->student, at, row, run->y, run->y_rounding, run->v ? run->parts : NULL);
}

/* Turns the P_hj phi_j of a head into its dot. */
struct share {
    real mean, mean_rounding; /* of phi under P */
    real z, log_z_rounding;   /* probability of the visible keys under the given LSEs */
};

/* dot_h = mean + z sum_j P_hj (phi_j - mean). With computed LSEs, z = 1 and sum_j P_hj = 1, so any mean gives the
 * same dot, and 0 needs the fewest roundings. The rounding is that of the formula: a one-pass call reads these LSEs
 * back, and cannot know that they cover the visible keys only. */
static void head_dot(const struct run *run, const struct row *row, int64_t h, struct share share)
{
    real plain = 0, sum = 0, rounding = lost_parts(run) > 0 ? (real)INFINITY : 0;
    for (int64_t j = 0; j < row->key_count; j++) {
        plain += weighted_phi(run, h, j);
        sum += weighted_excess(run, h, j, share.mean);
        rounding += weighted_excess_rounding(run, h, j, share.mean, share.mean_rounding);
    }
    run->dot_t[row->at_t + h * run->length_q] = uses_given_lse(run) ? share.mean + share.z * sum : plain;
    run->dot_t_rounding[row->at_t + h * run->length_q] =
        share.mean_rounding + share.z * (rounding + fabs(sum) * share.log_z_rounding);
}

/* The mean of phi is the KL, or -sum_j S_j = -1; log z is an LSE of the mean of the heads. */
static struct share share_of(const struct run *run, const struct row *row, real kl, real log_z)
{
    const int forward = run->problem->direction == SKL_KL_FORWARD;
    return (struct share){
        .mean = forward ? kl : -1,
        .mean_rounding = forward ? run->kl_rounding[row->at_s] : 0,
        .z = exp(log_z),
        .log_z_rounding = log_z_rounding(run, row, log_z),
    };
}

/* Entropy of A, cross-entropy of A and B, and the mass of the visible keys under a given LSE. The entropy is the
 * logarithm of a sum of exponentials minus their mean exponent: one exponential, two sums, one ratio. */
static void row_entropies(const struct run *run, const struct row *row, const struct arguments *args, real kl,
                          real log_z)
{
    real entropy = 0;
    for (int64_t j = 0; j < row->key_count; j++)
        entropy -= exp(args->log_a[j]) * args->log_a[j];
    real rounding = (real)oracle_exponential_roundings() + 2 * run->key_sum + 1 + fabs(entropy);
    for (int64_t j = 0; j < row->key_count; j++) {
        const real a = exp(args->log_a[j]);
        rounding += a * (run->key_sum * fabs(args->log_a[j]) + fabs(args->log_a[j] + entropy) * args->a_rounding[j]);
    }
    run->entropy[row->at_s] = entropy;
    run->entropy_rounding[row->at_s] = rounding;
    run->cross_entropy[row->at_s] = kl + entropy;
    run->cross_entropy_rounding[row->at_s] = run->kl_rounding[row->at_s] + rounding + fabs(kl + entropy);
    run->mass[row->at_s] = exp(log_z);
    run->mass_rounding[row->at_s] = exp(log_z) * (1 + log_z_rounding(run, row, log_z));
}

/* LSEs, KL and dots of one row. */
static void forward_row(const struct run *run, const struct row *row)
{
    const int64_t group_size = run->group_size, count = row->key_count;
    if (is_indexer(run))
        compute_index_logits(run, row);
    else
        compute_logits(&run->student, find_offsets(run, row, &run->student, row->h_s), row->keys, count, run->y,
                       run->y_rounding);
    for (int64_t h = 0; h < group_size; h++) {
        const struct offsets at = find_offsets(run, row, &run->teacher, row->h_s * group_size + h);
        compute_logits(&run->teacher, at, run->seen, row->seen_count, run->x + h * run->row_length,
                       run->x_rounding + h * run->row_length);
    }
    mark_undetermined(run->y, run->y_rounding, count, 1);
    for (int64_t h = 0; h < group_size; h++)
        mark_undetermined(run->x + h * run->row_length, run->x_rounding + h * run->row_length, row->seen_count, 1);
    const real log_z = normalize(run, row);

    const struct arguments arguments = arguments_of(run);
    const real kl = divergence(&arguments, count);
    run->kl[row->at_s] = kl < 0 ? 0 : kl;               /* keeps NaN */
    const real of_sums = (real)count * lost_parts(run); /* in any order: one rounding per term */
    run->kl_rounding[row->at_s] = divergence_rounding(run, &arguments, kl, count) + of_sums;
    row_entropies(run, row, &arguments, kl, log_z);
    const struct share share = share_of(run, row, kl, log_z);
    for (int64_t h = 0; h < group_size && !is_pooled(run); h++)
        head_dot(run, row, h, share);
}

/* Adds the roundings of the sums that probabilities are divided by. They move all probabilities of a row by one
 * factor, which cancels in a KL, but not in its gradients. */
static void add_lse_roundings(const struct run *run, const struct row *row)
{
    const int64_t count = row->key_count;
    const real of_s = log_sum_rounding(run, run->log_s, run->y_rounding, count);
    const real of_z = log_sum_rounding(run, run->log_p, run->log_p_rounding, count);
    real of_heads = 0; /* the largest: a pooled teacher has a mean or a maximum of its heads */
    for (int64_t j = 0; j < count; j++)
        run->log_s_rounding[j] += of_s;
    for (int64_t h = 0; h < run->group_size; h++) {
        const int64_t line = h * run->row_length;
        const real of_head = head_sum_rounding(run, row, h, run->x_rounding, log(run->mass[row->at_s]));
        const real of_t = uses_given_lse(run) ? of_z : of_head;
        of_heads = of_head > of_heads ? of_head : of_heads;
        for (int64_t j = 0; j < count && !is_pooled(run); j++) {
            run->log_p_head_rounding[line + j] += of_t;
            run->log_p_rounding[j] += exp(run->log_ratio[line + j]) / (real)run->group_size * of_t;
        }
    }
    for (int64_t j = 0; j < count && is_pooled(run); j++)
        run->log_p_rounding[j] += of_z + (uses_given_lse(run) ? 0 : of_heads);
}

/* Gradients from the logits, distributions and row vectors of forward_row. */
static void backward_row(const struct run *run, const struct row *row)
{
    const real g = run->grad_kl ? run->grad_kl[row->at_s] : 1;
    add_lse_roundings(run, row);
    note_size(&run->teacher, fabs(g), 1);
    note_size(&run->student, fabs(g), is_indexer(run) ? largest_weight(run, row) : 1);
    if (run->problem->gradients & (SKL_DQ_S | SKL_DK_S | SKL_DW_S | SKL_DSINK_S | SKL_DV_S))
        student_gradients(run, row, g);
    if (run->problem->gradients & (SKL_DQ_T | SKL_DK_T | SKL_DSINK_T))
        for (int64_t h = 0; h < run->group_size; h++)
            teacher_gradients(run, row, h, g);
}

static void compute_sequence(const struct run *run, const skl_inputs *inputs, int64_t b)
{
    const oracle_sequence sequence = oracle_sequence_at(run->problem, inputs, b);
    for (int64_t i = 0; i < sequence.len_q; i++)
        for (int64_t h_s = 0; h_s < run->student.heads; h_s++) {
            struct row row = {sequence.batch, h_s, sequence.first_q + i, 0, run->keys, 0, 0, 0};
            row.key_count = oracle_row_keys(run->problem, inputs, b, h_s, i, run->keys);
            if (row.key_count == 0)
                continue; /* keeps the initial values */
            for (int64_t j = 0; j < row.key_count; j++)
                run->keys[j] += sequence.first_k;
            if (run->problem->sinks)
                run->keys[row.key_count++] = SINK;
            row.seen_count =
                oracle_row_seen(run->problem, inputs, b, i, run->keys, row.key_count, run->seen, run->outcomes);
            row.at_s = (row.batch * run->student.heads + h_s) * run->length_q + row.row_q;
            row.at_t = (row.batch * run->teacher.heads + h_s * run->group_size) * run->length_q + row.row_q;
            forward_row(run, &row);
            if (run->v)
                attention_output(run, &row);
            if (run->problem->gradients)
                backward_row(run, &row);
        }
}

oracle_result ORACLE_RUN(const skl_problem *problem, const skl_inputs *inputs)
{
    return ORACLE_RUN_ATTENTION(problem, inputs, NULL);
}

oracle_result ORACLE_RUN_ATTENTION(const skl_problem *problem, const skl_inputs *inputs,
                                   const skl_attention *attention)
{
    const struct run run = prepare(problem, inputs, attention);
    for (int64_t b = 0; b < problem->batch; b++)
        compute_sequence(&run, inputs, b);
    return take_results(&run);
}
