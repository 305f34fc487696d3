/* Tiles of an indexer, dense or sparse. A block works on QUERIES queries of one student head and on 64 of their keys
 * at a time. One product multiplies the keys by up to 128 rows of queries:
 *
 *              QUERIES   keys of a tile                   rows of a product
 *     dense    128       64 consecutive keys              the queries of one head
 *     sparse   1         64 entries of the row's list     the heads of the query that share a key head
 *
 *              64 keys
 *            +----------------+
 *     rows   |  <q_row, k_n>  |    16, 32, 64 or 128 rows per product
 *            +----------------+    16 x 16 threads, each with 1 to 8 rows and 4 keys
 *
 * With a pooled teacher, the keys of a tile are blocks of the teacher's keys: logits.cuh. */
#ifndef SKL_CUDA_GENERAL_INDEXER_TILE_CUH
#define SKL_CUDA_GENERAL_INDEXER_TILE_CUH

#include "base/indices.h"
#include "cuda/general/row_state.cuh"

constexpr int KEY_TILE = SKL_INDEX_STEP;
constexpr int KEY_COLUMNS = KEY_TILE / LANES;
constexpr int DOT_STRIDE = KEY_TILE + 8; /* sparse: a warp reads 8 keys of 4 heads without bank conflicts */

constexpr int DENSE = TILE, SPARSE = 1; /* QUERIES */

/* Query heads per product, at most. */
template <int QUERIES> constexpr int HEADS = QUERIES == SPARSE ? TILE : 1;

struct index_tile {
    skl_sequence sequence;
    int64_t head, query_first; /* student head */
    int64_t queries;           /* packed sequences can be shorter than the longest one: 0 or less means none */
    int64_t key_first;         /* dense: the first key */
    int64_t key_count;         /* dense: keys that some query attends to; sparse: top_k */
    skl_range teacher_keys;    /* keys of the teacher that some query attends to; not pooled, dense: the tile's */
    const int32_t *list;       /* sparse */
};

template <int QUERIES> struct index_memory {
    operand_stages stages;
    __align__(16) float dots[TILE * DOT_STRIDE]; /* [row][key] of a product */
    int64_t keys[KEY_TILE];                      /* -1: none */
    int64_t blocks[KEY_TILE];                    /* pooled teacher: the tile's, while `keys` are the teacher's */
    int count;                                   /* number of keys, the last of which may be -1 */
    skl_range visible[QUERIES];                  /* keys of each query; with a pooled teacher, blocks */
    skl_range seen[QUERIES];                     /* the teacher's keys of each query */
    skl_lse2 lse[TILE];                          /* teacher heads: LSE of each row of the product */
    float weights[TILE];                         /* index heads: weight of each row of the product */
    float dw[TILE];                              /* index heads: gradient of each weight */
    row_source rows, gathered;                   /* operands of the product; gathered: the key head's keys from 0 */
    tile_side sides[2];
    index_tile tile;
};

/* Query of a product's row within the tile, and its head within the heads of the product. */
template <int QUERIES> __device__ inline int query_of_row(int row)
{
    return QUERIES == SPARSE ? 0 : row;
}

template <int QUERIES> __device__ inline int head_of_row(int row)
{
    return QUERIES == SPARSE ? row : 0;
}

/* Whether a query of the tile attends to a key of the current 64. */
template <int QUERIES> __device__ inline bool sees_key(const index_memory<QUERIES> &memory, int query, int n)
{
    return skl_index_is_visible(memory.keys[n], memory.visible[query]) != 0;
}

/* Whether the teacher attends to a key of the current 64, which are keys of the teacher. */
template <int QUERIES> __device__ inline bool teacher_sees_key(const index_memory<QUERIES> &memory, int query, int n)
{
    return skl_index_is_visible(memory.keys[n], memory.seen[query]) != 0;
}

