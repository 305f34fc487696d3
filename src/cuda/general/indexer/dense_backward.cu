/* Backward of an indexer, dense. No atomics, so the bits are the same on every run.
 *
 * For a chunk of query tiles at a time, one launch leaves the gradients dy of their logits in the workspace, a block
 * a tile of queries and keys. The next ones multiply them, a block an index head of a query tile, then a block a key
 * tile and some index heads:
 *
 *     s_g = sum_j dy_j [a_gj > 0] k_j        dq_g = w_g s_g        dw_g = <q_g, s_g>
 *     dk_j = sum_i dy_ij sum_g w_ig [a_igj > 0] q_ig
 *
 *   block   128 own rows, 64 streamed ones a step: 8 x 4 pairs and 8 x 8 sums of the gradient a thread
 *   shared  two chunks of both operands, the logit gradient of a tile and what is known of its queries: 72 KB */
#include "cuda/general/gradient_product.cuh"
#include "cuda/general/row_state.cuh"
#include "cuda/general/indexer/dense_tile.cuh"

static_assert(STREAMED == SKL_INDEX_STEP, "steps of the chunk are tiles");

/* What a backward knows of a query. */
struct index_facts {
    skl_lse2 lse_s;
    float factor; /* upstream gradient and scale */
    float kl;     /* KL(S || P) */
};

/* What a block sums up for dk: one part of a key tile, some dimensions. */
struct key_item {
    int64_t heads; /* key head of its sequence, counted over all sequences */
    int64_t key_first;
    int64_t head_begin, head_end; /* index heads of the part */
    int64_t c_first;
    float *sums; /* of the part, all keys */
};

struct index_backward_memory {
    stage_memory stage;
    __align__(16) gradient_tile gradient;
    index_facts facts[TILE];
    skl_lse2 lse_t[TILE];
    float weights[TILE];
    key_span spans[TILE];
    row_source streamed; /* rows that the logit gradient is multiplied with */
    work_item at;
    skl_range dy_keys; /* dk: of the query tile at hand */
    key_item item;
};

/* ---- The gradient of the logits ------------------------------------------------------------------------------ */

/* What is known of the queries of a tile; others may read it after the next barrier. */
static __device__ void load_row_stats(index_backward_memory &memory, const indexer_backward_params &params,
                                      const tile_position &at)
{
    const skl_inputs &in = params.call.inputs;
    const skl_input kl = skl_known_rows(params.rows_known, &in.kl, &params.call.rows.kl);
    const skl_sequence &s = at.in.sequence;
    const int64_t query = at.query_first + threadIdx.x;
    if (threadIdx.x >= TILE || query >= at.in.queries.end)
        return;
    const float grad = in.grad_kl.data != NULL ? skl_row_value(&in.grad_kl, &s, at.in.head, query) : 1.0F;
    index_facts facts;
    facts.lse_s = skl_lse2_of(skl_row_value(&in.lse_s, &s, at.in.head, query));
    facts.factor = grad * params.problem.scale_s;
    facts.kl = params.problem.direction == SKL_KL_REVERSE ? skl_row_value(&kl, &s, at.in.head, query) : 0.0F;
    memory.facts[threadIdx.x] = facts;
}

/* g = the gradient of the logits of a tile, exactly 0 for pairs that are masked. The tile at hand is that of the
 * first teacher head, what after() gives follows the last index head. */
