/* Hopper: sparse indexers. */
#include "cuda/common/kernel_row.cuh"
#include "cuda/sm90/indexer/sparse.cuh"

#define SKL_SM90_SPARSE(type)                                                                                        \
    SKL_KERNEL(sm90, type, sparse, "sparse indexers, up to 64 index heads, dim <= 128", .does = SKL_DOES_SPARSE,     \
               .dim_max = SKL_SM90_INDEX_DIM_MAX, .index_heads_max = SKL_SM90_INDEX_HEADS_MAX,                       \
               .forward = SKL_LAUNCHER(sm90, type, sparse, sm90::launch_sparse_rows<SKL_ELEMENT(type)>),             \
               .fused = SKL_LAUNCHER(sm90, type, sparse, sm90::launch_sparse_fused<SKL_ELEMENT(type)>))

SKL_SM90_SPARSE(bf16)
SKL_SM90_SPARSE(f16)
