/* How the general kernels for indexers cut a backward into chunks, and what workspace that takes.
 *
 * Dense: the gradient of the logits, dy, is computed once for all index heads, for queries and keys. Tiles of 128
 * queries take turns in the workspace, a chunk of them at a time: [tile][key][query]. Sums of dk stay there from
 * chunk to chunk, in parts that each have some of the index heads: few keys make few tiles, and parts fill the GPU.
 *
 * Sparse: the lists of many rows name a key, in no order that blocks could agree on, and adds to memory in any order
 * would have other bits on every run. So each entry of a list leaves what it adds to dk in the workspace,
 * [row][entry] [dim], for a chunk of rows at a time; the entries are put in the order of their keys, and every block
 * of keys collects what is its own, in the order of the lists. Nothing of that is looked for twice: the teacher's
 * products, most of the work, are computed once a row. */
#ifndef SKL_CUDA_COMMON_INDEXER_ROW_CHUNKS_H
#define SKL_CUDA_COMMON_INDEXER_ROW_CHUNKS_H

#include "base/side.h"

enum { SKL_GENERAL_TILE = 128 }; /* rows per block of the general kernels */

enum { SKL_CHUNK_BYTES = 1 << 28 }; /* of a chunk, unless one tile or row takes more */

enum { SKL_INDEX_STEP = 64 }; /* keys that a block looks at together */

SKL_HOST_DEVICE size_t skl_aligned_size(size_t size)
{
    return (size + 255) / 256 * 256;
}

/* Units that fit into a chunk: at least one, no more than there are. */
SKL_HOST_DEVICE int64_t skl_chunk_units(int64_t unit_size, int64_t count)
{
    return skl_max(1, skl_min(count, SKL_CHUNK_BYTES / skl_max(unit_size, 1)));
}

/* ---- Dense -------------------------------------------------------------------------------------------------- */

typedef struct skl_dense_chunk {
    int64_t tiles;     /* of all queries of all heads */
    int64_t key_steps; /* of a tile, at most */
    int64_t count;     /* tiles of a chunk */
    int64_t tile_size; /* floats of dy of a tile */
    int64_t key_tiles; /* of all key heads */
    int64_t parts;     /* of dk */
    int64_t part_size; /* floats of dk */
    size_t sums, end;  /* where in the workspace: parts of dk, behind dy */
} skl_dense_chunk;

enum { SKL_DK_PARTS_MAX = 8 };

SKL_HOST_DEVICE skl_dense_chunk skl_dense_chunk_of(const skl_problem *p, int32_t sm_count)
{
    skl_dense_chunk chunk;
    chunk.tiles = p->batch * p->heads_s * skl_ceil_div(p->len_q, SKL_GENERAL_TILE);
    chunk.key_steps = skl_ceil_div(p->len_k, SKL_INDEX_STEP);
    chunk.tile_size = chunk.key_steps * SKL_INDEX_STEP * SKL_GENERAL_TILE;
    /* Enough for a few blocks a multiprocessor, each of which does one index head of a tile. */
    const int64_t enough = skl_ceil_div(4 * (int64_t)sm_count, p->index_heads);
    chunk.count = skl_chunk_units(chunk.tile_size * (int64_t)sizeof(float), skl_min(chunk.tiles, enough));
    chunk.key_tiles = p->batch * p->key_heads_s * skl_ceil_div(p->len_k, SKL_GENERAL_TILE);
    chunk.parts = skl_min(skl_min(p->index_heads, SKL_DK_PARTS_MAX),
                          skl_ceil_div(2 * (int64_t)sm_count, skl_max(chunk.key_tiles, 1)));
    chunk.part_size = (p->packed ? p->total_k : p->batch * p->len_k) * p->key_heads_s * p->dim_s;
    const int keys = (p->gradients & SKL_DK_S) != 0;
    chunk.sums = skl_aligned_size((size_t)(chunk.count * chunk.tile_size) * sizeof(float));
    chunk.end = chunk.sums + (keys ? (size_t)(chunk.parts * chunk.part_size) * sizeof(float) : 0);
    return chunk;
}

/* ---- Sparse ------------------------------------------------------------------------------------------------- */

typedef struct skl_sparse_chunk {
    int64_t rows;  /* of all heads */
    int64_t count; /* rows of a chunk */
    size_t dy;     /* where in the workspace: dy of a list, for each row */
    size_t parts;  /* what each entry adds to dk */
    size_t order;  /* int32 [row][top_k]: entries that are keys, by buckets of keys, each as on the list */
    size_t starts; /* int32 [bucket][row]: where in it a bucket begins; one more says where the last one ends */
    size_t sums;   /* of dk, f32, if the gradient is not and there are more chunks than one */
    size_t end;
    int64_t buckets, bucket_keys;
} skl_sparse_chunk;

enum { SKL_SPARSE_BUCKETS_MAX = 4096 }; /* counted in shared memory: of 64 keys up to 262,144 keys, of more beyond */

SKL_HOST_DEVICE skl_sparse_chunk skl_sparse_chunk_of(const skl_problem *p)
{
    const int keys = (p->gradients & SKL_DK_S) != 0;
    const int64_t keys_count = p->packed ? p->total_k : p->batch * p->len_k, indices_size = p->top_k * 4;
    skl_sparse_chunk chunk;
    const int64_t steps = skl_ceil_div(p->len_k, SKL_INDEX_STEP);
    chunk.bucket_keys = SKL_INDEX_STEP * skl_max(1, skl_ceil_div(steps, SKL_SPARSE_BUCKETS_MAX));
    chunk.buckets = skl_ceil_div(p->len_k, chunk.bucket_keys);
    const int64_t parts_size = keys ? indices_size * p->dim_s : 0, order_size = keys ? indices_size : 0;
    const int64_t starts_size = keys ? (chunk.buckets + 1) * 4 : 0;
    chunk.rows = p->batch * p->heads_s * p->len_q;
    chunk.count = skl_chunk_units(indices_size + parts_size + order_size + starts_size, chunk.rows);
    const int sums = keys && chunk.count < chunk.rows && skl_grad_dtype(p, p->dtype_s) != SKL_F32;
    chunk.dy = 0;
    chunk.parts = skl_aligned_size((size_t)(chunk.count * indices_size));
    chunk.order = chunk.parts + skl_aligned_size((size_t)(chunk.count * parts_size));
    chunk.starts = chunk.order + skl_aligned_size((size_t)(chunk.count * order_size));
    chunk.sums = chunk.starts + skl_aligned_size((size_t)(chunk.count * starts_size));
    chunk.end = chunk.sums + (sums ? skl_aligned_size((size_t)(keys_count * p->key_heads_s * p->dim_s) * 4) : 0);
    return chunk;
}

#endif
