/* Statistics of the student's attention from its whole matrix.
 *
 * Every number has a rounding, as in oracle.c: how much it changes, in units of a relative rounding error, if each
 * number it is computed from is rounded once, all in the worst direction. */
#ifndef REAL
#define REAL         double
#define ORACLE_STATS oracle_stats_run
#endif
#include "oracle_stats.h"

#include <stdlib.h>
#include <tgmath.h> /* exp, log, sqrt and tanh for both types of `real` */

typedef REAL real;

#include "dot.h"

/* Logits or LSEs from here on do not determine probabilities: e^x is known to a factor of e^(1/16) at best. In base 2
 * this is 2^(1/16). */
#define COARSE ((real)((oracle_base_2_roundings() > 0 ? 0.69314718 : 1) * 0x1p-4 / ORACLE_ROUNDING))

/* The rounding of an exponential below the normal numbers of f32: it may be 0. */
#define UNDERFLOW ((real)(0x1p-126 / ORACLE_ROUNDING))

/* One head of one sequence. */
struct head {
    const skl_problem *problem;
    const skl_inputs *inputs;
    const skl_stats *stats;
    oracle_stats *out;
    oracle_sequence sequence;
    int64_t b, h;
    int64_t key_sum, query_sum; /* roundings of a sum over keys, and over rows */
    int64_t orders;             /* in which a product of rows is added up: the worst of them */
    real *q, *k;                /* [len_q, dim] and [len_k, dim] */
};

static oracle_array array_of(int64_t count, double value)
{
    const oracle_array array = {malloc(((size_t)count + 1) * sizeof(double)),
                                malloc(((size_t)count + 1) * sizeof(double)), count};
    if (!array.value || !array.rounding)
        abort();
    for (int64_t n = 0; n < count; n++)
        array.value[n] = value, array.rounding[n] = 0;
    return array;
}

static void put(const oracle_array *array, int64_t n, real value, real rounding)
{
    array->value[n] = (double)value;
    array->rounding[n] = (double)rounding;
}

static void add(const oracle_array *array, int64_t n, real value, real rounding)
{
    put(array, n, (real)array->value[n] + value, (real)array->rounding[n] + rounding);
}

static void raise(const oracle_array *array, int64_t n, real value, real rounding)
{
    put(array, n, fmax((real)array->value[n], value), fmax((real)array->rounding[n], rounding));
}

static real read_row(const struct head *head, const skl_input *rows, int64_t i)
{
    const int64_t at = head->sequence.batch * rows->stride_batch + head->h * rows->stride_head +
                       (head->sequence.first_q + i) * rows->stride_row;
    return (real)((const float *)rows->data)[at];
}

/* `count` rows of a head from the `first` on. */
static real *read_head(const struct head *head, const skl_input *from, int64_t h, int64_t first, int64_t count)
{
    const skl_problem *const p = head->problem;
    const int64_t begin = head->sequence.batch * from->stride_batch + h * from->stride_head;
    real *const rows = malloc(((size_t)(count * p->dim_s) + 1) * sizeof(real));
    if (!rows)
        abort();
    for (int64_t n = 0; n < count * p->dim_s; n++)
        rows[n] = (real)oracle_read(p->dtype_s, from->data,
                                    begin + (first + n / p->dim_s) * from->stride_row + n % p->dim_s);
    return rows;
}

/* x_ij = softcap(scale * <q, k>). Roundings: every product, the logit; in base 2 the scale. */
static void find_logit(const struct head *head, int64_t i, int64_t j, real *x, real *rounding)
{
    const skl_problem *const p = head->problem;
    const real *const q = head->q + i * p->dim_s, *const k = head->k + j * p->dim_s;
    const real scale = p->scale_s != 0 ? (real)p->scale_s : 1 / sqrt((real)p->dim_s), cap = (real)p->softcap_s;
    const struct dot dot = dot_of(q, k, p->dim_s, head->orders);
    *x = cap > 0 ? cap * tanh(scale * dot.sum / cap) : scale * dot.sum;
    const real slope = cap > 0 ? 1 - *x / cap * (*x / cap) : 1;
    *rounding = fabs(scale) * dot.products * slope + (1 + (real)oracle_base_2_roundings()) * fabs(*x);
}

