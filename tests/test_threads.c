/* Threads: results do not depend on their number, and plans can be shared between them. */
#define _DEFAULT_SOURCE /* fork, usleep */
#include "runner.h"

#include <dirent.h>
#include <pthread.h>
#include <stdio.h>
#include <stdlib.h>
#include <sys/wait.h>
#include <unistd.h>

#include "case_words.h"

#if defined(__SANITIZE_THREAD__)
#define THREAD_SANITIZER 1
#elif defined(__has_feature)
#define THREAD_SANITIZER __has_feature(thread_sanitizer)
#else
#define THREAD_SANITIZER 0
#endif

/* Several query and key tiles per head, and several heads that add to one key head. */
#define LARGE SHAPE(2, 410, 421), DIMS(24, 16)

static const test_case cases[] = {
    {"plain", LARGE, HEADS(2, 2)},
    {"causal", LARGE, HEADS(2, 2), CAUSAL},
    {"window", LARGE, HEADS(2, 2), WINDOW(70, 30)},
    {"shared keys", LARGE, HEADS(4, 4), KEY_HEADS(2, 1), CAUSAL},
    {"bf16", LARGE, HEADS(2, 2), TYPES(BF16, BF16)},
    {"bf16 shared keys", LARGE, HEADS(4, 4), KEY_HEADS(1, 2), TYPES(BF16, BF16), CAUSAL},
    {"bf16, f32 gradients", LARGE, HEADS(4, 4), KEY_HEADS(2, 2), TYPES(BF16, BF16), .grad_f32 = 1},
    {"mixed types", LARGE, HEADS(2, 2), .dtype_t = SKL_F16},
    {"reverse", LARGE, HEADS(2, 2), REVERSE, CAUSAL},
    {"teacher groups", LARGE, HEADS(6, 3), KEY_HEADS(2, 1), CAUSAL},
    {"packed", PACKED(4, LENGTHS(0, 1, 250, 250, 700), LENGTHS(0, 200, 430, 440, 650)), TAILS(7, 3), HEADS(2, 2),
     DIMS(16, 16), CAUSAL},
    {"indexer", SHAPE(1, 410, 221), HEADS(2, 2), KEY_HEADS(1, 1), DIMS(16, 16), INDEXER(2), CAUSAL},
    {"indexer bf16", SHAPE(1, 210, 421), HEADS(2, 1), DIMS(16, 16), INDEXER(2), TYPES(BF16, BF16)},
    {"sparse indexer", SHAPE(1, 210, 221), HEADS(2, 2), KEY_HEADS(2, 1), DIMS(16, 16), INDEXER(2), TOP_K(30)},
};

/* Results of forward and backward, and of a one-pass call. */
typedef struct all_results {
    fixture_results two_calls, one_pass;
} all_results;

static all_results all_results_create(const fixture *f)
{
    return (all_results){results_create(f), results_create(f)};
}

static void all_results_destroy(all_results *results)
{
    results_destroy(&results->two_calls);
    results_destroy(&results->one_pass);
}

static void run_all(const skl_plan *plan, const fixture *f, const all_results *results)
{
    run_both(plan, f, &results->two_calls);
    skl_inputs inputs = f->inputs;
    inputs.lse_t = tensor_input(&results->two_calls.lse_t);
    inputs.lse_s = tensor_input(&results->two_calls.lse_s);
    skl_rows rows = results_rows(&results->one_pass);
    rows.lse_t.data = rows.lse_s.data = rows.mass.data = NULL;
    const skl_gradients gradients = results_gradients(&results->one_pass);
    run_forward_backward(plan, &inputs, &rows, &gradients);
}

/* The usable kernels; in sampled runs, which are many times slower, the best: all have the same schedule. */
static const char *threaded_kernel(int32_t index)
{
    const int sampled = test_environment("SKL_TEST_SAMPLE", 1) > 1;
    return sampled && index > 0 ? NULL : test_kernel(index);
}

