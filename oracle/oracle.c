/* KL(P || S) or KL(S || P) of every row, and the gradients, from whole rows of logits. */
#include "oracle.h"

#include <stdlib.h>
#include <tgmath.h> /* exp, log, sqrt and tanh of a float are float */

#ifndef REAL
#define REAL       double
#define SAVED      double
#define ORACLE_RUN oracle_run
#endif
typedef REAL real;
typedef SAVED saved; /* what row vectors are between the two passes */

/* The teacher or the student; its tensors are contiguous [batch, heads, length, dim]. */
struct model {
    int64_t heads, key_heads, dim;
    real scale, softcap;
    real *q, *k, *dq, *dk;
};

struct run {
    const skl_problem *problem;
    int64_t batch, length_q, length_k; /* of the buffers: packed ones have batch 1 and length total */
    int64_t group;                     /* r: teacher heads averaged for a student head */
    struct model teacher, student;
    real *given_lse_t, *grad_kl;      /* NULL: not given */
    real *kl, *lse_t, *lse_s, *dot_t; /* results */
    /* Scratch for one row. Those of the teacher's heads are [group, length_k]. */
    real *x, *y;         /* logits */
    real *log_p_head;    /* log P of each teacher head */
    real *log_p, *log_s; /* the two distributions that are compared */
    real *gradient;      /* with respect to the logits of one head */
};

/* The row at work: student head h_s, query row_q, and the keys from row_k on that it sees. */
struct row {
    int64_t batch, h_s, row_q, row_k, key_count;
    int64_t at_s, at_t; /* its place in row vectors; teacher head h of the group is at_t + h * length_q */
};

/* The query of a row and the first key it sees, in the tensors of a model. */
struct place {
    int64_t q, k;
};

static struct place find_place(const struct run *run, const struct row *row, const struct model *model, int64_t head)
{
    const int64_t key_head = head / (model->heads / model->key_heads);
    const int64_t line_q = (row->batch * model->heads + head) * run->length_q + row->row_q;
    const int64_t line_k = (row->batch * model->key_heads + key_head) * run->length_k + row->row_k;
    return (struct place){line_q * model->dim, line_k * model->dim};
}

/* logits[j] = softcap(scale * <q, k[j]>) */
static void compute_logits(const struct model *model, struct place at, int64_t key_count, real *logits)
{
    const real *const q = model->q + at.q;
    for (int64_t j = 0; j < key_count; j++) {
        const real *const k = model->k + at.k + j * model->dim;
        real dot = 0;
        for (int64_t d = 0; d < model->dim; d++)
            dot += q[d] * k[d];
        logits[j] = model->scale * dot;
        if (model->softcap > 0)
            logits[j] = model->softcap * tanh(logits[j] / model->softcap);
    }
}

/* dq += scale * gradient[j] * k[j];  dk[j] += scale * gradient[j] * q;  both through the softcap */
static void add_gradients(const struct model *model, struct place at, int64_t key_count, const real *logits,
                          const real *gradient)
{
    const real *const q = model->q + at.q;
    real *const dq = model->dq + at.q;
    for (int64_t j = 0; j < key_count; j++) {
        const real *const k = model->k + at.k + j * model->dim;
        real *const dk = model->dk + at.k + j * model->dim;
        const real capped = model->softcap > 0 ? logits[j] / model->softcap : 0;
        const real dot_gradient = model->scale * gradient[j] * (1 - capped * capped);
        for (int64_t d = 0; d < model->dim; d++) {
            dq[d] += dot_gradient * k[d];
            dk[d] += dot_gradient * q[d];
        }
    }
}

/* log sum_n exp(values[n * stride]) */
static real log_sum_exp(const real *values, int64_t count, int64_t stride)
{
    real largest = values[0];
    for (int64_t n = 1; n < count; n++)
        largest = values[n * stride] > largest ? values[n * stride] : largest;

    real sum = 0;
    for (int64_t n = 0; n < count; n++)
        sum += exp(values[n * stride] - largest);
    return largest + log(sum);
}

