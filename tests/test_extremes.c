/* Extreme numbers: logits beyond 2^31, softcaps from 1e-30 to 3e38, rows of one key and rows of millions of keys. */
#include "runner.h"

#include <math.h>
#include <stdlib.h>

#include "case_words.h"
#include "device.h"

/* KL and gradients from the LSEs in `lse`, in one call. */
static void run_one_pass(const skl_plan *plan, const fixture *f, const fixture_results *lse,
                         const fixture_results *results)
{
    skl_inputs inputs = f->inputs;
    inputs.lse_t = tensor_input(&lse->lse_t);
    inputs.lse_s = tensor_input(&lse->lse_s);
    fixture_results wanted = *results;
    wanted.lse_t.data = wanted.lse_s.data = wanted.mass.data = NULL;
    const skl_rows rows = results_rows(&wanted);
    const skl_gradients gradients = results_gradients(&wanted);
    run_forward_backward(plan, &inputs, &rows, &gradients);
}

/* KL and LSEs of two halves of the keys, merged. */
static void run_halves(const skl_plan *plan, const fixture *f, const fixture_results *lse,
                       const fixture_results *results)
{
    skl_inputs inputs = f->inputs;
    if (f->problem.heads_t > f->problem.heads_s || f->problem.index_heads)
        inputs.lse_t = tensor_input(&lse->lse_t);
    skl_row_state *const first = states_create(f), *const second = states_create(f);
    run_partial(plan, &inputs, 0, f->problem.len_k / 2, first);
    run_partial(plan, &inputs, f->problem.len_k / 2, f->problem.len_k, second);
    run_merge(plan, first, second);
    const skl_rows rows = {.struct_size = sizeof rows, .kl = tensor_output(&results->kl)};
    run_finish(plan, &inputs, first, &rows);
    states_destroy(first);
    states_destroy(second);
}

/* ---- Huge logits ------------------------------------------------------------------------------------------- */

/* Entries n 2^power with whole n below 16, so that every product and every partial sum is exact in f32, in any order.
 * One dimension counts the rows, in units of 2^(power - 12): no two keys of a row have the same logit, and their
 * difference is far above 1, so a row is a single peak in f32 as in double. */
static void fill_huge(const test_tensor *tensor, int power, int keys, test_random *random)
{
    for (int64_t n = 0; n < tensor_count(tensor); n++) {
        const double whole = (double)random_between(random, -15, 15);
        const double count = keys ? (double)(n / tensor->dim % tensor->length) * 0x1p-12 : 1;
        tensor_set(tensor, n, ldexp(n % tensor->dim == 0 ? count : whole, power));
    }
}

static double largest_magnitude(const double *values, int64_t count)
{
    double largest = 0;
    for (int64_t n = 0; n < count; n++)
        largest = fmax(largest, fabs(values[n]));
    return largest;
}

/* Every element is within 2^-20 of `scale`. */
static void assert_close(const test_tensor *tensor, const double *exact, double scale, const char *kernel,
                         const char *what)
{
    for (int64_t n = 0; tensor->data != NULL && n < tensor_count(tensor); n++)
        if (!(fabs(tensor_get(tensor, n) - exact[n]) <= 0x1p-20 * scale))
            fail_msg("%s: %s[%d] is %g, not %g", kernel, what, (int)n, tensor_get(tensor, n), exact[n]);
}

/* Gradients of the student are differences of peaks, and exact. Those of the teacher are 0, but the difference of two
 * numbers as large as the KL. */
