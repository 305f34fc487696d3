/* One row of the scalar reference: its keys, its logits, and what is known of it. */
#ifndef SKL_CPU_REFERENCE_ROW_H
#define SKL_CPU_REFERENCE_ROW_H

#include <math.h>

#include "base/kl_math.h"
#include "base/indices.h"
#include "cpu/kernel.h"

/* softcap(scale <q[i], k[j]>) in base 2. Logits and LSEs are doubles, so that their difference keeps its bits when
 * both are large. */
static inline double logit(const skl_side *side, const skl_sequence *s, int64_t head, int64_t i, int64_t j)
{
    const int64_t q = SKL_ROW(*side->q, s->batch, head, s->query_begin + i);
    const int64_t k = SKL_ROW(*side->k, s->batch, skl_key_head(side, head), s->key_begin + j);
    float dot = 0.0F;
    for (int64_t c = 0; c < side->dim; c++)
        dot += skl_load(side->q->data, side->dtype, q + c) * skl_load(side->k->data, side->dtype, k + c);
    const double scaled = (double)dot * (double)side->scale;
    const double cap = (double)side->softcap;
    return SKL_LOG2E_DOUBLE * (cap > 0.0 ? cap * tanh(scaled / cap) : scaled);
}

static inline float softcap_slope(const skl_side *side, double logit2)
{
    const float ratio = side->softcap > 0.0F ? (float)logit2 * SKL_LN2 / side->softcap : 0.0F;
    return 1.0F - ratio * ratio;
}

/* One row with what is known of it. LSEs and logits in base 2. */
typedef struct known_row {
    const skl_task *task;
    skl_side teacher, student;
    skl_sequence sequence;
    skl_range visible;
    const int32_t *selected; /* the row's list of keys, or NULL: it sees all that are visible */
    int64_t key_count;       /* of the list or the range */
    int64_t head, i;         /* student head, query */
    double lse_s;
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
    r.selected = sparse ? skl_row_indices(&t->call->inputs, sequence, head, i) : NULL;
    r.key_count = sparse ? t->problem->top_k : r.visible.end - r.visible.begin;
    return r;
}

/* The n-th key of a row; -1: none, for lists have gaps. */
static inline int64_t key_at(const known_row *r, int64_t n)
{
    if (r->selected == NULL)
        return r->visible.begin + n;
    return skl_index_is_visible(r->selected[n], r->visible) ? r->selected[n] : -1;
}

#define FOR_KEYS(r, j)                                                                                               \
    for (int64_t n_ = 0, j; n_ < (r)->key_count; n_++)                                                               \
        if ((j = key_at(r, n_)) >= 0)

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

/* Whether a dot of an index head passes the ReLU; NaN does, to be seen. */
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

/* The student's logit in base 2: of its one head, or scale sum_g w_g relu(<q_g, k>). */
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
    return SKL_LOG2E_DOUBLE * (double)r->student.scale * sum;
}

static inline double lse2_of(const known_row *r, const skl_input *rows, int64_t head)
{
    return (double)skl_row_value(rows, &r->sequence, head, r->i) * SKL_LOG2E_DOUBLE;
}

/* A state that is summed up in parts: over ten thousands of keys, one long f32 sum would lose digits. */
typedef struct long_state {
    skl_row_state whole, part;
    int part_count;
} long_state;

static inline long_state long_state_empty(void)
{
    const long_state state = {skl_state_empty(), skl_state_empty(), 0};
    return state;
}

static inline skl_row_state long_state_total(const long_state *state)
{
    return skl_state_merge(state->whole, state->part);
}

/* p * value; 0 without mass, where a logit of -inf makes the value infinite: 0 log 0 = 0. */
static inline float mass_times(float p, float value)
{
    return p == 0.0F ? 0.0F : p * value;
}

/* One pair of logits. A stabiliser is a float; what it lacks of its logit goes into the sums. A logit of -inf has no
 * mass, and leaves the stabiliser of a state as it is. */
