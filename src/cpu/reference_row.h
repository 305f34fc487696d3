/* One row of the scalar reference: its keys, its logits and its row vectors. */
#ifndef SKL_CPU_REFERENCE_ROW_H
#define SKL_CPU_REFERENCE_ROW_H

#include <math.h>

#include "base/indices.h"
#include "cpu/kernel.h"
#include "cpu/row_sums.h"

/* softcap(scale <q[i], k[j]>), rounded to f32 like the LSEs: see row_sums.h. Differences of the two are in double. */
static inline double logit(const skl_side *side, const skl_sequence *s, int64_t head, int64_t i, int64_t j)
{
    const int64_t q = SKL_ROW(*side->q, s->batch, head, s->query_begin + i);
    const int64_t k = SKL_ROW(*side->k, s->batch, skl_key_head(side, head), s->key_begin + j);
    float dot = 0.0F;
    for (int64_t c = 0; c < side->dim; c++)
        dot += skl_load(side->q->data, side->dtype, q + c) * skl_load(side->k->data, side->dtype, k + c);
    const double scaled = (double)dot * (double)side->scale;
    const double cap = (double)side->softcap;
    return (double)(float)(cap > 0.0 ? cap * tanh(scaled / cap) : scaled);
}

static inline float softcap_slope(const skl_side *side, double logit)
{
    const float ratio = side->softcap > 0.0F ? (float)logit / side->softcap : 0.0F;
    return 1.0F - ratio * ratio;
}

/* One row with its row vectors. */
typedef struct known_row {
    const skl_task *task;
    skl_side teacher, student;
    skl_sequence sequence;
    skl_range visible;
    const int32_t *indices; /* top_k keys of the row; NULL: all visible keys */
    int64_t key_count;      /* entries of `indices`, or visible keys */
    int64_t head, i;        /* student head, query */
    double lse_s;
    double d; /* skl_attention_backward: <do, o> */
    float kl, grad;
} known_row;

static inline known_row row_at(const skl_task *t, const skl_sequence *sequence, int64_t head, int64_t i)
{
    known_row r = {.task = t,
                   .teacher = skl_teacher_of(t->problem, t->call),
                   .student = skl_student_of(t->problem, t->call),
                   .sequence = *sequence,
                   .visible = skl_visible(t->problem, sequence, i),
                   .head = head,
                   .i = i};
    const bool sparse = t->problem->top_k > 0;
    r.indices = sparse ? skl_row_indices(&t->call->inputs, sequence, head, i) : NULL;
    r.key_count = sparse ? t->problem->top_k : r.visible.end - r.visible.begin;
    return r;
}

/* The n-th key of a row; -1: none, since some entries of `indices` may be unused or masked. */
static inline int64_t key_at(const known_row *r, int64_t n)
{
    if (r->indices == NULL)
        return r->visible.begin + n;
    return skl_index_is_visible(r->indices[n], r->visible) ? r->indices[n] : -1;
}

#define FOR_KEYS(r, j)                                                                                               \
    for (int64_t n_ = 0, j; n_ < (r)->key_count; n_++)                                                               \
        if ((j = key_at(r, n_)) >= 0)

static inline int64_t keys_seen(const known_row *r)
{
    int64_t count = 0;
    FOR_KEYS(r, j)
    count++;
    return count;
}

/* <q_g[i], k[j]> of an index head. */
static inline float index_dot(const known_row *r, int64_t g, int64_t j)
{
    const skl_side *const side = &r->student;
    const int64_t head = r->head * r->task->problem->index_heads + g;
    const int64_t q = SKL_ROW(*side->q, r->sequence.batch, head, r->sequence.query_begin + r->i);
    const int64_t k = SKL_ROW(*side->k, r->sequence.batch, skl_key_head(side, r->head), r->sequence.key_begin + j);
    float dot = 0.0F;
    for (int64_t c = 0; c < side->dim; c++)
        dot += skl_load(side->q->data, side->dtype, q + c) * skl_load(side->k->data, side->dtype, k + c);
    return dot;
}

/* Whether a dot of an index head passes the ReLU. NaN passes, so that it shows in the result. */
static inline bool index_active(const known_row *r, float dot)
{
    return r->task->problem->index_linear || !(dot <= 0.0F);
}

static inline float index_weight(const known_row *r, int64_t g)
{
    const skl_input *const w = &r->task->call->inputs.w_s;
    const int64_t row = SKL_ROW(*w, r->sequence.batch, r->head, r->sequence.query_begin + r->i);
    return skl_load(w->data, r->task->problem->dtype_w, row + g);
}

/* Logit of the student: of its head, or scale sum_g w_g relu(<q_g, k>) of an indexer. */
static inline double student_logit(const known_row *r, int64_t j)
{
    if (!skl_is_indexer(r->task->problem))
        return logit(&r->student, &r->sequence, r->head, r->i, j);
    double sum = 0.0;
    for (int64_t g = 0; g < r->task->problem->index_heads; g++) {
        const float dot = index_dot(r, g, j);
        if (index_active(r, dot))
            sum += (double)index_weight(r, g) * (double)dot;
    }
    return (double)(float)((double)r->student.scale * sum);
}

static inline double lse_of(const known_row *r, const skl_input *rows, int64_t head)
{
    return (double)skl_row_value(rows, &r->sequence, head, r->i);
}

/* p * value, but 0 if p is 0, where a logit of -inf makes the value infinite: 0 log 0 = 0. */
static inline float mass_times(float p, float value)
{
    return p == 0.0F ? 0.0F : p * value;
}

