/* The launchers of one line of instances.def. */
#define SKL_SIGNED_THREAD_INDEX /* see thread_index */

#include "cuda/common/instance.cuh"
#include "cuda/sm80/strips/launch.cuh"

#define INDEXER_KERNELS(arch, dtype, kind)                                                                           \
    SKL_LAUNCHER(arch, dtype, kind, rows,                                                                            \
                 tensor_core::launch_difference_rows<sm80::difference_kernels<SKL_ELEMENT(dtype)>>)                  \
    SKL_LAUNCHER(arch, dtype, kind, gradients,                                                                       \
                 tensor_core::launch_difference_gradients<sm80::difference_kernels<SKL_ELEMENT(dtype)>>)
