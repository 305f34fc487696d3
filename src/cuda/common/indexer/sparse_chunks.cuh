/* Bands of rows of an indexer's sparse stage (indexer_plan.h), one after the other: for every kernel that leaves what
 * entries of lists add to dk. */
#ifndef SKL_CUDA_COMMON_INDEXER_SPARSE_CHUNKS_CUH
#define SKL_CUDA_COMMON_INDEXER_SPARSE_CHUNKS_CUH

#include "base/side.h"
#include "cuda/common/indexer/row_chunks.h"

/* Adds what the lists of a chunk's rows have for dk to params->sums, and stores it behind a key's last row. */
extern "C" cudaError_t skl_cuda_sparse_dk(const skl_cuda_params *params, const skl_sparse_chunk *chunk,
                                          skl_range rows);

/* launch(params, chunk, rows) gives dq and dw of a chunk's rows, and leaves their parts of dk. */
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
    do { /* also without a row: keys that nobody lists have a gradient of 0 */
        rows = skl_range{rows.end, skl_min(rows.end + chunk.count, chunk.rows)};
        if (rows.begin < rows.end)
            error = launch(own, chunk, rows);
        if (error == cudaSuccess && own.call.gradients.dk_s.data != NULL)
            error = skl_cuda_sparse_dk(&own, &chunk, rows);
    } while (rows.end < chunk.rows && error == cudaSuccess);
    return error;
}

#endif
