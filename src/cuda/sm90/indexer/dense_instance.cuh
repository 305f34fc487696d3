/* The launchers of one line of instances.def; the kernels are written for bf16. */
#include "cuda/common/instance.cuh"
#include "cuda/sm90/strips/launch.cuh"

#define INDEXER_KERNELS(arch, dtype, kind)                                                                           \
    SKL_LAUNCHER(arch, dtype, kind, rows, tensor_core::launch_difference_rows<sm90::difference_kernels>)             \
    SKL_LAUNCHER(arch, dtype, kind, gradients, tensor_core::launch_difference_gradients<sm90::difference_kernels>)
