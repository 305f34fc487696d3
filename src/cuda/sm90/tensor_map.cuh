/* Descriptions of the key tensors for the copy engine. */
#ifndef SKL_CUDA_SM90_TENSOR_MAP_CUH
#define SKL_CUDA_SM90_TENSOR_MAP_CUH

#include <cudaTypedefs.h>
#include <cuda_bf16.h>
#include <cuda_fp16.h>

#include "cuda/launch.h"

namespace sm90
{

/* Keys of both arguments. */
struct tensor_maps {
    CUtensorMap one, two;
};

inline CUtensorMapDataType map_type(__nv_bfloat16)
{
    return CU_TENSOR_MAP_DATA_TYPE_BFLOAT16;
}

inline CUtensorMapDataType map_type(__half)
{
    return CU_TENSOR_MAP_DATA_TYPE_FLOAT16;
}

/* The driver's function, which there is no need to link with; NULL if the driver is too old. */
inline PFN_cuTensorMapEncodeTiled_v12000 find_encoder()
{
    void *function = NULL;
    cudaDriverEntryPointQueryResult found;
    const cudaError_t error =
        cudaGetDriverEntryPointByVersion("cuTensorMapEncodeTiled", &function, 12000, cudaEnableDefault, &found);
    return error == cudaSuccess && found == cudaDriverEntryPointSuccess ? (PFN_cuTensorMapEncodeTiled_v12000)function
                                                                        : NULL;
}

/* [batch, heads, rows, dim] in boxes of `box_rows` rows of one head, 64 dimensions each. */
inline bool encode(CUtensorMap *map, CUtensorMapDataType type, const skl_input *tensor, int64_t dim, int64_t rows,
                   int64_t heads, int64_t batch, int box_rows)
{
    static const PFN_cuTensorMapEncodeTiled_v12000 encoder = find_encoder();
    if (encoder == NULL)
        return false;
    const cuuint64_t sizes[4] = {(cuuint64_t)dim, (cuuint64_t)rows, (cuuint64_t)heads, (cuuint64_t)batch};
    const cuuint64_t strides[3] = {(cuuint64_t)tensor->stride_row * 2, (cuuint64_t)tensor->stride_head * 2,
                                   (cuuint64_t)(batch > 1 ? tensor->stride_batch : tensor->stride_head) * 2};
    const cuuint32_t box[4] = {64, (cuuint32_t)box_rows, 1, 1}, steps[4] = {1, 1, 1, 1};
    return encoder(map, type, 4, (void *)tensor->data, sizes, strides, box, steps, CU_TENSOR_MAP_INTERLEAVE_NONE,
                   CU_TENSOR_MAP_SWIZZLE_128B, CU_TENSOR_MAP_L2_PROMOTION_L2_256B,
                   CU_TENSOR_MAP_FLOAT_OOB_FILL_NONE) == CUDA_SUCCESS;
}

/* False where the engine cannot copy such tensors. */
template <typename ELEMENT>
inline bool make_tensor_maps(tensor_maps *maps, const skl_cuda_params *params, ELEMENT element, int box_rows)
{
    const skl_problem *const p = &params->problem;
    const int64_t rows = p->packed ? p->total_k : p->len_k, batch = p->packed ? 1 : p->batch;
    const skl_cuda_argument *const one = &params->one, *const two = &params->two;
    return rows > 0 &&
           encode(&maps->one, map_type(element), &one->k, one->dim, rows, p->heads_s / one->heads_per_key, batch,
                  box_rows) &&
           encode(&maps->two, map_type(element), &two->k, two->dim, rows, p->heads_s / two->heads_per_key, batch,
                  box_rows);
}

} // namespace sm90

#endif
