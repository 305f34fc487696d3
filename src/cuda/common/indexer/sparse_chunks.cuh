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

/* Calls launch(range) for each chunk of `count` units. At least once, even without units: keys that no row attends to
 * have a gradient of 0. */
template <typename LAUNCH> cudaError_t for_each_chunk(int64_t units, int64_t count, LAUNCH launch)
{
    skl_range range = {0, 0};
    cudaError_t error = cudaSuccess;
    do {
        range = skl_range{range.end, skl_min(range.end + count, units)};
        error = launch(range);
    } while (range.end < units && error == cudaSuccess);
    return error;
}

/* launch_rows(rows) computes dq and dw of a chunk's rows, and stores what each entry adds to dk. */
template <typename LAUNCH>
cudaError_t launch_sparse_chunks(const skl_cuda_params *params, const skl_cuda_launch *launch, LAUNCH launch_rows)
{
    const skl_sparse_chunk &chunk = launch->sparse.chunk;
    const sparse_dk_params of_keys = {*params, dk_sums_of(params, false, chunk.sums)};
    return for_each_chunk(chunk.rows, chunk.count, [&](skl_range rows) {
        cudaError_t error = cudaSuccess;
        if (rows.begin < rows.end)
            error = launch_rows(rows);
        if (error == cudaSuccess && params->call.gradients.dk_s.data != NULL)
            error = skl_cuda_sparse_dk(&of_keys, &chunk, rows, launch->sm_count);
        return error;
    });
}

#endif
