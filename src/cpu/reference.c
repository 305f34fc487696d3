/* The scalar reference: one query row at a time, directly from the formulas in docs/design/maths.md. It is slow;
 * every other kernel is checked against it. */
#include "cpu/reference_row.h"

#include <assert.h>
#include <string.h>

#include "cpu/reference_indexer.h"

static bool usable(void)
{
    return true;
}

static skl_tiles tiles(const skl_problem *problem)
{
    (void)problem;
    const skl_tiles rows = {16, 16};
    return rows;
}

static size_t scratch_size(const skl_problem *problem)
{
    const size_t lse_size = (size_t)skl_group_size(problem) * sizeof(double); /* of a teacher group */
    const size_t row_size = 2 * SKL_DIM_MAX * sizeof(float);                  /* of a gradient, and of dv */
    const size_t index_size = (size_t)(problem->index_heads * (problem->dim_s + 1)) * sizeof(float); /* dq, dw */
    return (lse_size + (row_size > index_size ? row_size : index_size) + 63) / 64 * 64;
}

/* P_hj (phi_j - origin) of one head of a teacher group, with phi = dKL/dP: log P - log S, or -S/P for the reverse KL,
 * where P_h S/P is one exponential. lse and lse_s are the LSEs of the two distributions. Logarithms are in double:
 * those of P_h and P, each rounded to f32, could differ by a step where P_h/P is at most group_size. */
static float head_excess(const known_row *r, const double *lse, int64_t h, int64_t j, float origin)
{
    const bool reverse = r->task->problem->direction == SKL_KL_REVERSE;
    const int64_t head = r->head * skl_group_size(r->task->problem) + h;
    const double log_p = teacher_logit(r, lse, j);
    const double log_s = logit(&r->student, &r->sequence, r->head, r->i, j) - r->lse_s;
    const double log_p_head = logit(&r->teacher, &r->sequence, head, r->i, j) - lse[h];
    const float p_head = (float)exp(log_p_head);
    return reverse ? (float)-exp(log_p_head - log_p + log_s) - p_head * origin
                   : mass_times(p_head, (float)(log_p - log_s) - origin);
}

static float head_dot(const known_row *r, const double *lse, int64_t h, skl_dot_rule rule)
{
    double sum = 0.0;
    for (int64_t j = r->visible.begin; j < r->visible.end; j++)
        sum += (double)head_excess(r, lse, h, j, rule.mean);
    return (float)((double)rule.mean + (double)rule.share * sum);
}

static void forward_row(const skl_task *t, const skl_sequence *sequence, int64_t head, int64_t i)
{
    const skl_problem *const p = t->problem;
    const skl_call *const call = t->call;
    known_row r = row_at(t, sequence, head, i);
    const bool reverse = p->direction == SKL_KL_REVERSE;
    const int64_t group_size = skl_group_size(p);
    double *const lse = (double *)(void *)t->scratch;
    const bool teacher_groups = skl_has_teacher_groups(p);
    for (int64_t h = 0; teacher_groups && h < group_size; h++)
        lse[h] = teacher_lse(&r, head * group_size + h);

    row_sums sums = row_sums_empty();
    row_sums entropy_sums = row_sums_empty(); /* of (A, zeros), for the entropy of A */
    FOR_KEYS(&r, j)
    {
        const double x = teacher_logit(&r, lse, j);
        const double y = student_logit(&r, j);
        sums = row_sums_merge(sums, row_sums_of_pair(reverse ? y : x, reverse ? x : y));
        entropy_sums = row_sums_merge(entropy_sums, row_sums_of_pair(reverse ? y : x, 0.0));
    }
    if (call->op == SKL_OP_PARTIAL) {
        call->states[skl_state_index(p, sequence, head, i)] = row_state_of(&sums);
        return;
    }
    const float lse_a = row_lse(sums.m_a, sums.l_a);
    const float lse_b = row_lse(sums.m_b, sums.l_b);
    const float lse_t = reverse ? lse_b : lse_a;
    r.lse_s = (double)(reverse ? lse_a : lse_b);
    skl_row_set(&call->rows.kl, sequence, head, i, skl_kl_report(row_kl(&sums)));
    skl_row_set(&call->rows.lse_s, sequence, head, i, reverse ? lse_a : lse_b);
    const float entropy = row_entropy(&entropy_sums);
    skl_row_set(&call->rows.entropy, sequence, head, i, entropy);
    skl_row_set(&call->rows.cross_entropy, sequence, head, i, entropy + row_kl(&sums));
    skl_row_set(&call->rows.mass, sequence, head, i, skl_mass(lse_t, call->inputs.lse_t.data != NULL));
    for (int64_t h = 0; h < group_size; h++) {
        if (teacher_groups) /* the sum over visible keys renormalises a given LSE that covers more keys */
            lse[h] = lse_t == -INFINITY ? -INFINITY : lse[h] + (double)lse_t;
        skl_row_set(&call->rows.lse_t, sequence, head * group_size + h, i, teacher_groups ? (float)lse[h] : lse_t);
    }
    const skl_dot_rule rule = row_dot_rule(&sums, reverse, call->inputs.lse_t.data != NULL);
    for (int64_t h = 0; call->rows.dot_t.data != NULL && h < group_size; h++)
        skl_row_set(&call->rows.dot_t, sequence, head * group_size + h, i, head_dot(&r, lse, h, rule));
}

