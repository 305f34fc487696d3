#include "cuda/common/tensor_map.h"

#include <cudaTypedefs.h>
#include <cuda_runtime_api.h>

/* The driver's function, found at run time: the library needs no driver to load. */
static PFN_cuTensorMapEncodeTiled_v12000 find_encoder(void)
{
    void *function = NULL;
    enum cudaDriverEntryPointQueryResult found;
    const cudaError_t error =
        cudaGetDriverEntryPointByVersion("cuTensorMapEncodeTiled", &function, 12000, cudaEnableDefault, &found);
    if (error != cudaSuccess || found != cudaDriverEntryPointSuccess)
        return NULL;
    PFN_cuTensorMapEncodeTiled_v12000 encoder;
    _Static_assert(sizeof encoder == sizeof function, "POSIX: a pointer to data holds one to a function");
    memcpy(&encoder, &function, sizeof encoder);
    return encoder;
}

static CUtensorMapDataType map_type(skl_dtype dtype)
{
    static const CUtensorMapDataType types[] = {[SKL_F32] = CU_TENSOR_MAP_DATA_TYPE_FLOAT32,
                                                [SKL_F16] = CU_TENSOR_MAP_DATA_TYPE_FLOAT16,
                                                [SKL_BF16] = CU_TENSOR_MAP_DATA_TYPE_BFLOAT16};
    return types[dtype];
}

CUresult skl_tensor_map(CUtensorMap *map, skl_dtype dtype, const skl_input *tensor, int64_t dim, int64_t heads,
                        skl_tensor_rows shape, int box_rows)
{
    static _Thread_local PFN_cuTensorMapEncodeTiled_v12000 encoder = NULL;
    if (encoder == NULL)
        encoder = find_encoder();
    if (encoder == NULL)
        return CUDA_ERROR_NOT_SUPPORTED;
    if (shape.rows == 0)
        return CUDA_ERROR_INVALID_VALUE;
    const cuuint64_t size = skl_dtype_size(dtype);
    const int64_t batch_stride = shape.batch > 1 ? tensor->stride_batch : tensor->stride_head;
    const cuuint64_t sizes[4] = {(cuuint64_t)dim, (cuuint64_t)shape.rows, (cuuint64_t)heads, (cuuint64_t)shape.batch};
    const cuuint64_t strides[3] = {(cuuint64_t)tensor->stride_row * size, (cuuint64_t)tensor->stride_head * size,
                                   (cuuint64_t)batch_stride * size};
    const cuuint32_t box[4] = {(cuuint32_t)(128 / size), (cuuint32_t)box_rows, 1, 1}, steps[4] = {1, 1, 1, 1};
    return encoder(map, map_type(dtype), 4, (void *)(uintptr_t)tensor->data, sizes, strides, box, steps,
                   CU_TENSOR_MAP_INTERLEAVE_NONE, CU_TENSOR_MAP_SWIZZLE_128B, CU_TENSOR_MAP_L2_PROMOTION_L2_256B,
                   CU_TENSOR_MAP_FLOAT_OOB_FILL_NONE);
}
