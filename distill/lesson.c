#include "distill/lesson.h"
#include "device/mirror.h"

#include <math.h>

static skl_problem problem_of(const lesson_shape *shape)
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
static skl_status allocate_tensors(lesson *work)
{
    const skl_problem *const p = &work->problem;
    const struct {
        float **tensor;
        int64_t columns;
    } all[] = {
        {&work->q_t, p->heads_t * p->dim_t},
        {&work->k_t, p->key_heads_t * p->dim_t},
        {&work->q_s, p->heads_s * p->dim_s},
        {&work->k_s, p->key_heads_s * p->dim_s},
        {&work->dq_s, p->heads_s * p->dim_s},
        {&work->dk_s, p->key_heads_s * p->dim_s},
        {&work->kl, p->heads_s},
        {&work->lse_t, p->heads_t},
        {&work->lse_s, p->heads_s},
    };
    enum { TENSOR_COUNT = sizeof all / sizeof all[0] };
    int64_t columns = 0;
    for (int t = 0; t < TENSOR_COUNT; t++)
        columns += all[t].columns;
    const size_t size = (size_t)(columns * p->len_q) * sizeof(float);
    const skl_status status = device_allocate(SKL_CPU, size, "the tensors of a sequence", (void **)&work->block);
    float *next = work->block;
    for (int t = 0; t < TENSOR_COUNT && status == SKL_OK; t++) {
        *all[t].tensor = next;
        next += all[t].columns * p->len_q;
    }
    return status;
}

skl_status lesson_open(lesson *work, const lesson_shape *shape, const skl_options *options, int threads)
{
    *work = (lesson){.problem = problem_of(shape), .options = *options};
    skl_status status = skl_plan_create(&work->plan, &work->problem, options);
    if (status != SKL_OK)
        return status;
    const size_t forward = skl_plan_workspace_size(work->plan, SKL_OP_FORWARD);
    const size_t backward = skl_plan_workspace_size(work->plan, SKL_OP_BACKWARD);
    work->workspace_size = forward > backward ? forward : backward;
    work->threads = skl_plan_threads(work->plan) > 0 ? skl_plan_threads(work->plan) : threads;
    status = device_open(options->device, options->device_index);
    if (status == SKL_OK)
        status = device_allocate(options->device, work->workspace_size, "the workspace", &work->workspace);
    return status == SKL_OK ? allocate_tensors(work) : status;
}

void lesson_close(lesson *work)
{
    device_free(work->options.device, work->workspace);
    device_free(SKL_CPU, work->block);
    skl_plan_destroy(work->plan);
    *work = (lesson){.plan = NULL};
}

void lesson_project_teacher(lesson *work, const layer *teacher, const sequence *text)
{
    layer_project(teacher, text->hidden_t, work->problem.len_q, work->q_t, work->k_t, work->threads);
}

void lesson_project_student(lesson *work, const layer *student, const sequence *text)
{
    layer_project(student, text->hidden_s, work->problem.len_q, work->q_s, work->k_s, work->threads);
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

skl_inputs lesson_inputs(const lesson *work)
{
    const skl_problem *const p = &work->problem;
    return (skl_inputs){
        .struct_size = sizeof(skl_inputs),
        .q_t = heads_input(work->q_t, p->heads_t, p->dim_t),
        .k_t = heads_input(work->k_t, p->key_heads_t, p->dim_t),
        .q_s = heads_input(work->q_s, p->heads_s, p->dim_s),
        .k_s = heads_input(work->k_s, p->key_heads_s, p->dim_s),
    };
}

/* A mirror remembers what it has copied, and every call here has new numbers at old addresses: so one for each. */
static skl_status finish(mirror *tensors, skl_status status)
{
    if (status == SKL_OK)
        status = mirror_fetch(tensors);
    mirror_destroy(tensors);
    return status;
}

skl_status lesson_forward(lesson *work)
{
    const skl_problem *const p = &work->problem;
    skl_inputs inputs = lesson_inputs(work);
    skl_rows rows = {
        .struct_size = sizeof rows,
        .kl = skl_output_contiguous(work->kl, p->heads_s, p->len_q, 1),
        .lse_t = skl_output_contiguous(work->lse_t, p->heads_t, p->len_q, 1),
        .lse_s = skl_output_contiguous(work->lse_s, p->heads_s, p->len_q, 1),
    };
    mirror tensors = mirror_of(p, work->options.device);
    skl_status status = mirror_call(&tensors, &inputs, &rows, NULL);
    if (status == SKL_OK)
        status = skl_forward(work->plan, &inputs, &rows, work->workspace, work->workspace_size, NULL);
    return finish(&tensors, status);
}

skl_status lesson_backward(lesson *work, float grad_kl, const sequence *text, layer *gradient)
{
    const skl_problem *const p = &work->problem;
    skl_inputs inputs = lesson_inputs(work);
    inputs.kl = skl_input_contiguous(work->kl, p->heads_s, p->len_q, 1);
    inputs.lse_t = skl_input_contiguous(work->lse_t, p->heads_t, p->len_q, 1);
    inputs.lse_s = skl_input_contiguous(work->lse_s, p->heads_s, p->len_q, 1);
    inputs.grad_kl = (skl_input){&grad_kl, 0, 0, 0};
    skl_gradients gradients = {
        .struct_size = sizeof gradients,
        .dq_s = heads_output(work->dq_s, p->heads_s, p->dim_s),
        .dk_s = heads_output(work->dk_s, p->key_heads_s, p->dim_s),
    };
    mirror tensors = mirror_of(p, work->options.device);
    skl_status status = mirror_call(&tensors, &inputs, NULL, &gradients);
    if (status == SKL_OK)
        status = skl_backward(work->plan, &inputs, &gradients, work->workspace, work->workspace_size, NULL);
    status = finish(&tensors, status);
    if (status == SKL_OK)
        layer_gradient_add(gradient, text->hidden_s, p->len_q, work->dq_s, work->dk_s, work->threads);
    return status;
}

/* ---- One pair of a query and a key -------------------------------------------------------------------------- */

static double share(const float *q, const float *k, int64_t dim, double lse)
{
    double logit = 0;
    for (int64_t d = 0; d < dim; d++)
        logit += (double)q[d] * (double)k[d];
    return exp(logit / sqrt((double)dim) - lse);
}

double lesson_teacher_share(const lesson *work, int64_t head_s, int64_t query, int64_t key)
{
    const skl_problem *const p = &work->problem;
    const int64_t group = p->heads_t / p->heads_s, heads_a_key = p->heads_t / p->key_heads_t;
    double sum = 0;
    for (int64_t head = head_s * group; head < (head_s + 1) * group; head++)
        sum += share(work->q_t + (query * p->heads_t + head) * p->dim_t,
                     work->k_t + (key * p->key_heads_t + head / heads_a_key) * p->dim_t, p->dim_t,
                     (double)work->lse_t[head * p->len_q + query]);
    return sum / (double)group;
}

double lesson_student_share(const lesson *work, int64_t head_s, int64_t query, int64_t key)
{
    const skl_problem *const p = &work->problem;
    const int64_t heads_a_key = p->heads_s / p->key_heads_s;
    return share(work->q_s + (query * p->heads_s + head_s) * p->dim_s,
                 work->k_s + (key * p->key_heads_s + head_s / heads_a_key) * p->dim_s, p->dim_s,
                 (double)work->lse_s[head_s * p->len_q + query]);
}
