/* One row of the sparse stage of an indexer and its list of keys. Rows have no keys in common, so a block works on
 * one row: 64 keys of the list at a time are gathered, and all heads that share them are one product, heads by keys.
 *
 * A product takes 16, 32, 64 or 128 heads: 16 x 16 threads own 1 to 8 heads and 4 keys each. */
#ifndef SKL_CUDA_GENERAL_INDEXER_SPARSE_PRODUCT_CUH
#define SKL_CUDA_GENERAL_INDEXER_SPARSE_PRODUCT_CUH

#include "cuda/general/row_state.cuh"
#include "cuda/general/indexer/dense_tile.cuh"
#include "cuda/common/indexer/sparse_row.cuh"

constexpr int STEP = SKL_INDEX_STEP; /* keys of the list that are looked at together */
constexpr int KEY_COLUMNS = STEP / LANES;
constexpr int DOT_STRIDE = STEP + 8;  /* eight keys of four heads, which is what a warp reads, meet every bank once */
constexpr int PARTS = THREADS / STEP; /* threads of a key, which share its heads */

struct sparse_memory {
    staged_chunks chunks;
    __align__(16) float dots[TILE * DOT_STRIDE]; /* [head][key] */
    int32_t keys[STEP];                          /* -1: none */
    float x[STEP], y[STEP];                      /* logits: log2 of the teacher's mean, the student's */
    skl_lse2 lse[TILE];                          /* of the teacher heads of a product */
    float weights[TILE];                         /* of the index heads of a product */
    row_source heads, gathered;                  /* of a product: a row a head; rows that keys[] selects from */
    tile_side sides[2];
    sparse_row at;
};

__device__ inline int key_of_thread(void)
{
    return (int)threadIdx.x / PARTS;
}

__device__ inline int part_of_thread(void)
{
    return (int)threadIdx.x % PARTS;
}

/* Begins row `item` of the launch. */
__device__ inline void begin_row(sparse_memory &memory, const skl_cuda_params &params, int64_t item)
{
    const skl_problem &p = params.problem;
    __syncthreads(); /* nobody looks at the last row any more */
    if (threadIdx.x == 0) {
        memory.at = sparse_row_at(params, item);
        memory.sides[TEACHER] = tile_side_of(skl_teacher_of(&p, &params.call));
        memory.sides[STUDENT] = tile_side_of(skl_student_of(&p, &params.call));
    }
    __syncthreads();
}

/* Entries [first, first + STEP) of the list into memory.keys; false: none of them is a key. */
__device__ inline bool load_indices(sparse_memory &memory, int64_t top_k, int64_t first)
{
    __syncthreads(); /* nobody looks at the last keys any more */
    int32_t key = -1;
    if (threadIdx.x < STEP) {
        const int32_t listed = first + threadIdx.x < top_k ? memory.at.list[first + threadIdx.x] : -1;
        key = skl_index_is_visible(listed, memory.at.visible) ? listed : -1;
        memory.keys[threadIdx.x] = key;
    }
    return __syncthreads_or(key >= 0) != 0;
}

/* ---- Products ----------------------------------------------------------------------------------------------- */

/* A quad of the key that an entry selects; zeros if it is none. */
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
    return R == 8 ? row_of(i) : (int)threadIdx.x / LANES * R + i;
}

template <int R> __device__ inline void read_heads(float (&to)[R], const float *from)
{
    if constexpr (R >= 4) {
        read_fours(to, from + (int)threadIdx.x / LANES * 4);
    } else {
#pragma unroll
        for (int i = 0; i < R; i++)
            to[i] = from[head_of<R>(i)];
    }
}

/* memory.dots = <heads, keys>, for up to 16 R heads; others may read them. */
template <int R> __device__ inline void multiply_heads(sparse_memory &memory)
{
    constexpr int QUADS = R == 8 ? 2 : 1;
    const int dim = memory.heads.dim;
    const skl_dtype dtype = memory.heads.dtype;
    const int quad = (int)threadIdx.x % 4 * QUAD;
    float sum[R][KEY_COLUMNS] = {};
    raw_quad own[QUADS], streamed[1];
    load_dims(own, memory.heads, 0);
    load_gathered(streamed[0], memory, key_of_thread(), quad);
#pragma unroll 1
    for (int c = 0, chunk = 0; c < dim; c += CHUNK, chunk ^= 1) {
        store_dims(memory.chunks.own[chunk], own, dtype);
        store_dims(memory.chunks.streamed[chunk], streamed, dtype);
        __syncthreads(); /* this chunk is complete, and the one before the last is no longer read */
        if (c + CHUNK < dim) {
            load_dims(own, memory.heads, c + CHUNK);
            load_gathered(streamed[0], memory, key_of_thread(), c + CHUNK + quad);
        }
        const float *const a_chunk = memory.chunks.own[chunk];
        const float *const b_chunk = memory.chunks.streamed[chunk] + (int)threadIdx.x % LANES * 4;
#pragma unroll
        for (int step = 0; step < CHUNK; step++) {
            float a[R], b[KEY_COLUMNS];
            read_heads<R>(a, a_chunk + step_at(step));
            read_fours(b, b_chunk + step_at(step));
#pragma unroll
            for (int i = 0; i < R; i++)
#pragma unroll
                for (int j = 0; j < KEY_COLUMNS; j++)
                    sum[i][j] = fmaf(a[i], b[j], sum[i][j]);
        }
    }
#pragma unroll
    for (int i = 0; i < R; i++)
        *(float4 *)&memory.dots[head_of<R>(i) * DOT_STRIDE + acc_column(0)] =
            make_float4(sum[i][0], sum[i][1], sum[i][2], sum[i][3]);
    __syncthreads();
}

