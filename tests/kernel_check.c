#include "kernel_check.h"

#include <assert.h>
#include <stdio.h>

#include "calls.h"
#include "device.h"

/* One kernel on one case. */
typedef struct kernel_run {
    const fixture *fixture;
    const check_options *options;
    skl_plan *plan;
    fixture_results saved;   /* row results of the forward, which the other calls read */
    fixture_results results; /* of the current call */
    char label[128];
} kernel_run;

check_options check_options_default(void)
{
    return (check_options){.threads = 2, .results = ALL_RESULTS, .range_count = 3};
}

static const char *begin_call(kernel_run *run, const char *call)
{
    snprintf(run->label, sizeof run->label, "%s: %s: %s", run->fixture->test_case->name, skl_plan_kernel(run->plan),
             call);
    results_poison(&run->results);
    return run->label;
}

/* The gradients of a problem whose buffers are given. */
static uint32_t requested_gradients(const fixture_results *r)
{
    return (r->dq_t.data ? SKL_DQ_T : 0U) | (r->dk_t.data ? SKL_DK_T : 0U) | (r->dq_s.data ? SKL_DQ_S : 0U) |
           (r->dk_s.data ? SKL_DK_S : 0U) | (r->dw_s.data ? SKL_DW_S : 0U) | (r->dsink_t.data ? SKL_DSINK_T : 0U) |
           (r->dsink_s.data ? SKL_DSINK_S : 0U);
}

static int is_pooled(const kernel_run *run)
{
    return run->fixture->problem.pool != SKL_POOL_NONE;
}

static uint32_t needs_of(const kernel_run *run, const fixture_results *wanted, skl_op op)
{
    skl_problem problem = run->fixture->problem;
    problem.gradients = requested_gradients(wanted);
    return skl_problem_needs(&problem, op);
}

/* All row results: the other calls read them. */
static int check_forward(kernel_run *run)
{
    const char *const label = begin_call(run, "forward");
    const skl_rows rows = results_rows(&run->saved);
    run_forward(run->plan, &run->fixture->inputs, &rows);
    return rows_mismatch(run->fixture, &run->saved, label);
}

/* lse_t as an input that its result replaces. */
static skl_input lse_in_place(const kernel_run *run, const skl_input *given, const test_tensor *from)
{
    if (!run->options->in_place || !given->data)
        return *given;
    tensor_copy(&run->results.lse_t, from);
    return tensor_input(&run->results.lse_t);
}

static int check_some_rows(kernel_run *run)
{
    const fixture *const f = run->fixture;
    const char *const label = begin_call(run, "forward of some results");
    fixture_results wanted = results_subset(&run->results, run->options->results);
    skl_inputs inputs = f->inputs;
    inputs.lse_t = lse_in_place(run, &inputs.lse_t, &f->lse_t);
    if (inputs.lse_t.data == run->results.lse_t.data)
        wanted.lse_t = run->results.lse_t;
    const skl_rows rows = results_rows(&wanted);
    run_forward(run->plan, &inputs, &rows);
    return rows_mismatch(f, &wanted, label);
}

static int check_backward(kernel_run *run)
{
    const char *const label = begin_call(run, "backward");
    const fixture_results wanted = results_subset(&run->results, run->options->results);
    skl_inputs inputs = results_backward_inputs(run->fixture, &run->saved);
    if (run->options->sparing) {
        const uint32_t needs = needs_of(run, &wanted, SKL_OP_BACKWARD);
        inputs.kl.data = needs & SKL_ROW_KL ? inputs.kl.data : NULL;
        inputs.dot_t.data = needs & SKL_ROW_DOT_T ? inputs.dot_t.data : NULL;
    }
    const skl_gradients gradients = results_gradients(&wanted);
    run_backward(run->plan, &inputs, &gradients);
    return gradients_mismatch(run->fixture, &wanted, skl_plan_kernel(run->plan), label);
}

/* Inputs of a one-pass call. */
static skl_inputs one_pass_inputs(const kernel_run *run)
{
    skl_inputs inputs = results_one_pass_inputs(run->fixture, &run->saved);
    if (is_pooled(run))
        inputs.lse_t = lse_in_place(run, &inputs.lse_t, &run->fixture->lse_t);
    if (run->options->in_place) { /* poisoned: they are not read */
        inputs.kl = tensor_input(&run->results.kl);
        inputs.dot_t = tensor_input(&run->results.dot_t);
    }
    return inputs;
}

static int check_forward_backward(kernel_run *run)
{
    const char *const label = begin_call(run, "forward_backward");
    const skl_inputs inputs = one_pass_inputs(run);
    fixture_results wanted = results_subset(&run->results, run->options->results);
    if (is_pooled(run))
        wanted.lse_t = run->results.lse_t, wanted.lse_s = run->results.lse_s;
    else
        wanted.lse_t.data = wanted.lse_s.data = wanted.mass.data = NULL;
    if (run->fixture->test_case->lse == LSE_WIDER) /* these need the LSE that includes hidden keys */
        wanted.dot_t.data = wanted.dq_t.data = wanted.dk_t.data = NULL;
    const uint32_t needs = needs_of(run, &wanted, SKL_OP_FORWARD_BACKWARD);
    wanted.kl = needs & SKL_ROW_KL ? run->results.kl : wanted.kl;
    wanted.dot_t = needs & SKL_ROW_DOT_T ? run->results.dot_t : wanted.dot_t;
    const skl_rows rows = results_rows(&wanted);
    const skl_gradients gradients = results_gradients(&wanted);
    run_forward_backward(run->plan, &inputs, &rows, &gradients);
    return rows_mismatch(run->fixture, &wanted, label) +
           gradients_mismatch(run->fixture, &wanted, skl_plan_kernel(run->plan), label);
}

