#include "cli/common/runner.h"
#include "cli/common/cli.h"
#include "cli/common/options.h"
#include "device/device.h"
#include "cli/term/term.h"
#include "oracle.h"

#include <inttypes.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

static size_t workspace_size_of(const skl_plan *plan, const skl_problem *problem)
{
    const size_t forward = skl_plan_workspace_size(plan, SKL_OP_FORWARD);
    const size_t backward = problem->gradients ? skl_plan_workspace_size(plan, SKL_OP_BACKWARD) : 0;
    return forward > backward ? forward : backward;
}

void runner_open(plan_runner *runner, const skl_problem *problem, const skl_options *options)
{
    *runner = (plan_runner){.device = options->device, .resident_begin = -1, .peak_growth = -1};
    runner->watched = options->progress != NULL;
    runner->tensors = mirror_of(problem, options->device);
    runner->plan = plan_create(problem, options);
    runner->workspace_size = workspace_size_of(runner->plan, problem);
    cli_check(device_open(options->device, options->device_index));
    cli_check(device_describe(options->device, runner->gpu, sizeof runner->gpu));
    cli_check(device_allocate(options->device, runner->workspace_size, "the workspace", &runner->workspace));
}

/* The choice of kernels may depend on the addresses: `inputs` are in device memory. */
static void explain(plan_runner *runner, const skl_inputs *inputs, skl_op op)
{
    if (runner->explains)
        runner->explanations[op] = explain_plan(runner->plan, inputs, op);
    if (runner->explains && runner->explanations[op] == NULL)
        cli_check(SKL_ERROR_MEMORY);
}

static void begin(plan_runner *runner, const char *label)
{
    if (runner->watched && runner->resident_begin < 0)
        runner->resident_begin = resident_begin();
    if (runner->watched)
        term_progress_begin(label);
    cli_check(device_timer_start(&runner->timer, runner->device));
}

static void end(plan_runner *runner, skl_status status, double *seconds)
{
    cli_check(status);
    cli_check(device_timer_stop(&runner->timer, seconds));
    cli_check(mirror_fetch(&runner->tensors));
    if (runner->watched)
        term_progress_end();
    if (runner->watched && runner->device == SKL_CPU)
        runner->peak_growth = resident_peak_growth(runner->resident_begin);
}

void runner_forward(plan_runner *runner, const skl_inputs *inputs, const skl_rows *rows)
{
    skl_inputs read = *inputs;
    skl_rows written = *rows;
    mirror_destroy(&runner->tensors);
    cli_check(mirror_call(&runner->tensors, &read, &written, NULL));
    explain(runner, &read, SKL_OP_FORWARD);
    begin(runner, "forward");
    end(runner, skl_forward(runner->plan, &read, &written, runner->workspace, runner->workspace_size, NULL),
        &runner->forward_seconds);
}

void runner_backward(plan_runner *runner, const skl_inputs *inputs, const skl_gradients *gradients)
{
    skl_inputs read = *inputs;
    skl_gradients written = *gradients;
    cli_check(mirror_call(&runner->tensors, &read, NULL, &written));
    explain(runner, &read, SKL_OP_BACKWARD);
    begin(runner, "backward");
    end(runner, skl_backward(runner->plan, &read, &written, runner->workspace, runner->workspace_size, NULL),
        &runner->backward_seconds);
}

int32_t runner_distance_buckets(const skl_problem *problem)
{
    const int64_t longest = problem->len_k > problem->len_q ? problem->len_k : problem->len_q;
    int32_t count = 1;
    while (count < 40 && (longest - 1) >> (count - 1) > 0)
        count++;
    return count;
}

double runner_stats(plan_runner *runner, const skl_inputs *inputs, const skl_stats *stats)
{
    skl_inputs read = *inputs;
    skl_stats written = *stats;
    void *workspace = NULL;
    double seconds = 0;
    const size_t size = skl_plan_workspace_size(runner->plan, SKL_OP_ATTENTION_STATS);
    if (!skl_plan_supports(runner->plan, SKL_OP_ATTENTION_STATS))
        cli_check(SKL_ERROR_UNSUPPORTED);
    cli_check(device_allocate(runner->device, size, "the workspace", &workspace));
    cli_check(mirror_stats(&runner->tensors, &read, &written));
    begin(runner, "statistics");
    end(runner, skl_attention_stats(runner->plan, &read, &written, workspace, size, NULL), &seconds);
    device_free(runner->device, workspace);
    return seconds;
}

