/* One row of a sparse indexer and its list of top-k keys. Rows have different lists, but the heads of a row share
 * one. So a block works on one row: it gathers 64 keys of the list at a time, and one product multiplies all heads
 * that share a key head by them.
 *
 *              64 gathered keys
 *            +------------------+
 *   heads    |  <q_head, k_key> |    16, 32, 64 or 128 heads per product
 *            +------------------+    16 x 16 threads, each with 1 to 8 heads and 4 keys */
#ifndef SKL_CUDA_GENERAL_INDEXER_SPARSE_PRODUCT_CUH
#define SKL_CUDA_GENERAL_INDEXER_SPARSE_PRODUCT_CUH

#include "cuda/general/row_state.cuh"
#include "cuda/general/indexer/dense_tile.cuh"
#include "cuda/common/indexer/sparse_row.cuh"

constexpr int KEY_TILE = SKL_INDEX_STEP; /* entries of the list that are gathered together */
constexpr int KEY_COLUMNS = KEY_TILE / LANES;
constexpr int DOT_STRIDE = KEY_TILE + 8;            /* a warp reads 8 keys of 4 heads: no bank conflicts */
constexpr int THREADS_PER_KEY = THREADS / KEY_TILE; /* threads that share the heads of a key */

struct sparse_memory {
    operand_stages stages;
    __align__(16) float dots[TILE * DOT_STRIDE]; /* [head][key] */
    int32_t keys[KEY_TILE];                      /* -1: none */
    float x[KEY_TILE], y[KEY_TILE];              /* log2 mean_h P_h of the teacher; logits of the indexer */
    skl_lse2 lse[TILE];                          /* of the teacher heads of a product */
    float weights[TILE];                         /* of the index heads of a product */
    row_source heads, gathered;                  /* of a product: one row per head; the rows that keys[] indexes */
    tile_side sides[2];
    sparse_row row;
};

__device__ inline int key_of_thread(void)
{
    return (int)(threadIdx.x / THREADS_PER_KEY);
}

__device__ inline int lane_of_key(void)
{
    return (int)(threadIdx.x % THREADS_PER_KEY);
}

/* Makes row `index` of the launch the current one. */
__device__ inline void begin_row(sparse_memory &memory, const skl_cuda_params &params, int64_t index)
{
    const skl_problem &p = params.problem;
    __syncthreads(); /* no thread reads the previous row any more */
    if (threadIdx.x == 0) {
        memory.row = sparse_row_at(params, index);
        memory.sides[TEACHER] = tile_side_of(skl_teacher_of(&p, &params.call));
        memory.sides[STUDENT] = tile_side_of(skl_student_of(&p, &params.call));
    }
    __syncthreads();
}

/* Loads entries [first, first + KEY_TILE) of the list into memory.keys. Returns false if none of them is a visible
 * key. */
__device__ inline bool load_indices(sparse_memory &memory, int64_t top_k, int64_t first)
{
    __syncthreads(); /* no thread reads the previous keys any more */
    int32_t key = -1;
    if (threadIdx.x < KEY_TILE) {
        const int32_t index = first + threadIdx.x < top_k ? memory.row.list[first + threadIdx.x] : -1;
        key = skl_index_is_visible(index, memory.row.visible) ? index : -1;
        memory.keys[threadIdx.x] = key;
    }
    return __syncthreads_or(key >= 0) != 0;
}

/* ---- Products ----------------------------------------------------------------------------------------------- */

/* A quad of the key of an entry; zeros if the entry has no key. */
__device__ inline void load_gathered(raw_quad &to, const sparse_memory &memory, int entry, int c)
{
    const int64_t key = memory.keys[entry];
    row_source row = memory.gathered;
    row.data += key * row.row_size;
    row.row_count = key >= 0;
    raw_quad quads[1];
    load_quads(quads, row, 0, 0, c);
    to = quads[0];
}

template <int R> __device__ inline int head_of(int i)
{
    return R == 8 ? acc_row(i) : (int)(threadIdx.x / LANES) * R + i;
}