static int check_attention_forward(kernel_run *run)
{
    const fixture *const f = run->fixture;
    const char *const label = begin_call(run, "attention_forward");
    fixture_results wanted = results_subset(&run->results, run->options->results);
    wanted.o_s = run->results.o_s;
    const skl_rows rows = results_rows(&wanted);
    const skl_output o_s = tensor_output(&wanted.o_s);
    if (!run_attention_forward(run->plan, &f->inputs, &f->attention.v_s, &rows, &o_s))
        return 0;
    return rows_mismatch(f, &wanted, label) + output_mismatch(f, &wanted, skl_plan_kernel(run->plan), label);
}

static int check_attention_backward(kernel_run *run)
{
    const fixture *const f = run->fixture;
    const char *const label = begin_call(run, "attention_backward");
    const skl_inputs inputs = one_pass_inputs(run);
    fixture_results wanted = results_subset(&run->results, run->options->results);
    wanted.lse_t.data = wanted.lse_s.data = NULL;
    if (needs_of(run, &wanted, SKL_OP_ATTENTION_BACKWARD) & SKL_ROW_KL)
        wanted.kl = run->results.kl;
    const skl_rows rows = results_rows(&wanted);
    const skl_gradients gradients = results_gradients(&wanted);
    const skl_attention attention = results_attention(f, &wanted);
    if (!run_attention_backward(run->plan, &inputs, &attention, &rows, &gradients))
        return 0;
    return rows_mismatch(f, &wanted, label) + attention_mismatch(f, &wanted, skl_plan_kernel(run->plan), label);
}

enum { MOST_RANGES = 8 };

/* Key ranges, some possibly empty, merged pair by pair in any order. */
static skl_row_state *merged_states(kernel_run *run, const skl_inputs *inputs, test_random *random)
{
    const fixture *const f = run->fixture;
    skl_row_state *states[MOST_RANGES];
    int64_t begin = 0;
    int count = run->options->range_count;
    assert(count >= 1 && count <= MOST_RANGES);
    for (int n = 0; n < count; n++) {
        const int64_t end = n + 1 == count ? f->problem.len_k : random_between(random, begin, f->problem.len_k);
        states[n] = states_create(f);
        run_partial(run->plan, inputs, begin, end, states[n]);
        begin = end;
    }
    for (; count > 1; count--) {
        const int64_t into = random_between(random, 0, count - 1);
        skl_row_state *const chosen = states[into];
        states[into] = states[count - 1];
        const int64_t from = random_between(random, 0, count - 2);
        run_merge(run->plan, chosen, states[from]);
        states_destroy(states[from]);
        states[from] = chosen;
    }
    return states[0];
}

static int check_partial(kernel_run *run)
{
    const fixture *const f = run->fixture;
    const char *const label = begin_call(run, "partial");
    test_random random = random_for(label);
    skl_inputs inputs = f->inputs;
    const test_tensor *const lse_t = f->test_case->lse == LSE_COMPUTED ? &run->saved.lse_t : &f->lse_t;
    inputs.lse_t = tensor_input(lse_t);
    skl_row_state *const states = merged_states(run, &inputs, &random);

    fixture_results wanted = results_subset(&run->results, run->options->results);
    wanted.dot_t.data = wanted.cross_entropy.data = wanted.entropy.data = wanted.mass.data = NULL;
    wanted.merges = run->options->range_count - 1;
    inputs.lse_t = lse_in_place(run, &inputs.lse_t, lse_t);
    if (inputs.lse_t.data == run->results.lse_t.data)
        wanted.lse_t = run->results.lse_t;
    const skl_rows rows = results_rows(&wanted);
    run_finish(run->plan, &inputs, states, &rows);
    states_destroy(states);
    return rows_mismatch(f, &wanted, label);
}

/* Gradients of a deterministic plan: correct, and with the same bits in a second run. */
static int check_deterministic(kernel_run *run)
{
    const char *const label = begin_call(run, "deterministic");
    run_both(run->plan, run->fixture, &run->results);
    run_both(run->plan, run->fixture, &run->saved);
    int mismatches = gradients_mismatch(run->fixture, &run->results, skl_plan_kernel(run->plan), label);
    const char *const different = results_difference(&run->results, &run->saved);
    if (different) {
        test_wrong("%s: %s differs between two runs", label, different);
        mismatches++;
    }
    mismatches += run->fixture->test_case->attention ? check_attention_backward(run) : 0;
    return mismatches + check_forward_backward(run);
}

int kernel_check(const fixture *f, const char *kernel, const check_options *options)
{
    kernel_run run = {.fixture = f, .options = options, .plan = test_plan(&f->problem, kernel, options->threads)};
    run.saved = results_create(f);
    run.results = results_create(f);
    int mismatches = check_forward(&run); /* must run first: the others read its results */
    if (options->results != ALL_RESULTS || options->in_place)
        mismatches += check_some_rows(&run);
    mismatches += check_backward(&run);
    mismatches += check_forward_backward(&run);
    mismatches += f->test_case->attention ? check_attention_forward(&run) + check_attention_backward(&run) : 0;
    mismatches +=
        skl_plan_supports(run.plan, SKL_OP_PARTIAL) ? check_partial(&run) : 0; /* not with a pooled teacher */
    for (int32_t kind = 1; kind < test_plan_kinds(); kind++) {
        skl_plan_destroy(run.plan);
        run.plan = test_plan_of_kind(&f->problem, kernel, kind);
        mismatches += check_deterministic(&run);
    }
    results_destroy(&run.saved);
    results_destroy(&run.results);
    skl_plan_destroy(run.plan);
    return mismatches;
}
