/* Backward of an indexer, sparse. No atomics, so the bits are the same on every run: indexer_plan.h says how.
 *
 * A block a row: first the gradients dy of the logits of its list, then for each product of index heads, with 128
 * dimensions at a time,
 *
 *     s_g = sum_n dy_n [a_gn > 0] k_n        dq_g = w_g s_g        dw_g = <q_g, s_g>
 *     what entry n adds to dk = dy_n sum_g w_g [a_gn > 0] q_g
 *
 * which indexer_list_keys.cu collects behind every chunk of rows. 71 KB of shared memory. */
#include "cuda/common/indexer/sparse_chunks.cuh"
#include "cuda/general/indexer/sparse_product.cuh"

constexpr int SLICE = TILE; /* dimensions of a gradient that are summed up together */

/* ---- The gradient of the logits ----------------------------------------------------------------------------- */

static __device__ void sparse_gradients(float *dy, sparse_memory &memory, const indexer_backward_params &params)
{
    const skl_problem &p = params.problem;
    const skl_inputs &in = params.call.inputs;
    const sparse_row &at = memory.at;
    const skl_input kl_rows = skl_known_rows(params.rows_known, &in.kl, &params.call.rows.kl);
    const bool reverse = p.direction == SKL_KL_REVERSE;
    const int64_t group = skl_group_size(&p);
    const skl_lse2 lse_s = skl_lse2_of(skl_row_value(&in.lse_s, &at.sequence, at.head, at.query));
    const float kl = reverse ? skl_row_value(&kl_rows, &at.sequence, at.head, at.query) : 0.0F;
    const float grad = in.grad_kl.data != NULL ? skl_row_value(&in.grad_kl, &at.sequence, at.head, at.query) : 1.0F;
#pragma unroll 1
    for (int64_t first = 0; first < p.top_k; first += STEP) {
        if (!load_indices(memory, p.top_k, first))
            continue;
        teacher_block(memory, group, [&](int64_t h) {
            return skl_lse2_of(skl_row_value(&in.lse_t, &at.sequence, at.head * group + h, at.query));
        });
        student_block(memory, params);
        if (threadIdx.x >= STEP || memory.keys[threadIdx.x] < 0)
            continue;
        const float u = memory.x[threadIdx.x], v = log_probability(memory.y[threadIdx.x], lse_s);
        const float s = ex2(v);
        dy[first + threadIdx.x] = grad * p.scale_s * (reverse ? s * fmaf(SKL_LN2, v - u, -kl) : s - ex2(u));
    }
    __syncthreads();
}

/* memory.dots: from dots of the index heads to dy where they pass the ReLU. */
static __device__ void pass_sparse_gradients(sparse_memory &memory, const float *dy, int64_t count, bool linear)
{
    const int key = key_of_thread();
    const float gradient = memory.keys[key] >= 0 ? dy[key] : 0.0F;
#pragma unroll 1
    for (int row = part_of_thread(); row < count; row += PARTS) {
        float &dot = memory.dots[row * DOT_STRIDE + key];
        dot = index_active(linear, dot) ? gradient : 0.0F;
    }
    __syncthreads();
}

/* memory.dots times the weights. */
static __device__ void weigh_gradients(sparse_memory &memory, int64_t count)
{
    __syncthreads(); /* nobody reads them without */
#pragma unroll 1
    for (int row = part_of_thread(); row < count; row += PARTS)
        memory.dots[row * DOT_STRIDE + key_of_thread()] *= memory.weights[row];
    __syncthreads();
}

/* ---- Products with the gradient ----------------------------------------------------------------------------- */

/* Keys of entries [entry, entry + CHUNK) as steps, dimensions from c on as columns: a warp reads a key. */
static __device__ void load_key_steps(raw_quad (&to)[OWN_QUADS], const sparse_memory &memory, int entry, int c)
{
#pragma unroll
    for (int quad = 0; quad < OWN_QUADS; quad++)
        load_gathered(to[quad], memory, entry + (int)threadIdx.x / 32 + quad * THREADS / 32,
                      c + (int)threadIdx.x % 32 * QUAD);
}

/* sum += dots . keys, SLICE dimensions from c on. */
template <int R> static __device__ void add_keys(float (&sum)[R][8], sparse_memory &memory, int c)
{
    const skl_dtype dtype = memory.gathered.dtype;
    raw_quad rows[OWN_QUADS];
    load_key_steps(rows, memory, 0, c);
#pragma unroll 1
    for (int first = 0, chunk = 0; first < STEP; first += CHUNK, chunk ^= 1) {
        float *const streamed = memory.chunks.streamed[chunk];
        store_steps(streamed, rows, dtype);
        __syncthreads();
        if (first + CHUNK < STEP)
            load_key_steps(rows, memory, first + CHUNK, c);
#pragma unroll
        for (int step = 0; step < CHUNK; step++) {
            float b[8];
            read_fours(b, streamed + step_at(step) + (int)threadIdx.x % LANES * 4);
#pragma unroll
            for (int i = 0; i < R; i++) {
                const float a = memory.dots[head_of<R>(i) * DOT_STRIDE + first + step];
#pragma unroll
                for (int j = 0; j < 8; j++)
                    if (a != 0.0F) /* a key that is none may hold anything */
                        sum[i][j] = fmaf(a, b[j], sum[i][j]);
            }
        }
    }
}

/* parts[entry][dim] = sum of the weighed dots times the queries, over the heads of the product; added to what an
 * earlier product gave, if there was one. */
