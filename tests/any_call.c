#include "any_call.h"

#include "device.h"

const char *const call_names[CALL_KINDS] = {
    [FORWARD] = "skl_forward",
    [BACKWARD] = "skl_backward",
    [ONE_PASS] = "skl_forward_backward",
    [PARTIAL] = "skl_partial",
    [ATTENTION_BACKWARD] = "skl_attention_backward",
    [ATTENTION_FORWARD] = "skl_attention_forward",
    [STATS] = "skl_attention_stats",
    [MERGE] = "skl_states_merge",
    [FINISH] = "skl_states_finish",
    [CHECK] = "skl_inputs_check",
};

static skl_rows rows_of(call_kind kind, const fixture *f, const fixture_results *results)
{
    if (kind == ONE_PASS || kind == ATTENTION_BACKWARD)
        return results_one_pass_rows(f, results);
    skl_rows rows = results_rows(results);
    if (kind == FINISH)
        rows.dot_t.data = rows.cross_entropy.data = rows.entropy.data = rows.mass.data = NULL;
    return rows;
}

void any_call_init(any_call *call, call_kind kind, const fixture *f, const fixture_results *results)
{
    *call = (any_call){.inputs_address = &call->inputs,
                       .rows_address = &call->rows,
                       .gradients_address = &call->gradients,
                       .attention_address = &call->attention,
                       .stats_address = &call->stats,
                       .v_s_address = &call->attention.v_s,
                       .o_s_address = &call->o_s,
                       .inputs = f->inputs,
                       .rows = rows_of(kind, f, results),
                       .gradients = results_gradients(results),
                       .attention = results_attention(f, results),
                       .stats = {.struct_size = sizeof(skl_stats),
                                 .entropy = tensor_output(&results->kl), /* row vectors of this size */
                                 .max_logit = tensor_output(&results->lse_s)},
                       .o_s = tensor_output(&results->o_s),
                       .key_end = f->problem.len_k};
    call->attention.struct_size = sizeof call->attention; /* a fixture without values has none */
}

skl_status any_call_run(call_kind kind, const any_call *c)
{
    switch (kind) {
    case FORWARD:
        return skl_forward(c->plan, c->inputs_address, c->rows_address, c->workspace, c->workspace_size, NULL);
    case BACKWARD:
        return skl_backward(c->plan, c->inputs_address, c->gradients_address, c->workspace, c->workspace_size, NULL);
    case ONE_PASS:
        return skl_forward_backward(c->plan, c->inputs_address, c->rows_address, c->gradients_address, c->workspace,
                                    c->workspace_size, NULL);
    case PARTIAL:
        return skl_partial(c->plan, c->inputs_address, c->key_begin, c->key_end, c->states, c->workspace,
                           c->workspace_size, NULL);
    case ATTENTION_BACKWARD:
        return skl_attention_backward(c->plan, c->inputs_address, c->attention_address, c->rows_address,
                                      c->gradients_address, c->workspace, c->workspace_size, NULL);
    case ATTENTION_FORWARD:
        return skl_attention_forward(c->plan, c->inputs_address, c->v_s_address, c->rows_address, c->o_s_address,
                                     c->workspace, c->workspace_size, NULL);
    case STATS:
        return skl_attention_stats(c->plan, c->inputs_address, c->stats_address, c->workspace, c->workspace_size,
                                   NULL);
    case MERGE:
        return skl_states_merge(c->plan, c->states, c->from, NULL);
    case FINISH:
        return skl_states_finish(c->plan, c->inputs_address, c->states, c->rows_address, NULL);
    case CHECK:
        return skl_inputs_check(c->plan, c->inputs_address);
    case CALL_KINDS:
        break;
    }
    test_abandon("call kind %d", (int)kind);
}

skl_status any_call_run_in_workspace(call_kind kind, const any_call *call)
{
    const size_t size = skl_plan_workspace_size(call->plan, (skl_op)kind);
    test_memory workspace = memory_create(size, SKL_WORKSPACE_ALIGNMENT);
    any_call with_workspace = *call;
    with_workspace.workspace = workspace.data, with_workspace.workspace_size = size;
    const skl_status status = any_call_run(kind, &with_workspace);
    device_wait();
    memory_destroy(&workspace);
    return status;
}
