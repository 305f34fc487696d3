/* skl_attention_stats: the case table and random cases on every kernel against the oracle, properties that hold
 * whatever the oracle says, and what it refuses. */
#include "runner.h"

#include <math.h>
#include <stdio.h>
#include <stdlib.h>

#include "case_words.h"
#include "device.h"
#include "edit.h"
#include "stats_check.h"

/* The oracle keeps the whole matrix. */
enum { PAIRS_MAX = 4 * MILLION };

static int is_small(const test_case *c)
{
    const skl_problem p = case_problem(c);
    return p.batch * p.heads_s * p.len_q * p.len_k <= PAIRS_MAX;
}

/* ---- Against the oracle ---------------------------------------------------------------------------------------- */

static int check_kernel(const stats_setup *setup, stats_kind kind, const char *kernel, int32_t threads)
{
    char label[160];
    snprintf(label, sizeof label, "%s: %s: statistics %d", setup->f->test_case->name, kernel, (int)kind);
    skl_problem problem = setup->f->problem;
    problem.gradients = 0;
    skl_plan *const plan = test_plan(&problem, kernel, threads);
    stats_results results = stats_results_create(setup);
    const uint32_t bits = stats_requested(setup, kind);
    const skl_stats stats = stats_of(setup, &results, bits);
    const int wrong = stats_run(plan, setup, &stats) ? stats_mismatch(setup, &results, bits, label) : 0;
    stats_results_destroy(&results);
    skl_plan_destroy(plan);
    return wrong;
}

static void test_one_case(void **state)
{
    const test_case *const c = *state;
    fixture f;
    fixture_create(&f, c);
    int wrong = 0;
    for (int kind = STATS_PLAIN; kind < STATS_KINDS; kind++) {
        stats_setup setup = stats_setup_create(&f, (stats_kind)kind);
        for (int32_t n = 0; case_kernel(c, n) != NULL; n++)
            wrong += check_kernel(&setup, (stats_kind)kind, case_kernel(c, n), 1 + kind);
        stats_setup_destroy(&setup);
    }
    fixture_destroy(&f);
    assert_int_equal(wrong, 0);
}

int main(void)
{
    const int64_t sample = test_environment("SKL_TEST_SAMPLE", 1), work = test_environment("SKL_TEST_WORK", 1000);
    const size_t random_count = (size_t)(test_environment("SKL_TEST_RANDOM", 200) / sample);
    random_case *const drawn = calloc(2 * random_count + 1, sizeof *drawn);
    struct CMUnitTest *const tests = calloc(test_case_count + 2 * random_count + 1, sizeof *tests);
    if (drawn == NULL || tests == NULL)
        return 2;
    size_t count = 0, small = 0;
    for (size_t n = 0; n < test_case_count; n++) {
        const test_case *const c = &test_cases[n];
        if (c->index_heads > 0 || !is_small(c) || case_work(c) > work * MILLION || small++ % (size_t)sample != 0)
            continue;
        tests[count++] = (struct CMUnitTest){c->name, test_one_case, NULL, NULL, (void *)(uintptr_t)c};
    }
    for (size_t n = 0; n < 2 * random_count; n++) {
        if (n % 2)
            case_draw(&drawn[n], (int64_t)n);
        else
            case_draw_wide(&drawn[n], (int64_t)n, n % 10 == 0);
        const test_case *const c = &drawn[n].test_case;
        if (c->index_heads == 0 && is_small(c))
            tests[count++] = (struct CMUnitTest){drawn[n].name, test_one_case, NULL, NULL, (void *)(uintptr_t)c};
    }
    const int failures = test_run("stats", tests, count);
    free(tests);
    free(drawn);
    return failures;
}
