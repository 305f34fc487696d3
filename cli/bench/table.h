/* A benchmark for people: what is about to be timed, then a table for every length and head size. */
#ifndef STREAMKL_CLI_BENCH_TABLE_H
#define STREAMKL_CLI_BENCH_TABLE_H

#include "bench/cpu/report.h"

/* The machine, the task and the yardstick. blas_description is NULL, and sgemm_flops not read, without a BLAS. */
void bench_table_heading(const bench_report *report, const char *blas_description, const double *sgemm_flops);

/* The points from index `first` on: one length and head size, all thread counts. */
void bench_table_points(const bench_report *report, int first);

#endif
