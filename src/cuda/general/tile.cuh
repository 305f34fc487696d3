/* Logit tiles of the general kernels: masks, softcaps and teacher groups. A block keeps TILE stationary rows, queries
 * or keys, and streams rows of the other tensor, 16 per column of a thread. */
#ifndef SKL_CUDA_GENERAL_TILE_CUH
#define SKL_CUDA_GENERAL_TILE_CUH

#include "base/kl_math.h"
#include "cuda/general/pipeline.cuh"
#include "cuda/common/linear_link.cuh"
#include "cuda/common/ptx.cuh"
#include "cuda/common/sequence.cuh"

/* Teacher or student of the call. Constants of the launch are in shared memory, because registers are scarce. */
struct tile_side {
    skl_input q, k;
    int64_t heads_per_key, dim;
    skl_dtype dtype;
    float scale;   /* product to logit in base 2; with a softcap, product to argument of tanh */
    float softcap; /* softcap in base 2; 0: none */
    bool linear;   /* the logit is the logarithm of the product */
};

enum { TEACHER = 0, STUDENT = 1 };

__device__ inline tile_side tile_side_of(const skl_side &side)
{
    const bool capped = skl_caps_logits(side.softcap);
    const tile_side result = {*side.q,
                              *side.k,
                              side.heads / side.key_heads,
                              side.dim,
                              side.dtype,
                              capped ? side.scale / side.softcap : (float)((double)side.scale * SKL_LOG2E_DOUBLE),
                              capped ? side.softcap * SKL_LOG2E : 0.0F,
                              side.linear};
    return result;
}

/* Current work item of a block, in shared memory: the tiles of one range of queries and one range of keys. */
struct work_item {
    int64_t index; /* number of the item in the launch */
    bool exists;   /* index < number of items of the launch */
    tile_side sides[2];
    skl_sequence sequence;
    int64_t head;      /* student head */
    int64_t grad_head; /* backward: head of q_t, or of q_s, that the gradient is taken with respect to */
    skl_range queries, keys;
};

/* One tile of a work item. */
struct tile_position {
    const work_item &work;
    int64_t query_first, key_first;
};

/* DK: the keys are stationary and the queries are streamed. */
template <bool DK> __device__ inline tile_operands operands_of(const tile_position &tile, int side, int64_t head)
{
    const tile_side &of = tile.work.sides[side];
    const skl_sequence &s = tile.work.sequence;
    const row_source q = make_row_source(of.q, of.dtype, of.dim, SKL_ROW(of.q, s.batch, head, s.query_begin),
                                         tile.query_first, tile.work.queries.end);
    const row_source k =
        make_row_source(of.k, of.dtype, of.dim, SKL_ROW(of.k, s.batch, head / of.heads_per_key, s.key_begin),
                        tile.key_first, tile.work.keys.end);
    const tile_operands operands = {DK ? k : q, DK ? q : k};
    return operands;
}

/* Turns products into logits in base 2. __fmul_rn keeps the compiler from fusing the multiplication into an FMA:
 * equal inputs must give teacher and student the same bits. */
template <int COLUMNS> __device__ inline void scale_products(fragment<COLUMNS> &x, const tile_side &side)
{
    if (side.linear) {
#pragma unroll
        for (int i = 0; i < ROWS; i++)
#pragma unroll
            for (int j = 0; j < COLUMNS; j++)
                x.at[i][j] = linear_logit(x.at[i][j]);
        return;
    }
    const float scale = side.scale, softcap = side.softcap;
#pragma unroll
    for (int i = 0; i < ROWS; i++)
#pragma unroll
        for (int j = 0; j < COLUMNS; j++)
            x.at[i][j] = __fmul_rn(x.at[i][j], scale);
    if (softcap == 0.0F)
        return;
#pragma unroll 1
    for (int i = 0; i < ROWS; i++, rotate_rows(x))
#pragma unroll
        for (int j = 0; j < COLUMNS; j++)
            x.at[0][j] = __fmul_rn(tanhf(x.at[0][j]), softcap);
}

/* log2 of a probability. lse.low is the rounding error of lse.value, so it is subtracted last. */
__device__ inline float log_probability(float logit, const skl_lse2 &lse)
{
    return (logit - lse.value) - lse.low;
}

