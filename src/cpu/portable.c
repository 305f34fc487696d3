/* Vectors of 4 floats, which every architecture has or the compiler emulates: NEON on aarch64, with 32 registers, of
 * which 6 x 4 hold C; SSE2 on x86_64, with 16 registers, of which 6 x 2 hold C. */
#define SKL_LANES      4
#define SKL_MICRO_ROWS 6
#if defined(__aarch64__)
#define SKL_MICRO_VECS 4
#define KERNEL_NAME    "cpu_neon"
#define KERNEL_DETAIL  "NEON, 192 x 96 tiles, 6 x 16 micro-kernel"
#else
#define SKL_MICRO_VECS 2
#define KERNEL_NAME    "cpu_portable"
#define KERNEL_DETAIL  "4-float vectors, 192 x 96 tiles, 6 x 8 micro-kernel"
#endif

#if defined(__aarch64__)
#include <arm_neon.h>

#define SKL_HAS_FMA
#define SKL_HAS_BOUNDS
#include "cpu/body/vector.h"

SKL_INLINE vec vec_fma(vec a, vec b, vec c)
{
    return (vec)vfmaq_f32((float32x4_t)c, (float32x4_t)a, (float32x4_t)b);
}

/* fmax and fmin return NaN if one operand is NaN. */
SKL_INLINE vec vec_at_least(vec low, vec x)
{
    return (vec)vmaxq_f32((float32x4_t)low, (float32x4_t)x);
}

SKL_INLINE vec vec_at_most(vec high, vec x)
{
    return (vec)vminq_f32((float32x4_t)high, (float32x4_t)x);
}
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
    .attention = &attention_work,
    .indexer = &indexer_work,
    .sparse_indexer = &sparse_indexer_work,
};