static void test_bits_do_not_depend_on_thread_count(void **state)
{
    (void)state;
    static const int32_t thread_counts[] = {2, 3, 7};
    const size_t sample = test_environment("SKL_TEST_SAMPLE", 1) > 1 ? 3 : 1;
    for (size_t c = 0; c < COUNT_OF(cases); c += sample)
        for (int32_t k = 0; threaded_kernel(k); k++) {
            fixture f;
            fixture_create(&f, &cases[c]);
            all_results alone = all_results_create(&f);
            skl_plan *const one_thread = test_plan(&f.problem, threaded_kernel(k), 1);
            run_all(one_thread, &f, &alone);
            skl_plan_destroy(one_thread);
            for (size_t n = 0; n < COUNT_OF(thread_counts); n++) {
                all_results together = all_results_create(&f);
                skl_plan *const plan = test_plan(&f.problem, threaded_kernel(k), thread_counts[n]);
                assert_int_equal(skl_plan_threads(plan), thread_counts[n]);
                run_all(plan, &f, &together);
                const char *different = results_difference(&alone.two_calls, &together.two_calls);
                if (!different)
                    different = results_difference(&alone.one_pass, &together.one_pass);
                if (different)
                    fail_msg("%s: %s: %d threads give a different %s than one", cases[c].name, threaded_kernel(k),
                             (int)thread_counts[n], different);
                skl_plan_destroy(plan);
                all_results_destroy(&together);
            }
            all_results_destroy(&alone);
            fixture_destroy(&f);
        }
}

/* ---- Callers in several threads ---------------------------------------------------------------------------- */

enum { CALLERS = 4, CALLS = 5 };

typedef struct caller {
    pthread_t thread;
    const skl_plan *plan;
    const fixture *fixture;
    fixture_results results;
    skl_status status; /* of the first call that failed */
} caller;

/* No cmocka assertions outside the main thread, since they use longjmp. */
static void *call_often(void *context)
{
    caller *const c = context;
    const skl_rows rows = results_rows(&c->results);
    const skl_gradients gradients = results_gradients(&c->results);
    const skl_inputs known = results_backward_inputs(c->fixture, &c->results);
    const size_t size = skl_plan_workspace_size(c->plan, SKL_OP_FORWARD);
    const size_t size_backward = skl_plan_workspace_size(c->plan, SKL_OP_BACKWARD);
    const size_t largest = size > size_backward ? size : size_backward;
    void *const workspace = aligned_alloc(SKL_WORKSPACE_ALIGNMENT, (largest + 63) / 64 * 64);
    for (int n = 0; n < CALLS && c->status == SKL_OK; n++) {
        c->status = skl_forward(c->plan, &c->fixture->inputs, &rows, workspace, size, NULL);
        if (c->status == SKL_OK)
            c->status = skl_backward(c->plan, &known, &gradients, workspace, size_backward, NULL);
    }
    free(workspace);
    return NULL;
}

static void test_a_plan_can_be_shared(void **state)
{
    (void)state;
    static const test_case c = {"shared", SHAPE(1, 200, 210), HEADS(4, 4), .key_heads_s = 2, DIMS(16, 16), CAUSAL};
    for (int32_t k = 0; threaded_kernel(k); k++) {
        fixture f;
        fixture_create(&f, &c);
        skl_plan *const plan = test_plan(&f.problem, threaded_kernel(k), 2);
        fixture_results expected = results_create(&f);
        run_both(plan, &f, &expected);
        caller callers[CALLERS];
        for (int n = 0; n < CALLERS; n++) {
            callers[n] = (caller){.plan = plan, .fixture = &f, .results = results_create(&f)};
            assert_int_equal(pthread_create(&callers[n].thread, NULL, call_often, &callers[n]), 0);
        }
        for (int n = 0; n < CALLERS; n++) {
            pthread_join(callers[n].thread, NULL);
            assert_int_equal(callers[n].status, SKL_OK);
            assert_null(results_difference(&callers[n].results, &expected));
            results_destroy(&callers[n].results);
        }
        results_destroy(&expected);
        skl_plan_destroy(plan);
        fixture_destroy(&f);
    }
}