template <int R> __device__ inline void read_heads(float (&to)[R], const float *from)
{
    if constexpr (R >= 4) {
        read_fours(to, from + (int)(threadIdx.x / LANES) * 4);
    } else {
#pragma unroll
        for (int i = 0; i < R; i++)
            to[i] = from[head_of<R>(i)];
    }
}

/* memory.dots = <head, key> for up to 16 R heads. Ends with a barrier: all threads may read them. */
template <int R> __device__ inline void multiply_heads(sparse_memory &memory)
{
    constexpr int QUADS = R == 8 ? 2 : 1;
    const int dim = memory.heads.dim;
    const skl_dtype dtype = memory.heads.dtype;
    const int quad = (int)(threadIdx.x % 4) * QUAD;
    float sum[R][KEY_COLUMNS] = {};
    raw_quad stationary[QUADS], streamed[1];
    load_dims(stationary, memory.heads, 0);
    load_gathered(streamed[0], memory, key_of_thread(), quad);
#pragma unroll 1
    for (int c = 0, stage = 0; c < dim; c += STAGE_STEPS, stage ^= 1) {
        store_dims(memory.stages.stationary[stage], stationary, dtype);
        store_dims(memory.stages.streamed[stage], streamed, dtype);
        __syncthreads(); /* this stage is full, and no thread reads the other one any more */
        if (c + STAGE_STEPS < dim) {
            load_dims(stationary, memory.heads, c + STAGE_STEPS);
            load_gathered(streamed[0], memory, key_of_thread(), c + STAGE_STEPS + quad);
        }
        const float *const smem_heads = memory.stages.stationary[stage];
        const float *const smem_keys = memory.stages.streamed[stage] + (int)(threadIdx.x % LANES) * 4;
        for_each_step([&](int first, int step) {
            float a[R], b[KEY_COLUMNS];
            read_heads<R>(a, smem_heads + step_offset(first, step));
            read_fours(b, smem_keys + step_offset(first, step));
#pragma unroll
            for (int i = 0; i < R; i++)
#pragma unroll
                for (int j = 0; j < KEY_COLUMNS; j++)
                    sum[i][j] = fmaf(a[i], b[j], sum[i][j]);
        });
    }
#pragma unroll
    for (int i = 0; i < R; i++)
        *(float4 *)&memory.dots[head_of<R>(i) * DOT_STRIDE + acc_column(0)] =
            make_float4(sum[i][0], sum[i][1], sum[i][2], sum[i][3]);
    __syncthreads();
}

/* The same with the smallest R for `count` heads. */
__device__ inline void multiply_heads(sparse_memory &memory, int64_t count)
{
    if (count > 64)
        multiply_heads<8>(memory);
    else if (count > 32)
        multiply_heads<4>(memory);
    else if (count > 16)
        multiply_heads<2>(memory);
    else
        multiply_heads<1>(memory);
}

/* Sets the operands of a product: `count` query heads from `head`, and the keys of one key head. */
__device__ inline void set_product(sparse_memory &memory, int side, int64_t head, int64_t count, int64_t key_head)
{
    const tile_side &of = memory.sides[side];
    const skl_sequence &s = memory.row.sequence;
    if (threadIdx.x != 0)
        return;
    const skl_input heads = {of.q.data, 0, 0, of.q.stride_head};
    memory.heads = make_row_source(heads, of.dtype, of.dim,
                                   SKL_ROW(of.q, s.batch, head, s.query_begin + memory.row.query), 0, count);
    memory.gathered =
        make_row_source(of.k, of.dtype, of.dim, SKL_ROW(of.k, s.batch, key_head, s.key_begin), 0, s.key_count);
}

/* Number of teacher heads of the group, from h, in one product: heads that share a key head. */
__device__ inline int64_t teacher_heads_per_product(const sparse_memory &memory, int64_t group, int64_t h)
{
    const int64_t heads_per_key = memory.sides[TEACHER].heads_per_key, first = memory.row.head * group;
    const int64_t shared_end = ((first + h) / heads_per_key + 1) * heads_per_key - first;
    return skl_min(skl_min(group, shared_end) - h, TILE);
}

