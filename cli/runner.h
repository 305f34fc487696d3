/* A plan with its workspace, run with a clock, a progress line and an eye on memory. */
#ifndef STREAMKL_CLI_RUNNER_H
#define STREAMKL_CLI_RUNNER_H

#include "streamkl.h"
#include "term.h"

/* Its address is given to the plan: do not move it between open and close. */
typedef struct plan_runner {
    skl_plan *plan;
    void *workspace;
    size_t workspace_size;
    term_progress progress;
    double forward_seconds, backward_seconds;
    int64_t resident_begin; /* before the first run */
    int64_t peak_growth;    /* most resident bytes since then; -1: the system does not say */
} plan_runner;

/* Each prints why and returns an exit code, CLI_OK if all went well. runner_close() is right after any of them. */
int runner_open(plan_runner *runner, const skl_problem *problem, const skl_options *options);
int runner_forward(plan_runner *runner, const skl_inputs *inputs, const skl_rows *rows);
int runner_backward(plan_runner *runner, const skl_inputs *inputs, const skl_gradients *gradients);
void runner_close(plan_runner *runner);

#endif
