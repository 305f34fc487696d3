/* Sharing a stage of a call out to threads. */
#ifndef SKL_CPU_STAGE_H
#define SKL_CPU_STAGE_H

#include "cpu/select.h"

/* A stage: one kernel function over the tiles of all heads.
 *
 * Tiles of heads that share keys form a chain: one after the other they add to the same key gradients. Chains run
 * side by side in waves of as many as there are threads, tile by tile, so that neighbouring items seldom share a
 * chain. */
typedef struct skl_stage {
    void (*function)(const skl_task *task);
    skl_task task; /* what all its tasks have in common */
    const skl_plan *plan;
    char *scratch;
    size_t scratch_size;
    int64_t tiles;       /* of a head */
    int64_t heads;       /* of a sequence */
    int64_t chain_heads; /* heads of a chain */
    int64_t item_count;
    _Atomic int64_t next, done;
    int64_t work_before, work_total; /* for progress, over all stages of a call */
} skl_stage;

/* Counters of a stage for `threads` threads: see turn.h. */
int64_t skl_turn_count(int threads);

/* Tasks of a pass: one per tile of every head. */
int64_t skl_pass_tasks(const skl_plan *plan, const skl_cpu_pass *pass);

/* Runs every task of a pass and returns when all are done. */
void skl_stage_run(skl_stage *s, const skl_cpu_pass *pass);

#endif
