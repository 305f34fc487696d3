/* Known failure modes of attention kernels, one test each. Invalid arguments are in test_calls.c. */
#define _DEFAULT_SOURCE /* mmap */
#include "runner.h"

#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <sys/mman.h>

#include "case_words.h"
#include "device.h"

#define SMALL HEADS(2, 2), DIMS(16, 16)

/* The best kernels on one case, against the oracle. */
static void check_case_with(const test_case *c, int32_t kernel_count)
{
    fixture f;
    fixture_create(&f, c);
    fixture_solve(&f);
    for (int32_t k = 0; k < kernel_count && case_kernel(c, k); k++) {
        fixture_results results = results_create(&f);
        run_kernel(&f, case_kernel(c, k), 2, &results);
        const int mismatches = rows_mismatch(&f, &results, case_kernel(c, k)) +
                               gradients_mismatch(&f, &results, case_kernel(c, k), case_kernel(c, k));
        assert_int_equal(mismatches, 0);
        results_destroy(&results);
    }
    fixture_destroy(&f);
}

static void check_case(const test_case *c)
{
    check_case_with(c, INT32_MAX);
}

/* Checks every kernel on a case, in every type, with every kind of plan. */
static void with_every_kernel(const test_case *c, void (*check)(const test_case *, const char *kernel, int32_t kind))
{
    for (int dtype = SKL_F32; dtype <= SKL_BF16; dtype++) {
        test_case typed = *c;
        typed.dtype_t = typed.dtype_s = (skl_dtype)dtype;
        for (int32_t k = 0; case_kernel(&typed, k); k++)
            for (int32_t kind = 0; kind < test_plan_kinds(); kind++)
                check(&typed, case_kernel(&typed, k), kind);
    }
}

/* ---- Rows without visible keys ----------------------------------------------------------------------------- */

static void test_every_row_is_padding(void **state)
{
    (void)state;
    const test_case c = {"padding", SHAPE(2, 37, 41), SMALL, KEY_LENGTHS(0, 0)};
    check_case(&c);
}

static void test_a_rank_with_only_padding(void **state)
{
    (void)state;
    const test_case c = {"empty rank", PACKED(3, LENGTHS(0, 0, 0, 0), LENGTHS(0, 0, 0, 0)), SMALL, TAILS(300, 500)};
    check_case(&c);
}

/* ---- NaN and infinity -------------------------------------------------------------------------------------- */

/* Poison in keys that no query sees changes no bit of any result. */
static void check_poison_in_hidden_keys(const test_case *c, const char *kernel, int32_t kind)
{
    fixture f; /* starts poisoned */
    fixture_create(&f, c);
    fixture_results poisoned = results_create(&f), clean = results_create(&f);
    run_kind(&f, kernel, kind, &poisoned);
    const test_tensor *const tensors[] = {&f.q_t, &f.k_t, &f.q_s, &f.k_s, &f.grad_kl};
    for (size_t t = 0; t < COUNT_OF(tensors); t++)
        for (int64_t n = 0; n < tensor_count(tensors[t]); n++)
            if (!isfinite(tensor_get(tensors[t], n)))
                tensor_set(tensors[t], n, 1);
    run_kind(&f, kernel, kind, &clean);
    const char *const different = results_difference(&poisoned, &clean);
    if (different)
        fail_msg("%s: %s: poison changes %s", c->name, kernel, different);
    results_destroy(&poisoned);
    results_destroy(&clean);
    fixture_destroy(&f);
}

static void test_poison_in_hidden_keys(void **state)
{
    (void)state;
    const test_case cases[] = {
        {"padded", SHAPE(2, 67, 131), SMALL, KEY_LENGTHS(100, 7)},
        {"causal", SHAPE(1, 67, 131), SMALL, CAUSAL, OFFSETS(3, 0)},
    };
    for (size_t c = 0; c < COUNT_OF(cases); c++)
        with_every_kernel(&cases[c], check_poison_in_hidden_keys);
}

/* Whether rows i < first of each head have the same bits. */
static int rows_equal_before(const test_tensor *a, const test_tensor *b, int64_t first)
{
    for (int64_t n = 0; n < tensor_count(a); n++) {
        const double value_a = tensor_get(a, n), value_b = tensor_get(b, n);
        if (n / a->dim % a->length < first && memcmp(&value_a, &value_b, sizeof value_a) != 0)
            return 0;
    }
    return 1;
}

/* Number of rows, and the poisoned row, in the tests below. */
enum { LENGTH = 230, POISONED = 101 };

/* Gives every query both signs: its product with a key of infinities is NaN. It could be -inf, a key of probability
 * 0. */
static void give_both_signs(const test_tensor *q)
{
    for (int64_t n = 0; n < tensor_count(q); n += q->dim) {
        tensor_set(q, n, 1);
        tensor_set(q, n + 1, -1);
    }
}

/* In a causal problem, rows i >= j see key j. NaN or infinity in it does not change earlier rows, in forward and
 * backward, and the KL of every row that sees it is not finite. */