/* Sets the operands of a product of `count` teacher heads of the group from h; lse_of(h) returns their LSEs, for
 * memory.lse. */
template <typename LSE>
__device__ inline void set_teacher_product(sparse_memory &memory, int64_t group, int64_t h, int64_t count, LSE lse_of)
{
    const int64_t head = memory.row.head * group + h;
    __syncthreads(); /* no thread reads the previous product any more */
    set_product(memory, TEACHER, head, count, head / memory.sides[TEACHER].heads_per_key);
    if (threadIdx.x < count)
        memory.lse[threadIdx.x] = lse_of(h + threadIdx.x);
    __syncthreads();
}

/* Sets the operands of a product of `count` index heads from g, and loads their weights. */
__device__ inline void set_index_product(sparse_memory &memory, const skl_cuda_params &params, int64_t g,
                                         int64_t count)
{
    const sparse_row &row = memory.row;
    __syncthreads(); /* no thread reads the previous product any more */
    set_product(memory, STUDENT, row.head * params.problem.index_heads + g, count,
                row.head / memory.sides[STUDENT].heads_per_key);
    if (threadIdx.x < count)
        memory.weights[threadIdx.x] = index_weight(params, row.sequence, row.head, g + threadIdx.x, row.query);
    __syncthreads();
}

__device__ inline float teacher_logit(const tile_side &side, float dot)
{
    const float x = __fmul_rn(dot, side.scale);
    return side.softcap == 0.0F ? x : __fmul_rn(tanhf(x), side.softcap);
}

/* ---- Logits ------------------------------------------------------------------------------------------------- */

/* For memory.keys: x = log2 mean_h P_h over the heads of the teacher group (with_teacher), y = logits of the indexer
 * in base 2. One loop for the products of both sides, which are much code. Ends with a barrier: all threads may read
 * memory.x and memory.y. */
template <typename LSE>
__device__ inline void row_logits(sparse_memory &memory, const skl_cuda_params &params, bool with_teacher, LSE lse_of)
{
    const int group = (int)skl_group_size(&params.problem), end = group + (int)params.problem.index_heads;
    const bool linear = params.problem.index_linear != 0;
    float x = -3e38F, sum = 0.0F; /* finite: -inf - -inf would be NaN */
    float y = 0.0F;
#pragma unroll 1
    for (int n = with_teacher ? 0 : group, count; n < end; n += count) {
        const bool of_student = n >= group;
        count = of_student ? min(end - n, TILE) : (int)teacher_heads_per_product(memory, group, n);
        if (of_student)
            set_index_product(memory, params, n - group, count);
        else
            set_teacher_product(memory, group, n, count, lse_of);
        multiply_heads(memory, count);
#pragma unroll 1
        for (int head = lane_of_key(); head < count; head += THREADS_PER_KEY) {
            const float dot = memory.dots[head * DOT_STRIDE + key_of_thread()];
            if (of_student)
                y = index_active(linear, dot) ? fmaf(memory.weights[head], dot, y) : y;
            else
                add_in_log_space(x, sum,
                                 log_probability(teacher_logit(memory.sides[TEACHER], dot), memory.lse[head]));
        }
    }
#pragma unroll
    for (int offset = 1; offset < THREADS_PER_KEY; offset *= 2) {
        const float other_x = __shfl_xor_sync(~0U, x, offset), other_sum = __shfl_xor_sync(~0U, sum, offset);
        const float larger = fmaxf(x, other_x);
        sum = sum * ex2(x - larger) + other_sum * ex2(other_x - larger);
        x = larger;
        y += __shfl_xor_sync(~0U, y, offset);
    }
    if (lane_of_key() == 0) {
        memory.x[key_of_thread()] = x + log2f(sum / (float)group);
        memory.y[key_of_thread()] = __fmul_rn(y, memory.sides[STUDENT].scale);
    }
    __syncthreads();
}

#endif
