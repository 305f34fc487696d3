/* Fair timing: contenders take turns, so that noise and clock changes hit all alike. */
#ifndef STREAMKL_BENCH_CPU_CONTEST_H
#define STREAMKL_BENCH_CPU_CONTEST_H

#include "device/device.h"

enum { CONTEST_PASSES_MAX = 3, CONTEST_SAMPLES_MAX = 512 };

/* Runs one pass. */
typedef skl_status contest_run(void *context, int pass);

/* A contender's passes run in order, each timed by itself: a backward follows its forward. */
typedef struct contender {
    device_timer timer; /* zeroed: for the CPU */
    contest_run *run;
    void *context;
    int pass_count;
    int sample_count;
    double seconds[CONTEST_PASSES_MAX][CONTEST_SAMPLES_MAX];
} contender;

typedef struct contest_progress {
    void (*report)(void *user, int rounds_done, int rounds); /* may be NULL */
    void *user;
} contest_progress;

/* One round to warm up, then `rounds` that count. In a round each contender has a slice of CONTEST_SLICE_SECONDS,
 * or one run through its passes if that takes longer. Ends with
 * the first failure of a contender. */
#define CONTEST_SLICE_SECONDS 0.2
skl_status contest_hold(contender *contenders, int count, int rounds, contest_progress progress);

typedef struct timing {
    int sample_count;
    double median, least, most; /* seconds */
} timing;

timing contest_timing(const contender *finished, int pass);

#endif