void runner_close(plan_runner *runner)
{
    mirror_destroy(&runner->tensors);
    device_free(runner->device, runner->workspace);
    skl_plan_destroy(runner->plan);
    for (int op = 0; op < SKL_OP_PARTIAL; op++)
        free(runner->explanations[op]);
}

runner_location runner_location_of(const plan_runner *runner)
{
    runner_location location;
    const int32_t threads = skl_plan_threads(runner->plan);
    if (runner->device == SKL_CPU)
        snprintf(location.text, sizeof location.text, "on %" PRId32 " thread%s", threads, cli_plural(threads));
    else
        snprintf(location.text, sizeof location.text, "on %s", runner->gpu);
    return location;
}

/* ---- Explanations ------------------------------------------------------------------------------------------- */

static const char *const op_names[] = {
    [SKL_OP_FORWARD] = "forward",
    [SKL_OP_BACKWARD] = "backward",
    [SKL_OP_FORWARD_BACKWARD] = "one pass",
    [SKL_OP_PARTIAL] = "partial",
};

void explain_print(FILE *stream, skl_op op, const char *text)
{
    const term_style style = term_style_for(stream);
    fprintf(stream, "  %s%s%s\n", style.bold, op_names[op], style.plain);
    while (*text) {
        const int length = (int)strcspn(text, "\n");
        fprintf(stream, "    %.*s\n", length, text);
        text += length + (text[length] == '\n');
    }
}

void explain_add_json(json_t *object, skl_op op, const char *text)
{
    json_t *const lines = json_array();
    while (*text) {
        const size_t length = strcspn(text, "\n");
        cli_json_append(lines, json_stringn(text, length));
        text += length + (text[length] == '\n');
    }
    cli_json_set(object, op_names[op], lines);
}

/* ---- Work --------------------------------------------------------------------------------------------------- */

static int64_t query_heads_s(const skl_problem *problem)
{
    return problem->heads_s * (problem->student == SKL_STUDENT_INDEXER ? problem->index_heads : 1);
}

/* A logit takes 2 d FLOP, and so does each of dq and dk. */
static double flop_per_pair(const skl_problem *problem, uint32_t gradients)
{
    const double teacher = 2.0 * (double)problem->dim_t * (double)problem->heads_t;
    const double student = 2.0 * (double)problem->dim_s * (double)query_heads_s(problem);
    double flop = teacher + student;
    flop += gradients & SKL_DQ_T ? teacher : 0;
    flop += gradients & SKL_DK_T ? teacher : 0;
    flop += gradients & SKL_DQ_S ? student : 0;
    flop += gradients & SKL_DK_S ? student : 0;
    return flop;
}

workload workload_of(const skl_problem *problem, const skl_inputs *inputs)
{
    workload work = {0, 0, 0, 0};
    double all_pairs = 0; /* materialized matrices include masked pairs */
    for (int64_t b = 0; b < problem->batch; b++) {
        const oracle_sequence sequence = oracle_sequence_at(problem, inputs, b);
        all_pairs += (double)sequence.len_q * (double)sequence.len_k;
        for (int64_t i = 0; i < sequence.len_q; i++) {
            const oracle_keys keys = oracle_visible_keys(problem, inputs, b, i);
            const int64_t visible = keys.end - keys.begin;
            work.pairs += (double)(problem->top_k > 0 && problem->top_k < visible ? problem->top_k : visible);
        }
    }
    work.forward_flop = work.pairs * flop_per_pair(problem, 0);
    work.backward_flop = work.pairs * flop_per_pair(problem, problem->gradients);
    const int64_t teacher_matrices = problem->gradients & (SKL_DQ_T | SKL_DK_T) ? 2 : 1;
    const int64_t student_matrices = problem->gradients & (SKL_DQ_S | SKL_DK_S) ? 2 : 1;
    const int64_t matrices = teacher_matrices * problem->heads_t + student_matrices * query_heads_s(problem);
    work.materialized_size = all_pairs * (double)matrices * sizeof(float);
    return work;
}
