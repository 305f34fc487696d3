/* A case brought to life: random inputs, everything it must not read poisoned, and what should come out. */
#ifndef SKL_TESTS_FIXTURE_H
#define SKL_TESTS_FIXTURE_H

#include "cases.h"
#include "oracle.h"

typedef struct fixture {
    const test_case *test_case;
    skl_problem problem;
    int64_t batch, length_q, length_k; /* of the buffers: packed ones have batch 1 */
    test_tensor q_t, k_t, q_s, k_s, lse_t, grad_kl;
    test_tensor w_s;        /* of an indexer */
    test_tensor indices;    /* int32, in the place of floats */
    test_memory lengths[3]; /* key_lengths, cu_seqlens_q, cu_seqlens_k */
    skl_inputs inputs;      /* what a forward takes, and grad_kl */
    uint8_t *live_q;        /* [batch, length_q]: 1 if the row sees a key */
    uint8_t *live_k;        /* [batch, length_k]: 1 if a row sees the key */
    oracle_result exact;    /* in double */
    oracle_result naive;    /* in float: how far one may be off */
} fixture;

/* Inputs only; fixture_solve computes exact and naive. */
void fixture_create(fixture *f, const test_case *test_case);
void fixture_solve(fixture *f);
void fixture_destroy(fixture *f);

/* Poisoned buffers for everything a call can return. */
typedef struct fixture_results {
    test_tensor kl, lse_t, lse_s, dot_t;      /* dot_t only with r > 1 */
    test_tensor cross_entropy, entropy, mass; /* of an indexer */
    test_tensor dq_t, dk_t, dq_s, dk_s, dw_s; /* those the case asks for */
} fixture_results;

fixture_results results_create(const fixture *f);
void results_destroy(fixture_results *results);
void results_poison(const fixture_results *results);
skl_rows results_rows(const fixture_results *results);
skl_gradients results_gradients(const fixture_results *results);

/* The fixture's inputs with the rows of a forward: what a backward takes. */
skl_inputs results_backward_inputs(const fixture *f, const fixture_results *results);

/* Compare with the oracle: same non-finite places; exactly 0 where nothing is visible; nothing written between the
 * elements; elsewhere no more error than oracle_excess() allows the kernel. Each tensor that fails is printed, with
 * `label` in front. Returns how many did. */
int rows_mismatch(const fixture *f, const fixture_results *results, const char *label);
int gradients_mismatch(const fixture *f, const fixture_results *results, const char *kernel, const char *label);

/* The name of a tensor that differs in a bit between two results of one fixture; NULL if none does. */
const char *results_difference(const fixture_results *a, const fixture_results *b);

#endif
