/* Configuration and results of a benchmark: filled in by measure.c, read by the table, the CSV and the figure. */
#ifndef STREAMKL_BENCH_CPU_REPORT_H
#define STREAMKL_BENCH_CPU_REPORT_H

#include "streamkl.h"

#include <stdbool.h>
#include <stdio.h>

enum { BENCH_LIST_MAX = 16, SAMPLER_SAMPLES_MAX = 512 };

typedef struct bench_list {
    int count;
    int64_t values[BENCH_LIST_MAX];
} bench_list;

typedef struct bench_config {
    bench_list lengths, dims, threads;
    int64_t heads; /* of both models */
    skl_dtype dtype;
    int32_t grad_f32, causal;
    skl_options engine; /* its kernel; `threads` above replaces its threads */
    int32_t no_baseline;
    int64_t rounds;
    int64_t max_memory; /* bytes of matrices beyond which the baseline is skipped */
} bench_config;

typedef enum bench_method { BENCH_STREAMING, BENCH_IN_PLACE, BENCH_FRAMEWORK, BENCH_METHOD_COUNT } bench_method;
typedef enum bench_pass { BENCH_FORWARD, BENCH_BACKWARD, BENCH_ONE_PASS, BENCH_PASS_COUNT } bench_pass;

/* "streaming", "in place", "framework"; "forward", "backward", "one pass"; "f32", "f16", "bf16". */
const char *bench_method_name(bench_method method);
const char *bench_pass_name(bench_pass pass);
const char *bench_type_name(skl_dtype type);

/* Only streaming has a one-pass mode. */
int bench_pass_count(bench_method method);

typedef struct timing {
    int sample_count;
    double median, least, most; /* seconds */
} timing;

typedef struct bench_method_result {
    bool ran;           /* false: not asked for, no BLAS, or more memory than allowed */
    size_t memory_size; /* peak, without inputs and outputs; known even if it did not run */
    timing passes[BENCH_PASS_COUNT];
} bench_method_result;

/* One length, head size and thread count. */
typedef struct bench_point {
    int64_t length, dim;
    int threads;
    char kernel[48];
    double sgemm_flops; /* per second, sampled with the methods; 0: no BLAS */
    bench_method_result methods[BENCH_METHOD_COUNT];

    double waiting_share; /* fraction of the time in which this process waited for a core */

    /* Largest difference between streaming and the baseline; NaN if no baseline ran. */
    double kl_difference;       /* absolute */
    double gradient_difference; /* relative to the largest element of the tensor */
} bench_point;

typedef struct bench_report {
    bench_config config;
    char machine[96], date[16];
    int cores;
    int point_count;
    bench_point points[BENCH_LIST_MAX * BENCH_LIST_MAX * BENCH_LIST_MAX];
} bench_report;

/* The problem that is timed. */
skl_problem bench_problem(const bench_config *config, int64_t length, int64_t dim);

/* FLOP/s of the executed matmuls. Streaming skips tiles that a causal mask hides completely, the baseline none. The
 * hidden pairs of masked tiles are not counted. */
double bench_executed_flops(const bench_config *config, const bench_point *point, bench_method method,
                            bench_pass pass);

/* FLOP/s that the task needs without stored matrices: 4 d per visible pair forward, 8 d backward. */
double bench_useful_flops(const bench_config *config, const bench_point *point, bench_pass pass);

/* Time of the method divided by that of streaming; 0 if the method did not run. */
double bench_speedup(const bench_point *point, bench_method over, bench_pass pass);

/* Seconds for the KL and its gradients: forward + backward. */
double bench_step_seconds(const bench_point *point, bench_method method);

/* One self-contained CSV line per pass. Columns that do not apply are empty. A skipped method has one line, with its
 * memory and the status "skipped". */
void bench_write_csv(FILE *file, const bench_report *report);

#endif