static void test_poison_in_a_visible_key(void **state)
{
    (void)state;
    static const double poisons[] = {NAN, INFINITY};
    static const test_case cases[] = {
        {"f32", SHAPE(1, LENGTH, LENGTH), SMALL, CAUSAL},
        {"bf16", SHAPE(1, LENGTH, LENGTH), SMALL, CAUSAL, TYPES(BF16, BF16)},
        {"teacher groups", SHAPE(1, LENGTH, LENGTH), HEADS(4, 2), DIMS(16, 16), CAUSAL},
    };
    for (size_t c = 0; c < COUNT_OF(cases); c++)
        for (size_t p = 0; p < COUNT_OF(poisons); p++)
            for (int side = 0; side < 2; side++)
                for (int32_t k = 0; case_kernel(&cases[c], k); k++) {
                    fixture f;
                    fixture_create(&f, &cases[c]);
                    fixture_results clean = results_create(&f), poisoned = results_create(&f);
                    give_both_signs(&f.q_t);
                    give_both_signs(&f.q_s);
                    run_kernel(&f, case_kernel(&cases[c], k), 2, &clean);
                    const test_tensor *const keys = side ? &f.k_s : &f.k_t;
                    for (int64_t h = 0; h < keys->heads; h++)
                        for (int64_t d = 0; d < keys->dim; d++)
                            tensor_set(keys, tensor_index(keys, 0, h, POISONED) + d, poisons[p]);
                    run_kernel(&f, case_kernel(&cases[c], k), 2, &poisoned);
                    assert_true(rows_equal_before(&clean.kl, &poisoned.kl, POISONED));
                    assert_true(rows_equal_before(&clean.lse_t, &poisoned.lse_t, POISONED));
                    assert_true(rows_equal_before(&clean.lse_s, &poisoned.lse_s, POISONED));
                    assert_true(rows_equal_before(&clean.dq_t, &poisoned.dq_t, POISONED));
                    assert_true(rows_equal_before(&clean.dq_s, &poisoned.dq_s, POISONED));
                    for (int64_t n = 0; n < tensor_count(&poisoned.kl); n++)
                        assert_true(n % LENGTH < POISONED || !isfinite(tensor_get(&poisoned.kl, n)));
                    results_destroy(&clean);
                    results_destroy(&poisoned);
                    fixture_destroy(&f);
                }
}

/* The same in a one-pass call, with the poison in both the LSEs and the keys. Only student gradients are requested,
 * so that the pass over the keys also gives the KL. */
static void check_poison_in_one_pass(const test_case *c)
{
    static const double poisons[] = {NAN, INFINITY, -INFINITY};
    for (size_t p = 0; p < COUNT_OF(poisons); p++)
        for (int32_t k = 0; case_kernel(c, k); k++) {
            fixture f;
            fixture_create(&f, c);
            skl_plan *const plan = test_plan(&f.problem, case_kernel(c, k), 2);
            fixture_results saved = results_create(&f), results = results_create(&f);
            for (int64_t h = 0; h < f.k_s.heads; h++)
                tensor_set(&f.k_s, tensor_index(&f.k_s, 0, h, POISONED), poisons[p]);
            run_both(plan, &f, &saved);
            skl_inputs inputs = f.inputs;
            inputs.lse_t = tensor_input(&saved.lse_t);
            inputs.lse_s = tensor_input(&saved.lse_s);
            fixture_results wanted = results;
            wanted.lse_t.data = wanted.lse_s.data = NULL;
            const skl_rows rows = results_rows(&wanted);
            const skl_gradients gradients = results_gradients(&wanted);
            run_forward_backward(plan, &inputs, &rows, &gradients);
            for (int64_t n = 0; n < tensor_count(&results.kl); n++)
                assert_int_equal(n % LENGTH < POISONED, isfinite(tensor_get(&results.kl, n)) != 0);
            results_destroy(&saved);
            results_destroy(&results);
            skl_plan_destroy(plan);
            fixture_destroy(&f);
        }
}

static void test_poison_in_one_pass(void **state)
{
    (void)state;
    const test_case c = {"one-pass", SHAPE(1, LENGTH, LENGTH), SMALL, CAUSAL, .without = SKL_DQ_T | SKL_DK_T};
    case_in_every_type(&c, check_poison_in_one_pass);
}

/* A NaN query affects its row and the gradients of the keys that it sees, and no other query. */
static void check_poison_in_a_query(const test_case *c, const char *kernel, int32_t kind)
{
    fixture f;
    fixture_create(&f, c);
    fixture_results clean = results_create(&f), poisoned = results_create(&f);
    run_kind(&f, kernel, kind, &clean);
    tensor_set(&f.q_s, tensor_index(&f.q_s, 0, 0, POISONED), NAN);
    run_kind(&f, kernel, kind, &poisoned);
    for (int64_t n = 0; n < tensor_count(&poisoned.kl); n++)
        assert_true(n == POISONED ? isnan(tensor_get(&poisoned.kl, n))
                                  : tensor_get(&poisoned.kl, n) == tensor_get(&clean.kl, n));
    for (int64_t n = 0; n < tensor_count(&poisoned.dk_s); n++) {
        const int64_t row = n / poisoned.dk_s.dim; /* head 0 comes first */
        const int seen = row >= POISONED - 5 && row <= POISONED;
        assert_true(seen ? isnan(tensor_get(&poisoned.dk_s, n))
                         : tensor_get(&poisoned.dk_s, n) == tensor_get(&clean.dk_s, n));
    }
    results_destroy(&clean);
    results_destroy(&poisoned);
    fixture_destroy(&f);
}

