/* A pass of a call: select.c chooses it, schedule.c runs it. */
#ifndef SKL_CPU_PASS_H
#define SKL_CPU_PASS_H

#include "cpu/kernel.h"

/* One pass over the tiles of all heads. */
typedef struct skl_cpu_pass {
    void (*function)(const skl_task *task);
    bool over_keys;           /* one item per key tile, not per query tile */
    bool fused;               /* the pass over queries adds to the key gradients, too */
    bool one_pass;            /* the backward writes the KL of its rows, too */
    int64_t key_result_heads; /* over_keys: heads of the statistics per sequence; 0: key heads */
    const char *reason;
} skl_cpu_pass;

#endif
