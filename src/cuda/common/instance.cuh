/* Macros for the translation units that CMake writes from the lines of instances.def. */
#ifndef SKL_CUDA_COMMON_INSTANCE_CUH
#define SKL_CUDA_COMMON_INSTANCE_CUH

#include "cuda/common/element.cuh"
#include "cuda/common/params.cuh"

typedef skl_bf16 skl_element_bf16;
typedef skl_f16 skl_element_f16;
#define SKL_ELEMENT(dtype) skl_element_##dtype /* f32: sm90/attention/instance.cuh */

/* A launcher with the name of its kernel, which it reports. `function` may hold commas. */
#define SKL_LAUNCHER(arch, dtype, size, role, ...)                                                                   \
    extern "C" cudaError_t skl_cuda_##arch##_##dtype##_##size##_##role(const skl_cuda_params *params,                \
                                                                       const skl_cuda_launch *launch)                \
    {                                                                                                                \
        return __VA_ARGS__("cuda_" #arch "_" #dtype "_" #size, params, launch);                                      \
    }

#endif
