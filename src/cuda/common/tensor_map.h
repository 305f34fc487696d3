/* TMA descriptors of [batch, heads, rows, dim] tensors. */
#ifndef SKL_CUDA_COMMON_TENSOR_MAP_H
#define SKL_CUDA_COMMON_TENSOR_MAP_H

#include <cuda.h>

#include "base/backend.h"

#ifdef __cplusplus
extern "C" {
#endif

/* What all heads of a tensor share; packed tensors are one long sequence. */
typedef struct skl_tensor_rows {
    int64_t rows, batch;
} skl_tensor_rows;

static inline skl_tensor_rows skl_query_rows(const skl_problem *p)
{
    const skl_tensor_rows shape = {p->packed ? p->total_q : p->len_q, p->packed ? 1 : p->batch};
    return shape;
}

static inline skl_tensor_rows skl_key_rows(const skl_problem *p)
{
    const skl_tensor_rows shape = {p->packed ? p->total_k : p->len_k, p->packed ? 1 : p->batch};
    return shape;
}

/* Boxes of `box_rows` rows of one head, 128 bytes per row, 128-byte swizzle. Anything but CUDA_SUCCESS: there is no
 * descriptor. CUDA_ERROR_INVALID_VALUE means that TMA cannot address such a tensor, CUDA_ERROR_NOT_SUPPORTED that the
 * driver is too old to have TMA; what else the driver returns, such as an earlier fault, the next launch reports. */
CUresult skl_tensor_map(CUtensorMap *map, skl_dtype dtype, const skl_input *tensor, int64_t dim, int64_t heads,
                        skl_tensor_rows shape, int box_rows);

#ifdef __cplusplus
}
#endif

#endif
