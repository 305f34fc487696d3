/* The scalar reference: one query row at a time, straight from docs/maths.md. It is slow, and what every other
 * kernel is checked against. */
#include "cpu/kernel.h"

#include <assert.h>
#include <math.h>
#include <string.h>

#include "base/kl_math.h"

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
    const size_t lse_size = (size_t)skl_group(problem) * sizeof(double); /* of the teacher heads of a group */
    const size_t row_size = SKL_DIM_MAX * sizeof(float);                 /* of a gradient */
    return (lse_size + row_size + 63) / 64 * 64;
}

/* softcap(scale <q[i], k[j]>) in base 2. Logits and LSEs are doubles, so that their difference keeps its bits when
 * both are large. */
static double logit(const skl_side *side, const skl_sequence *s, int64_t head, int64_t i, int64_t j)
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

static float softcap_slope(const skl_side *side, double logit2)
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
    int64_t head, i; /* student head, query */
    double lse_s;
    float kl, grad;
} known_row;

static known_row row_at(const skl_task *t, const skl_sequence *sequence, int64_t head, int64_t i)
{
    const known_row r = {.task = t,
                         .teacher = skl_teacher_of(t->problem, t->call),
                         .student = skl_student_of(t->problem, t->call),
                         .sequence = *sequence,
                         .visible = skl_visible(t->problem, sequence, i),
                         .head = head,
                         .i = i};
    return r;
}

static double lse2_of(const known_row *r, const skl_input *rows, int64_t head)
{
    return (double)skl_row_value(rows, &r->sequence, head, r->i) * SKL_LOG2E_DOUBLE;
}

/* A state that is summed up in parts: over ten thousands of keys, one long f32 sum would lose digits. */
typedef struct long_state {
    skl_row_state whole, part;
    int part_count;
} long_state;

static long_state long_state_empty(void)
{
    const long_state state = {skl_state_empty(), skl_state_empty(), 0};
    return state;
}

static skl_row_state long_state_total(const long_state *state)
{
    return skl_state_merge(state->whole, state->part);
}

/* One pair of logits. A stabiliser is a float; what it lacks of its logit goes into the sums. */
static skl_row_state state_of_pair(double a, double b)
{
    const float m_1 = (float)a, m_2 = (float)b;
    const float u = (float)(a - (double)m_1), v = (float)(b - (double)m_2);
    const float p = exp2f(u);
    const skl_row_state state = {m_1, p, m_2, exp2f(v), p * (u - v)};
    return state;
}

static void long_state_add(long_state *state, double a, double b)
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
static double lse2_computed(const known_row *r, const skl_side *side, int64_t head)
{
    long_state sum = long_state_empty();
    for (int64_t j = r->visible.begin; j < r->visible.end; j++) {
        const double x = logit(side, &r->sequence, head, r->i, j);
        long_state_add(&sum, x, x);
    }
    const skl_row_state state = long_state_total(&sum);
    return state.l_1 == 0.0F ? -INFINITY : (double)state.m_1 + log2((double)state.l_1);
}

static double teacher_lse2(const known_row *r, int64_t head)
{
    const skl_input *const given = &r->task->call->inputs.lse_t;
    return given->data != NULL ? lse2_of(r, given, head) : lse2_computed(r, &r->teacher, head);
}

/* The teacher's logit of key j: of its one head, or log2 of the mean of its heads' probabilities. `lse` holds the
 * LSEs of the group's heads. */
static double teacher_logit(const known_row *r, const double *lse, int64_t j)
{
    const int64_t group = skl_group(r->task->problem);
    if (group == 1)
        return logit(&r->teacher, &r->sequence, r->head, r->i, j);
    skl_row_state sum = skl_state_empty();
    for (int64_t h = 0; h < group; h++) {
        const float z = (float)(logit(&r->teacher, &r->sequence, r->head * group + h, r->i, j) - lse[h]);
        sum = skl_state_add(sum, z, z);
    }
    return (double)sum.m_1 + log2((double)sum.l_1 / (double)group);
}

/* P_hj (phi_j - origin) of one teacher head of a group, phi = dKL/dP: log P - log S, or -S/P in reverse, where P_h
 * S/P is one exponential. lse and lse_s normalise both distributions. */
static float head_excess(const known_row *r, const double *lse, int64_t h, int64_t j, float origin)
{
    const bool reverse = r->task->problem->direction == SKL_KL_REVERSE;
    const int64_t head = r->head * skl_group(r->task->problem) + h;
    const float u = (float)teacher_logit(r, lse, j);
    const float v = (float)(logit(&r->student, &r->sequence, r->head, r->i, j) - r->lse_s);
    const float z = (float)(logit(&r->teacher, &r->sequence, head, r->i, j) - lse[h]);
    return reverse ? -exp2f(z - u + v) - exp2f(z) * origin : exp2f(z) * (SKL_LN2 * (u - v) - origin);
}

