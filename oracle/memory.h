/* What the oracle computes with: inputs as contiguous arrays, scratch for a row, and its results. Of type `real`. */
#ifndef SKL_ORACLE_MEMORY_H
#define SKL_ORACLE_MEMORY_H

#include "oracle.h"

#include <stdlib.h>
#include <tgmath.h> /* exp, log, sqrt and tanh of a float are float */

typedef REAL real;

/* The teacher or the student; its tensors are contiguous [batch, heads, length, dim]. */
struct model {
    int64_t heads, key_heads, dim;
    real scale, softcap;
    real *q, *k, *dq, *dk;
    real *dq_rounding, *dk_rounding, *dq_terms, *dk_terms;
};

struct run {
    const skl_problem *problem;
    int64_t batch, length_q, length_k; /* of the buffers: packed ones have batch 1 and length total */
    int64_t group;                     /* r: teacher heads averaged for a student head */
    struct model teacher, student;
    real *given_lse_t, *grad_kl;      /* NULL: not given */
    real *kl, *lse_t, *lse_s, *dot_t; /* results */
    real *kl_rounding, *lse_t_rounding, *lse_s_rounding, *dot_t_rounding;
    real *scratch;       /* for one row, cut into what follows. Those of the teacher's heads are [group, length_k]. */
    real *x, *y;         /* logits */
    real *log_p_head;    /* log P of each teacher head */
    real *log_p, *log_s; /* the two distributions that are compared */
    real *gradient;      /* with respect to the logits of one head */
    real *x_rounding, *y_rounding, *log_p_head_rounding, *log_p_rounding, *log_s_rounding, *gradient_rounding;
};

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
    const int64_t count_q = run->batch * model->heads * run->length_q * model->dim;
    const int64_t count_k = run->batch * model->key_heads * run->length_k * model->dim;
    model->dq = filled(count_q, 0), model->dq_rounding = filled(count_q, 0), model->dq_terms = filled(count_q, 0);
    model->dk = filled(count_k, 0), model->dk_rounding = filled(count_k, 0), model->dk_terms = filled(count_k, 0);
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

/* Frees all but the results. */
static oracle_result take_results(const struct run *run)
{
    real *const inputs_and_scratch[] = {run->teacher.q,   run->teacher.k, run->student.q, run->student.k,
                                        run->given_lse_t, run->grad_kl,   run->scratch};
    for (size_t a = 0; a < sizeof inputs_and_scratch / sizeof *inputs_and_scratch; a++)
        free(inputs_and_scratch[a]);

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
        .rounding =
            {
                .kl = widened(run->kl_rounding, rows * s->heads),
                .lse_t = widened(run->lse_t_rounding, rows * t->heads),
                .lse_s = widened(run->lse_s_rounding, rows * s->heads),
                .dot_t = widened(run->dot_t_rounding, rows * t->heads),
                .dq_t = widened(t->dq_rounding, rows * t->heads * t->dim),
                .dk_t = widened(t->dk_rounding, keys * t->key_heads * t->dim),
                .dq_s = widened(s->dq_rounding, rows * s->heads * s->dim),
                .dk_s = widened(s->dk_rounding, keys * s->key_heads * s->dim),
            },
        .terms =
            {
                .dq_t = widened(t->dq_terms, rows * t->heads * t->dim),
                .dk_t = widened(t->dk_terms, keys * t->key_heads * t->dim),
                .dq_s = widened(s->dq_terms, rows * s->heads * s->dim),
                .dk_s = widened(s->dk_terms, keys * s->key_heads * s->dim),
            },
    };
}

static struct run prepare(const skl_problem *p, const skl_inputs *inputs)
{
    struct run run = {.problem = p};
    run.batch = p->packed ? 1 : p->batch;
    run.length_q = p->packed ? p->total_q : p->len_q;
    run.length_k = p->packed ? p->total_k : p->len_k;
    run.group = p->heads_t / p->heads_s;
    run.teacher = (struct model){p->heads_t, p->key_heads_t, p->dim_t, .scale = (real)p->scale_t};
    run.student = (struct model){p->heads_s, p->key_heads_s, p->dim_s, .scale = (real)p->scale_s};
    run.teacher.softcap = (real)p->softcap_t, run.student.softcap = (real)p->softcap_s;
    load_model(&run, &run.teacher, p->dtype_t, &inputs->q_t, &inputs->k_t);
    load_model(&run, &run.student, p->dtype_s, &inputs->q_s, &inputs->k_s);
    run.given_lse_t = contiguous_copy(&run, &inputs->lse_t, SKL_F32, p->heads_t, run.length_q, 1);
    run.grad_kl = contiguous_copy(&run, &inputs->grad_kl, SKL_F32, p->heads_s, run.length_q, 1);

    const int64_t rows = run.batch * run.length_q;
    run.kl = filled(rows * p->heads_s, 0);
    run.lse_s = filled(rows * p->heads_s, -(real)INFINITY);
    run.lse_t = filled(rows * p->heads_t, -(real)INFINITY);
    run.dot_t = filled(rows * p->heads_t, 0);
    run.kl_rounding = filled(rows * p->heads_s, 0), run.lse_s_rounding = filled(rows * p->heads_s, 0);
    run.lse_t_rounding = filled(rows * p->heads_t, 0), run.dot_t_rounding = filled(rows * p->heads_t, 0);

    run.scratch = filled((4 * run.group + 8) * run.length_k, 0);
    real *next = run.scratch;
    real **const of_heads[] = {&run.x, &run.x_rounding, &run.log_p_head, &run.log_p_head_rounding};
    real **const of_row[] = {&run.y,     &run.y_rounding,     &run.log_p,    &run.log_p_rounding,
                             &run.log_s, &run.log_s_rounding, &run.gradient, &run.gradient_rounding};
    for (size_t a = 0; a < sizeof of_heads / sizeof *of_heads; a++, next += run.group * run.length_k)
        *of_heads[a] = next;
    for (size_t a = 0; a < sizeof of_row / sizeof *of_row; a++, next += run.length_k)
        *of_row[a] = next;
    return run;
}

#endif
