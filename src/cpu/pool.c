#include "cpu/pool.h"

#include <pthread.h>
#include <stdbool.h>
#include <stddef.h>

/* One skl_pool_run, on its caller's stack. */
typedef struct job {
    skl_work work;
    void *context;
    int joined;      /* workers that have joined, including the caller */
    int workers_max; /* workers that may join */
    int running;     /* helpers inside work() */
    struct job *next;
} job;

static struct {
    pthread_mutex_t lock;
    pthread_cond_t has_job;  /* a job that workers may join, or stopping */
    pthread_cond_t has_left; /* a helper has left a job */
    job *jobs;               /* jobs that workers may join */
    pthread_t helpers[SKL_THREADS_MAX];
    int helper_count;
    bool stopping;
    bool fork_handled;
} pool = {
    .lock = PTHREAD_MUTEX_INITIALIZER, .has_job = PTHREAD_COND_INITIALIZER, .has_left = PTHREAD_COND_INITIALIZER};

static void remove_job(const job *removed)
{
    job **link = &pool.jobs;
    while (*link != NULL && *link != removed)
        link = &(*link)->next;
    if (*link != NULL)
        *link = removed->next;
}

static void *help(void *unused)
{
    (void)unused;
    pthread_mutex_lock(&pool.lock);
    while (!pool.stopping) {
        job *const joined = pool.jobs;
        if (joined == NULL) {
            pthread_cond_wait(&pool.has_job, &pool.lock);
            continue;
        }
        const int worker = joined->joined++;
        joined->running++;
        if (joined->joined == joined->workers_max)
            remove_job(joined);
        pthread_mutex_unlock(&pool.lock);
        joined->work(joined->context, worker);
        pthread_mutex_lock(&pool.lock);
        joined->running--;
        pthread_cond_broadcast(&pool.has_left);
    }
    pthread_mutex_unlock(&pool.lock);
    return NULL;
}

/* A forked child has none of its parent's helpers: it starts with an empty pool. */
static void forget_helpers(void)
{
    pthread_mutex_init(&pool.lock, NULL);
    pthread_cond_init(&pool.has_job, NULL);
    pthread_cond_init(&pool.has_left, NULL);
    pool.jobs = NULL;
    pool.helper_count = 0;
}

void skl_pool_reserve(int threads)
{
    pthread_mutex_lock(&pool.lock);
    if (!pool.fork_handled)
        pool.fork_handled = pthread_atfork(NULL, NULL, forget_helpers) == 0;
    while (pool.helper_count < threads - 1 && pool.helper_count < SKL_THREADS_MAX) {
        if (pthread_create(&pool.helpers[pool.helper_count], NULL, help, NULL) != 0)
            break;
        pool.helper_count++;
    }
    pthread_mutex_unlock(&pool.lock);
}

void skl_pool_run(int threads, skl_work work, void *context)
{
    if (threads <= 1) {
        work(context, 0);
        return;
    }
    job own = {.work = work, .context = context, .joined = 1, .workers_max = threads};
    pthread_mutex_lock(&pool.lock);
    own.next = pool.jobs;
    pool.jobs = &own;
    pthread_cond_broadcast(&pool.has_job);
    pthread_mutex_unlock(&pool.lock);

    work(context, 0);

    pthread_mutex_lock(&pool.lock);
    remove_job(&own);
    while (own.running > 0)
        pthread_cond_wait(&pool.has_left, &pool.lock);
    pthread_mutex_unlock(&pool.lock);
}

/* At exit and before the library is unloaded: no thread may stay inside it. */
__attribute__((destructor)) static void stop_helpers(void)
{
    pthread_mutex_lock(&pool.lock);
    pool.stopping = true;
    pthread_cond_broadcast(&pool.has_job);
    pthread_mutex_unlock(&pool.lock);
    for (int i = 0; i < pool.helper_count; i++)
        pthread_join(pool.helpers[i], NULL);
}