static float head_dot(const known_row *r, const double *lse, int64_t h, skl_dot_rule rule)
{
    float sum = 0.0F;
    for (int64_t j = r->visible.begin; j < r->visible.end; j++)
        sum += head_excess(r, lse, h, j, rule.mean);
    return rule.mean + rule.share * sum;
}

static void forward_row(const skl_task *t, const skl_sequence *sequence, int64_t head, int64_t i)
{
    const skl_problem *const p = t->problem;
    const skl_call *const call = t->call;
    known_row r = row_at(t, sequence, head, i);
    const bool reverse = p->direction == SKL_KL_REVERSE;
    const int64_t group = skl_group(p);
    double *const lse = (double *)(void *)t->scratch;
    for (int64_t h = 0; group > 1 && h < group; h++)
        lse[h] = teacher_lse2(&r, head * group + h);

    long_state sum = long_state_empty();
    for (int64_t j = r.visible.begin; j < r.visible.end; j++) {
        const double x = teacher_logit(&r, lse, j);
        const double y = logit(&r.student, sequence, head, i, j);
        long_state_add(&sum, reverse ? y : x, reverse ? x : y);
    }
    const skl_row_state state = long_state_total(&sum);
    if (call->op == SKL_OP_PARTIAL) {
        call->states[skl_state_index(p, sequence, head, i)] = state;
        return;
    }
    const float lse_1 = skl_lse(state.m_1, state.l_1);
    const float lse_2 = skl_lse(state.m_2, state.l_2);
    const float own_t = reverse ? lse_2 : lse_1;
    r.lse_s = (double)(reverse ? lse_1 : lse_2) * SKL_LOG2E_DOUBLE;
    skl_row_set(&call->rows.kl, sequence, head, i, skl_kl_report(skl_state_kl(&state)));
    skl_row_set(&call->rows.lse_s, sequence, head, i, reverse ? lse_1 : lse_2);
    for (int64_t h = 0; h < group; h++) {
        if (group > 1) /* the group's own sum renormalises a given LSE that covers more keys */
            lse[h] = own_t == -INFINITY ? -INFINITY : lse[h] + (double)own_t * SKL_LOG2E_DOUBLE;
        skl_row_set(&call->rows.lse_t, sequence, head * group + h, i,
                    group > 1 ? (float)(lse[h] * SKL_LN2_DOUBLE) : own_t);
    }
    const skl_dot_rule rule = skl_dot_rule_of(&state, reverse, call->inputs.lse_t.data != NULL);
    for (int64_t h = 0; call->rows.dot_t.data != NULL && h < group; h++)
        skl_row_set(&call->rows.dot_t, sequence, head * group + h, i, head_dot(&r, lse, h, rule));
}

static void forward(const skl_task *t)
{
    const skl_sequence sequence = skl_sequence_at(t->problem, &t->call->inputs, t->call->keys, t->batch);
    const int64_t begin = t->tile * t->tiles.queries;
    const int64_t end = skl_min(begin + t->tiles.queries, sequence.query_count);
    for (int64_t i = begin; i < end; i++)
        forward_row(t, &sequence, t->head, i);
}

/* Fills in what a backward knows of a row: LSEs, KL, upstream gradient. */
static void load_known(known_row *r, double *lse)
{
    const skl_task *const t = r->task;
    const skl_inputs *const in = &t->call->inputs;
    const int64_t group = skl_group(t->problem);
    for (int64_t h = 0; h < group; h++)
        lse[h] = lse2_of(r, &in->lse_t, r->head * group + h);
    r->lse_s = lse2_of(r, &in->lse_s, r->head);
    r->grad = in->grad_kl.data != NULL ? skl_row_value(&in->grad_kl, &r->sequence, r->head, r->i) : 1.0F;
    const skl_input kl = skl_known_rows(t->rows_known, &in->kl, &t->call->rows.kl);
    r->kl = kl.data != NULL ? skl_row_value(&kl, &r->sequence, r->head, r->i) : 0.0F;
}

static float stored_dot(const known_row *r, int64_t head)
{
    const skl_call *const call = r->task->call;
    const skl_input dots = skl_known_rows(r->task->rows_known, &call->inputs.dot_t, &call->rows.dot_t);
    return skl_row_value(&dots, &r->sequence, head, r->i);
}

/* Gradient of the loss in the student's logit (natural units) of key j. */
static float student_gradient(const known_row *r, const double *lse, int64_t j)
{
    const double y = logit(&r->student, &r->sequence, r->head, r->i, j);
    const double x = teacher_logit(r, lse, j);
    const float u = (float)(skl_group(r->task->problem) == 1 ? x - lse[0] : x);
    const float v = (float)(y - r->lse_s);
    const float dy =
        r->task->problem->direction == SKL_KL_REVERSE ? exp2f(v) * (SKL_LN2 * (v - u) - r->kl) : exp2f(v) - exp2f(u);
    return r->grad * dy * softcap_slope(&r->student, y);
}

