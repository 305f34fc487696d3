/* How strips divide their work and their workspace: for planning and for launching. */
#ifndef SKL_CUDA_COMMON_STRIPS_LAYOUT_H
#define SKL_CUDA_COMMON_STRIPS_LAYOUT_H

#include "base/side.h"
#include "cuda/common/indexer/row_chunks.h"

#define SKL_STRIP_ROW_SIZE ((int64_t)sizeof(skl_row_state) + (int64_t)sizeof(float)) /* sums of a row in a split */

#define SKL_DOT_ROW_SIZE ((int64_t)12) /* bytes per row for dot_t of a teacher group */

enum {
    SKL_STRIP_TILE = 128,    /* queries of a slot, keys of a tile */
    SKL_STRIP_DIM_MAX = 256, /* largest head size of the student */
    SKL_STRIP_SPLITS = 16,   /* splits of a slot's keys, if it has this many tiles: they share the slot's queries */
    SKL_STRIP_BLOCKS = 16,   /* blocks per SM of a scores launch */
    SKL_POOL_KEYS = 256,     /* keys of a tile of a pooled teacher on Hopper; 64 elsewhere */
    SKL_POOL_DIM_MAX = 128,  /* largest head size of a pooled teacher on Hopper */
    SKL_STRIP_KEY_BLOCKS = 6 /* blocks per SM of a launch for dk */
};

typedef struct skl_strip_layout {
    int64_t slots;           /* slots of the call */
    int64_t strip_slots;     /* slots of a strip: up to 128 at 8,192 keys, 8 at 131,072 keys; half as many for f16 */
    int32_t num_splits;      /* splits of a slot's keys in scores launches */
    int32_t num_dk_splits;   /* splits of the queries in launches for dk */
    int64_t key_items;       /* key tiles of all sequences and key heads */
    int64_t rest_at;         /* offset from G to its residual plane, in units of 16 bytes; 0: there is none */
    int32_t num_pool_splits; /* pooled teacher: splits of the teacher's keys of a slot */
    int64_t target_stride;   /* pooled teacher: blocks of a row of the target, padded to whole tiles */
    int64_t sum_batches, sum_rows, sum_count;          /* sums of dk; sum_count counts elements of all splits */
    size_t lse_at, split_rows_at, g_at, sums_at, size; /* offsets in the workspace and its size, in bytes */
    size_t dots_at, split_dots_at;                     /* dot_t of teacher groups; 0: it is not computed */
    size_t target_at;                                  /* pooled teacher: f32 [slot of a strip][query][block] */
    size_t target_scale_at;                            /* its one pass: f32 [slot of a strip][query] */
} skl_strip_layout;

static inline int32_t skl_strip_num_splits(int64_t items, int64_t blocks, int64_t splits_max)
{
    return (int32_t)skl_max(1, skl_min(skl_ceil_div(blocks, skl_max(1, items)), splits_max));
}

/* Splits of the keys of a strip's slots, if they have `key_tiles` tiles. */
static inline int32_t skl_strip_key_splits(int64_t strip_slots, int32_t sm_count, int64_t key_tiles)
{
    const int64_t blocks = skl_max((int64_t)sm_count * SKL_STRIP_BLOCKS, strip_slots * SKL_STRIP_SPLITS);
    return skl_strip_num_splits(strip_slots, blocks, key_tiles);
}

static inline size_t skl_strip_reserve(size_t *next, int64_t size)
{
    const size_t at = *next;
    *next += skl_aligned_size((size_t)size);
    return at;
}

/* Slots of strips of `slot_size` bytes, and splits of their work. dk: of `key_heads` heads of `dim`. With a pooled
 * teacher, the student's keys are blocks. */
static inline void skl_strip_divide(skl_strip_layout *layout, const skl_problem *p, int32_t sm_count,
                                    int64_t slot_size, int64_t key_heads, int64_t dim)
{
    const int64_t keys = skl_student_keys(p, p->len_k), key_tiles = skl_ceil_div(keys, SKL_STRIP_TILE);
    layout->slots = p->batch * p->heads_s * skl_ceil_div(p->len_q, SKL_STRIP_TILE);
    layout->strip_slots = slot_size > 0 ? skl_chunk_units(slot_size, layout->slots) : layout->slots;
    layout->num_splits = skl_strip_key_splits(layout->strip_slots, sm_count, key_tiles);
    layout->key_items = p->batch * key_heads * key_tiles;
    layout->num_dk_splits = skl_strip_num_splits(layout->key_items, (int64_t)sm_count * SKL_STRIP_KEY_BLOCKS,
                                                 skl_ceil_div(p->len_q, SKL_STRIP_TILE));
    layout->sum_batches = skl_student_key_rows(p).batch;
    layout->sum_rows = skl_student_key_rows(p).rows;
    layout->sum_count = layout->num_dk_splits * layout->sum_batches * key_heads * layout->sum_rows * dim;
}

