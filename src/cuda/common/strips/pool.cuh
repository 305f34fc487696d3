/* Targets of a pooled teacher (skl_pool): the parts that the mma.sync and the wgmma kernels share. For every query
 * and block of keys of a strip:
 *
 *   P_j = mean_h P_hj, or max_h P_hj        for a tile of keys, in registers, while all teacher heads stream past
 *   M_b = max_j P_j, or sum_j P_j           to the strip's target in the workspace
 *
 * The scores of the strip then read M in place of the teacher, and everything else is that of an indexer of blocks.
 * Only rows of 128 queries of a strip exist at a time: the target takes 4 bytes per query of the strip and block.
 *
 * Only a block of more keys than a tile is in several tiles:
 *
 *   block of up to KEYS keys     | b b b b . |  whole blocks; what is left of the tile is computed in vain
 *   larger block                 | b b b b b | b b b . . |  tiles of its own, which one block of threads adds up */
#ifndef SKL_CUDA_COMMON_STRIPS_POOL_CUH
#define SKL_CUDA_COMMON_STRIPS_POOL_CUH

#include "cuda/common/strips/logit_tile.cuh"

namespace tensor_core
{

/* ---- Tiles of keys -------------------------------------------------------------------------------------------- */

/* The blocks in tiles of KEYS keys. A unit is a tile, or the tiles of a block. */
template <int KEYS> struct pool_tiles {
    int size;   /* keys of a block */
    int blocks; /* blocks of a unit */
    int tiles;  /* tiles of a unit */

    __device__ explicit pool_tiles(const skl_problem &p)
        : size((int)skl_max(1, skl_min(p.pool_size, p.len_k))), blocks(max(1, KEYS / size)),
          tiles((size + KEYS - 1) / KEYS)
    {
    }

    __device__ int first_block(int tile) const
    {
        return tile / tiles * blocks;
    }

    /* Keys of the unit before the tile. */
    __device__ int offset(int tile) const
    {
        return tile % tiles * KEYS;
    }

    __device__ int first_key(int tile) const
    {
        return first_block(tile) * size + offset(tile);
    }

    /* Tiles of a split of the slot, in whole units. */
    __device__ range32 of_split(const skl_problem &p, const query_slot &slot, int split, int num_splits) const
    {
        const skl_range top = skl_pooled_range(&p, skl_visible(&p, &slot.sequence, slot.first));
        const skl_range bottom = skl_pooled_range(&p, skl_visible(&p, &slot.sequence, slot.first + slot.count - 1));
        query_slot units = slot;
        units.tile_begin = (int)top.begin / blocks;
        units.tile_end = max(units.tile_begin, ((int)bottom.end + blocks - 1) / blocks);
        const range32 of_units = tiles_of_split(units, split, num_splits);
        return {of_units.begin * tiles, of_units.end * tiles};
    }
};

/* ---- Heads ---------------------------------------------------------------------------------------------------- */

/* log2 P_h = x - value - low. */
struct head_lse2 : head_lse {
    __device__ skl_lse2 value(float lse) const
    {
        return split_lse2(lse);
    }
};

/* log2 of the largest P_h; NaN if one is. */
struct max_of_heads {
    float scale;

    __device__ float operator()(float largest, float x, const skl_lse2 &lse) const
    {
        return at_least(largest, fmaf(x, scale, -lse.value) - lse.low);
    }
};

/* How heads combine: P of their mean, log2 P of their maximum. */
template <bool LARGEST> struct head_pool;

template <> struct head_pool<false> {
    typedef head_lse reader;
    typedef mean_of_heads combine;
    static constexpr float NOTHING = 0.0F;

    __device__ static float probability(float p)
    {
        return p;
    }
};

template <> struct head_pool<true> {
    typedef head_lse2 reader;
    typedef max_of_heads combine;
    static constexpr float NOTHING = -INFINITY;

    __device__ static float probability(float log_p)
    {
        return ex2(log_p);
    }
};

/* ---- Blocks --------------------------------------------------------------------------------------------------- */

/* M of the keys seen so far, as maxima of P or log2 P; `value` turns the result of a tile into M. */
template <typename HEADS> struct largest_of_keys {
    static constexpr float NOTHING = -INFINITY;

    __device__ static float add(float largest, float p)
    {
        return at_least(largest, p);
    }

    __device__ static float merge(float a, float b)
    {
        return at_least(a, b);
    }

    __device__ static float value(float largest)
    {
        return HEADS::probability(largest);
    }
};

template <typename HEADS> struct sum_of_keys {
    static constexpr float NOTHING = 0.0F;

    __device__ static float add(float sum, float p)
    {
        return sum + HEADS::probability(p);
    }

    __device__ static float merge(float a, float b)
    {
        return a + b;
    }

    __device__ static float value(float sum)
    {
        return sum;
    }
};

/* The part of the target that a thread writes: M of one of its rows in a tile. */
struct target_tile {
    float *row;      /* M of the first block */
    int blocks_left; /* blocks left in the row */
    bool continues;  /* the tile is not the first of its block */

