/* The launchers of one line of instances.def; the kernels are written for bf16. */
#include "cuda/common/instance.cuh"
#include "cuda/sm90/strips/launch.cuh"

#define INDEXER_KERNELS(arch, dtype, kind)                                                                           \
    SKL_LAUNCHER(arch, dtype, kind, rows, sm90::launch_dense_rows)                                                   \
    SKL_LAUNCHER(arch, dtype, kind, gradients, sm90::launch_dense_gradients)
