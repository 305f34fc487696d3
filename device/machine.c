#include "device/machine.h"

#include <inttypes.h>
#include <sched.h>
#include <stdbool.h>
#include <stdio.h>
#include <string.h>
#include <sys/utsname.h>
#include <time.h>

/* The value of the first "name : value" line of a /proc file, without spaces around it. */
static bool proc_value(const char *path, const char *name, char *value, size_t size)
{
    FILE *const file = fopen(path, "r");
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

int64_t machine_available_memory(void)
{
    char text[64];
    int64_t kibibytes;
    if (!proc_value("/proc/meminfo", "MemAvailable", text, sizeof text))
        return INT64_MAX;
    if (sscanf(text, "%" SCNd64, &kibibytes) != 1)
        return INT64_MAX;
    return kibibytes * 1024;
}
