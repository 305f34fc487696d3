#include "cli/distill/pair.h"
#include "cli/common/cli.h"

#include <math.h>
#include <stdlib.h>

static skl_problem problem_of(const task_shape *task, layer_shape student, skl_direction direction)
{
    skl_problem problem = skl_problem_default();
    problem.causal = 1;
    problem.direction = direction;
    problem.len_q = problem.len_k = task->context;
    problem.heads_t = task->teacher.heads;
    problem.dim_t = task->teacher.dim;
    problem.heads_s = student.heads;
    problem.dim_s = student.dim;
    return problem;
}

/* One block for all tensors of a sequence. */
static void allocate_tensors(attention_pair *pair)
{
    const skl_problem *const p = &pair->problem;
    const int64_t columns_t = p->heads_t * p->dim_t, columns_s = p->heads_s * p->dim_s;
    const struct {
        float **tensor;
        int64_t columns;
    } all[] = {
        {&pair->q_t, columns_t}, {&pair->k_t, columns_t},    {&pair->q_s, columns_s},
        {&pair->k_s, columns_s}, {&pair->dq_s, columns_s},   {&pair->dk_s, columns_s},
        {&pair->kl, p->heads_s}, {&pair->lse_t, p->heads_t}, {&pair->lse_s, p->heads_s},
    };
    enum { TENSOR_COUNT = sizeof all / sizeof all[0] };
    int64_t columns = 0;
    for (int t = 0; t < TENSOR_COUNT; t++)
        columns += all[t].columns;
    pair->block = cli_allocate((size_t)(columns * p->len_q) * sizeof(float), "the tensors of a sequence");
    float *next = pair->block;
    for (int t = 0; t < TENSOR_COUNT; t++) {
        *all[t].tensor = next;
        next += all[t].columns * p->len_q;
    }
}

void attention_pair_open(attention_pair *pair, const task_shape *task, layer_shape student, skl_direction direction,
                         const skl_options *options, int threads)
{
    *pair = (attention_pair){.problem = problem_of(task, student, direction)};
    runner_open(&pair->runner, &pair->problem, options);
    pair->threads = skl_plan_threads(pair->runner.plan) > 0 ? skl_plan_threads(pair->runner.plan) : threads;
    allocate_tensors(pair);
}

void attention_pair_close(attention_pair *pair)
{
    runner_close(&pair->runner);
    free(pair->block);
}

void attention_pair_project(attention_pair *pair, const layer *teacher, const layer *student, const sequence *tokens)
{
    layer_project(teacher, tokens->hidden, pair->problem.len_q, pair->q_t, pair->k_t, pair->threads);
    layer_project(student, tokens->hidden, pair->problem.len_q, pair->q_s, pair->k_s, pair->threads);
}

/* ---- Calls -------------------------------------------------------------------------------------------------- */

/* [context, heads, dim] */
static skl_input heads_input(const float *data, int64_t heads, int64_t dim)
{
    return (skl_input){data, 0, dim, heads * dim};
}

static skl_output heads_output(float *data, int64_t heads, int64_t dim)
{
    return (skl_output){data, 0, dim, heads * dim};
}

skl_inputs attention_pair_inputs(const attention_pair *pair)
{
    const skl_problem *const p = &pair->problem;
    return (skl_inputs){
        .struct_size = sizeof(skl_inputs),
        .q_t = heads_input(pair->q_t, p->heads_t, p->dim_t),
        .k_t = heads_input(pair->k_t, p->heads_t, p->dim_t),
        .q_s = heads_input(pair->q_s, p->heads_s, p->dim_s),
        .k_s = heads_input(pair->k_s, p->heads_s, p->dim_s),
    };
}

void attention_pair_forward(attention_pair *pair)
{
    const skl_problem *const p = &pair->problem;
    const skl_inputs inputs = attention_pair_inputs(pair);
    const skl_rows rows = {
        .struct_size = sizeof rows,
        .kl = skl_output_contiguous(pair->kl, p->heads_s, p->len_q, 1),
        .lse_t = skl_output_contiguous(pair->lse_t, p->heads_t, p->len_q, 1),
        .lse_s = skl_output_contiguous(pair->lse_s, p->heads_s, p->len_q, 1),
    };
    runner_forward(&pair->runner, &inputs, &rows);
}

void attention_pair_backward(attention_pair *pair, float grad_kl, const sequence *tokens, layer *gradient)
{
    const skl_problem *const p = &pair->problem;
    skl_inputs inputs = attention_pair_inputs(pair);
    inputs.kl = skl_input_contiguous(pair->kl, p->heads_s, p->len_q, 1);
    inputs.lse_t = skl_input_contiguous(pair->lse_t, p->heads_t, p->len_q, 1);
    inputs.lse_s = skl_input_contiguous(pair->lse_s, p->heads_s, p->len_q, 1);
    inputs.grad_kl = (skl_input){&grad_kl, 0, 0, 0};
    const skl_gradients gradients = {
        .struct_size = sizeof gradients,
        .dq_s = heads_output(pair->dq_s, p->heads_s, p->dim_s),
        .dk_s = heads_output(pair->dk_s, p->heads_s, p->dim_s),
    };
    runner_backward(&pair->runner, &inputs, &gradients);
    layer_gradient_add(gradient, tokens->hidden, p->len_q, pair->dq_s, pair->dk_s, pair->threads);
}

