/* Properties that hold for all inputs, checked for every kernel; most need no oracle. */
#include "runner.h"

#include <math.h>
#include <string.h>

#include "case_words.h"

#define TWO_MODELS HEADS(3, 3), DIMS(33, 33)

/* Cases in which both models have the same shape and type, so that one can replace the other. */
static const test_case twins[] = {
    {"plain", SHAPE(2, 67, 131), TWO_MODELS},
    {"causal", SHAPE(1, 131, 131), TWO_MODELS, CAUSAL},
    {"reverse", SHAPE(1, 67, 131), TWO_MODELS, REVERSE},
    {"bf16", SHAPE(1, 67, 131), TWO_MODELS, TYPES(BF16, BF16)},
    {"softcap", SHAPE(1, 67, 131), TWO_MODELS, SOFTCAPS(3, 3)},
    {"shared keys", SHAPE(1, 67, 131), TWO_MODELS, KEY_HEADS(1, 1)},
    {"window", SHAPE(1, 300, 300), TWO_MODELS, WINDOW(40, 9)},
    {"growing", SHAPE(1, 67, 400), TWO_MODELS, .growth = 30},
    {"bf16, dim 64", SHAPE(2, 67, 131), HEADS(3, 3), DIMS(64, 64), TYPES(BF16, BF16), CAUSAL},
    {"bf16, dim 64, softcap", SHAPE(1, 67, 331), HEADS(2, 2), DIMS(64, 64), TYPES(BF16, BF16), SOFTCAPS(3, 3)},
    {"f16, dim 128", SHAPE(1, 131, 231), HEADS(2, 2), DIMS(128, 128), TYPES(F16, F16)},
    {"f16, dim 64, reverse", SHAPE(1, 300, 300), HEADS(2, 2), DIMS(64, 64), TYPES(F16, F16), REVERSE, WINDOW(40, 9)},
};

static void make_equal(fixture *f)
{
    f->inputs.q_s = f->inputs.q_t;
    f->inputs.k_s = f->inputs.k_t;
}

static void assert_all_zero(const test_tensor *tensor, const char *kernel, const char *name, const char *what)
{
    for (int64_t n = 0; n < tensor_count(tensor); n++)
        if (tensor_get(tensor, n) != 0)
            fail_msg("%s: %s: %s is %g, not 0", kernel, name, what, tensor_get(tensor, n));
}

static void assert_kl_and_gradients_are_0(const fixture_results *r, const char *kernel, const char *name)
{
    assert_all_zero(&r->kl, kernel, name, "kl");
    assert_all_zero(&r->dq_t, kernel, name, "dq_t");
    assert_all_zero(&r->dk_t, kernel, name, "dk_t");
    assert_all_zero(&r->dq_s, kernel, name, "dq_s");
    assert_all_zero(&r->dk_s, kernel, name, "dk_s");
}

/* With equal models, KL and gradients are exactly 0. */
static void test_equal_models_have_kl_0(void **state)
{
    (void)state;
    for (size_t c = 0; c < COUNT_OF(twins); c++)
        for (int32_t k = 0; case_kernel(&twins[c], k); k++) {
            fixture f;
            fixture_create(&f, &twins[c]);
            make_equal(&f);
            fixture_results results = results_create(&f);
            skl_plan *const plan = test_plan(&f.problem, case_kernel(&twins[c], k), 2);
            run_both(plan, &f, &results);
            assert_true(tensor_equal(&results.lse_t, &results.lse_s));
            assert_kl_and_gradients_are_0(&results, case_kernel(&twins[c], k), twins[c].name);

            skl_inputs inputs = results_backward_inputs(&f, &results);
            skl_rows rows = results_rows(&results);
            rows.lse_t.data = rows.lse_s.data = NULL;
            const skl_gradients gradients = results_gradients(&results);
            inputs.kl.data = NULL;
            run_forward_backward(plan, &inputs, &rows, &gradients);
            assert_kl_and_gradients_are_0(&results, case_kernel(&twins[c], k), twins[c].name);
            skl_plan_destroy(plan);
            for (int32_t kind = 1; kind < test_plan_kinds(); kind++) {
                run_kind(&f, case_kernel(&twins[c], k), kind, &results);
                assert_kl_and_gradients_are_0(&results, case_kernel(&twins[c], k), twins[c].name);
            }
            results_destroy(&results);
            fixture_destroy(&f);
        }
}

