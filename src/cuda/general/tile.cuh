/* Tiles of logits of the general kernels: masks, softcaps and the teacher's group. One tensor's rows are the block's
 * own, TILE of them, the other's are streamed, 16 for each column of a thread. */
#ifndef SKL_CUDA_GENERAL_TILE_CUH
#define SKL_CUDA_GENERAL_TILE_CUH

#include "base/kl_math.h"
#include "cuda/general/pipeline.cuh"
#include "cuda/common/ptx.cuh"
#include "cuda/common/sequence.cuh"

/* One side of the call; the launch's constants are kept in shared memory, since registers are what is scarce. */
struct tile_side {
    skl_input q, k;
    int64_t heads_per_key, dim;
    skl_dtype dtype;
    float scale;   /* what makes a product a logit in base 2; for capped ones what tanh gets */
    float softcap; /* in base 2; 0: none */
};

enum { TEACHER = 0, STUDENT = 1 };

__device__ inline tile_side tile_side_of(const skl_side &side)
{
    const bool capped = side.softcap > 0.0F;
    const tile_side of = {*side.q,
                          *side.k,
                          side.heads / side.key_heads,
                          side.dim,
                          side.dtype,
                          capped ? side.scale / side.softcap : side.scale * SKL_LOG2E,
                          side.softcap * SKL_LOG2E};
    return of;
}

/* What a block works on: one item of the launch, in shared memory. */
struct work_item {
    int64_t item;
    bool exists; /* there is such an item */
    tile_side sides[2];
    skl_sequence sequence;
    int64_t head;            /* student head */
    int64_t own_head;        /* backward: head of the gradient's side */
    skl_range queries, keys; /* that it looks at */
};

/* A tile of it. */
struct tile_position {
    const work_item &in;
    int64_t query_first, key_first;
};

/* DK: the keys are the block's own rows. */
template <bool DK> __device__ inline tile_source source_of(const tile_position &at, int side, int64_t head)
{
    const tile_side &of = at.in.sides[side];
    const skl_sequence &s = at.in.sequence;
    const row_source q = source_rows(of.q, of.dtype, of.dim, SKL_ROW(of.q, s.batch, head, s.query_begin),
                                     at.query_first, at.in.queries.end);
    const row_source k =
        source_rows(of.k, of.dtype, of.dim, SKL_ROW(of.k, s.batch, head / of.heads_per_key, s.key_begin),
                    at.key_first, at.in.keys.end);
    const tile_source source = {DK ? k : q, DK ? q : k};
    return source;
}

/* Products become logits in base 2. These multiplications are never fused with what follows: teacher and student
 * shall have the same bits. */
template <int COLUMNS> __device__ inline void scale_products(fragment<COLUMNS> &x, const tile_side &side)
{
    const float scale = side.scale, softcap = side.softcap;
#pragma unroll
    for (int i = 0; i < ROWS; i++)
#pragma unroll
        for (int j = 0; j < COLUMNS; j++)
            x.at[i][j] = __fmul_rn(x.at[i][j], scale);
    if (softcap == 0.0F)
        return;
#pragma unroll 1
    for (int turn = 0; turn < ROWS; turn++, rotate_rows(x))
#pragma unroll
        for (int j = 0; j < COLUMNS; j++)
            x.at[0][j] = __fmul_rn(tanhf(x.at[0][j]), softcap);
}

/* log2 of a probability; what f32 cannot hold of the LSE goes last. */
__device__ inline float log_probability(float logit, const skl_lse2 &lse)
{
    return (logit - lse.value) - lse.low;
}

/* (x, sum) stand for x + log2 sum; adds 2^z with one exponential. */
__device__ inline void add_in_log_space(float &x, float &sum, float z)
{
    const float difference = z - x;
    const float ratio = ex2(-fabsf(difference));
    sum = difference > 0.0F ? fmaf(sum, ratio, 1.0F) : sum + ratio;
    x = difference > 0.0F ? z : x;
}

/* Logits of both sides for the tile at hand, which begins with the first teacher head; what after() gives follows.
 * x = log2 mean_h P_h of the heads of a group, where lse_of(h) gives the LSE of the thread's query of the tile, and
 * `lse` is shared memory for them; one head: plain logits. */