static void test_poison_in_a_query(void **state)
{
    (void)state;
    const test_case c = {"query", SHAPE(1, LENGTH, LENGTH), SMALL, WINDOW(5, 0)};
    with_every_kernel(&c, check_poison_in_a_query);
}

/* The upstream gradient of a row without visible keys changes no bit of any result, even if it is large: f16
 * gradients are scaled by a factor that must not depend on it. All rows are in one tile, so that the order of sums is
 * fixed. */
static void check_garbage_upstream(const test_case *c, const char *kernel, int32_t kind)
{
    static const double garbage[] = {1e30, -1e38, INFINITY, NAN};
    fixture f;
    fixture_create(&f, c);
    fixture_results clean = results_create(&f), poisoned = results_create(&f);
    int64_t dead = 0;
    for (int64_t n = 0; n < tensor_count(&f.grad_kl); n++)
        if (!f.live_q[n % f.length_q])
            tensor_set(&f.grad_kl, n, 0), dead++;
    assert_true(dead > 0 && dead < tensor_count(&f.grad_kl));
    run_kind(&f, kernel, kind, &clean);
    for (size_t g = 0; g < COUNT_OF(garbage); g++) {
        for (int64_t n = 0; n < tensor_count(&f.grad_kl); n++)
            if (!f.live_q[n % f.length_q])
                tensor_set(&f.grad_kl, n, garbage[g]);
        run_kind(&f, kernel, kind, &poisoned);
        const char *const different = results_difference(&clean, &poisoned);
        if (different)
            fail_msg("%s: %s: %g from upstream changes %s", c->name, kernel, garbage[g], different);
    }
    results_destroy(&clean);
    results_destroy(&poisoned);
    fixture_destroy(&f);
}

static void test_garbage_upstream_of_rows_without_keys(void **state)
{
    (void)state;
    const test_case cases[] = {
        {"empty rows first", SHAPE(1, 97, 41), SMALL, CAUSAL, OFFSETS(0, 32)},
        {"empty rows last", SHAPE(1, 97, 41), SMALL, WINDOW(20, -1), OFFSETS(0, 0)},
        {"empty rows first, reverse", SHAPE(1, 97, 41), SMALL, CAUSAL, OFFSETS(0, 32), REVERSE},
    };
    for (size_t c = 0; c < COUNT_OF(cases); c++)
        with_every_kernel(&cases[c], check_garbage_upstream);
}

static void set_first_dimension(const test_tensor *t, int64_t begin, int64_t end, double value)
{
    for (int64_t h = 0; h < t->heads; h++)
        for (int64_t row = begin; row < end; row++)
            tensor_set(t, tensor_index(t, 0, h, row), value);
}

static int has_zero_upstream(int64_t query)
{
    return query % 7 == 3 || query == LENGTH - 1;
}

static void poison_zero_upstream(const test_tensor *t)
{
    for (int64_t h = 0; h < t->heads; h++)
        for (int64_t i = 0; i < t->length; i++)
            for (int64_t d = 0; has_zero_upstream(i) && d < t->dim; d++)
                tensor_set(t, tensor_index(t, 0, h, i) + d, NAN);
}

static void assert_zero_upstream_is_zero(const test_tensor *dq)
{
    for (int64_t n = 0; dq->data != NULL && n < tensor_count(dq); n++)
        assert_true(!has_zero_upstream(n / dq->dim % dq->length) || tensor_get(dq, n) == 0);
}

/* KL and gradients of a one-pass call from the LSEs of a forward; replaces those in `results`. */
static void run_one_pass(const skl_plan *plan, const fixture *f, const fixture_results *results)
{
    skl_inputs inputs = f->inputs;
    inputs.lse_t = tensor_input(&results->lse_t);
    inputs.lse_s = tensor_input(&results->lse_s);
    const skl_rows rows = {.struct_size = sizeof rows, .kl = tensor_output(&results->kl)};
    const skl_gradients gradients = results_gradients(results);
    run_forward_backward(plan, &inputs, &rows, &gradients);
}

/* With NaN in rows without upstream gradient, their KL is NaN, and gradients match the oracle without the NaN. The
 * random indices of a sparse row may be none, which leaves its KL at 0. */
static void check_zero_upstream_rows(const fixture *f, const fixture_results *results, const char *kernel)
{
    assert_true(isnan(tensor_get(&results->kl, LENGTH - 1)) || !f->live_q[LENGTH - 1]);
    assert_int_equal(gradients_mismatch(f, results, kernel, kernel), 0);
    assert_zero_upstream_is_zero(&results->dq_t);
    assert_zero_upstream_is_zero(&results->dq_s);
    assert_zero_upstream_is_zero(&results->dw_s);
}

/* A row whose upstream gradient is 0 has gradient 0 and contributes nothing to key gradients, even if it, or a key
 * that only it sees, holds NaN. */
