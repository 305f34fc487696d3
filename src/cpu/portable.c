/* Vectors of 4 floats, which every architecture has or the compiler emulates: NEON on aarch64; SSE2 on x86_64, with
 * 16 registers, of which 6 x 2 hold C. */
#if defined(__aarch64__)
#include "cpu/neon_vector.h"
#define KERNEL_NAME   "cpu_neon"
#define KERNEL_DETAIL "NEON, 192 x 96 tiles, 6 x 16 micro-kernel"
#else
#define SKL_LANES      4
#define SKL_MICRO_ROWS 6
#define SKL_MICRO_VECS 2
#define KERNEL_NAME    "cpu_portable"
#define KERNEL_DETAIL  "4-float vectors, 192 x 96 tiles, 6 x 8 micro-kernel"
#endif

#include "cpu/body/work.h"

static bool usable(void)
{
    return true;
}

const skl_cpu_kernel skl_cpu_portable = {
    .name = KERNEL_NAME,
    .detail = KERNEL_DETAIL,
    .usable = usable,
    .works = &works,
};
