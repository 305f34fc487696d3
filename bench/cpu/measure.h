/* Runs a benchmark for one length and head size at a time, and appends the results to a report. */
#ifndef STREAMKL_BENCH_CPU_MEASURE_H
#define STREAMKL_BENCH_CPU_MEASURE_H

#include "bench/cpu/blas.h"
#include "bench/cpu/report.h"

/* Reports errors of the configuration before any time is spent on measurements. */
skl_status bench_check(const bench_config *config);

/* FLOP/s of sgemm on 2048 x 2048 matrices, for each thread count of the configuration. */
skl_status bench_measure_sgemm(const bench_config *config, const blas *library, double *flops, skl_progress progress);

/* Appends one point per thread count. All methods, including sgemm, are sampled in the same rounds on the same
 * inputs. `library` is NULL without a BLAS: then only streaming is timed. The baseline is skipped if
 * its matrices are larger than config.max_memory. */
skl_status bench_measure(bench_report *report, const blas *library, int64_t length, int64_t dim,
                         skl_progress progress);

#endif
