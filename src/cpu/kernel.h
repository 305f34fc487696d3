/* The interface of a CPU kernel: functions that process one tile. The backend distributes tiles over threads. */
#ifndef SKL_CPU_KERNEL_H
#define SKL_CPU_KERNEL_H

#include <stdbool.h>

#include "base/side.h"
#include "base/convert.h"
#include "base/stats.h"
#include "cpu/key_sums.h"
#include "cpu/ordered_sum.h"

typedef struct skl_tiles {
    int64_t queries, keys; /* per task: of forward and backward_queries, of backward_keys */
} skl_tiles;

/* The rows of a query tile add these sums to the statistics of their head. */
typedef struct skl_tile_sums {
    double bucket[SKL_STATS_BUCKETS_MAX];
    double range[SKL_STATS_RANGES_MAX];
    float max_logit;
} skl_tile_sums;

/* Memory of a statistics call. */
typedef struct skl_stats_memory {
    skl_output lse;      /* LSEs that the call computes: the caller's buffer, or a part of the workspace */
    skl_tile_sums *sums; /* [batch, heads_s, tiles] */
    int64_t tiles;       /* query tiles per head */
} skl_stats_memory;

/* Work on one tile. */
typedef struct skl_task {
    const skl_problem *problem;
    const skl_call *call;
    skl_tiles tiles;
    int64_t item;     /* index in the order in which tasks start */
    int64_t previous; /* the item before it in its chain; -1: none */
    int64_t before;   /* the item before it that used the same key_sums, maybe of an earlier chain; -1: none */
    int64_t batch, head, tile;
    float *scratch; /* private to the thread, 64-byte aligned */
    skl_ordered_sum ordered_sum;
    skl_key_sums key_sums;
    bool fused;      /* backward_queries also adds to the key gradients, in chain order */
    bool rows_known; /* one-pass calls: an earlier pass has stored kl and dot_t in rows */
    skl_stats_memory stats;
} skl_task;

/* The functions of a kernel for one kind of student. */
typedef struct skl_cpu_work {
    skl_tiles (*tiles)(const skl_problem *problem);
    size_t (*scratch_size)(const skl_problem *problem); /* bytes per thread */
    void (*forward)(const skl_task *task);              /* row results or states of a query tile */
    void (*backward_queries)(const skl_task *task);     /* dq of a query tile; fused: its part of dk; one-pass: KL */
    void (*backward_keys)(const skl_task *task);        /* sparse: dk of a key tile; `head` is a key head */
    /* Statistics of attention; NULL for indexers. */
    size_t (*stats_scratch_size)(const skl_problem *problem); /* bytes per thread */
    void (*stats_rows)(const skl_task *task); /* computes the rows of a query tile, and its part of the head's sums */
    void (*stats_keys)(const skl_task *task); /* computes a key tile; `head`: head of the result */
} skl_cpu_work;

typedef struct skl_cpu_works {
    skl_cpu_work attention;
    skl_cpu_work indexer;        /* top_k == 0 */
    skl_cpu_work sparse_indexer; /* top_k > 0 */
} skl_cpu_works;

typedef struct skl_cpu_kernel {
    const char *name;
    const char *detail;
    bool (*usable)(void);
    bool on_matrix; /* multiplies bf16 on a matrix unit, for which it rounds logit gradients */
    const skl_cpu_works *works;
} skl_cpu_kernel;

extern const skl_cpu_kernel skl_cpu_portable;
extern const skl_cpu_kernel skl_cpu_avx2;
extern const skl_cpu_kernel skl_cpu_avx512;
extern const skl_cpu_kernel skl_cpu_avx512_bf16;
extern const skl_cpu_kernel skl_cpu_amx;
extern const skl_cpu_kernel skl_cpu_neon_bf16;

#endif
