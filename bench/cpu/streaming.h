/* The method "streaming": a plan, its workspace and the calls on the tensors of the benchmark. */
#ifndef STREAMKL_BENCH_CPU_STREAMING_H
#define STREAMKL_BENCH_CPU_STREAMING_H

#include "device/mirror.h"
#include "bench/cpu/report.h"
#include "bench/cpu/tensors.h"

typedef struct streaming {
    skl_plan *plan;
    mirror tensors;
    void *workspace;
    size_t workspace_size;
    skl_inputs inputs; /* these and all below are in device memory */
    skl_rows rows;     /* of a forward */
    skl_rows kl_only;  /* of one-pass, whose inputs include the LSEs */
    skl_gradients gradients;
} streaming;

/* The tensors must outlive it; a GPU gets copies, and its results are not copied back. Call streaming_close() even
 * after a failure. */
skl_status streaming_open(streaming *run, const skl_problem *problem, const skl_options *options,
                          const bench_tensors *tensors);
void streaming_close(streaming *run);

/* The launches of a pass, in memory that the caller frees; NULL on failure. */
char *streaming_explain(const streaming *run, bench_pass pass);

/* Backward and one-pass use the LSEs of the last forward. */
skl_status streaming_run(const streaming *run, bench_pass pass);

#endif