/* log S from lse_s; log P of each teacher head from lse_t, and of their mean. */
static void distributions(const struct run *run, const struct row *row)
{
    const int64_t r = run->group, count = row->key_count;
    for (int64_t j = 0; j < count; j++)
        run->log_s[j] = run->y[j] - run->lse_s[row->at_s];
    for (int64_t h = 0; h < r; h++) {
        const int64_t line = h * run->length_k;
        for (int64_t j = line; j < line + count; j++)
            run->log_p_head[j] = run->x[j] - run->lse_t[row->at_t + h * run->length_q];
    }
    for (int64_t j = 0; j < count; j++) {
        const real *const heads = run->log_p_head + j;
        run->log_p[j] = r == 1 ? *heads : log_sum_exp(heads, r, run->length_k) - log((real)r);
    }
}

/* LSEs and the distributions they give. A given LSE may cover more than the visible keys: then the mean of the
 * teacher's heads is divided by its sum z over the visible ones. */
static void normalise(const struct run *run, const struct row *row)
{
    const int use_given = run->group > 1 && run->given_lse_t;
    run->lse_s[row->at_s] = log_sum_exp(run->y, row->key_count, 1);
    for (int64_t h = 0; h < run->group; h++) {
        const int64_t at = row->at_t + h * run->length_q;
        const real own = log_sum_exp(run->x + h * run->length_k, row->key_count, 1);
        run->lse_t[at] = use_given ? run->given_lse_t[at] : own;
    }
    distributions(run, row);
    if (!use_given)
        return;

    const real log_z = log_sum_exp(run->log_p, row->key_count, 1);
    for (int64_t h = 0; h < run->group; h++)
        run->lse_t[row->at_t + h * run->length_q] += log_z;
    distributions(run, row);
}

/* sum_j first_j (log first_j - log second_j) */
static real divergence(const real *log_first, const real *log_second, int64_t count)
{
    real kl = 0;
    for (int64_t j = 0; j < count; j++)
        kl += exp(log_first[j]) * (log_first[j] - log_second[j]);
    return kl;
}

/* P_hj phi_j with phi = dKL / dP: log P_j - log S_j or -S_j / P_j. One exponential, so that it cannot be 0 * inf. */
static real weighted_phi(const struct run *run, int64_t h, int64_t j)
{
    const real log_p_head = run->log_p_head[h * run->length_k + j];
    if (run->problem->direction == SKL_KL_FORWARD)
        return exp(log_p_head) * (run->log_p[j] - run->log_s[j]);
    return -exp(log_p_head - run->log_p[j] + run->log_s[j]);
}

/* The second argument: g (second - first). The first: g first (log first - log second - KL). A teacher of several
 * heads: g / r (P_h phi - P_h dot_h). */
static void teacher_gradients(const struct run *run, const struct row *row, int64_t h, real g)
{
    const int64_t line = h * run->length_k, count = row->key_count;
    const real kl = run->kl[row->at_s], dot = run->dot_t[row->at_t + h * run->length_q];
    for (int64_t j = 0; j < count; j++) {
        const real log_p = run->log_p[j], log_s = run->log_s[j];
        if (run->group > 1)
            run->gradient[j] =
                g / (real)run->group * (weighted_phi(run, h, j) - exp(run->log_p_head[line + j]) * dot);
        else if (run->problem->direction == SKL_KL_FORWARD)
            run->gradient[j] = g * exp(log_p) * (log_p - log_s - kl);
        else
            run->gradient[j] = g * (exp(log_p) - exp(log_s));
    }
    const struct place at = find_place(run, row, &run->teacher, row->h_s * run->group + h);
    add_gradients(&run->teacher, at, count, run->x + line, run->gradient);
}

static void student_gradients(const struct run *run, const struct row *row, real g)
{
    const int64_t count = row->key_count;
    for (int64_t j = 0; j < count; j++) {
        const real log_p = run->log_p[j], log_s = run->log_s[j];
        if (run->problem->direction == SKL_KL_FORWARD)
            run->gradient[j] = g * (exp(log_s) - exp(log_p));
        else
            run->gradient[j] = g * exp(log_s) * (log_s - log_p - run->kl[row->at_s]);
    }
    add_gradients(&run->student, find_place(run, row, &run->student, row->h_s), count, run->y, run->gradient);
}

