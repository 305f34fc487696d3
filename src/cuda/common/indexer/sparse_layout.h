/* Workspace and shared memory of sparse scores on tensor cores: for planning and for launching. A block computes one
 * row at a time and keeps the scores of its entries in the workspace: at the start of a forward's, or after the chunk
 * of a backward. */
#ifndef SKL_CUDA_COMMON_INDEXER_SPARSE_LAYOUT_H
#define SKL_CUDA_COMMON_INDEXER_SPARSE_LAYOUT_H

#include "cuda/common/indexer/row_chunks.h"

enum {
    SKL_SPARSE_SCORE_SIZE = 12,   /* bytes per entry: the teacher's mean and the index logit */
    SKL_SPARSE_HEADS = 128,       /* heads per product, at most */
    SKL_SPARSE_SLAB = 64,         /* dimensions of a head in one pipeline stage */
    SKL_SPARSE_FIXED_SIZE = 6144, /* bytes of shared memory besides queries and stages */
    SKL_SPARSE_DY_SIZE = 1 << 25  /* bytes of dy in a chunk of kernels that add to dk in memory, if a row has less */
};

typedef struct skl_sparse_layout {
    skl_sparse_chunk chunk;
    int64_t num_blocks;    /* blocks of the scores kernel, each with scores in the workspace */
    size_t scores_at, end; /* offsets in the workspace, bytes */
    int32_t resident;      /* queries stay in shared memory; otherwise each slab of keys has one of queries */
    int32_t stage_size;    /* bytes of shared memory for stages */
    int32_t scores_smem;   /* bytes of shared memory of a block of the scores kernel */
} skl_sparse_layout;

/* Bytes of a slab of queries in shared memory: products have 32, 64 or 128 rows. */
static inline int64_t skl_sparse_query_size(int64_t heads)
{
    return (heads > 64 ? 128 : heads > 32 ? 64 : 32) * SKL_SPARSE_SLAB * 2;
}

/* Queries stay in shared memory if they fit next to 64 KiB of stages, which are at least two stages of any product. A
 * block that has an SM to itself uses 128 KiB for stages, if available. */
static inline void skl_sparse_plan_memory(skl_sparse_layout *layout, const skl_problem *p, int with_teacher,
                                          int64_t heads_per_key, int64_t block_smem_max, int64_t sm_smem)
{
    const int64_t stages_size = 64 << 10, streamed_size = 80 << 10; /* stages of keys; of keys and queries */
    const int64_t sharing = skl_min(skl_min(skl_group_size(p), heads_per_key), SKL_SPARSE_HEADS);
    const int64_t teacher_size = skl_ceil_div(p->dim_t, SKL_SPARSE_SLAB) * skl_sparse_query_size(sharing);
    const int64_t index_size =
        skl_ceil_div(p->dim_s, SKL_SPARSE_SLAB) * skl_sparse_query_size(skl_min(p->index_heads, SKL_SPARSE_HEADS));
    const int64_t resident = SKL_SPARSE_FIXED_SIZE + skl_max(with_teacher ? teacher_size : 0, index_size);
    const int two_blocks = 2 * (resident + stages_size + 1024) <= sm_smem;
    layout->resident = resident + stages_size <= block_smem_max;
    layout->stage_size = (int32_t)(!layout->resident                                             ? streamed_size
                                   : !two_blocks && resident + 2 * stages_size <= block_smem_max ? 2 * stages_size
                                                                                                 : stages_size);
    layout->scores_smem = (int32_t)(layout->resident ? resident : SKL_SPARSE_FIXED_SIZE) + layout->stage_size;
}

#endif
