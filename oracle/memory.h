/* Memory of the oracle: inputs as contiguous arrays, scratch for one row, results. All of type `real`. */
#ifndef SKL_ORACLE_MEMORY_H
#define SKL_ORACLE_MEMORY_H

#include "oracle.h"

#include <stdlib.h>
#include <tgmath.h> /* exp, log, sqrt and tanh for both types of `real` */

typedef REAL real;

#include "dot.h"

/* The teacher or the student; its tensors are contiguous [batch, heads, length, dim]. */
struct model {
    int64_t heads, key_heads, dim;
    int64_t length_k; /* keys; of a student with a pooled teacher, blocks */
    real scale, softcap;
    int linear;          /* SKL_LINK_LINEAR: the logit is the logarithm of the product */
    int64_t index_heads; /* indexer: heads g that share the keys; otherwise 1 */
    int64_t orders;      /* in which a product of rows is added up; it is the worst of them */
    real *q, *k, *dq, *dk;
    real *dq_rounding, *dk_rounding, *dq_terms, *dk_terms;
    real *w, *dw, *dw_rounding, *dw_terms;      /* indexer: [batch, heads, length, index_heads] */
    real *dq_factors, *dk_factors, *dw_factors; /* change of an element per gradient of a scaled product */
    real *largest; /* [2]: largest gradient of a scaled product, or upstream gradient; the same times its weight */
    real smallest; /* oracle_smallest_gradient(); the naive implementation needs no terms: 0 */
    real *sink, *dsink, *dsink_rounding; /* [heads] */
};

/* A logarithm of a sum of exponentials, as the sum of two numbers: logits of 1e20 minus their LSE are then exact. */
struct log_sum {
    real largest, rest;
};

struct run {
    const skl_problem *problem;
    int64_t batch, length_q; /* of the buffers; packed: batch 1, length total */
    int64_t group_size;      /* teacher heads per student head */
    struct model teacher, student;
    real key_sum, query_sum;          /* roundings of a sum over the keys of a row, and over the queries of a key */
    real *given_lse_t, *grad_kl;      /* NULL: not given */
    real *kl, *lse_t, *lse_s, *dot_t; /* results */
    real *kl_rounding, *lse_t_rounding, *lse_s_rounding, *dot_t_rounding;
    real *cross_entropy, *entropy, *mass, *cross_entropy_rounding, *entropy_rounding, *mass_rounding;
    real *v, *o, *d_o; /* student's attention: NULL: not given */
    real *output, *output_rounding, *output_terms, *dv, *dv_rounding, *dv_terms;
    int64_t row_length;   /* most keys of a row, which may repeat in a list, and a sink */
    int64_t *keys;        /* of one row, as rows of the key buffers; with a pooled teacher, blocks */
    int64_t *seen;        /* keys of the teacher in one row, as rows of the key buffers */
    int64_t *outcomes;    /* which of `keys` each of them belongs to; -1: none */
    struct log_sum *lses; /* of one row: of the teacher heads, then of the student */
    real *scratch;        /* of one row; the arrays below, [group_size, row_length] for teacher heads */
    real *x, *y;          /* logits */
    real *log_p_head;     /* log P of each teacher head */
    real *log_ratio;      /* log (P_h / P) of each teacher head */
    real *log_p_key;      /* pooled teacher: log P of each key */
    real *log_p, *log_s;  /* the two distributions of the KL */
    real *gradient;       /* with respect to the logits of one head */
    real *parts;          /* sum of the magnitudes of its parts */
    real *x_rounding, *y_rounding, *log_p_head_rounding, *log_p_rounding, *log_s_rounding, *gradient_rounding;
    real *log_p_key_rounding;
};

static real *filled(int64_t count, real value)
{
    real *const array = malloc(((size_t)count + 1) * sizeof(real)); /* + 1: never an allocation of 0 bytes */
    if (!array)
        abort();
    for (int64_t n = 0; n < count; n++)
        array[n] = value;
    return array;
}

