#include "runner.h"
#include "cli.h"
#include "options.h"
#include "resident.h"

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
    skl_options watched = *options;
    watched.progress = term_progress_update;
    watched.progress_user = &runner->progress;
    const skl_status status = skl_plan_create(&runner->plan, problem, &watched);
    if (status != SKL_OK)
        return cli_fail_status(status);
    if (options->device != SKL_CPU)
        return refuse_device(options->device);
    runner->workspace_size = workspace_size_of(runner->plan, problem);
    const size_t pad = SKL_WORKSPACE_ALIGNMENT - runner->workspace_size % SKL_WORKSPACE_ALIGNMENT;
    runner->workspace = aligned_alloc(SKL_WORKSPACE_ALIGNMENT, runner->workspace_size + pad);
    if (runner->workspace == NULL)
        return cli_fail(CLI_NO_MEMORY, "out of memory: the workspace needs %zu bytes", runner->workspace_size);
    return CLI_OK;
}

static double run_begin(plan_runner *runner, const char *label)
{
    if (runner->resident_begin < 0)
        runner->resident_begin = resident_begin();
    term_progress_begin(&runner->progress, label);
    return cli_seconds();
}

static int run_end(plan_runner *runner, skl_status status)
{
    term_progress_end(&runner->progress);
    runner->peak_growth = resident_peak_growth(runner->resident_begin);
    return status == SKL_OK ? CLI_OK : cli_fail_status(status);
}

int runner_forward(plan_runner *runner, const skl_inputs *inputs, const skl_rows *rows)
{
    const double began = run_begin(runner, "forward");
    const skl_status status =
        skl_forward(runner->plan, inputs, rows, runner->workspace, runner->workspace_size, NULL);
    runner->forward_seconds = cli_seconds() - began;
    return run_end(runner, status);
}

int runner_backward(plan_runner *runner, const skl_inputs *inputs, const skl_gradients *gradients)
{
    const double began = run_begin(runner, "backward");
    const skl_status status =
        skl_backward(runner->plan, inputs, gradients, runner->workspace, runner->workspace_size, NULL);
    runner->backward_seconds = cli_seconds() - began;
    return run_end(runner, status);
}

void runner_close(plan_runner *runner)
{
    skl_plan_destroy(runner->plan);
    free(runner->workspace);
    runner->plan = NULL;
    runner->workspace = NULL;
}
