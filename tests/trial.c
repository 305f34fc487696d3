#include "trial.h"

#include <math.h>
#include <stdio.h>

#include "device.h"

/* ---- Runs -------------------------------------------------------------------------------------------------- */

static const char *kernel_at(const trials *all, const fixture *f, int32_t index, int sampled)
{
    const int only_best = sampled || (all->best_on_cpu && test_device() == SKL_CPU);
    if (only_best && index > 0)
        return NULL;
    return all->attention ? attention_kernel(&f->problem, index) : problem_kernel(&f->problem, index);
}

static void run_trial(const trials *all, fixture *f, const char *kernel, int32_t kind)
{
    trial t = {.f = f, .kernel = kernel, .plan = test_plan_of_kind(&f->problem, kernel, kind)};
    t.one = results_create(f);
    t.other = results_create(f);
    all->check(&t);
    results_destroy(&t.one);
    results_destroy(&t.other);
    skl_plan_destroy(t.plan);
}

static void run_case(const trials *all, const test_case *c, int sampled)
{
    const int32_t kinds = all->every_kind ? test_plan_kinds() : 1;
    fixture f;
    fixture_create(&f, c);
    if (all->prepare)
        all->prepare(&f);
    for (int32_t n = 0; kernel_at(all, &f, n / kinds, sampled); n++) {
        run_trial(all, &f, kernel_at(all, &f, n / kinds, sampled), n % kinds);
        if (all->prepare == NULL) {
            fixture_destroy(&f);
            fixture_create(&f, c);
        }
    }
    fixture_destroy(&f);
}

void run_trials(void **state)
{
    const trials *const all = *state;
    const int sampled = all->sample > 1 && test_environment("SKL_TEST_SAMPLE", 1) > 1;
    if (all->only_cpu && test_device() != SKL_CPU)
        skip();
    for (size_t n = 0; n < all->count; n += sampled ? all->sample : 1) {
        test_case typed = all->cases[n];
        if (!all->every_type)
            run_case(all, &typed, sampled);
        for (int dtype = SKL_F32; all->every_type && dtype <= SKL_BF16; dtype++) {
            typed.dtype_t = typed.dtype_s = (skl_dtype)dtype;
            run_case(all, &typed, sampled);
        }
    }
}

void run_one_pass(const skl_plan *plan, const fixture *f, const fixture_results *lse, const fixture_results *results)
{
    const skl_inputs inputs = results_one_pass_inputs(f, lse);
    const skl_rows rows = results_one_pass_rows(f, results);
    const skl_gradients gradients = results_gradients(results);
    run_forward_backward(plan, &inputs, &rows, &gradients);
}

/* ---- Checks ------------------------------------------------------------------------------------------------ */

void trial_fail_at(const trial *t, const char *file, int line, const char *format, ...)
{
    char text[256];
    va_list arguments;
    va_start(arguments, format);
    vsnprintf(text, sizeof text, format, arguments);
    va_end(arguments);
    print_error("%s: %s: %s\n", t->f->test_case->name, t->kernel, text);
    _fail(file, line);
}

void assert_same_bits(const trial *t, const char *what)
{
    const char *const different = results_difference(&t->one, &t->other);
    if (different)
        trial_fail(t, "%s: %s differs", what, different);
}

void assert_exact(const trial *t, const fixture_results *results)
{
    const int mismatches =
        rows_mismatch(t->f, results, t->kernel) + gradients_mismatch(t->f, results, t->kernel, t->kernel);
    if (mismatches)
        trial_fail(t, "%d tensors differ from the oracle", mismatches);
}

void assert_elements(const trial *t, const test_tensor *tensor, int (*holds)(double), const char *what)
{
    for (int64_t n = 0; n < tensor_count(tensor); n++)
        if (!holds(tensor_get(tensor, n)))
            trial_fail(t, "%s[%lld] is %g", what, (long long)n, tensor_get(tensor, n));
}

void check_oracle(trial *t)
{
    run_both(t->plan, t->f, &t->one);
    assert_exact(t, &t->one);
}

int is_zero(double value)
{
    return value == 0;
}

int is_nan(double value)
{
    return isnan(value) != 0;
}

int is_finite(double value)
{
    return isfinite(value) != 0;
}

int is_not_finite(double value)
{
    return !isfinite(value);
}

int is_infinity(double value)
{
    return value == (double)INFINITY;
}

int is_minus_infinity(double value)
{
    return value == -(double)INFINITY;
}

int is_not_negative(double value)
{
    return value >= 0;
}
