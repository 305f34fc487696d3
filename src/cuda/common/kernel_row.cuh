/* Rows of the kernel list, for the files of cuda/units: each defines what one kernel supports, next to its launchers.
 */
#ifndef SKL_CUDA_COMMON_KERNEL_ROW_CUH
#define SKL_CUDA_COMMON_KERNEL_ROW_CUH

#include "cuda/common/element.cuh"
#include "cuda/common/params.cuh"
#include "cuda/kernels.h"

typedef skl_bf16 skl_element_bf16;
typedef skl_f16 skl_element_f16;
#define SKL_ELEMENT(dtype) skl_element_##dtype /* f32: sm90/attention/rows.cuh */

#define SKL_DTYPE_bf16 SKL_BF16
#define SKL_DTYPE_f16  SKL_F16
#define SKL_DTYPE_f32  SKL_F32

#define SKL_TYPES_bf16 "bf16"
#define SKL_TYPES_f16  "f16"
#define SKL_TYPES_f32  "f32 and mixed types"

#define SKL_PRODUCTS_sm80 "mma.sync"
#define SKL_PRODUCTS_sm90 "wgmma and TMA"
#define SKL_TMA_sm80      false
#define SKL_TMA_sm90      true

/* `softcap`, or `plain` where a kernel has no softcaps. */
#define SKL_SOFTCAP_softcap true
#define SKL_SOFTCAP_plain   false
#define SKL_DETAIL_softcap  ""
#define SKL_DETAIL_plain    ", no softcap"

/* The row cuda_ARCH_TYPE_NAME. The arguments after `detail` are members of skl_cuda_kernel, in their order. */
#define SKL_KERNEL(arch, type, name_, detail_, ...)                                                                  \
    extern "C" const skl_cuda_kernel skl_cuda_##arch##_##type##_##name_ = {                                          \
        .name = "cuda_" #arch "_" #type "_" #name_,                                                                  \
        .detail = SKL_TYPES_##type ", " detail_ ": " SKL_PRODUCTS_##arch,                                            \
        .capability = SKL_CAPABILITY_##arch,                                                                         \
        .capability_end = SKL_CAPABILITY_END_##arch,                                                                 \
        .tma = SKL_TMA_##arch,                                                                                       \
        .two_terms = SKL_DTYPE_##type == SKL_F32,                                                                    \
        .dtype = SKL_DTYPE_##type,                                                                                   \
        __VA_ARGS__};

/* A launcher that reports the name of its kernel. The function may hold commas. */
#define SKL_LAUNCHER(arch, type, name, ...)                                                                          \
    [](const skl_cuda_params *params, const skl_cuda_launch *launch) {                                               \
        return __VA_ARGS__("cuda_" #arch "_" #type "_" #name, params, launch);                                       \
    }

#endif
