/* Statistics calls of the CPU backend, around the passes over tiles: memory, rows and keys that no tile writes, and
 * the results of heads. */
#ifndef SKL_CPU_STATS_H
#define SKL_CPU_STATS_H

#include "cpu/kernel.h"

/* Bytes of workspace besides the scratch memory of the workers; SIZE_MAX / 2 where 64 bits cannot count them. */
size_t skl_cpu_stats_size(const skl_plan *plan);

/* Lays out the memory of a call in the workspace from `begin` on. Requires alignment for doubles. */
skl_stats_memory skl_cpu_stats_memory(const skl_plan *plan, const skl_call *call, void *begin);

/* Stores `value` in the `dim` numbers of rows [row_begin, row_end) of a packed tensor, if it is given. */
void skl_cpu_fill_rows(const skl_output *to, int64_t heads, int64_t row_begin, int64_t row_end, int64_t dim,
                       float value);

/* Writes the results that no tile writes: rows and keys after the last packed sequence, and weights. */
void skl_cpu_stats_clear(const skl_problem *problem, const skl_call *call);

/* Adds up the sums of the tiles of each head, in the order of the tiles, and stores the results of heads. */
void skl_cpu_stats_finish(const skl_problem *problem, const skl_call *call, const skl_stats_memory *memory);

#endif
