/* General backward of a dense indexer: dq, dw and dk, with f32 FFMAs. No atomics, so the bits are the same on every
 * run.
 *
 *     s_g = sum_j dy_j [a_gj > 0] k_j        dq_g = w_g s_g        dw_g = <q_g, s_g>
 *     dk_j = sum_i dy_ij sum_g w_ig [a_igj > 0] q_ig
 *
 * dy, the gradient of the logits, is the same for all index heads, and the teacher is most of its work. So dy is
 * computed once and goes through the workspace, one chunk of query tiles at a time (row_chunks.h):
 *
 *                    kernel            computes       work item
 *   for each chunk   chunk_gradients   dy             one tile of 128 queries x 64 keys
 *                    chunk_queries     dq, dw         one index head of a query tile
 *                    chunk_keys        sums of dk     one key tile, 128 dimensions, one split of the index heads
 *   at the end       add_dk_splits     dk             one key tile: adds the splits
 *
 *   block   128 stationary x 64 streamed rows per tile, 8 x 4 pairs and 8 x 8 sums of the gradient per thread;
 *           1 resident per SM, grid stride over the work items
 *   shared  72 KB: two stages of both operands, the logit gradients of a tile, row stats of its queries */
#include "cuda/general/gradient_product.cuh"
#include "cuda/general/row_state.cuh"
#include "cuda/general/indexer/dense_tile.cuh"

static_assert(STREAMED_ROWS == SKL_INDEX_STEP, "a key step of the workspace is one tile");

struct row_stats {
    skl_lse2 lse_s;
    float factor; /* upstream gradient times scale */
    float kl;     /* of the reverse KL, otherwise 0 */
};

/* Work item of dk: the contribution of a split, some of the index heads, to SLICE dimensions of a key tile. */
struct key_item {
    int64_t flat_key_head; /* counted over all sequences */
    int64_t key_first;
    int64_t head_begin, head_end; /* index heads of the split */
    int64_t c_first;
    float *sums; /* of the split, for all keys */
};

struct index_backward_memory {
    pipeline_memory pipe;
    __align__(16) gradient_tile gradient;
    row_stats stats[TILE];
    skl_lse2 lse_t[TILE];
    float weights[TILE];
    key_span spans[TILE];
    row_source streamed; /* rows that the logit gradients are multiplied with */
    work_item work;
    skl_range dy_keys; /* dk: keys of the current query tile that have a dy */
    key_item item;
};

/* ---- The gradient of the logits ------------------------------------------------------------------------------ */

/* Loads the row stats of the queries of a tile. Other threads may read them after the next barrier. */
static __device__ void load_row_stats(index_backward_memory &memory, const indexer_backward_params &params,
                                      const tile_position &tile)
{
    const skl_inputs &in = params.call.inputs;
    const skl_input kl = skl_known_rows(params.rows_known, &in.kl, &params.call.rows.kl);
    const skl_sequence &s = tile.work.sequence;
    const int64_t query = tile.query_first + threadIdx.x;
    if (threadIdx.x >= TILE || query >= tile.work.queries.end)
        return;
    const float grad = in.grad_kl.data != NULL ? skl_row_value(&in.grad_kl, &s, tile.work.head, query) : 1.0F;
    row_stats stats;
    stats.lse_s = skl_lse2_of(skl_row_value(&in.lse_s, &s, tile.work.head, query));
    stats.factor = grad * params.problem.scale_s;
    stats.kl = params.problem.direction == SKL_KL_REVERSE ? skl_row_value(&kl, &s, tile.work.head, query) : 0.0F;
    memory.stats[threadIdx.x] = stats;
}

/* g = dy of a tile, exactly 0 for masked pairs. The pipeline must have begun with the first teacher head; after the
 * last index head it continues with the operands that next() returns. */