/* A row of the matrix: its visible keys, their logits and probabilities. */
struct row {
    int64_t i;        /* in its sequence */
    int64_t at;       /* in row vectors */
    oracle_keys keys; /* visible */
    real *x, *x_rounding, *p, *p_rounding;
    real lse, lse_rounding;
    int coarse; /* the probabilities are not determined */
};

static real sink_of(const struct head *head)
{
    return head->problem->sinks ? (real)head->inputs->sink_s[head->h] : -(real)INFINITY;
}

/* The LSE of the keys and the sink, and its rounding: the exponents, weighted by their terms; the sum. */
static void find_lse(const struct head *head, struct row *row)
{
    if (head->inputs->lse_s.data) {
        row->lse = read_row(head, &head->inputs->lse_s, row->i);
        row->lse_rounding = fabs(row->lse);
        return;
    }
    real largest = sink_of(head), sum = 0, rounding = 0;
    for (int64_t j = row->keys.begin; j < row->keys.end; j++)
        largest = fmax(largest, row->x[j]);
    if (largest == -(real)INFINITY) {
        row->lse = largest, row->lse_rounding = 0;
        return;
    }
    for (int64_t j = row->keys.begin; j < row->keys.end; j++) {
        const real term = exp(row->x[j] - largest);
        sum += term;
        rounding += term == 0 ? 0 : term * row->x_rounding[j];
    }
    sum += exp(sink_of(head) - largest);
    row->lse = largest + log(sum);
    row->lse_rounding =
        rounding / sum + fabs(row->lse) + (real)oracle_exponential_roundings() + (real)head->key_sum + 1;
}

/* Roundings: the exponent, its LSE in base 2, the exponential. */
static void find_probabilities(struct row *row)
{
    real coarsest = fabs(row->lse);
    for (int64_t j = row->keys.begin; j < row->keys.end; j++)
        coarsest = fmax(coarsest, row->x_rounding[j]);
    row->coarse = coarsest >= COARSE;
    const real of_lse = row->lse_rounding + (real)oracle_base_2_roundings() * fabs(row->lse);
    for (int64_t j = row->keys.begin; j < row->keys.end; j++) {
        row->p[j] = exp(row->x[j] - row->lse);
        const real relative = row->x_rounding[j] + of_lse + (real)oracle_exponential_roundings();
        row->p_rounding[j] = row->coarse      ? (real)INFINITY
                             : row->p[j] == 0 ? UNDERFLOW
                                              : row->p[j] * relative + UNDERFLOW;
    }
}

/* A logit that is a result goes back from base 2. */
static real reported_logit_rounding(const struct row *row, int64_t j)
{
    return row->x_rounding[j] + (real)oracle_base_2_roundings() * fabs(row->x[j]);
}

/* ---- Results of a row ----------------------------------------------------------------------------------------- */

static int64_t distance_of(const struct head *head, int64_t i, int64_t j)
{
    const skl_problem *const p = head->problem;
    const int64_t diagonal = p->positions == SKL_POSITIONS_OFFSET ? p->offset_q - p->offset_k
                                                                  : head->sequence.len_k - head->sequence.len_q;
    return i + diagonal >= j ? i + diagonal - j : j - i - diagonal;
}

static void put_row(const struct head *head, const struct row *row)
{
    oracle_stats *const out = head->out;
    real entropy = 0, entropy_rounding = 0, distance = 0, distance_rounding = 0, most = -(real)INFINITY,
         most_rounding = 0;
    const real of_keys = (real)head->key_sum;
    for (int64_t j = row->keys.begin; j < row->keys.end; j++) {
        const real p = row->p[j], rounding = row->p_rounding[j], d = (real)distance_of(head, row->i, j);
        const real depth = row->lse - row->x[j];
        entropy += p == 0 ? 0 : p * depth;
        entropy_rounding +=
            p == 0 ? UNDERFLOW * 100
                   : (rounding + p * of_keys) * fabs(depth) + p * (row->x_rounding[j] + row->lse_rounding);
        distance += d == 0 ? 0 : p * d;
        distance_rounding += d == 0 ? 0 : (rounding + p * (of_keys + 2)) * d;
        most = fmax(most, row->x[j]);
        most_rounding = fmax(most_rounding, reported_logit_rounding(row, j));
    }
    const real log_sink = sink_of(head) - row->lse;
    if (head->problem->sinks && exp(log_sink) > 0) {
        entropy -= exp(log_sink) * log_sink;
        entropy_rounding += exp(log_sink) * (1 + fabs(log_sink)) * (row->lse_rounding + fabs(sink_of(head)) + 2);
    }
    put(&out->lse, row->at, row->lse, row->lse_rounding);
    if (row->coarse && oracle_base_2_roundings() > 0) /* NaN on a GPU, also where no probability is above 0 */
        entropy_rounding = distance_rounding = INFINITY;
    put(&out->entropy, row->at, entropy, entropy_rounding + fabs(entropy));
    put(&out->max_logit, row->at, most, most_rounding);
    put(&out->expected_distance, row->at, distance, distance_rounding);
}

