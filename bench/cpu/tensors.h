/* The tensors of a benchmark: random inputs, equal for all methods and types, and buffers for the results. */
#ifndef STREAMKL_BENCH_CPU_TENSORS_H
#define STREAMKL_BENCH_CPU_TENSORS_H

#include "streamkl.h"

#include <stdbool.h>

/* All tensors are contiguous [heads, length, dim] or [heads, length]. */
typedef struct bench_tensors {
    int64_t heads, length, dim;
    float scale; /* multiplies the logits */
    bool causal;
    skl_dtype type, gradient_type;
    void *memory; /* holds all tensors */
    void *q_t, *k_t, *q_s, *k_s;
    float *q_t_f32, *k_t_f32, *q_s_f32, *k_s_f32; /* the same values for the baseline, which is f32 */
    float *grad_kl;
    float *kl, *lse_t, *lse_s; /* results of streaming */
    void *dq_s, *dk_s;
    float *baseline_kl, *baseline_dq_s, *baseline_dk_s;
} bench_tensors;

/* For a problem of bench_problem(). False: out of memory. */
bool bench_tensors_create(bench_tensors *tensors, const skl_problem *problem);
void bench_tensors_destroy(bench_tensors *tensors);

/* Streaming compared with the baseline: the largest absolute difference of the KLs, and the largest difference of the
 * gradients relative to the largest element of each tensor. */
void bench_tensors_compare(const bench_tensors *tensors, double *kl_difference, double *gradient_difference);

#endif
