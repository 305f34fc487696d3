/* A process-wide pool of helper threads. Unlike OpenMP, it starts no thread at load time, does not interfere with the
 * OpenMP runtime of the host program (such as PyTorch), survives fork() and is clean under ThreadSanitizer. */
#ifndef SKL_CPU_POOL_H
#define SKL_CPU_POOL_H

enum { SKL_THREADS_MAX = 1024 };

typedef void (*skl_work)(void *context, int worker);

/* Starts helpers so that `threads` workers, including the caller, can run. With fewer helpers, calls are slower. */
void skl_pool_reserve(int threads);

/* Calls work(context, w) in the calling thread (w = 0) and in up to threads - 1 idle helpers (w = 1, 2, ...), each w
 * at most once, and returns when all calls have returned. It does not wait for busy helpers, so work() must
 * distribute its items dynamically. Never allocates. */
void skl_pool_run(int threads, skl_work work, void *context);

#endif
