/* What a benchmark was asked to do and what it found: filled by sweep.c, read by the table, the CSV and the plot. */
#ifndef STREAMKL_BENCH_CPU_REPORT_H
#define STREAMKL_BENCH_CPU_REPORT_H

#include "bench/cpu/contest.h"
#include "streamkl.h"

#include <stdbool.h>

enum { BENCH_LIST_MAX = 16 };

typedef struct bench_list {
    int count;
    int64_t values[BENCH_LIST_MAX];
} bench_list;

typedef struct bench_config {
    bench_list lengths, dims, threads;
    int64_t heads;       /* of both models; with an indexer of the teacher, all of which one student head learns */
    int64_t index_heads; /* not 0: the student is an indexer of so many heads */
    int64_t key_heads;   /* of an indexer's teacher; 0: as many as heads */
    int64_t top_k;       /* of an indexer: keys on every list; 0: dense */
    skl_dtype dtype;
    int32_t grad_f32, causal;
    skl_options engine; /* device and kernel; the threads are those of the list */
    int32_t no_baseline;
    int32_t rounds;
    int64_t max_memory; /* bytes of matrices beyond which the baseline is skipped */
} bench_config;

typedef enum bench_method { BENCH_STREAMING, BENCH_IN_PLACE, BENCH_FRAMEWORK, BENCH_METHOD_COUNT } bench_method;
typedef enum bench_pass { BENCH_FORWARD, BENCH_BACKWARD, BENCH_ONE_PASS, BENCH_PASS_COUNT } bench_pass;

/* "streaming", "in place", "framework"; "forward", "backward", "one pass"; "f32", "f16", "bf16". */
const char *bench_method_name(bench_method method);
const char *bench_pass_name(bench_pass pass);
const char *bench_type_name(skl_dtype type);

/* Only streaming can do everything in one pass. */
int bench_pass_count(bench_method method);

typedef struct bench_method_result {
    bool ran; /* false: not asked for, no BLAS, or more memory than allowed */
    size_t
        memory_size; /* at the peak, beside inputs and outputs; known even where it did not run, save for indexers */
    timing passes[BENCH_PASS_COUNT];
} bench_method_result;

/* One length, head size and thread count. */
typedef struct bench_point {
    int64_t length, dim;
    int threads; /* 0 on a GPU */
    char kernel[48];
    double sgemm_flops;    /* a second, timed among the contenders; 0: no BLAS */
    device_properties gpu; /* while the tensors are there; empty on the CPU */
    bench_method_result methods[BENCH_METHOD_COUNT];

    double waiting_share; /* of the time, in which other processes held the core that this one needed */

    /* Largest difference between streaming and the baseline; NaN where no baseline ran. */
    double kl_difference;       /* absolute */
    double gradient_difference; /* relative to the largest element of the tensor */
} bench_point;

typedef struct bench_report {
    bench_config config;
    char machine[96], date[16]; /* the CPU or the GPU */
    int cores;                  /* or multiprocessors */
    int point_count;
    bench_point points[BENCH_LIST_MAX * BENCH_LIST_MAX * BENCH_LIST_MAX];
} bench_report;

/* The problem that is timed. */
skl_problem bench_problem(const bench_config *config, int64_t length, int64_t dim);

/* FLOP a second of the matmuls a pass has executed. Of pairs that a causal mask hides, streaming skips whole tiles
 * and the baseline none; the hidden part of a tile on the diagonal is not counted. */
double bench_executed_flops(const bench_config *config, const bench_point *point, bench_method method,
                            bench_pass pass);

/* FLOP a second that the task itself needs without stored matrices: 4 d a visible pair forward, 8 d backward; with an
 * indexer 2 d for each teacher and index head, and 4 d more for each index head backward. */
double bench_useful_flops(const bench_config *config, const bench_point *point, bench_pass pass);

/* Visible (query, key) pairs of all student heads. */
double bench_visible_pairs(const bench_config *config, int64_t length);

/* How many times faster streaming was; 0 where that method did not run. */
double bench_speedup(const bench_point *point, bench_method over, bench_pass pass);

/* Seconds for the KL and its gradients: forward + backward. */
double bench_step_seconds(const bench_point *point, bench_method method);

#endif
