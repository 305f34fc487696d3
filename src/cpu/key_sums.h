/* Sums of 16-bit key gradients in f32, while the query tiles of a chain add to them: see ordered_sum.h.
 *
 * An f32 key gradient is summed in the caller's buffer. A 16-bit one would be rounded at every query tile, so the
 * workspace has a buffer for each chain that runs: the keys of one key head or, for a teacher group with several key
 * heads, of all key heads of the chain. The first item of a key head clears its sums, the last one rounds them into
 * the caller's buffer. */
#ifndef SKL_CPU_KEY_SUMS_H
#define SKL_CPU_KEY_SUMS_H

#include "base/side.h"

/* [summed key heads][len_k][dim]; NULL: the caller's buffer has the sums. */
typedef struct skl_key_sums {
    float *dk_t, *dk_s, *dv_s;
} skl_key_sums;

static inline int64_t skl_least_common_multiple(int64_t a, int64_t b)
{
    int64_t x = a, y = b;
    while (y != 0) {
        const int64_t rest = x % y;
        x = y;
        y = rest;
    }
    return a / x * b;
}

/* Student heads per chain: consecutive ones that share a key head, on either side. */
static inline int64_t skl_chain_heads(const skl_problem *p)
{
    const int64_t group_size = skl_group_size(p);
    const int64_t shared_s = p->heads_s / p->key_heads_s;
    const int64_t shared_t = p->heads_t / p->key_heads_t; /* counted in teacher heads */
    if (shared_t % group_size != 0 && group_size % shared_t != 0)
        return p->heads_s; /* a key head serves parts of different teacher groups */
    return skl_least_common_multiple(shared_s, skl_max(1, shared_t / group_size));
}

/* Key heads that have sums at the same time, of a side with `key_heads`: if every student head has its own key head,
 * or shares one, the key heads of a chain follow one another. */
static inline int64_t skl_summed_heads(const skl_problem *p, int64_t key_heads)
{
    return p->heads_s % key_heads == 0 ? 1 : key_heads * skl_chain_heads(p) / p->heads_s;
}

static inline int64_t skl_sum_floats(const skl_problem *p, uint32_t gradient, skl_dtype dtype, int64_t key_heads,
                                     int64_t dim)
{
    const int64_t most = (int64_t)1 << 50; /* 4 PB: no process has that much, and sizes do not overflow */
    const bool summed = (p->gradients & gradient) && skl_grad_dtype(p, dtype) != SKL_F32;
    const int64_t rows = skl_summed_heads(p, key_heads) * skl_student_keys(p, p->len_k);
    return summed ? (skl_min(rows, most / dim) * dim + 15) / 16 * 16 : 0;
}

/* Floats of the sums of one chain. Sparse indexers sum key by key. */
static inline int64_t skl_key_sums_floats(const skl_problem *p)
{
    return p->top_k > 0 ? 0
                        : skl_sum_floats(p, SKL_DK_T, p->dtype_t, p->key_heads_t, p->dim_t) +
                              skl_sum_floats(p, SKL_DK_S, p->dtype_s, p->key_heads_s, p->dim_s) +
                              skl_sum_floats(p, SKL_DV_S, p->dtype_s, p->key_heads_s, p->dim_s);
}

static inline skl_key_sums skl_key_sums_at(const skl_problem *p, float *buffer)
{
    const int64_t floats_t = skl_sum_floats(p, SKL_DK_T, p->dtype_t, p->key_heads_t, p->dim_t);
    const int64_t floats_s = skl_sum_floats(p, SKL_DK_S, p->dtype_s, p->key_heads_s, p->dim_s);
    const int64_t floats_v = skl_sum_floats(p, SKL_DV_S, p->dtype_s, p->key_heads_s, p->dim_s);
    const skl_key_sums sums = {floats_t > 0 ? buffer : NULL, floats_s > 0 ? buffer + floats_t : NULL,
                               floats_v > 0 ? buffer + floats_t + floats_s : NULL};
    return sums;
}

#endif
