#include "bench/cpu/streaming.h"
#include "device/device.h"

static size_t workspace_size_of(const skl_plan *plan)
{
    static const skl_op ops[] = {SKL_OP_FORWARD, SKL_OP_BACKWARD, SKL_OP_FORWARD_BACKWARD};
    size_t largest = 0;
    for (size_t i = 0; i < sizeof ops / sizeof ops[0]; i++) {
        const size_t size = skl_plan_workspace_size(plan, ops[i]);
        largest = size > largest ? size : largest;
    }
    return largest;
}

static skl_status attach(streaming *run, const skl_problem *problem, const bench_tensors *tensors)
{
    const int64_t heads = problem->heads_s, heads_t = problem->heads_t, length = problem->len_q, dim = problem->dim_s;
    const int64_t query_heads = problem->student == SKL_STUDENT_INDEXER ? heads * problem->index_heads : heads;
    const int64_t key_heads_t = problem->key_heads_t ? problem->key_heads_t : heads_t;
    run->inputs = (skl_inputs){
        .struct_size = sizeof run->inputs,
        .q_t = skl_input_contiguous(tensors->q_t, heads_t, length, dim),
        .k_t = skl_input_contiguous(tensors->k_t, key_heads_t, length, dim),
        .q_s = skl_input_contiguous(tensors->q_s, query_heads, length, dim),
        .k_s = skl_input_contiguous(tensors->k_s, heads, length, dim),
        .w_s = skl_input_contiguous(tensors->w_s, heads, length, problem->index_heads),
        .indices = skl_input_contiguous(tensors->indices, heads, length, problem->top_k),
        .lse_t = skl_input_contiguous(tensors->lse_t, heads_t, length, 1),
        .lse_s = skl_input_contiguous(tensors->lse_s, heads, length, 1),
        .grad_kl = skl_input_contiguous(tensors->grad_kl, heads, length, 1),
    };
    run->rows = (skl_rows){
        .struct_size = sizeof run->rows,
        .kl = skl_output_contiguous(tensors->kl, heads, length, 1),
        .lse_t = skl_output_contiguous(tensors->lse_t, heads_t, length, 1),
        .lse_s = skl_output_contiguous(tensors->lse_s, heads, length, 1),
    };
    run->gradients = (skl_gradients){
        .struct_size = sizeof run->gradients,
        .dq_s = skl_output_contiguous(tensors->dq_s, query_heads, length, dim),
        .dk_s = skl_output_contiguous(tensors->dk_s, heads, length, dim),
        .dw_s = skl_output_contiguous(tensors->dw_s, heads, length, problem->index_heads),
    };
    const skl_status status = mirror_call(&run->tensors, &run->inputs, &run->rows, &run->gradients);
    run->kl_only = (skl_rows){.struct_size = sizeof run->kl_only, .kl = run->rows.kl};
    return status;
}

skl_status streaming_open(streaming *run, const skl_problem *problem, const skl_options *options,
                          const bench_tensors *tensors)
{
    *run = (streaming){.tensors = mirror_of(problem, options->device)};
    skl_status status = skl_plan_create(&run->plan, problem, options);
    if (status != SKL_OK)
        return status;
    run->workspace_size = workspace_size_of(run->plan);
    status = device_allocate(options->device, run->workspace_size, "the workspace", &run->workspace);
    return status == SKL_OK ? attach(run, problem, tensors) : status;
}

void streaming_close(streaming *run)
{
    skl_plan_destroy(run->plan);
    mirror_destroy(&run->tensors);
    device_free(run->tensors.device, run->workspace);
    *run = (streaming){0};
}

static skl_inputs inputs_of(const streaming *run, bench_pass pass)
{
    skl_inputs inputs = run->inputs;
    if (pass == BENCH_FORWARD) /* it writes the LSEs, and outputs must not overlap inputs */
        inputs.lse_t = inputs.lse_s = (skl_input){0};
    return inputs;
}

char *streaming_explain(const streaming *run, bench_pass pass)
{
    const skl_inputs inputs = inputs_of(run, pass);
    return explain_plan(run->plan, &inputs, bench_pass_op(pass));
}

skl_status streaming_run(const streaming *run, bench_pass pass)
{
    const skl_inputs inputs = inputs_of(run, pass);
    if (pass == BENCH_FORWARD)
        return skl_forward(run->plan, &inputs, &run->rows, run->workspace, run->workspace_size, NULL);
    if (pass == BENCH_BACKWARD)
        return skl_backward(run->plan, &inputs, &run->gradients, run->workspace, run->workspace_size, NULL);
    return skl_forward_backward(run->plan, &inputs, &run->kl_only, &run->gradients, run->workspace,
                                run->workspace_size, NULL);
}
