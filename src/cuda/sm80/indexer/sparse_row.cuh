/* What the tensor-core kernels for the sparse stage of an indexer share. A block works on one row: rows have no keys
 * in common, but all heads of a row that share a key head have the row's list in common. So heads are the rows of a
 * product, 16 an mma, and the listed keys, gathered by cp.async, are its columns. */
#ifndef SKL_CUDA_SM80_INDEXER_SPARSE_ROW_CUH
#define SKL_CUDA_SM80_INDEXER_SPARSE_ROW_CUH

#include "base/convert.h"
#include "cuda/common/indexer/sparse_row.cuh"
#include "cuda/common/indexer/row_chunks.h"
#include "cuda/common/indexer/logit_tile.cuh"
#include "cuda/sm80/mma_tile.cuh"

namespace sm80
{

constexpr int SPARSE_WARPS = 8;
constexpr int SPARSE_THREADS = 32 * SPARSE_WARPS;
constexpr int SPARSE_HEADS = 128; /* of a product, at most */

struct sparse_params : skl_cuda_params {
    skl_cuda_argument teacher, student;
    bool with_teacher;          /* false: only the LSEs of the indexer are wanted */
    float least;                /* a product counts if it is above: 0, or -inf without a ReLU */
    int32_t resident;           /* queries stay in shared memory; or a slab of them comes with each one of keys */
    int32_t stage_size;         /* bytes of shared memory for what streams */
    lse_row *mean;              /* of each block, [top_k]: the mean of the teacher heads, before it is divided */
    float *logits;              /* of each block, [top_k]: the indexer's, before they are scaled */
    int64_t row_first, row_end; /* of the launch */
    float *dy;                  /* [row of the launch][top_k], without upstream gradient and scale */
    float *entry_dk;            /* [row of the launch][top_k][dim]: what entries add to dk; NULL: not wanted */
};

/* ---- The row at work ---------------------------------------------------------------------------------------- */

/* sparse_row, with keys in 32 bits. */
struct sparse_row32 {
    skl_sequence sequence;
    int64_t head, query; /* student head */
    const int32_t *list;
    int begin, end; /* keys that the masks let it see */
    int count;      /* of entries, up to the last one that is a key */
    bool exists;    /* packed sequences can be shorter than the longest one */

    /* The key of entry n, or -1. */
    __device__ int key(int n) const
    {
        const int listed = n < count ? __ldg(list + n) : -1;
        return listed >= begin && listed < end ? listed : -1;
    }
};

/* For all threads of the block. */
__device__ inline void find_row(sparse_row32 &at, const sparse_params &params, int64_t item)
{
    __syncthreads(); /* nobody looks at the last row any more */
    if (threadIdx.x == 0) {
        const sparse_row row = sparse_row_at(params, item);
        at.sequence = row.sequence;
        at.head = row.head;
        at.query = row.query;
        at.list = row.list;
        at.begin = (int)row.visible.begin;
        at.end = (int)row.visible.end;
        at.count = row.exists ? (int)params.problem.top_k : 0;
        at.exists = row.exists;
    }
    __syncthreads();
}

/* Cuts off what no key follows: rows that see few keys have lists with little on them. */
__device__ inline void trim_indices(sparse_row32 &at)
{
    int last = 0;
    for (int n = (int)threadIdx.x; n < at.count; n += SPARSE_THREADS)
        last = at.key(n) >= 0 ? n + 1 : last;
    __syncthreads(); /* everyone has its share of the list */
    if (threadIdx.x == 0)
        at.count = 0;
    __syncthreads();
    atomicMax(&at.count, last);
    __syncthreads();
}

/* ---- Copies ------------------------------------------------------------------------------------------------- */

/* Rows of a product: heads of the row at work, from `first` on. */
template <typename ELEMENT>
__device__ inline row_source<ELEMENT> heads_of(const skl_cuda_argument &side, const sparse_row32 &at, int64_t first)
{
    const skl_sequence &s = at.sequence;
    return {(const ELEMENT *)side.q.data + SKL_ROW(side.q, s.batch, first, s.query_begin + at.query),
            side.q.stride_head, side.dim};
}

/* Columns of a product: keys, from which a list selects. */
template <typename ELEMENT>
__device__ inline row_source<ELEMENT> gathered_keys_of(const skl_cuda_argument &side, const sparse_row32 &at,
                                                       int64_t key_head)
{
    const skl_sequence &s = at.sequence;
    return {(const ELEMENT *)side.k.data + SKL_ROW(side.k, s.batch, key_head, s.key_begin), side.k.stride_row,
            side.dim};
}

/* Starts copying DIM dimensions from `first` on of `count` rows; index(n) is the n-th one's, -1: there is none. What
 * is not there becomes 0. It lies as staged_rows<DIM>, one behind the other. */
template <int DIM, typename ELEMENT, typename INDEX>
__device__ inline void gather_rows(staged_rows<DIM> *to, int count, const row_source<ELEMENT> &from, int first,
                                   INDEX index)
{
    constexpr int CHUNKS = DIM / 8;
    constexpr int ROWS = SPARSE_THREADS / CHUNKS; /* that the block copies at once */
    constexpr int TOGETHER = 2; /* indices that are under way at once: no copy waits for another's */
    static_assert(ROWS % 8 == 0, "a thread's chunks are exchanged alike");
    const int row = (int)threadIdx.x / CHUNKS, chunk = (int)threadIdx.x % CHUNKS;
    const ELEMENT *const source = from.rows + first + chunk * 8;
    const int64_t stride = from.stride;
    const bool inside = first + chunk * 8 < from.dim;
    const uint32_t target = shared_address(&to->chunks[row][chunk ^ row % 8]);
#pragma unroll 1
    for (int n = row; n < count; n += ROWS * TOGETHER) {
        int at[TOGETHER];
#pragma unroll
        for (int i = 0; i < TOGETHER; i++)
            at[i] = n + i * ROWS < count ? index(n + i * ROWS) : -1;
#pragma unroll
        for (int i = 0; i < TOGETHER; i++)
            if (n + i * ROWS < count)
                cp_async_16(target + (uint32_t)((n - row + i * ROWS) * DIM * 2), source + max(at[i], 0) * stride,
                            inside && at[i] >= 0 ? 16 : 0);
    }
}

/* ---- Weights ------------------------------------------------------------------------------------------------ */

__device__ inline float sparse_weight(const sparse_params &params, const sparse_row32 &at, int64_t g)
{
    const skl_input &w = params.call.inputs.w_s;
    const int64_t row = at.sequence.query_begin + at.query;
    return skl_load(w.data, params.problem.dtype_w, SKL_ROW(w, at.sequence.batch, at.head, row) + g);
}

} // namespace sm80

#endif