template <typename SOURCE>
static __device__ void index_gradients(fragment<COLUMNS> &g, pipeline<COLUMNS> &line, index_backward_memory &memory,
                                       const indexer_backward_params &params, const tile_position &at, SOURCE after)
{
    const skl_problem &p = params.problem;
    const int64_t group = skl_group_size(&p);
    const bool reverse = p.direction == SKL_KL_REVERSE;
    fragment<COLUMNS> y;
    teacher_mean(
        g, line, at, group, memory.lse_t,
        [&](int64_t h) {
            return skl_lse2_of(skl_row_value(&params.call.inputs.lse_t, &at.in.sequence, at.in.head * group + h,
                                             at.query_first + threadIdx.x));
        },
        [&] { return index_source<false>(at, p.index_heads, 0); });
    index_logits(y, line, params, at, memory.weights, after);
    find_spans(memory.spans, p, at);
#pragma unroll
    for (int i = 0; i < ROWS; i++) {
        const index_facts facts = memory.facts[row_of(i)];
        const key_span span = memory.spans[row_of(i)];
#pragma unroll
        for (int j = 0; j < COLUMNS; j++) {
            const float u = g.at[i][j];
            const float v = log_probability(y.at[i][j], facts.lse_s);
            const float s = ex2(v);
            const float dy = reverse ? s * fmaf(SKL_LN2, v - u, -facts.kl) : s - ex2(u);
            g.at[i][j] = sees(span, acc_column(j)) ? facts.factor * dy : 0.0F;
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
        __syncthreads(); /* nobody looks at the last item any more */
        if (threadIdx.x == 0)
            memory.at = query_item(params, first + n / chunk.key_steps);
        __syncthreads();
        const int64_t step = n % chunk.key_steps * STREAMED;
        const tile_position at = {memory.at, memory.at.queries.begin, memory.at.keys.begin + step};
        if (at.query_first >= at.in.queries.end || at.key_first >= at.in.keys.end)
            continue;
        const auto first_head = [&] {
            return source_of<false>(at, TEACHER, at.in.head * skl_group_size(&params.problem));
        };
        pipeline<COLUMNS> line(memory.stage);
        fragment<COLUMNS> g;
        load_row_stats(memory, params, at);
        line.begin(first_head);
        index_gradients(g, line, memory, params, at, first_head); /* any source: nothing follows */
        float *const to = (float *)params.call.workspace + n / chunk.key_steps * chunk.tile_size + step * TILE;
#pragma unroll
        for (int j = 0; j < COLUMNS; j++)
#pragma unroll
            for (int i = 0; i < ROWS; i += 4)
                *(float4 *)&to[acc_column(j) * TILE + row_of(i)] =
                    make_float4(g.at[i][j], g.at[i + 1][j], g.at[i + 2][j], g.at[i + 3][j]);
    }
}

/* ---- dq and dw ----------------------------------------------------------------------------------------------- */

/* g = dy of a tile as the chunk has it, where the dots z pass the ReLU. */
static __device__ void pass_gradients(fragment<COLUMNS> &z, const float *dy, bool linear)
{
#pragma unroll
    for (int j = 0; j < COLUMNS; j++)
#pragma unroll
        for (int i = 0; i < ROWS; i += 4) {
            const float4 four = *(const float4 *)&dy[acc_column(j) * TILE + row_of(i)];
            const float values[4] = {four.x, four.y, four.z, four.w};
#pragma unroll
            for (int e = 0; e < 4; e++)
                z.at[i + e][j] = index_active(linear, z.at[i + e][j]) ? values[e] : 0.0F;
        }
}

/* s_g of SLICE dimensions from c_first on; leaves the weights of the head in shared memory. */
static __device__ void sum_slice(fragment<8> &sum, pipeline<COLUMNS> &line, index_backward_memory &memory,
                                 const indexer_backward_params &params, tile_position at, int64_t g, const float *dy,
                                 int c_first)
{
    const skl_problem &p = params.problem;
    clear(sum);
    line.begin([&] { return index_source<false>(at, p.index_heads, g); });
#pragma unroll 1
    for (; at.key_first < at.in.keys.end; at.key_first += STREAMED, dy += STREAMED * TILE) {
        if (threadIdx.x == 0)
            memory.streamed = index_source<false>(at, p.index_heads, g).streamed;
        fragment<COLUMNS> z;
        index_dots(z, line, params, at, g, memory.weights,
                   [&] { return index_source<false>(next_keys<COLUMNS>(at), p.index_heads, g); });
        raw_quad rows[OWN_QUADS];
        load_steps(rows, memory.streamed, 0, c_first);
        pass_gradients(z, dy, p.index_linear != 0);
        store_gradients(memory.gradient, z);
        multiply_gradient<true>(sum, line, memory, rows, p.dtype_s, c_first);
    }
}

/* <q_g, s_g> over the slice, for every row of the thread. */
static __device__ void add_dots(float (&dots)[ROWS], const fragment<8> &sum, const indexer_backward_params &params,
                                const tile_position &at, int64_t q_head, int64_t c_first)
{
    const skl_input &q = params.call.inputs.q_s;
    const skl_sequence &s = at.in.sequence;
#pragma unroll
    for (int i = 0; i < ROWS; i++) {
        const int64_t query = at.query_first + row_of(i);
        const int64_t row = SKL_ROW(q, s.batch, q_head, s.query_begin + query);
        float dot = 0.0F;
#pragma unroll
        for (int j = 0; j < 8; j++) {
            const int64_t c = c_first + acc_column(j);
            /* A sum of 0 is that of a row that sees nothing, whose query may hold anything. */
            if (query < at.in.queries.end && c < params.problem.dim_s && sum.at[i][j] != 0.0F)
                dot = fmaf(skl_load(q.data, params.problem.dtype_s, row + c), sum.at[i][j], dot);
        }
        dots[i] += row_sum(dot);
    }
}

static __device__ void store_dq(fragment<8> &sum, const index_backward_memory &memory,
                                const indexer_backward_params &params, const tile_position &at, int64_t q_head,
                                int64_t c_first)
{
    const skl_problem &p = params.problem;
    const skl_output &dq = params.call.gradients.dq_s;
    const skl_sequence &s = at.in.sequence;
#pragma unroll
    for (int i = 0; i < ROWS; i++) {
        const float w = memory.weights[row_of(i)];
#pragma unroll
        for (int j = 0; j < 8; j++)
            sum.at[i][j] = sum.at[i][j] != 0.0F ? w * sum.at[i][j] : 0.0F; /* w of a hidden row may be anything */
    }
    store_sums(sum, dq, skl_grad_dtype(&p, p.dtype_s), SKL_ROW(dq, s.batch, q_head, s.query_begin), at.query_first,
               at.in.queries.end, c_first, p.dim_s);
}

static __device__ void head_gradients(const indexer_backward_params &params, index_backward_memory &memory, int64_t g,
                                      const float *dy)
{
    const skl_problem &p = params.problem;
    const skl_output &dw = params.call.gradients.dw_s;
    const tile_position at = {memory.at, memory.at.queries.begin, memory.at.keys.begin};
    const int64_t q_head = at.in.head * p.index_heads + g;
    pipeline<COLUMNS> line(memory.stage);
    float dots[ROWS] = {};
#pragma unroll 1
    for (int c_first = 0; c_first < p.dim_s; c_first += SLICE) {
        fragment<8> sum;
        sum_slice(sum, line, memory, params, at, g, dy, c_first);
        if (dw.data != NULL)
            add_dots(dots, sum, params, at, q_head, c_first);
        if (params.call.gradients.dq_s.data != NULL)
            store_dq(sum, memory, params, at, q_head, c_first);
    }
    const skl_sequence &s = at.in.sequence;
#pragma unroll
    for (int i = 0; i < ROWS; i++) {
        const int64_t query = at.query_first + row_of(i);
        if (dw.data != NULL && first_lane() && query < at.in.queries.end)
            skl_store(dw.data, skl_grad_dtype(&p, p.dtype_w),
                      SKL_ROW(dw, s.batch, at.in.head, s.query_begin + query) + g, dots[i]);
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
        __syncthreads(); /* nobody looks at the last item any more */
        if (threadIdx.x == 0)
            memory.at = query_item(params, first + n / heads);
        __syncthreads();
        if (memory.at.queries.begin < memory.at.queries.end)
            head_gradients(params, memory, n % heads,
                           (const float *)params.call.workspace + n / heads * chunk.tile_size);
    }
}

/* ---- dk ------------------------------------------------------------------------------------------------------ */

static __device__ key_item key_item_at(const indexer_backward_params &params, const skl_dense_chunk &chunk, int64_t n)
{
    const skl_problem &p = params.problem;
    const int64_t slices = skl_ceil_div(p.dim_s, SLICE), tiles = skl_ceil_div(p.len_k, TILE);
    const int64_t part = n / slices % chunk.parts, tile = n / slices / chunk.parts;
    const key_item item = {tile / tiles,
                           tile % tiles * TILE,
                           part * p.index_heads / chunk.parts,
                           (part + 1) * p.index_heads / chunk.parts,
                           n % slices * SLICE,
                           (float *)(void *)((char *)params.call.workspace + chunk.sums) + part * chunk.part_size};
    return item;
}

/* Sums lie as contiguous keys do. */
static __device__ skl_output sums_layout(const skl_problem &p, float *sums)
{
    const int64_t head_size = (p.packed ? p.total_k : p.len_k) * p.dim_s;
    const skl_output layout = {sums, p.key_heads_s * head_size, head_size, p.dim_s};
    return layout;
}

/* dy of keys by 64 queries from the chunk's tile, whose keys begin at dy_keys.begin; others are 0. */
static __device__ void load_gradients(fragment<COLUMNS> &g, const float *dy, const skl_range &dy_keys,
                                      int64_t key_first, int query_first)
{
#pragma unroll
    for (int i = 0; i < ROWS; i++) {
        const int64_t key = key_first + row_of(i);
        float4 four = make_float4(0.0F, 0.0F, 0.0F, 0.0F);
        if (key >= dy_keys.begin && key < dy_keys.end)
            four = *(const float4 *)&dy[(key - dy_keys.begin) * TILE + query_first + acc_column(0)];
        g.at[i][0] = four.x;
        g.at[i][1] = four.y;
        g.at[i][2] = four.z;
        g.at[i][3] = four.w;
    }
}

/* Adds what 64 queries give, the index heads of the part. */
static __device__ void add_queries(fragment<8> &sum, pipeline<COLUMNS> &line, index_backward_memory &memory,
                                   const indexer_backward_params &params, const tile_position &at,
                                   const fragment<COLUMNS> &dy)
{
    const skl_problem &p = params.problem;
    const key_item &item = memory.item;
    line.begin([&] { return index_source<true>(at, p.index_heads, item.head_begin); });
#pragma unroll 1
    for (int64_t g = item.head_begin; g < item.head_end; g++) {
        if (threadIdx.x == 0)
            memory.streamed = index_source<true>(at, p.index_heads, g).streamed;
        fragment<COLUMNS> z;
        index_dots(z, line, params, at, g, memory.weights, [&] {
            return index_source<true>(at, p.index_heads, g + 1 < item.head_end ? g + 1 : g); /* any: the last one */
        });
        raw_quad rows[OWN_QUADS];
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
        multiply_gradient<true>(sum, line, memory, rows, p.dtype_s, (int)item.c_first);
    }
}

/* Adds what a query tile of the chunk gives. */
static __device__ void add_query_tile(fragment<8> &sum, pipeline<COLUMNS> &line, index_backward_memory &memory,
                                      const indexer_backward_params &params, int64_t tile, const float *dy)
{
    const key_item &item = memory.item;
    __syncthreads(); /* nobody looks at the last tile any more */
    if (threadIdx.x == 0) {
        memory.at = query_item(params, tile);
        memory.dy_keys = memory.at.keys;
        memory.at.keys.begin = item.key_first;
        memory.at.keys.end = memory.at.sequence.key_count;
    }
    __syncthreads();
    tile_position at = {memory.at, memory.at.queries.begin, item.key_first};
    const int64_t end = skl_min(at.query_first + TILE, at.in.queries.end);
    if (item.key_first + TILE <= memory.dy_keys.begin || item.key_first >= memory.dy_keys.end)
        return;
#pragma unroll 1
    for (int query = 0; at.query_first < end; query += STREAMED, at.query_first += STREAMED) {
        fragment<COLUMNS> g;
        load_gradients(g, dy, memory.dy_keys, item.key_first, query);
        add_queries(sum, line, memory, params, at, g);
    }
}

/* Sums start at 0 with the first chunk that has queries of the key head, and wait in the workspace for the next. */
static __device__ void sum_keys(const indexer_backward_params &params, index_backward_memory &memory,
                                const skl_dense_chunk &chunk, skl_range tiles, int64_t first, int64_t count)
{
    const skl_problem &p = params.problem;
    const key_item &item = memory.item;
    const skl_sequence s = device_sequence(params, item.heads / p.key_heads_s);
    const skl_output sums = sums_layout(p, item.sums);
    const int64_t base = SKL_ROW(sums, s.batch, item.heads % p.key_heads_s, s.key_begin);
    pipeline<COLUMNS> line(memory.stage);
    fragment<8> sum;
    clear(sum);
#pragma unroll
    for (int i = 0; i < ROWS; i++)
#pragma unroll
        for (int j = 0; j < 8; j++) {
            const int64_t key = item.key_first + row_of(i), c = item.c_first + acc_column(j);
            if (tiles.begin < first && key < key_rows(p, s) && c < p.dim_s)
                sum.at[i][j] = item.sums[base + key * sums.stride_row + c];
        }
#pragma unroll 1
    for (int64_t tile = skl_max(tiles.begin, first); tile < skl_min(tiles.end, first + count); tile++)
        add_query_tile(sum, line, memory, params, tile,
                       (const float *)params.call.workspace + (tile - first) * chunk.tile_size);
    store_sums(sum, sums, SKL_F32, base, item.key_first, key_rows(p, s), item.c_first, p.dim_s);
}

/* Query tiles of the heads that share a key head. */
static __device__ skl_range tiles_of(const skl_problem &p, int64_t heads)
{
    const int64_t tiles = p.heads_s / p.key_heads_s * skl_ceil_div(p.len_q, TILE);
    const skl_range range = {heads * tiles, (heads + 1) * tiles};
    return range;
}

static __global__ void __launch_bounds__(THREADS, 1)
    chunk_keys(const __grid_constant__ indexer_backward_params params, skl_dense_chunk chunk, int64_t first,
               int64_t count)
{
    extern __shared__ __align__(16) unsigned char raw[];
    index_backward_memory &memory = *(index_backward_memory *)(void *)raw;
    const int64_t items = chunk.key_tiles * chunk.parts * skl_ceil_div(params.problem.dim_s, SLICE);
#pragma unroll 1
    for (int64_t n = blockIdx.x; n < items; n += gridDim.x) {
        __syncthreads(); /* nobody looks at the last item any more */
        if (threadIdx.x == 0)
            memory.item = key_item_at(params, chunk, n);
        __syncthreads();
        const skl_range tiles = tiles_of(params.problem, memory.item.heads);
        const bool none = tiles.begin < tiles.end && (tiles.end <= first || tiles.begin >= first + count);
        if (!none)
            sum_keys(params, memory, chunk, tiles, first, count);
    }
}

/* dk is the sum of its parts. */
static __global__ void __launch_bounds__(THREADS)
    add_parts(const __grid_constant__ indexer_backward_params params, skl_dense_chunk chunk)
{
    const skl_problem &p = params.problem;
    const skl_output &dk = params.call.gradients.dk_s;
    const int64_t tiles = skl_ceil_div(p.len_k, TILE);
#pragma unroll 1
    for (int64_t tile = blockIdx.x; tile < chunk.key_tiles; tile += gridDim.x) {
        const int64_t heads = tile / tiles, key_head = heads % p.key_heads_s, key_first = tile % tiles * TILE;
        const skl_sequence s = device_sequence(params, heads / p.key_heads_s);
        const int64_t rows = skl_min(TILE, key_rows(p, s) - key_first);
        float *const parts = (float *)(void *)((char *)params.call.workspace + chunk.sums);
        const skl_output layout = sums_layout(p, parts);
        for (int64_t n = threadIdx.x; n < rows * p.dim_s; n += THREADS) {
            const int64_t key = s.key_begin + key_first + n / p.dim_s, c = n % p.dim_s;
            const float *const from = parts + SKL_ROW(layout, s.batch, key_head, key) + c;
            float sum = 0.0F;
            for (int64_t part = 0; part < chunk.parts; part++)
                sum += from[part * chunk.part_size];
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
    do { /* also without a query: keys that nobody sees have a gradient of 0 */
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
        add_parts<<<blocks, THREADS, 0, stream>>>(own, chunk);
    return cudaPeekAtLastError();
}
