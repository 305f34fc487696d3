/* A parallel loop over rows on the CPU, for work outside the library: projections, the baseline. */
#ifndef STREAMKL_DEVICE_PARALLEL_H
#define STREAMKL_DEVICE_PARALLEL_H

#include <stdint.h>

typedef void rows_task(void *context, int64_t row_begin, int64_t row_end);

/* Runs `task` on blocks of rows that together are [0, row_count), on the calling thread and threads - 1 others.
 * Threads are created per call, which takes about 50 us. */
void parallel_rows(int threads, int64_t row_count, rows_task *task, void *context);

#endif
