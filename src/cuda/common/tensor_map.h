/* TMA descriptors of [batch, heads, rows, dim] tensors. */
#ifndef SKL_CUDA_COMMON_TENSOR_MAP_H
#define SKL_CUDA_COMMON_TENSOR_MAP_H

#include <cuda.h>

#include "base/side.h"

#ifdef __cplusplus
extern "C" {
#endif

/* Boxes of `box_rows` rows of one head, 128 bytes per row, 128-byte swizzle. Anything but CUDA_SUCCESS: there is no
 * descriptor. CUDA_ERROR_INVALID_VALUE means that TMA cannot address such a tensor, CUDA_ERROR_NOT_SUPPORTED that the
 * driver is too old to have TMA; the next launch reports other errors of the driver, such as an earlier fault. */
CUresult skl_tensor_map(CUtensorMap *map, skl_dtype dtype, const skl_input *tensor, int64_t dim, int64_t heads,
                        skl_tensor_rows shape, int box_rows);

#ifdef __cplusplus
}
#endif

#endif