/* Tile `index` of [sequence][head][tile of queries]. */
template <int QUERIES> __device__ inline index_tile index_tile_at(const skl_cuda_params &params, int64_t index)
{
    const skl_problem &p = params.problem;
    const int64_t tiles = skl_ceil_div(p.len_q, QUERIES), flat_head = index / tiles;
    index_tile tile = {device_sequence(params, flat_head / p.heads_s), flat_head % p.heads_s,
                       index % tiles * QUERIES};
    const skl_sequence &s = tile.sequence;
    tile.queries = skl_min(s.query_count - tile.query_first, QUERIES);
    if (tile.queries <= 0)
        return tile;
    const skl_range top = skl_visible(&p, &s, tile.query_first);
    const skl_range bottom = skl_visible(&p, &s, tile.query_first + tile.queries - 1);
    tile.teacher_keys = {top.begin, bottom.end};
    if (QUERIES == SPARSE) {
        tile.list = skl_row_indices(&params.call.inputs, &s, tile.head, tile.query_first);
        tile.key_count = p.top_k;
    } else {
        tile.key_first = skl_pooled_range(&p, top).begin;
        tile.key_count = skl_pooled_range(&p, bottom).end - tile.key_first;
    }
    return tile;
}

/* Makes tile `index` the current one. Returns whether it has queries. */
template <int QUERIES>
__device__ inline bool begin_tile(index_memory<QUERIES> &memory, const skl_cuda_params &params, int64_t index)
{
    const skl_problem &p = params.problem;
    const int query = (int)threadIdx.x;
    __syncthreads(); /* no thread reads the previous tile any more */
    if (threadIdx.x == 0) {
        memory.tile = index_tile_at<QUERIES>(params, index);
        memory.sides[TEACHER] = tile_side_of(skl_teacher_of(&p, &params.call));
        memory.sides[STUDENT] = tile_side_of(skl_student_of(&p, &params.call));
        memory.sides[STUDENT].heads_per_key *= p.index_heads;
    }
    __syncthreads();
    const index_tile &tile = memory.tile;
    const skl_range none = {0, 0};
    if (query < QUERIES) {
        memory.seen[query] = query < tile.queries ? skl_visible(&p, &tile.sequence, tile.query_first + query) : none;
        memory.visible[query] = query < tile.queries ? skl_pooled_range(&p, memory.seen[query]) : none;
    }
    __syncthreads();
    return tile.queries > 0;
}

/* Calls visit() for each 64 of `count` keys that include one, after it has set memory.keys: those from `first`,
 * first + step, ... key_at(n): key n, or -1. */
template <int QUERIES, typename KEY, typename VISIT>
__device__ inline void for_each_of(index_memory<QUERIES> &memory, int64_t first, int64_t step, int64_t count,
                                   KEY key_at, VISIT visit)
{
#pragma unroll 1
    for (; first < count; first += step) {
        const int64_t n = first + threadIdx.x;
        const int64_t key = threadIdx.x < KEY_TILE && n < count ? key_at(n) : -1;
        __syncthreads(); /* no thread reads the previous keys any more */
        if (threadIdx.x < KEY_TILE)
            memory.keys[threadIdx.x] = key;
        if (threadIdx.x == 0)
            memory.count = (int)skl_min(KEY_TILE, count - first);
        if (__syncthreads_or(key >= 0) != 0)
            visit(first);
    }
    __syncthreads(); /* memory may be used for something else */
}

/* Calls visit() for each 64 of the tile's keys that include one. */
template <int QUERIES, typename VISIT>
__device__ inline void for_each_keys(index_memory<QUERIES> &memory, int64_t first, int64_t step, VISIT visit)
{
    const index_tile &tile = memory.tile;
    const auto key_at = [&](int64_t n) {
        const int64_t key = QUERIES == SPARSE ? (int64_t)tile.list[n] : tile.key_first + n;
        return QUERIES == DENSE || skl_index_is_visible(key, memory.visible[0]) ? key : -1;
    };
    for_each_of(memory, first, step, tile.key_count, key_at, visit);
}

/* Key n of blocks of `size` keys, of which the teacher has no others than the tile's; -1: none. */
template <int QUERIES>
__device__ inline int64_t key_of_block(const index_memory<QUERIES> &memory, int64_t block, int64_t n, int64_t size)
{
    const int64_t key = block * size + n % size;
    return block >= 0 && skl_index_is_visible(key, memory.tile.teacher_keys) ? key : -1;
}

/* Calls visit() for each 64 of the keys that the teacher's LSEs cover: with a list of blocks, the keys of the listed
 * ones. MAY_POOL: the teacher may be pooled. */
