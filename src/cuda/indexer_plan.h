/* How the general kernels for indexers cut a backward into bands, and what workspace that takes.
 *
 * Dense: the gradient of the logits, dy, is computed once for all index heads, for queries and keys. Tiles of 128
 * queries take turns in the workspace, a band of them at a time: [tile][key][query]. Sums of dk stay there from band
 * to band, in parts that each have some of the index heads: few keys make few tiles, and parts fill the GPU.
 *
 * Sparse: the lists of many rows name a key, in no order that blocks could agree on, and adds to memory in any order
 * would have other bits on every run. So each entry of a list leaves what it adds to dk in the workspace,
 * [row][entry] [dim], for a band of rows at a time; the entries are put in the order of their keys, and every block
 * of keys collects what is its own, in the order of the lists. Nothing of that is looked for twice: the teacher's
 * products, most of the work, are computed once a row. */
#ifndef SKL_CUDA_INDEXER_PLAN_H
#define SKL_CUDA_INDEXER_PLAN_H

#include "cuda/launch.h"

enum { SKL_BAND_BYTES = 1 << 28 }; /* of a band, unless one tile or row takes more */

enum { SKL_INDEX_STEP = 64 }; /* keys that a block looks at together */

SKL_HOST_DEVICE size_t skl_aligned_size(size_t size)
{
    return (size + 255) / 256 * 256;
}

/* Units that fit into a band: at least one, no more than there are. */
SKL_HOST_DEVICE int64_t skl_band_units(int64_t unit_size, int64_t count)
{
    return skl_max(1, skl_min(count, SKL_BAND_BYTES / skl_max(unit_size, 1)));
}

/* ---- Dense -------------------------------------------------------------------------------------------------- */

typedef struct skl_dense_band {
    int64_t tiles;     /* of all queries of all heads */
    int64_t key_steps; /* of a tile, at most */
    int64_t count;     /* tiles of a band */
    int64_t tile_size; /* floats of dy of a tile */
    int64_t key_tiles; /* of all key heads */
    int64_t parts;     /* of dk */
    int64_t part_size; /* floats of dk */
    size_t sums, end;  /* where in the workspace: parts of dk, behind dy */
} skl_dense_band;

enum { SKL_DK_PARTS_MAX = 8 };

SKL_HOST_DEVICE skl_dense_band skl_dense_band_of(const skl_problem *p, int32_t multiprocessors)
{
    skl_dense_band band;
    band.tiles = p->batch * p->heads_s * skl_ceil_div(p->len_q, SKL_GENERAL_TILE);
    band.key_steps = skl_ceil_div(p->len_k, SKL_INDEX_STEP);
    band.tile_size = band.key_steps * SKL_INDEX_STEP * SKL_GENERAL_TILE;
    /* Enough for a few blocks a multiprocessor, each of which does one index head of a tile. */
    const int64_t enough = skl_ceil_div(4 * (int64_t)multiprocessors, p->index_heads);
    band.count = skl_band_units(band.tile_size * (int64_t)sizeof(float), skl_min(band.tiles, enough));
    band.key_tiles = p->batch * p->key_heads_s * skl_ceil_div(p->len_k, SKL_GENERAL_TILE);
    band.parts = skl_min(skl_min(p->index_heads, SKL_DK_PARTS_MAX),
                         skl_ceil_div(2 * (int64_t)multiprocessors, skl_max(band.key_tiles, 1)));
    band.part_size = (p->packed ? p->total_k : p->batch * p->len_k) * p->key_heads_s * p->dim_s;
    const int keys = (p->gradients & SKL_DK_S) != 0;
    band.sums = skl_aligned_size((size_t)(band.count * band.tile_size) * sizeof(float));
    band.end = band.sums + (keys ? (size_t)(band.parts * band.part_size) * sizeof(float) : 0);
    return band;
}

/* ---- Sparse ------------------------------------------------------------------------------------------------- */

typedef struct skl_list_band {
    int64_t rows;  /* of all heads */
    int64_t count; /* rows of a band */
    size_t dy;     /* where in the workspace: dy of a list, for each row */
    size_t parts;  /* what each entry adds to dk */
    size_t order;  /* int32 [row][top_k]: entries that are keys, by buckets of keys, each as on the list */
    size_t starts; /* int32 [bucket][row]: where in it a bucket begins; one more says where the last one ends */
    size_t sums;   /* of dk, f32, if the gradient is not and there are more bands than one */
    size_t end;
    int64_t buckets, bucket_keys;
} skl_list_band;

enum { SKL_LIST_BUCKETS_MAX = 4096 }; /* counted in shared memory: of 64 keys up to 262,144 keys, of more beyond */

SKL_HOST_DEVICE skl_list_band skl_list_band_of(const skl_problem *p)
{
    const int keys = (p->gradients & SKL_DK_S) != 0;
    const int64_t keys_count = p->packed ? p->total_k : p->batch * p->len_k, list_size = p->top_k * 4;
    skl_list_band band;
    const int64_t steps = skl_ceil_div(p->len_k, SKL_INDEX_STEP);
    band.bucket_keys = SKL_INDEX_STEP * skl_max(1, skl_ceil_div(steps, SKL_LIST_BUCKETS_MAX));
    band.buckets = skl_ceil_div(p->len_k, band.bucket_keys);
    const int64_t parts_size = keys ? list_size * p->dim_s : 0, order_size = keys ? list_size : 0;
    const int64_t starts_size = keys ? (band.buckets + 1) * 4 : 0;
    band.rows = p->batch * p->heads_s * p->len_q;
    band.count = skl_band_units(list_size + parts_size + order_size + starts_size, band.rows);
    const int sums = keys && band.count < band.rows && skl_grad_dtype(p, p->dtype_s) != SKL_F32;
    band.dy = 0;
    band.parts = skl_aligned_size((size_t)(band.count * list_size));
    band.order = band.parts + skl_aligned_size((size_t)(band.count * parts_size));
    band.starts = band.order + skl_aligned_size((size_t)(band.count * order_size));
    band.sums = band.starts + skl_aligned_size((size_t)(band.count * starts_size));
    band.end = band.sums + (sums ? skl_aligned_size((size_t)(keys_count * p->key_heads_s * p->dim_s) * 4) : 0);
    return band;
}

#endif
