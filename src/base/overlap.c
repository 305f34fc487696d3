#include "base/overlap.h"

skl_layout skl_layout_run(const void *begin, uint64_t size)
{
    const skl_layout run = {.begin = (uint64_t)(uintptr_t)begin, .span = {size}};
    return run;
}

void skl_layout_repeat(skl_layout *layout, uint64_t count, uint64_t stride)
{
    const uint64_t inner = layout->span[layout->top];
    if (count == 1 || stride == 0)
        return;
    if (layout->top == 0 && stride == inner) { /* still contiguous */
        layout->span[0] = count * inner;
        return;
    }
    layout->top++;
    layout->count[layout->top] = count;
    layout->stride[layout->top] = stride;
    layout->span[layout->top] = (count - 1) * stride + inner;
}

/* A node of the tree of a tensor. */
typedef struct node {
    const skl_layout *layout;
    int level;
    uint64_t begin;
} node;

static uint64_t end_of(node p)
{
    return p.begin + p.layout->span[p.level];
}

static node child_of(node p, uint64_t index)
{
    const node child = {p.layout, p.level - 1, p.begin + index * p.layout->stride[p.level]};
    return child;
}

static uint64_t first_child_after(node p, uint64_t address)
{
    const uint64_t first_end = end_of(child_of(p, 0));
    return address < first_end ? 0 : (address - first_end) / p.layout->stride[p.level] + 1;
}

static bool nodes_overlap(node a, node b, int *effort)
{
    if (end_of(a) <= b.begin || end_of(b) <= a.begin)
        return false;
    if (a.level == 0 && b.level == 0)
        return true;
    if (a.level == 0 || (b.level > 0 && a.layout->span[a.level] < b.layout->span[b.level]))
        return nodes_overlap(b, a, effort); /* descend into the longer one */
    const uint64_t count = a.layout->count[a.level];
    for (uint64_t i = first_child_after(a, b.begin); i < count && child_of(a, i).begin < end_of(b); i++) {
        if (--*effort < 0)
            return false;
        if (nodes_overlap(child_of(a, i), b, effort))
            return true;
    }
    return false;
}

bool skl_layouts_overlap(const skl_layout *a, const skl_layout *b)
{
    int effort = 256; /* nodes to compare: microseconds */
    const node root_a = {a, a->top, a->begin};
    const node root_b = {b, b->top, b->begin};
    return nodes_overlap(root_a, root_b, &effort);
}