/* (x, sum) represents x + log2(sum). Adds 2^z in log space, with one exponential. */
__device__ inline void add_in_log_space(float &x, float &sum, float z)
{
    const float difference = z - x;
    const float ratio = ex2(-fabsf(difference));
    sum = difference > 0.0F ? fmaf(sum, ratio, 1.0F) : sum + ratio;
    x = difference > 0.0F ? z : x;
}

/* Logits of teacher (x) and student (y) for one tile. The pipeline must have begun with the group's first teacher
 * head; after the student's product it continues with the operands that next() returns.
 *
 *     group = 1   x = logits of the teacher head
 *     group > 1   x = log2 mean_h P_h over the heads of the teacher group. lse_of(h) returns the LSE of head h for
 *                 query threadIdx.x of the tile; `lse` is shared memory for these. */
template <bool DK, int COLUMNS, typename LSE, typename OPERANDS>
__device__ inline void logit_tiles(fragment<COLUMNS> &x, fragment<COLUMNS> &y, pipeline<COLUMNS> &pipe,
                                   const tile_position &tile, int64_t group, skl_lse2 (&lse)[TILE], LSE lse_of,
                                   OPERANDS next)
{
    const float lowest = -3e38F; /* finite: -inf - -inf would be NaN */
    fragment<COLUMNS> sum;
#pragma unroll
    for (int i = 0; i < ROWS; i++)
#pragma unroll
        for (int j = 0; j < COLUMNS; j++) {
            x.at[i][j] = lowest;
            sum.at[i][j] = 0.0F;
        }
#pragma unroll 1
    for (int64_t h = 0;; h++) {
        const bool is_student = h == group;
        pipe.prefetch([&] {
            if (is_student)
                return next();
            return h + 1 < group ? operands_of<DK>(tile, TEACHER, tile.work.head * group + h + 1)
                                 : operands_of<DK>(tile, STUDENT, tile.work.head);
        });
        skl_lse2 head_lse = {0.0F, 0.0F};
        if (group > 1 && !is_student && threadIdx.x < TILE && tile.query_first + threadIdx.x < tile.work.queries.end)
            head_lse = lse_of(h);
        pipe.multiply_tile(y);
        scale_products(y, tile.work.sides[is_student ? STUDENT : TEACHER]);
        if (is_student)
            break;
        if (group == 1) {
            x = y;
            continue;
        }
        if (threadIdx.x < TILE)
            lse[threadIdx.x] = head_lse;
        __syncthreads();
#pragma unroll
        for (int i = 0; i < ROWS; i++)
#pragma unroll
            for (int j = 0; j < COLUMNS; j++)
                add_in_log_space(x.at[i][j], sum.at[i][j],
                                 log_probability(y.at[i][j], lse[DK ? acc_column(j) : acc_row(i)]));
    }
    if (group == 1)
        return;
    const float mean = 1.0F / (float)group;
#pragma unroll
    for (int i = 0; i < ROWS; i++)
#pragma unroll
        for (int j = 0; j < COLUMNS; j++)
            x.at[i][j] += log2f(sum.at[i][j] * mean);
}

/* ---- Masks -------------------------------------------------------------------------------------------------- */

/* Visible keys of a query within a tile, counted from the tile's first key. */
struct key_span {
    int begin, end;
};

/* Writes the spans of all queries of a tile to shared memory. */
__device__ inline void find_spans(key_span (&spans)[TILE], const skl_problem &p, const tile_position &tile)
{
    const int64_t query = tile.query_first + threadIdx.x;
    if (threadIdx.x < TILE) {
        const skl_range none = {0, 0};
        const skl_range visible = query < tile.work.queries.end ? skl_visible(&p, &tile.work.sequence, query) : none;
        spans[threadIdx.x].begin = (int)skl_min(skl_max(visible.begin - tile.key_first, 0), TILE);
        spans[threadIdx.x].end = (int)skl_min(skl_max(visible.end - tile.key_first, 0), TILE);
    }
    __syncthreads();
}

__device__ inline bool sees(const key_span &span, int key)
{
    return key >= span.begin && key < span.end;
}

/* Whether the tile is full. Both ends of the visible range never decrease from one query to the next, so the first
 * and the last query decide. */