/* A tensor as [batch, heads, length, dim]; NULL if it is not given. */
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
    if (model->linear)
        model->scale = 1;
    if (model->scale == 0)
        model->scale = 1 / sqrt((real)(model->dim * model->index_heads));
    model->smallest = sizeof(real) == sizeof(float) ? 0 : (real)oracle_smallest_gradient(run->problem, dtype);
    const int64_t query_heads = model->heads * model->index_heads;
    model->q = contiguous_copy(run, q, dtype, query_heads, run->length_q, model->dim);
    model->k = contiguous_copy(run, k, dtype, model->key_heads, model->length_k, model->dim);
    const int64_t count_q = run->batch * query_heads * run->length_q * model->dim;
    const int64_t count_k = run->batch * model->key_heads * model->length_k * model->dim;
    model->dq = filled(count_q, 0), model->dq_rounding = filled(count_q, 0), model->dq_terms = filled(count_q, 0);
    model->dk = filled(count_k, 0), model->dk_rounding = filled(count_k, 0), model->dk_terms = filled(count_k, 0);
    model->dq_factors = filled(count_q, 0), model->dk_factors = filled(count_k, 0), model->largest = filled(2, 0);
}

static int is_pooled(const struct run *run)
{
    return run->problem->pool != SKL_POOL_NONE;
}

static int is_indexer(const struct run *run)
{
    return run->problem->student == SKL_STUDENT_INDEXER;
}

static int64_t weight_count(const struct run *run)
{
    return is_indexer(run) ? run->batch * run->student.heads * run->length_q * run->student.index_heads : 0;
}

static void load_weights(const struct run *run, struct model *model, const skl_input *w)
{
    const int64_t count = weight_count(run);
    model->w = contiguous_copy(run, w, run->problem->dtype_w, model->heads, run->length_q, model->index_heads);
    model->dw = filled(count, 0), model->dw_rounding = filled(count, 0), model->dw_terms = filled(count, 0);
    model->dw_factors = filled(count, 0);
}

static void load_sinks(const struct run *run, struct model *model, const float *sink)
{
    const int64_t count = run->problem->sinks ? model->heads : 0;
    model->sink = filled(count, 0), model->dsink = filled(count, 0), model->dsink_rounding = filled(count, 0);
    for (int64_t h = 0; h < count; h++)
        model->sink[h] = (real)sink[h];
}

static void load_attention(struct run *run, const skl_attention *of)
{
    const struct model *const s = &run->student;
    const skl_dtype dtype = run->problem->dtype_s;
    const int64_t count_q = run->batch * s->heads * run->length_q * s->dim;
    const int64_t count_k = run->batch * s->key_heads * s->length_k * s->dim;
    run->v = contiguous_copy(run, &of->v_s, dtype, s->key_heads, s->length_k, s->dim);
    run->o = contiguous_copy(run, &of->o_s, dtype, s->heads, run->length_q, s->dim);
    run->d_o = contiguous_copy(run, &of->do_s, dtype, s->heads, run->length_q, s->dim);
    run->output = filled(count_q, 0), run->output_rounding = filled(count_q, 0),
    run->output_terms = filled(count_q, 0);
    run->dv = filled(count_k, 0), run->dv_rounding = filled(count_k, 0), run->dv_terms = filled(count_k, 0);
}

/* Converts an array to double and frees it. */
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

/* Adds the smallest gradients of scaled products that 16 bits round relatively: a smaller one has their error. */
static void add_smallest(real *terms, real *factors, int64_t count, real smallest)
{
    for (int64_t n = 0; n < count; n++)
        terms[n] += smallest * factors[n];
    free(factors);
}

static void finish_terms(const struct run *run, const struct model *model, int64_t weights)
{
    const real of_pair = model->smallest * model->largest[0], of_weighted = model->smallest * model->largest[1];
    const int64_t count_q = run->batch * model->heads * model->index_heads * run->length_q * model->dim;
    const int64_t count_k = run->batch * model->key_heads * model->length_k * model->dim;
    add_smallest(model->dq_terms, model->dq_factors, count_q, of_weighted);
    add_smallest(model->dk_terms, model->dk_factors, count_k, of_weighted);
    add_smallest(model->dw_terms, model->dw_factors, weights, of_pair);
    free(model->largest);
}