static void *create_plans(void *failures)
{
    for (int n = 0; n < 50; n++) {
        skl_problem problem = skl_problem_default();
        problem.len_q = problem.len_k = problem.dim_t = problem.dim_s = 4;
        skl_options options = skl_options_default();
        options.threads = 1 + n % 5;
        skl_plan *plan = NULL;
        if (skl_plan_create(&plan, &problem, &options) != SKL_OK)
            ++*(int *)failures;
        skl_plan_destroy(plan);
    }
    return NULL;
}

static void test_plans_can_be_created_in_any_thread(void **state)
{
    (void)state;
    pthread_t threads[CALLERS];
    int failures[CALLERS] = {0};
    for (int n = 0; n < CALLERS; n++)
        assert_int_equal(pthread_create(&threads[n], NULL, create_plans, &failures[n]), 0);
    for (int n = 0; n < CALLERS; n++) {
        pthread_join(threads[n], NULL);
        assert_int_equal(failures[n], 0);
    }
}

static void *fail_to_create_a_plan(void *message)
{
    skl_problem problem = skl_problem_default();
    skl_plan *plan;
    skl_plan_create(&plan, &problem, NULL);
    strncpy(message, skl_last_error(), 99);
    return NULL;
}

/* Each thread has its own error message. */
static void test_error_messages_are_per_thread(void **state)
{
    (void)state;
    skl_plan *plan;
    assert_refused(skl_plan_create(&plan, NULL, NULL), SKL_ERROR_ARGUMENT, "problem=NULL");
    pthread_t thread;
    char message[100] = "";
    assert_int_equal(pthread_create(&thread, NULL, fail_to_create_a_plan, message), 0);
    pthread_join(thread, NULL);
    assert_string_equal(message, "dim_t=0: must be 1..512");
    assert_non_null(strstr(skl_last_error(), "problem=NULL"));
}

/* ---- Progress ---------------------------------------------------------------------------------------------- */

typedef struct progress_log {
    pthread_t caller;
    int calls, foreign_calls, backward_steps;
    int64_t done, total;
} progress_log;

static void log_progress(void *user, int64_t done, int64_t total)
{
    progress_log *const log = user;
    log->calls++;
    log->foreign_calls += !pthread_equal(pthread_self(), log->caller);
    log->backward_steps += done < log->done || done > total || (log->total && total != log->total);
    log->done = done;
    log->total = total;
}

static void test_progress_reaches_the_total(void **state)
{
    (void)state;
    for (size_t c = 0; c < COUNT_OF(cases); c += 4)
        for (int32_t k = 0; threaded_kernel(k); k++) {
            fixture f;
            fixture_create(&f, &cases[c]);
            progress_log log = {.caller = pthread_self()};
            skl_options options = skl_options_default();
            options.kernel = threaded_kernel(k);
            options.threads = 3;
            options.progress = log_progress;
            options.progress_user = &log;
            skl_plan *plan;
            assert_ok(skl_plan_create(&plan, &f.problem, &options));
            fixture_results results = results_create(&f);
            const skl_rows rows = results_rows(&results);
            const skl_gradients gradients = results_gradients(&results);
            const skl_inputs known = results_backward_inputs(&f, &results);
            for (int call = 0; call < 2; call++) {
                log.done = log.total = log.calls = 0;
                if (call == 0)
                    run_forward(plan, &f.inputs, &rows);
                else
                    run_backward(plan, &known, &gradients);
                assert_true(log.calls > 0);
                assert_int_equal(log.done, log.total);
                assert_int_equal(log.foreign_calls, 0);
                assert_int_equal(log.backward_steps, 0);
            }
            results_destroy(&results);
            skl_plan_destroy(plan);
            fixture_destroy(&f);
        }
}

/* ---- Processes --------------------------------------------------------------------------------------------- */

