#define _GNU_SOURCE
#include "cpu/features.h"

#include <sched.h>
#include <stdatomic.h>
#include <unistd.h>

#if defined(__x86_64__)
#include <cpuid.h>
#include <sys/syscall.h>
#elif defined(__aarch64__)
#include <sys/auxv.h>
#endif

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

bool skl_cpu_has_avx512_bf16(void)
{
    return skl_cpu_has_avx512() && __builtin_cpu_supports("avx512bf16");
}

/* Linux saves the tiles of a process that has asked for it: see Documentation/arch/x86/xstate.rst. It refuses if it
 * is too old, if a filter of system calls forbids it, or if an alternate signal stack is too small for them. */
static bool allowed_to_use_tiles(void)
{
    enum { ARCH_REQ_XCOMP_PERM = 0x1023, XFEATURE_XTILEDATA = 18 };
    return syscall(SYS_arch_prctl, ARCH_REQ_XCOMP_PERM, XFEATURE_XTILEDATA) == 0;
}

bool skl_cpu_has_amx(void)
{
    enum { UNKNOWN, NO, YES };
    static atomic_int known = UNKNOWN;
    if (atomic_load_explicit(&known, memory_order_relaxed) == UNKNOWN) {
        unsigned eax = 0, ebx = 0, ecx = 0, edx = 0;
        const unsigned amx_bf16 = 1U << 22, amx_tile = 1U << 24; /* EDX of leaf 7 */
        const bool found = __get_cpuid_count(7, 0, &eax, &ebx, &ecx, &edx) && (edx & amx_bf16) && (edx & amx_tile);
        const bool usable = skl_cpu_has_avx512() && found && allowed_to_use_tiles();
        atomic_store_explicit(&known, usable ? YES : NO, memory_order_relaxed);
    }
    return atomic_load_explicit(&known, memory_order_relaxed) == YES;
}

const char *skl_cpu_features(void)
{
    if (skl_cpu_has_amx())
        return "sse2 avx2 fma avx512 avx512_bf16 amx";
    if (skl_cpu_has_avx512_bf16())
        return "sse2 avx2 fma avx512 avx512_bf16";
    if (skl_cpu_has_avx512())
        return "sse2 avx2 fma avx512";
    return skl_cpu_has_avx2() ? "sse2 avx2 fma" : "sse2";
}

#elif defined(__aarch64__)

bool skl_cpu_has_neon_bf16(void)
{
    const unsigned long bf16 = 1UL << 14; /* HWCAP2_BF16 */
    return getauxval(AT_HWCAP2) & bf16;
}

const char *skl_cpu_features(void)
{
    return skl_cpu_has_neon_bf16() ? "neon bf16" : "neon";
}

#else

const char *skl_cpu_features(void)
{
    return "none known";
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
