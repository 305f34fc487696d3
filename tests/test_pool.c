/* The pool of helper threads: a child that is forked in the middle of a job, and a call that is cancelled in one. */
#define _DEFAULT_SOURCE /* fork, usleep */
#include "support.h"

#include <pthread.h>
#include <semaphore.h>
#include <stdatomic.h>
#include <stdlib.h>
#include <sys/wait.h>
#include <unistd.h>

#include "cpu/pool.h"

enum { TWO = 2 }; /* workers: the caller and one helper */

/* A job that keeps both workers until it is told to end. */
static sem_t begun, end;

static void hold(void *context, int worker)
{
    (void)context, (void)worker;
    sem_post(&begun);
    sem_wait(&end);
}

static void *hold_in_thread(void *unused)
{
    (void)unused;
    skl_pool_run(TWO, hold, NULL);
    return NULL;
}

static atomic_int helped, helped_parent;

static void count_helper(void *context, int worker)
{
    (void)context;
    helped += worker == 1;
    for (int n = 0; n < 1000 && !helped; n++)
        usleep(1000);
}

/* The child's helper takes part in jobs of the child, and in none that the parent has begun. */
_Noreturn static void go_on_in_child(void)
{
    enum { LONG_ENOUGH_US = 100000 };
    skl_pool_reserve(TWO);
    skl_pool_run(TWO, count_helper, NULL);
    usleep(LONG_ENOUGH_US);
    _exit(helped == 1 && helped_parent == 0 ? 0 : 1);
}

/* Forks in the caller. Its helper is busy, so the job still waits for one in the child. */
static void fork_in_job(void *context, int worker)
{
    if (worker == 1) {
        helped_parent++;
        return;
    }
    pid_t *const child = context;
    *child = fork();
    if (*child == 0)
        go_on_in_child();
}

static void test_a_child_leaves_the_jobs_of_its_parent(void **state)
{
    (void)state;
    if (THREAD_SANITIZER)
        skip(); /* it allows no new thread after a fork with threads */
    assert_int_equal(sem_init(&begun, 0, 0) | sem_init(&end, 0, 0), 0);
    skl_pool_reserve(TWO);
    pthread_t holder;
    assert_int_equal(pthread_create(&holder, NULL, hold_in_thread, NULL), 0);
    for (int worker = 0; worker < TWO; worker++)
        sem_wait(&begun);

    pid_t child = -1;
    skl_pool_run(TWO, fork_in_job, &child);
    assert_true(child > 0);
    int status = -1;
    assert_int_equal(waitpid(child, &status, 0), child);
    for (int worker = 0; worker < TWO; worker++)
        sem_post(&end);
    pthread_join(holder, NULL);
    assert_true(WIFEXITED(status) && WEXITSTATUS(status) == 0);
}

/* The flag of a cancelled call. The linker puts __wrap_skl_pool_run() in the place of skl_pool_run(). */
static int32_t cancel;

void __real_skl_pool_run(int threads, skl_work work, void *context);
void __wrap_skl_pool_run(int threads, skl_work work, void *context);

void __wrap_skl_pool_run(int threads, skl_work work, void *context)
{
    __real_skl_pool_run(threads, work, context);
    cancel = 0;
}

static void set_cancel(void *unused, int64_t done, int64_t total)
{
    (void)unused, (void)done, (void)total;
    cancel = 1;
}

/* Whoever ends several calls with one flag clears it when the first of them has ended. */
static void test_a_cleared_flag_completes_no_call(void **state)
{
    enum { HEADS = 4 };
    (void)state;
    skl_problem problem = skl_problem_default();
    problem.heads_t = problem.heads_s = HEADS;
    problem.len_q = problem.len_k = problem.dim_t = problem.dim_s = 1;
    skl_options options = skl_options_default();
    options.threads = 1, options.cancel = &cancel, options.progress = set_cancel;
    const float ones[HEADS] = {1, 1, 1, 1};
    float kl[HEADS];
    assert_int_equal(skl_attention_kl(&problem, &options, ones, ones, ones, ones, kl, NULL), SKL_ERROR_CANCELLED);
}

int main(void)
{
    const struct CMUnitTest tests[] = {cmocka_unit_test(test_a_child_leaves_the_jobs_of_its_parent),
                                       cmocka_unit_test(test_a_cleared_flag_completes_no_call)};
    return test_run("pool", tests, COUNT_OF(tests));
}