template <typename OPERANDS>
static __device__ void index_gradients(fragment<COLUMNS> &g, pipeline<COLUMNS> &pipe, index_backward_memory &memory,
                                       const indexer_backward_params &params, const tile_position &tile,
                                       OPERANDS next)
{
    const skl_problem &p = params.problem;
    const int64_t group = skl_group_size(&p);
    const bool reverse = p.direction == SKL_KL_REVERSE;
    fragment<COLUMNS> y;
    teacher_mean(
        g, pipe, tile, group, memory.lse_t,
        [&](int64_t h) {
            return skl_lse2_of(skl_row_value(&params.call.inputs.lse_t, &tile.work.sequence,
                                             tile.work.head * group + h, tile.query_first + threadIdx.x));
        },
        [&] { return index_operands<false>(tile, p.index_heads, 0); });
    index_logits(y, pipe, params, tile, memory.weights, next);
    find_spans(memory.spans, p, tile);
#pragma unroll
    for (int i = 0; i < ROWS; i++) {
        const row_stats stats = memory.stats[acc_row(i)];
        const key_span span = memory.spans[acc_row(i)];
#pragma unroll
        for (int j = 0; j < COLUMNS; j++) {
            const float log_p = g.at[i][j];
            const float log_s = log_probability(y.at[i][j], stats.lse_s);
            const float s = ex2(log_s);
            const float dy = reverse ? s * fmaf(SKL_LN2, log_s - log_p, -stats.kl) : s - ex2(log_p);
            g.at[i][j] = sees(span, acc_column(j)) ? stats.factor * dy : 0.0F;
        }
    }
}

static __global__ void __launch_bounds__(THREADS, 1)
    chunk_gradients(const __grid_constant__ indexer_backward_params params, skl_dense_chunk chunk, int64_t first,
                    int64_t count)
{
    extern __shared__ __align__(16) unsigned char raw[];
    index_backward_memory &memory = *(index_backward_memory *)(void *)raw;
#pragma unroll 1
    for (int64_t n = blockIdx.x; n < count * chunk.key_steps; n += gridDim.x) {
        __syncthreads(); /* no thread reads the previous work item any more */
        if (threadIdx.x == 0)
            memory.work = query_item(params, first + n / chunk.key_steps);
        __syncthreads();
        const int64_t step = n % chunk.key_steps * STREAMED_ROWS;
        const tile_position tile = {memory.work, memory.work.queries.begin, memory.work.keys.begin + step};
        if (tile.query_first >= tile.work.queries.end || tile.key_first >= tile.work.keys.end)
            continue;
        const auto first_head = [&] {
            return operands_of<false>(tile, TEACHER, tile.work.head * skl_group_size(&params.problem));
        };
        pipeline<COLUMNS> pipe(memory.pipe);
        fragment<COLUMNS> g;
        load_row_stats(memory, params, tile);
        pipe.begin(first_head);
        index_gradients(g, pipe, memory, params, tile, first_head); /* loaded but unused: no tile follows */
        float *const to = (float *)params.call.workspace + n / chunk.key_steps * chunk.tile_size + step * TILE;
#pragma unroll
        for (int j = 0; j < COLUMNS; j++)
#pragma unroll
            for (int i = 0; i < ROWS; i += 4)
                *(float4 *)&to[acc_column(j) * TILE + acc_row(i)] =
                    make_float4(g.at[i][j], g.at[i + 1][j], g.at[i + 2][j], g.at[i + 3][j]);
    }
}

/* ---- dq and dw ----------------------------------------------------------------------------------------------- */

/* z = dy where the dot product z is active, otherwise 0. `dy` is that of the tile in the workspace. */
static __device__ void select_active(fragment<COLUMNS> &z, const float *dy, bool linear)
{
#pragma unroll
    for (int j = 0; j < COLUMNS; j++)
#pragma unroll
        for (int i = 0; i < ROWS; i += 4) {
            const float4 four = *(const float4 *)&dy[acc_column(j) * TILE + acc_row(i)];
            const float values[4] = {four.x, four.y, four.z, four.w};
#pragma unroll
            for (int e = 0; e < 4; e++)
                z.at[i + e][j] = index_active(linear, z.at[i + e][j]) ? values[e] : 0.0F;
        }
}