/* Head h of `to` becomes head h / repeat of `from`. */
static void repeat_heads(const test_tensor *to, const test_tensor *from, int64_t repeat)
{
    const int64_t head_size = to->length * to->dim;
    for (int64_t n = 0; n < tensor_count(to); n++) {
        const int64_t batch = n / (head_size * to->heads), head = n / head_size % to->heads;
        tensor_set(to, n, tensor_get(from, (batch * from->heads + head / repeat) * head_size + n % head_size));
    }
}

/* A student that equals every teacher head of its group: the mean of equal heads is that head, for any number. */
static void test_equal_heads_of_a_group_have_kl_0(void **state)
{
    (void)state;
    const test_case groups[] = {
        {"2 heads", SHAPE(1, 67, 131), HEADS(4, 2), DIMS(32, 32), STUDENT_ONLY},
        {"4 heads", SHAPE(1, 150, 300), HEADS(8, 2), DIMS(128, 128), TYPES(BF16, BF16), CAUSAL, STUDENT_ONLY},
        {"3 heads", SHAPE(2, 67, 300), HEADS(6, 2), DIMS(64, 64), TYPES(BF16, BF16), WINDOW(90, 9), STUDENT_ONLY},
        {"5 heads", SHAPE(1, 131, 231), HEADS(5, 1), DIMS(64, 64), TYPES(F16, F16), STUDENT_ONLY, .growth = 2},
        {"3 heads, both sides", SHAPE(1, 67, 300), HEADS(6, 2), DIMS(64, 64), TYPES(BF16, BF16), WINDOW(90, 9)},
        {"4 heads, softcap", SHAPE(1, 150, 300), HEADS(4, 1), DIMS(64, 64), TYPES(BF16, BF16), SOFTCAPS(50, 50),
         CAUSAL, STUDENT_ONLY},
        {"3 heads, low softcap", SHAPE(1, 150, 300), HEADS(3, 1), DIMS(128, 128), TYPES(F16, F16), SOFTCAPS(1, 1),
         STUDENT_ONLY},
        {"4 heads, shared keys", SHAPE(1, 150, 300), HEADS(8, 2), KEY_HEADS(2, 2), DIMS(128, 128), TYPES(BF16, BF16),
         CAUSAL, STUDENT_ONLY},
        {"4 heads, shared keys, softcap", SHAPE(1, 150, 300), HEADS(8, 2), KEY_HEADS(2, 2), DIMS(128, 128),
         TYPES(BF16, BF16), SOFTCAPS(50, 50), CAUSAL, STUDENT_ONLY},
        {"4 heads, reverse", SHAPE(1, 150, 300), HEADS(8, 2), DIMS(128, 128), TYPES(BF16, BF16), CAUSAL, REVERSE,
         STUDENT_ONLY},
    };
    for (size_t c = 0; c < COUNT_OF(groups); c++)
        for (int32_t k = 0; case_kernel(&groups[c], k); k++) {
            if (strstr(case_kernel(&groups[c], k), "groups") == NULL)
                continue; /* the others are exact up to rounding */
            fixture f;
            fixture_create(&f, &groups[c]);
            repeat_heads(&f.q_t, &f.q_s, f.q_t.heads / f.q_s.heads);
            repeat_heads(&f.k_t, &f.k_s, f.k_t.heads / f.k_s.heads);
            fixture_results results = results_create(&f);
            results_poison(&results);
            run_kind(&f, case_kernel(&groups[c], k), 0, &results);
            assert_kl_and_gradients_are_0(&results, case_kernel(&groups[c], k), groups[c].name);
            results_destroy(&results);
            fixture_destroy(&f);
        }
}

