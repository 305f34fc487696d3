/* General backward of a sparse indexer: dq, dw, and the contribution of each list entry to dk. No atomics, so the
 * bits are the same on every run; row_chunks.h explains how.
 *
 *     s_g = sum_n dy_n [a_gn > 0] k_n        dq_g = w_g s_g        dw_g = <q_g, s_g>
 *     entry_dk_n = dy_n sum_g w_g [a_gn > 0] q_g
 *
 *   block   one row at a time, grid stride over the rows of a chunk; 1 resident per SM
 *   shared  71 KB: sparse_memory
 *
 *   per row:  for each 64 entries:  x, y -> dy, the gradient of the logits
 *             for up to 128 index heads and 128 dimensions:
 *                 for each 64 entries:  a = <q_g, k_n> again -> s_g, entry_dk
 *                 dq, and the slice's share of dw
 *
 * After each chunk of rows, sparse_dk.cu adds entry_dk to dk. */
#include "cuda/common/indexer/sparse_chunks.cuh"
#include "cuda/general/indexer/sparse_product.cuh"

namespace sparse_rows
{

constexpr int SLICE = TILE; /* dimensions of a gradient that are computed together */

/* ---- The gradient of the logits ----------------------------------------------------------------------------- */

/* dy of all entries of the row's list that are visible keys. */
static __device__ void sparse_gradients(float *dy, sparse_memory &memory, const indexer_backward_params &params)
{
    const skl_problem &p = params.problem;
    const skl_inputs &in = params.call.inputs;
    const sparse_row &row = memory.row;
    const skl_input kl_rows = skl_known_rows(params.rows_known, &in.kl, &params.call.rows.kl);
    const bool reverse = p.direction == SKL_KL_REVERSE;
    const int64_t group = skl_group_size(&p);
    const skl_lse2 lse_s = skl_lse2_of(skl_row_value(&in.lse_s, &row.sequence, row.head, row.query));
    const float kl = reverse ? skl_row_value(&kl_rows, &row.sequence, row.head, row.query) : 0.0F;
    const float grad =
        in.grad_kl.data != NULL ? skl_row_value(&in.grad_kl, &row.sequence, row.head, row.query) : 1.0F;
#pragma unroll 1
    for (int64_t first = 0; first < p.top_k; first += KEY_TILE) {
        if (!load_indices(memory, p.top_k, first))
            continue;
        row_logits(memory, params, true, [&](int64_t h) {
            return skl_lse2_of(skl_row_value(&in.lse_t, &row.sequence, row.head * group + h, row.query));
        });
        if (threadIdx.x >= KEY_TILE || memory.keys[threadIdx.x] < 0)
            continue;
        const float log_p = memory.x[threadIdx.x], log_s = log_probability(memory.y[threadIdx.x], lse_s);
        const float s = ex2(log_s);
        dy[first + threadIdx.x] =
            grad * p.scale_s * (reverse ? s * fmaf(SKL_LN2, log_s - log_p, -kl) : s - ex2(log_p));
    }
    __syncthreads();
}

/* Replaces the dot products in memory.dots by dy where they are active, otherwise by 0. */
static __device__ void select_active(sparse_memory &memory, const float *dy, int64_t count, bool linear)
{
    const int key = key_of_thread();
    const float gradient = memory.keys[key] >= 0 ? dy[key] : 0.0F;
#pragma unroll 1
    for (int head = lane_of_key(); head < count; head += THREADS_PER_KEY) {
        float &dot = memory.dots[head * DOT_STRIDE + key];
        dot = index_active(linear, dot) ? gradient : 0.0F;
    }
    __syncthreads();
}

/* Multiplies memory.dots by the weights of the heads. */
static __device__ void multiply_weights(sparse_memory &memory, int64_t count)
{
    __syncthreads(); /* no thread reads the unweighted values any more */
#pragma unroll 1
    for (int head = lane_of_key(); head < count; head += THREADS_PER_KEY)
        memory.dots[head * DOT_STRIDE + key_of_thread()] *= memory.weights[head];
    __syncthreads();
}

/* ---- Products with the gradient ----------------------------------------------------------------------------- */

/* Steps are the keys of entries [entry, entry + STAGE_STEPS), columns are dimensions from c: a warp reads a key. */
static __device__ void load_key_steps(raw_quad (&to)[TILE_QUADS], const sparse_memory &memory, int entry, int c)
{
#pragma unroll
    for (int quad = 0; quad < TILE_QUADS; quad++)
        load_gathered(to[quad], memory, entry + (int)(threadIdx.x / 32) + quad * THREADS / 32,
                      c + (int)(threadIdx.x % 32) * QUAD);
}

/* sum += dots . keys, SLICE dimensions from c. */
template <int R> static __device__ void add_keys(float (&sum)[R][8], sparse_memory &memory, int c)
{
    const skl_dtype dtype = memory.gathered.dtype;
    raw_quad rows[TILE_QUADS];
    load_key_steps(rows, memory, 0, c);
#pragma unroll 1
    for (int first = 0, stage = 0; first < KEY_TILE; first += STAGE_STEPS, stage ^= 1) {
        float *const streamed = memory.stages.streamed[stage];
        store_steps(streamed, rows, dtype);
        __syncthreads();
        if (first + STAGE_STEPS < KEY_TILE)
            load_key_steps(rows, memory, first + STAGE_STEPS, c);
        for_each_step([&](int first_step, int step) {
            float b[8];
            read_fours(b, streamed + step_offset(first_step, step) + (int)(threadIdx.x % LANES) * 4);
#pragma unroll
            for (int i = 0; i < R; i++) {
                const float a = memory.dots[head_of<R>(i) * DOT_STRIDE + first + first_step + step];
#pragma unroll
                for (int j = 0; j < 8; j++)
                    if (a != 0.0F) /* the key of an inactive or masked pair may not be finite */
                        sum[i][j] = fmaf(a, b[j], sum[i][j]);
            }
        });
    }
}

/* entry_dk[entry][dim] = sum over the heads of the product of weighted dots times queries. `add`: adds to the result
 * of an earlier product. */
static __device__ void store_entry_dk(float *entry_dk, sparse_memory &memory, int64_t count, int c, bool add)
{
    const skl_dtype dtype = memory.heads.dtype;
    const int64_t dim = memory.heads.dim;
    fragment<KEY_COLUMNS> sum; /* rows are dimensions, columns are entries */
    clear(sum);
    raw_quad rows[TILE_QUADS];
    load_steps(rows, memory.heads, 0, c);
#pragma unroll 1
    for (int first = 0, stage = 0; first < count; first += STAGE_STEPS, stage ^= 1) {
        float *const stationary = memory.stages.stationary[stage];
        store_steps(stationary, rows, dtype);
        __syncthreads();
        if (first + STAGE_STEPS < count)
            load_steps(rows, memory.heads, first + STAGE_STEPS, c);
        for_each_step([&](int first_step, int step) {
            float a[ROWS], b[KEY_COLUMNS];
            read_fours(a, stationary + step_offset(first_step, step) + (int)(threadIdx.x / LANES) * 4);
            read_fours(b, &memory.dots[(first + first_step + step) * DOT_STRIDE + acc_column(0)]);
#pragma unroll
            for (int j = 0; j < KEY_COLUMNS; j++)
#pragma unroll
                for (int i = 0; i < ROWS; i++)
                    sum.at[i][j] = fmaf(a[i], b[j], sum.at[i][j]);
        });
    }
#pragma unroll 1
    for (int i = 0; i < ROWS; i++, rotate_rows(sum))
#pragma unroll
        for (int j = 0; j < KEY_COLUMNS; j++) {
            const int entry = acc_column(j), d = c + acc_row(i);
            if (memory.keys[entry] < 0 || d >= dim)
                continue;
            float &to = entry_dk[entry * dim + d];
            to = add ? to + sum.at[0][j] : sum.at[0][j];
        }
}

/* As rotate_rows: the first head becomes the last. */
template <int R> static __device__ void rotate_heads(float (&dots)[R], float (&sum)[R][8])
{
    const float first = dots[0];
#pragma unroll
    for (int i = 1; i < R; i++)
        dots[i - 1] = dots[i];
    dots[R - 1] = first;
#pragma unroll
    for (int j = 0; j < 8; j++) {
        const float top = sum[0][j];
#pragma unroll
        for (int i = 1; i < R; i++)
            sum[i - 1][j] = sum[i][j];
        sum[R - 1][j] = top;
    }
}

/* Adds <q_g, s_g> over a slice to `dots`, and stores dq of the slice. */
template <int R>
static __device__ void finish_slice(float (&dots)[R], float (&sum)[R][8], const sparse_memory &memory,
                                    const indexer_backward_params &params, int64_t g, int64_t count, int64_t c_first)
{
    const skl_problem &p = params.problem;
    const sparse_row &row = memory.row;
    const skl_input &q = params.call.inputs.q_s;
    const skl_output &dq = params.call.gradients.dq_s;
    const int64_t query = row.sequence.query_begin + row.query;
#pragma unroll 1
    for (int i = 0; i < R; i++, rotate_heads(dots, sum)) {
        const int64_t head = row.head * p.index_heads + g + head_of<R>(i);
        float dot = 0.0F;
#pragma unroll
        for (int j = 0; j < 8; j++) {
            const int64_t c = c_first + acc_column(j);
            if (head_of<R>(i) >= count || c >= p.dim_s)
                continue;
            /* Without visible keys the sum is 0, and query and weights, which may not be finite, are not used. */
            const bool nonzero = sum[0][j] != 0.0F;
            if (nonzero)
                dot = fmaf(skl_load(q.data, p.dtype_s, SKL_ROW(q, row.sequence.batch, head, query) + c), sum[0][j],
                           dot);
            if (dq.data != NULL)
                skl_store(dq.data, skl_grad_dtype(&p, p.dtype_s), SKL_ROW(dq, row.sequence.batch, head, query) + c,
                          nonzero ? memory.weights[head_of<R>(i)] * sum[0][j] : 0.0F);
        }
        dots[0] += row_sum(dot);
    }
}

/* dq, dw and entry_dk (unless NULL) of up to 16 R index heads from g. */
template <int R>
static __device__ void sparse_heads(sparse_memory &memory, const indexer_backward_params &params, int64_t g,
                                    int64_t count, const float *dy, float *entry_dk)
{
    const skl_problem &p = params.problem;
    const skl_output &dw = params.call.gradients.dw_s;
    float dots[R] = {};
#pragma unroll 1
    for (int c = 0; c < p.dim_s; c += SLICE) {
        float sum[R][8] = {};
#pragma unroll 1
        for (int64_t first = 0; first < p.top_k; first += KEY_TILE) {
            if (!load_indices(memory, p.top_k, first))
                continue;
            set_index_product(memory, params, g, count);
            multiply_heads<R>(memory);
            select_active(memory, dy + first, count, p.index_linear != 0);
            add_keys<R>(sum, memory, c);
            if (entry_dk == NULL)
                continue;
            multiply_weights(memory, count);
            store_entry_dk(entry_dk + first * p.dim_s, memory, count, c, g > 0);
        }
        finish_slice<R>(dots, sum, memory, params, g, count, c);
    }
    const sparse_row &row = memory.row;
#pragma unroll
    for (int i = 0; i < R; i++)
        if (dw.data != NULL && first_lane() && head_of<R>(i) < count)
            skl_store(dw.data, skl_grad_dtype(&p, p.dtype_w),
                      SKL_ROW(dw, row.sequence.batch, row.head, row.sequence.query_begin + row.query) + g +
                          head_of<R>(i),
                      dots[i]);
}

static __global__ void __launch_bounds__(THREADS, 1)
    sparse_backward(const __grid_constant__ indexer_backward_params params, skl_sparse_chunk chunk, int64_t first,
                    int64_t count)
{
    extern __shared__ __align__(16) unsigned char raw[];
    sparse_memory &memory = *(sparse_memory *)(void *)raw;
    const skl_problem &p = params.problem;
    char *const workspace = (char *)params.call.workspace;
    const bool keys = params.call.gradients.dk_s.data != NULL;
#pragma unroll 1
    for (int64_t n = blockIdx.x; n < count; n += gridDim.x) {
        begin_row(memory, params, first + n);
        if (!memory.row.exists)
            continue;
        float *const dy = (float *)(void *)(workspace + chunk.dy) + n * p.top_k;
        sparse_gradients(dy, memory, params);
        float *const entry_dk = keys ? (float *)(void *)(workspace + chunk.entry_dk) + n * p.top_k * p.dim_s : NULL;
#pragma unroll 1
        for (int64_t g = 0; g < p.index_heads; g += TILE) {
            const int64_t heads = skl_min(p.index_heads - g, TILE);
            if (heads > 64)
                sparse_heads<8>(memory, params, g, heads, dy, entry_dk);
            else if (heads > 32)
                sparse_heads<4>(memory, params, g, heads, dy, entry_dk);
            else if (heads > 16)
                sparse_heads<2>(memory, params, g, heads, dy, entry_dk);
            else
                sparse_heads<1>(memory, params, g, heads, dy, entry_dk);
        }
    }
}

/* ---- Launcher ----------------------------------------------------------------------------------------------- */

extern "C" cudaError_t skl_cuda_general_sparse_gradients(const skl_cuda_params *params, const skl_cuda_launch *launch)
{
    const cudaError_t error = cudaFuncSetAttribute(sparse_backward, cudaFuncAttributeMaxDynamicSharedMemorySize,
                                                   (int)sizeof(sparse_memory));
    if (error != cudaSuccess)
        return error;
    const indexer_backward_params own = {*params, launch->rows_known};
    record_launch("cuda_general", SKL_VARIANT_GRADIENTS, 1);
    return launch_sparse_chunks(params, launch, [&](skl_range rows) {
        sparse_backward<<<(unsigned)launch->sm_count * SKL_GENERAL_BLOCKS_PER_SM, THREADS, sizeof(sparse_memory),
                          params->call.stream>>>(own, launch->sparse.chunk, rows.begin, rows.end - rows.begin);
        return cudaPeekAtLastError();
    });
}

} // namespace sparse_rows
