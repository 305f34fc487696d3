#include "device/device.h"

#include <pthread.h>
#include <stdatomic.h>

enum {
    THREADS_MAX = 256,
    BLOCK_ROWS = 16 /* small enough to balance causal rows, large enough to keep contention for the counter low */
};

typedef struct row_loop {
    rows_task *task;
    void *context;
    int64_t row_count;
    atomic_int_fast64_t next_row;
} row_loop;

static void *run_blocks(void *argument)
{
    row_loop *const loop = argument;
    for (;;) {
        const int64_t row_begin = atomic_fetch_add(&loop->next_row, BLOCK_ROWS);
        if (row_begin >= loop->row_count)
            return NULL;
        const int64_t rows_left = loop->row_count - row_begin;
        loop->task(loop->context, row_begin, row_begin + (rows_left < BLOCK_ROWS ? rows_left : BLOCK_ROWS));
    }
}

void parallel_rows(int threads, int64_t row_count, rows_task *task, void *context)
{
    row_loop loop = {.task = task, .context = context, .row_count = row_count};
    atomic_init(&loop.next_row, 0);

    pthread_t helpers[THREADS_MAX];
    int helper_count = 0;
    while (helper_count < threads - 1 && helper_count < THREADS_MAX) {
        if (pthread_create(&helpers[helper_count], NULL, run_blocks, &loop) != 0)
            break; /* the existing threads do all the work */
        helper_count++;
    }
    run_blocks(&loop);
    while (helper_count > 0)
        pthread_join(helpers[--helper_count], NULL);
}