/* LSEs, KL and dots of one row. */
static void forward_row(const struct run *run, const struct row *row)
{
    const int64_t r = run->group, count = row->key_count;
    compute_logits(&run->student, find_place(run, row, &run->student, row->h_s), count, run->y);
    for (int64_t h = 0; h < r; h++) {
        const struct place at = find_place(run, row, &run->teacher, row->h_s * r + h);
        compute_logits(&run->teacher, at, count, run->x + h * run->length_k);
    }
    normalise(run, row);

    const int forward = run->problem->direction == SKL_KL_FORWARD;
    const real kl = divergence(forward ? run->log_p : run->log_s, forward ? run->log_s : run->log_p, count);
    run->kl[row->at_s] = kl < 0 ? 0 : kl; /* a NaN stays */
    for (int64_t h = 0; h < r; h++) {
        real dot = 0;
        for (int64_t j = 0; j < count; j++)
            dot += weighted_phi(run, h, j);
        run->dot_t[row->at_t + h * run->length_q] = dot;
    }
}

/* Gradients from the logits and the rows of the forward, as they were saved. */
static void backward_row(const struct run *run, const struct row *row)
{
    run->kl[row->at_s] = (saved)run->kl[row->at_s];
    run->lse_s[row->at_s] = (saved)run->lse_s[row->at_s];
    for (int64_t h = 0; h < run->group; h++) {
        const int64_t at = row->at_t + h * run->length_q;
        run->lse_t[at] = (saved)run->lse_t[at];
        run->dot_t[at] = (saved)run->dot_t[at];
    }
    distributions(run, row);

    const real g = run->grad_kl ? run->grad_kl[row->at_s] : 1;
    if (run->problem->gradients & (SKL_DQ_S | SKL_DK_S))
        student_gradients(run, row, g);
    if (run->problem->gradients & (SKL_DQ_T | SKL_DK_T))
        for (int64_t h = 0; h < run->group; h++)
            teacher_gradients(run, row, h, g);
}

static void compute_sequence(const struct run *run, const skl_inputs *inputs, int64_t b)
{
    const oracle_sequence sequence = oracle_sequence_at(run->problem, inputs, b);
    for (int64_t i = 0; i < sequence.len_q; i++) {
        const oracle_keys keys = oracle_visible_keys(run->problem, inputs, b, i);
        if (keys.begin == keys.end)
            continue; /* the results stand at their initial values */
        for (int64_t h_s = 0; h_s < run->student.heads; h_s++) {
            struct row row = {sequence.batch, h_s, sequence.first_q + i, sequence.first_k + keys.begin, 0, 0, 0};
            row.key_count = keys.end - keys.begin;
            row.at_s = (row.batch * run->student.heads + h_s) * run->length_q + row.row_q;
            row.at_t = (row.batch * run->teacher.heads + h_s * run->group) * run->length_q + row.row_q;
            forward_row(run, &row);
            if (run->problem->gradients)
                backward_row(run, &row);
        }
    }
}

static real *filled(int64_t count, real value)
{
    real *const array = malloc(((size_t)count + 1) * sizeof(real)); /* + 1: an empty tensor is an array too */
    if (!array)
        abort();
    for (int64_t n = 0; n < count; n++)
        array[n] = value;
    return array;
}

/* Of [batch, heads, length, dim]; NULL if the tensor is not given. */
static real *contiguous_copy(const struct run *run, const skl_input *from, skl_dtype dtype, int64_t heads,
                             int64_t length, int64_t dim)
{
    if (!from->data)
        return NULL;
    real *const copy = filled(run->batch * heads * length * dim, 0);
    real *next = copy;
    for (int64_t b = 0; b < run->batch; b++)
        for (int64_t h = 0; h < heads; h++)
            for (int64_t line = 0; line < length; line++) {
                const int64_t at = b * from->stride_batch + h * from->stride_head + line * from->stride_row;
                for (int64_t d = 0; d < dim; d++)
                    *next++ = (real)oracle_read(dtype, from->data, at + d);
            }
    return copy;
}

