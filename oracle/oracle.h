/* The oracle: a naive implementation of the attention KL and its gradients in double, for tests to compare with.
 *
 * It shares no code with src/ and stores whole rows of logits. It checks no argument: the caller passes a problem
 * that skl_plan_create accepts, and tensors that match it.
 */
#ifndef SKL_ORACLE_H
#define SKL_ORACLE_H

#include "streamkl.h"

/* The largest relative error of one rounding to float. */
#define ORACLE_ROUNDING 0x1p-24

/* Roundings of an exponential on the device whose results are compared: 1, or 4 for the special function unit of a
 * GPU, which is accurate to 2^-22 (ex2.approx in the PTX manual). */
void oracle_compare_gpu(int is_gpu);
double oracle_exponential_roundings(void);

/* Roundings of a number that goes to base 2, or back: 1 on a GPU, whose statistics have logits in base 2, or 0. */
double oracle_base_2_roundings(void);

/* Contiguous arrays: tensors [batch, heads, length, dim], row vectors [batch, heads, length]. Packed problems have
 * no batch dimension: [heads, total, dim] and [heads, total]. Rows of a packed buffer after its last sequence have
 * the results of a row without visible keys: KL 0, LSE -inf, dot 0, gradients 0. */
typedef struct oracle_result {
    double *kl, *lse_t, *lse_s, *dot_t;
    double *cross_entropy, *entropy, *mass; /* 0 for a row that sees nothing */
    double *dq_t, *dk_t, *dq_s, *dk_s;      /* 0 unless problem->gradients has dq or dk of the same model */
    double *dw_s;                           /* empty unless the student is an indexer */
    double *dsink_t, *dsink_s;              /* [heads]; empty without sinks */
    double *o_s, *dv_s;                     /* S v, and the gradient of v; empty without the student's attention */
    /* Condition numbers: a result changes by at most this much times e if every intermediate number (products,
     * logits, LSEs, exponentials, terms of sums) has a relative error of e, all in the worst direction. */
    struct {
        double *kl, *lse_t, *lse_s, *dot_t, *cross_entropy, *entropy, *mass;
        double *dq_t, *dk_t, *dq_s, *dk_s, *dw_s, *dsink_t, *dsink_s, *o_s, *dv_s;
    } rounding;
    struct {
        double *dq_t, *dk_t, *dq_s, *dk_s, *dw_s, *o_s, *dv_s;
    } terms; /* sum of the magnitudes of the terms of each element, none below oracle_smallest_gradient() */
} oracle_result;

/* Reads these inputs: q, k, grad_kl; lse_t with teacher groups or an indexer; w_s and indices; cu_seqlens,
 * key_lengths, row bounds and sinks. Aborts when memory runs out. */
oracle_result oracle_run(const skl_problem *problem, const skl_inputs *inputs);

/* The same code compiled in float. Its error is that of a naive implementation in the precision of the kernels. */
oracle_result oracle_run_f32(const skl_problem *problem, const skl_inputs *inputs);

/* The same with the student's attention, of which v_s, o_s and do_s are read: dq_s and dk_s are those of
 * skl_attention_backward. NULL: without it. */
oracle_result oracle_run_attention(const skl_problem *problem, const skl_inputs *inputs,
                                   const skl_attention *attention);
oracle_result oracle_run_attention_f32(const skl_problem *problem, const skl_inputs *inputs,
                                       const skl_attention *attention);

void oracle_free(oracle_result *result);

/* A sequence inside its buffers: batch index (0 when packed), first rows, lengths. */
typedef struct oracle_sequence {
    int64_t batch, first_q, first_k, len_q, len_k;
} oracle_sequence;

oracle_sequence oracle_sequence_at(const skl_problem *problem, const skl_inputs *inputs, int64_t b);

/* The keys begin <= j < end that a row sees; begin == end: none. */
typedef struct oracle_keys {
    int64_t begin, end;
} oracle_keys;

oracle_keys oracle_visible_keys(const skl_problem *problem, const skl_inputs *inputs, int64_t b, int64_t i);

/* Writes the keys that row i of student head h in sequence b attends to into keys[], and returns their number: all
 * visible keys, or with top_k > 0 those in its indices. With a pooled teacher these are blocks. keys[] holds
 * max(len_k, top_k) entries. */
int64_t oracle_row_keys(const skl_problem *problem, const skl_inputs *inputs, int64_t b, int64_t h, int64_t i,
                        int64_t *keys);

/* Keys of the student for `keys` keys of the teacher: as many, or blocks. */
int64_t oracle_student_keys(const skl_problem *problem, int64_t keys);

/* The most keys of a block; 1 without a pooled teacher. */
int64_t oracle_block_keys(const skl_problem *problem);

/* Writes the keys that a row's teacher sees into seen[], and returns their number: the `count` keys[] of
 * oracle_row_keys or, with a pooled teacher, all visible keys, or with top_k > 0 those of the blocks keys[].
 * outcomes[] is the entry of keys[] to which each of them belongs; -1: none. Both hold max(len_k, top_k * block keys)
 * entries. */
int64_t oracle_row_seen(const skl_problem *problem, const skl_inputs *inputs, int64_t b, int64_t i,
                        const int64_t *keys, int64_t count, int64_t *seen, int64_t *outcomes);

/* The tolerance for one tensor. The error of an element is at most
 *
 *     2 x the largest naive error of the tensor + one rounding of every intermediate number of the element
 *
 * plus half the spacing of a 16-bit output type. docs/design/maths.md derives the second term, which matters where
 * the naive result is exact by luck. Kernels that round the gradient of the logits before they multiply it with q or
 * k may add one rounding of every term of that product. */
typedef struct oracle_expectation {
    const double *exact, *naive, *rounding;
    double roundings;        /* how many the kernel makes where f32 arithmetic makes one */
    double merged_sums;      /* sums of partial states that were merged: each adds roundings */
    const double *terms;     /* gradients; NULL for row vectors */
    double product_rounding; /* largest relative error of the rounding before the product; 0: none */
    int64_t products;        /* whose sum an element is, at most: such a kernel may lose those below 2^-126 */
    skl_dtype dtype;         /* of the computed tensor */
    int64_t count;
    const struct oracle_expectation *rows; /* a tensor of which each element is one: its naive errors count */
} oracle_expectation;

/* The largest relative error of one rounding to a type. */
double oracle_type_rounding(skl_dtype dtype);

/* The largest relative error with which a kernel that has `rounds_gradients` rounds the gradient of a logit before it
 * multiplies it with tensors of this type. */
double oracle_product_rounding(const skl_problem *problem, skl_dtype dtype);

/* The smallest gradient of a logit that such a kernel rounds relatively, divided by the largest one of the problem or
 * the largest upstream gradient. */
double oracle_smallest_gradient(const skl_problem *problem, skl_dtype dtype);

/* The largest error of the naive result of a tensor, and the largest one as a multiple of its element's `rounding`.
 * The second one bounds elements that are far smaller than the largest. */
typedef struct oracle_error {
    double absolute, in_roundings;
} oracle_error;

oracle_error oracle_naive_error(const oracle_expectation *expected);

/* The error of element n divided by its tolerance. It is infinite if exactly one of the two values is finite, unless
 * the exact one overflows the type, or f32: where the naive result is not finite, NaN and infinity are right, too. */
double oracle_excess(const oracle_expectation *expected, oracle_error naive, int64_t n, double computed);

/* Element `index` of an array. */
double oracle_read(skl_dtype dtype, const void *data, int64_t index);

#endif
