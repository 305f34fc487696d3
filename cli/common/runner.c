#include "cli/common/runner.h"
#include "cli/common/cli.h"
#include "cli/common/options.h"
#include "cli/common/resident.h"
#include "device/explain.h"

#include <inttypes.h>
#include <stdio.h>
#include <stdlib.h>

static size_t workspace_size_of(const skl_plan *plan, const skl_problem *problem)
{
    const size_t forward = skl_plan_workspace_size(plan, SKL_OP_FORWARD);
    const size_t backward = problem->gradients ? skl_plan_workspace_size(plan, SKL_OP_BACKWARD) : 0;
    return forward > backward ? forward : backward;
}

int runner_open(plan_runner *runner, const skl_problem *problem, const skl_options *options)
{
    memset(runner, 0, sizeof *runner);
    runner->resident_begin = runner->peak_growth = -1;
    runner->device = options->device;
    runner->tensors = mirror_of(problem, options->device);
    skl_options watched = *options;
    watched.progress = term_progress_update;
    watched.progress_user = &runner->progress;
    skl_status status = skl_plan_create(&runner->plan, problem, &watched);
    if (status != SKL_OK)
        return fail_plan(status, options);
    runner->workspace_size = workspace_size_of(runner->plan, problem);
    status = device_open(options->device, options->device_index);
    if (status == SKL_OK)
        status = device_describe(options->device, &runner->gpu);
    if (status == SKL_OK)
        status = device_timer_create(&runner->timer, options->device);
    if (status == SKL_OK)
        status = device_allocate(options->device, runner->workspace_size, "the workspace", &runner->workspace);
    return status == SKL_OK ? CLI_OK : cli_fail_status(status);
}

/* The choice of kernels may depend on the addresses: `inputs` are in device memory. */
static skl_status explain(plan_runner *runner, const skl_inputs *inputs, skl_op op)
{
    if (!runner->explains)
        return SKL_OK;
    free(runner->explanations[op]);
    runner->explanations[op] = explain_plan(runner->plan, inputs, op);
    return runner->explanations[op] ? SKL_OK : SKL_ERROR_MEMORY;
}

static skl_status run_begin(plan_runner *runner, const char *label)
{
    if (runner->resident_begin < 0)
        runner->resident_begin = resident_begin();
    term_progress_begin(&runner->progress, label);
    return device_timer_start(&runner->timer);
}

static int run_end(plan_runner *runner, skl_status status, double *seconds)
{
    if (status == SKL_OK)
        status = device_timer_stop(&runner->timer, seconds);
    if (status == SKL_OK)
        status = mirror_fetch(&runner->tensors);
    term_progress_end(&runner->progress);
    if (runner->device == SKL_CPU)
        runner->peak_growth = resident_peak_growth(runner->resident_begin);
    return status == SKL_OK ? CLI_OK : cli_fail_status(status);
}

int runner_forward(plan_runner *runner, const skl_inputs *inputs, const skl_rows *rows)
{
    skl_inputs read = *inputs;
    skl_rows written = *rows;
    skl_status status = mirror_call(&runner->tensors, &read, &written, NULL);
    if (status == SKL_OK)
        status = explain(runner, &read, SKL_OP_FORWARD);
    if (status == SKL_OK)
        status = run_begin(runner, "forward");
    if (status == SKL_OK)
        status = skl_forward(runner->plan, &read, &written, runner->workspace, runner->workspace_size, NULL);
    return run_end(runner, status, &runner->forward_seconds);
}

int runner_backward(plan_runner *runner, const skl_inputs *inputs, const skl_gradients *gradients)
{
    skl_inputs read = *inputs;
    skl_gradients written = *gradients;
    skl_status status = mirror_call(&runner->tensors, &read, NULL, &written);
    if (status == SKL_OK)
        status = explain(runner, &read, SKL_OP_BACKWARD);
    if (status == SKL_OK)
        status = run_begin(runner, "backward");
    if (status == SKL_OK)
        status = skl_backward(runner->plan, &read, &written, runner->workspace, runner->workspace_size, NULL);
    return run_end(runner, status, &runner->backward_seconds);
}

void runner_close(plan_runner *runner)
{
    mirror_destroy(&runner->tensors);
    device_timer_destroy(&runner->timer);
    device_free(runner->device, runner->workspace);
    skl_plan_destroy(runner->plan);
    for (int op = 0; op < SKL_OP_PARTIAL; op++) {
        free(runner->explanations[op]);
        runner->explanations[op] = NULL;
    }
    runner->plan = NULL;
    runner->workspace = NULL;
}

runner_location runner_location_of(const plan_runner *runner)
{
    runner_location location;
    const int32_t threads = skl_plan_threads(runner->plan);
    if (runner->device == SKL_CPU)
        snprintf(location.text, sizeof location.text, "on %" PRId32 " thread%s", threads, threads == 1 ? "" : "s");
    else
        snprintf(location.text, sizeof location.text, "on %s", runner->gpu.name);
    return location;
}
