/* The top-k keys of each row of a sparse indexer. */
#ifndef SKL_BASE_INDICES_H
#define SKL_BASE_INDICES_H

#include "base/side.h"

/* The top_k entries of a row; some may be -1. */
SKL_HOST_DEVICE const int32_t *skl_row_indices(const skl_inputs *inputs, const skl_sequence *s, int64_t head,
                                               int64_t i)
{
    const skl_input *const indices = &inputs->indices;
    return (const int32_t *)indices->data + SKL_ROW(*indices, s->batch, head, s->query_begin + i);
}

/* Whether an entry is a visible key; -1 and masked keys are not. */
SKL_HOST_DEVICE int skl_index_is_visible(int64_t key, skl_range visible)
{
    return key >= visible.begin && key < visible.end;
}

#endif
