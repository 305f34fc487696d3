/* skl_plan_explain: builds the call that a caller would make, without its data, and lets the backend describe it. */
#include "api/contiguous.h"
#include "base/needs.h"
#include "base/stats.h"
#include "base/status.h"
#include "base/structs.h"
#include "base/tensors.h"

/* The row vectors that the operation requires, where the caller gave none. */
static void add_required_rows(const skl_problem *p, const skl_needs *needs, skl_call *call)
{
    const int64_t rows_q = skl_query_rows(p).rows;
    skl_inputs *const in = &call->inputs;
    const bool halves = skl_op_has_halves(p, call->op);
    if (halves) {
        call->rows.lse_t = skl_contiguous_output(p->heads_t, rows_q, 1);
        call->rows.lse_s = skl_contiguous_output(p->heads_s, rows_q, 1);
    }
    if (needs->lse_t && !halves && in->lse_t.data == NULL)
        in->lse_t = skl_contiguous_input(p->heads_t, rows_q, 1);
    if (needs->lse_s && !halves && in->lse_s.data == NULL)
        in->lse_s = skl_contiguous_input(p->heads_s, rows_q, 1);
    if (call->op == SKL_OP_BACKWARD && needs->kl && in->kl.data == NULL)
        in->kl = skl_contiguous_input(p->heads_s, rows_q, 1);
    if (call->op == SKL_OP_BACKWARD && needs->dot_t && in->dot_t.data == NULL)
        in->dot_t = skl_contiguous_input(p->heads_t, rows_q, 1);
    const bool forward_of_dots = call->op == SKL_OP_FORWARD && skl_needs_of(p, SKL_OP_BACKWARD, p->gradients).dot_t;
    if (forward_of_dots || (skl_op_is_one_pass(call->op) && needs->dot_t))
        call->rows.dot_t = skl_contiguous_output(p->heads_t, rows_q, 1);
}

static skl_gradients requested_gradients(const skl_problem *p)
{
    const int64_t rows_q = skl_query_rows(p).rows, rows_k = skl_key_rows(p).rows;
    const skl_output none = {NULL, 0, 0, 0};
    const skl_gradients gradients = {
        .struct_size = sizeof(skl_gradients),
        .dq_t = p->gradients & SKL_DQ_T ? skl_contiguous_output(p->heads_t, rows_q, p->dim_t) : none,
        .dk_t = p->gradients & SKL_DK_T ? skl_contiguous_output(p->key_heads_t, rows_k, p->dim_t) : none,
        .dq_s = p->gradients & SKL_DQ_S ? skl_contiguous_output(skl_query_heads_s(p), rows_q, p->dim_s) : none,
        .dk_s = p->gradients & SKL_DK_S ? skl_contiguous_output(p->key_heads_s, rows_k, p->dim_s) : none,
        .dw_s = p->gradients & SKL_DW_S ? skl_contiguous_output(p->heads_s, rows_q, p->index_heads) : none,
        .dsink_t = p->gradients & SKL_DSINK_T ? SKL_PLACEHOLDER : NULL,
        .dsink_s = p->gradients & SKL_DSINK_S ? SKL_PLACEHOLDER : NULL};
    return gradients;
}

static skl_attention contiguous_attention(const skl_problem *p)
{
    const skl_attention attention = {.struct_size = sizeof(skl_attention),
                                     .v_s = skl_contiguous_input(p->key_heads_s, skl_key_rows(p).rows, p->dim_s),
                                     .o_s = skl_contiguous_input(p->heads_s, skl_query_rows(p).rows, p->dim_s),
                                     .do_s = skl_contiguous_input(p->heads_s, skl_query_rows(p).rows, p->dim_s),
                                     .dv_s = skl_contiguous_output(p->key_heads_s, skl_key_rows(p).rows, p->dim_s)};
    return attention;
}

/* All results of skl_attention_stats. */
static skl_stats contiguous_stats(const skl_problem *p, bool lse_given)
{
    const int64_t rows_q = skl_query_rows(p).rows, rows_k = skl_key_rows(p).rows;
    const skl_output none = {NULL, 0, 0, 0}, of_rows = skl_contiguous_output(p->heads_s, rows_q, 1);
    const skl_output of_keys = skl_contiguous_output(p->heads_s, rows_k, 1);
    const skl_output top = skl_contiguous_output(p->heads_s, rows_q, SKL_STATS_TOP_MAX);
    const skl_stats stats = {.struct_size = sizeof(skl_stats),
                             .key_sum = of_keys,
                             .key_max = of_keys,
                             .lse = lse_given ? none : of_rows,
                             .entropy = of_rows,
                             .max_logit = of_rows,
                             .expected_distance = of_rows,
                             .head_max_logit = SKL_PLACEHOLDER,
                             .distance_mass = SKL_PLACEHOLDER,
                             .distance_count = SKL_STATS_BUCKETS_MAX,
                             .range_count = SKL_STATS_RANGES_MAX,
                             .key_ranges = SKL_PLACEHOLDER,
                             .range_mass = skl_contiguous_output(p->heads_s, rows_q, SKL_STATS_RANGES_MAX),
                             .range_sum = SKL_PLACEHOLDER,
                             .top_k = SKL_STATS_TOP_MAX,
                             .top_keys = top,
                             .top_p = top,
                             .chosen_count = 1,
                             .chosen_rows = SKL_PLACEHOLDER,
                             .weights = SKL_PLACEHOLDER};
    return stats;
}

