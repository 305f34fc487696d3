/* What every CPU kernel provides: the work on one tile of queries or keys. The backend shares tiles out to threads.
 */
#ifndef SKL_CPU_KERNEL_H
#define SKL_CPU_KERNEL_H

#include <stdbool.h>

#include "base/side.h"
#include "base/convert.h"
#include "cpu/turn.h"

typedef struct skl_tiles {
    int64_t queries, keys; /* shape of a tile of the logits */
} skl_tiles;

/* One tile of work. */
typedef struct skl_task {
    const skl_problem *problem;
    const skl_call *call;
    skl_tiles tiles;
    int64_t item;   /* position in the order of all items */
    int64_t before; /* the item before it in its chain, or -1 */
    int64_t batch, head, tile;
    float *scratch; /* this worker's own, 64-byte aligned */
    skl_turns turns;
    bool fused;        /* backward_queries also adds to the f32 key gradients, in chain order */
    bool rows_known;   /* SKL_OP_FORWARD_BACKWARD: kl and dot_t were stored by an earlier stage */
    bool teacher_side; /* backward_keys: dk_t, not dk_s */
} skl_task;

/* How a kernel works on one kind of student. */
typedef struct skl_cpu_work {
    bool fuses; /* backward_queries can add to dk, and give the KL of SKL_OP_FORWARD_BACKWARD, in its one sweep */
    skl_tiles (*tiles)(const skl_problem *problem);
    size_t (*scratch_size)(const skl_problem *problem); /* bytes a worker */
    void (*forward)(const skl_task *task);              /* rows or states of a query tile */
    void (*backward_queries)(const skl_task *task);     /* dq of a query tile; fused: its share of dk; one pass: KL */
    void (*backward_keys)(const skl_task *task);        /* dk of a key tile; `head` is a key head */
} skl_cpu_work;

typedef struct skl_cpu_kernel {
    const char *name;
    const char *detail;
    bool (*usable)(void);
    const skl_cpu_work *attention;
    const skl_cpu_work *indexer;
    const skl_cpu_work *sparse_indexer; /* its keys are listed */
} skl_cpu_kernel;

extern const skl_cpu_kernel skl_cpu_reference;
extern const skl_cpu_kernel skl_cpu_portable;
extern const skl_cpu_kernel skl_cpu_avx2;
extern const skl_cpu_kernel skl_cpu_avx512;

#endif
