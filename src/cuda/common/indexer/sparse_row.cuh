/* A row of a sparse indexer, read on the device. */
#ifndef SKL_CUDA_COMMON_INDEXER_SPARSE_ROW_CUH
#define SKL_CUDA_COMMON_INDEXER_SPARSE_ROW_CUH

#include "base/indices.h"
#include "cuda/common/tile_scheduler.cuh"

struct sparse_row {
    skl_sequence sequence;
    int64_t head, query; /* student head */
    skl_range visible;
    const int32_t *list;
    bool exists; /* packed sequences can be shorter than the longest one */
};

/* Row `query` of a head of sequence b. */
__device__ inline sparse_row sparse_row_of(const skl_cuda_params &params, int64_t b, int64_t head, int64_t query)
{
    const skl_problem &p = params.problem;
    sparse_row row = {device_sequence(params, b), head, query};
    row.exists = row.query < row.sequence.query_count;
    if (row.exists) {
        row.visible = skl_visible(&p, &row.sequence, row.query);
        row.list = skl_row_indices(&params.call.inputs, &row.sequence, row.head, row.query);
    }
    return row;
}

/* Row `item` of [sequence][head][query]. */
__device__ inline sparse_row sparse_row_at(const skl_cuda_params &params, int64_t item)
{
    const skl_problem &p = params.problem;
    return sparse_row_of(params, item / p.len_q / p.heads_s, item / p.len_q % p.heads_s, item % p.len_q);
}

/* sparse_row for tensor-core kernels, with keys in 32 bits. */
struct sparse_row32 {
    skl_sequence sequence;
    int64_t head, query; /* student head */
    const int32_t *list;
    int begin, end; /* visible keys */
    int count;      /* entries; a kernel may trim them to the last valid one */
    bool exists;    /* packed sequences can be shorter than the longest one */

    /* The key of entry n, or -1 if the entry is not valid. */
    __device__ int key(int n) const
    {
        const int index = n < count ? __ldg(list + n) : -1;
        return index >= begin && index < end ? index : -1;
    }
};

__device__ inline sparse_row32 to_row32(const skl_cuda_params &params, const sparse_row &row)
{
    return {row.sequence,
            row.head,
            row.query,
            row.list,
            (int)row.visible.begin,
            (int)row.visible.end,
            row.exists ? (int)params.problem.top_k : 0,
            row.exists};
}

namespace tensor_core
{

/* Queries of consecutive heads of a row, from `first` on: rows of a product. */
template <typename ELEMENT>
__device__ inline row_source<ELEMENT> heads_of(const skl_cuda_argument &side, const sparse_row32 &row, int64_t first)
{
    const skl_sequence &s = row.sequence;
    return {(const ELEMENT *)side.q.data + SKL_ROW(side.q, s.batch, first, s.query_begin + row.query),
            side.q.stride_head, side.dim};
}

/* Keys of a row's sequence, from which its indices are gathered: columns of a product. */
template <typename ELEMENT>
__device__ inline row_source<ELEMENT> keys_of_row(const skl_cuda_argument &side, const sparse_row32 &row,
                                                  int64_t key_head)
{
    const skl_sequence &s = row.sequence;
    return {(const ELEMENT *)side.k.data + SKL_ROW(side.k, s.batch, key_head, s.key_begin), side.k.stride_row,
            side.dim};
}

} // namespace tensor_core

#endif