/* Even for models that differ only by rounding errors, no KL is negative. */
static void test_kl_is_never_negative(void **state)
{
    (void)state;
    for (size_t c = 0; c < COUNT_OF(twins); c++)
        for (int32_t k = 0; case_kernel(&twins[c], k); k++) {
            fixture f;
            fixture_create(&f, &twins[c]);
            test_random random = random_for("noise");
            for (int64_t n = 0; n < tensor_count(&f.q_s); n++)
                tensor_set(&f.q_s, n, tensor_get(&f.q_t, n) + random_uniform(&random, -1e-6, 1e-6));
            tensor_copy(&f.k_s, &f.k_t);
            fixture_results results = results_create(&f);
            run_kernel(&f, case_kernel(&twins[c], k), 2, &results);
            for (int64_t n = 0; n < tensor_count(&results.kl); n++)
                assert_true(tensor_get(&results.kl, n) >= 0);
            results_destroy(&results);
            fixture_destroy(&f);
        }
}

/* Rows of one key with an integer logit: the LSE is the same integer, which f32 represents exactly, so P is 1 up to
 * the rounding of x log2 e. A kernel that drops the bits of an LSE beyond f32 in base 2 has twice the error, as those
 * with tensor cores. So does x log2 e - lse without a fused multiply-add, as in the portable and the general CUDA
 * kernel. */
static void test_an_lse_exact_in_f32_loses_nothing(void **state)
{
    (void)state;
    enum { ROWS = 200 };
    const test_case c = {"integer", SHAPE(1, ROWS, ROWS), HEADS(1, 1), DIMS(1, 1), SCALES(1, 1), WINDOW(0, 0)};
    for (int32_t k = 0; case_kernel(&c, k); k++) {
        if (strcmp(case_kernel(&c, k), "cpu_portable") == 0 || strncmp(case_kernel(&c, k), "cuda_", 5) == 0)
            continue;
        fixture f;
        fixture_create(&f, &c);
        for (int64_t i = 0; i < ROWS; i++) {
            tensor_set(&f.q_t, i, 1), tensor_set(&f.k_t, i, 300 + (double)i);
            tensor_set(&f.q_s, i, 1), tensor_set(&f.k_s, i, 0); /* S is exactly 1 */
            tensor_set(&f.grad_kl, i, 1);
        }
        fixture_results results = results_create(&f);
        run_kernel(&f, case_kernel(&c, k), 2, &results);
        for (int64_t i = 0; i < ROWS; i++) {
            const double logit = tensor_get(&f.k_t, i);
            assert_true(tensor_get(&results.lse_t, i) == logit);
            assert_true(fabs(tensor_get(&results.dk_s, i)) <= 0x1p-24 * (logit / 2 + 4)); /* S - P */
            assert_true(fabs(tensor_get(&results.dk_t, i)) <= 0x1p-24 * (logit / 2 + 4)); /* P (log P - log S - KL) */
        }
        results_destroy(&results);
        fixture_destroy(&f);
    }
}

/* Two keys with exact logits x and 0: the LSE is log(1 + e^x), with rounding errors of the exponential, the sum with
 * 1 and the logarithm only. The error is measured in roundings of 1. */
static void test_exponentials_are_rounded_once(void **state)
{
    (void)state;
    enum { ROWS = 1024 };
    const test_case c = {"two keys", SHAPE(1, ROWS, 2), HEADS(1, 1), DIMS(1, 1), SCALES(1, 1)};
    const double allowed = 2;
    for (int32_t k = 0; case_kernel(&c, k); k++) {
        fixture f;
        fixture_create(&f, &c);
        tensor_set(&f.k_t, 0, 1), tensor_set(&f.k_t, 1, 0);
        for (int64_t i = 0; i < ROWS; i++)
            tensor_set(&f.q_t, i, -(double)i / 512);
        fixture_results results = results_create(&f);
        run_kernel(&f, case_kernel(&c, k), 2, &results);
        double worst = 0;
        for (int64_t i = 0; i < ROWS; i++)
            worst = fmax(worst, fabs(tensor_get(&results.lse_t, i) - log1p(exp(tensor_get(&f.q_t, i)))) / 0x1p-24);
        if (worst > allowed)
            fail_msg("%s: an LSE is off by %.2f roundings", case_kernel(&c, k), worst);
        results_destroy(&results);
        fixture_destroy(&f);
    }
}

