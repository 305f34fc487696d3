/* Whether two strided tensors share a byte. */
#ifndef SKL_BASE_OVERLAP_H
#define SKL_BASE_OVERLAP_H

#include <stdbool.h>
#include <stdint.h>

enum { SKL_LAYOUT_LEVELS = 4 };

/* A tensor as a tree of byte ranges: level 0 is a run without gaps, level n + 1 repeats level n `count` times,
 * `stride` bytes apart, and is `span` bytes long from its first byte to its last. */
typedef struct skl_layout {
    uint64_t begin;
    int top; /* level of the whole tensor */
    uint64_t span[SKL_LAYOUT_LEVELS], stride[SKL_LAYOUT_LEVELS], count[SKL_LAYOUT_LEVELS];
} skl_layout;

/* A run of `size` bytes, to be repeated. */
skl_layout skl_layout_run(const void *begin, uint64_t size);

/* From the smallest stride to the largest. */
void skl_layout_repeat(skl_layout *layout, uint64_t count, uint64_t stride);

/* Looks at the parts of each that reach into the other. Views that interleave for long are given the benefit of the
 * doubt: whatever overlaps by mistake does so in the first rows that meet. */
bool skl_layouts_overlap(const skl_layout *a, const skl_layout *b);

#endif
