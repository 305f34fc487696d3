/* The vectors of 64-bit Arm for the shared body: 32 registers of 4 floats, of which 6 x 4 hold C. */
#ifndef SKL_CPU_NEON_VECTOR_H
#define SKL_CPU_NEON_VECTOR_H

#define SKL_LANES      4
#define SKL_MICRO_ROWS 6
#define SKL_MICRO_VECS 4

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