static void check_huge_results(const fixture *f, const fixture_results *r, int power, const char *kernel)
{
    const double kl = largest_magnitude(f->exact.kl, tensor_count(&r->kl));
    const double entry = ldexp(16, power);
    const int forward = f->problem.direction == SKL_KL_FORWARD;
    assert_true(kl > 0x1p31);
    assert_close(&r->kl, f->exact.kl, kl, kernel, "kl");
    const double of_b = entry, of_a = entry * kl;
    assert_close(&r->dq_s, f->exact.dq_s, forward ? of_b : of_a, kernel, "dq_s");
    assert_close(&r->dk_s, f->exact.dk_s, forward ? of_b : of_a, kernel, "dk_s");
    assert_close(&r->dq_t, f->exact.dq_t, forward ? of_a : of_b, kernel, "dq_t");
    assert_close(&r->dk_t, f->exact.dk_t, forward ? of_a : of_b, kernel, "dk_t");
}

static void check_huge(const test_case *c, int power)
{
    fixture f;
    fixture_create(&f, c);
    test_random random = random_for(c->name);
    fill_huge(&f.q_t, power, 0, &random);
    fill_huge(&f.k_t, power, 1, &random);
    fill_huge(&f.q_s, power, 0, &random);
    fill_huge(&f.k_s, power, 1, &random);
    for (int64_t n = 0; f.w_s.data != NULL && n < tensor_count(&f.w_s); n++)
        tensor_set(&f.w_s, n, 1);
    fixture_solve(&f);
    for (int32_t k = 0; case_kernel(c, k); k++) {
        skl_plan *const plan = test_plan(&f.problem, case_kernel(c, k), 2);
        fixture_results results = results_create(&f), again = results_create(&f);
        run_both(plan, &f, &results);
        check_huge_results(&f, &results, power, case_kernel(c, k));
        run_one_pass(plan, &f, &results, &again);
        check_huge_results(&f, &again, power, case_kernel(c, k));
        run_halves(plan, &f, &results, &again);
        assert_close(&again.kl, f.exact.kl, largest_magnitude(f.exact.kl, tensor_count(&again.kl)), case_kernel(c, k),
                     "kl of halves");
        results_destroy(&results);
        results_destroy(&again);
        skl_plan_destroy(plan);
    }
    fixture_destroy(&f);
}

/* The largest entries of f16 make logits of 2^31; those of f32 and bf16 make logits up to 2^122. */
static void test_huge_logits_match_the_oracle(void **state)
{
    (void)state;
    enum { F16_POWER = 12 };
    static const int powers[] = {F16_POWER, 40, 56};
    static const test_case cases[] = {
        {"huge", SHAPE(1, 37, 211), HEADS(2, 2), DIMS(16, 16), .grad_f32 = 1},
        {"huge, causal", SHAPE(1, 211, 211), HEADS(1, 1), DIMS(16, 16), CAUSAL, .grad_f32 = 1},
        {"huge, reverse", SHAPE(1, 37, 211), HEADS(2, 2), DIMS(16, 16), REVERSE, .grad_f32 = 1},
        {"huge, one-pass", SHAPE(1, 37, 211), HEADS(2, 2), DIMS(16, 16), .grad_f32 = 1, .without = SKL_DQ_T | SKL_DK_T},
        {"huge, teacher groups", SHAPE(1, 37, 211), HEADS(4, 2), DIMS(16, 16), .grad_f32 = 1,
         .without = SKL_DQ_T | SKL_DK_T},
        {"huge, indexer", SHAPE(1, 37, 211), HEADS(2, 1), DIMS(16, 16), INDEXER(1), .grad_f32 = 1,
         .without = SKL_DW_S},
    };
    for (size_t c = 0; c < COUNT_OF(cases); c++)
        for (int dtype = SKL_F32; dtype <= SKL_BF16; dtype++)
            for (size_t p = 0; p < COUNT_OF(powers); p++) {
                test_case typed = cases[c];
                typed.dtype_t = typed.dtype_s = (skl_dtype)dtype;
                if (dtype != SKL_F16 || powers[p] == F16_POWER)
                    check_huge(&typed, powers[p]);
            }
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_huge_logits_match_the_oracle),
    };
    return test_run("extremes", tests, COUNT_OF(tests));
}
