#include "distill/attention_pair.h"
#include "device/device.h"

#include <math.h>

static skl_problem problem_of(const attention_pair_shape *shape)
{
    skl_problem problem = skl_problem_default();
    problem.causal = 1;
    problem.direction = shape->direction;
    problem.len_q = problem.len_k = shape->context;
    problem.heads_t = shape->teacher.heads;
    problem.key_heads_t = shape->teacher.key_heads;
    problem.dim_t = shape->teacher.dim;
    problem.heads_s = shape->student.heads;
    problem.key_heads_s = shape->student.key_heads;
    problem.dim_s = shape->student.dim;
    return problem;
}

/* One block for all tensors of a sequence. */
static skl_status allocate_tensors(attention_pair *pair)
{
    const skl_problem *const p = &pair->problem;
    const struct {
        float **tensor;
        int64_t columns;
    } all[] = {
        {&pair->q_t, p->heads_t * p->dim_t},
        {&pair->k_t, p->key_heads_t * p->dim_t},
        {&pair->q_s, p->heads_s * p->dim_s},
        {&pair->k_s, p->key_heads_s * p->dim_s},
        {&pair->dq_s, p->heads_s * p->dim_s},
        {&pair->dk_s, p->key_heads_s * p->dim_s},
        {&pair->kl, p->heads_s},
        {&pair->lse_t, p->heads_t},
        {&pair->lse_s, p->heads_s},
    };
    enum { TENSOR_COUNT = sizeof all / sizeof all[0] };
    int64_t columns = 0;
    for (int t = 0; t < TENSOR_COUNT; t++)
        columns += all[t].columns;
    const size_t size = (size_t)(columns * p->len_q) * sizeof(float);
    const skl_status status = device_allocate(SKL_CPU, size, "the tensors of a sequence", (void **)&pair->block);
    float *next = pair->block;
    for (int t = 0; t < TENSOR_COUNT && status == SKL_OK; t++) {
        *all[t].tensor = next;
        next += all[t].columns * p->len_q;
    }
    return status;
}

skl_status attention_pair_open(attention_pair *pair, const attention_pair_shape *shape, const skl_options *options,
                               int threads)
{
    *pair = (attention_pair){.problem = problem_of(shape), .options = *options};
    skl_status status = skl_plan_create(&pair->plan, &pair->problem, options);
    if (status != SKL_OK)
        return status;
    const size_t forward = skl_plan_workspace_size(pair->plan, SKL_OP_FORWARD);
    const size_t backward = skl_plan_workspace_size(pair->plan, SKL_OP_BACKWARD);
    pair->workspace_size = forward > backward ? forward : backward;
    pair->threads = skl_plan_threads(pair->plan) > 0 ? skl_plan_threads(pair->plan) : threads;
    status = device_open(options->device, options->device_index);
    if (status == SKL_OK)
        status = device_allocate(options->device, pair->workspace_size, "the workspace", &pair->workspace);
    return status == SKL_OK ? allocate_tensors(pair) : status;
}

void attention_pair_close(attention_pair *pair)
{
    device_free(pair->options.device, pair->workspace);
    device_free(SKL_CPU, pair->block);
    skl_plan_destroy(pair->plan);
    *pair = (attention_pair){.plan = NULL};
}

void attention_pair_project_teacher(attention_pair *pair, const layer *teacher, const sequence *tokens)
{
    layer_project(teacher, tokens->hidden, pair->problem.len_q, pair->q_t, pair->k_t, pair->threads);
}

void attention_pair_project_student(attention_pair *pair, const layer *student, const sequence *tokens)
{
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
        .k_t = heads_input(pair->k_t, p->key_heads_t, p->dim_t),
        .q_s = heads_input(pair->q_s, p->heads_s, p->dim_s),
        .k_s = heads_input(pair->k_s, p->key_heads_s, p->dim_s),
    };
}

/* A mirror copies an input only once, but here every call has new values at the same addresses: each call gets its
 * own mirror. */
static skl_status finish(mirror *tensors, skl_status status)
{
    if (status == SKL_OK)
        status = mirror_fetch(tensors);
    mirror_destroy(tensors);
    return status;
}

skl_status attention_pair_forward(attention_pair *pair)
{
    const skl_problem *const p = &pair->problem;
    skl_inputs inputs = attention_pair_inputs(pair);
    skl_rows rows = {
        .struct_size = sizeof rows,
        .kl = skl_output_contiguous(pair->kl, p->heads_s, p->len_q, 1),
        .lse_t = skl_output_contiguous(pair->lse_t, p->heads_t, p->len_q, 1),
        .lse_s = skl_output_contiguous(pair->lse_s, p->heads_s, p->len_q, 1),
    };
    mirror tensors = mirror_of(p, pair->options.device);
    skl_status status = mirror_call(&tensors, &inputs, &rows, NULL);
    if (status == SKL_OK)
        status = skl_forward(pair->plan, &inputs, &rows, pair->workspace, pair->workspace_size, NULL);
    return finish(&tensors, status);
}

skl_status attention_pair_backward(attention_pair *pair, float grad_kl, const sequence *tokens, layer *gradient)
{
    const skl_problem *const p = &pair->problem;
    skl_inputs inputs = attention_pair_inputs(pair);
    inputs.kl = skl_input_contiguous(pair->kl, p->heads_s, p->len_q, 1);
    inputs.lse_t = skl_input_contiguous(pair->lse_t, p->heads_t, p->len_q, 1);
    inputs.lse_s = skl_input_contiguous(pair->lse_s, p->heads_s, p->len_q, 1);
    inputs.grad_kl = (skl_input){&grad_kl, 0, 0, 0};
    skl_gradients gradients = {
        .struct_size = sizeof gradients,
        .dq_s = heads_output(pair->dq_s, p->heads_s, p->dim_s),
        .dk_s = heads_output(pair->dk_s, p->key_heads_s, p->dim_s),
    };
    mirror tensors = mirror_of(p, pair->options.device);
    skl_status status = mirror_call(&tensors, &inputs, NULL, &gradients);
    if (status == SKL_OK)
        status = skl_backward(pair->plan, &inputs, &gradients, pair->workspace, pair->workspace_size, NULL);
    status = finish(&tensors, status);
    if (status == SKL_OK)
        layer_gradient_add(gradient, tokens->hidden, p->len_q, pair->dq_s, pair->dk_s, pair->threads);
    return status;
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
    const int64_t group_size = p->heads_t / p->heads_s, heads_per_key_head = p->heads_t / p->key_heads_t;
    double sum = 0;
    for (int64_t head = head_s * group_size; head < (head_s + 1) * group_size; head++)
        sum += probability(pair->q_t + (query * p->heads_t + head) * p->dim_t,
                           pair->k_t + (key * p->key_heads_t + head / heads_per_key_head) * p->dim_t, p->dim_t,
                           (double)pair->lse_t[head * p->len_q + query]);
    return sum / (double)group_size;
}

double attention_pair_s(const attention_pair *pair, int64_t head_s, int64_t query, int64_t key)
{
    const skl_problem *const p = &pair->problem;
    const int64_t heads_per_key_head = p->heads_s / p->key_heads_s;
    return probability(pair->q_s + (query * p->heads_s + head_s) * p->dim_s,
                       pair->k_s + (key * p->key_heads_s + head_s / heads_per_key_head) * p->dim_s, p->dim_s,
                       (double)pair->lse_s[head_s * p->len_q + query]);
}