template <bool DK, int COLUMNS, typename LSE, typename SOURCE>
__device__ inline void logit_tiles(fragment<COLUMNS> &x, fragment<COLUMNS> &y, pipeline<COLUMNS> &line,
                                   const tile_position &at, int64_t group, skl_lse2 (&lse)[TILE], LSE lse_of,
                                   SOURCE after)
{
    const float lowest = -3e38F; /* finite: the difference of two infinities is none */
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
        const bool students = h == group;
        line.prefetch([&] {
            if (students)
                return after();
            return h + 1 < group ? source_of<DK>(at, TEACHER, at.in.head * group + h + 1)
                                 : source_of<DK>(at, STUDENT, at.in.head);
        });
        skl_lse2 brought = {0.0F, 0.0F};
        if (group > 1 && !students && threadIdx.x < TILE && at.query_first + threadIdx.x < at.in.queries.end)
            brought = lse_of(h);
        line.multiply_tile(y);
        scale_products(y, at.in.sides[students ? STUDENT : TEACHER]);
        if (students)
            break;
        if (group == 1) {
            x = y;
            continue;
        }
        if (threadIdx.x < TILE)
            lse[threadIdx.x] = brought;
        __syncthreads();
#pragma unroll
        for (int i = 0; i < ROWS; i++)
#pragma unroll
            for (int j = 0; j < COLUMNS; j++)
                add_in_log_space(x.at[i][j], sum.at[i][j],
                                 log_probability(y.at[i][j], lse[DK ? acc_column(j) : row_of(i)]));
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

/* Keys of the tile that a query sees, counted from the tile's first one. */
struct key_span {
    int begin, end;
};

/* Spans of all queries of a tile into shared memory. */
__device__ inline void find_spans(key_span (&spans)[TILE], const skl_problem &p, const tile_position &at)
{
    const int64_t query = at.query_first + threadIdx.x;
    if (threadIdx.x < TILE) {
        const skl_range none = {0, 0};
        const skl_range visible = query < at.in.queries.end ? skl_visible(&p, &at.in.sequence, query) : none;
        spans[threadIdx.x].begin = (int)skl_min(skl_max(visible.begin - at.key_first, 0), TILE);
        spans[threadIdx.x].end = (int)skl_min(skl_max(visible.end - at.key_first, 0), TILE);
    }
    __syncthreads();
}

__device__ inline bool sees(const key_span &span, int key)
{
    return key >= span.begin && key < span.end;
}

/* Every pair of a tile is visible: neither end of what a query sees ever moves backwards. */
__device__ inline bool all_visible(const skl_problem &p, const tile_position &at, int queries, int keys)
{
    return at.query_first + queries <= at.in.queries.end &&
           skl_visible(&p, &at.in.sequence, at.query_first).end >= at.key_first + keys &&
           skl_visible(&p, &at.in.sequence, at.query_first + queries - 1).begin <= at.key_first;
}

/* Keys that some query of a tile sees; it has at least one. */
__device__ inline skl_range keys_seen(const skl_problem &p, const skl_sequence &s, int64_t query_first)
{
    const int64_t last = skl_min(query_first + TILE, s.query_count) - 1;
    const skl_range keys = {skl_visible(&p, &s, query_first).begin, skl_visible(&p, &s, last).end};
    return keys;
}

/* Queries that see some key of a tile. */
__device__ inline skl_range queries_seeing(const skl_problem &p, const skl_sequence &s, int64_t key_first)
{
    const skl_band band = skl_query_band(&p, &s);
    const int64_t last = skl_min(key_first + TILE, s.key_count) - 1;
    const skl_range none = {0, 0};
    const skl_range queries = {skl_band_range(&band, key_first).begin, skl_band_range(&band, last).end};
    return key_first > last ? none : queries;
}

/* ---- Work --------------------------------------------------------------------------------------------------- */

/* What all items of a launch share, and the sequence of this one; every sequence has as many items. */
__device__ inline work_item work_item_at(const skl_cuda_params &params, int64_t item, int64_t items_per_sequence)
{
    const skl_problem &p = params.problem;
    work_item at = {};
    at.item = item;
    at.exists = item < p.batch * items_per_sequence;
    if (!at.exists)
        return at;
    at.sides[TEACHER] = tile_side_of(skl_teacher_of(&p, &params.call));
    at.sides[STUDENT] = tile_side_of(skl_student_of(&p, &params.call));
    at.sides[STUDENT].heads_per_key *= skl_query_heads_s(&p) / p.heads_s; /* index heads share keys */
    at.sequence = device_sequence(params, item / items_per_sequence);
    return at;
}

/* A tile of queries of one head, and the keys that they see: forward and dq. */
__device__ inline work_item query_item(const skl_cuda_params &params, int64_t item, bool teacher_side = false)
{
    const skl_problem &p = params.problem;
    const int64_t heads = teacher_side ? p.heads_t : p.heads_s;
    const int64_t tiles = skl_ceil_div(p.len_q, TILE);
    work_item at = work_item_at(params, item, heads * tiles);
    if (!at.exists)
        return at;
    at.own_head = item / tiles % heads;
    at.head = teacher_side ? at.own_head / skl_group_size(&p) : at.own_head;
    at.queries.begin = (tiles - 1 - item % tiles) * TILE; /* causal: longest first */
    at.queries.end = at.sequence.query_count;
    if (at.queries.begin < at.queries.end)
        at.keys = keys_seen(p, at.sequence, at.queries.begin);
    return at;
}

/* Every item that is this block's, one after the other: find(item) makes it known to all threads as `at`, in shared
 * memory, for visit(). */
template <typename FIND, typename VISIT> __device__ inline void for_items(work_item &at, FIND find, VISIT visit)
{
    if (threadIdx.x == 0)
        at = find(blockIdx.x);
    __syncthreads();
#pragma unroll 1
    while (at.exists) {
        visit();
        __syncthreads();
        if (threadIdx.x == 0)
            at = find(at.item + gridDim.x);
        __syncthreads();
    }
}

#endif