/* Allowed error of gradients around 1, if logit gradients are rounded to f16. */
#define ROUNDED_GRADIENTS 1e-2

static double largest_difference(const test_tensor *a, const test_tensor *b)
{
    double largest = 0;
    for (int64_t n = 0; n < tensor_count(a); n++)
        largest = fmax(largest, fabs(tensor_get(a, n) - tensor_get(b, n)));
    return largest;
}

/* Rounds to multiples of 1/64, so that small sums are exact. */
static void coarsen(const test_tensor *tensor)
{
    for (int64_t n = 0; n < tensor_count(tensor); n++)
        tensor_set(tensor, n, nearbyint(tensor_get(tensor, n) * 64) / 64);
}

/* Adding one vector to all keys of a side adds a constant to each row of logits. */
static void test_shifted_keys_change_nothing(void **state)
{
    (void)state;
    static const test_case cases[] = {
        {"shifted", SHAPE(1, 67, 131), TWO_MODELS},
        {"shifted, f16", SHAPE(1, 67, 131), HEADS(2, 2), DIMS(64, 64), TYPES(F16, F16), .grad_f32 = 1},
    };
    for (size_t c = 0; c < COUNT_OF(cases); c++)
        for (int32_t k = 0; case_kernel(&cases[c], k); k++)
            for (int side = 0; side < 2; side++) {
                const char *const kernel = case_kernel(&cases[c], k);
                const double gradient_difference = cases[c].dtype_t == SKL_F32 ? 1e-4 : ROUNDED_GRADIENTS;
                fixture f;
                fixture_create(&f, &cases[c]);
                const test_tensor *const keys = side ? &f.k_s : &f.k_t;
                coarsen(keys);
                fixture_results before = results_create(&f), after = results_create(&f);
                run_kernel(&f, kernel, 2, &before);
                for (int64_t n = 0; n < tensor_count(keys); n++)
                    tensor_set(keys, n, tensor_get(keys, n) + (double)(n % keys->dim % 7) - 3);
                run_kernel(&f, kernel, 2, &after);
                assert_true(largest_difference(&before.kl, &after.kl) < 1e-5);
                assert_true(largest_difference(&before.dk_t, &after.dk_t) < gradient_difference);
                assert_true(largest_difference(&before.dk_s, &after.dk_s) < gradient_difference);
                results_destroy(&before);
                results_destroy(&after);
                fixture_destroy(&f);
            }
}

/* Reverses the order of rows in every head and batch. */
static void reverse_rows(const test_tensor *tensor)
{
    for (int64_t head = 0; head < tensor->batch * tensor->heads; head++)
        for (int64_t j = 0; j < tensor->length / 2; j++)
            for (int64_t d = 0; d < tensor->dim; d++) {
                const int64_t first = (head * tensor->length + j) * tensor->dim + d;
                const int64_t last = (head * tensor->length + tensor->length - 1 - j) * tensor->dim + d;
                const double value = tensor_get(tensor, first);
                tensor_set(tensor, first, tensor_get(tensor, last));
                tensor_set(tensor, last, value);
            }
}