static void put_ranges(const struct head *head, const struct row *row, real w)
{
    const int64_t count = head->stats->range_count;
    for (int64_t n = 0; head->stats->key_ranges && n < count; n++) {
        const int32_t *const range = head->stats->key_ranges + 2 * (head->b * count + n);
        for (int64_t j = row->keys.begin; j < row->keys.end; j++) {
            if (j < range[0] || j >= range[1])
                continue;
            const real rounding = row->p_rounding[j] + row->p[j] * (real)head->key_sum;
            add(&head->out->range_mass, row->at * count + n, row->p[j], rounding);
            if (w != 0)
                add(&head->out->range_sum, (head->b * head->problem->heads_s + head->h) * count + n, w * row->p[j],
                    fabs(w) * (rounding + row->p[j] * (real)head->query_sum));
        }
    }
}

/* The n-th largest p. It changes by at most the largest change of any p. */
static void put_top(const struct head *head, const struct row *row)
{
    const int64_t count = head->stats->top_k;
    int64_t found = 0;
    real largest_rounding = 0;
    real *const largest = malloc(((size_t)count + 1) * sizeof(real)); /* in descending order */
    if (!largest)
        abort();
    for (int64_t j = row->keys.begin; j < row->keys.end; j++) {
        int64_t at = found;
        for (; at > 0 && largest[at - 1] < row->p[j]; at--)
            largest[at] = largest[at - 1];
        largest[at] = row->p[j];
        found += found < count;
        largest_rounding = fmax(largest_rounding, row->p_rounding[j]);
    }
    for (int64_t n = 0; n < found; n++)
        put(&head->out->top_p, row->at * count + n, largest[n], largest_rounding);
    free(largest);
}

/* ---- Sums over rows ------------------------------------------------------------------------------------------- */

static int64_t bucket_of(int64_t distance, int64_t count)
{
    int64_t bucket = 0;
    for (int64_t begin = 1; bucket < count - 1 && distance >= begin; begin *= 2)
        bucket++;
    return bucket;
}

/* The weight of row i; 0 outside the rows of the sums. */
static real weight_of(const struct head *head, int64_t i)
{
    const skl_stats *const stats = head->stats;
    const int64_t length = head->sequence.len_q;
    const int64_t begin = stats->row_begin < 0 ? length + stats->row_begin : stats->row_begin;
    const int64_t end = stats->row_end <= 0 ? length + stats->row_end : stats->row_end;
    if (i < begin || i >= end)
        return 0;
    return stats->row_weights.data ? read_row(head, &stats->row_weights, i) : 1;
}

static void add_row(const struct head *head, const struct row *row, real w)
{
    const skl_problem *const p = head->problem;
    const int64_t key_heads = p->key_heads_s ? p->key_heads_s : p->heads_s, buckets = head->stats->distance_count;
    const int64_t sum_heads = head->stats->per_key_head ? key_heads : p->heads_s;
    const int64_t sum_head = head->h / (p->heads_s / sum_heads), at_head = head->b * p->heads_s + head->h;
    const int64_t length_k = p->packed ? p->total_k : p->len_k;
    const int64_t first = (head->sequence.batch * sum_heads + sum_head) * length_k + head->sequence.first_k;
    for (int64_t j = row->keys.begin; j < row->keys.end; j++) {
        const real rounding = row->p_rounding[j] + row->p[j] * (real)head->query_sum;
        /* A GPU adds to sums in global memory, where the result of an addition below 2^-126 is 0. */
        const real flushed = oracle_base_2_roundings() > 0 ? UNDERFLOW : 0;
        add(&head->out->key_sum, first + j, w * row->p[j], fabs(w) * rounding + flushed);
        raise(&head->out->key_max, first + j, row->p[j], row->p_rounding[j]);
        raise(&head->out->head_max_logit, at_head, row->x[j], reported_logit_rounding(row, j));
        if (buckets > 0)
            add(&head->out->distance_mass, at_head * buckets + bucket_of(distance_of(head, row->i, j), buckets),
                w * row->p[j], fabs(w) * (rounding + row->p[j] * (real)head->key_sum));
    }
}

