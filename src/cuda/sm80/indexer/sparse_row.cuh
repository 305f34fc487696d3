/* Code that the mma.sync kernels for a sparse indexer share.
 *
 * A block computes one row. Different rows have different keys, but all heads of a row that share a key head share
 * the row's `indices`. So heads are the rows of a product, 16 per mma, and the gathered keys are its columns. */
#ifndef SKL_CUDA_SM80_INDEXER_SPARSE_ROW_CUH
#define SKL_CUDA_SM80_INDEXER_SPARSE_ROW_CUH

#include "base/convert.h"
#include "cuda/common/indexer/sparse_row.cuh"
#include "cuda/common/indexer/row_chunks.h"
#include "cuda/common/strips/logit_tile.cuh"
#include "cuda/sm80/mma_tile.cuh"

namespace sm80
{

constexpr int SPARSE_WARPS = 8;
constexpr int SPARSE_THREADS = 32 * SPARSE_WARPS;
constexpr int SPARSE_HEADS = 128; /* per product, at most */

struct sparse_params : skl_cuda_params {
    skl_cuda_argument teacher, student;
    bool with_teacher;          /* false: only the LSEs of the indexer are wanted */
    float least;                /* lower bound of the ReLU: 0, or -inf without a ReLU */
    int32_t resident;           /* queries stay in shared memory; otherwise each slab of keys has one of queries */
    int32_t stage_size;         /* bytes of shared memory for all stages */
    lse_row *mean;              /* [block][top_k]: sum over the teacher heads, not divided by their number yet */
    float *logits;              /* [block][top_k]: index logits, not scaled yet */
    int64_t row_first, row_end; /* rows of the launch */
    float *dy;                  /* [row of the launch][top_k], without upstream gradient and scale */
    float *entry_dk;            /* [row of the launch][top_k][dim]: what each entry adds to dk; NULL: not wanted */
};

/* ---- The current row ---------------------------------------------------------------------------------------- */

/* Sets the row that the block computes. All threads call it. */
__device__ inline void find_row(sparse_row32 &to, const sparse_params &params, int64_t item)
{
    __syncthreads(); /* all threads are done with the previous row */
    if (threadIdx.x == 0)
        to = to_row32(params, sparse_row_at(params, item));
    __syncthreads();
}

/* Drops the entries after the last valid one: rows with few visible keys have few valid entries. */
__device__ inline void trim_indices(sparse_row32 &row)
{
    int last = 0;
    for (int n = (int)threadIdx.x; n < row.count; n += SPARSE_THREADS)
        last = row.key(n) >= 0 ? n + 1 : last;
    __syncthreads(); /* all threads have read their entries */
    if (threadIdx.x == 0)
        row.count = 0;
    __syncthreads();
    atomicMax(&row.count, last);
    __syncthreads();
}

/* ---- Copies ------------------------------------------------------------------------------------------------- */

/* Starts copying DIM dimensions, from `first` on, of `count` rows to consecutive smem_rows<DIM>. index(n) is the
 * source row of row n. Rows with index -1 and dimensions >= from.dim become 0. */
template <int DIM, typename ELEMENT, typename INDEX>
__device__ inline void gather_rows(smem_rows<DIM> *to, int count, const row_source<ELEMENT> &from, int first,
                                   INDEX index)
{
    constexpr int CHUNKS = DIM / 8;
    constexpr int ROWS = SPARSE_THREADS / CHUNKS; /* rows per copy of the whole block */
    constexpr int TOGETHER = 2;                   /* indices in flight at once, so that their loads overlap */
    static_assert(ROWS % 8 == 0, "all chunks of a thread have the same swizzle");
    const int row = (int)threadIdx.x / CHUNKS, chunk = (int)threadIdx.x % CHUNKS;
    const ELEMENT *const source = from.rows + first + chunk * 8;
    const int64_t stride = from.stride;
    const bool inside = first + chunk * 8 < from.dim;
    const uint32_t target = shared_address(&to->chunks[row][chunk ^ row % 8]);
#pragma unroll 1
    for (int n = row; n < count; n += ROWS * TOGETHER) {
        int source_row[TOGETHER];
#pragma unroll
        for (int i = 0; i < TOGETHER; i++)
            source_row[i] = n + i * ROWS < count ? index(n + i * ROWS) : -1;
#pragma unroll
        for (int i = 0; i < TOGETHER; i++)
            if (n + i * ROWS < count)
                cp_async_16(target + (uint32_t)((n - row + i * ROWS) * DIM * 2),
                            source + max(source_row[i], 0) * stride, inside && source_row[i] >= 0 ? 16 : 0);
    }
}

/* ---- Weights ------------------------------------------------------------------------------------------------ */

/* Weight of index head g of the current row. */
__device__ inline float sparse_weight(const sparse_params &params, const sparse_row32 &row, int64_t g)
{
    const skl_input &w = params.call.inputs.w_s;
    const int64_t query = row.sequence.query_begin + row.query;
    return skl_load(w.data, params.problem.dtype_w, SKL_ROW(w, row.sequence.batch, row.head, query) + g);
}

} // namespace sm80

#endif