static void check_poison_in_rows_without_upstream(const test_case *c)
{
    fixture f;
    fixture_create(&f, c);
    for (int64_t n = 0; n < tensor_count(&f.grad_kl); n++)
        if (has_zero_upstream(n % LENGTH))
            tensor_set(&f.grad_kl, n, 0);
    fixture_solve(&f);
    poison_zero_upstream(&f.q_t);
    poison_zero_upstream(&f.q_s);
    if (c->causal)
        set_first_dimension(&f.k_s, LENGTH - 1, LENGTH, NAN);
    for (int32_t k = 0; case_kernel(c, k); k++) {
        skl_plan *const plan = test_plan(&f.problem, case_kernel(c, k), 2);
        fixture_results results = results_create(&f);
        run_both(plan, &f, &results);
        check_zero_upstream_rows(&f, &results, case_kernel(c, k));
        if (results.dq_t.data == NULL) {
            run_one_pass(plan, &f, &results);
            check_zero_upstream_rows(&f, &results, case_kernel(c, k));
        }
        results_destroy(&results);
        skl_plan_destroy(plan);
    }
    fixture_destroy(&f);
}

static void test_poison_in_rows_without_upstream_gradient(void **state)
{
    (void)state;
    if (test_device() != SKL_CPU)
        skip(); /* GPU kernels multiply it by 0 */
    const test_case cases[] = {
        {"full", SHAPE(1, LENGTH, LENGTH), SMALL},
        {"one-pass", SHAPE(1, LENGTH, LENGTH), SMALL, .without = SKL_DQ_T | SKL_DK_T},
        {"causal", SHAPE(1, LENGTH, LENGTH), SMALL, CAUSAL},
        {"bf16, causal, one-pass", SHAPE(1, LENGTH, LENGTH), SMALL, TYPES(BF16, BF16), CAUSAL,
         .without = SKL_DQ_T | SKL_DK_T},
        {"reverse", SHAPE(1, LENGTH, LENGTH), SMALL, REVERSE},
        {"teacher groups", SHAPE(1, LENGTH, LENGTH), HEADS(4, 2), DIMS(16, 16), CAUSAL},
        {"indexer", SHAPE(1, LENGTH, LENGTH), HEADS(4, 1), DIMS(16, 16), INDEXER(3), .without = SKL_DQ_T | SKL_DK_T},
        {"sparse", SHAPE(1, LENGTH, LENGTH), HEADS(4, 1), DIMS(16, 16), INDEXER(3), TOP_K(150),
         .without = SKL_DQ_T | SKL_DK_T},
    };
    const int sampled = test_environment("SKL_TEST_SAMPLE", 1) > 1;
    for (size_t c = 0; c < COUNT_OF(cases); c += sampled ? 3 : 1)
        check_poison_in_rows_without_upstream(&cases[c]);
}

/* A key whose teacher logit is -inf has P = 0 in every row, like a key with a very low logit: the student's gradients
 * have the same bits. Unused rows of a query tile are 0, and 0 * inf is NaN; such a NaN must not reach a sum. All
 * queries are in one tile, so that the order of sums is fixed. */
static void check_key_at_minus_infinity(const test_case *c, const char *kernel, int32_t kind)
{
    fixture f;
    fixture_create(&f, c);
    skl_plan *const plan = test_plan_of_kind(&f.problem, kernel, kind);
    fixture_results low = results_create(&f), lowest = results_create(&f);
    set_first_dimension(&f.q_t, 0, f.q_t.length, 1);
    set_first_dimension(&f.k_t, POISONED, POISONED + 1, -1e4);
    run_both(plan, &f, &low);
    set_first_dimension(&f.k_t, POISONED, POISONED + 1, -INFINITY);
    const skl_inputs inputs = results_backward_inputs(&f, &low);
    const skl_gradients gradients = results_gradients(&lowest);
    run_backward(plan, &inputs, &gradients);
    for (int64_t n = 0; n < tensor_count(&low.dk_s); n++)
        assert_true(isfinite(tensor_get(&low.dk_s, n)));
    assert_true(tensor_equal(&low.dq_s, &lowest.dq_s));
    assert_true(tensor_equal(&low.dk_s, &lowest.dk_s));
    results_destroy(&low);
    results_destroy(&lowest);
    skl_plan_destroy(plan);
    fixture_destroy(&f);
}

static void test_unused_rows_of_a_tile_and_infinity(void **state)
{
    (void)state;
    const test_case cases[] = {
        {"few queries", SHAPE(1, 37, LENGTH), SMALL, .without = SKL_DQ_T | SKL_DK_T},
        {"one tile, causal", SHAPE(1, 100, LENGTH), SMALL, CAUSAL, .without = SKL_DQ_T | SKL_DK_T},
    };
    for (size_t c = 0; c < COUNT_OF(cases); c++)
        with_every_kernel(&cases[c], check_key_at_minus_infinity);
}

/* A logit of A that overflows to -inf gives its key no mass, like a very low logit: 0 log 0 = 0, and all results
 * match the oracle's for the low logit. Without teacher gradients, this includes a one-pass call. */
