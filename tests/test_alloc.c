/* Allocations: each of them fails once, none leaks, and run calls make none.
 *
 * Links the static library with --wrap for every function below. */
#include "trial.h"

#include <errno.h>
#include <pthread.h>
#include <stdatomic.h>
#include <stdlib.h>

#include "case_words.h"

/* ---- The faults -------------------------------------------------------------------------------------------- */

/* Helper threads may allocate too, so everything here is atomic. */
static atomic_int allocation_count; /* since the last reset */
static atomic_int allocations_live; /* made minus freed */
static atomic_int failing_from;     /* this allocation and all later ones fail; 0: none fails */
static atomic_int threads_fail;

static int allocation_fails(void)
{
    const int number = atomic_fetch_add(&allocation_count, 1) + 1;
    return atomic_load(&failing_from) != 0 && number >= atomic_load(&failing_from);
}

static void *counted(void *memory)
{
    if (memory)
        atomic_fetch_add(&allocations_live, 1);
    return memory;
}

static void reset_faults(int first_failure)
{
    atomic_store(&allocation_count, 0);
    atomic_store(&failing_from, first_failure);
}

void *__real_malloc(size_t size);
void *__real_calloc(size_t count, size_t size);
void *__real_realloc(void *memory, size_t size);
void *__real_aligned_alloc(size_t alignment, size_t size);
int __real_posix_memalign(void **memory, size_t alignment, size_t size);
void __real_free(void *memory);
int __real_pthread_create(pthread_t *thread, const pthread_attr_t *attributes, void *(*start)(void *),
                          void *argument);

void *__wrap_malloc(size_t size);
void *__wrap_calloc(size_t count, size_t size);
void *__wrap_realloc(void *memory, size_t size);
void *__wrap_aligned_alloc(size_t alignment, size_t size);
int __wrap_posix_memalign(void **memory, size_t alignment, size_t size);
void __wrap_free(void *memory);
int __wrap_pthread_create(pthread_t *thread, const pthread_attr_t *attributes, void *(*start)(void *),
                          void *argument);

void *__wrap_malloc(size_t size)
{
    return allocation_fails() ? NULL : counted(__real_malloc(size));
}

void *__wrap_calloc(size_t count, size_t size)
{
    return allocation_fails() ? NULL : counted(__real_calloc(count, size));
}

void *__wrap_realloc(void *memory, size_t size)
{
    if (allocation_fails())
        return NULL;
    void *const moved = __real_realloc(memory, size);
    return memory ? moved : counted(moved);
}

void *__wrap_aligned_alloc(size_t alignment, size_t size)
{
    return allocation_fails() ? NULL : counted(__real_aligned_alloc(alignment, size));
}

int __wrap_posix_memalign(void **memory, size_t alignment, size_t size)
{
    if (allocation_fails())
        return ENOMEM;
    const int error = __real_posix_memalign(memory, alignment, size);
    if (!error)
        counted(*memory);
    return error;
}

void __wrap_free(void *memory)
{
    if (memory)
        atomic_fetch_sub(&allocations_live, 1);
    __real_free(memory);
}

int __wrap_pthread_create(pthread_t *thread, const pthread_attr_t *attributes, void *(*start)(void *), void *argument)
{
    return atomic_load(&threads_fail) ? EAGAIN : __real_pthread_create(thread, attributes, start, argument);
}

/* ---- Tests ------------------------------------------------------------------------------------------------- */

static const test_case cases[] = {
    {"plain", SHAPE(2, 300, 210), HEADS(2, 2), DIMS(16, 16), CAUSAL},
    {"bf16", SHAPE(1, 300, 210), HEADS(4, 4), KEY_HEADS(2, 1), DIMS(16, 16), TYPES(BF16, BF16)},
    {"teacher groups", SHAPE(1, 300, 210), HEADS(4, 2), DIMS(16, 16)},
    {"packed", PACKED(2, LENGTHS(0, 150, 300), LENGTHS(0, 10, 210)), HEADS(2, 2), DIMS(16, 16), TAILS(3, 3), REVERSE},
};

