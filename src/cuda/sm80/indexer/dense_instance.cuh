/* The launchers of one line of instances.def. */
#define SKL_SIGNED_THREAD_INDEX /* see thread_index */

#include "cuda/common/instance.cuh"
#include "cuda/sm80/strips/difference_launch.cuh"

#define INDEXER_KERNELS(arch, dtype, kind)                                                                           \
    SKL_LAUNCHER(arch, dtype, kind, rows, sm80::launch_dense_rows<SKL_ELEMENT(dtype)>)                               \
    SKL_LAUNCHER(arch, dtype, kind, gradients, sm80::launch_dense_gradients<SKL_ELEMENT(dtype)>)
