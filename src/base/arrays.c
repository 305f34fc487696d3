#include "base/arrays.h"

#include <inttypes.h>
#include <stdbool.h>

#include "base/indices.h"
#include "base/status.h"

static skl_status check_seqlens(const char *name, const int32_t *offsets, int64_t batch, int64_t longest,
                                int64_t total)
{
    if (offsets[0] != 0)
        return skl_fail(SKL_ERROR_ARGUMENT, "%s[0]=%" PRId32 ": must be 0", name, offsets[0]);
    for (int64_t b = 0; b < batch; b++) {
        const int64_t length = (int64_t)offsets[b + 1] - offsets[b];
        if (length < 0)
            return skl_fail(SKL_ERROR_ARGUMENT,
                            "%s[%" PRId64 "]=%" PRId32 ": must not be below %s[%" PRId64 "]=%" PRId32, name, b + 1,
                            offsets[b + 1], name, b, offsets[b]);
        if (offsets[b + 1] > total)
            return skl_fail(SKL_ERROR_ARGUMENT,
                            "%s[%" PRId64 "]=%" PRId32 ": must be at most %" PRId64 ", the rows of the buffer", name,
                            b + 1, offsets[b + 1], total);
        if (length > longest)
            return skl_fail(SKL_ERROR_ARGUMENT,
                            "%s[%" PRId64 "]=%" PRId32 ": sequence %" PRId64 " has %" PRId64
                            " rows; must be at most %" PRId64 ", the longest the problem names",
                            name, b + 1, offsets[b + 1], b, length, longest);
    }
    return SKL_OK;
}

static skl_status check_lengths(const skl_problem *p, const skl_inputs *inputs)
{
    if (p->packed) {
        SKL_TRY(check_seqlens("cu_seqlens_q", inputs->cu_seqlens_q, p->batch, p->len_q, p->total_q));
        return check_seqlens("cu_seqlens_k", inputs->cu_seqlens_k, p->batch, p->len_k, p->total_k);
    }
    for (int64_t b = 0; inputs->key_lengths != NULL && b < p->batch; b++)
        if (inputs->key_lengths[b] < 0 || inputs->key_lengths[b] > p->len_k)
            return skl_fail(SKL_ERROR_ARGUMENT, "key_lengths[%" PRId64 "]=%" PRId32 ": must be 0..len_k=%" PRId64, b,
                            inputs->key_lengths[b], p->len_k);
    return SKL_OK;
}

/* Row bounds of one sequence, `first` the index of its first row in the array. */
static skl_status check_bounds(const char *name, const int32_t *bounds, int64_t first, int64_t count, int64_t keys)
{
    for (int64_t i = first; bounds != NULL && i < first + count; i++) {
        if (bounds[i] < 0 || bounds[i] > keys)
            return skl_fail(SKL_ERROR_ARGUMENT,
                            "%s[%" PRId64 "]=%" PRId32 ": must be 0..%" PRId64 ", the keys of the sequence", name, i,
                            bounds[i], keys);
        if (i > first && bounds[i] < bounds[i - 1])
            return skl_fail(SKL_ERROR_ARGUMENT,
                            "%s[%" PRId64 "]=%" PRId32 ": must not be below %s[%" PRId64 "]=%" PRId32
                            " of the same sequence",
                            name, i, bounds[i], name, i - 1, bounds[i - 1]);
    }
    return SKL_OK;
}

static skl_status check_row_bounds(const skl_problem *p, const skl_inputs *inputs)
{
    for (int64_t b = 0; p->row_bounds && b < p->batch; b++) {
        const int64_t first = p->packed ? inputs->cu_seqlens_q[b] : b * p->len_q;
        const int64_t count = p->packed ? inputs->cu_seqlens_q[b + 1] - first : p->len_q;
        const int64_t keys = p->packed ? inputs->cu_seqlens_k[b + 1] - inputs->cu_seqlens_k[b] : p->len_k;
        SKL_TRY(check_bounds("key_begin", inputs->key_begin, first, count, keys));
        SKL_TRY(check_bounds("key_end", inputs->key_end, first, count, keys));
    }
    return SKL_OK;
}

static skl_status check_indices_of_row(const skl_problem *p, const int32_t *keys, int64_t key_count, int64_t batch,
                                       int64_t head, int64_t i)
{
    for (int64_t n = 0; n < p->top_k; n++)
        if (keys[n] < -1 || keys[n] >= key_count)
            return skl_fail(SKL_ERROR_ARGUMENT,
                            "indices[%" PRId64 ", %" PRId64 ", %" PRId64 ", %" PRId64 "]=%" PRId32
                            ": must be -1 (none) or a %s of the sequence, 0..%" PRId64,
                            batch, head, i, n, keys[n], skl_is_pooled(p) ? "block" : "key", key_count - 1);
    return SKL_OK;
}

static skl_status check_indices(const skl_problem *p, const skl_inputs *inputs)
{
    const bool has_indices = inputs->indices.data != NULL && p->len_q > 0;
    for (int64_t b = 0; has_indices && b < p->batch; b++) {
        const skl_range all_keys = {0, INT64_MAX};
        const skl_sequence s = skl_sequence_at(p, inputs, all_keys, b);
        /* Padding is allowed: it is masked. */
        const int64_t key_count = skl_student_keys(p, p->packed ? s.key_count : p->len_k);
        for (int64_t head = 0; s.query_count > 0 && head < p->heads_s; head++)
            for (int64_t i = 0; i < s.query_count; i++)
                SKL_TRY(check_indices_of_row(p, skl_row_indices(inputs, &s, head, i), key_count, b, head, i));
    }
    return SKL_OK;
}

skl_status skl_arrays_check_values(const skl_problem *p, const skl_inputs *inputs)
{
    SKL_TRY(check_lengths(p, inputs));
    SKL_TRY(check_row_bounds(p, inputs));
    return check_indices(p, inputs);
}