static void test_order_of_keys_does_not_matter(void **state)
{
    (void)state;
    static const test_case cases[] = {
        {"reordered", SHAPE(1, 67, 231), TWO_MODELS, .growth = 5},
        {"reordered, f16", SHAPE(1, 67, 231), HEADS(2, 2), DIMS(64, 64), TYPES(F16, F16), .grad_f32 = 1, .growth = 5},
    };
    for (size_t c = 0; c < COUNT_OF(cases); c++)
        for (int32_t k = 0; case_kernel(&cases[c], k); k++) {
            const char *const kernel = case_kernel(&cases[c], k);
            const double gradient_difference = cases[c].dtype_t == SKL_F32 ? 1e-3 : ROUNDED_GRADIENTS;
            fixture f;
            fixture_create(&f, &cases[c]);
            fixture_results before = results_create(&f), after = results_create(&f);
            run_kernel(&f, kernel, 2, &before);
            reverse_rows(&f.k_t);
            reverse_rows(&f.k_s);
            run_kernel(&f, kernel, 2, &after);
            reverse_rows(&after.dk_t);
            reverse_rows(&after.dk_s);
            assert_true(largest_difference(&before.kl, &after.kl) < 1e-4);
            assert_true(largest_difference(&before.lse_t, &after.lse_t) < 1e-4);
            assert_true(largest_difference(&before.dq_s, &after.dq_s) < gradient_difference);
            assert_true(largest_difference(&before.dk_t, &after.dk_t) < gradient_difference);
            assert_true(largest_difference(&before.dk_s, &after.dk_s) < gradient_difference);
            results_destroy(&before);
            results_destroy(&after);
            fixture_destroy(&f);
        }
}

/* With all keys equal, dq is the key times the sum of the logit gradients of the row. */
static void test_logit_gradients_sum_to_0(void **state)
{
    (void)state;
    static const skl_direction directions[] = {SKL_KL_FORWARD, SKL_KL_REVERSE};
    for (size_t d = 0; d < COUNT_OF(directions); d++) {
        const test_case c = {"equal keys", SHAPE(1, 67, 131), TWO_MODELS, .direction = directions[d]};
        for (int32_t k = 0; case_kernel(&c, k); k++)
            for (int side = 0; side < 2; side++) {
                fixture f;
                fixture_create(&f, &c);
                const test_tensor *const keys = side ? &f.k_s : &f.k_t;
                for (int64_t n = 0; n < tensor_count(keys); n++)
                    tensor_set(keys, n, tensor_get(keys, n % keys->dim));
                fixture_results results = results_create(&f);
                run_kernel(&f, case_kernel(&c, k), 2, &results);
                const test_tensor *const dq = side ? &results.dq_s : &results.dq_t;
                for (int64_t n = 0; n < tensor_count(dq); n++)
                    assert_true(fabs(tensor_get(dq, n)) < 1e-5);
                results_destroy(&results);
                fixture_destroy(&f);
            }
    }
}

static void test_upstream_gradient_0_gives_gradient_0(void **state)
{
    (void)state;
    for (size_t c = 0; c < COUNT_OF(twins); c++)
        for (int32_t k = 0; case_kernel(&twins[c], k); k++) {
            fixture f;
            fixture_create(&f, &twins[c]);
            for (int64_t n = 0; n < tensor_count(&f.grad_kl); n++)
                tensor_set(&f.grad_kl, n, 0);
            fixture_results results = results_create(&f);
            run_kernel(&f, case_kernel(&twins[c], k), 2, &results);
            assert_all_zero(&results.dq_t, case_kernel(&twins[c], k), twins[c].name, "dq_t");
            assert_all_zero(&results.dk_t, case_kernel(&twins[c], k), twins[c].name, "dk_t");
            assert_all_zero(&results.dq_s, case_kernel(&twins[c], k), twins[c].name, "dq_s");
            assert_all_zero(&results.dk_s, case_kernel(&twins[c], k), twins[c].name, "dk_s");
            results_destroy(&results);
            fixture_destroy(&f);
        }
}

static void test_runs_repeat_bit_for_bit(void **state)
{
    (void)state;
    for (size_t c = 0; c < COUNT_OF(twins); c++)
        for (int32_t k = 0; case_kernel(&twins[c], k); k++) {
            fixture f;
            fixture_create(&f, &twins[c]);
            fixture_results first = results_create(&f), again = results_create(&f);
            run_kernel(&f, case_kernel(&twins[c], k), 2, &first);
            run_kernel(&f, case_kernel(&twins[c], k), 2, &again);
            assert_null(results_difference(&first, &again));
            results_destroy(&first);
            results_destroy(&again);
            fixture_destroy(&f);
        }
}

