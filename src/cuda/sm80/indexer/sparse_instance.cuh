/* The launchers of one line of instances.def. */
#define SKL_SIGNED_THREAD_INDEX /* see thread_index */

#include "cuda/common/instance.cuh"
#include "cuda/sm80/indexer/sparse.cuh"

#define INDEXER_KERNELS(arch, dtype, kind)                                                                           \
    SKL_LAUNCHER(arch, dtype, kind, rows, sm80::launch_sparse_rows<SKL_ELEMENT(dtype)>)                              \
    SKL_LAUNCHER(arch, dtype, kind, gradients, sm80::launch_sparse_gradients<SKL_ELEMENT(dtype)>)