/* Moves the results out and frees everything else. */
static oracle_result take_results(const struct run *run)
{
    real *const inputs_and_scratch[] = {run->teacher.q,    run->teacher.k,    run->student.q, run->student.k,
                                        run->given_lse_t,  run->grad_kl,      run->scratch,   run->student.w,
                                        run->teacher.sink, run->student.sink, run->v,         run->o,
                                        run->d_o};
    for (size_t a = 0; a < sizeof inputs_and_scratch / sizeof *inputs_and_scratch; a++)
        free(inputs_and_scratch[a]);
    free(run->keys);
    free(run->seen);
    free(run->outcomes);
    free(run->lses);

    const struct model *const t = &run->teacher, *const s = &run->student;
    const int64_t rows = run->batch * run->length_q;
    const int64_t keys_t = run->batch * t->length_k, keys_s = run->batch * s->length_k;
    const int64_t sinks_t = run->problem->sinks ? t->heads : 0, sinks_s = run->problem->sinks ? s->heads : 0;
    const int64_t of_v = run->v ? s->dim : 0; /* elements per row: the arrays are NULL without the attention */
    const int64_t weights = weight_count(run), query_heads = s->heads * s->index_heads;
    finish_terms(run, t, 0);
    finish_terms(run, s, weights);
    return (oracle_result){
        .kl = widened(run->kl, rows * s->heads),
        .lse_t = widened(run->lse_t, rows * t->heads),
        .lse_s = widened(run->lse_s, rows * s->heads),
        .dot_t = widened(run->dot_t, rows * t->heads),
        .cross_entropy = widened(run->cross_entropy, rows * s->heads),
        .entropy = widened(run->entropy, rows * s->heads),
        .mass = widened(run->mass, rows * s->heads),
        .dq_t = widened(t->dq, rows * t->heads * t->dim),
        .dk_t = widened(t->dk, keys_t * t->key_heads * t->dim),
        .dq_s = widened(s->dq, rows * query_heads * s->dim),
        .dk_s = widened(s->dk, keys_s * s->key_heads * s->dim),
        .dw_s = widened(s->dw, weights),
        .dsink_t = widened(t->dsink, sinks_t),
        .dsink_s = widened(s->dsink, sinks_s),
        .o_s = widened(run->output, rows * s->heads * of_v),
        .dv_s = widened(run->dv, keys_s * s->key_heads * of_v),
        .rounding =
            {
                .kl = widened(run->kl_rounding, rows * s->heads),
                .lse_t = widened(run->lse_t_rounding, rows * t->heads),
                .lse_s = widened(run->lse_s_rounding, rows * s->heads),
                .dot_t = widened(run->dot_t_rounding, rows * t->heads),
                .cross_entropy = widened(run->cross_entropy_rounding, rows * s->heads),
                .entropy = widened(run->entropy_rounding, rows * s->heads),
                .mass = widened(run->mass_rounding, rows * s->heads),
                .dq_t = widened(t->dq_rounding, rows * t->heads * t->dim),
                .dk_t = widened(t->dk_rounding, keys_t * t->key_heads * t->dim),
                .dq_s = widened(s->dq_rounding, rows * query_heads * s->dim),
                .dk_s = widened(s->dk_rounding, keys_s * s->key_heads * s->dim),
                .dw_s = widened(s->dw_rounding, weights),
                .dsink_t = widened(t->dsink_rounding, sinks_t),
                .dsink_s = widened(s->dsink_rounding, sinks_s),
                .o_s = widened(run->output_rounding, rows * s->heads * of_v),
                .dv_s = widened(run->dv_rounding, keys_s * s->key_heads * of_v),
            },
        .terms =
            {
                .dq_t = widened(t->dq_terms, rows * t->heads * t->dim),
                .dk_t = widened(t->dk_terms, keys_t * t->key_heads * t->dim),
                .dq_s = widened(s->dq_terms, rows * query_heads * s->dim),
                .dk_s = widened(s->dk_terms, keys_s * s->key_heads * s->dim),
                .dw_s = widened(s->dw_terms, weights),
                .o_s = widened(run->output_terms, rows * s->heads * of_v),
                .dv_s = widened(run->dv_terms, keys_s * s->key_heads * of_v),
            },
    };
}

/* Roundings of a sum over rows. Those of expanded tensors give equal terms: every addition can round the same way. */
static real sum_rounding(const skl_input *of_t, const skl_input *of_s, int64_t count)
{
    const int expanded = of_t->stride_row == 0 || of_s->stride_row == 0;
    return expanded && count > 0 ? (real)count : 1;
}

