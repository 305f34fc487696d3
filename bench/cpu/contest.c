#include "bench/cpu/contest.h"
#include "device/clock.h"

#include <assert.h>
#include <stdbool.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>

/* OpenBLAS's threads spin for 2^26 clock ticks after a call, some 30 ms, and would steal from the next contender. */
static void let_idle_threads_sleep(void)
{
    const struct timespec pause = {.tv_sec = 0, .tv_nsec = 50 * 1000 * 1000};
    nanosleep(&pause, NULL);
}

static skl_status run_once(contender *runner, bool counts)
{
    for (int pass = 0; pass < runner->pass_count; pass++) {
        double seconds = 0;
        skl_status status = device_timer_start(&runner->timer);
        if (status == SKL_OK)
            status = runner->run(runner->context, pass);
        if (status == SKL_OK)
            status = device_timer_stop(&runner->timer, &seconds);
        if (status != SKL_OK)
            return status;
        if (counts)
            runner->seconds[pass][runner->sample_count] = seconds;
    }
    if (counts)
        runner->sample_count++;
    return SKL_OK;
}

/* samples_end leaves room for the slices to come. */
static skl_status run_slice(contender *runner, int samples_end)
{
    const double begin = clock_seconds();
    do {
        const skl_status status = run_once(runner, true);
        if (status != SKL_OK)
            return status;
    } while (runner->sample_count < samples_end && clock_seconds() - begin < CONTEST_SLICE_SECONDS);
    return SKL_OK;
}

skl_status contest_hold(contender *contenders, int count, int rounds, contest_progress progress)
{
    assert(rounds >= 1 && rounds <= CONTEST_SAMPLES_MAX);
    for (int i = 0; i < count; i++) {
        assert(contenders[i].pass_count <= CONTEST_PASSES_MAX);
        contenders[i].sample_count = 0;
        const skl_status status = run_once(&contenders[i], false);
        if (status != SKL_OK)
            return status;
    }
    for (int round = 0; round < rounds; round++) {
        if (progress.report)
            progress.report(progress.user, round, rounds);
        for (int i = 0; i < count; i++) {
            let_idle_threads_sleep();
            const skl_status status = run_slice(&contenders[i], CONTEST_SAMPLES_MAX / rounds * (round + 1));
            if (status != SKL_OK)
                return status;
        }
    }
    if (progress.report)
        progress.report(progress.user, rounds, rounds);
    return SKL_OK;
}

static int compare_doubles(const void *left, const void *right)
{
    const double a = *(const double *)left, b = *(const double *)right;
    return (a > b) - (a < b);
}

timing contest_timing(const contender *finished, int pass)
{
    const int count = finished->sample_count;
    assert(count > 0 && pass < finished->pass_count);
    double sorted[CONTEST_SAMPLES_MAX];
    memcpy(sorted, finished->seconds[pass], (size_t)count * sizeof sorted[0]);
    qsort(sorted, (size_t)count, sizeof sorted[0], compare_doubles);
    const double median = (sorted[(count - 1) / 2] + sorted[count / 2]) / 2;
    return (timing){count, median, sorted[0], sorted[count - 1]};
}
