/* Threads: results do not depend on their number, and plans can be shared between them. */
#define _DEFAULT_SOURCE /* fork, usleep */
#include "trial.h"

#include <dirent.h>
#include <pthread.h>
#include <stdio.h>
#include <stdlib.h>
#include <sys/wait.h>
#include <unistd.h>

#include "case_words.h"

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

static void check_thread_counts(trial *t)
{
    static const int32_t thread_counts[] = {2, 3, 7};
    skl_plan *const alone = test_plan(&t->f->problem, t->kernel, 1);
    fixture_results one_pass = results_create(t->f);
    run_both(alone, t->f, &t->one);
    run_one_pass(alone, t->f, &t->one, &one_pass);
    for (size_t n = 0; n < COUNT_OF(thread_counts); n++) {
        skl_plan *const plan = test_plan(&t->f->problem, t->kernel, thread_counts[n]);
        assert_int_equal(skl_plan_threads(plan), thread_counts[n]);
        run_both(plan, t->f, &t->other);
        assert_same_bits(t, "several threads");
        results_poison(&t->other);
        run_one_pass(plan, t->f, &t->one, &t->other);
        if (results_difference(&one_pass, &t->other))
            trial_fail(t, "one-pass with %d threads: %s differs", (int)thread_counts[n],
                       results_difference(&one_pass, &t->other));
        skl_plan_destroy(plan);
    }
    results_destroy(&one_pass);
    skl_plan_destroy(alone);
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

static const test_case shared[] = {
    {"shared", SHAPE(1, 200, 210), HEADS(4, 4), .key_heads_s = 2, DIMS(16, 16), CAUSAL},
};

static void check_shared_plan(trial *t)
{
    caller callers[CALLERS];
    run_both(t->plan, t->f, &t->one);
    for (int n = 0; n < CALLERS; n++) {
        callers[n] = (caller){.plan = t->plan, .fixture = t->f, .results = results_create(t->f)};
        assert_int_equal(pthread_create(&callers[n].thread, NULL, call_often, &callers[n]), 0);
    }
    for (int n = 0; n < CALLERS; n++) {
        pthread_join(callers[n].thread, NULL);
        assert_int_equal(callers[n].status, SKL_OK);
        assert_null(results_difference(&callers[n].results, &t->one));
        results_destroy(&callers[n].results);
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

/* A plan for three threads that reports its progress. */
static skl_plan *plan_with_progress(const fixture *f, const char *kernel, skl_progress progress, void *user)
{
    skl_options options = skl_options_default();
    options.kernel = kernel;
    options.threads = 3;
    options.progress = progress;
    options.progress_user = user;
    skl_plan *plan = NULL;
    assert_ok(skl_plan_create(&plan, &f->problem, &options));
    return plan;
}

static void check_progress(trial *t)
{
    progress_log log = {.caller = pthread_self()};
    skl_plan *const plan = plan_with_progress(t->f, t->kernel, log_progress, &log);
    const skl_rows rows = results_rows(&t->one);
    const skl_gradients gradients = results_gradients(&t->one);
    const skl_inputs known = results_backward_inputs(t->f, &t->one);
    for (int call = 0; call < 2; call++) {
        log.done = log.total = log.calls = 0;
        if (call == 0)
            run_forward(plan, &t->f->inputs, &rows);
        else
            run_backward(plan, &known, &gradients);
        assert_true(log.calls > 0);
        assert_int_equal(log.done, log.total);
        assert_int_equal(log.foreign_calls, 0);
        assert_int_equal(log.backward_steps, 0);
    }
    skl_plan_destroy(plan);
}

/* ---- Processes --------------------------------------------------------------------------------------------- */

static void assert_success(pid_t child)
{
    int status = -1;
    assert_int_equal(waitpid(child, &status, 0), child);
    assert_true(WIFEXITED(status) && WEXITSTATUS(status) == 0);
}

static const test_case forked[] = {{"fork", SHAPE(2, 300, 300), HEADS(4, 4), DIMS(16, 16)}};

/* A forked child has none of its parent's threads and must not wait for them. */
static void check_forked_child(trial *t)
{
    run_both(t->plan, t->f, &t->one);
    const pid_t child = fork();
    assert_true(child >= 0);
    if (child == 0) {
        run_both(t->plan, t->f, &t->other);
        _exit(results_difference(&t->one, &t->other) ? 1 : 0);
    }
    assert_success(child);
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
static void check_fork_in_a_call(trial *t)
{
    if (THREAD_SANITIZER || test_environment("SKL_TEST_EMULATED", 0))
        skip(); /* they allow no new thread after a fork with threads */
    fork_test test = {t->f, &t->one, 0};
    run_both(t->plan, t->f, &t->one);
    skl_plan *const plan = plan_with_progress(t->f, t->kernel, fork_once, &test);
    run_both(plan, t->f, &t->other);
    assert_true(test.child > 0);
    assert_success(test.child);
    assert_same_bits(t, "the parent");
    skl_plan_destroy(plan);
}

/* ---- Cancellation --------------------------------------------------------------------------------------------- */

static void set_flag(void *user, int64_t done, int64_t total)
{
    (void)done, (void)total;
    __atomic_store_n((int32_t *)user, 1, __ATOMIC_RELAXED);
}

/* A flag that is set during a call ends it; once it is cleared, calls of the plan are as before. */
static void check_cancellation(trial *t)
{
    int32_t cancel = 0;
    skl_options options = skl_options_default();
    options.kernel = t->kernel, options.threads = 1, options.cancel = &cancel;
    options.progress = set_flag, options.progress_user = &cancel;
    skl_plan *plan = NULL;
    assert_ok(skl_plan_create(&plan, &t->f->problem, &options));
    test_memory workspace = memory_create(skl_plan_workspace_size(plan, SKL_OP_FORWARD), SKL_WORKSPACE_ALIGNMENT);
    const skl_rows rows = results_rows(&t->one);
    const skl_status status = skl_forward(plan, &t->f->inputs, &rows, workspace.data, workspace.size, NULL);
    assert_int_equal(status, SKL_ERROR_CANCELLED);
    assert_string_equal(skl_last_error(), "cancelled: results are not complete");
    skl_plan_destroy(plan);
    cancel = 0;
    options.progress = NULL;
    assert_ok(skl_plan_create(&plan, &t->f->problem, &options));
    assert_ok(skl_forward(plan, &t->f->inputs, &rows, workspace.data, workspace.size, NULL));
    skl_plan_destroy(plan);
    memory_destroy(&workspace);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        TRIALS(bits_do_not_depend_on_thread_count, cases, .check = check_thread_counts, .sample = 3),
        TRIALS(a_plan_can_be_shared, shared, .check = check_shared_plan, .sample = 3),
        cmocka_unit_test(test_plans_can_be_created_in_any_thread),
        cmocka_unit_test(test_error_messages_are_per_thread),
        TRIALS(cancelled_calls_end, cases, .check = check_cancellation, .best_on_cpu = 1, .sample = 3),
        TRIALS(progress_reaches_the_total, cases, .check = check_progress, .best_on_cpu = 1, .sample = 3),
        TRIALS(a_forked_child_can_compute, forked, .check = check_forked_child, .best_on_cpu = 1),
        TRIALS(a_child_forked_in_a_call_goes_on, forked, .check = check_fork_in_a_call, .best_on_cpu = 1),
    };
    return test_run("threads", tests, COUNT_OF(tests));
}