static struct run prepare(const skl_problem *p, const skl_inputs *inputs, const skl_attention *attention)
{
    struct run run = {.problem = p};
    run.batch = p->packed ? 1 : p->batch;
    run.length_q = p->packed ? p->total_q : p->len_q;
    run.group_size = p->heads_t / p->heads_s;
    run.teacher = (struct model){p->heads_t, p->key_heads_t, p->dim_t, .scale = (real)p->scale_t};
    run.student = (struct model){p->heads_s, p->key_heads_s, p->dim_s, .scale = (real)p->scale_s};
    run.teacher.length_k = p->packed ? p->total_k : p->len_k;
    run.student.length_k = oracle_student_keys(p, run.teacher.length_k);
    run.teacher.softcap = (real)p->softcap_t, run.student.softcap = (real)p->softcap_s;
    run.student.linear = p->link_s == SKL_LINK_LINEAR;
    run.teacher.orders = run.student.orders = orders_for(run.batch * run.length_q * p->heads_s);
    run.teacher.index_heads = 1, run.student.index_heads = is_indexer(&run) ? p->index_heads : 1;
    load_model(&run, &run.teacher, p->dtype_t, &inputs->q_t, &inputs->k_t);
    load_model(&run, &run.student, p->dtype_s, &inputs->q_s, &inputs->k_s);
    run.key_sum = sum_rounding(&inputs->k_t, &inputs->k_s, run.teacher.length_k);
    run.query_sum = sum_rounding(&inputs->q_t, &inputs->q_s, run.length_q * p->heads_t * run.student.index_heads);
    load_weights(&run, &run.student, &inputs->w_s);
    load_sinks(&run, &run.teacher, inputs->sink_t);
    load_sinks(&run, &run.student, inputs->sink_s);
    run.given_lse_t = contiguous_copy(&run, &inputs->lse_t, SKL_F32, p->heads_t, run.length_q, 1);
    run.grad_kl = contiguous_copy(&run, &inputs->grad_kl, SKL_F32, p->heads_s, run.length_q, 1);

    if (attention)
        load_attention(&run, attention);

    const int64_t rows = run.batch * run.length_q;
    run.kl = filled(rows * p->heads_s, 0);
    run.lse_s = filled(rows * p->heads_s, -(real)INFINITY);
    run.lse_t = filled(rows * p->heads_t, -(real)INFINITY);
    run.dot_t = filled(rows * p->heads_t, 0);
    run.kl_rounding = filled(rows * p->heads_s, 0), run.lse_s_rounding = filled(rows * p->heads_s, 0);
    run.lse_t_rounding = filled(rows * p->heads_t, 0), run.dot_t_rounding = filled(rows * p->heads_t, 0);

    run.cross_entropy = filled(rows * p->heads_s, 0), run.cross_entropy_rounding = filled(rows * p->heads_s, 0);
    run.entropy = filled(rows * p->heads_s, 0), run.entropy_rounding = filled(rows * p->heads_s, 0);
    run.mass = filled(rows * p->heads_s, 0), run.mass_rounding = filled(rows * p->heads_s, 0);

    const int64_t listed = p->top_k * oracle_block_keys(p);
    run.row_length = (listed > run.teacher.length_k ? listed : run.teacher.length_k) + (p->sinks ? 1 : 0);
    run.keys = malloc(((size_t)run.row_length + 1) * sizeof *run.keys);
    run.seen = malloc(((size_t)run.row_length + 1) * sizeof *run.seen);
    run.outcomes = malloc(((size_t)run.row_length + 1) * sizeof *run.outcomes);
    run.lses = malloc(((size_t)run.group_size + 1) * sizeof *run.lses);
    if (!run.keys || !run.seen || !run.outcomes || !run.lses)
        abort();
    run.scratch = filled((5 * run.group_size + 11) * run.row_length, 0);
    real *next = run.scratch;
    real **const of_heads[] = {&run.x, &run.x_rounding, &run.log_p_head, &run.log_p_head_rounding, &run.log_ratio};
    real **const of_row[] = {&run.y,
                             &run.y_rounding,
                             &run.log_p,
                             &run.log_p_rounding,
                             &run.log_s,
                             &run.log_s_rounding,
                             &run.gradient,
                             &run.gradient_rounding,
                             &run.parts,
                             &run.log_p_key,
                             &run.log_p_key_rounding};
    for (size_t a = 0; a < sizeof of_heads / sizeof *of_heads; a++, next += run.group_size * run.row_length)
        *of_heads[a] = next;
    for (size_t a = 0; a < sizeof of_row / sizeof *of_row; a++, next += run.row_length)
        *of_row[a] = next;
    return run;
}

#endif