    /* Merges the parts of a block that the four lanes of the row hold, and stores M. */
    template <typename KEYS> __device__ void store(int block, float of_lane) const
    {
        float all = KEYS::merge(of_lane, __shfl_xor_sync(~0U, of_lane, 1));
        all = KEYS::value(KEYS::merge(all, __shfl_xor_sync(~0U, all, 2)));
        if (threadIdx.x % 4 == 0 && block < blocks_left)
            row[block] = continues ? KEYS::merge(row[block], all) : all;
    }
};

constexpr int POOL_COLUMNS = 64; /* keys that a full tile reduces without looking at its masks */

/* M of a full tile whose blocks have a multiple of POOL_COLUMNS keys. */
template <typename KEYS, int N>
__device__ inline void pool_full_row(const target_tile &to, const float (&p)[N][4], int half, int size)
{
    float sum = KEYS::NOTHING;
#pragma unroll
    for (int part = 0; part < N * 8 / POOL_COLUMNS; part++) {
#pragma unroll
        for (int n = 0; n < POOL_COLUMNS / 8; n++)
#pragma unroll
            for (int parity = 0; parity < 2; parity++)
                sum = KEYS::add(sum, p[part * (POOL_COLUMNS / 8) + n][half * 2 + parity]);
        const int end = (part + 1) * POOL_COLUMNS;
        if (end % size != 0 && end < N * 8)
            continue;
        to.store<KEYS>((end - 1) / size, sum);
        sum = KEYS::NOTHING;
    }
}

/* M of the columns that the row attends to. `count`: columns of the tile that belong to blocks. */
template <typename KEYS, int N>
__device__ inline void pool_row(const target_tile &to, const float (&p)[N][4], int half, const range32 &sees,
                                int size, int count)
{
    for (int first = 0; first < count; first += size) {
        const int begin = max(first, sees.begin), end = min(min(first + size, count), sees.end);
        float sum = KEYS::NOTHING;
#pragma unroll
        for (int n = 0; n < N; n++)
#pragma unroll
            for (int parity = 0; parity < 2; parity++) {
                const int column = acc_column(n, parity);
                const float more = KEYS::add(sum, p[n][half * 2 + parity]);
                sum = column >= begin && column < end ? more : sum;
            }
        to.store<KEYS>(first / size, sum);
    }
}

/* Stores M of a tile of combined heads. `rows`: the thread's two rows of the slot. */
template <typename KEYS, int N>
__device__ inline void pool_tile(const strip_params &params, const query_slot &slot, unsigned slot_index,
                                 const pool_tiles<N * 8> &tiles, int tile, const float (&p)[N][4],
                                 const int (&rows)[2])
{
    const int first = tiles.first_key(tile), offset = tiles.offset(tile), block = tiles.first_block(tile);
    const int count = min(N * 8, tiles.blocks * tiles.size - offset);
    const bool full = tiles.size % POOL_COLUMNS == 0 && count == N * 8 && is_full(slot, first, N * 8);
#pragma unroll
    for (int half = 0; half < 2; half++) {
        const target_tile to = {target_row(params, slot_index, rows[half], block), (int)params.target_stride - block,
                                offset > 0};
        if (full)
            pool_full_row<KEYS>(to, p, half, tiles.size);
        else
            pool_row<KEYS>(to, p, half, visible_range(params, slot, rows[half], first), tiles.size, count);
    }
}

template <typename HEADS, int N>
__device__ inline void pool_tile_keys(const strip_params &params, const query_slot &slot, unsigned slot_index,
                                      const pool_tiles<N * 8> &tiles, int tile, const float (&p)[N][4],
                                      const int (&rows)[2])
{
    if (params.problem.pool == SKL_POOL_SUM)
        pool_tile<sum_of_keys<HEADS>>(params, slot, slot_index, tiles, tile, p, rows);
    else
        pool_tile<largest_of_keys<HEADS>>(params, slot, slot_index, tiles, tile, p, rows);
}

/* ---- The student's side --------------------------------------------------------------------------------------- */

/* p = M of a tile of blocks, from the strip's target; for gradients it is normalized. Values of blocks that a row
 * does not attend to are undefined. */
template <int N>
__device__ inline void load_target(float (&p)[N][4], const strip_params &params, unsigned slot_index,
                                   const int (&rows)[2], int first)
{
#pragma unroll
    for (int half = 0; half < 2; half++) {
        const float *const from = target_row(params, slot_index, rows[half], first);
#pragma unroll
        for (int n = 0; n < N; n++) {
            const float2 pair = *(const float2 *)(const void *)(from + acc_column(n, 0));
            p[n][half * 2] = pair.x;
            p[n][half * 2 + 1] = pair.y;
        }
    }
    if (params.target_scale == NULL || params.call.op != SKL_OP_BACKWARD)
        return;
#pragma unroll
    for (int half = 0; half < 2; half++) {
        const float scale = params.target_scale[strip_row(params, slot_index, rows[half])];
#pragma unroll
        for (int n = 0; n < N; n++) {
            p[n][half * 2] *= scale;
            p[n][half * 2 + 1] *= scale;
        }
    }
}

} // namespace tensor_core

#endif
