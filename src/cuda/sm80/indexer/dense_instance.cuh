/* The launchers of one line of instances.def. */
#include "cuda/common/instance.cuh"
#include "cuda/sm80/indexer/dense.cuh"

#define INDEXER_KERNELS(arch, dtype, stage)                                                                          \
    SKL_LAUNCHER(arch, dtype, stage, rows, sm80::launch_dense_rows<SKL_ELEMENT(dtype)>)                              \
    SKL_LAUNCHER(arch, dtype, stage, gradients, sm80::launch_dense_gradients<SKL_ELEMENT(dtype)>)
