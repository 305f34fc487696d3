#define _GNU_SOURCE
#include "cpu/features.h"

#include <sched.h>
#include <unistd.h>

#include "streamkl.h"

#if defined(__x86_64__)

bool skl_cpu_has_avx2(void)
{
    return __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma");
}

bool skl_cpu_has_avx512(void)
{
    return __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") &&
           __builtin_cpu_supports("avx512dq") && __builtin_cpu_supports("avx512vl");
}

const char *skl_cpu_features(void)
{
    if (skl_cpu_has_avx512())
        return "sse2 avx2 fma avx512";
    return skl_cpu_has_avx2() ? "sse2 avx2 fma" : "sse2";
}

#else

bool skl_cpu_has_avx2(void)
{
    return false;
}

bool skl_cpu_has_avx512(void)
{
    return false;
}

const char *skl_cpu_features(void)
{
#if defined(__aarch64__)
    return "neon";
#else
    return "none known";
#endif
}

#endif

int skl_cpu_count(void)
{
    cpu_set_t allowed;
    if (sched_getaffinity(0, sizeof allowed, &allowed) == 0)
        return CPU_COUNT(&allowed);
    const long online = sysconf(_SC_NPROCESSORS_ONLN);
    return online > 0 ? (int)online : 1;
}
