#include "base/indices.h"

#include <inttypes.h>
#include <stdbool.h>

#include "base/status.h"

static skl_status check_row(const skl_problem *p, const int32_t *keys, int64_t key_count, int64_t batch, int64_t head,
                            int64_t i)
{
    for (int64_t n = 0; n < p->top_k; n++)
        if (keys[n] < -1 || keys[n] >= key_count)
            return skl_fail(SKL_ERROR_ARGUMENT,
                            "indices[%" PRId64 ", %" PRId64 ", %" PRId64 ", %" PRId64 "]=%" PRId32
                            ": must be -1 (none) or a key of the sequence, 0..%" PRId64,
                            batch, head, i, n, keys[n], key_count - 1);
    return SKL_OK;
}

skl_status skl_indices_check(const skl_problem *p, const skl_inputs *inputs)
{
    const bool has_indices = p->top_k > 0 && p->len_q > 0;
    for (int64_t b = 0; has_indices && b < p->batch; b++) {
        const skl_range all_keys = {0, INT64_MAX};
        const skl_sequence s = skl_sequence_at(p, inputs, all_keys, b);
        const int64_t key_count = p->packed ? s.key_count : p->len_k; /* padding is allowed: it is masked */
        for (int64_t head = 0; s.query_count > 0 && head < p->heads_s; head++)
            for (int64_t i = 0; i < s.query_count; i++)
                SKL_TRY(check_row(p, skl_row_indices(inputs, &s, head, i), key_count, b, head, i));
    }
    return SKL_OK;
}