static inline skl_row_state state_of_pair(double a, double b)
{
    const float m_a = (float)a, m_b = (float)b;
    const float u = m_a == -INFINITY ? -INFINITY : (float)(a - (double)m_a);
    const float v = m_b == -INFINITY ? -INFINITY : (float)(b - (double)m_b);
    const float p = exp2f(u);
    const skl_row_state state = {m_a, p, m_b, exp2f(v), mass_times(p, u - v)};
    return state;
}

static inline void long_state_add(long_state *state, double a, double b)
{
    enum { PART_MAX = 128 };
    state->part = skl_state_merge(state->part, state_of_pair(a, b));
    state->part_count++;
    if (state->part_count < PART_MAX)
        return;
    state->whole = long_state_total(state);
    state->part = skl_state_empty();
    state->part_count = 0;
}

/* log2 of the sum of 2^logit over the visible keys, for one head of one side. */
static inline double lse2_computed(const known_row *r, const skl_side *side, int64_t head)
{
    long_state sum = long_state_empty();
    FOR_KEYS(r, j)
    {
        const double x = logit(side, &r->sequence, head, r->i, j);
        long_state_add(&sum, x, x);
    }
    const skl_row_state state = long_state_total(&sum);
    return state.l_a == 0.0F ? -INFINITY : (double)state.m_a + log2((double)state.l_a);
}

static inline double teacher_lse2(const known_row *r, int64_t head)
{
    const skl_input *const given = &r->task->call->inputs.lse_t;
    return given->data != NULL ? lse2_of(r, given, head) : lse2_computed(r, &r->teacher, head);
}

/* The teacher's logit of key j: of its one head, or log2 of the mean of its heads' probabilities. `lse` holds the
 * LSEs of the group's heads. */
static inline double teacher_logit(const known_row *r, const double *lse, int64_t j)
{
    const int64_t group = skl_group_size(r->task->problem);
    if (!skl_has_teacher_groups(r->task->problem))
        return logit(&r->teacher, &r->sequence, r->head, r->i, j);
    skl_row_state sum = skl_state_empty();
    for (int64_t h = 0; h < group; h++) {
        const float z = (float)(logit(&r->teacher, &r->sequence, r->head * group + h, r->i, j) - lse[h]);
        sum = skl_state_merge(sum, state_of_pair(z, z));
    }
    return (double)sum.m_a + log2((double)sum.l_a / (double)group);
}

/* Fills in what a backward knows of a row: LSEs, KL, upstream gradient. Where that is 0 the row has no gradients,
 * whatever it holds, as if it saw no key: 0 * NaN is NaN. */
static inline void load_known(known_row *r, double *lse)
{
    const skl_task *const t = r->task;
    const skl_inputs *const in = &t->call->inputs;
    const int64_t group = skl_group_size(t->problem);
    for (int64_t h = 0; h < group; h++)
        lse[h] = lse2_of(r, &in->lse_t, r->head * group + h);
    r->lse_s = lse2_of(r, &in->lse_s, r->head);
    r->grad = in->grad_kl.data != NULL ? skl_row_value(&in->grad_kl, &r->sequence, r->head, r->i) : 1.0F;
    const skl_input kl = skl_known_rows(t->rows_known, &in->kl, &t->call->rows.kl);
    r->kl = kl.data != NULL ? skl_row_value(&kl, &r->sequence, r->head, r->i) : 0.0F;
    if (r->grad != 0.0F)
        return;
    r->visible.end = r->visible.begin;
    r->key_count = 0;
}

/* Gradient of the loss in the student's logit (natural units) of key j. */
static inline float student_gradient(const known_row *r, const double *lse, int64_t j)
{
    const double y = student_logit(r, j);
    const double x = teacher_logit(r, lse, j);
    const float u = (float)(skl_has_teacher_groups(r->task->problem) ? x : x - lse[0]);
    const float v = (float)(y - r->lse_s);
    const float dy = r->task->problem->direction == SKL_KL_REVERSE ? mass_times(exp2f(v), SKL_LN2 * (v - u) - r->kl)
                                                                   : exp2f(v) - exp2f(u);
    return r->grad * dy * softcap_slope(&r->student, y);
}

#endif
