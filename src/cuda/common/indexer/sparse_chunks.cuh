/* Runs the backward of a sparse indexer chunk by chunk (row_chunks.h): for every kernel that stores what each entry
 * of `indices` adds to dk. */
#ifndef SKL_CUDA_COMMON_INDEXER_SPARSE_CHUNKS_CUH
#define SKL_CUDA_COMMON_INDEXER_SPARSE_CHUNKS_CUH

#include "base/side.h"
#include "cuda/common/indexer/row_chunks.h"

/* Adds the dk of a chunk's entries to params->sums. Stores the sums of a key head as dk with its last row. */
extern "C" cudaError_t skl_cuda_sparse_dk(const skl_cuda_params *params, const skl_sparse_chunk *chunk,
                                          skl_range rows);

/* launch(params, chunk, rows) computes dq and dw of a chunk's rows, and stores what each entry adds to dk. */
template <typename LAUNCH> cudaError_t launch_sparse_chunks(const skl_cuda_params *params, LAUNCH launch)
{
    const skl_problem *const p = &params->problem;
    const skl_sparse_chunk chunk = skl_sparse_chunk_of(p);
    skl_cuda_params own = *params;
    own.sums = skl_grad_dtype(p, p->dtype_s) == SKL_F32
                   ? own.call.gradients.dk_s
                   : skl_output_contiguous((char *)params->scratch + chunk.sums, p->key_heads_s,
                                           p->packed ? p->total_k : p->len_k, p->dim_s);
    skl_range rows = {0, 0};
    cudaError_t error = cudaSuccess;
    do { /* at least once, even without rows: keys in no row's indices have a gradient of 0 */
        rows = skl_range{rows.end, skl_min(rows.end + chunk.count, chunk.rows)};
        if (rows.begin < rows.end)
            error = launch(own, chunk, rows);
        if (error == cudaSuccess && own.call.gradients.dk_s.data != NULL)
            error = skl_cuda_sparse_dk(&own, &chunk, rows);
    } while (rows.end < chunk.rows && error == cudaSuccess);
    return error;
}

#endif
