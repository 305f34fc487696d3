/* TMA descriptors of queries, keys and gradients. */
#ifndef SKL_CUDA_SM90_TENSOR_MAP_CUH
#define SKL_CUDA_SM90_TENSOR_MAP_CUH

#include <cudaTypedefs.h>
#include <cuda_bf16.h>
#include <cuda_fp16.h>

#include "cuda/launch.h"

namespace sm90
{

inline CUtensorMapDataType map_type(__nv_bfloat16)
{
    return CU_TENSOR_MAP_DATA_TYPE_BFLOAT16;
}

inline CUtensorMapDataType map_type(__half)
{
    return CU_TENSOR_MAP_DATA_TYPE_FLOAT16;
}

/* Looks the function up in the driver, so that nothing links with libcuda; NULL if the driver is too old. */
inline PFN_cuTensorMapEncodeTiled_v12000 find_encoder()
{
    void *function = NULL;
    cudaDriverEntryPointQueryResult found;
    const cudaError_t error =
        cudaGetDriverEntryPointByVersion("cuTensorMapEncodeTiled", &function, 12000, cudaEnableDefault, &found);
    return error == cudaSuccess && found == cudaDriverEntryPointSuccess ? (PFN_cuTensorMapEncodeTiled_v12000)function
                                                                        : NULL;
}

/* Rows per head, and batch size; packed tensors are one long sequence. */
struct tensor_rows {
    int64_t rows, batch;
};

inline tensor_rows query_rows(const skl_problem *p)
{
    return {p->packed ? p->total_q : p->len_q, p->packed ? 1 : p->batch};
}

inline tensor_rows key_rows(const skl_problem *p)
{
    return {p->packed ? p->total_k : p->len_k, p->packed ? 1 : p->batch};
}

/* Describes [batch, heads, rows, dim] in boxes of `box_rows` rows of one head, 128 bytes per row. False if TMA does
 * not support the tensor's address or strides. */
inline bool encode(CUtensorMap *map, CUtensorMapDataType type, const skl_input *tensor, int64_t dim, int64_t heads,
                   tensor_rows shape, int box_rows)
{
    static const PFN_cuTensorMapEncodeTiled_v12000 encoder = find_encoder();
    if (encoder == NULL || shape.rows == 0)
        return false;
    const cuuint64_t size = type == CU_TENSOR_MAP_DATA_TYPE_FLOAT32 ? 4 : 2;
    const cuuint64_t sizes[4] = {(cuuint64_t)dim, (cuuint64_t)shape.rows, (cuuint64_t)heads, (cuuint64_t)shape.batch};
    const cuuint64_t strides[3] = {(cuuint64_t)tensor->stride_row * size, (cuuint64_t)tensor->stride_head * size,
                                   (cuuint64_t)(shape.batch > 1 ? tensor->stride_batch : tensor->stride_head) * size};
    const cuuint32_t box[4] = {(cuuint32_t)(128 / size), (cuuint32_t)box_rows, 1, 1}, steps[4] = {1, 1, 1, 1};
    return encoder(map, type, 4, (void *)tensor->data, sizes, strides, box, steps, CU_TENSOR_MAP_INTERLEAVE_NONE,
                   CU_TENSOR_MAP_SWIZZLE_128B, CU_TENSOR_MAP_L2_PROMOTION_L2_256B,
                   CU_TENSOR_MAP_FLOAT_OOB_FILL_NONE) == CUDA_SUCCESS;
}

template <typename ELEMENT>
inline bool encode_queries(CUtensorMap *map, const skl_problem *p, const skl_cuda_argument *side, int box_rows,
                           ELEMENT element)
{
    return encode(map, map_type(element), &side->q, side->dim, p->heads_s, query_rows(p), box_rows);
}

template <typename ELEMENT>
inline bool encode_keys(CUtensorMap *map, const skl_problem *p, const skl_cuda_argument *side, int box_rows,
                        ELEMENT element)
{
    return encode(map, map_type(element), &side->k, side->dim, p->heads_s / side->heads_per_key, key_rows(p),
                  box_rows);
}

} // namespace sm90

#endif