/* Results have the same bits for every memory layout. */
static void test_layouts_give_the_same_bits(void **state)
{
    (void)state;
    static const test_case c = {"layouts", SHAPE(2, 37, 67), TWO_MODELS, .dtype_s = SKL_BF16, CAUSAL};
    fixture contiguous;
    fixture_create(&contiguous, &c);
    for (int32_t k = 0; case_kernel(&c, k); k++) {
        fixture_results expected = results_create(&contiguous);
        run_kernel(&contiguous, case_kernel(&c, k), 2, &expected);
        for (int layout = 0; layout < LAYOUT_COUNT; layout++) {
            test_case laid_out = c;
            laid_out.layout = (test_layout)layout;
            if (layout_shares(laid_out.layout))
                continue;
            fixture f;
            fixture_create(&f, &laid_out);
            tensor_copy(&f.q_t, &contiguous.q_t), tensor_copy(&f.k_t, &contiguous.k_t);
            tensor_copy(&f.q_s, &contiguous.q_s), tensor_copy(&f.k_s, &contiguous.k_s);
            tensor_copy(&f.grad_kl, &contiguous.grad_kl);
            fixture_results results = results_create(&f);
            run_kernel(&f, case_kernel(&c, k), 2, &results);
            assert_null(results_difference(&results, &expected));
            results_destroy(&results);
            fixture_destroy(&f);
        }
        results_destroy(&expected);
    }
    fixture_destroy(&contiguous);
}

/* Late in training: a KL of 1e-5 with logits in the tens. */
static void test_small_kl_stays_accurate(void **state)
{
    (void)state;
    static const test_case c = {"small", SHAPE(1, 67, 1031), HEADS(2, 2), DIMS(64, 64), SCALES(1, 1)};
    fixture f;
    fixture_create(&f, &c);
    test_random random = random_for("small differences");
    for (int64_t n = 0; n < tensor_count(&f.q_s); n++)
        tensor_set(&f.q_s, n, tensor_get(&f.q_t, n) + random_uniform(&random, -2e-3, 2e-3));
    tensor_copy(&f.k_s, &f.k_t);
    fixture_solve(&f);
    for (int32_t k = 0; case_kernel(&c, k); k++) {
        fixture_results results = results_create(&f);
        run_kernel(&f, case_kernel(&c, k), 2, &results);
        for (int64_t n = 0; n < tensor_count(&results.kl); n++) {
            const double kl = tensor_get(&results.kl, n);
            if (fabs(kl - f.exact.kl[n]) > 1e-6) /* the last bit of a float of 30 is 2e-6 */
                fail_msg("%s: KL is %g, not %g", case_kernel(&c, k), kl, f.exact.kl[n]);
        }
        results_destroy(&results);
    }
    fixture_destroy(&f);
}

static void check_huge_logits(const test_case *c)
{
    fixture f;
    fixture_create(&f, c);
    fixture_solve(&f);
    for (int32_t k = 0; case_kernel(c, k); k++) {
        fixture_results results = results_create(&f);
        run_kernel(&f, case_kernel(c, k), 2, &results);
        for (int64_t n = 0; n < tensor_count(&results.kl); n++) {
            const double kl = tensor_get(&results.kl, n);
            assert_true(fabs(kl - f.exact.kl[n]) <= 1e-3 * (1 + f.exact.kl[n]));
        }
        const test_tensor *const gradients[] = {&results.dq_t, &results.dk_t, &results.dq_s, &results.dk_s};
        for (size_t g = 0; g < COUNT_OF(gradients); g++)
            for (int64_t n = 0; n < tensor_count(gradients[g]); n++)
                assert_true(isfinite(tensor_get(gradients[g], n)));
        results_destroy(&results);
    }
    fixture_destroy(&f);
}

