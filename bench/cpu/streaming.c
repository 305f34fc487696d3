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

static void attach(streaming *run, const skl_problem *problem, const bench_tensors *tensors)
{
    const int64_t heads = problem->heads_s, length = problem->len_q, dim = problem->dim_s;
    run->inputs = (skl_inputs){
        .struct_size = sizeof run->inputs,
        .q_t = skl_input_contiguous(tensors->q_t, heads, length, dim),
        .k_t = skl_input_contiguous(tensors->k_t, heads, length, dim),
        .q_s = skl_input_contiguous(tensors->q_s, heads, length, dim),
        .k_s = skl_input_contiguous(tensors->k_s, heads, length, dim),
        .lse_t = skl_input_contiguous(tensors->lse_t, heads, length, 1),
        .lse_s = skl_input_contiguous(tensors->lse_s, heads, length, 1),
        .grad_kl = skl_input_contiguous(tensors->grad_kl, heads, length, 1),
    };
    run->rows = (skl_rows){
        .struct_size = sizeof run->rows,
        .kl = skl_output_contiguous(tensors->kl, heads, length, 1),
        .lse_t = skl_output_contiguous(tensors->lse_t, heads, length, 1),
        .lse_s = skl_output_contiguous(tensors->lse_s, heads, length, 1),
    };
    run->gradients = (skl_gradients){
        .struct_size = sizeof run->gradients,
        .dq_s = skl_output_contiguous(tensors->dq_s, heads, length, dim),
        .dk_s = skl_output_contiguous(tensors->dk_s, heads, length, dim),
    };
    run->kl_only = (skl_rows){.struct_size = sizeof run->kl_only, .kl = run->rows.kl};
}

skl_status streaming_open(streaming *run, const skl_problem *problem, const skl_options *options,
                          const bench_tensors *tensors)
{
    *run = (streaming){.plan = NULL};
    const skl_status status = skl_plan_create(&run->plan, problem, options);
    if (status != SKL_OK)
        return status;
    attach(run, problem, tensors);
    run->workspace_size = workspace_size_of(run->plan);
    return device_allocate(SKL_CPU, run->workspace_size, "the workspace", &run->workspace);
}

void streaming_close(streaming *run)
{
    skl_plan_destroy(run->plan);
    device_free(SKL_CPU, run->workspace);
    *run = (streaming){0};
}

skl_status streaming_run(const streaming *run, bench_pass pass)
{
    skl_inputs inputs = run->inputs;
    if (pass == BENCH_FORWARD) { /* it writes the LSEs, and outputs must not overlap inputs */
        inputs.lse_t = inputs.lse_s = (skl_input){0};
        return skl_forward(run->plan, &inputs, &run->rows, run->workspace, run->workspace_size, NULL);
    }
    if (pass == BENCH_BACKWARD)
        return skl_backward(run->plan, &inputs, &run->gradients, run->workspace, run->workspace_size, NULL);
    return skl_forward_backward(run->plan, &inputs, &run->kl_only, &run->gradients, run->workspace,
                                run->workspace_size, NULL);
}
