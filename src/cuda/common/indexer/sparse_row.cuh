/* A row of the sparse stage of an indexer, found on the device. */
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

/* Rows of a head follow one another, heads of a sequence, sequences. */
__device__ inline sparse_row sparse_row_at(const skl_cuda_params &params, int64_t item)
{
    const skl_problem &p = params.problem;
    sparse_row at = {device_sequence(params, item / p.len_q / p.heads_s), item / p.len_q % p.heads_s, item % p.len_q};
    at.exists = at.query < at.sequence.query_count;
    if (at.exists) {
        at.visible = skl_visible(&p, &at.sequence, at.query);
        at.list = skl_row_indices(&params.call.inputs, &at.sequence, at.head, at.query);
    }
    return at;
}

#endif