/* SLICE dimensions of s_g from c_first. Loads the weights of head g into memory.weights. */
static __device__ void sum_slice(fragment<8> &sum, pipeline<COLUMNS> &pipe, index_backward_memory &memory,
                                 const indexer_backward_params &params, tile_position tile, int64_t g,
                                 const float *dy, int c_first)
{
    const skl_problem &p = params.problem;
    clear(sum);
    pipe.begin([&] { return index_operands<false>(tile, p.index_heads, g); });
#pragma unroll 1
    for (; tile.key_first < tile.work.keys.end; tile.key_first += STREAMED_ROWS, dy += STREAMED_ROWS * TILE) {
        if (threadIdx.x == 0)
            memory.streamed = index_operands<false>(tile, p.index_heads, g).streamed;
        fragment<COLUMNS> z;
        index_dots(z, pipe, params, tile, g, memory.weights,
                   [&] { return index_operands<false>(next_key_tile<COLUMNS>(tile), p.index_heads, g); });
        raw_quad rows[TILE_QUADS];
        load_steps(rows, memory.streamed, 0, c_first);
        select_active(z, dy, p.index_linear != 0);
        store_gradients(memory.gradient, z);
        multiply_gradient<true>(sum, pipe, memory, rows, p.dtype_s, c_first);
    }
}

/* Adds <q_g, s_g> over a slice, for each row of the thread. */
static __device__ void add_dots(float (&dots)[ROWS], const fragment<8> &sum, const indexer_backward_params &params,
                                const tile_position &tile, int64_t q_head, int64_t c_first)
{
    const skl_input &q = params.call.inputs.q_s;
    const skl_sequence &s = tile.work.sequence;
#pragma unroll
    for (int i = 0; i < ROWS; i++) {
        const int64_t query = tile.query_first + acc_row(i);
        const int64_t row = SKL_ROW(q, s.batch, q_head, s.query_begin + query);
        float dot = 0.0F;
#pragma unroll
        for (int j = 0; j < 8; j++) {
            const int64_t c = c_first + acc_column(j);
            /* A row without visible keys has a sum of 0. Its query may not be finite, so it is not read. */
            if (query < tile.work.queries.end && c < params.problem.dim_s && sum.at[i][j] != 0.0F)
                dot = fmaf(skl_load(q.data, params.problem.dtype_s, row + c), sum.at[i][j], dot);
        }
        dots[i] += row_sum(dot);
    }
}

static __device__ void store_dq(fragment<8> &sum, const index_backward_memory &memory,
                                const indexer_backward_params &params, const tile_position &tile, int64_t q_head,
                                int64_t c_first)
{
    const skl_problem &p = params.problem;
    const skl_output &dq = params.call.gradients.dq_s;
    const skl_sequence &s = tile.work.sequence;
#pragma unroll
    for (int i = 0; i < ROWS; i++) {
        const float w = memory.weights[acc_row(i)];
#pragma unroll
        for (int j = 0; j < 8; j++)
            sum.at[i][j] = sum.at[i][j] != 0.0F ? w * sum.at[i][j] : 0.0F; /* a masked row's w may not be finite */
    }
    store_sums(sum, dq, skl_grad_dtype(&p, p.dtype_s), SKL_ROW(dq, s.batch, q_head, s.query_begin), tile.query_first,
               tile.work.queries.end, c_first, p.dim_s);
}

static __device__ void head_gradients(const indexer_backward_params &params, index_backward_memory &memory, int64_t g,
                                      const float *dy)
{
    const skl_problem &p = params.problem;
    const skl_output &dw = params.call.gradients.dw_s;
    const tile_position tile = {memory.work, memory.work.queries.begin, memory.work.keys.begin};
    const int64_t q_head = tile.work.head * p.index_heads + g;
    pipeline<COLUMNS> pipe(memory.pipe);
    float dots[ROWS] = {};
#pragma unroll 1
    for (int c_first = 0; c_first < p.dim_s; c_first += SLICE) {
        fragment<8> sum;
        sum_slice(sum, pipe, memory, params, tile, g, dy, c_first);
        if (dw.data != NULL)
            add_dots(dots, sum, params, tile, q_head, c_first);
        if (params.call.gradients.dq_s.data != NULL)
            store_dq(sum, memory, params, tile, q_head, c_first);
    }
    const skl_sequence &s = tile.work.sequence;
#pragma unroll
    for (int i = 0; i < ROWS; i++) {
        const int64_t query = tile.query_first + acc_row(i);
        if (dw.data != NULL && first_lane() && query < tile.work.queries.end)
            skl_store(dw.data, skl_grad_dtype(&p, p.dtype_w),
                      SKL_ROW(dw, s.batch, tile.work.head, s.query_begin + query) + g, dots[i]);
    }
}