static void forward(const skl_task *t)
{
    const skl_sequence sequence = skl_sequence_at(t->problem, &t->call->inputs, t->call->keys, t->batch);
    const int64_t begin = t->tile * t->tiles.queries;
    const int64_t end = skl_min(begin + t->tiles.queries, sequence.query_count);
    for (int64_t i = begin; i < end; i++)
        forward_row(t, &sequence, t->head, i);
}

static float stored_dot(const known_row *r, int64_t head)
{
    const skl_call *const call = r->task->call;
    const skl_input dots = skl_known_rows(r->task->rows_known, &call->inputs.dot_t, &call->rows.dot_t);
    return skl_row_value(&dots, &r->sequence, head, r->i);
}

/* Gradient of the loss with respect to the logit of key j in head h of the row's teacher group. */
static float teacher_gradient(const known_row *r, const double *lse, int64_t h, int64_t j)
{
    const int64_t group_size = skl_group_size(r->task->problem);
    const bool reverse = r->task->problem->direction == SKL_KL_REVERSE;
    const double x_h = logit(&r->teacher, &r->sequence, r->head * group_size + h, r->i, j);
    const float slope = r->grad * softcap_slope(&r->teacher, x_h) / (float)group_size;
    if (group_size > 1)
        return slope * head_excess(r, lse, h, j, stored_dot(r, r->head * group_size + h));
    const float log_p = (float)(x_h - lse[0]);
    const float log_s = (float)(logit(&r->student, &r->sequence, r->head, r->i, j) - r->lse_s);
    return slope * (reverse ? expf(log_p) - expf(log_s) : mass_times(expf(log_p), log_p - log_s - r->kl));
}

/* sum += weight * row of `tensor` */
static void add_row(float *sum, float weight, const skl_input *tensor, skl_dtype dtype, int64_t row, int64_t dim)
{
    for (int64_t c = 0; c < dim; c++)
        sum[c] += weight * skl_load(tensor->data, dtype, row + c);
}

static void store_row(const skl_side *side, const skl_output *grad, int64_t row, const float *sum)
{
    for (int64_t c = 0; grad->data != NULL && c < side->dim; c++)
        skl_store(grad->data, side->grad_dtype, row + c, side->scale * sum[c]);
}

static void backward_queries(const skl_task *t)
{
    const skl_sequence sequence = skl_sequence_at(t->problem, &t->call->inputs, t->call->keys, t->batch);
    const int64_t group_size = skl_group_size(t->problem);
    double *const lse = (double *)(void *)t->scratch;
    float *const sum = (float *)(void *)(lse + group_size);
    const int64_t begin = t->tile * t->tiles.queries;
    const int64_t end = skl_min(begin + t->tiles.queries, sequence.query_count);
    for (int64_t i = begin; i < end; i++) {
        known_row r = row_at(t, &sequence, t->head, i);
        load_known(&r, lse);
        for (int64_t h = -1; h < group_size; h++) { /* -1: the student; then the teacher heads of its group */
            const skl_side *const side = h < 0 ? &r.student : &r.teacher;
            const int64_t head = h < 0 ? t->head : t->head * group_size + h;
            if (side->dq->data == NULL)
                continue;
            memset(sum, 0, SKL_DIM_MAX * sizeof *sum);
            for (int64_t j = r.visible.begin; j < r.visible.end; j++) {
                float weight = h < 0 ? student_gradient(&r, lse, j) : teacher_gradient(&r, lse, h, j);
                if (attends(&r))
                    weight += attention_pair_at(&r, j).gradient;
                const int64_t k = SKL_ROW(*side->k, sequence.batch, skl_key_head(side, head), sequence.key_begin + j);
                add_row(sum, weight, side->k, side->dtype, k, side->dim);
            }
            store_row(side, side->dq, SKL_ROW(*side->dq, sequence.batch, head, sequence.query_begin + i), sum);
        }
    }
}