/* At such a low temperature, nearly every row is a single peak. Gradients exceed the range of f16. */
static void test_huge_logits_stay_finite(void **state)
{
    (void)state;
    for (int64_t heads_t = 2; heads_t <= 4; heads_t += 2)
        for (int direction = SKL_KL_FORWARD; direction <= SKL_KL_REVERSE; direction++) {
            const test_case c = {"huge",
                                 SHAPE(1, 37, 131),
                                 HEADS(heads_t, 2),
                                 DIMS(16, 16),
                                 SCALES(1000, 1000),
                                 .grad_f32 = 1,
                                 .direction = (skl_direction)direction};
            case_in_every_type(&c, check_huge_logits);
        }
}

static void check_rows_one_by_one(const test_case *c)
{
    fixture f;
    fixture_create(&f, c);
    fixture_solve(&f);
    for (int32_t k = 0; case_kernel(c, k); k++) {
        skl_plan *const plan = test_plan(&f.problem, case_kernel(c, k), 2);
        for (unsigned wanted = 0; wanted < 16; wanted++) {
            fixture_results all = results_create(&f), some = all;
            test_tensor *const rows[] = {&some.kl, &some.lse_t, &some.lse_s,
                                         c->index_heads ? &some.mass : &some.dot_t};
            some.cross_entropy.data = some.entropy.data = NULL;
            for (unsigned r = 0; r < COUNT_OF(rows); r++)
                if (!(wanted >> r & 1))
                    rows[r]->data = NULL;
            const skl_rows outputs = results_rows(&some);
            run_forward(plan, &f.inputs, &outputs);
            assert_int_equal(rows_mismatch(&f, &some, skl_plan_kernel(plan)), 0);
            results_destroy(&all);
        }
        skl_plan_destroy(plan);
    }
    fixture_destroy(&f);
}

/* Each subset of the row results can be requested, with the same values. */
static void test_rows_can_be_requested_one_by_one(void **state)
{
    (void)state;
    for (int64_t heads_t = 2; heads_t <= 4; heads_t += 2) {
        const test_case c = {"one by one", SHAPE(1, 37, 131), HEADS(heads_t, 2), DIMS(16, 16), CAUSAL};
        case_in_every_type(&c, check_rows_one_by_one);
    }
    const test_case wider = {"one by one, wider LSE", SHAPE(1, 37, 131), HEADS(4, 2), DIMS(16, 16), CAUSAL,
                             .lse = LSE_WIDER};
    case_in_every_type(&wider, check_rows_one_by_one);
    for (int64_t top_k = 0; top_k <= 24; top_k += 24) {
        const test_case indexer = {"one by one, indexer", SHAPE(1, 37, 131), HEADS(4, 2),
                                   DIMS(16, 16),          INDEXER(3),        CAUSAL,
                                   TOP_K(top_k),          .lse = LSE_WIDER};
        case_in_every_type(&indexer, check_rows_one_by_one);
    }
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_equal_models_have_kl_0),
        cmocka_unit_test(test_equal_heads_of_a_group_have_kl_0),
        cmocka_unit_test(test_kl_is_never_negative),
        cmocka_unit_test(test_shifted_keys_change_nothing),
        cmocka_unit_test(test_order_of_keys_does_not_matter),
        cmocka_unit_test(test_logit_gradients_sum_to_0),
        cmocka_unit_test(test_upstream_gradient_0_gives_gradient_0),
        cmocka_unit_test(test_runs_repeat_bit_for_bit),
        cmocka_unit_test(test_layouts_give_the_same_bits),
        cmocka_unit_test(test_an_lse_exact_in_f32_loses_nothing),
        cmocka_unit_test(test_exponentials_are_rounded_once),
        cmocka_unit_test(test_small_kl_stays_accurate),
        cmocka_unit_test(test_huge_logits_stay_finite),
        cmocka_unit_test(test_rows_can_be_requested_one_by_one),
    };
    return test_run("properties", tests, COUNT_OF(tests));
}
