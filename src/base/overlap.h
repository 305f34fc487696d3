/* Finds out whether two strided tensors share a byte. */
#ifndef SKL_BASE_OVERLAP_H
#define SKL_BASE_OVERLAP_H

#include <stdbool.h>
#include <stdint.h>

enum { SKL_LAYOUT_LEVELS = 4 };

/* A tensor as a tree of byte ranges. Level 0 is a contiguous run; level n + 1 repeats level n `count` times, `stride`
 * bytes apart, and spans `span` bytes from its first byte to its last. */
typedef struct skl_layout {
    uint64_t begin;
    int top; /* level of the tensor */
    uint64_t span[SKL_LAYOUT_LEVELS], stride[SKL_LAYOUT_LEVELS], count[SKL_LAYOUT_LEVELS];
} skl_layout;

/* A contiguous run of `size` bytes: level 0. */
skl_layout skl_layout_run(const void *begin, uint64_t size);

/* Adds a level. Call it in the order of increasing strides. */
void skl_layout_repeat(skl_layout *layout, uint64_t count, uint64_t stride);

/* Compares the nodes of each tree that reach into the other. After a fixed effort, views that interleave count as
 * disjoint: an accidental overlap shows in the first rows that are compared. */
bool skl_layouts_overlap(const skl_layout *a, const skl_layout *b);

#endif
