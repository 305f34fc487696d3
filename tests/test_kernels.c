/* Compares every usable kernel with the oracle, on every case of the table and on random cases. */
#include "kernel_check.h"

#include <stdlib.h>

#include "runner.h"

static void test_one_case(void **state)
{
    fixture f;
    fixture_create(&f, *state);
    fixture_solve(&f);
    check_options options = check_options_default();
    options.in_place = f.test_case->lse != LSE_COMPUTED;
    int mismatches = 0;
    int32_t checked = 0;
    for (; problem_kernel(&f.problem, checked); checked++)
        mismatches += kernel_check(&f, problem_kernel(&f.problem, checked), &options);
    fixture_destroy(&f);
    assert_int_equal(mismatches, 0);
    if (checked == 0)
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
    const int64_t work = test_environment("SKL_TEST_WORK", INT64_MAX / MILLION);
    const size_t random_count = (size_t)test_environment("SKL_TEST_RANDOM", RANDOM_CASES) / sample;
    struct CMUnitTest *const tests = calloc(1 + test_case_count + random_count, sizeof *tests);
    random_case *const random_cases = calloc(random_count + 1, sizeof *random_cases);
    if (!tests || !random_cases)
        return 2;

    size_t count = 0;
    tests[count++] = (struct CMUnitTest)cmocka_unit_test(test_a_kernel_is_usable);
    for (size_t n = 0, small = 0; n < test_case_count; n++) {
        if (case_work(&test_cases[n]) > work * MILLION || small++ % sample != 0)
            continue;
        /* cmocka's state is not const, but no test writes to it */
        void *const one_case = (void *)(uintptr_t)&test_cases[n];
        tests[count++] = (struct CMUnitTest){test_cases[n].name, test_one_case, NULL, NULL, one_case};
    }
    for (size_t n = 0; n < random_count; n++) {
        case_draw(&random_cases[n], (int64_t)n);
        tests[count++] =
            (struct CMUnitTest){random_cases[n].name, test_one_case, NULL, NULL, &random_cases[n].test_case};
    }
    const int failures = test_run("kernels", tests, test_shard(tests, count));
    free(tests);
    free(random_cases);
    return failures;
}
