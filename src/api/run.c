#include "base/arrays.h"
#include "base/backend.h"
#include "base/status.h"
#include "base/structs.h"
#include "base/tensors.h"

static const skl_rows no_rows = {.struct_size = sizeof(skl_rows)};
static const skl_gradients no_gradients = {.struct_size = sizeof(skl_gradients)};

static const skl_range all_keys = {0, INT64_MAX};

static skl_status check_given(const void *argument, const char *name)
{
    return argument != NULL ? SKL_OK : skl_fail(SKL_ERROR_ARGUMENT, "%s=NULL: must be given", name);
}

/* Reads the caller's structs into the call, checks all of it and runs it. */
static skl_status read_and_run(const skl_plan *plan, skl_call *call, const skl_inputs *inputs, const skl_rows *rows,
                               const skl_gradients *gradients, size_t workspace_size)
{
    SKL_TRY(check_given(plan, "plan"));
    SKL_TRY(skl_struct_read(&skl_struct_inputs, &call->inputs, inputs));
    SKL_TRY(skl_struct_read(&skl_struct_rows, &call->rows, rows));
    SKL_TRY(skl_struct_read(&skl_struct_gradients, &call->gradients, gradients));
    SKL_TRY(skl_call_check(plan, call, workspace_size));
    SKL_TRY(plan->backend->run(plan, call));
    return skl_call_has_sink_gradients(call) ? plan->backend->sink_gradients(plan, call) : SKL_OK;
}

skl_status skl_inputs_check(const skl_plan *plan, const skl_inputs *inputs)
{
    skl_inputs copy;
    SKL_TRY(check_given(plan, "plan"));
    SKL_TRY(skl_struct_read(&skl_struct_inputs, &copy, inputs));
    SKL_TRY(skl_inputs_check_layout(&plan->problem, &copy, SKL_OP_FORWARD));
    return skl_arrays_check_values(&plan->problem, &copy);
}

skl_status skl_forward(const skl_plan *plan, const skl_inputs *inputs, const skl_rows *rows, void *workspace,
                       size_t workspace_size, skl_stream stream)
{
    skl_call call = {.op = SKL_OP_FORWARD, .keys = all_keys, .workspace = workspace, .stream = stream};
    return read_and_run(plan, &call, inputs, rows, &no_gradients, workspace_size);
}

skl_status skl_backward(const skl_plan *plan, const skl_inputs *inputs, const skl_gradients *gradients,
                        void *workspace, size_t workspace_size, skl_stream stream)
{
    skl_call call = {.op = SKL_OP_BACKWARD, .keys = all_keys, .workspace = workspace, .stream = stream};
    return read_and_run(plan, &call, inputs, &no_rows, gradients, workspace_size);
}

skl_status skl_forward_backward(const skl_plan *plan, const skl_inputs *inputs, const skl_rows *rows,
                                const skl_gradients *gradients, void *workspace, size_t workspace_size,
                                skl_stream stream)
{
    skl_call call = {.op = SKL_OP_FORWARD_BACKWARD, .keys = all_keys, .workspace = workspace, .stream = stream};
    return read_and_run(plan, &call, inputs, rows, gradients, workspace_size);
}

skl_status skl_attention_forward(const skl_plan *plan, const skl_inputs *inputs, const skl_input *v_s,
                                 const skl_rows *rows, const skl_output *o_s, void *workspace, size_t workspace_size,
                                 skl_stream stream)
{
    SKL_TRY(check_given(v_s, "v_s"));
    SKL_TRY(check_given(o_s, "o_s"));
    const skl_attention values = {.struct_size = sizeof values, .v_s = *v_s};
    skl_call call = {.op = SKL_OP_ATTENTION_FORWARD,
                     .attention = &values,
                     .o_s = *o_s,
                     .keys = all_keys,
                     .workspace = workspace,
                     .stream = stream};
    return read_and_run(plan, &call, inputs, rows, &no_gradients, workspace_size);
}

skl_status skl_attention_backward(const skl_plan *plan, const skl_inputs *inputs, const skl_attention *attention,
                                  const skl_rows *rows, const skl_gradients *gradients, void *workspace,
                                  size_t workspace_size, skl_stream stream)
{
    skl_attention copy;
    skl_call call = {.op = SKL_OP_ATTENTION_BACKWARD,
                     .attention = &copy,
                     .keys = all_keys,
                     .workspace = workspace,
                     .stream = stream};
    SKL_TRY(skl_struct_read(&skl_struct_attention, &copy, attention));
    return read_and_run(plan, &call, inputs, rows, gradients, workspace_size);
}

skl_status skl_attention_stats(const skl_plan *plan, const skl_inputs *inputs, const skl_stats *stats,
                               void *workspace, size_t workspace_size, skl_stream stream)
{
    skl_stats copy;
    skl_call call = {
        .op = SKL_OP_ATTENTION_STATS, .stats = &copy, .keys = all_keys, .workspace = workspace, .stream = stream};
    SKL_TRY(skl_struct_read(&skl_struct_stats, &copy, stats));
    return read_and_run(plan, &call, inputs, &no_rows, &no_gradients, workspace_size);
}

skl_status skl_partial(const skl_plan *plan, const skl_inputs *inputs, int64_t key_begin, int64_t key_end,
                       skl_row_state *states, void *workspace, size_t workspace_size, skl_stream stream)
{
    skl_call call = {.op = SKL_OP_PARTIAL,
                     .keys = {key_begin, key_end},
                     .states = states,
                     .workspace = workspace,
                     .stream = stream};
    return read_and_run(plan, &call, inputs, &no_rows, &no_gradients, workspace_size);
}

skl_status skl_states_merge(const skl_plan *plan, skl_row_state *into, const skl_row_state *from, skl_stream stream)
{
    SKL_TRY(check_given(plan, "plan"));
    SKL_TRY(skl_merge_check(&plan->problem, into, from));
    return skl_state_count(&plan->problem) == 0 ? SKL_OK : plan->backend->states_merge(plan, into, from, stream);
}

skl_status skl_states_finish(const skl_plan *plan, const skl_inputs *inputs, const skl_row_state *states,
                             const skl_rows *rows, skl_stream stream)
{
    skl_call call = {.op = SKL_OP_FINISH,
                     .states = (skl_row_state *)(uintptr_t)states, /* skl_states_finish writes no state */
                     .stream = stream};
    SKL_TRY(check_given(plan, "plan"));
    SKL_TRY(skl_struct_read(&skl_struct_rows, &call.rows, rows));
    if (inputs != NULL)
        SKL_TRY(skl_struct_read(&skl_struct_inputs, &call.inputs, inputs));
    SKL_TRY(skl_call_check(plan, &call, 0));
    return plan->backend->states_finish(plan, &call);
}
