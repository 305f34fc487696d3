/* The oracle: attention KL and its gradients written down naively, in double, for tests to compare with.
 *
 * It shares no code with src/ and stores whole rows of logits. It believes what it is given: a problem that
 * skl_plan_create accepts, with tensors that fit it.
 */
#ifndef SKL_ORACLE_H
#define SKL_ORACLE_H

#include "streamkl.h"

/* The largest relative error of one rounding to float. */
#define ORACLE_ROUNDING 0x1p-24

/* Contiguous arrays: tensors [batch, heads, length, dim], row vectors [batch, heads, length]. Packed problems have
 * no batch dimension: [heads, total, dim] and [heads, total]. What is beyond the sequences of a packed buffer is as
 * for a row without visible keys: KL 0, LSE -inf, dot 0, gradients 0. */
typedef struct oracle_result {
    double *kl, *lse_t, *lse_s, *dot_t;
    double *dq_t, *dk_t, *dq_s, *dk_s; /* 0 unless problem->gradients asks for one of the same model */
    /* How ill-conditioned each of them is: it moves by this much times e if every number that it is made of
     * (products, logits, LSEs, exponentials, terms of sums) is off by a relative error of e, all in the worst
     * direction. */
    struct {
        double *kl, *lse_t, *lse_s, *dot_t, *dq_t, *dk_t, *dq_s, *dk_s;
    } rounding;
} oracle_result;

/* Inputs that it reads: q, k, grad_kl and, with r > 1, lse_t; cu_seqlens and key_lengths. Out of memory: aborts. */
oracle_result oracle_run(const skl_problem *problem, const skl_inputs *inputs);

/* The same text compiled in float: the error that a naive implementation of the same precision makes. */
oracle_result yardstick_run(const skl_problem *problem, const skl_inputs *inputs);

void oracle_free(oracle_result *result);

/* Where sequence b lies in the buffers: its batch index there (0 when packed), its first rows and its lengths. */
typedef struct oracle_sequence {
    int64_t batch, first_q, first_k, len_q, len_k;
} oracle_sequence;

oracle_sequence oracle_sequence_at(const skl_problem *problem, const skl_inputs *inputs, int64_t b);

/* Keys begin <= j < end of sequence b are what its row i sees; begin == end: none. */
typedef struct oracle_keys {
    int64_t begin, end;
} oracle_keys;

oracle_keys oracle_visible_keys(const skl_problem *problem, const skl_inputs *inputs, int64_t b, int64_t i);

/* Element `index` of an array. */
double oracle_read(skl_dtype dtype, const void *data, int64_t index);

#endif