static skl_call call_of(const skl_problem *p, const skl_inputs *inputs, skl_op op)
{
    const skl_needs needs = skl_needs_of(p, op, p->gradients);
    skl_call call = {.op = op,
                     .inputs = inputs != NULL ? *inputs : skl_contiguous_inputs(p),
                     .rows = {.struct_size = sizeof(skl_rows)},
                     .gradients = {.struct_size = sizeof(skl_gradients)},
                     .keys = {0, INT64_MAX},
                     .workspace = SKL_PLACEHOLDER};
    add_required_rows(p, &needs, &call);
    if (op == SKL_OP_FORWARD || op == SKL_OP_ATTENTION_FORWARD || skl_op_is_one_pass(op))
        call.rows.kl = skl_contiguous_output(p->heads_s, skl_query_rows(p).rows, 1);
    if (op == SKL_OP_ATTENTION_FORWARD)
        call.o_s = skl_contiguous_output(p->heads_s, skl_query_rows(p).rows, p->dim_s);
    if (needs.gradients)
        call.gradients = requested_gradients(p);
    if (op == SKL_OP_PARTIAL)
        call.states = SKL_PLACEHOLDER;
    return call;
}

/* Copies the caller's inputs to `copy`, if there are any. */
static skl_status check_arguments(const skl_plan *plan, const skl_inputs *inputs, skl_inputs *copy, skl_op op,
                                  const char *buffer, size_t size)
{
    if (plan == NULL)
        return skl_fail(SKL_ERROR_ARGUMENT, "plan=NULL: must be given");
    if (buffer == NULL && size > 0)
        return skl_fail(SKL_ERROR_ARGUMENT, "buffer=NULL: must be given unless size=0");
    skl_status status = skl_op_check(op);
    if (status == SKL_OK)
        status = skl_op_check_for(&plan->problem, op);
    if (status == SKL_OK && inputs != NULL)
        status = skl_struct_read(&skl_struct_inputs, copy, inputs);
    return status == SKL_OK && inputs != NULL ? skl_inputs_check_layout(&plan->problem, copy, op) : status;
}

static skl_status explain(const skl_plan *plan, const skl_inputs *inputs, skl_op op, skl_text *text)
{
    const skl_attention attention = contiguous_attention(&plan->problem);
    skl_call call = call_of(&plan->problem, inputs, op);
    const skl_stats stats = contiguous_stats(&plan->problem, call.inputs.lse_s.data != NULL);
    call.attention = skl_op_is_attention(op) ? &attention : NULL;
    call.stats = op == SKL_OP_ATTENTION_STATS ? &stats : NULL;
    SKL_TRY(plan->backend->explain(plan, &call, text));
    const bool on_gpu = plan->backend->device == SKL_CUDA;
    if (skl_call_has_sink_gradients(&call))
        skl_text_add(text,
                     "sinks: %s, sink gradients, 1 %s, 0 bytes of workspace (the gradient of a sink is a sum over "
                     "rows)\n",
                     on_gpu ? "cuda_general" : plan->kernel_name, on_gpu ? "split" : "thread");
    return SKL_OK;
}

size_t skl_plan_explain(const skl_plan *plan, const skl_inputs *inputs, skl_op op, char *buffer, size_t size)
{
    skl_text text = skl_text_start(buffer, buffer != NULL ? size : 0);
    skl_inputs copy;
    if (check_arguments(plan, inputs, &copy, op, buffer, size) != SKL_OK)
        return 0;
    if (explain(plan, inputs != NULL ? &copy : NULL, op, &text) != SKL_OK) {
        (void)skl_text_start(buffer, size);
        return 0;
    }
    if (text.length == 0)
        skl_text_add(&text, "nothing to launch (no row, no key or no gradient)\n");
    return text.length;
}

int skl_plan_supports(const skl_plan *plan, skl_op op)
{
    skl_text text = skl_text_start(NULL, 0);
    skl_inputs unused;
    return check_arguments(plan, NULL, &unused, op, NULL, 0) == SKL_OK && explain(plan, NULL, op, &text) == SKL_OK;
}
