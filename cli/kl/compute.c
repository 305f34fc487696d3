/* Row vectors, the reduction, and the gradients of the reduced loss. */
#include "cli/common/cli.h"
#include "cli/kl/kl.h"
#include "device/device.h"

#include <inttypes.h>
#include <math.h>
#include <stdlib.h>

/* ---- Buffers ------------------------------------------------------------------------------------------------ */

void *kl_allocate_output(size_t size, const char *name)
{
    void *const data = resident_allocate(size);
    if (data == NULL)
        cli_fail(CLI_NO_MEMORY, "out of memory: %s needs %zu bytes", name, size);
    return data;
}

static float *allocate_rows(const skl_problem *problem, int64_t heads, float value, const char *name)
{
    const int64_t count = kl_row_count(problem, heads);
    float *const rows = kl_allocate_output((size_t)count * sizeof(float), name);
    for (int64_t i = 0; i < count; i++)
        rows[i] = value;
    return rows;
}

static skl_input row_input(const skl_problem *problem, const float *data, int64_t heads)
{
    return skl_input_contiguous(data, heads, kl_row_length(problem), 1);
}

static void allocate_row_vectors(kl_results *results, const skl_problem *problem)
{
    /* The library does not write rows after the last packed sequence: initialise them as rows without keys. */
    results->kl = allocate_rows(problem, problem->heads_s, 0, "kl");
    results->lse_t = allocate_rows(problem, problem->heads_t, -INFINITY, "lse_t");
    results->lse_s = allocate_rows(problem, problem->heads_s, -INFINITY, "lse_s");
    if (skl_problem_needs(problem, SKL_OP_BACKWARD) & SKL_ROW_DOT_T)
        results->dot_t = allocate_rows(problem, problem->heads_t, 0, "dot_t");
    if (!kl_is_indexer(problem))
        return;
    results->cross_entropy = allocate_rows(problem, problem->heads_s, 0, "cross_entropy");
    results->entropy = allocate_rows(problem, problem->heads_s, 0, "entropy");
    results->mass = allocate_rows(problem, problem->heads_s, 0, "mass");
}

static const uint32_t gradient_bits[ROLE_REQUIRED_COUNT] = {
    [ROLE_Q_T] = SKL_DQ_T,
    [ROLE_K_T] = SKL_DK_T,
    [ROLE_Q_S] = SKL_DQ_S,
    [ROLE_K_S] = SKL_DK_S,
};

static void *allocate_gradient(const kl_inputs *inputs, const kl_view *view, kl_role role)
{
    const stored_tensor *const tensor = view->stored;
    const size_t widening = inputs->problem.grad_f32 ? sizeof(float) / tensor_dtype_size(tensor->dtype) : 1;
    return kl_allocate_output(tensor->size * widening, kl_role_names[role]);
}

static void allocate_gradients(kl_results *results, const kl_inputs *inputs)
{
    const skl_problem *const problem = &inputs->problem;
    for (kl_role role = 0; role < ROLE_REQUIRED_COUNT; role++)
        if (problem->gradients & gradient_bits[role])
            results->gradients[role] = allocate_gradient(inputs, &inputs->views[role], role);
    if (problem->gradients & SKL_DW_S)
        results->dw_s = allocate_gradient(inputs, &inputs->w_s, ROLE_W_S);
    if (problem->gradients & SKL_DSINK_T)
        results->dsink_t = kl_allocate_output((size_t)problem->heads_t * sizeof(float), "dsink_t");
    if (problem->gradients & SKL_DSINK_S)
        results->dsink_s = kl_allocate_output((size_t)problem->heads_s * sizeof(float), "dsink_s");
}

/* ---- Forward and reduction ---------------------------------------------------------------------------------- */

static skl_output row_output(const skl_problem *problem, float *data, int64_t heads)
{
    return skl_output_contiguous(data, heads, kl_row_length(problem), 1);
}

