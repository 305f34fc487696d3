/* A plan with its workspace; runs it with a timer, a progress line and a measurement of memory. */
#ifndef STREAMKL_CLI_COMMON_RUNNER_H
#define STREAMKL_CLI_COMMON_RUNNER_H

#include "device/device.h"
#include <jansson.h>
#include <stdio.h>

typedef struct plan_runner {
    skl_plan *plan;
    skl_device device;
    bool watched; /* the options have a progress: the runner shows it, and measures memory */
    char gpu[96]; /* its name; "" on the CPU */
    mirror tensors;
    device_timer timer;
    void *workspace; /* in device memory */
    size_t workspace_size;
    bool explains;                            /* set it after runner_open() to get the explanations */
    char *explanations[SKL_OP_PARTIAL];       /* by operation; NULL: none */
    double forward_seconds, backward_seconds; /* of the kernels, without copies to and from a GPU */
    int64_t resident_begin;                   /* resident bytes before the first run */
    int64_t peak_growth;                      /* peak growth since then; -1: unknown, on a GPU, or not watched */
} plan_runner;

/* Tensors are in host memory. Until the next forward, an input is copied to a GPU only once. */
void runner_open(plan_runner *runner, const skl_problem *problem, const skl_options *options);
void runner_forward(plan_runner *runner, const skl_inputs *inputs, const skl_rows *rows);
void runner_backward(plan_runner *runner, const skl_inputs *inputs, const skl_gradients *gradients);

/* Runs skl_attention_stats in a workspace of its own, and returns the seconds of its kernels. */
double runner_stats(plan_runner *runner, const skl_inputs *inputs, const skl_stats *stats);

/* The number of distance buckets that hold every distance of a problem: bucket n has distances below 2^n. */
int32_t runner_distance_buckets(const skl_problem *problem);
void runner_close(plan_runner *runner);

/* "on 4 threads", "on NVIDIA H200" */
typedef struct runner_location {
    char text[128];
} runner_location;
runner_location runner_location_of(const plan_runner *runner);

/* Shows the launches of an operation and the reason for each choice. `text` is that of explain_plan(): it is printed,
 * or added to `object` as an array of lines under the name of the operation. */
void explain_print(FILE *stream, skl_op op, const char *text);
void explain_add_json(json_t *object, skl_op op, const char *text);

/* The amount of work and memory of a problem, to put measurements into perspective. Doubles, because they may exceed
 * 64 bits. */
typedef struct workload {
    double pairs;             /* visible (query, key) pairs of one head, over all sequences */
    double forward_flop;      /* both logits of every pair */
    double backward_flop;     /* the logits again, and the products for every requested gradient */
    double materialized_size; /* bytes of the N_q x N_k matrices that streaming avoids: P and S, and the logit
                               * gradients of each model whose gradients are requested */
} workload;

workload workload_of(const skl_problem *problem, const skl_inputs *inputs);

#endif
