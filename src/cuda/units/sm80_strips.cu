/* Strips by mma.sync: dense indexers and teacher groups of any size. */
#define SKL_SIGNED_THREAD_INDEX /* see thread_index */

#include "cuda/common/kernel_row.cuh"
#include "cuda/sm80/strips/launch.cuh"

#define SKL_SM80_STRIPS(type)                                                                                        \
    SKL_KERNEL(                                                                                                      \
        sm80, type, strips, "dense indexers, large teacher groups", .does = SKL_DOES_DENSE | SKL_DOES_GROUPS,        \
        .dim_max = SKL_STRIP_DIM_MAX, .pool_dim_max = SKL_INDEXED_DIM_MAX,                                           \
        .forward =                                                                                                   \
            SKL_LAUNCHER(sm80, type, strips,                                                                         \
                         tensor_core::launch_differences<sm80::difference_kernels<SKL_ELEMENT(type)>, false>),       \
        .gradients = SKL_LAUNCHER(                                                                                   \
            sm80, type, strips, tensor_core::launch_differences<sm80::difference_kernels<SKL_ELEMENT(type)>, true>))

SKL_SM80_STRIPS(bf16)
SKL_SM80_STRIPS(f16)
