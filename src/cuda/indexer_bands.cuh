/* Bands of rows of an indexer's sparse stage (indexer_plan.h), one after the other: for every kernel that leaves what
 * entries of lists add to dk. */
#ifndef SKL_CUDA_INDEXER_BANDS_CUH
#define SKL_CUDA_INDEXER_BANDS_CUH

#include "base/side.h"
#include "cuda/indexer_plan.h"

/* Adds what the lists of a band's rows have for dk to params->sums, and stores it behind a key's last row. */
extern "C" cudaError_t skl_cuda_listed_keys(const skl_cuda_params *params, const skl_list_band *band, skl_range rows);

/* launch(params, band, rows) gives dq and dw of a band's rows, and leaves their parts of dk. */
template <typename LAUNCH> cudaError_t launch_list_bands(const skl_cuda_params *params, LAUNCH launch)
{
    const skl_problem *const p = &params->problem;
    const skl_list_band band = skl_list_band_of(p);
    skl_cuda_params own = *params;
    own.sums = skl_grad_dtype(p, p->dtype_s) == SKL_F32
                   ? own.call.gradients.dk_s
                   : skl_output_contiguous((char *)params->scratch + band.sums, p->key_heads_s,
                                           p->packed ? p->total_k : p->len_k, p->dim_s);
    skl_range rows = {0, 0};
    cudaError_t error = cudaSuccess;
    do { /* also without a row: keys that nobody lists have a gradient of 0 */
        rows = skl_range{rows.end, skl_min(rows.end + band.count, band.rows)};
        if (rows.begin < rows.end)
            error = launch(own, band, rows);
        if (error == cudaSuccess && own.call.gradients.dk_s.data != NULL)
            error = skl_cuda_listed_keys(&own, &band, rows);
    } while (rows.end < band.rows && error == cudaSuccess);
    return error;
}

#endif
