/* Runs a benchmark for one length and head size at a time, and appends the results to a report. */
#ifndef STREAMKL_BENCH_CPU_MEASURE_H
#define STREAMKL_BENCH_CPU_MEASURE_H

#include "bench/cpu/blas.h"
#include "bench/cpu/report.h"

/* Reports errors of the configuration before any time is spent on measurements. */
skl_status bench_check(const bench_config *config);

/* Appends one point per thread count. All methods, and sgemm on 2048 x 2048 matrices, are sampled in the same rounds
 * on the same inputs, so that noise and clock changes affect all of them alike. `library` is NULL without a BLAS:
 * then only streaming is timed. A baseline is skipped if its matrices are larger than config.max_memory. `progress`
 * counts rounds. */
skl_status bench_measure(bench_report *report, const blas *library, int64_t length, int64_t dim,
                         skl_progress progress);

#endif
