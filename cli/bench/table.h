/* A benchmark as text: a heading, then one table per length and head size. */
#ifndef STREAMKL_CLI_BENCH_TABLE_H
#define STREAMKL_CLI_BENCH_TABLE_H

#include "bench/cpu/report.h"

/* The machine, the problem and the BLAS. Without one, blas_description is NULL. */
void bench_table_heading(const bench_report *report, const char *blas_description);

/* The points from index `first` on: one length and head size, all thread counts. */
void bench_table_points(const bench_report *report, int first);

#endif
