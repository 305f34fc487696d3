#include "device/device.h"

#include <inttypes.h>
#include <pthread.h>
#include <sched.h>
#include <stdatomic.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/utsname.h>
#include <time.h>
#include <unistd.h>

/* The value of the first "name : value" line of a /proc file, without spaces around it. */
static bool proc_value(const char *path, const char *name, char *value, size_t size)
{
    FILE *const file = fopen(path, "re");
    if (file == NULL)
        return false;
    bool found = false;
    char line[512];
    while (!found && fgets(line, sizeof line, file)) {
        char *const colon = strchr(line, ':');
        if (colon == NULL || strncmp(line, name, strlen(name)) != 0)
            continue;
        const char *const begin = colon + 1 + strspn(colon + 1, " \t");
        snprintf(value, size, "%.*s", (int)strcspn(begin, "\n"), begin);
        found = value[0] != '\0';
    }
    fclose(file);
    return found;
}

void machine_cpu_model(char *text, size_t size)
{
    if (proc_value("/proc/cpuinfo", "model name", text, size))
        return;
    struct utsname system;
    const bool known = uname(&system) == 0;
    snprintf(text, size, "%s CPU", known ? system.machine : "unknown");
}

void machine_date(char *text, size_t size)
{
    const time_t now = time(NULL);
    struct tm day;
    if (gmtime_r(&now, &day) == NULL || strftime(text, size, "%Y-%m-%d", &day) == 0)
        snprintf(text, size, "unknown");
}

double clock_seconds(void)
{
    struct timespec now;
    clock_gettime(CLOCK_MONOTONIC, &now);
    return (double)now.tv_sec + 1e-9 * (double)now.tv_nsec;
}

int machine_cores(void)
{
    cpu_set_t cores;
    return sched_getaffinity(0, sizeof cores, &cores) == 0 ? CPU_COUNT(&cores) : 1;
}

double machine_waiting_seconds(void)
{
    /* "RUNNING WAITING SLICES", the first two in nanoseconds. */
    FILE *const file = fopen("/proc/thread-self/schedstat", "r");
    if (file == NULL)
        return 0;
    uint64_t running, waiting;
    const bool known = fscanf(file, "%" SCNu64 " %" SCNu64, &running, &waiting) == 2;
    fclose(file);
    return known ? 1e-9 * (double)waiting : 0;
}

/* A line like "VmHWM:     1234 kB", in bytes; -1 if unknown. */
static int64_t proc_bytes(const char *path, const char *name)
{
    char text[64];
    int64_t kibibytes;
    const bool known = proc_value(path, name, text, sizeof text) && sscanf(text, "%" SCNd64, &kibibytes) == 1;
    return known ? kibibytes * 1024 : -1;
}

int64_t machine_available_memory(void)
{
    const int64_t bytes = proc_bytes("/proc/meminfo", "MemAvailable");
    return bytes < 0 ? INT64_MAX : bytes;
}

/* ---- Resident memory ---------------------------------------------------------------------------------------- */

/* Resets VmHWM to VmRSS. If the system forbids it, the peak remains, and the growth is overestimated. */
int64_t resident_begin(void)
{
    FILE *const clear_refs = fopen("/proc/self/clear_refs", "we");
    if (clear_refs) {
        fputs("5", clear_refs);
        fclose(clear_refs);
    }
    return proc_bytes("/proc/self/status", "VmRSS");
}

int64_t resident_peak(void)
{
    return proc_bytes("/proc/self/status", "VmHWM");
}

int64_t resident_peak_growth(int64_t begin)
{
    const int64_t peak = resident_peak();
    if (begin < 0 || peak < 0)
        return -1;
    return peak > begin ? peak - begin : 0;
}

void resident_touch(const void *data, size_t size)
{
    const volatile unsigned char *const bytes = data;
    const size_t step = (size_t)sysconf(_SC_PAGESIZE);
    for (size_t offset = 0; offset < size; offset += step)
        (void)bytes[offset];
}

/* Pages from calloc() become resident at their first write. A memset() would not help: compilers remove it, because
 * the memory is already zero. */
void *resident_allocate(size_t size)
{
    void *const data = calloc(1, size ? size : 1);
    volatile unsigned char *const bytes = data;
    const size_t step = (size_t)sysconf(_SC_PAGESIZE);
    for (size_t offset = 0; data && offset < size; offset += step)
        bytes[offset] = 0;
    return data;
}

/* ---- Threads ------------------------------------------------------------------------------------------------ */

enum {
    THREADS_MAX = 256,
    BLOCK_ROWS = 16 /* small enough to balance causal rows, large enough to keep contention for the counter low */
};

typedef struct row_loop {
    rows_task *task;
    void *context;
    int64_t row_count;
    atomic_int_fast64_t next_row;
} row_loop;

static void *run_blocks(void *argument)
{
    row_loop *const loop = argument;
    for (;;) {
        const int64_t row_begin = atomic_fetch_add(&loop->next_row, BLOCK_ROWS);
        if (row_begin >= loop->row_count)
            return NULL;
        const int64_t rows_left = loop->row_count - row_begin;
        loop->task(loop->context, row_begin, row_begin + (rows_left < BLOCK_ROWS ? rows_left : BLOCK_ROWS));
    }
}

void parallel_rows(int threads, int64_t row_count, rows_task *task, void *context)
{
    row_loop loop = {.task = task, .context = context, .row_count = row_count};
    atomic_init(&loop.next_row, 0);

    pthread_t helpers[THREADS_MAX];
    int helper_count = 0;
    while (helper_count < threads - 1 && helper_count < THREADS_MAX) {
        if (pthread_create(&helpers[helper_count], NULL, run_blocks, &loop) != 0)
            break; /* the existing threads do all the work */
        helper_count++;
    }
    run_blocks(&loop);
    while (helper_count > 0)
        pthread_join(helpers[--helper_count], NULL);
}
