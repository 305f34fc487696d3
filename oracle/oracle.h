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
    double *cross_entropy, *entropy, *mass; /* 0 for a row that sees nothing */
    double *dq_t, *dk_t, *dq_s, *dk_s;      /* 0 unless problem->gradients asks for one of the same model */
    double *dw_s;                           /* of an indexer; of another student an empty array */
    /* How ill-conditioned each of them is: it moves by this much times e if every number that it is made of
     * (products, logits, LSEs, exponentials, terms of sums) is off by a relative error of e, all in the worst
     * direction. */
    struct {
        double *kl, *lse_t, *lse_s, *dot_t, *cross_entropy, *entropy, *mass;
        double *dq_t, *dk_t, *dq_s, *dk_s, *dw_s;
    } rounding;
    struct {
        double *dq_t, *dk_t, *dq_s, *dk_s, *dw_s;
    } terms; /* sums of the magnitudes of their terms */
} oracle_result;

/* Inputs that it reads: q, k, grad_kl and, with r > 1 or for an indexer, lse_t; w_s and indices; cu_seqlens and
 * key_lengths. Out of memory: aborts. */
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

/* The keys of sequence b that row i of student head h sees, of its visible ones all or those that its list selects:
 * written to keys[], which has room for the longer of the two. Returns how many. */
int64_t oracle_row_keys(const skl_problem *problem, const skl_inputs *inputs, int64_t b, int64_t h, int64_t i,
                        int64_t *keys);

/* What a computed tensor is held to: an error of at most
 *
 *     2 x the largest naive error of the tensor + one rounding of every number that the element is made of
 *
 * and, in a 16-bit type, half a step of it. docs/maths.md, section 10, derives the second term, which says what one
 * can know of a result when the naive one is right by luck. Kernels that round the gradient of the logits before its
 * product with the rows add one rounding of every term of that product. */
typedef struct oracle_expectation {
    const double *exact, *naive, *rounding;
    const double *terms;     /* of gradients; NULL for rows */
    double product_rounding; /* largest relative error of the rounding before the product; 0: there is none */
    skl_dtype dtype;         /* of the computed tensor */
    int64_t count;
} oracle_expectation;

/* The largest relative error of one rounding to a type. */
double oracle_type_rounding(skl_dtype dtype);

/* The largest relative error of what a kernel with `rounds_gradients` makes of the gradient of a logit before it
 * multiplies it with tensors of this type. */
double oracle_product_rounding(const skl_problem *problem, skl_dtype dtype);

double oracle_naive_error(const oracle_expectation *expected);

/* The error of element n as a multiple of what is allowed; infinite where just one of the two is not finite. */
double oracle_excess(const oracle_expectation *expected, double naive_error, int64_t n, double computed);

/* Element `index` of an array. */
double oracle_read(skl_dtype dtype, const void *data, int64_t index);

#endif
