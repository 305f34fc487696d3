/* The tile scheduler of the tensor-core kernels: which tile a block computes, and which rows it streams.
 *
 * A block keeps a tile of stationary rows, 64 M rows of one head of one sequence, and streams rows of the other
 * tensor:
 *
 *                stationary rows   streamed rows
 *   forward, dq  queries           keys
 *   dk           keys              queries
 *
 * Tiles are ordered longest first under a causal mask. Heads run in groups whose streamed rows fit into the L2 cache
 * (L2 swizzle). */
#ifndef SKL_CUDA_COMMON_TILE_SCHEDULER_CUH
#define SKL_CUDA_COMMON_TILE_SCHEDULER_CUH

#include "base/kl_math.h"
#include "cuda/common/ptx.cuh"
#include "cuda/common/params.cuh"
#include "cuda/common/sequence.cuh"

namespace tensor_core
{

template <int M> constexpr int TILE_ROWS = 64 * M;

/* ---- Accumulators of mma m16n8 and wgmma -------------------------------------------------------------------- */

/* Stationary row of accumulator tile m, counted from the block's first row. A thread holds two rows of a 16-row tile:
 * lane / 4 (half 0) and lane / 4 + 8 (half 1). */
template <int M> __device__ inline int acc_row(int m, int half)
{
    return ((int)(thread_index() / 32) * M + m) * 16 + (int)(thread_index() % 32 / 4) + half * 8;
}

/* Streamed row of an accumulator element, counted from the step's first row: blocks of 8 columns, two per lane. */
__device__ inline int acc_column(int block, int parity)
{
    return block * 8 + (int)(thread_index() % 4) * 2 + parity;
}

/* ---- Rows of tensors ---------------------------------------------------------------------------------------- */

template <typename ELEMENT> struct row_source {
    const ELEMENT *rows;
    int64_t stride;
    int dim;

    __device__ row_source from(int64_t row) const
    {
        return {rows + row * stride, stride, dim};
    }

    /* The dimensions from `first` on. */
    __device__ row_source slab(int first) const
    {
        return {rows + first, stride, dim - first};
    }
};

template <typename ELEMENT>
__device__ inline row_source<ELEMENT> queries_of(const skl_cuda_argument &side, const skl_sequence &s, int64_t head)
{
    return {(const ELEMENT *)side.q.data + SKL_ROW(side.q, s.batch, head, s.query_begin), side.q.stride_row,
            side.dim};
}

template <typename ELEMENT>
__device__ inline row_source<ELEMENT> keys_of(const skl_cuda_argument &side, const skl_sequence &s, int64_t head)
{
    return {(const ELEMENT *)side.k.data + SKL_ROW(side.k, s.batch, (int)head / side.heads_per_key, s.key_begin),
            side.k.stride_row, side.dim};
}

/* ---- Visible rows ------------------------------------------------------------------------------------------- */

/* Streamed rows, counted in 32 bits from the first one that the block needs. */
struct range32 {
    int begin, end;
};

/* skl_band for a block: stationary rows count from the block's first row, streamed rows from streamed_band.origin.
 * Row i attends to (or, as a key, is attended to by) the streamed rows [begin + i, end + i). */
struct band32 {
    int begin, end, count;

    __device__ range32 of(int row) const
    {
        return {max(0, begin + row), min(count, end + row)};
    }
};

/* A band within the bounds of each row, which are in global memory and count from the sequence's first row. */
struct bounded_band : band32 {
    int origin, last;             /* first streamed row; last stationary row that has bounds */
    const int32_t *begins, *ends; /* bounds from the block's first row on; NULL: none */

