/* A test case with random inputs, with poison wherever a kernel must not read, and with the expected results. */
#ifndef SKL_TESTS_FIXTURE_H
#define SKL_TESTS_FIXTURE_H

#include "cases.h"
#include "oracle.h"

typedef struct fixture {
    const test_case *test_case;
    skl_problem problem;
    int64_t batch, length_q, length_k; /* of the buffers; packed buffers have batch 1 */
    int64_t length_s;                  /* keys of the student: length_k, or blocks */
    test_tensor q_t, k_t, q_s, k_s, lse_t, grad_kl;
    test_tensor v_s, o_s, do_s;                     /* attention: o_s is that of the oracle, rounded */
    skl_attention attention;                        /* without dv_s */
    test_tensor w_s;                                /* indexer */
    test_tensor indices;                            /* int32 values in an f32 tensor */
    test_memory lengths[3];                         /* key_lengths, cu_seqlens_q, cu_seqlens_k */
    test_memory bounds[2];                          /* key_begin, key_end */
    test_memory sinks[2];                           /* sink_t, sink_s */
    skl_inputs inputs;                              /* inputs of a forward, and grad_kl */
    uint8_t *live_q;                                /* [batch, length_q]: 1 if the row sees a key */
    uint8_t *live_k, *live_s;                       /* [batch, length_k or length_s]: 1 if a row sees the key */
    oracle_result exact;                            /* in double */
    oracle_result naive;                            /* in float: defines the allowed error */
    oracle_result attention_exact, attention_naive; /* the same of skl_attention_backward */
} fixture;

/* Creates inputs only; fixture_solve computes `exact` and `naive`. */
void fixture_create(fixture *f, const test_case *test_case);
void fixture_solve(fixture *f);
void fixture_destroy(fixture *f);

/* Poisoned buffers for all results of a call. */
typedef struct fixture_results {
    test_tensor kl, lse_t, lse_s, dot_t;      /* dot_t only with teacher groups */
    test_tensor cross_entropy, entropy, mass; /* indexer */
    test_tensor dq_t, dk_t, dq_s, dk_s, dw_s; /* those that the case requests */
    test_tensor dsink_t, dsink_s;             /* [1, 1, 1, heads] */
    test_tensor o_s, dv_s;                    /* attention */
    int merges;                               /* of partial states, from which the rows come */
} fixture_results;

/* One bit for each tensor, in this order. */
enum { ALL_RESULTS = (1 << 16) - 1 };

/* The same buffers; those without a bit are not requested. */
fixture_results results_subset(const fixture_results *results, uint32_t bits);

fixture_results results_create(const fixture *f);
void results_destroy(fixture_results *results);
void results_poison(const fixture_results *results);

/* Whether no byte has been written since the buffers were poisoned. */
int results_untouched(const fixture_results *results);

skl_rows results_rows(const fixture_results *results);
skl_gradients results_gradients(const fixture_results *results);
skl_attention results_attention(const fixture *f, const fixture_results *results);

/* Inputs of a backward: those of the fixture, with the row results of a forward. */
skl_inputs results_backward_inputs(const fixture *f, const fixture_results *results);

/* Those of a one-pass call. Both LSEs are inputs, or results with a pooled teacher. */
skl_inputs results_one_pass_inputs(const fixture *f, const fixture_results *results);

/* The row results that a one-pass call can give. */
skl_rows results_one_pass_rows(const fixture *f, const fixture_results *results);

/* Error that a kernel may have, relative to the terms of a gradient, because it rounds logit gradients. */
double kernel_product_rounding(const char *kernel, const skl_problem *problem, skl_dtype dtype);

/* Compare with the oracle: non-finite values at the same positions; exactly 0 where nothing is visible; no byte
 * written between elements; elsewhere no more error than oracle_excess() allows. Print each tensor that fails, after
 * `label`, and return the number of such tensors. */
int rows_mismatch(const fixture *f, const fixture_results *results, const char *label);
int gradients_mismatch(const fixture *f, const fixture_results *results, const char *kernel, const char *label);

/* Compare the output of skl_attention_forward, and the gradients of skl_attention_backward, by the same rules. */
int output_mismatch(const fixture *f, const fixture_results *results, const char *kernel, const char *label);
int attention_mismatch(const fixture *f, const fixture_results *results, const char *kernel, const char *label);

/* Compares one tensor by the same rules. `live` [batch, length]: rows that need not be exact; NULL: all. Returns 1
 * after it has printed a wrong element. */
int tensor_mismatch(const test_tensor *actual, const oracle_expectation *expected, const uint8_t *live,
                    const char *label, const char *name);

/* Kernels that multiply f32 on tensor cores make two f16 terms of a number, which rounds both factors of a product
 * (docs/design/gpu-kernels.md). A label has the name of its kernel. */
double kernel_roundings(const char *label);

/* Name of the first tensor whose bits differ between two results of one fixture; NULL if there is none. */
const char *results_difference(const fixture_results *a, const fixture_results *b);

#endif
