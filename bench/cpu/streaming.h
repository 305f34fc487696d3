/* The method "streaming": a plan, its workspace and the calls on the tensors of the benchmark. */
#ifndef STREAMKL_BENCH_CPU_STREAMING_H
#define STREAMKL_BENCH_CPU_STREAMING_H

#include "bench/cpu/report.h"
#include "bench/cpu/tensors.h"

typedef struct streaming {
    skl_plan *plan;
    void *workspace;
    size_t workspace_size;
    skl_inputs inputs;
    skl_rows rows;    /* of a forward */
    skl_rows kl_only; /* of one-pass, whose inputs include the LSEs */
    skl_gradients gradients;
} streaming;

/* The tensors must outlive it. Call streaming_close() even after a failure. */
skl_status streaming_open(streaming *run, const skl_problem *problem, const skl_options *options,
                          const bench_tensors *tensors);
void streaming_close(streaming *run);

/* Backward and one-pass use the LSEs of the last forward. */
skl_status streaming_run(const streaming *run, bench_pass pass);

#endif
