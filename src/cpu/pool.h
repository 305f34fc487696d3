/* A process-wide pool of helper threads. A pool of our own, not OpenMP: it starts nothing at load time, does not meet
 * the OpenMP runtime that a host program (PyTorch, say) brings along, survives fork() and is clean under TSan. */
#ifndef SKL_CPU_POOL_H
#define SKL_CPU_POOL_H

enum { SKL_THREADS_MAX = 1024 };

typedef void (*skl_work)(void *context, int worker);

/* Starts helpers so that `threads` workers, the caller included, can run. Fewer may come up; that costs only speed.
 */
void skl_pool_reserve(int threads);

/* Calls work(context, w) on the calling thread (w = 0) and on up to threads - 1 idle helpers (w = 1, 2, ...), each w
 * at most once, and returns when all of them have. Helpers that are busy are not waited for, so work() must share
 * out its items dynamically. Never allocates. */
void skl_pool_run(int threads, skl_work work, void *context);

#endif