static __global__ void __launch_bounds__(THREADS, 1)
    chunk_queries(const __grid_constant__ indexer_backward_params params, skl_dense_chunk chunk, int64_t first,
                  int64_t count)
{
    extern __shared__ __align__(16) unsigned char raw[];
    index_backward_memory &memory = *(index_backward_memory *)(void *)raw;
    const int64_t heads = params.problem.index_heads;
#pragma unroll 1
    for (int64_t n = blockIdx.x; n < count * heads; n += gridDim.x) {
        __syncthreads(); /* no thread reads the previous work item any more */
        if (threadIdx.x == 0)
            memory.work = query_item(params, first + n / heads);
        __syncthreads();
        if (memory.work.queries.begin < memory.work.queries.end)
            head_gradients(params, memory, n % heads,
                           (const float *)params.call.workspace + n / heads * chunk.tile_size);
    }
}

/* ---- dk ------------------------------------------------------------------------------------------------------ */

static __device__ key_item key_item_at(const indexer_backward_params &params, const skl_dense_chunk &chunk, int64_t n)
{
    const skl_problem &p = params.problem;
    const int64_t slices = skl_ceil_div(p.dim_s, SLICE), tiles = skl_ceil_div(p.len_k, TILE);
    const int64_t split = n / slices % chunk.num_dk_splits, tile = n / slices / chunk.num_dk_splits;
    const key_item item = {tile / tiles,
                           tile % tiles * TILE,
                           split * p.index_heads / chunk.num_dk_splits,
                           (split + 1) * p.index_heads / chunk.num_dk_splits,
                           n % slices * SLICE,
                           (float *)(void *)((char *)params.call.workspace + chunk.sums) +
                               split * chunk.dk_split_size};
    return item;
}

/* Sums have the layout of contiguous keys. */
static __device__ skl_output sums_layout(const skl_problem &p, float *sums)
{
    const int64_t head_size = (p.packed ? p.total_k : p.len_k) * p.dim_s;
    const skl_output layout = {sums, p.key_heads_s * head_size, head_size, p.dim_s};
    return layout;
}

/* dy of TILE keys x STREAMED_ROWS queries. The workspace has the keys dy_keys of this query tile; others get 0. */
static __device__ void load_gradients(fragment<COLUMNS> &g, const float *dy, const skl_range &dy_keys,
                                      int64_t key_first, int query_first)
{
#pragma unroll
    for (int i = 0; i < ROWS; i++) {
        const int64_t key = key_first + acc_row(i);
        float4 four = make_float4(0.0F, 0.0F, 0.0F, 0.0F);
        if (key >= dy_keys.begin && key < dy_keys.end)
            four = *(const float4 *)&dy[(key - dy_keys.begin) * TILE + query_first + acc_column(0)];
        g.at[i][0] = four.x;
        g.at[i][1] = four.y;
        g.at[i][2] = four.z;
        g.at[i][3] = four.w;
    }
}

/* Adds the contribution of STREAMED_ROWS queries, for the index heads of the split. */
static __device__ void add_queries(fragment<8> &sum, pipeline<COLUMNS> &pipe, index_backward_memory &memory,
                                   const indexer_backward_params &params, const tile_position &tile,
                                   const fragment<COLUMNS> &dy)
{
    const skl_problem &p = params.problem;
    const key_item &item = memory.item;
    pipe.begin([&] { return index_operands<true>(tile, p.index_heads, item.head_begin); });
#pragma unroll 1
    for (int64_t g = item.head_begin; g < item.head_end; g++) {
        if (threadIdx.x == 0)
            memory.streamed = index_operands<true>(tile, p.index_heads, g).streamed;
        fragment<COLUMNS> z;
        index_dots(z, pipe, params, tile, g, memory.weights, [&] {
            return index_operands<true>(tile, p.index_heads, g + 1 < item.head_end ? g + 1 : g); /* last: unused */
        });
        raw_quad rows[TILE_QUADS];
        load_steps(rows, memory.streamed, 0, (int)item.c_first);
#pragma unroll
        for (int j = 0; j < COLUMNS; j++) {
            const float w = memory.weights[acc_column(j)];
#pragma unroll
            for (int i = 0; i < ROWS; i++) {
                const bool active = index_active(p.index_linear != 0, z.at[i][j]) && dy.at[i][j] != 0.0F;
                z.at[i][j] = active ? dy.at[i][j] * w : 0.0F;
            }
        }
        store_gradients(memory.gradient, z);
        multiply_gradient<true>(sum, pipe, memory, rows, p.dtype_s, (int)item.c_first);
    }
}