/* Runs first, while the pool has no helpers: the calling thread then does all the work. */
static void test_no_thread_can_be_started(void **state)
{
    (void)state;
    fixture f;
    fixture_create(&f, &cases[0]);
    fixture_solve(&f);
    fixture_results results = results_create(&f);
    atomic_store(&threads_fail, 1);
    run_kernel(&f, NULL, 5, &results);
    atomic_store(&threads_fail, 0);
    assert_int_equal(rows_mismatch(&f, &results, "alone") + gradients_mismatch(&f, &results, test_kernel(0), "alone"),
                     0);
    results_destroy(&results);
    fixture_destroy(&f);
}

static void test_each_allocation_fails_once(void **state)
{
    (void)state;
    for (size_t c = 0; c < COUNT_OF(cases); c++) {
        const skl_problem problem = case_problem(&cases[c]);
        int first_failure = 0;
        skl_status status = SKL_ERROR_MEMORY;
        while (status != SKL_OK) {
            skl_plan *plan = NULL;
            const int live_before = atomic_load(&allocations_live);
            reset_faults(++first_failure);
            status = skl_plan_create(&plan, &problem, NULL);
            reset_faults(0);
            if (status != SKL_OK) {
                assert_refused(status, SKL_ERROR_MEMORY, "could not be allocated");
                assert_null(plan);
            }
            skl_plan_destroy(plan);
            assert_int_equal(atomic_load(&allocations_live), live_before);
            assert_true(first_failure < 100);
        }
        assert_true(first_failure > 1); /* a plan is at least one allocation */
    }
}

/* The simple API allocates a plan and a workspace, and frees both, also where one of them fails. */
static void test_the_simple_api_frees_what_it_allocates(void **state)
{
    (void)state;
    static float q[4][4], kl[4], dq[4][4];
    skl_problem problem = skl_problem_default();
    problem.len_q = problem.len_k = problem.dim_t = problem.dim_s = 4;
    skl_options options = skl_options_default();
    options.threads = 1;
    skl_status status = SKL_ERROR_MEMORY;
    int first_failure = 1;
    for (; status != SKL_OK; first_failure++) {
        const int live_before = atomic_load(&allocations_live);
        reset_faults(first_failure);
        status = skl_attention_kl_backward(&problem, &options, q, q, q, q, NULL, kl, dq, NULL, NULL);
        reset_faults(0);
        if (status != SKL_OK)
            assert_refused(status, SKL_ERROR_MEMORY, "could not be allocated");
        assert_int_equal(atomic_load(&allocations_live), live_before);
        assert_true(first_failure < 100);
    }
    assert_true(first_failure > 3); /* the plan and the workspace failed once each */
}

/* No thread allocates, so no allocation can fail. */
static void check_no_allocation(trial *t)
{
    skl_plan *const plan = test_plan(&t->f->problem, t->kernel, 3);
    skl_row_state *const states = states_create(t->f), *const more_states = states_create(t->f);
    const skl_rows rows = results_rows(&t->one);
    const skl_gradients gradients = results_gradients(&t->other);
    const skl_inputs known = results_backward_inputs(t->f, &t->one);
    skl_rows finish_rows = results_rows(&t->other);
    finish_rows.dot_t.data = NULL;

    reset_faults(1);
    run_forward(plan, &t->f->inputs, &rows);
    run_backward(plan, &known, &gradients);
    run_one_pass(plan, t->f, &t->one, &t->other);
    run_partial(plan, &known, 0, 100, states);
    run_partial(plan, &known, 100, 210, more_states);
    run_merge(plan, states, more_states);
    run_finish(plan, &known, states, &finish_rows);
    const int allocations = atomic_load(&allocation_count);
    reset_faults(0);
    assert_int_equal(allocations, 0);

    states_destroy(states);
    states_destroy(more_states);
    skl_plan_destroy(plan);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_no_thread_can_be_started),
        cmocka_unit_test(test_each_allocation_fails_once),
        cmocka_unit_test(test_the_simple_api_frees_what_it_allocates),
        TRIALS(run_calls_allocate_nothing, cases, .check = check_no_allocation),
    };
    return test_run("alloc", tests, COUNT_OF(tests));
}
