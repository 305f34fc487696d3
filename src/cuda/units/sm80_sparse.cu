/* Sparse indexers by mma.sync. */
#define SKL_SIGNED_THREAD_INDEX /* see thread_index */

#include "cuda/common/kernel_row.cuh"
#include "cuda/sm80/indexer/sparse.cuh"

#define SKL_SM80_SPARSE(type)                                                                                        \
    SKL_KERNEL(sm80, type, sparse, "sparse indexers", .does = SKL_DOES_SPARSE, .dim_max = 256, .reverse = true,      \
               .forward = SKL_LAUNCHER(sm80, type, sparse, sm80::launch_sparse_rows<SKL_ELEMENT(type)>),             \
               .gradients = SKL_LAUNCHER(sm80, type, sparse, sm80::launch_sparse_gradients<SKL_ELEMENT(type)>))

SKL_SM80_SPARSE(bf16)
SKL_SM80_SPARSE(f16)
