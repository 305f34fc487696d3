/* Sums in a fixed order, whatever the number of threads.
 *
 * Query tiles ("items") are worked on in parallel, but those of one chain add to the gradients of the same keys. An
 * item may add to key tile j only after the item before it in its chain has passed it, so each key sums its
 * contributions in chain order: the result has the same bits for any thread count, with no buffer beyond a few
 * counters a thread. The matrix product behind a contribution is done before the wait, so the items of a chain flow
 * through the key tiles staggered by one; items of different chains never meet.
 *
 * Items start in order and wait only for earlier ones, so they cannot lock up. Item n takes over the counter of item
 * n - count once that item and the one behind it in its chain, the only reader, are done. */
#ifndef SKL_CPU_TURN_H
#define SKL_CPU_TURN_H

#include <sched.h>
#include <stdatomic.h>
#include <stdint.h>

typedef struct skl_turn {
    _Alignas(64) _Atomic int64_t passed; /* item * SKL_ITEM_SPAN + key tiles that the item has passed */
} skl_turn;

typedef struct skl_turns {
    skl_turn *ring;
    int64_t count; /* at least 3 for each thread: threads of items in flight, as many chains, and slack */
} skl_turns;

/* A counter holds the item in its high bits and key tiles, of which there are fewer than 2^34, in the low ones. */
#define SKL_ITEM_SPAN ((int64_t)1 << 34)
#define SKL_ITEMS_MAX ((int64_t)1 << 29)
#define SKL_ALL_TILES (SKL_ITEM_SPAN - 1)

static inline void skl_turns_init(const skl_turns *turns)
{
    for (int64_t i = 0; i < turns->count; i++)
        atomic_init(&turns->ring[i].passed, -1);
}

/* Waits until `item` has passed `key_tiles` key tiles; a negative item has nothing to pass. */
static inline void skl_turn_wait(const skl_turns *turns, int64_t item, int64_t key_tiles)
{
    if (item < 0)
        return;
    const int64_t wanted = item * SKL_ITEM_SPAN + key_tiles;
    const skl_turn *const turn = &turns->ring[item % turns->count];
    for (int spins = 0; atomic_load_explicit(&turn->passed, memory_order_acquire) < wanted; spins++)
        if (spins > 64)
            sched_yield();
}

static inline void skl_turn_pass(const skl_turns *turns, int64_t item, int64_t key_tiles)
{
    atomic_store_explicit(&turns->ring[item % turns->count].passed, item * SKL_ITEM_SPAN + key_tiles,
                          memory_order_release);
}

#endif
