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

static double probability(const float *q, const float *k, int64_t dim, double lse)
{
    double logit = 0;
    for (int64_t d = 0; d < dim; d++)
        logit += (double)q[d] * (double)k[d];
    return exp(logit / sqrt((double)dim) - lse);
}

double attention_pair_p(const attention_pair *pair, int64_t head_s, int64_t query, int64_t key)
{
    const skl_problem *const p = &pair->problem;
    const int64_t group_size = p->heads_t / p->heads_s;
    double sum = 0;
    for (int64_t head = head_s * group_size; head < (head_s + 1) * group_size; head++)
        sum += probability(pair->q_t + (query * p->heads_t + head) * p->dim_t,
                           pair->k_t + (key * p->heads_t + head) * p->dim_t, p->dim_t,
                           (double)pair->lse_t[head * p->len_q + query]);
    return sum / (double)group_size;
}

double attention_pair_s(const attention_pair *pair, int64_t head_s, int64_t query, int64_t key)
{
    const skl_problem *const p = &pair->problem;
    return probability(pair->q_s + (query * p->heads_s + head_s) * p->dim_s,
                       pair->k_s + (key * p->heads_s + head_s) * p->dim_s, p->dim_s,
                       (double)pair->lse_s[head_s * p->len_q + query]);
}
