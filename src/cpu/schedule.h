/* Distributes the tiles of a pass over threads. */
#ifndef SKL_CPU_SCHEDULE_H
#define SKL_CPU_SCHEDULE_H

#include "cpu/kernel.h"

/* One pass over the tiles of all heads, which select.c chooses. */
typedef struct skl_cpu_pass {
    void (*function)(const skl_task *task);
    bool over_keys;           /* one item per key tile, not per query tile */
    bool fused;               /* the pass over queries adds to the key gradients, too */
    bool one_pass;            /* the backward writes the KL of its rows, too */
    int64_t key_result_heads; /* over_keys: heads of the statistics per sequence; 0: key heads */
    const char *reason;
} skl_cpu_pass;

/* A pass calls one kernel function for every tile of every head: an item.
 *
 * The items of heads that share keys form a chain: they add to the same key gradients one after another. Chains run
 * in waves, one chain per thread, and consecutive items belong to different chains of a wave, so that they seldom
 * wait for each other. */
typedef struct skl_schedule {
    void (*function)(const skl_task *task);
    skl_task task; /* common to all items */
    const skl_plan *plan;
    char *scratch;
    size_t scratch_size;
    float *key_sums;     /* one set per worker */
    int64_t tiles;       /* per head */
    int64_t heads;       /* per sequence */
    int64_t chain_heads; /* heads per chain */
    int64_t item_count;
    _Atomic int64_t next, done;
    int64_t work_before, work_total; /* work for progress, over all passes of a call */
} skl_schedule;

/* Number of counters for `threads` threads: see ordered_sum.h. */
int64_t skl_ordered_sum_count(int threads);

/* Sets of key_sums that a pass over the queries uses at the same time: one per chain. */
int64_t skl_key_sums_count(const skl_problem *problem, int32_t workers);

/* Number of items of a pass. */
int64_t skl_pass_items(const skl_plan *plan, const skl_cpu_pass *pass);

/* Runs every item of a pass and returns when all are done. Returns false if the plan's calls are cancelled. */
bool skl_schedule_run(skl_schedule *s, const skl_cpu_pass *pass);

#endif