__device__ inline bool all_visible(const skl_problem &p, const tile_position &tile, int queries, int keys)
{
    return tile.query_first + queries <= tile.work.queries.end &&
           skl_visible(&p, &tile.work.sequence, tile.query_first).end >= tile.key_first + keys &&
           skl_visible(&p, &tile.work.sequence, tile.query_first + queries - 1).begin <= tile.key_first;
}

/* Keys that some query of a tile attends to. The tile must have a query. */
__device__ inline skl_range visible_keys(const skl_problem &p, const skl_sequence &s, int64_t query_first)
{
    const int64_t last = skl_min(query_first + TILE, s.query_count) - 1;
    const skl_range keys = {skl_visible(&p, &s, query_first).begin, skl_visible(&p, &s, last).end};
    return keys;
}

/* Queries that attend to some key of a tile. */
__device__ inline skl_range queries_seeing(const skl_problem &p, const skl_sequence &s, int64_t key_first)
{
    const skl_band band = skl_query_band(&p, &s);
    const int64_t last = skl_min(key_first + TILE, s.key_count) - 1;
    const skl_range none = {0, 0};
    const skl_range queries = {skl_band_range(&band, key_first).begin, skl_band_range(&band, last).end};
    return key_first > last ? none : queries;
}

/* ---- Work --------------------------------------------------------------------------------------------------- */

/* Work item `index` of the launch, without its heads and ranges. */
__device__ inline work_item work_item_at(const skl_cuda_params &params, int64_t index, int64_t items_per_sequence)
{
    const skl_problem &p = params.problem;
    work_item work = {};
    work.index = index;
    work.exists = index < p.batch * items_per_sequence;
    if (!work.exists)
        return work;
    work.sides[TEACHER] = tile_side_of(skl_teacher_of(&p, &params.call));
    work.sides[STUDENT] = tile_side_of(skl_student_of(&p, &params.call));
    work.sides[STUDENT].heads_per_key *= skl_query_heads_s(&p) / p.heads_s; /* index heads share keys */
    work.sequence = device_sequence(params, index / items_per_sequence);
    return work;
}

/* A query tile of one head, and the keys that it attends to: forward and dq. */
__device__ inline work_item query_item(const skl_cuda_params &params, int64_t index, bool teacher_side = false)
{
    const skl_problem &p = params.problem;
    const int64_t heads = teacher_side ? p.heads_t : p.heads_s;
    const int64_t tiles = skl_ceil_div(p.len_q, TILE);
    work_item work = work_item_at(params, index, heads * tiles);
    if (!work.exists)
        return work;
    work.grad_head = index / tiles % heads;
    work.head = teacher_side ? work.grad_head / skl_group_size(&p) : work.grad_head;
    work.queries.begin = (tiles - 1 - index % tiles) * TILE; /* causal: longest first */
    work.queries.end = work.sequence.query_count;
    if (work.queries.begin < work.queries.end)
        work.keys = visible_keys(p, work.sequence, work.queries.begin);
    return work;
}

/* A key tile of one of `heads` key heads, and the queries that attend to it. */
__device__ inline work_item key_tile_item(const skl_cuda_params &params, int64_t index, int64_t heads)
{
    const skl_problem &p = params.problem;
    const int64_t tiles = skl_ceil_div(p.len_k, TILE);
    work_item work = work_item_at(params, index, heads * tiles);
    if (!work.exists)
        return work;
    work.keys.begin = index % tiles * TILE;
    work.keys.end = work.sequence.key_count;
    work.queries = queries_seeing(p, work.sequence, work.keys.begin);
    return work;
}

/* Calls visit() for each work item of this block: items blockIdx.x, blockIdx.x + gridDim.x, ... find(index) returns
 * an item; `work`, in shared memory, holds the current one. */
template <typename FIND, typename VISIT> __device__ inline void for_each_item(work_item &work, FIND find, VISIT visit)
{
#pragma unroll 1
    for (int64_t index = blockIdx.x;; index += gridDim.x) {
        if (threadIdx.x == 0)
            work = find(index);
        __syncthreads();
        if (!work.exists)
            return;
        visit();
        __syncthreads();
    }
}

#endif
