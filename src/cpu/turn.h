/* Sums in a fixed order, whatever the number of threads.
 *
 * Query tiles ("items") are worked on in parallel, but all of them add to the gradient of the same keys. Item n may
 * add to key tile j only after item n - 1 has passed it, so each key sums its contributions in item order: the result
 * has the same bits for any thread count, with no buffer beyond one counter a thread. The matrix product behind a
 * contribution is done before the wait, so items flow through the key tiles staggered by one and seldom wait.
 *
 * Items finish in order. At most `count` items are open, so item n - 1's counter is not reused before n is done. */
#ifndef SKL_CPU_TURN_H
#define SKL_CPU_TURN_H

#include <sched.h>
#include <stdatomic.h>
#include <stdint.h>

typedef struct skl_turn {
    _Alignas(64) _Atomic int64_t passed; /* item * ITEM_SPAN + key tiles that the item has passed */
} skl_turn;

#define SKL_ITEM_SPAN ((int64_t)1 << 40)

static inline void skl_turns_init(skl_turn *turns, int count)
{
    for (int i = 0; i < count; i++)
        atomic_init(&turns[i].passed, -1);
}

static inline void skl_turn_wait(skl_turn *turns, int count, int64_t item, int64_t key_tiles)
{
    const int64_t previous = item - 1;
    const int64_t wanted = previous * SKL_ITEM_SPAN + key_tiles;
    for (int spins = 0; atomic_load_explicit(&turns[previous % count].passed, memory_order_acquire) < wanted; spins++)
        if (spins > 64)
            sched_yield();
}

/* Waits until every earlier item has passed key tiles 0 .. key_tile. */
static inline void skl_turn_enter(skl_turn *turns, int count, int64_t item, int64_t key_tile)
{
    if (item > 0)
        skl_turn_wait(turns, count, item, key_tile + 1);
}

static inline void skl_turn_leave(skl_turn *turns, int count, int64_t item, int64_t key_tile)
{
    atomic_store_explicit(&turns[item % count].passed, item * SKL_ITEM_SPAN + key_tile + 1, memory_order_release);
}

static inline void skl_turn_finish(skl_turn *turns, int count, int64_t item)
{
    skl_turn_enter(turns, count, item, SKL_ITEM_SPAN - 2);
    skl_turn_leave(turns, count, item, SKL_ITEM_SPAN - 2);
}

#endif
