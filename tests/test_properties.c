/* Properties that hold for all inputs, checked for every kernel; most need no oracle. */
#include "trial.h"

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

static void assert_gradients_are_0(const trial *t, const fixture_results *r)
{
    assert_elements(t, &r->dq_t, is_zero, "dq_t");
    assert_elements(t, &r->dk_t, is_zero, "dk_t");
    assert_elements(t, &r->dq_s, is_zero, "dq_s");
    assert_elements(t, &r->dk_s, is_zero, "dk_s");
}

/* With equal models, KL and gradients are exactly 0. */
static void check_equal_models(trial *t)
{
    t->f->inputs.q_s = t->f->inputs.q_t;
    t->f->inputs.k_s = t->f->inputs.k_t;
    run_both(t->plan, t->f, &t->one);
    assert_true(tensor_equal(&t->one.lse_t, &t->one.lse_s));
    assert_elements(t, &t->one.kl, is_zero, "kl");
    assert_gradients_are_0(t, &t->one);
}

static void check_equal_models_in_one_pass(trial *t)
{
    check_equal_models(t);
    run_one_pass(t->plan, t->f, &t->one, &t->other);
    assert_elements(t, &t->other.kl, is_zero, "kl");
    assert_gradients_are_0(t, &t->other);
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

/* A student that equals every teacher head of its group: the mean of equal heads is that head, for any number. Other
 * kernels than those for groups are exact up to rounding. */
static void check_equal_heads(trial *t)
{
    if (strstr(t->kernel, "groups") == NULL)
        return;
    repeat_heads(&t->f->q_t, &t->f->q_s, t->f->q_t.heads / t->f->q_s.heads);
    repeat_heads(&t->f->k_t, &t->f->k_s, t->f->k_t.heads / t->f->k_s.heads);
    run_both(t->plan, t->f, &t->one);
    assert_elements(t, &t->one.kl, is_zero, "kl");
    assert_gradients_are_0(t, &t->one);
}

static const test_case equal_heads[] = {
    {"2 heads", SHAPE(1, 67, 131), HEADS(4, 2), DIMS(32, 32), STUDENT_ONLY},
    {"4 heads", SHAPE(1, 150, 300), HEADS(8, 2), DIMS(128, 128), TYPES(BF16, BF16), CAUSAL, STUDENT_ONLY},
    {"3 heads", SHAPE(2, 67, 300), HEADS(6, 2), DIMS(64, 64), TYPES(BF16, BF16), WINDOW(90, 9), STUDENT_ONLY},
    {"5 heads", SHAPE(1, 131, 231), HEADS(5, 1), DIMS(64, 64), TYPES(F16, F16), STUDENT_ONLY, .growth = 2},
    {"3 heads, both sides", SHAPE(1, 67, 300), HEADS(6, 2), DIMS(64, 64), TYPES(BF16, BF16), WINDOW(90, 9)},
    {"4 heads, softcap", SHAPE(1, 150, 300), HEADS(4, 1), DIMS(64, 64), TYPES(BF16, BF16), SOFTCAPS(50, 50), CAUSAL,
     STUDENT_ONLY},
    {"3 heads, low softcap", SHAPE(1, 150, 300), HEADS(3, 1), DIMS(128, 128), TYPES(F16, F16), SOFTCAPS(1, 1),
     STUDENT_ONLY},
    {"4 heads, shared keys", SHAPE(1, 150, 300), HEADS(8, 2), KEY_HEADS(2, 2), DIMS(128, 128), TYPES(BF16, BF16),
     CAUSAL, STUDENT_ONLY},
    {"4 heads, shared keys, softcap", SHAPE(1, 150, 300), HEADS(8, 2), KEY_HEADS(2, 2), DIMS(128, 128),
     TYPES(BF16, BF16), SOFTCAPS(50, 50), CAUSAL, STUDENT_ONLY},
    {"4 heads, reverse", SHAPE(1, 150, 300), HEADS(8, 2), DIMS(128, 128), TYPES(BF16, BF16), CAUSAL, REVERSE,
     STUDENT_ONLY},
    /* P and S of the first tiles are 0 in f32, then small, then those of peaks. */
    {"4 heads, growing far", SHAPE(1, 150, 700), HEADS(4, 1), DIMS(64, 64), TYPES(BF16, BF16), STUDENT_ONLY,
     .growth = 60},
    {"3 heads, growing far", SHAPE(1, 150, 700), HEADS(3, 1), DIMS(128, 128), TYPES(F16, F16), STUDENT_ONLY,
     .growth = 60},
    {"4 heads, growing far, softcap", SHAPE(1, 150, 700), HEADS(4, 1), DIMS(64, 64), TYPES(BF16, BF16),
     SOFTCAPS(200, 200), STUDENT_ONLY, .growth = 60},
};

/* The student becomes the teacher, with noise in its queries. */
static void make_similar(const fixture *f, double noise)
{
    test_random random = random_for("noise");
    for (int64_t n = 0; n < tensor_count(&f->q_s); n++)
        tensor_set(&f->q_s, n, tensor_get(&f->q_t, n) + random_uniform(&random, -noise, noise));
    tensor_copy(&f->k_s, &f->k_t);
}

/* Even for models that differ only by rounding errors, no KL is negative. */
static void check_no_negative_kl(trial *t)
{
    make_similar(t->f, 1e-6);
    run_both(t->plan, t->f, &t->one);
    assert_elements(t, &t->one.kl, is_not_negative, "kl");
}

/* Late in training: a KL of 1e-5 with logits in the tens. */
static void make_small_kl(fixture *f)
{
    make_similar(f, 2e-3);
    fixture_solve(f);
}

static void check_small_kl(trial *t)
{
    run_both(t->plan, t->f, &t->one);
    for (int64_t n = 0; n < tensor_count(&t->one.kl); n++)
        if (!(fabs(tensor_get(&t->one.kl, n) - t->f->exact.kl[n]) <=
              1e-6)) /* the last bit of a float of 30 is 2e-6 */
            trial_fail(t, "KL is %g, not %g", tensor_get(&t->one.kl, n), t->f->exact.kl[n]);
}

static const test_case small_kl[] = {{"small", SHAPE(1, 67, 1031), HEADS(2, 2), DIMS(64, 64), SCALES(1, 1)}};

/* Rows of one key with an integer logit: the LSE is the same integer, which f32 represents exactly, so P is 1 up to
 * the rounding of x log2 e. A kernel that drops the bits of an LSE beyond f32 in base 2 has twice the error, as those
 * with tensor cores. So does x log2 e - lse without a fused multiply-add, as in the portable and the general CUDA
 * kernel. */
enum { INTEGER_ROWS = 200 };
static const test_case integer_logits[] = {
    {"integer", SHAPE(1, INTEGER_ROWS, INTEGER_ROWS), HEADS(1, 1), DIMS(1, 1), SCALES(1, 1), WINDOW(0, 0)},
};

static void check_integer_lse(trial *t)
{
    if (strcmp(t->kernel, "cpu_portable") == 0 || strncmp(t->kernel, "cuda_", 5) == 0)
        return;
    const fixture *const f = t->f;
    for (int64_t i = 0; i < INTEGER_ROWS; i++) {
        tensor_set(&f->q_t, i, 1), tensor_set(&f->k_t, i, 300 + (double)i);
        tensor_set(&f->q_s, i, 1), tensor_set(&f->k_s, i, 0); /* S is exactly 1 */
        tensor_set(&f->grad_kl, i, 1);
    }
    run_both(t->plan, f, &t->one);
    for (int64_t i = 0; i < INTEGER_ROWS; i++) {
        const double logit = tensor_get(&f->k_t, i), allowed = 0x1p-24 * (logit / 2 + 4);
        assert_true(tensor_get(&t->one.lse_t, i) == logit);
        assert_true(fabs(tensor_get(&t->one.dk_s, i)) <= allowed); /* S - P */
        assert_true(fabs(tensor_get(&t->one.dk_t, i)) <= allowed); /* P (log P - log S - KL) */
    }
}

/* Two keys with exact logits x and 0: the LSE is log(1 + e^x), with rounding errors of the exponential, the sum with
 * 1 and the logarithm only: two roundings of 1. */
static const test_case two_keys[] = {{"two keys", SHAPE(1, 1024, 2), HEADS(1, 1), DIMS(1, 1), SCALES(1, 1)}};

static void check_exponentials(trial *t)
{
    const fixture *const f = t->f;
    tensor_set(&f->k_t, 0, 1), tensor_set(&f->k_t, 1, 0);
    for (int64_t i = 0; i < f->length_q; i++)
        tensor_set(&f->q_t, i, -(double)i / 512);
    run_both(t->plan, f, &t->one);
    for (int64_t i = 0; i < f->length_q; i++) {
        const double error = fabs(tensor_get(&t->one.lse_t, i) - log1p(exp(tensor_get(&f->q_t, i)))) / 0x1p-24;
        if (!(error <= 2))
            trial_fail(t, "the LSE of row %lld is off by %.2f roundings", (long long)i, error);
    }
}

/* All differences are below `allowed`. NaN is not. */
static void assert_close(const trial *t, const test_tensor *a, const test_tensor *b, double allowed, const char *what)
{
    for (int64_t n = 0; n < tensor_count(a); n++)
        if (!(fabs(tensor_get(a, n) - tensor_get(b, n)) < allowed))
            trial_fail(t, "%s[%lld] is %g and %g", what, (long long)n, tensor_get(a, n), tensor_get(b, n));
}

/* Difference of gradients around 1: those of f16 kernels round logit gradients. */
static double gradient_difference(const trial *t, double of_f32)
{
    return t->f->problem.dtype_t == SKL_F32 ? of_f32 : 1e-2;
}

/* Rounds to multiples of 1/64, so that small sums are exact. */
static void coarsen(const test_tensor *tensor)
{
    for (int64_t n = 0; n < tensor_count(tensor); n++)
        tensor_set(tensor, n, nearbyint(tensor_get(tensor, n) * 64) / 64);
}

/* Adding one vector to all keys of a side adds a constant to each row of logits. */
static const test_case shifted[] = {
    {"shifted", SHAPE(1, 67, 131), TWO_MODELS},
    {"shifted, f16", SHAPE(1, 67, 131), HEADS(2, 2), DIMS(64, 64), TYPES(F16, F16), .grad_f32 = 1},
};

static void check_shifted_keys(trial *t)
{
    const test_tensor *const sides[] = {&t->f->k_t, &t->f->k_s};
    coarsen(sides[0]), coarsen(sides[1]);
    run_both(t->plan, t->f, &t->one);
    for (int side = 0; side < 2; side++) {
        const test_tensor *const keys = sides[side];
        for (int64_t n = 0; n < tensor_count(keys); n++)
            tensor_set(keys, n, tensor_get(keys, n) + (double)(n % keys->dim % 7) - 3);
        run_both(t->plan, t->f, &t->other);
        assert_close(t, &t->one.kl, &t->other.kl, 1e-5, "kl");
        assert_close(t, &t->one.dk_t, &t->other.dk_t, gradient_difference(t, 1e-4), "dk_t");
        assert_close(t, &t->one.dk_s, &t->other.dk_s, gradient_difference(t, 1e-4), "dk_s");
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

static const test_case reordered[] = {
    {"reordered", SHAPE(1, 67, 231), TWO_MODELS, .growth = 5},
    {"reordered, f16", SHAPE(1, 67, 231), HEADS(2, 2), DIMS(64, 64), TYPES(F16, F16), .grad_f32 = 1, .growth = 5},
};

static void check_reordered_keys(trial *t)
{
    run_both(t->plan, t->f, &t->one);
    reverse_rows(&t->f->k_t);
    reverse_rows(&t->f->k_s);
    run_both(t->plan, t->f, &t->other);
    reverse_rows(&t->other.dk_t);
    reverse_rows(&t->other.dk_s);
    assert_close(t, &t->one.kl, &t->other.kl, 1e-4, "kl");
    assert_close(t, &t->one.lse_t, &t->other.lse_t, 1e-4, "lse_t");
    assert_close(t, &t->one.dq_s, &t->other.dq_s, gradient_difference(t, 1e-3), "dq_s");
    assert_close(t, &t->one.dk_t, &t->other.dk_t, gradient_difference(t, 1e-3), "dk_t");
    assert_close(t, &t->one.dk_s, &t->other.dk_s, gradient_difference(t, 1e-3), "dk_s");
}

/* With all keys of a side equal, dq is the key times the sum of the logit gradients of the row, which is 0. */
static const test_case equal_keys[] = {
    {"equal keys", SHAPE(1, 67, 131), TWO_MODELS},
    {"equal keys, reverse", SHAPE(1, 67, 131), TWO_MODELS, REVERSE},
};

static int is_almost_zero(double value)
{
    return fabs(value) < 1e-5;
}

static void check_sums_of_gradients(trial *t)
{
    for (int side = 0; side < 2; side++) {
        const test_tensor *const keys = side ? &t->f->k_s : &t->f->k_t;
        test_tensor random =
            tensor_create(keys->dtype, keys->batch, keys->heads, keys->length, keys->dim, LAYOUT_CONTIGUOUS);
        tensor_copy(&random, keys);
        for (int64_t n = 0; n < tensor_count(keys); n++)
            tensor_set(keys, n, tensor_get(keys, n % keys->dim));
        run_both(t->plan, t->f, &t->one);
        assert_elements(t, side ? &t->one.dq_s : &t->one.dq_t, is_almost_zero, "dq");
        tensor_copy(keys, &random);
        tensor_destroy(&random);
    }
}

static void check_zero_upstream(trial *t)
{
    tensor_set_all(&t->f->grad_kl, 0);
    run_both(t->plan, t->f, &t->one);
    assert_gradients_are_0(t, &t->one);
}

/* ---- Equivalent inputs ------------------------------------------------------------------------------------- */

/* Results have the same bits for every memory layout: a layout and a contiguous copy of it. */
#define LAID_OUT SHAPE(2, 37, 67), TWO_MODELS, .dtype_s = SKL_BF16, CAUSAL
static const test_case layouts[] = {
    {"length first", LAID_OUT, LAYOUT(LENGTH_FIRST)},
    {"sequence first", LAID_OUT, LAYOUT(SEQUENCE_FIRST)},
    {"heads first", LAID_OUT, LAYOUT(HEADS_FIRST)},
    {"gaps", LAID_OUT, LAYOUT(GAPS)},
    {"misaligned", LAID_OUT, LAYOUT(MISALIGNED)},
    {"free strides", LAID_OUT, LAYOUT(FREE_STRIDES)},
    {"expanded", SHAPE(2, 37, 67), HEADS(2, 2), DIMS(16, 16), LAYOUT(EXPANDED)},
    {"repeated", SHAPE(2, 37, 67), HEADS(2, 2), DIMS(16, 16), LAYOUT(REPEATED)},
    {"expanded, bf16", SHAPE(2, 37, 67), HEADS(2, 2), DIMS(16, 16), LAYOUT(EXPANDED), TYPES(BF16, BF16)},
    {"repeated, f16", SHAPE(2, 37, 67), HEADS(2, 2), DIMS(16, 16), LAYOUT(REPEATED), TYPES(F16, F16)},
};

/* Runs the same queries and upstream gradients with the keys of another case. */
static void run_copy(trial *t, const test_case *c, int64_t repeat_t, int64_t repeat_s)
{
    fixture copy;
    fixture_create(&copy, c);
    repeat_heads(&copy.k_t, &t->f->k_t, repeat_t), repeat_heads(&copy.k_s, &t->f->k_s, repeat_s);
    tensor_copy(&copy.q_t, &t->f->q_t), tensor_copy(&copy.q_s, &t->f->q_s);
    tensor_copy(&copy.grad_kl, &t->f->grad_kl);
    results_destroy(&t->other);
    t->other = results_create(&copy);
    run_kernel(&copy, t->kernel, 2, &t->other);
    fixture_destroy(&copy);
}

static void check_layout(trial *t)
{
    test_case contiguous = *t->f->test_case;
    contiguous.layout = LAYOUT_CONTIGUOUS;
    run_both(t->plan, t->f, &t->one);
    run_copy(t, &contiguous, 1, 1);
    assert_same_bits(t, "a contiguous copy");
}

/* A key head that query heads share gives the same results as copies of it. */
static const test_case shared_keys[] = {{"shared", SHAPE(1, 37, 67), HEADS(6, 6), KEY_HEADS(2, 3), DIMS(16, 16)}};

static void check_shared_keys(trial *t)
{
    test_case copied = *t->f->test_case;
    copied.key_heads_t = copied.key_heads_s = 0;
    run_both(t->plan, t->f, &t->one);
    run_copy(t, &copied, 3, 2);
    assert_true(tensor_equal(&t->one.kl, &t->other.kl));
    assert_true(tensor_equal(&t->one.dq_t, &t->other.dq_t));
    assert_true(tensor_equal(&t->one.dq_s, &t->other.dq_s));
}

/* ---- Low temperatures -------------------------------------------------------------------------------------- */

/* At such a low temperature, nearly every row is a single peak. Gradients exceed the range of f16. */
#define COLD SHAPE(1, 37, 131), DIMS(16, 16), SCALES(1000, 1000), .grad_f32 = 1
static const test_case cold[] = {
    {"cold", COLD, HEADS(2, 2)},
    {"cold, reverse", COLD, HEADS(2, 2), REVERSE},
    {"cold, teacher groups", COLD, HEADS(4, 2)},
    {"cold, teacher groups, reverse", COLD, HEADS(4, 2), REVERSE},
};

static void check_cold(trial *t)
{
    run_both(t->plan, t->f, &t->one);
    for (int64_t n = 0; n < tensor_count(&t->one.kl); n++) {
        const double exact = t->f->exact.kl[n];
        assert_true(fabs(tensor_get(&t->one.kl, n) - exact) <= 1e-3 * (1 + exact));
    }
    const test_tensor *const gradients[] = {&t->one.dq_t, &t->one.dk_t, &t->one.dq_s, &t->one.dk_s};
    for (size_t g = 0; g < COUNT_OF(gradients); g++)
        assert_elements(t, gradients[g], is_finite, "a gradient");
}

/* ---- Subsets of rows --------------------------------------------------------------------------------------- */

/* Each subset of the row results can be requested, with the same values. */
#define SOME_ROWS SHAPE(1, 37, 131), DIMS(16, 16), CAUSAL
static const test_case some_rows[] = {
    {"some rows", SOME_ROWS, HEADS(2, 2)},
    {"some rows, groups", SOME_ROWS, HEADS(4, 2)},
    {"some rows, wider LSE", SOME_ROWS, HEADS(4, 2), .lse = LSE_WIDER},
    {"some rows, indexer", SOME_ROWS, HEADS(4, 2), INDEXER(3), .lse = LSE_WIDER},
    {"some rows, sparse", SOME_ROWS, HEADS(4, 2), INDEXER(3), TOP_K(24), .lse = LSE_WIDER},
};

static void check_some_rows(trial *t)
{
    for (unsigned wanted = 0; wanted < 16; wanted++) {
        fixture_results some = t->one;
        test_tensor *const rows[] = {&some.kl, &some.lse_t, &some.lse_s,
                                     t->f->problem.index_heads ? &some.mass : &some.dot_t};
        some.cross_entropy.data = some.entropy.data = NULL;
        for (unsigned r = 0; r < COUNT_OF(rows); r++)
            if (!(wanted >> r & 1))
                rows[r]->data = NULL;
        const skl_rows outputs = results_rows(&some);
        results_poison(&t->one);
        run_forward(t->plan, &t->f->inputs, &outputs);
        assert_int_equal(rows_mismatch(t->f, &some, t->kernel), 0);
    }
}

/* ---- Teacher groups ------------------------------------------------------------------------------------------- */

/* A teacher head with a peak has small gradients: at the peak, phi - dot_h is far smaller than phi. dot_t has 2^-24
 * of phi, which the KL of peaks makes as large as 30; in reverse phi is of the order of 1. That is an error of the
 * gradient of a logit, so of a row its product with the scale and a key of about 3. Everything else is relative: two
 * logits of about 60 and sums of 97 terms have 220 times 2^-24; on GPUs, logit gradients may be rounded to f16. */
static void assert_small_error(const trial *t, const test_tensor *actual, const double *exact, const char *name)
{
    const skl_problem *const p = &t->f->problem;
    const double relative = p->dtype_t == SKL_F32 ? 220 * 0x1p-24 : 8e-3;
    const double phi = p->direction == SKL_KL_REVERSE ? 1 : 30;
    const double absolute = 0x1p-24 * phi * (double)p->scale_t * 3;
    for (int64_t row = 0; row < tensor_count(actual) / actual->dim; row++) {
        double largest = 0, error = 0;
        for (int64_t n = row * actual->dim; n < (row + 1) * actual->dim; n++) {
            largest = fmax(largest, fabs(exact[n]));
            error = fmax(error, fabs(tensor_get(actual, n) - exact[n]));
        }
        if (!(error <= relative * largest + absolute))
            trial_fail(t, "%s: row %d is wrong by %.2g where its largest element is %.2g", name, (int)row, error,
                       largest);
    }
}

static void check_small_teacher_gradients(trial *t)
{
    run_both(t->plan, t->f, &t->one);
    run_one_pass(t->plan, t->f, &t->one, &t->other);
    assert_small_error(t, &t->one.dq_t, t->f->exact.dq_t, "dq_t");
    assert_small_error(t, &t->one.dk_t, t->f->exact.dk_t, "dk_t");
    assert_small_error(t, &t->other.dq_t, t->f->exact.dq_t, "dq_t in one pass");
    assert_small_error(t, &t->other.dk_t, t->f->exact.dk_t, "dk_t in one pass");
}

static const test_case peaked_teachers[] = {
    {"peaks", SHAPE(1, 65, 97), HEADS(4, 2), DIMS(16, 16), SCALES(2, 0.3F), .unit_upstream = 1},
    {"peaks, reverse", SHAPE(1, 65, 97), HEADS(4, 2), DIMS(16, 16), SCALES(2, 0.3F), REVERSE, .unit_upstream = 1},
    {"peaks, f16", SHAPE(1, 65, 97), HEADS(4, 2), DIMS(16, 16), TYPES(F16, F16), SCALES(2, 0.3F), .grad_f32 = 1,
     .unit_upstream = 1},
    {"peaks, f16, reverse", SHAPE(1, 65, 97), HEADS(4, 2), DIMS(16, 16), TYPES(F16, F16), SCALES(2, 0.3F), REVERSE,
     .grad_f32 = 1, .unit_upstream = 1},
};

int main(void)
{
    const struct CMUnitTest tests[] = {
        TRIALS(small_teacher_gradients_of_groups, peaked_teachers, .prepare = fixture_solve,
               .check = check_small_teacher_gradients),
        TRIALS(equal_models_have_kl_0, twins, .every_kind = 1, .check = check_equal_models),
        TRIALS(equal_models_have_kl_0_in_one_pass, twins, .check = check_equal_models_in_one_pass),
        TRIALS(equal_heads_of_a_group_have_kl_0, equal_heads, .check = check_equal_heads),
        TRIALS(kl_is_never_negative, twins, .check = check_no_negative_kl),
        TRIALS(small_kl_stays_accurate, small_kl, .prepare = make_small_kl, .check = check_small_kl),
        TRIALS(an_lse_exact_in_f32_loses_nothing, integer_logits, .check = check_integer_lse),
        TRIALS(exponentials_are_rounded_once, two_keys, .check = check_exponentials),
        TRIALS(shifted_keys_change_nothing, shifted, .check = check_shifted_keys),
        TRIALS(order_of_keys_does_not_matter, reordered, .check = check_reordered_keys),
        TRIALS(logit_gradients_sum_to_0, equal_keys, .check = check_sums_of_gradients),
        TRIALS(upstream_gradient_0_gives_gradient_0, twins, .check = check_zero_upstream),
        TRIALS(layouts_give_the_same_bits, layouts, .check = check_layout),
        TRIALS(shared_key_heads_equal_their_copies, shared_keys, .check = check_shared_keys),
        TRIALS(low_temperatures_stay_finite, cold, .every_type = 1, .prepare = fixture_solve, .check = check_cold),
        TRIALS(rows_can_be_requested_one_by_one, some_rows, .every_type = 1, .prepare = fixture_solve,
               .check = check_some_rows),
    };
    return test_run("properties", tests, COUNT_OF(tests));
}