/* Adds the contribution of a query tile of the chunk. */
static __device__ void add_query_tile(fragment<8> &sum, pipeline<COLUMNS> &pipe, index_backward_memory &memory,
                                      const indexer_backward_params &params, int64_t index, const float *dy)
{
    const key_item &item = memory.item;
    __syncthreads(); /* no thread reads the previous tile any more */
    if (threadIdx.x == 0) {
        memory.work = query_item(params, index);
        memory.dy_keys = memory.work.keys;
        memory.work.keys.begin = item.key_first;
        memory.work.keys.end = memory.work.sequence.key_count;
    }
    __syncthreads();
    tile_position tile = {memory.work, memory.work.queries.begin, item.key_first};
    const int64_t end = skl_min(tile.query_first + TILE, tile.work.queries.end);
    if (item.key_first + TILE <= memory.dy_keys.begin || item.key_first >= memory.dy_keys.end)
        return;
#pragma unroll 1
    for (int query = 0; tile.query_first < end; query += STREAMED_ROWS, tile.query_first += STREAMED_ROWS) {
        fragment<COLUMNS> g;
        load_gradients(g, dy, memory.dy_keys, item.key_first, query);
        add_queries(sum, pipe, memory, params, tile, g);
    }
}

/* Adds the query tiles [first, first + count) of a chunk to the sums of a work item. `tiles` are all query tiles of
 * the key head. Sums start at 0 with the first chunk that has any, and stay in the workspace between chunks. */
static __device__ void sum_keys(const indexer_backward_params &params, index_backward_memory &memory,
                                const skl_dense_chunk &chunk, skl_range tiles, int64_t first, int64_t count)
{
    const skl_problem &p = params.problem;
    const key_item &item = memory.item;
    const skl_sequence s = device_sequence(params, item.flat_key_head / p.key_heads_s);
    const skl_output sums = sums_layout(p, item.sums);
    const int64_t base = SKL_ROW(sums, s.batch, item.flat_key_head % p.key_heads_s, s.key_begin);
    pipeline<COLUMNS> pipe(memory.pipe);
    fragment<8> sum;
    clear(sum);
#pragma unroll
    for (int i = 0; i < ROWS; i++)
#pragma unroll
        for (int j = 0; j < 8; j++) {
            const int64_t key = item.key_first + acc_row(i), c = item.c_first + acc_column(j);
            if (tiles.begin < first && key < key_rows(p, s) && c < p.dim_s)
                sum.at[i][j] = item.sums[base + key * sums.stride_row + c];
        }
#pragma unroll 1
    for (int64_t tile = skl_max(tiles.begin, first); tile < skl_min(tiles.end, first + count); tile++)
        add_query_tile(sum, pipe, memory, params, tile,
                       (const float *)params.call.workspace + (tile - first) * chunk.tile_size);
    store_sums(sum, sums, SKL_F32, base, item.key_first, key_rows(p, s), item.c_first, p.dim_s);
}

/* Query tiles of the heads that share a key head. */
static __device__ skl_range tiles_of(const skl_problem &p, int64_t flat_key_head)
{
    const int64_t tiles = p.heads_s / p.key_heads_s * skl_ceil_div(p.len_q, TILE);
    const skl_range range = {flat_key_head * tiles, (flat_key_head + 1) * tiles};
    return range;
}

