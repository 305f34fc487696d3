/* Calls with sinks: base/sinks.h has the formulas. Kernels compute the keys; steps over rows before and after them
 * add the sinks. */
#include "api/steps.h"

#include "base/needs.h"
#include "base/side.h"
#include "base/status.h"

static const skl_output none = {NULL, 0, 0, 0};

static size_t aligned(size_t size)
{
    return (size + SKL_WORKSPACE_ALIGNMENT - 1) / SKL_WORKSPACE_ALIGNMENT * SKL_WORKSPACE_ALIGNMENT;
}

static skl_input as_input(skl_output rows)
{
    const skl_input input = {rows.data, rows.stride_batch, rows.stride_head, rows.stride_row};
    return input;
}

static void add_run(skl_steps *steps, const skl_call *call)
{
    steps->at[steps->count++] = (skl_step){.kind = SKL_STEP_RUN, .call = *call};
}

/* A step over the rows of a call. LSEs come from its results, unless it covers the sink: then from its inputs. */
static skl_sink_rows rows_of(const skl_call *call, bool covers_t, bool covers_s)
{
    const skl_sink_rows rows = {.inputs = call->inputs,
                                .lse_t = covers_t ? call->inputs.lse_t : as_input(call->rows.lse_t),
                                .lse_s = covers_s ? call->inputs.lse_s : as_input(call->rows.lse_s),
                                .covers_t = covers_t,
                                .covers_s = covers_s,
                                .kl = call->rows.kl,
                                .out_t = call->rows.lse_t,
                                .out_s = call->rows.lse_s,
                                .stream = call->stream};
    return rows;
}

static void add_rows(skl_steps *steps, skl_sink_rows rows)
{
    steps->at[steps->count++] = (skl_step){.kind = SKL_STEP_SINK_ROWS, .rows = rows};
}

static void add_gradients(skl_steps *steps, const skl_call *call, skl_input kl)
{
    if (call->gradients.dsink_t != NULL || call->gradients.dsink_s != NULL)
        steps->at[steps->count++] = (skl_step){.kind = SKL_STEP_SINK_GRADIENTS, .call = *call, .kl = kl};
}

/* A teacher group needs LSEs with sinks before its mean. They are the caller's, or go to rows.lse_t first. */
static void add_group_forward(skl_steps *steps, const skl_call *call)
{
    skl_call inner = *call;
    if (call->inputs.lse_t.data == NULL && call->rows.lse_t.data != NULL) {
        skl_call lses = *call;
        lses.rows.kl = lses.rows.lse_s = none;
        add_run(steps, &lses);
        add_rows(steps, rows_of(&lses, false, false));
        inner.inputs.lse_t = as_input(call->rows.lse_t);
    }
    inner.rows.lse_t = none;
    if (inner.rows.kl.data != NULL || inner.rows.lse_s.data != NULL)
        add_run(steps, &inner);
    inner.rows.lse_t = call->rows.lse_t;
    add_rows(steps, rows_of(&inner, inner.inputs.lse_t.data != NULL, false));
}

static void add_forward(skl_steps *steps, const skl_plan *plan, const skl_call *call)
{
    if (skl_has_teacher_groups(&plan->problem)) {
        add_group_forward(steps, call);
        return;
    }
    add_run(steps, call);
    add_rows(steps, rows_of(call, false, false));
}

/* The LSE of B's keys alone, for a step over the rows of a one-pass call. From the probability of a sink that takes
 * nearly everything, that of the keys follows only with a large error, and B's is the one that is divided by. */
static size_t scratch_size(const skl_problem *p)
{
    return aligned((size_t)skl_state_count(p) * sizeof(float));
}

static skl_output scratch_of(const skl_plan *plan, const skl_call *call)
{
    const skl_problem *const p = &plan->problem;
    void *const data = (char *)call->workspace + plan->workspace_size[call->op] - scratch_size(p);
    return skl_output_contiguous(data, p->heads_s, p->packed ? p->total_q : p->len_q, 1);
}

void skl_sinks_extend_workspace(skl_plan *plan)
{
    /* Gradients may follow rows in a separate call. */
    size_t *const sizes = plan->workspace_size, backward_size = sizes[SKL_OP_BACKWARD];
    const size_t larger =
        backward_size > sizes[SKL_OP_FORWARD_BACKWARD] ? backward_size : sizes[SKL_OP_FORWARD_BACKWARD];
    sizes[SKL_OP_FORWARD_BACKWARD] = aligned(larger) + scratch_size(&plan->problem);
}

/* Gradients that read the KL of their row need it with the sink: then rows come first. */
static void add_forward_backward(skl_steps *steps, const skl_plan *plan, const skl_call *call)
{
    const bool kl_first = skl_call_needs(&plan->problem, call).kl;
    const bool reverse = plan->problem.direction == SKL_KL_REVERSE;
    skl_call rows = *call;
    *(reverse ? &rows.rows.lse_t : &rows.rows.lse_s) = scratch_of(plan, call);
    if (kl_first) {
        const skl_gradients no_gradients = {.struct_size = sizeof(skl_gradients)};
        rows.gradients = no_gradients;
    }
    add_run(steps, &rows);
    if (call->rows.kl.data != NULL) {
        skl_sink_rows step = rows_of(&rows, !reverse, reverse);
        step.out_t = step.out_s = none;
        add_rows(steps, step);
    }
    if (kl_first) {
        skl_call gradients = *call;
        gradients.op = SKL_OP_BACKWARD;
        gradients.inputs.kl = as_input(call->rows.kl);
        gradients.rows.kl = none;
        add_run(steps, &gradients);
    }
    add_gradients(steps, call, as_input(call->rows.kl));
}

void skl_steps_with_sinks(const skl_plan *plan, const skl_call *call, skl_steps *steps)
{
    steps->count = 0;
    switch (call->op) {
    case SKL_OP_FORWARD:
        add_forward(steps, plan, call);
        break;
    case SKL_OP_BACKWARD:
        add_run(steps, call);
        add_gradients(steps, call, call->inputs.kl);
        break;
    case SKL_OP_FORWARD_BACKWARD:
        add_forward_backward(steps, plan, call);
        break;
    default:
        add_run(steps, call); /* states have no sinks: skl_states_finish adds them */
    }
}

skl_status skl_run_with_sinks(const skl_plan *plan, const skl_call *call)
{
    const skl_backend *const backend = plan->backend;
    skl_steps steps;
    skl_steps_with_sinks(plan, call, &steps);
    for (int n = 0; n < steps.count; n++) {
        const skl_step *const step = &steps.at[n];
        SKL_TRY(step->kind == SKL_STEP_RUN         ? backend->run(plan, &step->call)
                : step->kind == SKL_STEP_SINK_ROWS ? backend->sink_rows(plan, &step->rows)
                                                   : backend->sink_gradients(plan, &step->call, &step->kl));
    }
    return SKL_OK;
}

skl_status skl_finish_with_sinks(const skl_plan *plan, const skl_call *call)
{
    const bool groups = skl_has_teacher_groups(&plan->problem);
    skl_call keys = *call;
    if (groups)
        keys.rows.lse_t = none; /* the given ones are returned */
    SKL_TRY(plan->backend->states_finish(plan, &keys));
    const skl_sink_rows rows = rows_of(call, groups, false);
    return plan->backend->sink_rows(plan, &rows);
}