    __device__ range32 of(int row) const
    {
        range32 range = band32::of(row);
        if (begins != NULL)
            range.begin = max(range.begin, min(max(begins[min(row, last)], 0) - origin, count));
        if (ends != NULL)
            range.end = min(range.end, max(ends[min(row, last)], 0) - origin);
        return range;
    }
};

/* The streamed rows of a block. None of its rows needs a streamed row before the origin. */
struct streamed_band {
    int64_t origin;
    bounded_band band;
    int needed; /* streamed rows up to the last one that some row of the block needs */
};

__device__ inline int saturated(int64_t value)
{
    return (int)skl_max(-SKL_ROWS_MAX, skl_min(SKL_ROWS_MAX, value));
}

/* Returns the streamed rows of a block with the stationary rows first .. last. */
__device__ inline streamed_band stream_for(const skl_band &band, int64_t first, int64_t last)
{
    const int64_t origin = skl_band_range(&band, first).begin;
    return {
        origin,
        {{saturated(first + band.begin - origin), saturated(first + band.end - origin), (int)(band.count - origin)},
         (int)origin,
         (int)(last - first),
         band.begins != NULL ? band.begins + first : NULL,
         band.ends != NULL ? band.ends + first : NULL},
        (int)skl_max(0, skl_band_range(&band, last).end - origin)};
}

/* One of num_splits splits of the streamed rows; splits begin at multiples of a stage. */
__device__ inline streamed_band streamed_split(const streamed_band &all, int stage_rows, int split, int num_splits)
{
    const unsigned stages = (unsigned)(all.needed + stage_rows - 1) / (unsigned)stage_rows;
    const int rows = (int)((stages + (unsigned)num_splits - 1) / (unsigned)num_splits) * stage_rows;
    const int begin = min(split * rows, all.needed), end = min(begin + rows, all.needed);
    streamed_band part = {all.origin + begin, all.band, end - begin};
    part.band.begin -= begin;
    part.band.end -= begin;
    part.band.count -= begin;
    part.band.origin += begin;
    return part;
}

/* Ranges of bounded_band::of() for every stationary row, in shared memory: a load takes fewer registers. INDEX holds
 * the number of streamed rows. */
template <int ROWS, typename INDEX = int> struct row_ranges {
    struct {
        INDEX begin, end;
    } ranges[ROWS];

    /* Executed by all threads of the block, and followed by a barrier. */
    __device__ void fill(const bounded_band &band)
    {
        for (int row = (int)threadIdx.x; row < ROWS; row += (int)blockDim.x) {
            const range32 range = band.of(row);
            ranges[row] = {(INDEX)range.begin, (INDEX)max(0, range.end)};
        }
    }

    __device__ range32 of(int row) const
    {
        return {(int)ranges[row].begin, (int)ranges[row].end};
    }
};

/* Streamed rows that several stationary rows see: at least one row sees `any`, every row sees `all`. Rows after the
 * tensor's last row count, too: they are 0, and their results are not stored. */
struct reach {
    range32 any, all;
};

/* VISIBLE: bounded_band or row_ranges. */
template <typename VISIBLE> __device__ inline reach reach_of(const VISIBLE &visible, int first, int count)
{
    const range32 low = visible.of(first), high = visible.of(first + count - 1);
    return {{low.begin, high.end}, {high.begin, low.end}};
}

__device__ inline bool overlaps(const range32 &range, int first, int rows)
{
    return range.begin < first + rows && range.end > first;
}

__device__ inline bool covers(const range32 &range, int first, int rows)
{
    return range.begin <= first && range.end >= first + rows;
}

/* ---- Tiles -------------------------------------------------------------------------------------------------- */

/* One tile of one head of one sequence. */
struct tile_coord {
    int64_t sequence;
    int head, tile;
};

/* Heads and tiles are in x, sequences in y and z. The backend makes sure that heads * tiles < 2^31. */
constexpr int64_t GRID_Y_MAX = 65535;

inline dim3 grid_of(int64_t sequences, int64_t heads, int64_t tiles)
{
    return dim3((unsigned)(heads * tiles), (unsigned)skl_min(sequences, GRID_Y_MAX),
                (unsigned)skl_ceil_div(sequences, GRID_Y_MAX));
}

/* Tile number x of a sequence. The tiles of one head group come before those of the next, so that the group's
 * streamed rows stay in the L2 cache. Within a group, tile 0 of all heads comes first, the longest under a causal
 * mask. */
__device__ inline tile_coord swizzled_tile(int64_t sequence, unsigned x, unsigned heads, unsigned tiles,
                                           unsigned head_group)
{
    const unsigned first_head = x / (head_group * tiles) * head_group;
    const unsigned width = min(head_group, heads - first_head);
    const unsigned rest = x - first_head * tiles;
    return {sequence, (int)(first_head + rest % width), (int)(rest / width)};
}

/* The asm is volatile so that the compiler recomputes the tile where it is needed again instead of keeping it in
 * registers meanwhile. */
__device__ inline tile_coord tile_of_block(unsigned heads, unsigned tiles, unsigned head_group)
{
    unsigned x, y, z;
    asm volatile("mov.u32 %0, %%ctaid.x; mov.u32 %1, %%ctaid.y; mov.u32 %2, %%ctaid.z;" : "=r"(x), "=r"(y), "=r"(z));
    return swizzled_tile(z * GRID_Y_MAX + y, x, heads, tiles, head_group);
}

/* The tile of a persistent block in this iteration: block b of n computes tiles b, b + n, b + 2 n ... of all
 * sequences. The grid has only an x dimension. */
__device__ inline tile_coord persistent_tile(unsigned iteration, unsigned heads, unsigned tiles, unsigned head_group)
{
    const unsigned number = blockIdx.x + iteration * gridDim.x, of_sequence = heads * tiles;
    return swizzled_tile(number / of_sequence, number % of_sequence, heads, tiles, head_group);
}

/* A tile of 64 M rows of dq, or of dk (DK). */
template <int M, bool DK> struct row_tile {
    skl_sequence sequence;
    int64_t head, first; /* head of the gradient, first row of the tile */
    int64_t rows;        /* rows of the sequence that take part */
    int64_t stored;      /* rows of the sequence that have a gradient; padding keys have 0 */

    /* The tile of this block; false if the block has no tile. */
    __device__ bool find(const backward_params &params)
    {
        const skl_problem &p = params.problem;
        const unsigned tiles = (unsigned)skl_ceil_div(DK ? p.len_k : p.len_q, TILE_ROWS<M>);
        const tile_coord coord = tile_of_block((unsigned)heads(params), tiles, SKL_HEAD_GROUP_MAX);
        if (coord.sequence >= p.batch)
            return false;
        sequence = device_sequence(params, coord.sequence);
        head = coord.head;
        first = (int64_t)(DK ? coord.tile : tiles - 1 - coord.tile) * TILE_ROWS<M>; /* causal: longest first */
        rows = DK ? sequence.key_count : sequence.query_count;
        stored = DK && !p.packed ? p.len_k : rows;
        return first < stored;
    }

    __host__ __device__ static int64_t heads(const backward_params &params)
    {
        const skl_problem &p = params.problem;
        return !DK ? p.heads_s : params.teacher_side ? p.key_heads_t : p.key_heads_s;
    }
};

} // namespace tensor_core

#endif
