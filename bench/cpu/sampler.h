/* Fair timing: rounds in which every method is sampled, so that noise and clock changes affect all methods alike. */
#ifndef STREAMKL_BENCH_CPU_SAMPLER_H
#define STREAMKL_BENCH_CPU_SAMPLER_H

#include "streamkl.h"

enum { SAMPLER_PASSES_MAX = 3, SAMPLER_SAMPLES_MAX = 512 };

/* Runs one pass. */
typedef skl_status sampler_call(void *context, int pass);

/* The passes of a method run in order, each timed separately: a backward follows its forward. */
typedef struct sampled_method {
    sampler_call *run;
    void *context;
    int pass_count;
    int sample_count;
    double seconds[SAMPLER_PASSES_MAX][SAMPLER_SAMPLES_MAX];
} sampled_method;

/* Runs every method once to warm up, then in `rounds` rounds for at least SAMPLER_SLICE_SECONDS each. A sample is one
 * run of all passes. Stops at the first failure. `progress`
 * counts rounds and may be NULL. */
#define SAMPLER_SLICE_SECONDS 0.2
skl_status sampler_run(sampled_method *methods, int count, int rounds, skl_progress progress);

typedef struct timing {
    int sample_count;
    double median, least, most; /* seconds */
} timing;

timing sampler_timing(const sampled_method *finished, int pass);

#endif