/* Bytes of a 16-bit plane of a slot. */
static inline int64_t skl_strip_plane_size(const skl_problem *p)
{
    return skl_ceil_div(skl_student_keys(p, p->len_k), SKL_STRIP_TILE) * SKL_STRIP_TILE * SKL_STRIP_TILE * 2;
}

/* Bytes of a slot's target with a pooled teacher: f32 per query and block. */
static inline int64_t skl_strip_target_size(const skl_problem *p)
{
    return skl_is_pooled(p) ? 2 * skl_strip_plane_size(p) : 0;
}

static inline int64_t skl_strip_rows_size(const skl_strip_layout *layout)
{
    return layout->strip_slots * layout->num_splits * SKL_STRIP_TILE * SKL_STRIP_ROW_SIZE;
}

/* Differences: the layout of a call with gradients, or of a forward. */
static inline skl_strip_layout skl_strip_differences_layout(const skl_problem *p, int32_t sm_count, int gradients)
{
    skl_strip_layout layout = {0};
    /* For dk, G is multiplied by the weights and rounded again: f16 keeps the residual of the first rounding. */
    const int64_t planes = p->dtype_s == SKL_F16 ? 2 : 1, slot_size = planes * skl_strip_plane_size(p);
    const int64_t target_size = skl_strip_target_size(p);
    skl_strip_divide(&layout, p, sm_count, (gradients ? slot_size : 0) + target_size, p->key_heads_s, p->dim_s);
    layout.num_pool_splits =
        skl_strip_key_splits(layout.strip_slots, sm_count, skl_ceil_div(p->len_k, SKL_POOL_KEYS));
    layout.target_stride = target_size / (SKL_STRIP_TILE * (int64_t)sizeof(float));
    layout.rest_at = planes > 1 ? layout.strip_slots * skl_strip_plane_size(p) / 16 : 0;
    const int64_t rows_t = p->heads_t * skl_all_rows(skl_query_rows(p));
    layout.lse_at = skl_strip_reserve(&layout.size, gradients ? 0 : rows_t * (int64_t)sizeof(float));
    layout.split_rows_at = skl_strip_reserve(&layout.size, skl_strip_rows_size(&layout));
    layout.g_at = skl_strip_reserve(&layout.size, gradients ? layout.strip_slots * slot_size : 0);
    layout.sums_at = skl_strip_reserve(
        &layout.size, gradients && p->gradients & SKL_DK_S ? layout.sum_count * (int64_t)sizeof(float) : 0);
    layout.target_at = skl_strip_reserve(&layout.size, layout.strip_slots * target_size);
    const int64_t strip_rows = gradients && skl_is_pooled(p) ? layout.strip_slots * SKL_STRIP_TILE : 0;
    layout.target_scale_at = skl_strip_reserve(&layout.size, strip_rows * (int64_t)sizeof(float));
    return layout;
}

/* Ratios: the layout of rows, with or without dot_t. */
static inline skl_strip_layout skl_strip_ratio_rows_layout(const skl_problem *p, int32_t sm_count, int dots)
{
    skl_strip_layout layout = {0};
    const int64_t dot_size = SKL_STRIP_TILE * skl_group_size(p) * 2 * (int64_t)sizeof(float);
    const int64_t slot_size = SKL_STRIP_SPLITS * (SKL_STRIP_TILE * SKL_STRIP_ROW_SIZE + dot_size);
    skl_strip_divide(&layout, p, sm_count, dots ? slot_size : 0, 0, 0);
    layout.split_rows_at = skl_strip_reserve(&layout.size, skl_strip_rows_size(&layout));
    layout.dots_at =
        dots ? skl_strip_reserve(&layout.size, layout.strip_slots * SKL_STRIP_TILE * SKL_DOT_ROW_SIZE) : 0;
    layout.split_dots_at =
        dots ? skl_strip_reserve(&layout.size, layout.strip_slots * layout.num_splits * dot_size) : 0;
    return layout;
}

/* Ratios: the layout of the gradients of the teacher or of the student. R has two planes of 16 bits. */
static inline skl_strip_layout skl_strip_ratio_gradients_layout(const skl_problem *p, int32_t sm_count,
                                                                int of_teacher)
{
    skl_strip_layout layout = {0};
    const int64_t plane_size = skl_strip_plane_size(p);
    const uint32_t dk = of_teacher ? SKL_DK_T : SKL_DK_S;
    skl_strip_divide(&layout, p, sm_count, 2 * plane_size, of_teacher ? p->key_heads_t : p->key_heads_s,
                     of_teacher ? p->dim_t : p->dim_s);
    layout.rest_at = layout.strip_slots * plane_size / 16;
    layout.g_at = skl_strip_reserve(&layout.size, layout.strip_slots * 2 * plane_size);
    layout.sums_at =
        skl_strip_reserve(&layout.size, p->gradients & dk ? layout.sum_count * (int64_t)sizeof(float) : 0);
    return layout;
}

#endif
