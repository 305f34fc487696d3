#include "bench/cpu/sampler.h"
#include "device/device.h"

#include <assert.h>
#include <stdbool.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>

/* The threads of OpenBLAS spin for 2^26 clock ticks after a call, about 30 ms, and would slow down the next method.
 */
static void wait_for_idle_threads(void)
{
    const struct timespec pause = {.tv_sec = 0, .tv_nsec = 50 * 1000 * 1000};
    nanosleep(&pause, NULL);
}

static skl_status run_once(sampled_method *method, bool record)
{
    for (int pass = 0; pass < method->pass_count; pass++) {
        const double begin = clock_seconds();
        const skl_status status = method->run(method->context, pass);
        if (status != SKL_OK)
            return status;
        if (record)
            method->seconds[pass][method->sample_count] = clock_seconds() - begin;
    }
    if (record)
        method->sample_count++;
    return SKL_OK;
}

/* samples_end leaves room for the samples of later rounds. */
static skl_status run_slice(sampled_method *method, int samples_end)
{
    const double begin = clock_seconds();
    do {
        const skl_status status = run_once(method, true);
        if (status != SKL_OK)
            return status;
    } while (method->sample_count < samples_end && clock_seconds() - begin < SAMPLER_SLICE_SECONDS);
    return SKL_OK;
}

skl_status sampler_run(sampled_method *methods, int count, int rounds, skl_progress progress)
{
    assert(rounds >= 1 && rounds <= SAMPLER_SAMPLES_MAX);
    for (int i = 0; i < count; i++) {
        assert(methods[i].pass_count <= SAMPLER_PASSES_MAX);
        methods[i].sample_count = 0;
        const skl_status status = run_once(&methods[i], false);
        if (status != SKL_OK)
            return status;
    }
    for (int round = 0; round < rounds; round++) {
        if (progress)
            progress(NULL, round, rounds);
        for (int i = 0; i < count; i++) {
            wait_for_idle_threads();
            const skl_status status = run_slice(&methods[i], SAMPLER_SAMPLES_MAX / rounds * (round + 1));
            if (status != SKL_OK)
                return status;
        }
    }
    if (progress)
        progress(NULL, rounds, rounds);
    return SKL_OK;
}

static int compare_doubles(const void *left, const void *right)
{
    const double a = *(const double *)left, b = *(const double *)right;
    return (a > b) - (a < b);
}

timing sampler_timing(const sampled_method *finished, int pass)
{
    const int count = finished->sample_count;
    assert(count > 0 && pass < finished->pass_count);
    double sorted[SAMPLER_SAMPLES_MAX];
    memcpy(sorted, finished->seconds[pass], (size_t)count * sizeof sorted[0]);
    qsort(sorted, (size_t)count, sizeof sorted[0], compare_doubles);
    const double median = (sorted[(count - 1) / 2] + sorted[count / 2]) / 2;
    return (timing){count, median, sorted[0], sorted[count - 1]};
}
