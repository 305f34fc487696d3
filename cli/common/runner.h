/* A plan with its workspace, run with a clock, a progress line and an eye on memory. */
#ifndef STREAMKL_CLI_COMMON_RUNNER_H
#define STREAMKL_CLI_COMMON_RUNNER_H

#include "device/mirror.h"
#include "cli/term/term.h"

/* Its address is given to the plan: do not move it between open and close. */
typedef struct plan_runner {
    skl_plan *plan;
    skl_device device;
    device_properties gpu; /* of a GPU */
    mirror tensors;
    device_timer timer;
    void *workspace; /* where the device reaches it */
    size_t workspace_size;
    term_progress progress;
    double forward_seconds, backward_seconds; /* of the kernels: copies to a GPU and back are not in them */
    int64_t resident_begin;                   /* before the first run */
    int64_t peak_growth; /* most resident bytes since then; -1: the system does not say, or the work is on a GPU */
} plan_runner;

/* Tensors are those of the host. Each prints why and returns an exit code, CLI_OK if all went well. runner_close() is
 * right after any of them. */
int runner_open(plan_runner *runner, const skl_problem *problem, const skl_options *options);
int runner_forward(plan_runner *runner, const skl_inputs *inputs, const skl_rows *rows);
int runner_backward(plan_runner *runner, const skl_inputs *inputs, const skl_gradients *gradients);
void runner_close(plan_runner *runner);

/* "on 4 threads", "on NVIDIA H200" */
typedef struct runner_place {
    char text[128];
} runner_place;
runner_place runner_place_of(const plan_runner *runner);

#endif
