#include "calls.h"

#include <stdlib.h>
#include <string.h>

#include "any_call.h"
#include "device.h"

int kernel_supports(const char *kernel, const skl_problem *problem)
{
    if (test_device() == SKL_CPU)
        return 1;
    skl_options options = skl_options_default();
    options.device = test_device();
    options.device_index = test_device_index();
    options.kernel = kernel;
    skl_plan *plan = NULL;
    const skl_status status = skl_plan_create(&plan, problem, &options);
    skl_plan_destroy(plan);
    return status == SKL_OK;
}

const char *problem_kernel(const skl_problem *problem, int32_t index)
{
    for (int32_t k = 0; test_kernel(k); k++)
        if (kernel_supports(test_kernel(k), problem) && index-- == 0)
            return test_kernel(k);
    return NULL;
}

const char *case_kernel(const test_case *c, int32_t index)
{
    const skl_problem problem = case_problem(c);
    return problem_kernel(&problem, index);
}

const char *attention_kernel(const skl_problem *problem, int32_t index)
{
    const char *kernel = NULL;
    for (int32_t k = 0; (kernel = problem_kernel(problem, k)) != NULL; k++) {
        skl_plan *const plan = test_plan(problem, kernel, 1);
        const int supported = skl_plan_supports(plan, SKL_OP_ATTENTION_BACKWARD);
        skl_plan_destroy(plan);
        if (supported && index-- == 0)
            break;
    }
    return kernel;
}

void run_forward(const skl_plan *plan, const skl_inputs *inputs, const skl_rows *rows)
{
    const any_call call = {.plan = plan, .inputs_address = inputs, .rows_address = rows};
    assert_ok(any_call_run_in_workspace(FORWARD, &call));
}

void run_backward(const skl_plan *plan, const skl_inputs *inputs, const skl_gradients *gradients)
{
    const any_call call = {.plan = plan, .inputs_address = inputs, .gradients_address = gradients};
    assert_ok(any_call_run_in_workspace(BACKWARD, &call));
}

void run_forward_backward(const skl_plan *plan, const skl_inputs *inputs, const skl_rows *rows,
                          const skl_gradients *gradients)
{
    const any_call call = {
        .plan = plan, .inputs_address = inputs, .rows_address = rows, .gradients_address = gradients};
    assert_ok(any_call_run_in_workspace(ONE_PASS, &call));
}

void run_partial(const skl_plan *plan, const skl_inputs *inputs, int64_t key_begin, int64_t key_end,
                 skl_row_state *states)
{
    const any_call call = {
        .plan = plan, .inputs_address = inputs, .key_begin = key_begin, .key_end = key_end, .states = states};
    assert_ok(any_call_run_in_workspace(PARTIAL, &call));
}

/* Fails the test unless the last call was refused by a backend that has no kernel for it. */
static void assert_attention_refused(skl_op op, int explained)
{
    const int forward = op == SKL_OP_ATTENTION_FORWARD;
    const char *const message = skl_last_error();
    const char *const instead = forward ? "call your attention and skl_forward"
                                        : "call skl_forward_backward and the backward of your attention";
    if ((!forward && test_device() != SKL_CUDA) || !strstr(message, instead))
        test_abandon("skl_attention_%s: %s", forward ? "forward" : "backward", message);
    /* skl_plan_explain assumes that values and gradients are aligned. */
    if (explained && !strstr(message, "begins at an odd element") && !strstr(message, "TMA cannot address v_s"))
        test_abandon("skl_plan_explain names launches of a call that is refused: %s", message);
}

/* Whether the call ran: skl_plan_explain names its launches exactly then. */
static int run_attention(call_kind kind, const any_call *call)
{
    const skl_op op = (skl_op)kind;
    const int explained = skl_plan_explain(call->plan, call->inputs_address, op, NULL, 0) > 0;
    const skl_status status = any_call_run_in_workspace(kind, call);
    if (status == SKL_ERROR_UNSUPPORTED) {
        assert_attention_refused(op, explained);
        return 0;
    }
    assert_ok(status);
    if (!explained)
        test_abandon("skl_plan_explain has no launch of a call that runs");
    return 1;
}

int run_attention_forward(const skl_plan *plan, const skl_inputs *inputs, const skl_input *v_s, const skl_rows *rows,
                          const skl_output *o_s)
{
    const any_call call = {
        .plan = plan, .inputs_address = inputs, .v_s_address = v_s, .rows_address = rows, .o_s_address = o_s};
    return run_attention(ATTENTION_FORWARD, &call);
}

int run_attention_backward(const skl_plan *plan, const skl_inputs *inputs, const skl_attention *attention,
                           const skl_rows *rows, const skl_gradients *gradients)
{
    const any_call call = {.plan = plan,
                           .inputs_address = inputs,
                           .attention_address = attention,
                           .rows_address = rows,
                           .gradients_address = gradients};
    return run_attention(ATTENTION_BACKWARD, &call);
}

void run_merge(const skl_plan *plan, skl_row_state *into, const skl_row_state *from)
{
    assert_ok(skl_states_merge(plan, into, from, NULL));
    device_wait();
}

void run_finish(const skl_plan *plan, const skl_inputs *inputs, const skl_row_state *states, const skl_rows *rows)
{
    assert_ok(skl_states_finish(plan, inputs, states, rows, NULL));
    device_wait();
}

void run_both(const skl_plan *plan, const fixture *f, const fixture_results *results)
{
    const skl_rows rows = results_rows(results);
    const skl_gradients gradients = results_gradients(results);
    run_forward(plan, &f->inputs, &rows);
    const skl_inputs inputs = results_backward_inputs(f, results);
    run_backward(plan, &inputs, &gradients);
}

void run_kernel(const fixture *f, const char *kernel, int32_t threads, const fixture_results *results)
{
    skl_plan *const plan = test_plan(&f->problem, kernel, threads);
    run_both(plan, f, results);
    skl_plan_destroy(plan);
}

skl_row_state *states_create(const fixture *f)
{
    enum { PAGE = 4096 }; /* full pages, so that the device can share them */
    const size_t size = (size_t)(f->batch * f->problem.heads_s * f->length_q) * sizeof(skl_row_state);
    const size_t pages_size = (size / PAGE + 1) * PAGE;
    skl_row_state *const states = aligned_alloc(PAGE, pages_size);
    if (states == NULL)
        test_abandon("out of memory: %zu bytes", pages_size);
    memset(states, POISON, pages_size);
    device_share(states, pages_size);
    return states;
}

void states_destroy(skl_row_state *states)
{
    device_unshare(states);
    free(states);
}
