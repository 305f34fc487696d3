/* Extreme numbers: logits beyond 2^31, softcaps from 1e-30 to 3e38, rows of one key and rows of millions of keys. */
#include "trial.h"

#include <math.h>
#include <stdlib.h>

#include "case_words.h"
#include "device.h"

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

/* Kernels on a GPU do not recover probabilities from LSEs beyond 2^20: results that need them are NaN there. */
static int on_gpu(void)
{
    return test_device() == SKL_CUDA;
}

/* A tolerance: absolute, and relative to the terms of an element. */
typedef struct tolerance {
    double error, rounding;
    const double *terms; /* NULL: none */
} tolerance;

/* Every element is close to `exact`; on a GPU it may be NaN, unless it is the KL of a forward (`of_logits`), which
 * needs no LSE. */
static void assert_close(const test_tensor *tensor, const double *exact, tolerance allowed, const char *kernel,
                         const char *what, int of_logits)
{
    const int may_be_nan = on_gpu() && !of_logits;
    for (int64_t n = 0; tensor->data != NULL && n < tensor_count(tensor); n++) {
        const double actual = tensor_get(tensor, n);
        const double error = allowed.error + (allowed.terms ? allowed.rounding * allowed.terms[n] : 0);
        if (!(fabs(actual - exact[n]) <= error) && !(may_be_nan && isnan(actual)))
            fail_msg("%s: %s[%d] is %g, not %g", kernel, what, (int)n, actual, exact[n]);
    }
}

/* Gradients of the student are differences of peaks, and exact, unless the kernel rounds logit gradients: then every
 * term of an element is rounded. Those of the teacher are 0, but the difference of two numbers as large as the KL. */
