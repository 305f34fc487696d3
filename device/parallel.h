/* A loop over rows on several CPU threads, for what is not the library's own work: projections, the baseline. */
#ifndef STREAMKL_DEVICE_PARALLEL_H
#define STREAMKL_DEVICE_PARALLEL_H

#include <stdint.h>

typedef void rows_task(void *context, int64_t row_begin, int64_t row_end);

/* Runs `task` on blocks of rows that together are [0, row_count), on the calling thread and threads - 1 others.
 * The threads live for one call: some 50 us, nothing beside the matrices of a length worth two threads. */
void parallel_rows(int threads, int64_t row_count, rows_task *task, void *context);

#endif