/* The product of the fewest heads that will do. */
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

/* Says what a product is of: `count` query heads from `head` on, and the keys of one key head. */
__device__ inline void set_product(sparse_memory &memory, int side, int64_t head, int64_t count, int64_t key_head)
{
    const tile_side &of = memory.sides[side];
    const skl_sequence &s = memory.at.sequence;
    if (threadIdx.x != 0)
        return;
    const skl_input heads = {of.q.data, 0, 0, of.q.stride_head};
    memory.heads =
        source_rows(heads, of.dtype, of.dim, SKL_ROW(of.q, s.batch, head, s.query_begin + memory.at.query), 0, count);
    memory.gathered =
        source_rows(of.k, of.dtype, of.dim, SKL_ROW(of.k, s.batch, key_head, s.key_begin), 0, s.key_count);
}

/* Teacher heads of the group from h on that are one product. */
__device__ inline int64_t teacher_run(const sparse_memory &memory, int64_t group, int64_t h)
{
    const int64_t sharing = memory.sides[TEACHER].heads_per_key, first = memory.at.head * group;
    const int64_t shared_end = ((first + h) / sharing + 1) * sharing - first;
    return skl_min(skl_min(group, shared_end) - h, TILE);
}

/* Dots of `count` teacher heads of the group from h on; lse_of(h) gives their LSEs. */
template <typename LSE>
__device__ inline void teacher_dots(sparse_memory &memory, int64_t group, int64_t h, int64_t count, LSE lse_of)
{
    const int64_t head = memory.at.head * group + h;
    __syncthreads(); /* nobody looks at the last product any more */
    set_product(memory, TEACHER, head, count, head / memory.sides[TEACHER].heads_per_key);
    if (threadIdx.x < count)
        memory.lse[threadIdx.x] = lse_of(h + threadIdx.x);
    __syncthreads();
    multiply_heads(memory, count);
}

/* Says the same of `count` index heads from g on, and brings their weights. */
__device__ inline void set_index_product(sparse_memory &memory, const skl_cuda_params &params, int64_t g,
                                         int64_t count)
{
    const sparse_row &at = memory.at;
    __syncthreads(); /* nobody looks at the last product any more */
    set_product(memory, STUDENT, at.head * params.problem.index_heads + g, count,
                at.head / memory.sides[STUDENT].heads_per_key);
    if (threadIdx.x < count)
        memory.weights[threadIdx.x] = index_weight(params, at.sequence, at.head, g + threadIdx.x, at.query);
    __syncthreads();
}

__device__ inline float teacher_logit(const tile_side &side, float dot)
{
    const float x = __fmul_rn(dot, side.scale);
    return side.softcap == 0.0F ? x : __fmul_rn(tanhf(x), side.softcap);
}

/* ---- Logits ------------------------------------------------------------------------------------------------- */

/* memory.x = log2 of the mean of the teacher heads' probabilities, for the keys at hand. */
template <typename LSE> __device__ inline void teacher_block(sparse_memory &memory, int64_t group, LSE lse_of)
{
    float x = -3e38F, sum = 0.0F; /* finite: the difference of two infinities is none */
#pragma unroll 1
    for (int64_t h = 0, count; h < group; h += count) {
        count = teacher_run(memory, group, h);
        teacher_dots(memory, group, h, count, lse_of);
#pragma unroll 1
        for (int row = part_of_thread(); row < count; row += PARTS) {
            const float dot = memory.dots[row * DOT_STRIDE + key_of_thread()];
            add_in_log_space(x, sum, log_probability(teacher_logit(memory.sides[TEACHER], dot), memory.lse[row]));
        }
    }
#pragma unroll
    for (int offset = 1; offset < PARTS; offset *= 2) {
        const float other_x = __shfl_xor_sync(~0U, x, offset), other_sum = __shfl_xor_sync(~0U, sum, offset);
        const float larger = fmaxf(x, other_x);
        sum = sum * ex2(x - larger) + other_sum * ex2(other_x - larger);
        x = larger;
    }
    if (part_of_thread() == 0)
        memory.x[key_of_thread()] = x + log2f(sum / (float)group);
}

/* memory.y = the indexer's logits in base 2; others may read both. */
__device__ inline void student_block(sparse_memory &memory, const skl_cuda_params &params)
{
    const int64_t heads = params.problem.index_heads;
    const bool linear = params.problem.index_linear != 0;
    float y = 0.0F;
#pragma unroll 1
    for (int64_t g = 0; g < heads; g += TILE) {
        const int64_t count = skl_min(heads - g, TILE);
        set_index_product(memory, params, g, count);
        multiply_heads(memory, count);
#pragma unroll 1
        for (int row = part_of_thread(); row < count; row += PARTS) {
            const float dot = memory.dots[row * DOT_STRIDE + key_of_thread()];
            y = index_active(linear, dot) ? fmaf(memory.weights[row], dot, y) : y;
        }
    }
#pragma unroll
    for (int offset = 1; offset < PARTS; offset *= 2)
        y += __shfl_xor_sync(~0U, y, offset);
    if (part_of_thread() == 0)
        memory.y[key_of_thread()] = __fmul_rn(y, memory.sides[STUDENT].scale);
    __syncthreads();
}

#endif
