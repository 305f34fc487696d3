#include "cli/common/resident.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

/* A line like "VmHWM:     1234 kB" of /proc/self/status, in bytes. */
static int64_t status_bytes(const char *field)
{
    FILE *status = fopen("/proc/self/status", "re");
    if (status == NULL)
        return -1;
    int64_t bytes = -1;
    char line[256];
    while (bytes < 0 && fgets(line, sizeof line, status)) {
        long long kib;
        const size_t length = strlen(field);
        if (strncmp(line, field, length) == 0 && sscanf(line + length, ": %lld kB", &kib) == 1)
            bytes = 1024 * (int64_t)kib;
    }
    fclose(status);
    return bytes;
}

/* Resets VmHWM to VmRSS. If the system forbids it, the peak remains, and the growth is overestimated. */
static void reset_peak(void)
{
    FILE *clear_refs = fopen("/proc/self/clear_refs", "we");
    if (clear_refs == NULL)
        return;
    fputs("5", clear_refs);
    fclose(clear_refs);
}

int64_t resident_begin(void)
{
    reset_peak();
    return status_bytes("VmRSS");
}

int64_t resident_peak_growth(int64_t begin)
{
    const int64_t peak = status_bytes("VmHWM");
    if (begin < 0 || peak < 0)
        return -1;
    return peak > begin ? peak - begin : 0;
}

int64_t resident_peak(void)
{
    return status_bytes("VmHWM");
}

static size_t page_size(void)
{
    return (size_t)sysconf(_SC_PAGESIZE);
}

void resident_touch(const void *data, size_t size)
{
    const volatile unsigned char *const bytes = data;
    const size_t step = page_size();
    for (size_t offset = 0; offset < size; offset += step)
        (void)bytes[offset];
}

/* Pages from calloc() become resident at their first write. A memset() would not help: compilers remove it, because
 * the memory is already zero. */
void *resident_allocate(size_t size)
{
    void *const data = calloc(1, size ? size : 1);
    volatile unsigned char *const bytes = data;
    const size_t step = page_size();
    for (size_t offset = 0; data && offset < size; offset += step)
        bytes[offset] = 0;
    return data;
}