static void load_model(const struct run *run, struct model *model, skl_dtype dtype, const skl_input *q,
                       const skl_input *k)
{
    if (model->key_heads == 0)
        model->key_heads = model->heads;
    if (model->scale == 0)
        model->scale = 1 / sqrt((real)model->dim);
    model->q = contiguous_copy(run, q, dtype, model->heads, run->length_q, model->dim);
    model->k = contiguous_copy(run, k, dtype, model->key_heads, run->length_k, model->dim);
    model->dq = filled(run->batch * model->heads * run->length_q * model->dim, 0);
    model->dk = filled(run->batch * model->key_heads * run->length_k * model->dim, 0);
}

/* The array as doubles; frees it. */
static double *widened(real *array, int64_t count)
{
    double *const wide = malloc(((size_t)count + 1) * sizeof(double));
    if (!wide)
        abort();
    for (int64_t n = 0; n < count; n++)
        wide[n] = (double)array[n];
    free(array);
    return wide;
}

static oracle_result take_results(const struct run *run)
{
    const struct model *const t = &run->teacher, *const s = &run->student;
    const int64_t rows = run->batch * run->length_q, keys = run->batch * run->length_k;
    return (oracle_result){
        .kl = widened(run->kl, rows * s->heads),
        .lse_t = widened(run->lse_t, rows * t->heads),
        .lse_s = widened(run->lse_s, rows * s->heads),
        .dot_t = widened(run->dot_t, rows * t->heads),
        .dq_t = widened(t->dq, rows * t->heads * t->dim),
        .dk_t = widened(t->dk, keys * t->key_heads * t->dim),
        .dq_s = widened(s->dq, rows * s->heads * s->dim),
        .dk_s = widened(s->dk, keys * s->key_heads * s->dim),
    };
}

oracle_result ORACLE_RUN(const skl_problem *problem, const skl_inputs *inputs)
{
    const skl_problem *const p = problem;
    struct run run = {.problem = p};
    run.batch = p->packed ? 1 : p->batch;
    run.length_q = p->packed ? p->total_q : p->len_q;
    run.length_k = p->packed ? p->total_k : p->len_k;
    run.group = p->heads_t / p->heads_s;
    run.teacher =
        (struct model){p->heads_t, p->key_heads_t, p->dim_t, (real)p->scale_t, (real)p->softcap_t, 0, 0, 0, 0};
    run.student =
        (struct model){p->heads_s, p->key_heads_s, p->dim_s, (real)p->scale_s, (real)p->softcap_s, 0, 0, 0, 0};
    load_model(&run, &run.teacher, p->dtype_t, &inputs->q_t, &inputs->k_t);
    load_model(&run, &run.student, p->dtype_s, &inputs->q_s, &inputs->k_s);
    run.given_lse_t = contiguous_copy(&run, &inputs->lse_t, SKL_F32, p->heads_t, run.length_q, 1);
    run.grad_kl = contiguous_copy(&run, &inputs->grad_kl, SKL_F32, p->heads_s, run.length_q, 1);

    const int64_t rows = run.batch * run.length_q;
    run.kl = filled(rows * p->heads_s, 0);
    run.lse_s = filled(rows * p->heads_s, -(real)INFINITY);
    run.lse_t = filled(rows * p->heads_t, -(real)INFINITY);
    run.dot_t = filled(rows * p->heads_t, 0);

    real *const scratch = filled((2 * run.group + 4) * run.length_k, 0);
    run.x = scratch;
    run.log_p_head = run.x + run.group * run.length_k;
    run.y = run.log_p_head + run.group * run.length_k;
    run.log_p = run.y + run.length_k;
    run.log_s = run.log_p + run.length_k;
    run.gradient = run.log_s + run.length_k;

    for (int64_t b = 0; b < p->batch; b++)
        compute_sequence(&run, inputs, b);

    real *const inputs_and_scratch[] = {run.teacher.q,   run.teacher.k, run.student.q, run.student.k,
                                        run.given_lse_t, run.grad_kl,   scratch};
    for (size_t a = 0; a < sizeof inputs_and_scratch / sizeof *inputs_and_scratch; a++)
        free(inputs_and_scratch[a]);
    return take_results(&run);
}
