/* Sums in a fixed order, for any number of threads.
 *
 * Query tiles ("items") run in parallel, but the items of one chain add to the gradients of the same keys. An item
 * may add to key tile j only after the previous item of its chain has done so. Each key gradient is therefore summed
 * in chain order, and has the same bits for any thread count, with no buffer except a few counters per thread. An
 * item computes its matrix product before it waits, so the items of a chain move through the key tiles one tile
 * apart. Items of different chains never wait for each other.
 *
 * Items start in order and wait only for earlier ones, so there is no deadlock. Item n reuses the counter of item
 * n - count after that item and the next one in its chain, its only reader, are done. */
#ifndef SKL_CPU_ORDERED_SUM_H
#define SKL_CPU_ORDERED_SUM_H

#include <sched.h>
#include <stdatomic.h>
#include <stdint.h>

typedef struct skl_ordered_sum_counter {
    _Alignas(64) _Atomic uint64_t progress; /* item * SKL_ITEM_SPAN + key tiles that the item is done with */
} skl_ordered_sum_counter;

typedef struct skl_ordered_sum {
    skl_ordered_sum_counter *ring;
    int64_t count; /* at least 3 per thread: one for items in flight, one for chains, one spare */
} skl_ordered_sum;

/* A counter holds the item in its high bits and the number of key tiles, which is below 2^34, in its low bits. Items
 * that meet in a counter are close, so the difference of two values tells their order even after an overflow. */
#define SKL_ITEM_SPAN ((uint64_t)1 << 34)
#define SKL_ALL_TILES ((int64_t)SKL_ITEM_SPAN - 1)

static inline uint64_t skl_ordered_sum_progress(int64_t item, int64_t key_tiles)
{
    return (uint64_t)item * SKL_ITEM_SPAN + (uint64_t)key_tiles;
}

static inline void skl_ordered_sum_init(const skl_ordered_sum *order)
{
    for (int64_t i = 0; i < order->count; i++)
        atomic_init(&order->ring[i].progress, 0);
}

/* Waits until `item` is done with `key_tiles` key tiles. Returns at once if `item` is negative. */
static inline void skl_ordered_sum_wait(const skl_ordered_sum *order, int64_t item, int64_t key_tiles)
{
    if (item < 0)
        return;
    const uint64_t wanted = skl_ordered_sum_progress(item, key_tiles);
    const skl_ordered_sum_counter *const counter = &order->ring[item % order->count];
    for (int spins = 0; (int64_t)(atomic_load_explicit(&counter->progress, memory_order_acquire) - wanted) < 0;
         spins++)
        if (spins > 64)
            sched_yield();
}

/* Tells the next item that `item` is done with `key_tiles` key tiles. */
static inline void skl_ordered_sum_advance(const skl_ordered_sum *order, int64_t item, int64_t key_tiles)
{
    atomic_store_explicit(&order->ring[item % order->count].progress, skl_ordered_sum_progress(item, key_tiles),
                          memory_order_release);
}

#endif
