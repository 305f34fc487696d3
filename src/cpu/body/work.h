/* The functions of the vector kernels for each kind of student, shared by all instruction sets. */
#ifndef SKL_CPU_BODY_WORK_H
#define SKL_CPU_BODY_WORK_H

#include "cpu/body/sparse_backward.h"
#include "cpu/body/stats.h"

#if !defined(SKL_HAS_TASK_SETUP)
SKL_INLINE void begin_task(void)
{
}

SKL_INLINE void end_task(void)
{
}
#endif

/* Every function runs between begin_task and end_task, which an instruction set may provide. */
#define TASK(function)                                                                                               \
    static void function##_task(const skl_task *task)                                                                \
    {                                                                                                                \
        begin_task();                                                                                                \
        function(task);                                                                                              \
        end_task();                                                                                                  \
    }

TASK(forward)
TASK(backward_queries)
TASK(stats_rows)
TASK(stats_keys)
TASK(index_forward)
TASK(index_backward_queries)
TASK(sparse_forward)
TASK(sparse_backward_queries)
TASK(sparse_backward_keys)

static const skl_cpu_works works = {
    .attention = {.tiles = tiles,
                  .scratch_size = scratch_size,
                  .forward = forward_task,
                  .backward_queries = backward_queries_task,
                  .stats_scratch_size = stats_scratch_size,
                  .stats_rows = stats_rows_task,
                  .stats_keys = stats_keys_task},
    .indexer = {.tiles = tiles,
                .scratch_size = index_scratch_size,
                .forward = index_forward_task,
                .backward_queries = index_backward_queries_task},
    .sparse_indexer = {.tiles = sparse_tiles,
                       .scratch_size = sparse_scratch_size,
                       .forward = sparse_forward_task,
                       .backward_queries = sparse_backward_queries_task,
                       .backward_keys = sparse_backward_keys_task},
};

#endif