static void check_overflow_in_a(const test_case *c)
{
    fixture f;
    fixture_create(&f, c);
    const int reverse = f.problem.direction == SKL_KL_REVERSE;
    const test_tensor *const q = reverse ? &f.q_s : &f.q_t, *const k = reverse ? &f.k_s : &f.k_t;
    set_first_dimension(q, 0, q->length, 2);
    set_first_dimension(k, POISONED, POISONED + 1, -1e4);
    fixture_solve(&f);
    set_first_dimension(k, POISONED, POISONED + 1, -3e38);
    for (int32_t n = 0; case_kernel(c, n); n++) {
        const char *const kernel = case_kernel(c, n);
        skl_plan *const plan = test_plan(&f.problem, kernel, 2);
        fixture_results results = results_create(&f);
        run_both(plan, &f, &results);
        assert_int_equal(rows_mismatch(&f, &results, kernel) + gradients_mismatch(&f, &results, kernel, kernel), 0);
        if (results.dq_t.data == NULL) {
            for (int64_t row = 0; row < tensor_count(&results.kl); row++)
                tensor_set(&results.kl, row, NAN);
            run_one_pass(plan, &f, &results);
            assert_int_equal(rows_mismatch(&f, &results, kernel) + gradients_mismatch(&f, &results, kernel, kernel),
                             0);
        }
        results_destroy(&results);
        skl_plan_destroy(plan);
    }
    fixture_destroy(&f);
}

/* B has no mass where A has: the KL of the rows that see the key is infinite. */
static void check_overflow_in_b(const test_case *c, const char *kernel)
{
    fixture f;
    fixture_create(&f, c);
    fixture_results results = results_create(&f);
    const int reverse = f.problem.direction == SKL_KL_REVERSE;
    const test_tensor *const q = reverse ? &f.q_t : &f.q_s, *const k = reverse ? &f.k_t : &f.k_s;
    set_first_dimension(q, 0, q->length, 2);
    set_first_dimension(k, POISONED, POISONED + 1, -3e38);
    run_kernel(&f, kernel, 2, &results);
    for (int64_t n = 0; n < tensor_count(&results.kl); n++) {
        const double kl = tensor_get(&results.kl, n);
        assert_true(n % LENGTH >= POISONED || !f.problem.causal ? kl == INFINITY : isfinite(kl));
        assert_true(isfinite(tensor_get(&results.lse_s, n)));
    }
    results_destroy(&results);
    fixture_destroy(&f);
}

static void test_logits_that_overflow(void **state)
{
    (void)state;
    if (test_device() != SKL_CPU)
        skip(); /* GPU kernels make such rows NaN */
    const test_case cases[] = {
        {"full", SHAPE(1, LENGTH, LENGTH), SMALL},
        {"one-pass", SHAPE(1, LENGTH, LENGTH), SMALL, .without = SKL_DQ_T | SKL_DK_T},
        {"causal", SHAPE(1, LENGTH, LENGTH), SMALL, CAUSAL},
        {"bf16", SHAPE(1, LENGTH, LENGTH), SMALL, TYPES(BF16, BF16), CAUSAL, .without = SKL_DQ_T | SKL_DK_T},
        {"reverse", SHAPE(1, LENGTH, LENGTH), SMALL, REVERSE},
        {"teacher groups", SHAPE(1, LENGTH, LENGTH), HEADS(4, 2), DIMS(16, 16)},
    };
    const test_case indexers[] = {
        {"indexer", SHAPE(1, LENGTH, LENGTH), HEADS(4, 1), DIMS(16, 16), INDEXER(3), .without = SKL_DQ_T | SKL_DK_T},
        {"sparse", SHAPE(1, LENGTH, LENGTH), HEADS(4, 1), DIMS(16, 16), INDEXER(3), TOP_K(150),
         .without = SKL_DQ_T | SKL_DK_T},
    };
    const int sampled = test_environment("SKL_TEST_SAMPLE", 1) > 1;
    for (size_t c = 0; c < COUNT_OF(cases); c += sampled ? 3 : 1) {
        check_overflow_in_a(&cases[c]);
        for (int32_t k = 0; case_kernel(&cases[c], k); k++)
            check_overflow_in_b(&cases[c], case_kernel(&cases[c], k));
    }
    for (size_t c = 0; c < COUNT_OF(indexers); c++)
        check_overflow_in_a(&indexers[c]);
}

/* The first heads of a teacher group ignore key 0 entirely and the last does not: with two keys, group_size 3 and
 * a uniform student, P_0 is 1/6. The dimension is 1, so that keys are logits. */