template <bool MAY_POOL, int QUERIES, typename VISIT>
__device__ inline void for_each_teacher_keys(index_memory<QUERIES> &memory, const skl_problem &p, VISIT visit)
{
    const index_tile &tile = memory.tile;
    const int64_t size = skl_min(p.pool_size, p.len_k), begin = tile.teacher_keys.begin;
    if (!MAY_POOL || !skl_is_pooled(&p)) {
        for_each_keys(memory, 0, KEY_TILE, visit);
    } else if (QUERIES == DENSE) {
        for_each_of(
            memory, 0, KEY_TILE, tile.teacher_keys.end - begin, [&](int64_t n) { return begin + n; }, visit);
    } else {
        const auto key_at = [&](int64_t n) {
            const int64_t block = tile.list[n / size];
            return skl_index_is_visible(block, memory.visible[0]) ? key_of_block(memory, block, n, size) : -1;
        };
        for_each_of(memory, 0, KEY_TILE, tile.key_count * size, key_at, visit);
    }
}

/* ---- Products ----------------------------------------------------------------------------------------------- */

/* Quads at dimension c of the keys of entries `entry`, entry + entry_step, ...; zeros if an entry has no key. */
template <int QUADS, int QUERIES>
__device__ inline void load_gathered(raw_quad (&to)[QUADS], const index_memory<QUERIES> &memory, int entry,
                                     int entry_step, int c)
{
    const row_source from = memory.gathered;
    load_quads(to, from, c, [&](int quad) {
        const int64_t key = memory.keys[entry + quad * entry_step];
        return key >= 0 ? from.data + key * from.row_size : NULL;
    });
}

/* Row i of a thread in a product with R rows per thread. */
template <int R> __device__ inline int product_row(int i)
{
    return R == ROWS ? acc_row(i) : (int)(threadIdx.x / LANES) * R + i;
}

/* memory.dots = <row, key> for up to 16 R rows. Ends with a barrier: all threads may read them. */
template <int R, int QUERIES> __device__ inline void multiply_rows(index_memory<QUERIES> &memory)
{
    const int dim = memory.rows.dim;
    const skl_dtype dtype = memory.rows.dtype;
    const int entry = (int)(threadIdx.x / 4), quad = (int)(threadIdx.x % 4) * QUAD;
    fragment<KEY_COLUMNS, R> sum;
    clear(sum);
    raw_quad stationary[R == ROWS ? 2 : 1], streamed[1];
    load_dims(stationary, memory.rows, 0);
    load_gathered(streamed, memory, entry, 0, quad);
#pragma unroll 1
    for (int c = 0, stage = 0; c < dim; c += STAGE_STEPS, stage ^= 1) {
        store_dims(memory.stages.stationary[stage], stationary, dtype);
        store_dims(memory.stages.streamed[stage], streamed, dtype);
        __syncthreads(); /* this stage is full, and no thread reads the other one any more */
        if (c + STAGE_STEPS < dim) {
            load_dims(stationary, memory.rows, c + STAGE_STEPS);
            load_gathered(streamed, memory, entry, 0, c + STAGE_STEPS + quad);
        }
        const float *const rows = memory.stages.stationary[stage] + product_row<R>(0);
        const auto read_rows = [&](float(&a)[R], int first, int step) {
            if constexpr (R >= 4)
                read_fours(a, rows + step_offset(first, step));
            else
                for (int i = 0; i < R; i++)
                    a[i] = rows[step_offset(first, step) + i];
        };
        multiply_steps<false>(sum, read_rows, columns_of(memory.stages.streamed[stage]));
    }
#pragma unroll
    for (int i = 0; i < R; i++)
        *(float4 *)&memory.dots[product_row<R>(i) * DOT_STRIDE + acc_column(0)] =
            make_float4(sum.at[i][0], sum.at[i][1], sum.at[i][2], sum.at[i][3]);
    __syncthreads();
}

template <int R> struct rows_per_thread {
    static constexpr int value = R;
};

/* Calls product() with the smallest rows_per_thread for a product of `heads` heads. */
template <int QUERIES, typename PRODUCT> __device__ inline void with_rows_per_thread(int heads, PRODUCT product)
{
    if (QUERIES == DENSE || heads > 64)
        product(rows_per_thread<8>());
    else if (heads > 32)
        product(rows_per_thread<4>());
    else if (heads > 16)
        product(rows_per_thread<2>());
    else
        product(rows_per_thread<1>());
}

