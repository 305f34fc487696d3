/* Which keys a query sees. All masks (causal, window, key lengths, packing, offsets, key ranges) combine into one key
 * range per row, so that no other file needs to know about masks. */
#ifndef SKL_BASE_VISIBLE_H
#define SKL_BASE_VISIBLE_H

#include "base/problem.h"

/* One sequence of the batch, located in the buffers. */
typedef struct skl_sequence {
    int64_t batch;                    /* index for stride_batch; 0 if packed */
    int64_t query_begin, query_count; /* rows of the query buffers */
    int64_t key_begin;                /* row of key 0 in the key buffers */
    int64_t key_first, key_count;     /* keys in use: [key_first, key_count) */
    int64_t diagonal;                 /* position of query 0 minus position of key 0 */
} skl_sequence;

typedef struct skl_range {
    int64_t begin, end;
} skl_range;

SKL_HOST_DEVICE int64_t skl_min(int64_t a, int64_t b)
{
    return a < b ? a : b;
}

SKL_HOST_DEVICE int64_t skl_max(int64_t a, int64_t b)
{
    return a > b ? a : b;
}

SKL_HOST_DEVICE int64_t skl_ceil_div(int64_t a, int64_t b)
{
    return (a + b - 1) / b;
}

/* Sequence `b`, with its keys restricted to [keys.begin, keys.end). */
SKL_HOST_DEVICE skl_sequence skl_sequence_at(const skl_problem *p, const skl_inputs *inputs, skl_range keys,
                                             int64_t b)
{
    skl_sequence s = {b, 0, p->len_q, 0, 0, p->len_k, 0};
    if (p->packed) {
        s.batch = 0;
        s.query_begin = inputs->cu_seqlens_q[b];
        s.query_count = inputs->cu_seqlens_q[b + 1] - s.query_begin;
        s.key_begin = inputs->cu_seqlens_k[b];
        s.key_count = inputs->cu_seqlens_k[b + 1] - s.key_begin;
    }
    s.diagonal = p->positions == SKL_POSITIONS_OFFSET ? p->offset_q - p->offset_k : s.key_count - s.query_count;
    if (inputs->key_lengths != NULL)
        s.key_count = skl_min(s.key_count, inputs->key_lengths[b]);
    s.key_count = skl_max(0, skl_min(s.key_count, keys.end));
    s.key_first = skl_min(skl_max(0, keys.begin), s.key_count);
    return s;
}

/* Row i of one tensor sees rows [i + begin, i + end) of the other, clipped to [first, count). */
typedef struct skl_band {
    int64_t begin, end, first, count;
} skl_band;

/* Keys visible to a query. */
SKL_HOST_DEVICE skl_band skl_key_band(const skl_problem *p, const skl_sequence *s)
{
    const skl_band band = {s->diagonal - p->window_left, s->diagonal + p->window_right + 1, s->key_first,
                           s->key_count};
    return band;
}

/* Queries that see a key in use: the same band from the other side. */
SKL_HOST_DEVICE skl_band skl_query_band(const skl_problem *p, const skl_sequence *s)
{
    const skl_band band = {-s->diagonal - p->window_right, -s->diagonal + p->window_left + 1, 0, s->query_count};
    return band;
}

/* Rows that row i sees, inside [first, count]; begin == end if there are none. Neither begin nor end decreases from
 * one row to the next. */
SKL_HOST_DEVICE skl_range skl_band_range(const skl_band *band, int64_t i)
{
    const int64_t end = skl_max(band->first, skl_min(band->count, i + band->end));
    const int64_t begin = skl_max(band->first, skl_min(end, i + band->begin));
    const skl_range range = {begin, end};
    return range;
}

/* Keys visible to query i. */
SKL_HOST_DEVICE skl_range skl_visible(const skl_problem *p, const skl_sequence *s, int64_t i)
{
    const skl_band band = skl_key_band(p, s);
    return skl_band_range(&band, i);
}

/* Queries that see key j. */
SKL_HOST_DEVICE skl_range skl_queries_of_key(const skl_problem *p, const skl_sequence *s, int64_t j)
{
    const skl_range none = {0, 0};
    const skl_band band = skl_query_band(p, s);
    return j < s->key_first || j >= s->key_count ? none : skl_band_range(&band, j);
}

#endif