/* log sum_j e^logit over the visible keys of one head. */
static inline double lse_computed(const known_row *r, const skl_side *side, int64_t head)
{
    row_sums sums = row_sums_empty();
    FOR_KEYS(r, j)
    {
        const double x = logit(side, &r->sequence, head, r->i, j);
        sums = row_sums_merge(sums, row_sums_of_pair(x, x));
    }
    return (double)row_lse(sums.m_a, sums.l_a);
}

static inline double teacher_lse(const known_row *r, int64_t head)
{
    const skl_input *const given = &r->task->call->inputs.lse_t;
    return given->data != NULL ? lse_of(r, given, head) : lse_computed(r, &r->teacher, head);
}

/* Logit of key j for the teacher: of its head, or the logarithm of the mean probability of its teacher group. `lse`
 * holds the LSEs of the heads of the group. */
static inline double teacher_logit(const known_row *r, const double *lse, int64_t j)
{
    const int64_t group_size = skl_group_size(r->task->problem);
    if (!skl_has_teacher_groups(r->task->problem))
        return logit(&r->teacher, &r->sequence, r->head, r->i, j);
    row_sums sums = row_sums_empty();
    for (int64_t h = 0; h < group_size; h++) {
        const double log_p_head = logit(&r->teacher, &r->sequence, r->head * group_size + h, r->i, j) - lse[h];
        sums = row_sums_merge(sums, row_sums_of_pair(log_p_head, log_p_head));
    }
    return sums.m_a + log(sums.l_a / (double)group_size);
}

/* The call computes the gradients of the student's attention as well. */
static inline bool attends(const known_row *r)
{
    return r->task->call->op == SKL_OP_ATTENTION_BACKWARD;
}

/* A row without gradients. */
static inline bool is_silent(const known_row *r)
{
    return r->grad == 0.0F && !attends(r);
}

/* <u, v> of two rows of dim_s elements. */
static inline double dot_of(const known_row *r, const skl_input *u, int64_t row_u, const skl_input *v, int64_t row_v)
{
    const skl_dtype dtype = r->student.dtype;
    double dot = 0.0;
    for (int64_t c = 0; c < r->student.dim; c++)
        dot += (double)skl_load(u->data, dtype, row_u + c) * (double)skl_load(v->data, dtype, row_v + c);
    return dot;
}

/* D = <do, o> = sum_j S_j dP_j */
static inline double output_dot(const known_row *r)
{
    const skl_attention *const of = r->task->call->attention;
    const int64_t row = r->sequence.query_begin + r->i;
    return dot_of(r, &of->do_s, SKL_ROW(of->do_s, r->sequence.batch, r->head, row), &of->o_s,
                  SKL_ROW(of->o_s, r->sequence.batch, r->head, row));
}

/* Loads LSEs, KL and upstream gradient of a row for a backward. If the upstream gradient is 0, the row contributes no
 * gradient even if it holds NaN: it then sees no key, since 0 * NaN is NaN. If the LSEs are those of the visible
 * keys, a row with one key has P = S = 1, and no gradient. */
static inline void load_known(known_row *r, double *lse)
{
    const skl_task *const t = r->task;
    const skl_inputs *const in = &t->call->inputs;
    const int64_t group_size = skl_group_size(t->problem);
    for (int64_t h = 0; h < group_size; h++)
        lse[h] = lse_of(r, &in->lse_t, r->head * group_size + h);
    r->lse_s = lse_of(r, &in->lse_s, r->head);
    r->grad = in->grad_kl.data != NULL ? skl_row_value(&in->grad_kl, &r->sequence, r->head, r->i) : 1.0F;
    const skl_input kl = skl_known_rows(t->rows_known, &in->kl, &t->call->rows.kl);
    r->kl = kl.data != NULL ? skl_row_value(&kl, &r->sequence, r->head, r->i) : 0.0F;
    if (skl_op_is_one_pass(t->call->op) && !t->problem->sinks && keys_seen(r) == 1)
        r->grad = 0.0F;
    r->d = attends(r) ? output_dot(r) : 0.0;
    if (!is_silent(r))
        return;
    r->visible.end = r->visible.begin;
    r->key_count = 0;
}

/* Gradient of the loss with respect to the student's logit of key j, in natural units. */
static inline float student_gradient(const known_row *r, const double *lse, int64_t j)
{
    if (r->grad == 0.0F)
        return 0.0F;
    const double y = student_logit(r, j);
    const double x = teacher_logit(r, lse, j);
    const float log_p = (float)(skl_has_teacher_groups(r->task->problem) ? x : x - lse[0]);
    const float log_s = (float)(y - r->lse_s);
    const bool reverse = r->task->problem->direction == SKL_KL_REVERSE;
    const float dy = reverse ? mass_times(expf(log_s), log_s - log_p - r->kl) : expf(log_s) - expf(log_p);
    return r->grad * dy * softcap_slope(&r->student, y);
}

/* S_j, and the gradient S_j (dP_j - D) of its logit that comes from the output of the student's attention. */
typedef struct attention_pair {
    float s, gradient;
} attention_pair;

static inline attention_pair attention_pair_at(const known_row *r, int64_t j)
{
    const skl_attention *const of = r->task->call->attention;
    const skl_sequence *const s = &r->sequence;
    const double y = student_logit(r, j);
    const double p = exp(y - r->lse_s);
    const double dp = dot_of(r, &of->do_s, SKL_ROW(of->do_s, s->batch, r->head, s->query_begin + r->i), &of->v_s,
                             SKL_ROW(of->v_s, s->batch, skl_key_head(&r->student, r->head), s->key_begin + j));
    const attention_pair pair = {(float)p, (float)(p * (dp - r->d) * (double)softcap_slope(&r->student, y))};
    return pair;
}

#endif
