/* Hopper: sparse indexers. */
#include "cuda/common/kernel_row.cuh"
#include "cuda/sm90/indexer/sparse.cuh"

SKL_KERNEL(sm90, bf16, sparse, "sparse indexers, up to 64 index heads, dim <= 128", .does = SKL_DOES_SPARSE,
           .dim_max = SKL_SM90_INDEX_DIM_MAX, .index_heads_max = SKL_SM90_INDEX_HEADS_MAX,
           .forward = SKL_LAUNCHER(sm90, bf16, sparse, sm90::launch_sparse_rows<skl_bf16>),
           .fused = SKL_LAUNCHER(sm90, bf16, sparse, sm90::launch_sparse_fused<skl_bf16>))