template <int QUERIES> __device__ inline void multiply_heads(index_memory<QUERIES> &memory, int heads)
{
    with_rows_per_thread<QUERIES>(heads, [&](auto rows) { multiply_rows<decltype(rows)::value>(memory); });
}

/* Rows of a product that have a query, and all that it computes: whole groups of 16. */
template <int QUERIES> __device__ inline int product_rows(const index_memory<QUERIES> &memory, int heads)
{
    return QUERIES == SPARSE ? heads : (int)memory.tile.queries;
}

template <int QUERIES> __device__ inline int computed_rows(int heads)
{
    return QUERIES == SPARSE ? (heads + LANES - 1) / LANES * LANES : QUERIES;
}

/* Sets the operands of a product of `heads` query heads from `head`, which share a key head. */
template <int QUERIES>
__device__ inline void set_product(index_memory<QUERIES> &memory, int side, int64_t head, int heads)
{
    const tile_side &of = memory.sides[side];
    const skl_sequence &s = memory.tile.sequence;
    const skl_input rows = {of.q.data, 0, 0, QUERIES == SPARSE ? of.q.stride_head : of.q.stride_row};
    memory.rows =
        make_row_source(rows, of.dtype, of.dim, SKL_ROW(of.q, s.batch, head, s.query_begin + memory.tile.query_first),
                        0, product_rows(memory, heads));
    memory.gathered =
        make_row_source(of.k, of.dtype, of.dim, SKL_ROW(of.k, s.batch, head / of.heads_per_key, s.key_begin), 0, 0);
}

/* Number of teacher heads of the group, from h, in one product: heads that share a key head. */
template <int QUERIES>
__device__ inline int teacher_heads_per_product(const index_memory<QUERIES> &memory, int group, int h)
{
    const int64_t heads_per_key = memory.sides[TEACHER].heads_per_key, first = memory.tile.head * group;
    const int64_t shared_end = ((first + h) / heads_per_key + 1) * heads_per_key - first;
    return (int)skl_min(skl_min(group, shared_end) - h, HEADS<QUERIES>);
}

/* memory.dots = logits in base 2 of `heads` teacher heads of the group from h. */
template <int QUERIES>
__device__ inline void teacher_logits(index_memory<QUERIES> &memory, int group, int h, int heads)
{
    const tile_side &side = memory.sides[TEACHER];
    if (threadIdx.x == 0)
        set_product(memory, TEACHER, memory.tile.head * group + h, heads);
    __syncthreads();
    multiply_heads(memory, heads);
#pragma unroll 1
    for (int n = (int)threadIdx.x; n < computed_rows<QUERIES>(heads) * KEY_TILE; n += THREADS) {
        float &dot = memory.dots[n / KEY_TILE * DOT_STRIDE + n % KEY_TILE];
        const float x = __fmul_rn(dot, side.scale);
        dot = side.softcap == 0.0F ? x : __fmul_rn(tanhf(x), side.softcap);
    }
    __syncthreads();
}

/* memory.dots = dot products of `heads` index heads from g; memory.weights = their weights. */
template <int QUERIES>
__device__ inline void index_dots(index_memory<QUERIES> &memory, const skl_cuda_params &params, int g, int heads)
{
    const skl_input &w = params.call.inputs.w_s;
    const index_tile &tile = memory.tile;
    const int row = (int)threadIdx.x;
    if (threadIdx.x == 0)
        set_product(memory, STUDENT, tile.head * params.problem.index_heads + g, heads);
    if (row < product_rows(memory, heads))
        memory.weights[row] =
            skl_load(w.data, params.problem.dtype_w,
                     SKL_ROW(w, tile.sequence.batch, tile.head,
                             tile.sequence.query_begin + tile.query_first + query_of_row<QUERIES>(row)) +
                         g + head_of_row<QUERIES>(row));
    __syncthreads();
    multiply_heads(memory, heads);
}

/* Whether an index head's dot product is active: the ReLU passes it. NaN is active, so that it reaches the result. */
__device__ inline bool index_active(bool linear, float dot)
{
    return linear || !(dot <= 0.0F);
}

#endif
