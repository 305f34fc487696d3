/* A row of a sparse indexer, read on the device. */
#ifndef SKL_CUDA_COMMON_INDEXER_SPARSE_ROW_CUH
#define SKL_CUDA_COMMON_INDEXER_SPARSE_ROW_CUH

#include "base/indices.h"
#include "cuda/common/sequence.cuh"

struct sparse_row {
    skl_sequence sequence;
    int64_t head, query; /* student head */
    skl_range visible;
    const int32_t *list;
    bool exists; /* packed sequences can be shorter than the longest one */
};

/* Row `item` of [sequence][head][query]. */
__device__ inline sparse_row sparse_row_at(const skl_cuda_params &params, int64_t item)
{
    const skl_problem &p = params.problem;
    sparse_row row = {device_sequence(params, item / p.len_q / p.heads_s), item / p.len_q % p.heads_s,
                      item % p.len_q};
    row.exists = row.query < row.sequence.query_count;
    if (row.exists) {
        row.visible = skl_visible(&p, &row.sequence, row.query);
        row.list = skl_row_indices(&params.call.inputs, &row.sequence, row.head, row.query);
    }
    return row;
}

#endif
