/* Runs the backward of a sparse indexer chunk by chunk (row_chunks.h): for every kernel that stores what each entry
 * of `indices` adds to dk. */
#ifndef SKL_CUDA_COMMON_INDEXER_SPARSE_CHUNKS_CUH
#define SKL_CUDA_COMMON_INDEXER_SPARSE_CHUNKS_CUH

#include "cuda/common/params.cuh"

struct sparse_dk_params : skl_cuda_params {
    skl_output dk_sums; /* f32: dk itself, or workspace */
};

/* Adds the dk of a chunk's entries to params->dk_sums. Stores the sums of a key head as dk with its last row. */
extern "C" cudaError_t skl_cuda_sparse_dk(const sparse_dk_params *params, const skl_sparse_chunk *chunk,
                                          skl_range rows, int32_t sm_count);

/* launch_rows(rows) computes dq and dw of a chunk's rows, and stores what each entry adds to dk. */
template <typename LAUNCH>
cudaError_t launch_sparse_chunks(const skl_cuda_params *params, const skl_cuda_launch *launch, LAUNCH launch_rows)
{
    const skl_problem *const p = &params->problem;
    const skl_sparse_chunk &chunk = launch->sparse.chunk;
    const skl_output dk_sums =
        skl_grad_dtype(p, p->dtype_s) == SKL_F32
            ? params->call.gradients.dk_s
            : skl_output_contiguous((char *)params->call.workspace + chunk.sums, p->key_heads_s,
                                    p->packed ? p->total_k : p->len_k, p->dim_s);
    const sparse_dk_params of_keys = {*params, dk_sums};
    skl_range rows = {0, 0};
    cudaError_t error = cudaSuccess;
    do { /* at least once, even without rows: keys in no row's indices have a gradient of 0 */
        rows = skl_range{rows.end, skl_min(rows.end + chunk.count, chunk.rows)};
        if (rows.begin < rows.end)
            error = launch_rows(rows);
        if (error == cudaSuccess && params->call.gradients.dk_s.data != NULL)
            error = skl_cuda_sparse_dk(&of_keys, &chunk, rows, launch->sm_count);
    } while (rows.end < chunk.rows && error == cudaSuccess);
    return error;
}

#endif