static void forward(kl_results *results, const kl_inputs *inputs)
{
    const skl_problem *const problem = &inputs->problem;
    const skl_rows rows = {
        .struct_size = sizeof rows,
        .kl = row_output(problem, results->kl, problem->heads_s),
        .lse_t = row_output(problem, results->lse_t, problem->heads_t),
        .lse_s = row_output(problem, results->lse_s, problem->heads_s),
        .dot_t = row_output(problem, results->dot_t, problem->heads_t),
        .cross_entropy = row_output(problem, results->cross_entropy, problem->heads_s),
        .entropy = row_output(problem, results->entropy, problem->heads_s),
        .mass = row_output(problem, results->mass, problem->heads_s),
    };
    runner_forward(&results->runner, &inputs->tensors, &rows);
}

static void reduce(kl_results *results, const skl_problem *problem)
{
    for (int64_t i = 0; i < kl_row_count(problem, problem->heads_s); i++) {
        if (isinf(results->lse_s[i]) && results->lse_s[i] < 0)
            continue; /* attends to no key */
        results->valid_rows++;
        results->nonfinite_rows += !isfinite(results->kl[i]);
        results->sum += (double)results->kl[i];
    }
}

/* ---- Backward ----------------------------------------------------------------------------------------------- */

static skl_output output_like(void *data, const skl_input *like)
{
    return (skl_output){data, like->stride_batch, like->stride_head, like->stride_row};
}

static skl_output gradient_output(const kl_results *results, const kl_inputs *inputs, kl_role role)
{
    return output_like(results->gradients[role], &inputs->views[role].input);
}

/* dloss/dKL_i is equal for all rows: one number with strides of 0. Rows without a key have a gradient of 0 anyway. */
static void backward(kl_results *results, const kl_inputs *inputs, kl_reduction reduction)
{
    const skl_problem *const problem = &inputs->problem;
    const bool mean = reduction == REDUCTION_MEAN && results->valid_rows > 0;
    const float grad_kl = mean ? (float)(1 / (double)results->valid_rows) : 1;
    skl_inputs saved = inputs->tensors;
    saved.grad_kl = (skl_input){&grad_kl, 0, 0, 0};
    saved.kl = row_input(problem, results->kl, problem->heads_s);
    saved.lse_t = row_input(problem, results->lse_t, problem->heads_t);
    saved.lse_s = row_input(problem, results->lse_s, problem->heads_s);
    saved.dot_t = row_input(problem, results->dot_t, problem->heads_t);
    const skl_gradients gradients = {
        .struct_size = sizeof gradients,
        .dq_t = gradient_output(results, inputs, ROLE_Q_T),
        .dk_t = gradient_output(results, inputs, ROLE_K_T),
        .dq_s = gradient_output(results, inputs, ROLE_Q_S),
        .dk_s = gradient_output(results, inputs, ROLE_K_S),
        .dw_s = output_like(results->dw_s, &inputs->w_s.input),
        .dsink_t = results->dsink_t,
        .dsink_s = results->dsink_s,
    };
    runner_backward(&results->runner, &saved, &gradients);
}

/* ---- All steps ---------------------------------------------------------------------------------------------- */

void kl_compute(kl_results *results, const kl_inputs *inputs, const kl_request *request)
{
    const skl_problem *const problem = &inputs->problem;
    runner_open(&results->runner, problem, &request->options);
    results->runner.explains = request->explain;
    allocate_row_vectors(results, problem);
    allocate_gradients(results, inputs);
    if (request->options.device != SKL_CPU) /* lengths and indices are checked before they are copied to a GPU */
        cli_check(skl_inputs_check(results->runner.plan, &inputs->tensors));
    for (kl_role role = 0; role < ROLE_REQUIRED_COUNT; role++)
        resident_touch(inputs->views[role].input.data, inputs->views[role].stored->size);
    forward(results, inputs);
    reduce(results, problem);
    if (problem->gradients)
        backward(results, inputs, request->reduction);
}

void kl_results_free(kl_results *results)
{
    runner_close(&results->runner);
    free(results->kl);
    free(results->lse_t);
    free(results->lse_s);
    free(results->dot_t);
    free(results->cross_entropy);
    free(results->entropy);
    free(results->mass);
    free(results->dw_s);
    free(results->dsink_t);
    free(results->dsink_s);
    for (kl_role role = 0; role < ROLE_REQUIRED_COUNT; role++)
        free(results->gradients[role]);
}