/* The same in the logit of teacher head h of the row's group. */
static float teacher_gradient(const known_row *r, const double *lse, int64_t h, int64_t j)
{
    const int64_t group = skl_group(r->task->problem);
    const bool reverse = r->task->problem->direction == SKL_KL_REVERSE;
    const double x_h = logit(&r->teacher, &r->sequence, r->head * group + h, r->i, j);
    const float slope = r->grad * softcap_slope(&r->teacher, x_h) / (float)group;
    if (group > 1)
        return slope * head_excess(r, lse, h, j, stored_dot(r, r->head * group + h));
    const float z = (float)(x_h - lse[0]);
    const float v = (float)(logit(&r->student, &r->sequence, r->head, r->i, j) - r->lse_s);
    return slope * (reverse ? exp2f(z) - exp2f(v) : exp2f(z) * (SKL_LN2 * (z - v) - r->kl));
}

/* sum += weight * row of `tensor` */
static void add_row(float *sum, float weight, const skl_input *tensor, skl_dtype dtype, int64_t row, int64_t dim)
{
    for (int64_t c = 0; c < dim; c++)
        sum[c] += weight * skl_load(tensor->data, dtype, row + c);
}

static void store_row(const skl_side *side, const skl_output *grad, int64_t row, const float *sum)
{
    for (int64_t c = 0; c < side->dim; c++)
        skl_store(grad->data, side->grad_dtype, row + c, side->scale * sum[c]);
}

static void backward_queries(const skl_task *t)
{
    const skl_sequence sequence = skl_sequence_at(t->problem, &t->call->inputs, t->call->keys, t->batch);
    const int64_t group = skl_group(t->problem);
    double *const lse = (double *)(void *)t->scratch;
    float *const sum = (float *)(void *)(lse + group);
    const int64_t begin = t->tile * t->tiles.queries;
    const int64_t end = skl_min(begin + t->tiles.queries, sequence.query_count);
    for (int64_t i = begin; i < end; i++) {
        known_row r = row_at(t, &sequence, t->head, i);
        load_known(&r, lse);
        for (int64_t h = -1; h < group; h++) { /* -1: the student; then the teacher heads of its group */
            const skl_side *const side = h < 0 ? &r.student : &r.teacher;
            const int64_t head = h < 0 ? t->head : t->head * group + h;
            if (side->dq->data == NULL)
                continue;
            memset(sum, 0, SKL_DIM_MAX * sizeof *sum);
            for (int64_t j = r.visible.begin; j < r.visible.end; j++) {
                const float weight = h < 0 ? student_gradient(&r, lse, j) : teacher_gradient(&r, lse, h, j);
                const int64_t k = SKL_ROW(*side->k, sequence.batch, skl_key_head(side, head), sequence.key_begin + j);
                add_row(sum, weight, side->k, side->dtype, k, side->dim);
            }
            store_row(side, side->dq, SKL_ROW(*side->dq, sequence.batch, head, sequence.query_begin + i), sum);
        }
    }
}

static void backward_keys(const skl_task *t)
{
    const skl_sequence sequence = skl_sequence_at(t->problem, &t->call->inputs, t->call->keys, t->batch);
    const int64_t group = skl_group(t->problem);
    const skl_side side = t->teacher_side ? skl_teacher_of(t->problem, t->call) : skl_student_of(t->problem, t->call);
    const int64_t sharing = side.heads / side.key_heads;
    const int64_t key_rows = t->problem->packed ? sequence.key_count : t->problem->len_k;
    double *const lse = (double *)(void *)t->scratch;
    float *const sum = (float *)(void *)(lse + group);
    const int64_t begin = t->tile * t->tiles.keys;
    const int64_t end = skl_min(begin + t->tiles.keys, key_rows);
    for (int64_t j = begin; j < end; j++) {
        const skl_range queries = skl_queries_of_key(t->problem, &sequence, j);
        memset(sum, 0, SKL_DIM_MAX * sizeof *sum);
        for (int64_t head = t->head * sharing; head < (t->head + 1) * sharing; head++)
            for (int64_t i = queries.begin; i < queries.end; i++) {
                known_row r = row_at(t, &sequence, t->teacher_side ? head / group : head, i);
                assert(r.visible.begin <= j && j < r.visible.end);
                load_known(&r, lse);
                const float weight =
                    t->teacher_side ? teacher_gradient(&r, lse, head % group, j) : student_gradient(&r, lse, j);
                const int64_t q = SKL_ROW(*side.q, sequence.batch, head, sequence.query_begin + i);
                add_row(sum, weight, side.q, side.dtype, q, side.dim);
            }
        store_row(&side, side.dk, SKL_ROW(*side.dk, sequence.batch, t->head, sequence.key_begin + j), sum);
    }
}

const skl_cpu_kernel skl_cpu_reference = {
    .name = "cpu_reference",
    .detail = "scalar, one row at a time",
    .usable = usable,
    .tiles = tiles,
    .scratch_size = scratch_size,
    .forward = forward,
    .backward_queries = backward_queries,
    .backward_keys = backward_keys,
};
