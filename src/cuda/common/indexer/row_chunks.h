/* How an indexer's backward is divided into chunks of rows, and the workspace of a chunk.
 *
 * Many rows add to the dk of a key. Atomic adds would give different bits on every run. Instead, what the rows add
 * goes through the workspace.
 *
 * Dense (general kernels): each tile of 128 queries stores what it adds to the dk of its keys: [tile][key][dim]. Then
 * each key adds up its tiles in order.
 *
 * Sparse (general and sm80 kernels): a key is in the indices of many rows, in an order that differs from row to row.
 *
 *   1. each entry of a row's indices stores what it adds to dk: [row][entry][dim]
 *   2. the entries of each row are sorted by key
 *   3. each block of keys adds up its entries, row after row
 *
 * Nothing is computed twice: the teacher's products, most of the work, run once per row. */
#ifndef SKL_CUDA_COMMON_INDEXER_ROW_CHUNKS_H
#define SKL_CUDA_COMMON_INDEXER_ROW_CHUNKS_H

#include "base/side.h"

enum { SKL_GENERAL_TILE = 128 }; /* rows per block of the general kernels */

enum { SKL_CHUNK_BYTES = 1 << 28 }; /* size of a chunk, unless a single tile or row takes more */

enum { SKL_INDEX_STEP = 64 }; /* keys that a block processes together */

/* Bytes of a block's scratch for a pooled teacher: two floats for each query and key of a tile. */
#define SKL_POOL_SCRATCH_SIZE(queries) ((size_t)((queries)*SKL_INDEX_STEP * 2) * sizeof(float))

SKL_HOST_DEVICE size_t skl_aligned_size(size_t size)
{
    return (size + 255) / 256 * 256;
}

/* Number of units (tiles or rows) per chunk: as many as fit, at least 1, at most `count`. */
SKL_HOST_DEVICE int64_t skl_chunk_units(int64_t unit_size, int64_t count)
{
    return skl_max(1, skl_min(count, SKL_CHUNK_BYTES / skl_max(unit_size, 1)));
}

/* ---- Dense -------------------------------------------------------------------------------------------------- */

typedef struct skl_dense_chunk {
    int64_t tiles; /* query tiles of all sequences and heads */
    int64_t count; /* tiles per chunk */
    int64_t slots; /* keys per tile, at most; a multiple of SKL_INDEX_STEP */
    /* Offsets in the workspace, after dy, f32 [tile][query][slot]: */
    size_t entry_dk; /* f32 [tile][slot][dim]: what each tile adds to dk */
    size_t sums;     /* f32 sums of dk, if dk itself is not f32 and there are several chunks */
    size_t end;
} skl_dense_chunk;

enum { SKL_DENSE_CHUNK_TILES_MAX = 256 };

SKL_HOST_DEVICE skl_dense_chunk skl_dense_chunk_of(const skl_problem *p, int32_t sm_count)
{
    const int keys = (p->gradients & SKL_DK_S) != 0;
    const skl_tensor_rows of_keys = skl_student_key_rows(p);
    const int64_t keys_count = of_keys.rows * of_keys.batch;
    const int64_t key_steps = skl_ceil_div(skl_student_keys(p, p->len_k), SKL_INDEX_STEP);
    skl_dense_chunk chunk;
    chunk.tiles = p->batch * p->heads_s * skl_ceil_div(p->len_q, SKL_GENERAL_TILE);
    chunk.slots = key_steps * SKL_INDEX_STEP;
    const int64_t dy_size = chunk.slots * SKL_GENERAL_TILE * 4, entry_dk_size = keys ? chunk.slots * p->dim_s * 4 : 0;
    /* Enough tiles for 4 blocks per SM, each of which computes one key step or one index head of a tile. */
    const int64_t items_per_tile = skl_max(1, skl_min(key_steps, p->index_heads));
    const int64_t enough = skl_min(skl_ceil_div(4 * (int64_t)sm_count, items_per_tile), SKL_DENSE_CHUNK_TILES_MAX);
    chunk.count = skl_chunk_units(dy_size + entry_dk_size, skl_min(chunk.tiles, enough));
    const int sums = keys && chunk.count < chunk.tiles && skl_grad_dtype(p, p->dtype_s) != SKL_F32;
    chunk.entry_dk = skl_aligned_size((size_t)(chunk.count * dy_size));
    chunk.sums = chunk.entry_dk + skl_aligned_size((size_t)(chunk.count * entry_dk_size));
    chunk.end = chunk.sums + (sums ? skl_aligned_size((size_t)(keys_count * p->key_heads_s * p->dim_s) * 4) : 0);
    return chunk;
}

/* ---- Sparse ------------------------------------------------------------------------------------------------- */

typedef struct skl_sparse_chunk {
    int64_t rows;  /* rows of all sequences and heads */
    int64_t count; /* rows per chunk */
    /* Offsets in the workspace: */
    size_t dy;       /* f32 [row][top_k] */
    size_t entry_dk; /* f32 [row][top_k][dim]: what each entry adds to dk */
    size_t order;    /* int32 [row][top_k]: valid entries sorted by bucket of keys, in the row's order within each */
    size_t starts;   /* int32 [buckets + 1][row]: where a bucket begins in `order`; the last is the end */
    size_t sums;     /* f32 sums of dk, if dk itself is not f32 and there are several chunks */
    size_t end;
    int64_t buckets, bucket_keys;
} skl_sparse_chunk;

/* Buckets are counted in shared memory. They have 64 keys for up to 262,144 keys, and more keys beyond that. */
enum { SKL_SPARSE_BUCKETS_MAX = 4096 };

SKL_HOST_DEVICE skl_sparse_chunk skl_sparse_chunk_of(const skl_problem *p)
{
    const int keys = (p->gradients & SKL_DK_S) != 0;
    const skl_tensor_rows of_keys = skl_student_key_rows(p);
    const int64_t keys_count = of_keys.rows * of_keys.batch, indices_size = p->top_k * 4;
    skl_sparse_chunk chunk;
    const int64_t keys_of_student = skl_student_keys(p, p->len_k);
    const int64_t steps = skl_ceil_div(keys_of_student, SKL_INDEX_STEP);
    chunk.bucket_keys = SKL_INDEX_STEP * skl_max(1, skl_ceil_div(steps, SKL_SPARSE_BUCKETS_MAX));
    chunk.buckets = skl_ceil_div(keys_of_student, chunk.bucket_keys);
    const int64_t entry_dk_size = keys ? indices_size * p->dim_s : 0, order_size = keys ? indices_size : 0;
    const int64_t starts_size = keys ? (chunk.buckets + 1) * 4 : 0;
    chunk.rows = p->batch * p->heads_s * p->len_q;
    chunk.count = skl_chunk_units(indices_size + entry_dk_size + order_size + starts_size, chunk.rows);
    const int sums = keys && chunk.count < chunk.rows && skl_grad_dtype(p, p->dtype_s) != SKL_F32;
    chunk.dy = 0;
    chunk.entry_dk = skl_aligned_size((size_t)(chunk.count * indices_size));
    chunk.order = chunk.entry_dk + skl_aligned_size((size_t)(chunk.count * entry_dk_size));
    chunk.starts = chunk.order + skl_aligned_size((size_t)(chunk.count * order_size));
    chunk.sums = chunk.starts + skl_aligned_size((size_t)(chunk.count * starts_size));
    chunk.end = chunk.sums + (sums ? skl_aligned_size((size_t)(keys_count * p->key_heads_s * p->dim_s) * 4) : 0);
    return chunk;
}

#endif
