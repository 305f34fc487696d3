/* --out and --grad: writes both files or none. */
#include "cli/kl/kl.h"

/* [B, H, N]; packed [H, total]. */
static output_tensor row_tensor(const char *name, const float *data, int64_t heads, const skl_problem *problem)
{
    output_tensor tensor = {.name = name, .dtype = SKL_F32, .data = data};
    if (!problem->packed)
        tensor.shape[tensor.rank++] = problem->batch;
    tensor.shape[tensor.rank++] = heads;
    tensor.shape[tensor.rank++] = kl_row_length(problem);
    return tensor;
}

static void write_rows(const kl_results *results, const skl_problem *problem, const kl_request *request)
{
    const output_tensor tensors[] = {
        row_tensor("kl", results->kl, problem->heads_s, problem),
        row_tensor("lse_t", results->lse_t, problem->heads_t, problem),
        row_tensor("lse_s", results->lse_s, problem->heads_s, problem),
        row_tensor("cross_entropy", results->cross_entropy, problem->heads_s, problem),
        row_tensor("entropy", results->entropy, problem->heads_s, problem),
        row_tensor("mass", results->mass, problem->heads_s, problem),
    };
    const size_t count =
        kl_is_indexer(problem) ? sizeof tensors / sizeof tensors[0] : 3; /* only an indexer has the last three */
    const output_metadata metadata[] = {{"direction", direction_name(problem->direction)}};
    file_write_tensors(request->out_path, tensors, count, metadata, 1);
}

static output_tensor gradient_tensor(const char *name, const void *data, const kl_view *view, const kl_inputs *inputs)
{
    const stored_tensor *const like = view->stored;
    output_tensor tensor = {.name = name, .rank = like->rank, .data = data};
    tensor.dtype = inputs->problem.grad_f32 ? SKL_F32 : like->dtype;
    memcpy(tensor.shape, like->shape, sizeof tensor.shape);
    return tensor;
}

static output_tensor sink_gradient(const char *name, const float *data, int64_t heads)
{
    return (output_tensor){.name = name, .dtype = SKL_F32, .rank = 1, .shape = {heads}, .data = data};
}

static void write_gradients(const kl_results *results, const kl_inputs *inputs, const kl_request *request)
{
    static const char *const names[ROLE_REQUIRED_COUNT] = {"dq_t", "dk_t", "dq_s", "dk_s"};
    output_tensor tensors[ROLE_REQUIRED_COUNT + 3];
    size_t count = 0;
    for (kl_role role = 0; role < ROLE_REQUIRED_COUNT; role++)
        if (results->gradients[role])
            tensors[count++] = gradient_tensor(names[role], results->gradients[role], &inputs->views[role], inputs);
    if (results->dw_s)
        tensors[count++] = gradient_tensor("dw_s", results->dw_s, &inputs->w_s, inputs);
    if (results->dsink_t)
        tensors[count++] = sink_gradient("dsink_t", results->dsink_t, inputs->problem.heads_t);
    if (results->dsink_s)
        tensors[count++] = sink_gradient("dsink_s", results->dsink_s, inputs->problem.heads_s);
    const output_metadata metadata[] = {{"direction", direction_name(inputs->problem.direction)},
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