static void check_group_with_hidden_key(skl_direction direction, const char *kernel, int given_lse)
{
    enum { GROUP = 3, KEYS = 2 };
    static const float one = 1.0F, keys_s[KEYS];
    static const float keys_t[GROUP][KEYS] = {{-INFINITY, 0}, {-INFINITY, 0}, {0, 0}};
    const float lse_t[GROUP] = {0, 0, logf(2)};
    skl_problem problem = skl_problem_default();
    problem.len_q = 1, problem.len_k = KEYS;
    problem.heads_t = GROUP;
    problem.dim_t = problem.dim_s = 1;
    problem.scale_t = problem.scale_s = 1;
    problem.direction = direction;
    const skl_input query = {&one, 0, 0, 0};
    skl_inputs inputs = {.struct_size = sizeof inputs, .q_t = query, .q_s = query};
    inputs.k_t = skl_input_contiguous(keys_t, GROUP, KEYS, 1);
    inputs.k_s = skl_input_contiguous(keys_s, 1, KEYS, 1);
    if (given_lse)
        inputs.lse_t = skl_input_contiguous(lse_t, GROUP, 1, 1);
    float kl = NAN, out_t[GROUP], out_s = NAN;
    skl_rows rows = {.struct_size = sizeof rows};
    rows.kl = skl_output_contiguous(&kl, 1, 1, 1);
    rows.lse_t = skl_output_contiguous(out_t, GROUP, 1, 1);
    rows.lse_s = skl_output_contiguous(&out_s, 1, 1, 1);
    skl_plan *const plan = test_plan(&problem, kernel, 1);
    run_forward(plan, &inputs, &rows);
    skl_plan_destroy(plan);

    const double p[KEYS] = {1.0 / 6, 5.0 / 6}, s = 0.5;
    const double forward = p[0] * log(p[0] / s) + p[1] * log(p[1] / s);
    const double reverse = s * log(s / p[0]) + s * log(s / p[1]);
    const double expected = direction == SKL_KL_FORWARD ? forward : reverse, tolerance = 1e-6;
    if (!(fabs((double)kl - expected) < tolerance))
        fail_msg("%s: KL %.9g, expected %.9g", kernel, (double)kl, expected);
    assert_true(fabs((double)out_s - log(2)) < tolerance);
    for (int h = 0; h < GROUP; h++)
        assert_true(fabs((double)out_t[h] - (double)lse_t[h]) < tolerance);
}

static void test_the_last_head_of_a_group_sees_a_key(void **state)
{
    (void)state;
    if (test_device() != SKL_CPU)
        skip(); /* tensors on the stack */
    for (int32_t k = 0; test_kernel(k); k++)
        for (int given_lse = 0; given_lse < 2; given_lse++) {
            check_group_with_hidden_key(SKL_KL_FORWARD, test_kernel(k), given_lse);
            check_group_with_hidden_key(SKL_KL_REVERSE, test_kernel(k), given_lse);
        }
}

/* No kernel sums a long row in f32 alone. Equal terms show the error of one long f32 sum: every addition rounds in
 * the same direction. */
static void test_long_rows_of_equal_terms(void **state)
{
    (void)state;
    if (test_device() != SKL_CPU)
        skip();
    enum { KEYS = 1 << 17 };
    const double logit = -0.35, tolerance = 1e-4;
    float *const keys = malloc(KEYS * sizeof *keys);
    assert_non_null(keys);
    for (int j = 0; j < KEYS; j++)
        keys[j] = j == 0 ? 0.0F : (float)logit; /* the first is the maximum */
    static const float one = 1.0F;
    skl_problem problem = skl_problem_default();
    problem.len_q = 1, problem.len_k = KEYS;
    problem.dim_t = problem.dim_s = 1;
    problem.scale_t = problem.scale_s = 1;
    skl_inputs inputs = {.struct_size = sizeof inputs};
    inputs.q_t = inputs.q_s = (skl_input){&one, 0, 0, 0};
    inputs.k_t = inputs.k_s = skl_input_contiguous(keys, 1, KEYS, 1);
    const double expected = log(1 + (KEYS - 1) * exp((double)(float)logit));
    for (int32_t k = 0; test_kernel(k); k++) {
        float lse_t = NAN, lse_s = NAN, kl = NAN;
        skl_rows rows = {.struct_size = sizeof rows};
        rows.kl = skl_output_contiguous(&kl, 1, 1, 1);
        rows.lse_t = skl_output_contiguous(&lse_t, 1, 1, 1);
        rows.lse_s = skl_output_contiguous(&lse_s, 1, 1, 1);
        skl_plan *const plan = test_plan(&problem, test_kernel(k), 1);
        run_forward(plan, &inputs, &rows);
        skl_plan_destroy(plan);
        if (!(fabs((double)lse_t - expected) < tolerance && fabs((double)lse_s - expected) < tolerance))
            fail_msg("%s: LSEs %.9g and %.9g, expected %.9g", test_kernel(k), (double)lse_t, (double)lse_s, expected);
        assert_true(kl == 0.0F);
    }
    free(keys);
}

/* ---- Large counts ------------------------------------------------------------------------------------------ */

static void test_more_than_65535_batches_and_heads(void **state)
{
    (void)state;
    static const test_case cases[] = {
        {"batches", SHAPE(66000, 1, 2), HEADS(1, 1), DIMS(1, 2)},
        {"heads", SHAPE(1, 1, 2), HEADS(66000, 66000), DIMS(1, 2)},
        {"both", SHAPE(300, 1, 2), HEADS(220, 220), .key_heads_s = 1, DIMS(1, 2)},
        {"teachers", SHAPE(1, 2, 3), HEADS(66000, 22000), DIMS(1, 2)},
        {"bf16", SHAPE(33000, 1, 2), HEADS(2, 2), DIMS(8, 8), TYPES(BF16, BF16)},
        {"f16", SHAPE(2, 1, 2), HEADS(33000, 33000), .key_heads_t = 1, DIMS(8, 8), TYPES(F16, F16)},
    };
    const int sampled = test_environment("SKL_TEST_SAMPLE", 1) > 1;
    for (size_t c = 0; c < COUNT_OF(cases); c += sampled ? 3 : 1)
        check_case_with(&cases[c], sampled ? 1 : INT32_MAX);
}

