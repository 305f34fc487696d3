/* The keys that a query sees. All masks (causal, window, key lengths, packing, offsets, key ranges, row bounds)
 * combine into one key range per row, so that no other file needs to know about masks. */
#ifndef SKL_BASE_VISIBLE_H
#define SKL_BASE_VISIBLE_H

#include "base/problem.h"

/* One sequence of the batch, located in the buffers. */
typedef struct skl_sequence {
    int64_t batch;                            /* index for stride_batch; 0 if packed */
    int64_t query_begin, query_count;         /* rows of the query buffers */
    int64_t key_begin;                        /* row of key 0 in the key buffers */
    int64_t key_first, key_count;             /* keys in use: [key_first, key_count) */
    int64_t diagonal;                         /* position of query 0 minus position of key 0 */
    const int32_t *key_begins, *key_ends;     /* row bounds of its queries; NULL: none */
    const int32_t *query_begins, *query_ends; /* queries of each key, where a GPU tabulated them; NULL: none */
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
    skl_sequence s = {b, 0, p->len_q, 0, 0, p->len_k, 0, NULL, NULL, NULL, NULL};
    const int64_t first_row = p->packed ? inputs->cu_seqlens_q[b] : b * p->len_q;
    s.key_begins = inputs->key_begin != NULL ? inputs->key_begin + first_row : NULL;
    s.key_ends = inputs->key_end != NULL ? inputs->key_end + first_row : NULL;
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

/* Row i of one tensor sees rows [i + begin, i + end) of the other, within the bounds of row i, clipped to
 * [first, count). */
typedef struct skl_band {
    int64_t begin, end, first, count;
    const int32_t *begins, *ends; /* bounds of rows 0 .. rows - 1; NULL: none */
    int64_t rows;
} skl_band;

/* Keys visible to a query. */
SKL_HOST_DEVICE skl_band skl_key_band(const skl_problem *p, const skl_sequence *s)
{
    const skl_band band = {s->diagonal - p->window_left,
                           s->diagonal + p->window_right + 1,
                           s->key_first,
                           s->key_count,
                           s->key_begins,
                           s->key_ends,
                           s->query_count};
    return band;
}

/* Queries that see a key in use: the band of skl_key_band from the other side. Only GPU kernels use it. */
SKL_HOST_DEVICE skl_band skl_query_band(const skl_problem *p, const skl_sequence *s)
{
    const skl_band band = {-s->diagonal - p->window_right,
                           -s->diagonal + p->window_left + 1,
                           0,
                           s->query_count,
                           s->query_begins,
                           s->query_ends,
                           s->key_count};
    return band;
}

/* Rows that row i sees, inside [first, count]; begin == end if there are none. Neither begin nor end decreases from
 * one row to the next. Rows after the last one have its bounds. */
SKL_HOST_DEVICE skl_range skl_band_range(const skl_band *band, int64_t i)
{
    const int64_t row = skl_min(i, band->rows - 1);
    int64_t begin = i + band->begin, end = i + band->end;
    if (band->begins != NULL && row >= 0)
        begin = skl_max(begin, band->begins[row]);
    if (band->ends != NULL && row >= 0)
        end = skl_min(end, band->ends[row]);
    end = skl_max(band->first, skl_min(band->count, end));
    begin = skl_max(band->first, skl_min(end, begin));
    const skl_range range = {begin, end};
    return range;
}

/* The beginning of row i's range before it is cut off at the range's end: of a row that sees nothing it may be after
 * the end. */
SKL_HOST_DEVICE int64_t skl_band_begin(const skl_band *band, int64_t i)
{
    const int64_t row = skl_min(i, band->rows - 1), begin = i + band->begin;
    const int64_t bounded = band->begins != NULL && row >= 0 ? skl_max(begin, band->begins[row]) : begin;
    return skl_max(band->first, skl_min(band->count, bounded));
}

/* Keys visible to query i. */
SKL_HOST_DEVICE skl_range skl_visible(const skl_problem *p, const skl_sequence *s, int64_t i)
{
    const skl_band band = skl_key_band(p, s);
    return skl_band_range(&band, i);
}

/* The blocks of keys of a row that sees `keys`, if the teacher is pooled; else `keys`. Neither begin nor end
 * decreases from one row to the next. */
SKL_HOST_DEVICE skl_range skl_pooled_range(const skl_problem *p, skl_range keys)
{
    if (!skl_is_pooled(p))
        return keys;
    const int64_t last = skl_max(0, keys.end - 1) / p->pool_size; /* block of the last visible key */
    const int64_t end = p->pool_blocks == SKL_POOL_EARLIER ? last : skl_student_keys(p, keys.end);
    const skl_range blocks = {skl_min(skl_ceil_div(keys.begin, p->pool_size), end), end};
    return blocks;
}

/* The first of `count` values, none below the one before, that is larger than `limit`; `count` if none is. */
SKL_HOST_DEVICE int64_t skl_first_above(const int32_t *values, int64_t count, int64_t limit)
{
    int64_t begin = 0, end = count;
    while (begin < end) {
        const int64_t middle = (begin + end) / 2;
        if (values[middle] > limit)
            end = middle;
        else
            begin = middle + 1;
    }
    return begin;
}

/* Queries whose row bounds include key j: those before the first with a larger key_begin, from the first with a
 * larger key_end on. */
SKL_HOST_DEVICE skl_range skl_queries_in_bounds(const skl_sequence *s, int64_t j)
{
    const skl_range queries = {s->key_ends != NULL ? skl_first_above(s->key_ends, s->query_count, j) : 0,
                               s->key_begins != NULL ? skl_first_above(s->key_begins, s->query_count, j)
                                                     : s->query_count};
    return queries;
}

#endif