static void solve_row(const struct head *head, struct row *row)
{
    const skl_problem *const p = head->problem;
    row->keys = oracle_visible_keys(p, head->inputs, head->b, row->i);
    if (row->keys.begin == row->keys.end)
        return;
    const int64_t line = ((head->b * p->heads_s + head->h) * p->len_q + row->i) * p->len_k;
    for (int64_t j = row->keys.begin; j < row->keys.end; j++)
        find_logit(head, row->i, j, &row->x[j], &row->x_rounding[j]);
    find_lse(head, row);
    find_probabilities(row);
    for (int64_t j = row->keys.begin; j < row->keys.end; j++)
        put(&head->out->p, line + j, row->p[j], row->p_rounding[j]);
    const real w = weight_of(head, row->i);
    put_row(head, row);
    put_ranges(head, row, w);
    put_top(head, row);
    if (w != 0)
        add_row(head, row, w);
}

static void solve_head(struct head *head)
{
    const skl_problem *const p = head->problem;
    const oracle_sequence *const sequence = &head->sequence;
    const int64_t length_q = p->packed ? p->total_q : p->len_q;
    const int64_t key_heads = p->key_heads_s ? p->key_heads_s : p->heads_s;
    const int64_t key_head = head->h / (p->heads_s / key_heads);
    head->q = read_head(head, &head->inputs->q_s, head->h, sequence->first_q, sequence->len_q);
    head->k = read_head(head, &head->inputs->k_s, key_head, sequence->first_k, sequence->len_k);
    real *const scratch = malloc(4 * ((size_t)p->len_k + 1) * sizeof(real));
    if (!scratch)
        abort();
    struct row row = {.x = scratch,
                      .x_rounding = scratch + p->len_k,
                      .p = scratch + 2 * p->len_k,
                      .p_rounding = scratch + 3 * p->len_k};
    for (row.i = 0; row.i < sequence->len_q; row.i++) {
        row.at = (sequence->batch * p->heads_s + head->h) * length_q + sequence->first_q + row.i;
        solve_row(head, &row);
    }
    free(scratch), free(head->q), free(head->k);
}

oracle_stats ORACLE_STATS(const skl_problem *p, const skl_inputs *inputs, const skl_stats *stats)
{
    const int64_t key_heads = p->key_heads_s ? p->key_heads_s : p->heads_s;
    const int64_t batch = p->packed ? 1 : p->batch, heads = p->batch * p->heads_s;
    const int64_t rows = batch * p->heads_s * (p->packed ? p->total_q : p->len_q);
    const int64_t keys = batch * (stats->per_key_head ? key_heads : p->heads_s) * (p->packed ? p->total_k : p->len_k);
    oracle_stats out = {.key_sum = array_of(keys, 0),
                        .key_max = array_of(keys, 0),
                        .lse = array_of(rows, -INFINITY),
                        .entropy = array_of(rows, 0),
                        .max_logit = array_of(rows, -INFINITY),
                        .expected_distance = array_of(rows, 0),
                        .head_max_logit = array_of(heads, -INFINITY),
                        .distance_mass = array_of(heads * stats->distance_count, 0),
                        .range_mass = array_of(rows * stats->range_count, 0),
                        .range_sum = array_of(heads * stats->range_count, 0),
                        .top_p = array_of(rows * stats->top_k, 0),
                        .p = array_of(heads * p->len_q * p->len_k, 0)};
    const int repeated_keys = inputs->k_s.stride_row == 0, repeated_queries = inputs->q_s.stride_row == 0;
    for (int64_t b = 0; b < p->batch; b++)
        for (int64_t h = 0; h < p->heads_s; h++) {
            /* Equal terms can all round in the same direction. */
            struct head head = {.problem = p,
                                .inputs = inputs,
                                .stats = stats,
                                .out = &out,
                                .sequence = oracle_sequence_at(p, inputs, b),
                                .b = b,
                                .h = h,
                                .key_sum = repeated_keys ? p->len_k + 1 : 1,
                                .query_sum = repeated_queries ? p->len_q * p->heads_s + 1 : 1,
                                .orders = orders_for(rows)};
            solve_head(&head);
        }
    return out;
}
