/* The launchers of one line of instances.def; the kernels are written for bf16. */
#include "cuda/common/instance.cuh"
#include "cuda/sm90/indexer/dense.cuh"

#define INDEXER_KERNELS(arch, dtype, stage)                                                                          \
    SKL_LAUNCHER(arch, dtype, stage, rows, sm90::launch_dense_rows)                                                  \
    SKL_LAUNCHER(arch, dtype, stage, gradients, sm90::launch_dense_gradients)
