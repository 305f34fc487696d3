/* Runs a benchmark, one length and head size at a time, and appends what it finds to a report. */
#ifndef STREAMKL_BENCH_CPU_MEASURE_H
#define STREAMKL_BENCH_CPU_MEASURE_H

#include "bench/cpu/blas.h"
#include "bench/cpu/report.h"

/* Refuses what the library would refuse, before an hour of measuring ends in an error. */
skl_status bench_check(const bench_config *config);

/* FLOP a second of sgemm on a 2048-cube, for each thread count of the configuration. */
skl_status bench_measure_sgemm(const bench_config *config, const blas *library, double *flops,
                               contest_progress progress);

/* Appends a point for each thread count. All methods and thread counts take turns on the same inputs, sgemm among
 * them. `library` is NULL where there is no BLAS, and for a GPU: then only streaming is timed. The baseline is
 * skipped where its matrices are larger than config.max_memory. */
skl_status bench_measure(bench_report *report, const blas *library, int64_t length, int64_t dim,
                         contest_progress progress);

#endif