static void check_huge_results(const fixture *f, const fixture_results *r, int power, const char *kernel,
                               int of_logits)
{
    const double kl = largest_magnitude(f->exact.kl, tensor_count(&r->kl));
    const double entry = ldexp(16, power);
    const int forward = f->problem.direction == SKL_KL_FORWARD;
    assert_true(kl > 0x1p31);
    assert_close(&r->kl, f->exact.kl, (tolerance){0x1p-20 * kl, 0, NULL}, kernel, "kl", of_logits);
    const double rounding = kernel_product_rounding(kernel, &f->problem, f->problem.dtype_s);
    const tolerance of_a = {fmax(0x1p-20, rounding) * entry * kl, 0, NULL};
#define OF_B(member) (tolerance){0x1p-20 * entry, rounding, f->exact.terms.member}
    assert_close(&r->dq_s, f->exact.dq_s, forward ? OF_B(dq_s) : of_a, kernel, "dq_s", 0);
    assert_close(&r->dk_s, f->exact.dk_s, forward ? OF_B(dk_s) : of_a, kernel, "dk_s", 0);
    assert_close(&r->dq_t, f->exact.dq_t, forward ? of_a : OF_B(dq_t), kernel, "dq_t", 0);
    assert_close(&r->dk_t, f->exact.dk_t, forward ? of_a : OF_B(dk_t), kernel, "dk_t", 0);
#undef OF_B
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
    const int has_groups = c->heads_t > c->heads_s;
    for (int32_t k = 0; case_kernel(c, k); k++) {
        skl_plan *const plan = test_plan(&f.problem, case_kernel(c, k), 2);
        fixture_results results = results_create(&f), again = results_create(&f);
        run_both(plan, &f, &results);
        check_huge_results(&f, &results, power, case_kernel(c, k), !has_groups);
        run_one_pass(plan, &f, &results, &again);
        check_huge_results(&f, &again, power, case_kernel(c, k), 0);
        run_halves(plan, &f, &results, &again);
        const tolerance of_kl = {0x1p-20 * largest_magnitude(f.exact.kl, tensor_count(&again.kl)), 0, NULL};
        assert_close(&again.kl, f.exact.kl, of_kl, case_kernel(c, k), "kl of halves", !has_groups);
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
        {"huge, one-pass", SHAPE(1, 37, 211), HEADS(2, 2), DIMS(16, 16), .grad_f32 = 1,
         .without = SKL_DQ_T | SKL_DK_T},
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

/* ---- Sums without mass ------------------------------------------------------------------------------------- */

/* Makes every logit of a side -inf. */
static void remove_mass(const test_tensor *q, const test_tensor *k)
{
    for (int64_t n = 0; n < tensor_count(q); n += q->dim)
        tensor_set(q, n, 8);
    for (int64_t n = 0; n < tensor_count(k); n += k->dim)
        tensor_set(k, n, -3e38);
}

static const test_case student_gradients[] = {
    {"student", SHAPE(1, 37, 211), HEADS(2, 2), DIMS(16, 16), STUDENT_ONLY},
};

/* A softmax of logits that are all -inf is NaN in eager PyTorch, and so is the KL, from any call: it is not the KL 0
 * of a row without keys. First the teacher has no mass, then the student, then both. */
static void check_rows_without_mass(trial *t)
{
    for (unsigned sides = 1; sides < 4; sides++) {
        fixture_destroy(t->f);
        fixture_create(t->f, student_gradients);
        if (sides & 1)
            remove_mass(&t->f->q_t, &t->f->k_t);
        if (sides & 2)
            remove_mass(&t->f->q_s, &t->f->k_s);
        run_both(t->plan, t->f, &t->one);
        assert_elements(t, &t->one.kl, is_nan, "kl");
        run_one_pass(t->plan, t->f, &t->one, &t->other);
        assert_elements(t, &t->other.kl, is_nan, "one-pass kl");
        run_halves(t->plan, t->f, &t->one, &t->other);
        assert_elements(t, &t->other.kl, is_nan, "merged kl");
    }
}

static void shift(const test_tensor *lse, double by)
{
    for (int64_t n = 0; n < tensor_count(lse); n++)
        tensor_set(lse, n, tensor_get(lse, n) + by);
}

/* LSEs that are far off move all probabilities of a row out of range. The KL of a one-pass call shows it: it is
 * infinite, of either sign, or NaN, and never 0. */
static void check_wrong_lses(trial *t)
{
    static const double offsets[] = {-1e4, 1e4, -1e9, 1e9};
    for (size_t n = 0; n < COUNT_OF(offsets); n++)
        for (unsigned sides = 1; sides < 4; sides++) {
            run_both(t->plan, t->f, &t->one);
            shift(&t->one.lse_t, sides & 1 ? offsets[n] : 0);
            shift(&t->one.lse_s, sides & 2 ? offsets[n] : 0);
            run_one_pass(t->plan, t->f, &t->one, &t->other);
            assert_elements(t, &t->other.kl, is_not_finite, "kl");
        }
}

/* ---- Rows of one key --------------------------------------------------------------------------------------- */

static void assert_no_gradient(const trial *t, const fixture_results *r)
{
    const test_tensor *const gradients[] = {&r->dq_t, &r->dk_t, &r->dq_s, &r->dk_s, &r->dw_s};
    for (size_t g = 0; g < COUNT_OF(gradients); g++)
        assert_elements(t, gradients[g], is_zero, "a gradient");
}

/* Keeps the first key of every list of indices. */
static void keep_one_index(fixture *f)
{
    int32_t *const indices = f->indices.data;
    for (int64_t row = 0; f->indices.data != NULL && row < tensor_count(&f->indices); row += f->problem.top_k) {
        int found = 0;
        for (int64_t n = row; n < row + f->problem.top_k; n++) {
            indices[n] = found ? -1 : indices[n];
            found |= indices[n] >= 0;
        }
    }
}

/* Another attention kernel rounds its LSEs differently. */
static void disturb(const test_tensor *lse, test_random *random)
{
    for (int64_t n = 0; n < tensor_count(lse); n++)
        tensor_set(lse, n, tensor_get(lse, n) * (1 + random_uniform(random, -1e-6, 1e-6)));
}

static void check_one_key(trial *t)
{
    run_both(t->plan, t->f, &t->one);
    assert_elements(t, &t->one.kl, is_zero, "kl");
    if (t->f->test_case->lse == LSE_COMPUTED && !on_gpu()) /* a given LSE is rounded again before the backward */
        assert_no_gradient(t, &t->one);
    run_halves(t->plan, t->f, &t->one, &t->other);
    assert_elements(t, &t->other.kl, is_zero, "merged kl");
    test_random random = random_for(t->f->test_case->name);
    disturb(&t->one.lse_t, &random);
    disturb(&t->one.lse_s, &random);
    run_one_pass(t->plan, t->f, &t->one, &t->other);
    assert_elements(t, &t->other.kl, is_zero, "one-pass kl");
    if (!on_gpu()) /* there a gradient of the rounding of the LSEs is left */
        assert_no_gradient(t, &t->other);
}

#define ONE_KEY SHAPE(1, 211, 211), WINDOW(0, 0)
static const test_case one_key[] = {
    {"one key", ONE_KEY, HEADS(2, 2), DIMS(16, 33)},
    {"one key, one-pass", ONE_KEY, HEADS(2, 2), DIMS(16, 33), STUDENT_ONLY},
    {"one key, reverse", ONE_KEY, HEADS(2, 2), DIMS(16, 33), REVERSE},
    {"one key, reverse, one-pass", ONE_KEY, HEADS(2, 2), DIMS(16, 33), REVERSE, .without = SKL_DQ_S | SKL_DK_S},
    {"one key, softcap", ONE_KEY, HEADS(2, 2), DIMS(16, 33), SOFTCAPS(2, 3)},
    {"one key, teacher groups", ONE_KEY, HEADS(6, 2), DIMS(16, 33)},
    {"one key, teacher groups, reverse", ONE_KEY, HEADS(6, 2), DIMS(16, 33), REVERSE},
    {"one key, given LSE", ONE_KEY, HEADS(6, 2), DIMS(16, 33), .lse = LSE_GIVEN},
    {"one key, wider LSE", ONE_KEY, HEADS(6, 2), DIMS(16, 33), .lse = LSE_WIDER, STUDENT_ONLY},
    {"one key, 64 dimensions", ONE_KEY, HEADS(2, 2), DIMS(64, 64), STUDENT_ONLY},
    {"one key, teacher groups, 64 dimensions", ONE_KEY, HEADS(6, 2), DIMS(64, 64), STUDENT_ONLY},
    {"one key, indexer, 64 dimensions", ONE_KEY, HEADS(3, 1), DIMS(64, 64), INDEXER(3)},
    {"one key, indexer", ONE_KEY, HEADS(3, 1), DIMS(16, 33), INDEXER(3)},
    {"one key, indexer, reverse", ONE_KEY, HEADS(3, 1), DIMS(16, 33), INDEXER(3), REVERSE},
    {"one index", SHAPE(1, 211, 211), HEADS(3, 1), DIMS(16, 33), INDEXER(3), TOP_K(5)},
    {"one index, reverse", SHAPE(1, 211, 211), HEADS(3, 1), DIMS(16, 33), INDEXER(3), TOP_K(5), REVERSE},
};

/* ---- Rows of any magnitude --------------------------------------------------------------------------------- */

/* Multiplies every row by a power of two, from 2^-range to 1; one row in eight becomes 0. */
static void vary_rows(const test_tensor *tensor, int range, test_random *random)
{
    for (int64_t row = 0; row < tensor_count(tensor) / tensor->dim; row++) {
        const int power = -(int)random_between(random, 0, range);
        const double factor = random_between(random, 1, 8) == 1 ? 0 : ldexp(1, power);
        for (int64_t n = row * tensor->dim; n < (row + 1) * tensor->dim; n++)
            tensor_set(tensor, n, tensor_get(tensor, n) * factor);
    }
}

static void vary_all_rows(fixture *f)
{
    test_random random = random_for(f->test_case->name);
    const test_tensor *const tensors[] = {&f->q_t, &f->k_t, &f->q_s, &f->k_s};
    for (size_t n = 0; n < COUNT_OF(tensors); n++)
        vary_rows(tensors[n], 40, &random);
    fixture_solve(f);
}

static const test_case magnitudes[] = {
    {"magnitudes", SHAPE(1, 150, 211), HEADS(2, 1), DIMS(64, 64)},
    {"magnitudes, causal", SHAPE(1, 211, 211), HEADS(1, 1), DIMS(100, 128), CAUSAL},
    {"magnitudes, mixed types", SHAPE(1, 150, 211), HEADS(2, 2), DIMS(48, 80), TYPES(BF16, F32)},
};

/* Multiplies the last row by 2^power. */
static void scale_last_row(const test_tensor *tensor, int power)
{
    const int64_t end = tensor_count(tensor);
    for (int64_t n = end - tensor->dim; n < end; n++)
        tensor_set(tensor, n, ldexp(tensor_get(tensor, n), power));
}

/* Of all rows but the last: largest difference in a row, compared with the largest element of the row. */
static double largest_row_difference(const test_tensor *one, const test_tensor *other)
{
    double worst = 0;
    for (int64_t row = 0; row < tensor_count(one) / one->dim - 1; row++) {
        double difference = 0, largest = 0;
        for (int64_t n = row * one->dim; n < (row + 1) * one->dim; n++) {
            difference = fmax(difference, fabs(tensor_get(one, n) - tensor_get(other, n)));
            largest = fmax(largest, fabs(tensor_get(one, n)));
            if (isnan(tensor_get(other, n)))
                return INFINITY;
        }
        worst = fmax(worst, difference == 0 ? 0 : difference / largest);
    }
    return worst;
}

/* Only the last query attends to the last key. That key may be 2^60 times as large as the others, and the query as
 * much smaller: no other row becomes less accurate. */
static void check_huge_masked_key(trial *t)
{
    const fixture *const f = t->f;
    run_both(t->plan, f, &t->one);
    scale_last_row(&f->q_t, -60), scale_last_row(&f->q_s, -60);
    scale_last_row(&f->k_t, 60), scale_last_row(&f->k_s, 60);
    run_both(t->plan, f, &t->other);
    const test_tensor *const pairs[][2] = {{&t->one.kl, &t->other.kl},
                                           {&t->one.lse_t, &t->other.lse_t},
                                           {&t->one.dq_t, &t->other.dq_t},
                                           {&t->one.dq_s, &t->other.dq_s}};
    for (size_t n = 0; n < COUNT_OF(pairs); n++)
        if (!(largest_row_difference(pairs[n][0], pairs[n][1]) < 0x1p-18))
            trial_fail(t, "tensor %d differs", (int)n);
}

static const test_case huge_masked_key[] = {
    {"huge masked key", SHAPE(1, 211, 211), HEADS(1, 1), DIMS(64, 64), CAUSAL},
};

/* Under a softcap far below 1 a logit is far below its LSE, and under a large one it is unchanged. */
#define CAPPED(cap)                                                                                                  \
    {"softcap " #cap, SHAPE(1, 37, 131), HEADS(2, 2), DIMS(16, 16), SOFTCAPS(cap, cap)},                             \
        {"groups, softcap " #cap, SHAPE(1, 37, 131), HEADS(4, 2), DIMS(16, 16), SOFTCAPS(cap, 0)},                   \
        {"groups, reverse, softcap " #cap, SHAPE(1, 37, 131), HEADS(4, 2), DIMS(16, 16), SOFTCAPS(cap, 0), REVERSE}, \
    {                                                                                                                \
        "sparse, softcap " #cap, SHAPE(1, 37, 131), HEADS(4, 1), DIMS(16, 16), SOFTCAPS(cap, 0), INDEXER(2),         \
            TOP_K(50)                                                                                                \
    }
static const test_case softcaps[] = {CAPPED(1e-37F), CAPPED(1e-7F), CAPPED(1e-4F), CAPPED(0.1F),
                                     CAPPED(1e4F),   CAPPED(1e30F), CAPPED(3e38F)};

/* ---- Tiny probabilities ------------------------------------------------------------------------------------ */

/* The student's mass is where all teacher heads have P_h = e^-3e9. Two heads share it equally: dot_h = -P_h/P S is
 * -3/2 there, and nearly 0 for the third head. log P_h is half-way between two floats, and log P below it: rounded,
 * they differ by 256. */
static const test_case tiny[] = {{"tiny", SHAPE(1, 1, 2), HEADS(3, 1), DIMS(1, 1), SCALES(1, 1), REVERSE}};

static void check_ratio_of_tiny_probabilities(trial *t)
{
    const double high = 0x1.8p30, low = -0x1.8p30 - 128, lowest = -0x1p32;
    const double k_t[] = {high, low, high, low, high, lowest}, k_s[] = {0, 100};
    tensor_set_all(&t->f->q_t, 1), tensor_set_all(&t->f->q_s, 1);
    for (int64_t n = 0; n < tensor_count(&t->f->k_t); n++)
        tensor_set(&t->f->k_t, n, k_t[n]);
    for (int64_t n = 0; n < tensor_count(&t->f->k_s); n++)
        tensor_set(&t->f->k_s, n, k_s[n]);
    const skl_rows rows = {.struct_size = sizeof rows, .dot_t = tensor_output(&t->one.dot_t)};
    run_forward(t->plan, &t->f->inputs, &rows);
    const double dot[] = {tensor_get(&t->one.dot_t, 0), tensor_get(&t->one.dot_t, 1), tensor_get(&t->one.dot_t, 2)};
    for (size_t h = 0; h < COUNT_OF(dot); h++)
        if (!(dot[h] <= 0 && dot[h] >= -3))
            trial_fail(t, "dot_t[%d] is %g", (int)h, dot[h]);
    assert_true(dot[0] == dot[1] && dot[0] < -0.5 && dot[2] > -1e-30);
}

/* ---- The range of f16 -------------------------------------------------------------------------------------- */

/* All rows have the same distributions, so their contributions to dk have the same sign and add up. The teacher has
 * nearly all of its mass at key 0, where the student's logit is 0, so that its mass there is small. */
static void make_rows_equal(const fixture *f)
{
    for (int64_t n = 0; n < tensor_count(&f->q_t); n++)
        tensor_set(&f->q_t, n, n % f->q_t.dim == 0 ? 4 : tensor_get(&f->q_t, n % f->q_t.dim));
    for (int64_t n = 0; n < tensor_count(&f->k_t); n += f->k_t.dim)
        tensor_set(&f->k_t, n, n == 0 ? 40 : 0);
    for (int64_t n = 0; n < tensor_count(&f->q_s); n++)
        tensor_set(&f->q_s, n, n % f->q_s.dim == 0 ? 4000 : tensor_get(&f->q_s, n % f->q_s.dim));
    for (int64_t n = 0; n < tensor_count(&f->k_s); n++)
        if (n < f->k_s.dim || n % f->k_s.dim == 0)
            tensor_set(&f->k_s, n, 0);
}

/* In a one-pass call the gradient of the sum over rows exceeds the range of f16. An upstream gradient of 1 / rows,
 * one float for all rows, is applied before the rounding. */
enum { F16_ROWS = 512 };
static const test_case f16_sum[] = {
    {"f16 sum", SHAPE(1, F16_ROWS, 67), HEADS(1, 1), DIMS(16, 16), TYPES(F16, F16), .unit_upstream = 1, STUDENT_ONLY},
};

static void check_f16_range(trial *t)
{
    make_rows_equal(t->f);
    test_tensor one_float = tensor_create(SKL_F32, 1, 1, F16_ROWS, 1, LAYOUT_REPEATED);
    tensor_set(&one_float, 0, 1.0 / F16_ROWS);
    run_both(t->plan, t->f, &t->one);
    run_one_pass(t->plan, t->f, &t->one, &t->other);
    int overflows = 0;
    for (int64_t n = 0; n < tensor_count(&t->other.dk_s); n++)
        overflows += !isfinite(tensor_get(&t->other.dk_s, n));
    assert_true(overflows > 0);
    t->f->inputs.grad_kl = tensor_input(&one_float);
    fixture_solve(t->f);
    run_one_pass(t->plan, t->f, &t->one, &t->other);
    assert_elements(t, &t->other.dk_s, is_finite, "dk_s");
    assert_int_equal(gradients_mismatch(t->f, &t->other, t->kernel, t->kernel), 0);
    tensor_destroy(&one_float);
}

/* ---- Long rows --------------------------------------------------------------------------------------------- */

enum { LONG_ROWS = 2 };

/* Exact results of a row, in double. */
typedef struct long_row {
    double lse_t, lse_s, kl;
} long_row;

static long_row solve_long_row(const float *k_t, const float *k_s, int64_t length, double q)
{
    double sum_t = 0, sum_s = 0, sum_w = 0;
    for (int64_t j = 0; j < length; j++) {
        const double x = q * (double)k_t[j], y = q * (double)k_s[j], p = exp(x);
        sum_t += p, sum_s += exp(y), sum_w += p * (x - y);
    }
    return (long_row){log(sum_t), log(sum_s), sum_w / sum_t - log(sum_t) + log(sum_s)};
}

static void check_long_row(const char *kernel, int64_t length)
{
    static const float q[LONG_ROWS] = {1, -0.5F};
    float *const k_t = malloc((size_t)length * sizeof *k_t), *const k_s = malloc((size_t)length * sizeof *k_s);
    assert_true(k_t && k_s);
    test_random random = random_for("long rows");
    for (int64_t j = 0; j < length; j++) { /* multiples of 2^-9: logits are exact */
        k_t[j] = (float)random_between(&random, -1024, 1024) * 0x1p-9F;
        k_s[j] = k_t[j] + (float)random_between(&random, -12, 12) * 0x1p-9F;
    }
    skl_problem p = skl_problem_default();
    p.len_q = LONG_ROWS, p.len_k = length, p.dim_t = p.dim_s = 1, p.scale_t = p.scale_s = 1, p.gradients = SKL_DQ_S;
    skl_plan *const plan = test_plan(&p, kernel, 2);
    float lse_t[LONG_ROWS], lse_s[LONG_ROWS], kl[LONG_ROWS], kl_one_pass[LONG_ROWS], dq[LONG_ROWS];
    skl_inputs inputs = {.struct_size = sizeof inputs,
                         .q_t = skl_input_contiguous(q, 1, LONG_ROWS, 1),
                         .k_t = skl_input_contiguous(k_t, 1, length, 1),
                         .q_s = skl_input_contiguous(q, 1, LONG_ROWS, 1),
                         .k_s = skl_input_contiguous(k_s, 1, length, 1)};
    skl_rows rows = {.struct_size = sizeof rows,
                     .kl = skl_output_contiguous(kl, 1, LONG_ROWS, 1),
                     .lse_t = skl_output_contiguous(lse_t, 1, LONG_ROWS, 1),
                     .lse_s = skl_output_contiguous(lse_s, 1, LONG_ROWS, 1)};
    run_forward(plan, &inputs, &rows);
    inputs.lse_t = skl_input_contiguous(lse_t, 1, LONG_ROWS, 1);
    inputs.lse_s = skl_input_contiguous(lse_s, 1, LONG_ROWS, 1);
    rows = (skl_rows){.struct_size = sizeof rows, .kl = skl_output_contiguous(kl_one_pass, 1, LONG_ROWS, 1)};
    const skl_gradients gradients = {.struct_size = sizeof gradients,
                                     .dq_s = skl_output_contiguous(dq, 1, LONG_ROWS, 1)};
    run_forward_backward(plan, &inputs, &rows, &gradients);
    for (int i = 0; i < LONG_ROWS; i++) {
        const long_row exact = solve_long_row(k_t, k_s, length, (double)q[i]);
        const double errors[] = {fabs((double)lse_t[i] - exact.lse_t) / (1 + exact.lse_t),
                                 fabs((double)lse_s[i] - exact.lse_s) / (1 + exact.lse_s),
                                 fabs((double)kl[i] - exact.kl), fabs((double)kl_one_pass[i] - exact.kl)};
        if (test_environment("SKL_TEST_REPORT", 0))
            print_message("%s: %.0f keys: in roundings: LSEs %.2f %.2f, KL of %.1e %.2f, one-pass %.2f\n", kernel,
                          (double)length, errors[0] / 0x1p-24, errors[1] / 0x1p-24, exact.kl, errors[2] / 0x1p-24,
                          errors[3] / 0x1p-24);
        for (size_t n = 0; n < COUNT_OF(errors); n++)
            if (!(errors[n] <= 2 * 0x1p-24))
                fail_msg("%s: %.0f keys: result %d is off by %.2f roundings", kernel, (double)length, (int)n,
                         errors[n] / 0x1p-24);
    }
    skl_plan_destroy(plan);
    free(k_t);
    free(k_s);
}

/* Errors of LSEs and KLs do not grow with the number of keys: see docs/design/maths.md. */
static void test_long_rows_stay_accurate(void **state)
{
    (void)state;
    if (on_gpu())
        skip(); /* a GPU cannot read tensors on the stack */
    const int64_t short_length = ((int64_t)1 << 22) / test_environment("SKL_TEST_SAMPLE", 1);
    const int64_t length = test_environment("SKL_TEST_LONG", 0) ? (int64_t)1 << 24 : short_length;
    for (int32_t k = 0; test_kernel(k); k++)
        check_long_row(test_kernel(k), length);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_huge_logits_match_the_oracle),
        TRIALS(one_key_has_kl_0, one_key, .every_type = 1, .prepare = keep_one_index, .check = check_one_key),
        TRIALS(rows_of_any_magnitude_match_the_oracle, magnitudes, .prepare = vary_all_rows, .check = check_oracle),
        TRIALS(a_huge_masked_key_changes_no_other_row, huge_masked_key, .check = check_huge_masked_key),
        /* GPU kernels that compute the KL from logits ignore wrong LSEs. */
        TRIALS(rows_without_mass_are_nan, student_gradients, .check = check_rows_without_mass, .only_cpu = 1),
        TRIALS(wrong_lses_are_not_kl_0, student_gradients, .check = check_wrong_lses, .only_cpu = 1),
        TRIALS(any_softcap_matches_the_oracle, softcaps, .prepare = fixture_solve, .check = check_oracle,
               .only_cpu = 1),
        TRIALS(a_scale_keeps_f16_gradients_in_range, f16_sum, .check = check_f16_range, .only_cpu = 1),
        TRIALS(ratio_of_tiny_probabilities_is_finite, tiny, .check = check_ratio_of_tiny_probabilities,
               .only_cpu = 1),
        cmocka_unit_test(test_long_rows_stay_accurate),
    };
    return test_run("extremes", tests, COUNT_OF(tests));
}
