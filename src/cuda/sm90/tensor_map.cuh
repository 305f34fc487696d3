/* TMA descriptors of the tensors of both arguments. */
#ifndef SKL_CUDA_SM90_TENSOR_MAP_CUH
#define SKL_CUDA_SM90_TENSOR_MAP_CUH

#include "cuda/common/element.cuh"
#include "cuda/common/tensor_map.h"
#include "cuda/launch.h"

namespace sm90
{

inline skl_dtype dtype_of_element(skl_bf16)
{
    return SKL_BF16;
}

inline skl_dtype dtype_of_element(skl_f16)
{
    return SKL_F16;
}

/* cuda/select has found that TMA can address the tensors: if there is no descriptor, an earlier launch has failed,
 * which any call of the runtime reports. */
inline cudaError_t encode_error()
{
    const cudaError_t error = cudaFree(NULL);
    return error != cudaSuccess ? error : cudaErrorInvalidValue;
}

template <typename ELEMENT>
inline bool encode_queries(CUtensorMap *map, const skl_problem *p, const skl_cuda_argument *side, int box_rows,
                           ELEMENT element)
{
    return skl_tensor_map(map, dtype_of_element(element), &side->q, side->dim, p->heads_s, skl_query_rows(p),
                          box_rows) == CUDA_SUCCESS;
}

template <typename ELEMENT>
inline bool encode_keys(CUtensorMap *map, const skl_problem *p, const skl_cuda_argument *side, int box_rows,
                        ELEMENT element)
{
    return skl_tensor_map(map, dtype_of_element(element), &side->k, side->dim, p->heads_s / side->heads_per_key,
                          skl_key_rows(p), box_rows) == CUDA_SUCCESS;
}

/* Encodes f32 sums of a gradient, to which TMA adds. A box has the rows of a warp, or box_rows. */
inline bool encode_sums(CUtensorMap *map, const skl_output &out, int64_t dim, int64_t heads, skl_tensor_rows rows,
                        int box_rows = 16)
{
    const skl_input sums = skl_input_of(&out);
    return skl_tensor_map(map, SKL_F32, &sums, dim, heads, rows, box_rows) == CUDA_SUCCESS;
}

} // namespace sm90

#endif
