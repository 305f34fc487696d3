/* Sums of 16-bit key gradients in f32, while the query tiles of a chain add to them: see ordered_sum.h.
 *
 * An f32 key gradient is summed in the caller's buffer. A 16-bit one would be rounded at every query tile, so the
 * workspace has a buffer for each chain that runs: the keys of one key head. The first item of a key head clears it,
 * the last one rounds it into the caller's buffer. Its size is bounded: calls with more than SKL_SUMMED_KEYS keys
 * compute 16-bit key gradients in a separate pass. */
#ifndef SKL_CPU_KEY_SUMS_H
#define SKL_CPU_KEY_SUMS_H

#include "base/side.h"

enum { SKL_SUMMED_KEYS = 8192 };

/* [keys][dim]; NULL: the caller's buffer has the sums. */
typedef struct skl_key_sums {
    float *dk_t, *dk_s, *dv_s;
} skl_key_sums;

static inline int64_t skl_sum_floats(const skl_problem *p, uint32_t gradient, skl_dtype dtype, int64_t dim)
{
    const bool summed = (p->gradients & gradient) && skl_grad_dtype(p, dtype) != SKL_F32;
    return summed ? (skl_student_keys(p, p->len_k) * dim + 15) / 16 * 16 : 0;
}

/* NULL, or why there are no sums. */
static inline const char *skl_why_no_key_sums(const skl_problem *p)
{
    const int64_t sharing_t = p->heads_t / p->key_heads_t;
    const bool many_key_heads =
        skl_sum_floats(p, SKL_DK_T, p->dtype_t, p->dim_t) > 0 && sharing_t % skl_group_size(p) != 0;
    if (skl_student_keys(p, p->len_k) > SKL_SUMMED_KEYS)
        return "16-bit gradients of more than 8192 keys are summed in f32 in a separate pass";
    return many_key_heads
               ? "a teacher group has several key heads, whose 16-bit gradients are summed in f32 in a separate pass"
               : NULL;
}

/* Floats of the sums of one chain. */
static inline int64_t skl_key_sums_floats(const skl_problem *p)
{
    if (p->top_k > 0 || skl_why_no_key_sums(p) != NULL)
        return 0;
    return skl_sum_floats(p, SKL_DK_T, p->dtype_t, p->dim_t) + skl_sum_floats(p, SKL_DK_S, p->dtype_s, p->dim_s) +
           skl_sum_floats(p, SKL_DV_S, p->dtype_s, p->dim_s);
}

static inline skl_key_sums skl_key_sums_at(const skl_problem *p, float *buffer)
{
    const int64_t floats_t = skl_sum_floats(p, SKL_DK_T, p->dtype_t, p->dim_t);
    const int64_t floats_s = skl_sum_floats(p, SKL_DK_S, p->dtype_s, p->dim_s);
    const int64_t floats_v = skl_sum_floats(p, SKL_DV_S, p->dtype_s, p->dim_s);
    const skl_key_sums sums = {floats_t > 0 ? buffer : NULL, floats_s > 0 ? buffer + floats_t : NULL,
                               floats_v > 0 ? buffer + floats_t + floats_s : NULL};
    return sums;
}

#endif