/* A forked child has none of its parent's threads and must not wait for them. */
static void test_a_forked_child_can_compute(void **state)
{
    (void)state;
    static const test_case c = {"fork", SHAPE(1, 300, 300), HEADS(2, 2), DIMS(16, 16)};
    fixture f;
    fixture_create(&f, &c);
    skl_plan *const plan = test_plan(&f.problem, NULL, 3);
    fixture_results expected = results_create(&f), results = results_create(&f);
    run_both(plan, &f, &expected);
    const pid_t child = fork();
    assert_true(child >= 0);
    if (child == 0) {
        run_both(plan, &f, &results);
        _exit(results_difference(&results, &expected) ? 1 : 0);
    }
    int status = -1;
    assert_int_equal(waitpid(child, &status, 0), child);
    assert_true(WIFEXITED(status) && WEXITSTATUS(status) == 0);
    results_destroy(&expected);
    results_destroy(&results);
    skl_plan_destroy(plan);
    fixture_destroy(&f);
}

/* Number of threads of this process; 0: unknown. */
static int thread_count(void)
{
    DIR *const tasks = opendir("/proc/self/task");
    int count = 0;
    while (tasks && readdir(tasks))
        count++;
    if (tasks)
        closedir(tasks);
    return count > 2 ? count - 2 : 0; /* without "." and ".." */
}

/* What a child does that was forked in the middle of a call: it starts threads, computes with them and exits. */
typedef struct fork_test {
    const fixture *f;
    const fixture_results *expected;
    pid_t child;
} fork_test;

_Noreturn static void go_on_in_child(const fork_test *t)
{
    enum { THREADS = 4, SECONDS_MAX = 60, RUNS = 20 };
    alarm(SECONDS_MAX); /* a wait for a thread of the parent would not end */
    const int before = thread_count();
    skl_plan *const plan = test_plan(&t->f->problem, NULL, THREADS);
    int failures = before != 0 && (before != 1 || thread_count() != THREADS);
    for (int n = 0; n < RUNS; n++) {
        fixture_results results = results_create(t->f);
        run_both(plan, t->f, &results);
        failures += results_difference(&results, t->expected) != NULL;
        results_destroy(&results);
    }
    skl_plan_destroy(plan);
    exit(failures ? 1 : 0); /* joins the threads of the child */
}

static void fork_once(void *user, int64_t done, int64_t total)
{
    (void)done, (void)total;
    fork_test *const t = user;
    if (t->child != 0)
        return;
    fflush(NULL);
    t->child = fork();
    if (t->child == 0)
        go_on_in_child(t);
}

/* The child starts with an empty pool, even if the parent forked while its helpers were at work. */
static void test_a_child_forked_in_a_call_goes_on(void **state)
{
    (void)state;
    if (THREAD_SANITIZER || test_environment("SKL_TEST_EMULATED", 0))
        skip(); /* they allow no new thread after a fork with threads */
    static const test_case c = {"fork in a call", SHAPE(2, 300, 300), HEADS(4, 4), DIMS(16, 16)};
    fixture f;
    fixture_create(&f, &c);
    fixture_results expected = results_create(&f), results = results_create(&f);
    run_kernel(&f, NULL, 3, &expected);
    fork_test t = {&f, &expected, 0};
    skl_options options = skl_options_default();
    options.threads = 3;
    options.progress = fork_once;
    options.progress_user = &t;
    skl_plan *plan = NULL;
    assert_ok(skl_plan_create(&plan, &f.problem, &options));
    run_both(plan, &f, &results);
    assert_true(t.child > 0);
    int status = -1;
    assert_int_equal(waitpid(t.child, &status, 0), t.child);
    assert_true(WIFEXITED(status) && WEXITSTATUS(status) == 0);
    assert_null(results_difference(&results, &expected));
    skl_plan_destroy(plan);
    results_destroy(&expected);
    results_destroy(&results);
    fixture_destroy(&f);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_bits_do_not_depend_on_thread_count),
        cmocka_unit_test(test_a_plan_can_be_shared),
        cmocka_unit_test(test_plans_can_be_created_in_any_thread),
        cmocka_unit_test(test_error_messages_are_per_thread),
        cmocka_unit_test(test_progress_reaches_the_total),
        cmocka_unit_test(test_a_forked_child_can_compute),
        cmocka_unit_test(test_a_child_forked_in_a_call_goes_on),
    };
    return test_run("threads", tests, COUNT_OF(tests));
}