static void test_more_than_32768_rows(void **state)
{
    (void)state;
    const test_case keys = {"keys", SHAPE(1, 3, 40001), HEADS(1, 1), DIMS(2, 2)};
    const test_case queries = {"queries", SHAPE(1, 40001, 3), HEADS(1, 1), DIMS(2, 2)};
    const test_case window = {"window", SHAPE(1, 40001, 40001), HEADS(1, 1), DIMS(2, 2), WINDOW(2, 0)};
    check_case(&keys);
    check_case(&queries);
    check_case(&window);
}

/* ---- Large strides ----------------------------------------------------------------------------------------- */

enum { PAGE = 4096, MOST_PAGES = 64 };

/* Reserves address space; pages are allocated on first access. */
static void *reserve(int64_t element_count, size_t element_size)
{
    void *const memory = mmap(NULL, (size_t)element_count * element_size, PROT_READ | PROT_WRITE,
                              MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
    if (memory == MAP_FAILED)
        fail_msg("address space for %lld elements could not be reserved", (long long)element_count);
    return memory;
}

/* The pages that hold elements, which a GPU must be able to reach. A row never spans several pages. */
static size_t touched_pages(const test_tensor *t, unsigned char **pages)
{
    size_t count = 0;
    for (int64_t n = 0; n < tensor_count(t); n++) {
        const int64_t row = n / t->dim, head = row / t->length;
        const int64_t element = head / t->heads * t->stride_batch + head % t->heads * t->stride_head +
                                row % t->length * t->stride_row + n % t->dim;
        const uintptr_t address = (uintptr_t)t->data + (uintptr_t)element * dtype_size(t->dtype);
        unsigned char *const page = (unsigned char *)(address - address % PAGE);
        size_t p = 0;
        while (p < count && pages[p] != page)
            p++;
        if (p < count)
            continue;
        assert_true(count < MOST_PAGES);
        pages[count++] = page;
    }
    return count;
}

static void enlarge_strides(test_tensor *t, int64_t stride_batch, int64_t stride_head, int64_t stride_row)
{
    const test_tensor dense = *t;
    t->stride_batch = stride_batch, t->stride_head = stride_head, t->stride_row = stride_row;
    const int64_t count =
        1 + (t->batch - 1) * stride_batch + (t->heads - 1) * stride_head + (t->length - 1) * stride_row + t->dim;
    t->data = reserve(count, dtype_size(t->dtype));
    tensor_copy(t, &dense);
    unsigned char *pages[MOST_PAGES];
    const size_t page_count = touched_pages(t, pages);
    for (size_t p = 0; p < page_count; p++)
        device_share(pages[p], PAGE);
}

static void free_reserved(test_tensor *t)
{
    unsigned char *pages[MOST_PAGES];
    const size_t page_count = touched_pages(t, pages);
    for (size_t p = 0; p < page_count; p++)
        device_unshare(pages[p]);
    const int64_t count = 1 + (t->batch - 1) * t->stride_batch + (t->heads - 1) * t->stride_head +
                          (t->length - 1) * t->stride_row + t->dim;
    munmap(t->data, (size_t)count * dtype_size(t->dtype));
}

/* Products of an index and a stride exceed 2^31 elements, and some exceed 2^32. The results have the same bits as
 * those of dense tensors. */
static void check_strides(const test_case *c, int64_t stride_batch, int64_t stride_head, int64_t stride_row)
{
    for (int32_t k = 0; case_kernel(c, k); k++) {
        fixture f;
        fixture_create(&f, c);
        fixture_results dense = results_create(&f), results = results_create(&f);
        run_kernel(&f, case_kernel(c, k), 2, &dense);

        fixture far = f;
        fixture_results far_results = results;
        test_tensor *const tensors[] = {&far.q_t,          &far.k_t,          &far.q_s,           &far.k_s,
                                        &far.grad_kl,      &far_results.kl,   &far_results.lse_t, &far_results.lse_s,
                                        &far_results.dq_t, &far_results.dk_t, &far_results.dq_s,  &far_results.dk_s};
        for (size_t t = 0; t < COUNT_OF(tensors); t++)
            enlarge_strides(tensors[t], stride_batch, stride_head, stride_row);
        far.inputs.q_t = tensor_input(&far.q_t), far.inputs.k_t = tensor_input(&far.k_t);
        far.inputs.q_s = tensor_input(&far.q_s), far.inputs.k_s = tensor_input(&far.k_s);
        far.inputs.grad_kl = tensor_input(&far.grad_kl);
        run_kernel(&far, case_kernel(c, k), 2, &far_results);
        const char *const different = results_difference(&dense, &far_results);
        if (different)
            fail_msg("%s: %s differs when strides are large", case_kernel(c, k), different);
        for (size_t t = 0; t < COUNT_OF(tensors); t++)
            free_reserved(tensors[t]);
        results_destroy(&dense);
        results_destroy(&results);
        fixture_destroy(&f);
    }
}

static void test_strides_beyond_32_bits(void **state)
{
    (void)state;
    static const test_case cases[] = {
        {"large strides", SHAPE(2, 3, 4), SMALL, .dtype_t = SKL_BF16},
        {"large strides, bf16", SHAPE(2, 3, 4), SMALL, TYPES(BF16, BF16)},
    };
    const int64_t far = ((int64_t)1 << 31) + 72; /* a multiple of 8, like the others, as tensor cores require */
    for (size_t c = 0; c < COUNT_OF(cases); c++) {
        check_strides(&cases[c], far, 104, 24);
        check_strides(&cases[c], 208, far, 24);
        check_strides(&cases[c], 208, 104, far);
    }
}

/* ---- Equivalent inputs ------------------------------------------------------------------------------------- */

/* An expanded head and copies of it give the same bits. */
static void test_expanded_inputs_equal_their_copies(void **state)
{
    (void)state;
    static const test_case cases[] = {
        {"expanded", SHAPE(2, 37, 67), SMALL, LAYOUT(EXPANDED)},
        {"repeated", SHAPE(2, 37, 67), SMALL, LAYOUT(REPEATED)},
        {"expanded, bf16", SHAPE(2, 37, 67), SMALL, LAYOUT(EXPANDED), TYPES(BF16, BF16)},
        {"repeated, f16", SHAPE(2, 37, 67), SMALL, LAYOUT(REPEATED), TYPES(F16, F16)},
    };
    for (size_t c = 0; c < COUNT_OF(cases); c++)
        for (int32_t k = 0; case_kernel(&cases[c], k); k++) {
            test_case copied = cases[c];
            copied.layout = LAYOUT_CONTIGUOUS;
            fixture expanded, copy;
            fixture_create(&expanded, &cases[c]);
            fixture_create(&copy, &copied);
            tensor_copy(&copy.q_t, &expanded.q_t), tensor_copy(&copy.k_t, &expanded.k_t);
            tensor_copy(&copy.q_s, &expanded.q_s), tensor_copy(&copy.k_s, &expanded.k_s);
            tensor_copy(&copy.grad_kl, &expanded.grad_kl);
            fixture_results a = results_create(&expanded), b = results_create(&copy);
            run_kernel(&expanded, case_kernel(&cases[c], k), 2, &a);
            run_kernel(&copy, case_kernel(&cases[c], k), 2, &b);
            assert_null(results_difference(&a, &b));
            results_destroy(&a);
            results_destroy(&b);
            fixture_destroy(&expanded);
            fixture_destroy(&copy);
        }
}

/* A key head that query heads share gives the same results as copies of it. */
static void test_shared_key_heads_equal_their_copies(void **state)
{
    (void)state;
    static const test_case shared_case = {"shared", SHAPE(1, 37, 67), HEADS(6, 6), KEY_HEADS(2, 3), DIMS(16, 16)};
    test_case copied_case = shared_case;
    copied_case.key_heads_t = copied_case.key_heads_s = 0;
    for (int32_t k = 0; case_kernel(&shared_case, k); k++) {
        fixture shared, copied;
        fixture_create(&shared, &shared_case);
        fixture_create(&copied, &copied_case); /* same name, so the same random queries, but different keys */
        const int64_t elements = 67 * 16;      /* per key head */
        for (int64_t n = 0; n < 6 * elements; n++) {
            const int64_t head = n / elements, rest = n % elements;
            tensor_set(&copied.k_t, n, tensor_get(&shared.k_t, head / 3 * elements + rest));
            tensor_set(&copied.k_s, n, tensor_get(&shared.k_s, head / 2 * elements + rest));
        }
        tensor_copy(&copied.q_t, &shared.q_t), tensor_copy(&copied.q_s, &shared.q_s);
        tensor_copy(&copied.grad_kl, &shared.grad_kl);
        fixture_results a = results_create(&shared), b = results_create(&copied);
        run_kernel(&shared, case_kernel(&shared_case, k), 2, &a);
        run_kernel(&copied, case_kernel(&shared_case, k), 2, &b);
        assert_true(tensor_equal(&a.kl, &b.kl));
        assert_true(tensor_equal(&a.dq_t, &b.dq_t));
        assert_true(tensor_equal(&a.dq_s, &b.dq_s));
        results_destroy(&a);
        results_destroy(&b);
        fixture_destroy(&shared);
        fixture_destroy(&copied);
    }
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_every_row_is_padding),
        cmocka_unit_test(test_a_rank_with_only_padding),
        cmocka_unit_test(test_poison_in_hidden_keys),
        cmocka_unit_test(test_poison_in_a_visible_key),
        cmocka_unit_test(test_poison_in_one_pass),
        cmocka_unit_test(test_poison_in_a_query),
        cmocka_unit_test(test_garbage_upstream_of_rows_without_keys),
        cmocka_unit_test(test_unused_rows_of_a_tile_and_infinity),
        cmocka_unit_test(test_poison_in_rows_without_upstream_gradient),
        cmocka_unit_test(test_logits_that_overflow),
        cmocka_unit_test(test_the_last_head_of_a_group_sees_a_key),
        cmocka_unit_test(test_long_rows_of_equal_terms),
        cmocka_unit_test(test_more_than_65535_batches_and_heads),
        cmocka_unit_test(test_more_than_32768_rows),
        cmocka_unit_test(test_strides_beyond_32_bits),
        cmocka_unit_test(test_expanded_inputs_equal_their_copies),
        cmocka_unit_test(test_shared_key_heads_equal_their_copies),
    };
    return test_run("faults", tests, COUNT_OF(tests));
}