/* Adds a pair to dk and, in skl_attention_backward, to dv. */
static void add_pair(const known_row *r, const double *lse, const skl_side *side, int64_t head, int64_t j, float *dk,
                     float *dv)
{
    const skl_sequence *const s = &r->sequence;
    const int64_t q = SKL_ROW(*side->q, s->batch, head, s->query_begin + r->i);
    float weight = r->task->teacher_side ? teacher_gradient(r, lse, head % skl_group_size(r->task->problem), j)
                                         : student_gradient(r, lse, j);
    if (attends(r)) {
        const attention_pair pair = attention_pair_at(r, j);
        const skl_input *const do_s = &r->task->call->attention->do_s;
        weight += pair.gradient;
        add_row(dv, pair.s, do_s, side->dtype, SKL_ROW(*do_s, s->batch, head, s->query_begin + r->i), side->dim);
    }
    add_row(dk, weight, side->q, side->dtype, q, side->dim);
}

static void backward_keys(const skl_task *t)
{
    const skl_sequence sequence = skl_sequence_at(t->problem, &t->call->inputs, t->call->keys, t->batch);
    const int64_t group_size = skl_group_size(t->problem);
    const skl_side side = t->teacher_side ? skl_teacher_of(t->problem, t->call) : skl_student_of(t->problem, t->call);
    const skl_output *const dv_s = t->call->attention != NULL ? &t->call->attention->dv_s : NULL;
    const int64_t sharing = side.heads / side.key_heads;
    const int64_t key_rows = t->problem->packed ? sequence.key_count : t->problem->len_k;
    double *const lse = (double *)(void *)t->scratch;
    float *const sum = (float *)(void *)(lse + group_size), *const dv = sum + SKL_DIM_MAX;
    const int64_t begin = t->tile * t->tiles.keys;
    const int64_t end = skl_min(begin + t->tiles.keys, key_rows);
    for (int64_t j = begin; j < end; j++) {
        const skl_range queries = skl_queries_of_key(t->problem, &sequence, j);
        memset(sum, 0, 2 * SKL_DIM_MAX * sizeof *sum);
        for (int64_t head = t->head * sharing; head < (t->head + 1) * sharing; head++)
            for (int64_t i = queries.begin; i < queries.end; i++) {
                known_row r = row_at(t, &sequence, t->teacher_side ? head / group_size : head, i);
                assert(r.visible.begin <= j && j < r.visible.end);
                load_known(&r, lse);
                if (!is_silent(&r))
                    add_pair(&r, lse, &side, head, j, sum, dv);
            }
        store_row(&side, side.dk, SKL_ROW(*side.dk, sequence.batch, t->head, sequence.key_begin + j), sum);
        if (dv_s == NULL)
            continue;
        skl_side values = side;
        values.scale = 1.0F;
        store_row(&values, dv_s, SKL_ROW(*dv_s, sequence.batch, t->head, sequence.key_begin + j), dv);
    }
}

static const skl_cpu_work attention_work = {
    .tiles = tiles,
    .scratch_size = scratch_size,
    .forward = forward,
    .backward_queries = backward_queries,
    .backward_keys = backward_keys,
};

static const skl_cpu_work indexer_work = {
    .tiles = tiles,
    .scratch_size = scratch_size,
    .forward = forward,
    .backward_queries = skl_reference_indexer_queries,
    .backward_keys = skl_reference_indexer_keys,
};

const skl_cpu_kernel skl_cpu_reference = {
    .name = "cpu_reference",
    .detail = "scalar, one row at a time",
    .usable = usable,
    .attention = &attention_work,
    .indexer = &indexer_work,
    .sparse_indexer = &indexer_work,
};
