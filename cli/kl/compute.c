/* Row vectors, the reduction, the gradients of the reduced loss, and the files of --out and --grad. */
#include "cli/common/cli.h"
#include "cli/kl/kl.h"
#include "cli/term/term.h"

#include <math.h>
#include <stdlib.h>

/* ---- Results ------------------------------------------------------------------------------------------------ */

static const struct {
    const char *name;
    size_t result, output; /* offsets in kl_results and in skl_rows */
    bool of_teacher, of_indexer, is_written;
    float initial; /* rows after the last packed sequence keep it: the library does not write them */
} row_vectors[] = {
#define ROW(name) #name, offsetof(kl_results, name), offsetof(skl_rows, name)
    {ROW(kl), .is_written = true},
    {ROW(lse_t), .of_teacher = true, .is_written = true, .initial = -INFINITY},
    {ROW(lse_s), .is_written = true, .initial = -INFINITY},
    {ROW(dot_t), .of_teacher = true},
    {ROW(cross_entropy), .of_indexer = true, .is_written = true},
    {ROW(entropy), .of_indexer = true, .is_written = true},
    {ROW(mass), .of_indexer = true, .is_written = true},
};
enum { ROW_VECTORS = sizeof row_vectors / sizeof row_vectors[0] };

static const struct {
    kl_role role; /* the input that it belongs to */
    uint32_t bit;
    const char *name;
} gradients[] = {
    {ROLE_Q_T, SKL_DQ_T, "dq_t"},          {ROLE_K_T, SKL_DK_T, "dk_t"}, {ROLE_Q_S, SKL_DQ_S, "dq_s"},
    {ROLE_K_S, SKL_DK_S, "dk_s"},          {ROLE_W_S, SKL_DW_S, "dw_s"}, {ROLE_SINK_T, SKL_DSINK_T, "dsink_t"},
    {ROLE_SINK_S, SKL_DSINK_S, "dsink_s"},
};
enum { GRADIENTS = sizeof gradients / sizeof gradients[0] };

static float **row_vector(const kl_results *results, int index)
{
    return (float **)((char *)results + row_vectors[index].result);
}

static int64_t heads_of(const skl_problem *problem, bool of_teacher)
{
    return of_teacher ? problem->heads_t : problem->heads_s;
}

void *kl_allocate_output(size_t size, const char *name)
{
    void *const data = resident_allocate(size);
    if (data == NULL)
        cli_fail(CLI_NO_MEMORY, "out of memory: %s needs %zu bytes", name, size);
    return data;
}

static void allocate_row_vectors(kl_results *results, const skl_problem *problem)
{
    const bool dot_t = skl_problem_needs(problem, SKL_OP_BACKWARD) & SKL_ROW_DOT_T;
    for (int v = 0; v < ROW_VECTORS; v++) {
        const bool needed = row_vectors[v].is_written ? !row_vectors[v].of_indexer || kl_is_indexer(problem) : dot_t;
        if (!needed)
            continue;
        const int64_t count = kl_row_count(problem, heads_of(problem, row_vectors[v].of_teacher));
        float *const rows = kl_allocate_output((size_t)count * sizeof(float), row_vectors[v].name);
        for (int64_t i = 0; i < count; i++)
            rows[i] = row_vectors[v].initial;
        *row_vector(results, v) = rows;
    }
}

/* The gradient of a tensor has its shape, that of a sink [H]. */
static output_tensor gradient_tensor(int index, const kl_inputs *inputs)
{
    const kl_role role = gradients[index].role;
    const stored_tensor *const like = inputs->views[role].stored;
    output_tensor tensor = {.name = gradients[index].name, .dtype = SKL_F32, .rank = 1};
    tensor.shape[0] = heads_of(&inputs->problem, role == ROLE_SINK_T);
    if (like) {
        tensor.dtype = inputs->problem.grad_f32 ? SKL_F32 : like->dtype;
        tensor.rank = like->rank;
        memcpy(tensor.shape, like->shape, sizeof tensor.shape);
    }
    return tensor;
}

static void allocate_gradients(kl_results *results, const kl_inputs *inputs)
{
    for (int g = 0; g < GRADIENTS; g++) {
        const output_tensor tensor = gradient_tensor(g, inputs);
        size_t size = 0;
        shape_size(tensor.shape, tensor.rank, tensor_dtype_size(tensor.dtype), &size);
        if (inputs->problem.gradients & gradients[g].bit)
            results->gradients[gradients[g].role] = kl_allocate_output(size, tensor.name);
    }
}