/* ---- One pair of a query and a key -------------------------------------------------------------------------- */

/* The mean over heads [first, end) of the attention of a query to a key. */
static double mean_attention(const float *q, const float *k, const float *lse, int64_t heads, int64_t dim,
                             int64_t len_q, int64_t first, int64_t end, reference pair)
{
    double sum = 0;
    for (int64_t head = first; head < end; head++) {
        double logit = 0;
        for (int64_t d = 0; d < dim; d++)
            logit +=
                (double)q[(pair.query * heads + head) * dim + d] * (double)k[(pair.key * heads + head) * dim + d];
        sum += exp(logit / sqrt((double)dim) - (double)lse[head * len_q + pair.query]);
    }
    return sum / (double)(end - first);
}

double attention_pair_p(const attention_pair *pair, int64_t head_s, reference at)
{
    const skl_problem *const p = &pair->problem;
    const int64_t group_size = p->heads_t / p->heads_s;
    return mean_attention(pair->q_t, pair->k_t, pair->lse_t, p->heads_t, p->dim_t, p->len_q, head_s * group_size,
                          (head_s + 1) * group_size, at);
}

double attention_pair_s(const attention_pair *pair, int64_t head_s, reference at)
{
    const skl_problem *const p = &pair->problem;
    return mean_attention(pair->q_s, pair->k_s, pair->lse_s, p->heads_s, p->dim_s, p->len_q, head_s, head_s + 1, at);
}

/* ---- Evaluation --------------------------------------------------------------------------------------------- */

double evaluate_hit_rate_s(const depth_score *score)
{
    return score->references ? (double)score->hits_s / (double)score->references : NAN;
}

double evaluate_hit_rate_t(const depth_score *score)
{
    return score->references ? (double)score->hits_t / (double)score->references : NAN;
}

static void add_score(depth_score *score, int hit_t, int hit_s, double kl)
{
    score->references++;
    score->hits_t += hit_t;
    score->hits_s += hit_s;
    score->kl += kl;
}

void evaluate_references(evaluation *result, const attention_pair *pair, const sequence *tokens)
{
    const skl_problem *const p = &pair->problem;
    for (int64_t r = 0; r < tokens->reference_count; r++) {
        const reference asked = tokens->references[r];
        const int64_t depth = asked.key * EVALUATE_DEPTHS / p->len_q;
        for (int64_t head = 0; head < p->heads_s; head++) {
            if (!task_head_retrieves(head))
                continue;
            const int hit_t = attention_pair_p(pair, head, asked) > 0.5;
            const int hit_s = attention_pair_s(pair, head, asked) > 0.5;
            const double kl = (double)pair->kl[head * p->len_q + asked.query];
            add_score(&result->depths[depth], hit_t, hit_s, kl);
            add_score(&result->all, hit_t, hit_s, kl);
        }
    }
}

static void add_rows(evaluation *result, const attention_pair *pair, double weight)
{
    const skl_problem *const p = &pair->problem;
    for (int64_t head = 0; head < p->heads_s; head++)
        for (int64_t i = 0; i < p->len_q; i++) {
            const double kl = weight * (double)pair->kl[head * p->len_q + i];
            result->kl += kl / (double)(p->heads_s * p->len_q);
            if (head < EVALUATE_HEADS_MAX)
                result->kl_head[head] += kl / (double)p->len_q;
            result->kl_position[i * EVALUATE_POSITIONS / p->len_q] += kl;
        }
}

/* Sums over the rows of a bucket become means. */
static void divide_positions(evaluation *result, const skl_problem *p)
{
    int64_t rows[EVALUATE_POSITIONS] = {0};
    for (int64_t i = 0; i < p->len_q; i++)
        rows[i * EVALUATE_POSITIONS / p->len_q]++;
    for (int b = 0; b < EVALUATE_POSITIONS; b++)
        result->kl_position[b] /= rows[b] ? (double)(p->heads_s * rows[b]) : 1;
}

evaluation evaluate(attention_pair *pair, retrieval_task *task, const layer *student, int64_t count)
{
    evaluation result = {.kl = 0};
    for (int64_t index = 0; index < count; index++) {
        const sequence tokens = task_sequence(task, SPLIT_HELD_OUT, (uint64_t)index);
        attention_pair_project(pair, &task->teacher, student, &tokens);
        attention_pair_forward(pair);
        add_rows(&result, pair, 1 / (double)count);
        evaluate_references(&result, pair, &tokens);
    }
    divide_positions(&result, &pair->problem);
    return result;
}