static __device__ void store_parts(float *parts, sparse_memory &memory, int64_t count, int c, bool add)
{
    const skl_dtype dtype = memory.heads.dtype;
    const int64_t dim = memory.heads.dim;
    fragment<KEY_COLUMNS> sum; /* own rows are dimensions */
    clear(sum);
    raw_quad rows[OWN_QUADS];
    load_steps(rows, memory.heads, 0, c);
#pragma unroll 1
    for (int first = 0, chunk = 0; first < count; first += CHUNK, chunk ^= 1) {
        float *const own = memory.chunks.own[chunk];
        store_steps(own, rows, dtype);
        __syncthreads();
        if (first + CHUNK < count)
            load_steps(rows, memory.heads, first + CHUNK, c);
#pragma unroll
        for (int step = 0; step < CHUNK; step++) {
            float a[ROWS], b[KEY_COLUMNS];
            read_fours(a, own + step_at(step) + (int)threadIdx.x / LANES * 4);
            read_fours(b, &memory.dots[(first + step) * DOT_STRIDE + acc_column(0)]);
#pragma unroll
            for (int j = 0; j < KEY_COLUMNS; j++)
#pragma unroll
                for (int i = 0; i < ROWS; i++)
                    sum.at[i][j] = fmaf(a[i], b[j], sum.at[i][j]);
        }
    }
#pragma unroll
    for (int j = 0; j < KEY_COLUMNS; j++)
#pragma unroll
        for (int i = 0; i < ROWS; i++) {
            const int entry = acc_column(j), d = c + row_of(i);
            if (memory.keys[entry] < 0 || d >= dim)
                continue;
            float &part = parts[entry * dim + d];
            part = add ? part + sum.at[i][j] : sum.at[i][j];
        }
}

/* <q_g, s_g> over the slice, and dq. */
template <int R>
static __device__ void finish_slice(float (&dots)[R], const float (&sum)[R][8], const sparse_memory &memory,
                                    const indexer_backward_params &params, int64_t g, int64_t count, int64_t c_first)
{
    const skl_problem &p = params.problem;
    const sparse_row &at = memory.at;
    const skl_input &q = params.call.inputs.q_s;
    const skl_output &dq = params.call.gradients.dq_s;
    const int64_t query = at.sequence.query_begin + at.query;
#pragma unroll
    for (int i = 0; i < R; i++) {
        const int64_t head = at.head * p.index_heads + g + head_of<R>(i);
        float dot = 0.0F;
#pragma unroll
        for (int j = 0; j < 8; j++) {
            const int64_t c = c_first + acc_column(j);
            if (head_of<R>(i) >= count || c >= p.dim_s)
                continue;
            /* A sum of 0 is that of a row that sees nothing, whose query and weights may hold anything. */
            const bool some = sum[i][j] != 0.0F;
            if (some)
                dot =
                    fmaf(skl_load(q.data, p.dtype_s, SKL_ROW(q, at.sequence.batch, head, query) + c), sum[i][j], dot);
            if (dq.data != NULL)
                skl_store(dq.data, skl_grad_dtype(&p, p.dtype_s), SKL_ROW(dq, at.sequence.batch, head, query) + c,
                          some ? memory.weights[head_of<R>(i)] * sum[i][j] : 0.0F);
        }
        dots[i] += row_sum(dot);
    }
}

/* dq, dw and parts of dk of up to 16 R index heads from g on. */
template <int R>
static __device__ void sparse_heads(sparse_memory &memory, const indexer_backward_params &params, int64_t g,
                                    int64_t count, const float *dy, float *parts)
{
    const skl_problem &p = params.problem;
    const skl_output &dw = params.call.gradients.dw_s;
    float dots[R] = {};
#pragma unroll 1
    for (int c = 0; c < p.dim_s; c += SLICE) {
        float sum[R][8] = {};
#pragma unroll 1
        for (int64_t first = 0; first < p.top_k; first += STEP) {
            if (!load_indices(memory, p.top_k, first))
                continue;
            set_index_product(memory, params, g, count);
            multiply_heads<R>(memory);
            pass_sparse_gradients(memory, dy + first, count, p.index_linear != 0);
            add_keys<R>(sum, memory, c);
            if (parts == NULL)
                continue;
            weigh_gradients(memory, count);
            store_parts(parts + first * p.dim_s, memory, count, c, g > 0);
        }
        finish_slice<R>(dots, sum, memory, params, g, count, c);
    }
    const sparse_row &at = memory.at;
#pragma unroll
    for (int i = 0; i < R; i++)
        if (dw.data != NULL && first_lane() && head_of<R>(i) < count)
            skl_store(dw.data, skl_grad_dtype(&p, p.dtype_w),
                      SKL_ROW(dw, at.sequence.batch, at.head, at.sequence.query_begin + at.query) + g + head_of<R>(i),
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
        if (!memory.at.exists)
            continue;
        float *const dy = (float *)(void *)(workspace + chunk.dy) + n * p.top_k;
        sparse_gradients(dy, memory, params);
        float *const parts = keys ? (float *)(void *)(workspace + chunk.parts) + n * p.top_k * p.dim_s : NULL;
#pragma unroll 1
        for (int64_t g = 0; g < p.index_heads; g += TILE) {
            const int64_t heads = skl_min(p.index_heads - g, TILE);
            if (heads > 64)
                sparse_heads<8>(memory, params, g, heads, dy, parts);
            else if (heads > 32)
                sparse_heads<4>(memory, params, g, heads, dy, parts);
            else if (heads > 16)
                sparse_heads<2>(memory, params, g, heads, dy, parts);
            else
                sparse_heads<1>(memory, params, g, heads, dy, parts);
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