static __global__ void __launch_bounds__(THREADS, 1)
    chunk_keys(const __grid_constant__ indexer_backward_params params, skl_dense_chunk chunk, int64_t first,
               int64_t count)
{
    extern __shared__ __align__(16) unsigned char raw[];
    index_backward_memory &memory = *(index_backward_memory *)(void *)raw;
    const int64_t items = chunk.key_tiles * chunk.num_dk_splits * skl_ceil_div(params.problem.dim_s, SLICE);
#pragma unroll 1
    for (int64_t n = blockIdx.x; n < items; n += gridDim.x) {
        __syncthreads(); /* no thread reads the previous work item any more */
        if (threadIdx.x == 0)
            memory.item = key_item_at(params, chunk, n);
        __syncthreads();
        const skl_range tiles = tiles_of(params.problem, memory.item.flat_key_head);
        const bool none = tiles.begin < tiles.end && (tiles.end <= first || tiles.begin >= first + count);
        if (!none)
            sum_keys(params, memory, chunk, tiles, first, count);
    }
}

/* dk = sum over the splits of the index heads, in their order. */
static __global__ void __launch_bounds__(THREADS)
    add_dk_splits(const __grid_constant__ indexer_backward_params params, skl_dense_chunk chunk)
{
    const skl_problem &p = params.problem;
    const skl_output &dk = params.call.gradients.dk_s;
    const int64_t tiles = skl_ceil_div(p.len_k, TILE);
#pragma unroll 1
    for (int64_t tile = blockIdx.x; tile < chunk.key_tiles; tile += gridDim.x) {
        const int64_t flat_key_head = tile / tiles, key_head = flat_key_head % p.key_heads_s,
                      key_first = tile % tiles * TILE;
        const skl_sequence s = device_sequence(params, flat_key_head / p.key_heads_s);
        const int64_t rows = skl_min(TILE, key_rows(p, s) - key_first);
        float *const splits = (float *)(void *)((char *)params.call.workspace + chunk.sums);
        const skl_output layout = sums_layout(p, splits);
        for (int64_t n = threadIdx.x; n < rows * p.dim_s; n += THREADS) {
            const int64_t key = s.key_begin + key_first + n / p.dim_s, c = n % p.dim_s;
            const float *const from = splits + SKL_ROW(layout, s.batch, key_head, key) + c;
            float sum = 0.0F;
            for (int64_t split = 0; split < chunk.num_dk_splits; split++)
                sum += from[split * chunk.dk_split_size];
            skl_store(dk.data, skl_grad_dtype(&p, p.dtype_s), SKL_ROW(dk, s.batch, key_head, key) + c, sum);
        }
    }
}

/* ---- Launchers ----------------------------------------------------------------------------------------------- */

constexpr int MEMORY_SIZE = (int)sizeof(index_backward_memory);

typedef void chunk_kernel(const indexer_backward_params, skl_dense_chunk, int64_t, int64_t);

extern "C" cudaError_t skl_cuda_general_dense_gradients(const skl_cuda_params *params, const skl_cuda_launch *launch)
{
    const skl_gradients *const grads = &params->call.gradients;
    const bool queries = grads->dq_s.data != NULL || grads->dw_s.data != NULL, keys = grads->dk_s.data != NULL;
    chunk_kernel *const kernels[] = {chunk_gradients, chunk_queries, chunk_keys};
    for (chunk_kernel *const kernel : kernels) {
        const cudaError_t error =
            cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, MEMORY_SIZE);
        if (error != cudaSuccess)
            return error;
    }
    const skl_dense_chunk &chunk = launch->dense;
    const indexer_backward_params own = {*params, launch->rows_known};
    record_launch("cuda_general", SKL_VARIANT_GRADIENTS, 1);
    const unsigned blocks = (unsigned)launch->sm_count * SKL_GENERAL_BLOCKS_PER_SM;
    const cudaStream_t stream = params->call.stream;
    int64_t first = 0;
    do { /* at least once: without queries, dk is 0 */
        const int64_t count = skl_min(chunk.count, chunk.tiles - first);
        if (count > 0)
            chunk_gradients<<<blocks, THREADS, MEMORY_SIZE, stream>>>(own, chunk, first, count);
        if (count > 0 && queries)
            chunk_queries<<<blocks, THREADS, MEMORY_SIZE, stream>>>(own, chunk, first, count);
        if (keys)
            chunk_keys<<<blocks, THREADS, MEMORY_SIZE, stream>>>(own, chunk, first, count);
        first += chunk.count;
    } while (first < chunk.tiles);
    if (keys)
        add_dk_splits<<<blocks, THREADS, 0, stream>>>(own, chunk);
    return cudaPeekAtLastError();
}
