/* Compares every usable kernel with the oracle, on every case of the table and on random cases. */
#include "runner.h"

#include "device.h"

#include <stdio.h>
#include <stdlib.h>

/* One kernel on one case. */
typedef struct kernel_run {
    const fixture *fixture;
    skl_plan *plan;
    fixture_results saved;   /* row results of the forward, which the other calls read */
    fixture_results results; /* of the current call */
    char label[128];
} kernel_run;

static const char *begin_call(kernel_run *run, const char *call)
{
    snprintf(run->label, sizeof run->label, "%s: %s: %s", run->fixture->test_case->name, skl_plan_kernel(run->plan),
             call);
    results_poison(&run->results);
    return run->label;
}

static int check_forward(kernel_run *run)
{
    const char *const label = begin_call(run, "forward");
    const skl_rows rows = results_rows(&run->saved);
    run_forward(run->plan, &run->fixture->inputs, &rows);
    return rows_mismatch(run->fixture, &run->saved, label);
}

static int check_backward(kernel_run *run)
{
    const char *const label = begin_call(run, "backward");
    const skl_inputs inputs = results_backward_inputs(run->fixture, &run->saved);
    const skl_gradients gradients = results_gradients(&run->results);
    run_backward(run->plan, &inputs, &gradients);
    return gradients_mismatch(run->fixture, &run->results, skl_plan_kernel(run->plan), label);
}

static int check_forward_backward(kernel_run *run)
{
    const char *const label = begin_call(run, "forward_backward");
    skl_inputs inputs = run->fixture->inputs;
    inputs.lse_t = tensor_input(&run->saved.lse_t);
    inputs.lse_s = tensor_input(&run->saved.lse_s);
    fixture_results wanted = run->results;
    wanted.lse_t.data = wanted.lse_s.data = wanted.mass.data = NULL;
    if (run->fixture->test_case->lse == LSE_WIDER) /* these need the LSE that includes hidden keys */
        wanted.dot_t.data = wanted.dq_t.data = wanted.dk_t.data = NULL;
    const skl_rows rows = results_rows(&wanted);
    const skl_gradients gradients = results_gradients(&wanted);
    run_forward_backward(run->plan, &inputs, &rows, &gradients);
    return rows_mismatch(run->fixture, &wanted, label) +
           gradients_mismatch(run->fixture, &wanted, skl_plan_kernel(run->plan), label);
}

/* Three key ranges, some possibly empty, merged in any order. */
static int check_partial(kernel_run *run)
{
    enum { RANGES = 3 };
    const fixture *const f = run->fixture;
    const char *const label = begin_call(run, "partial");
    test_random random = random_for(label);
    int64_t cuts[RANGES + 1] = {0, 0, 0, f->problem.len_k};
    cuts[1] = random_between(&random, 0, f->problem.len_k);
    cuts[2] = random_between(&random, cuts[1], f->problem.len_k);
    skl_inputs inputs = f->inputs;
    if (f->test_case->lse == LSE_COMPUTED)
        inputs.lse_t = tensor_input(&run->saved.lse_t);

    skl_row_state *states[RANGES];
    for (int n = 0; n < RANGES; n++) {
        states[n] = states_create(f);
        run_partial(run->plan, &inputs, cuts[n], cuts[n + 1], states[n]);
    }
    const int64_t first = random_between(&random, 0, RANGES - 1);
    for (int n = 1; n < RANGES; n++)
        assert_ok(skl_states_merge(run->plan, states[first], states[(first + n) % RANGES], NULL));

    fixture_results wanted = run->results;
    wanted.dot_t.data = wanted.cross_entropy.data = wanted.entropy.data = wanted.mass.data = NULL;
    const skl_rows rows = results_rows(&wanted);
    assert_ok(skl_states_finish(run->plan, &inputs, states[first], &rows, NULL));
    device_wait();
    for (int n = 0; n < RANGES; n++)
        states_destroy(states[n]);
    return rows_mismatch(f, &wanted, label);
}

/* Gradients of a deterministic plan: correct, and with the same bits in a second run. */
static int check_deterministic(kernel_run *run)
{
    const char *const label = begin_call(run, "deterministic");
    run_both(run->plan, run->fixture, &run->results);
    run_both(run->plan, run->fixture, &run->saved);
    int mismatches = gradients_mismatch(run->fixture, &run->results, skl_plan_kernel(run->plan), label);
    const char *const different = results_difference(&run->results, &run->saved);
    if (different) {
        print_error("%s: %s differs between two runs\n", label, different);
        mismatches++;
    }
    return mismatches + check_forward_backward(run);
}

static int check_kernel(const fixture *f, const char *kernel)
{
    kernel_run run = {.fixture = f, .plan = test_plan(&f->problem, kernel, 2)};
    run.saved = results_create(f);
    run.results = results_create(f);
    int mismatches = check_forward(&run); /* must run first: the others read its results */
    mismatches += check_backward(&run);
    mismatches += check_forward_backward(&run);
    mismatches += check_partial(&run);
    for (int32_t kind = 1; kind < test_plan_kinds(); kind++) {
        skl_plan_destroy(run.plan);
        run.plan = test_plan_of_kind(&f->problem, kernel, kind);
        mismatches += check_deterministic(&run);
    }
    results_destroy(&run.saved);
    results_destroy(&run.results);
    skl_plan_destroy(run.plan);
    return mismatches;
}

static void test_one_case(void **state)
{
    fixture f;
    fixture_create(&f, *state);
    fixture_solve(&f);
    int mismatches = 0;
    int32_t count = 0;
    for (; problem_kernel(&f.problem, count); count++)
        mismatches += check_kernel(&f, problem_kernel(&f.problem, count));
    fixture_destroy(&f);
    assert_int_equal(mismatches, 0);
    if (count == 0)
        skip(); /* SKL_TEST_KERNELS excludes all kernels of this case */
}

static void test_a_kernel_is_usable(void **state)
{
    (void)state;
    assert_non_null(test_kernel(0));
}

/* Default of SKL_TEST_RANDOM. */
enum { RANDOM_CASES = 60 };

int main(void)
{
    const size_t sample = (size_t)test_environment("SKL_TEST_SAMPLE", 1);
    const size_t random_count = (size_t)test_environment("SKL_TEST_RANDOM", RANDOM_CASES) / sample;
    const size_t table_count = (test_case_count + sample - 1) / sample;
    struct CMUnitTest *const tests = calloc(1 + table_count + random_count, sizeof *tests);
    random_case *const random_cases = calloc(random_count + 1, sizeof *random_cases);
    if (!tests || !random_cases)
        return 2;

    size_t count = 0;
    tests[count++] = (struct CMUnitTest)cmocka_unit_test(test_a_kernel_is_usable);
    for (size_t n = 0; n < test_case_count; n += sample) {
        /* cmocka's state is not const, but no test writes to it */
        void *const one_case = (void *)(uintptr_t)&test_cases[n];
        tests[count++] = (struct CMUnitTest){test_cases[n].name, test_one_case, NULL, NULL, one_case};
    }
    for (size_t n = 0; n < random_count; n++) {
        case_draw(&random_cases[n], (int64_t)n);
        tests[count++] =
            (struct CMUnitTest){random_cases[n].name, test_one_case, NULL, NULL, &random_cases[n].test_case};
    }
    const int failures = test_run("kernels", tests, count);
    free(tests);
    free(random_cases);
    return failures;
}