void kl_results_free(kl_results *results)
{
    runner_close(&results->runner);
    for (int v = 0; v < ROW_VECTORS; v++)
        free(*row_vector(results, v));
    for (int role = 0; role < ROLE_COUNT; role++)
        free(results->gradients[role]);
}

/* ---- Forward and reduction ---------------------------------------------------------------------------------- */

static void forward(kl_results *results, const kl_inputs *inputs)
{
    const skl_problem *const problem = &inputs->problem;
    skl_rows rows = {.struct_size = sizeof rows};
    for (int v = 0; v < ROW_VECTORS; v++)
        *(skl_output *)((char *)&rows + row_vectors[v].output) = skl_output_contiguous(
            *row_vector(results, v), heads_of(problem, row_vectors[v].of_teacher), kl_row_length(problem), 1);
    runner_forward(&results->runner, &inputs->tensors, &rows);
}

static void reduce(kl_results *results, const skl_problem *problem)
{
    for (int64_t i = 0; i < kl_row_count(problem, problem->heads_s); i++) {
        if (!row_attends(results->lse_s[i], results->kl[i]))
            continue;
        results->valid_rows++;
        results->nonfinite_rows += !isfinite(results->kl[i]);
        results->sum += (double)results->kl[i];
    }
}

/* ---- Backward ----------------------------------------------------------------------------------------------- */

static skl_input row_input(const skl_problem *problem, const float *data, int64_t heads)
{
    return skl_input_contiguous(data, heads, kl_row_length(problem), 1);
}

static skl_output gradient_output(const kl_results *results, const kl_inputs *inputs, kl_role role)
{
    const skl_input *const like = &inputs->views[role].input;
    return (skl_output){results->gradients[role], like->stride_batch, like->stride_head, like->stride_row};
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
    const skl_gradients written = {
        .struct_size = sizeof written,
        .dq_t = gradient_output(results, inputs, ROLE_Q_T),
        .dk_t = gradient_output(results, inputs, ROLE_K_T),
        .dq_s = gradient_output(results, inputs, ROLE_Q_S),
        .dk_s = gradient_output(results, inputs, ROLE_K_S),
        .dw_s = gradient_output(results, inputs, ROLE_W_S),
        .dsink_t = results->gradients[ROLE_SINK_T],
        .dsink_s = results->gradients[ROLE_SINK_S],
    };
    runner_backward(&results->runner, &saved, &written);
}

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

/* ---- Files -------------------------------------------------------------------------------------------------- */

/* [B, H, N]; packed [H, total]. */
static void write_rows(const kl_results *results, const skl_problem *problem, const kl_request *request)
{
    output_tensor tensors[ROW_VECTORS];
    size_t count = 0;
    for (int v = 0; v < ROW_VECTORS; v++) {
        if (!row_vectors[v].is_written || *row_vector(results, v) == NULL)
            continue;
        output_tensor *const tensor = &tensors[count++];
        *tensor = (output_tensor){.name = row_vectors[v].name, .dtype = SKL_F32, .data = *row_vector(results, v)};
        if (!problem->packed)
            tensor->shape[tensor->rank++] = problem->batch;
        tensor->shape[tensor->rank++] = heads_of(problem, row_vectors[v].of_teacher);
        tensor->shape[tensor->rank++] = kl_row_length(problem);
    }
    const output_metadata metadata[] = {{"direction", direction_names[problem->direction]}};
    file_write_tensors(request->out_path, tensors, count, metadata, 1);
}

static void write_gradients(const kl_results *results, const kl_inputs *inputs, const kl_request *request)
{
    output_tensor tensors[GRADIENTS];
    size_t count = 0;
    for (int g = 0; g < GRADIENTS; g++) {
        tensors[count] = gradient_tensor(g, inputs);
        tensors[count].data = results->gradients[gradients[g].role];
        count += tensors[count].data != NULL;
    }
    const output_metadata metadata[] = {{"direction", direction_names[inputs->problem.direction]},
                                        {"reduction", kl_reduction_names[request->reduction]}};
    file_write_tensors(request->grad_path, tensors, count, metadata, 2);
}

void kl_outputs_write(const kl_results *results, const kl_inputs *inputs, const kl_request *request)
{
    if (request->out_path)
        write_rows(results, &inputs->problem, request);
    if (request->grad_path)
        write_gradients(results, inputs, request);
    file_write_commit();
}
