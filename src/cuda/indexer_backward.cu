/* Backward of an indexer, dense. No atomics, so the bits are the same on every run.
 *
 * dq and dw, for a band of query tiles at a time: one launch leaves the logits' gradients dy of the band in the
 * workspace, a block a tile of queries and keys; the next one multiplies them with the keys, a block an index head of
 * a query tile:
 *
 *     s_g = sum_j dy_j [a_gj > 0] k_j        dq_g = w_g s_g        dw_g = <q_g, s_g>
 *
 * dk, with a key tile held fixed: all index heads add to the same sums. Each launch gives up to 128 dimensions.
 *
 *   block   128 own rows, 64 streamed ones a step: 8 x 4 pairs and 8 x 8 sums of the gradient a thread
 *   shared  two chunks of both operands, the logit gradient of a tile and what is known of its queries: 72 KB */
#include "cuda/general_products.cuh"
#include "cuda/general_rows.cuh"
#include "cuda/indexer_tile.cuh"

static_assert(STREAMED == SKL_INDEX_STEP, "steps of the band are tiles");

/* What a backward knows of a query. */
struct index_facts {
    skl_lse2 lse_s;
    float factor; /* upstream gradient and scale */
    float kl;     /* KL(S || P) */
};

struct index_backward_memory {
    stage_memory stage;
    __align__(16) gradient_tile gradient;
    index_facts facts[TILE];
    skl_lse2 lse_t[TILE];
    float weights[TILE];
    key_span spans[TILE];
    row_source streamed; /* rows that the logit gradient is multiplied with */
    work at;
};

/* ---- The gradient of the logits ------------------------------------------------------------------------------ */

/* What is known of the queries of a tile; others may read it after the next barrier. */
static __device__ void load_facts(index_backward_memory &memory, const skl_cuda_params &params, const place &at)
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
template <bool KEYS, typename SOURCE>
static __device__ void index_gradients(fragment<COLUMNS> &g, pipeline<COLUMNS> &line, index_backward_memory &memory,
                                       const skl_cuda_params &params, const place &at, SOURCE after)
{
    const skl_problem &p = params.problem;
    const int64_t group = skl_group(&p);
    const bool reverse = p.direction == SKL_KL_REVERSE;
    fragment<COLUMNS> y;
    teacher_mean<KEYS>(
        g, line, at, group, memory.lse_t,
        [&](int64_t h) {
            return skl_lse2_of(skl_row_value(&params.call.inputs.lse_t, &at.in.sequence, at.in.head * group + h,
                                             at.query_first + threadIdx.x));
        },
        [&] { return index_source<KEYS>(at, p.index_heads, 0); });
    index_logits<KEYS>(y, line, params, at, memory.weights, after);
    find_spans(memory.spans, p, at);
#pragma unroll
    for (int a = 0; a < (KEYS ? COLUMNS : ROWS); a++) {
        const int query = KEYS ? column_of(a) : row_of(a);
        const index_facts facts = memory.facts[query];
        const key_span span = memory.spans[query];
#pragma unroll
        for (int b = 0; b < (KEYS ? ROWS : COLUMNS); b++) {
            float &pair = g.at[KEYS ? b : a][KEYS ? a : b];
            const float u = pair;
            const float v = log_probability(y.at[KEYS ? b : a][KEYS ? a : b], facts.lse_s);
            const float s = ex2(v);
            const float dy = reverse ? s * fmaf(SKL_LN2, v - u, -facts.kl) : s - ex2(u);
            pair = sees(span, KEYS ? row_of(b) : column_of(b)) ? facts.factor * dy : 0.0F;
        }
    }
}

static __global__ void __launch_bounds__(THREADS, 1)
    band_gradients(const __grid_constant__ skl_cuda_params params, skl_dense_band band, int64_t first, int64_t count)
{
    extern __shared__ __align__(16) unsigned char raw[];
    index_backward_memory &memory = *(index_backward_memory *)(void *)raw;
#pragma unroll 1
    for (int64_t n = blockIdx.x; n < count * band.key_steps; n += gridDim.x) {
        __syncthreads(); /* nobody looks at the last item any more */
        if (threadIdx.x == 0)
            memory.at = query_work(params, first + n / band.key_steps);
        __syncthreads();
        const int64_t step = n % band.key_steps * STREAMED;
        const place at = {memory.at, memory.at.queries.begin, memory.at.keys.begin + step};
        if (at.query_first >= at.in.queries.end || at.key_first >= at.in.keys.end)
            continue;
        const auto first_head = [&] {
            return source_of<false>(at, TEACHER, at.in.head * skl_group(&params.problem));
        };
        pipeline<COLUMNS> line(memory.stage);
        fragment<COLUMNS> g;
        load_facts(memory, params, at);
        line.begin(first_head);
        index_gradients<false>(g, line, memory, params, at, first_head); /* any source: nothing follows */
        float *const to = (float *)params.scratch + n / band.key_steps * band.tile_size + step * TILE;
#pragma unroll
        for (int j = 0; j < COLUMNS; j++)
#pragma unroll
            for (int i = 0; i < ROWS; i += 4)
                *(float4 *)&to[column_of(j) * TILE + row_of(i)] =
                    make_float4(g.at[i][j], g.at[i + 1][j], g.at[i + 2][j], g.at[i + 3][j]);
    }
}

/* ---- dq and dw ----------------------------------------------------------------------------------------------- */

/* g = dy of a tile as the band has it, where the dots z pass the ReLU. */
static __device__ void pass_gradients(fragment<COLUMNS> &z, const float *dy, bool linear)
{
#pragma unroll
    for (int j = 0; j < COLUMNS; j++)
#pragma unroll
        for (int i = 0; i < ROWS; i += 4) {
            const float4 four = *(const float4 *)&dy[column_of(j) * TILE + row_of(i)];
            const float values[4] = {four.x, four.y, four.z, four.w};
#pragma unroll
            for (int e = 0; e < 4; e++)
                z.at[i + e][j] = index_active(linear, z.at[i + e][j]) ? values[e] : 0.0F;
        }
}

/* s_g of SLICE dimensions from c_first on; leaves the weights of the head in shared memory. */
static __device__ void sum_slice(fragment<8> &sum, pipeline<COLUMNS> &line, index_backward_memory &memory,
                                 const skl_cuda_params &params, place at, int64_t g, const float *dy, int c_first)
{
    const skl_problem &p = params.problem;
    clear(sum);
    line.begin([&] { return index_source<false>(at, p.index_heads, g); });
#pragma unroll 1
    for (; at.key_first < at.in.keys.end; at.key_first += STREAMED, dy += STREAMED * TILE) {
        if (threadIdx.x == 0)
            memory.streamed = index_source<false>(at, p.index_heads, g).streamed;
        fragment<COLUMNS> z;
        index_dots<false>(z, line, params, at, g, memory.weights,
                          [&] { return index_source<false>(next_keys<COLUMNS>(at), p.index_heads, g); });
        raw_quad rows[OWN_QUADS];
        load_steps(rows, memory.streamed, 0, c_first);
        pass_gradients(z, dy, p.index_linear != 0);
        store_gradients(memory.gradient, z);
        multiply_gradient<true>(sum, line, memory, rows, p.dtype_s, c_first);
    }
}

/* <q_g, s_g> over the slice, for every row of the thread. */
static __device__ void add_dots(float (&dots)[ROWS], const fragment<8> &sum, const skl_cuda_params &params,
                                const place &at, int64_t q_head, int64_t c_first)
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
            const int64_t c = c_first + column_of(j);
            /* A sum of 0 is that of a row that sees nothing, whose query may hold anything. */
            if (query < at.in.queries.end && c < params.problem.dim_s && sum.at[i][j] != 0.0F)
                dot = fmaf(skl_load(q.data, params.problem.dtype_s, row + c), sum.at[i][j], dot);
        }
        dots[i] += row_sum(dot);
    }
}

static __device__ void store_dq(fragment<8> &sum, const index_backward_memory &memory, const skl_cuda_params &params,
                                const place &at, int64_t q_head, int64_t c_first)
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

static __device__ void head_gradients(const skl_cuda_params &params, index_backward_memory &memory, int64_t g,
                                      const float *dy)
{
    const skl_problem &p = params.problem;
    const skl_output &dw = params.call.gradients.dw_s;
    const place at = {memory.at, memory.at.queries.begin, memory.at.keys.begin};
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
    band_queries(const __grid_constant__ skl_cuda_params params, skl_dense_band band, int64_t first, int64_t count)
{
    extern __shared__ __align__(16) unsigned char raw[];
    index_backward_memory &memory = *(index_backward_memory *)(void *)raw;
    const int64_t heads = params.problem.index_heads;
#pragma unroll 1
    for (int64_t n = blockIdx.x; n < count * heads; n += gridDim.x) {
        __syncthreads(); /* nobody looks at the last item any more */
        if (threadIdx.x == 0)
            memory.at = query_work(params, first + n / heads);
        __syncthreads();
        if (memory.at.queries.begin < memory.at.queries.end)
            head_gradients(params, memory, n % heads, (const float *)params.scratch + n / heads * band.tile_size);
    }
}

/* ---- dk ------------------------------------------------------------------------------------------------------ */

static __device__ work key_work(const skl_cuda_params &params, int64_t item)
{
    const skl_problem &p = params.problem;
    const int64_t tiles = skl_ceil_div(p.len_k, TILE);
    work at = work_at(params, item, p.key_heads_s * tiles);
    if (!at.exists)
        return at;
    at.own_head = item / tiles % p.key_heads_s;
    at.head = at.own_head * (p.heads_s / p.key_heads_s);
    at.keys.begin = item % tiles * TILE;
    at.keys.end = at.sequence.key_count;
    at.queries = queries_seeing(p, at.sequence, at.keys.begin);
    return at;
}

/* Adds what a tile of queries gives, all index heads of it. */
static __device__ void add_queries(fragment<8> &sum, pipeline<COLUMNS> &line, index_backward_memory &memory,
                                   const skl_cuda_params &params, const place &at)
{
    const skl_problem &p = params.problem;
    const int heads = (int)p.index_heads;
    const place next = {at.in, at.query_first + STREAMED, at.key_first};
    fragment<COLUMNS> dy;
    load_facts(memory, params, at);
    index_gradients<true>(dy, line, memory, params, at, [&] { return index_source<true>(at, heads, 0); });
#pragma unroll 1
    for (int g = 0; g < heads; g++) {
        if (threadIdx.x == 0)
            memory.streamed = index_source<true>(at, heads, g).streamed;
        fragment<COLUMNS> z;
        index_dots<true>(z, line, params, at, g, memory.weights, [&] {
            return g + 1 < heads ? index_source<true>(at, heads, g + 1)
                                 : source_of<true>(next, TEACHER, at.in.head * skl_group(&p));
        });
        raw_quad rows[OWN_QUADS];
        load_steps(rows, memory.streamed, 0, (int)params.dim_first);
#pragma unroll
        for (int j = 0; j < COLUMNS; j++) {
            const float w = memory.weights[column_of(j)];
#pragma unroll
            for (int i = 0; i < ROWS; i++) {
                const bool active = index_active(p.index_linear != 0, z.at[i][j]) && dy.at[i][j] != 0.0F;
                z.at[i][j] = active ? dy.at[i][j] * w : 0.0F;
            }
        }
        store_gradients(memory.gradient, z);
        multiply_gradient<true>(sum, line, memory, rows, p.dtype_s, (int)params.dim_first);
    }
}

static __device__ void keys_tile(const skl_cuda_params &params, index_backward_memory &memory)
{
    const skl_problem &p = params.problem;
    place at = {memory.at, memory.at.queries.begin, memory.at.keys.begin};
    pipeline<COLUMNS> line(memory.stage);
    fragment<8> sum;
    clear(sum);
#pragma unroll 1
    while (at.in.head * p.key_heads_s < (at.in.own_head + 1) * p.heads_s) { /* the heads that share the keys */
        at.query_first = at.in.queries.begin;
        line.begin([&] { return source_of<true>(at, TEACHER, at.in.head * skl_group(&p)); });
#pragma unroll 1
        for (; at.query_first < at.in.queries.end; at.query_first += STREAMED)
            add_queries(sum, line, memory, params, at);
        __syncthreads();
        if (threadIdx.x == 0)
            memory.at.head++;
        __syncthreads();
    }
    const skl_output &dk = params.call.gradients.dk_s;
    const skl_sequence &s = at.in.sequence;
    store_sums(sum, dk, skl_grad_dtype(&p, p.dtype_s), SKL_ROW(dk, s.batch, at.in.own_head, s.key_begin),
               at.key_first, key_rows(p, s), params.dim_first, p.dim_s);
}

static __global__ void __launch_bounds__(THREADS, 1) indexer_keys(const __grid_constant__ skl_cuda_params params)
{
    extern __shared__ __align__(16) unsigned char raw[];
    index_backward_memory &memory = *(index_backward_memory *)(void *)raw;
    if (threadIdx.x == 0)
        memory.at = key_work(params, blockIdx.x);
    __syncthreads();
#pragma unroll 1
    while (memory.at.exists) {
        if (memory.at.keys.begin < key_rows(params.problem, memory.at.sequence))
            keys_tile(params, memory);
        __syncthreads();
        if (threadIdx.x == 0)
            memory.at = key_work(params, memory.at.item + gridDim.x);
        __syncthreads();
    }
}

/* ---- Launchers ----------------------------------------------------------------------------------------------- */

constexpr int MEMORY_SIZE = (int)sizeof(index_backward_memory);

extern "C" cudaError_t skl_cuda_indexer_queries(const skl_cuda_params *params)
{
    cudaError_t error =
        cudaFuncSetAttribute(band_gradients, cudaFuncAttributeMaxDynamicSharedMemorySize, MEMORY_SIZE);
    if (error == cudaSuccess)
        error = cudaFuncSetAttribute(band_queries, cudaFuncAttributeMaxDynamicSharedMemorySize, MEMORY_SIZE);
    if (error != cudaSuccess)
        return error;
    const skl_dense_band band = skl_dense_band_of(&params->problem, params->multiprocessors);
    const unsigned blocks = (unsigned)params->block_count;
    for (int64_t first = 0; first < band.tiles; first += band.count) {
        const int64_t count = skl_min(band.count, band.tiles - first);
        band_gradients<<<blocks, THREADS, MEMORY_SIZE, params->call.stream>>>(*params, band, first, count);
        band_queries<<<blocks, THREADS, MEMORY_SIZE, params->call.stream>>>(*params, band, first, count);
    }
    return cudaPeekAtLastError();
}

extern "C" cudaError_t skl_cuda_indexer_keys(const skl_cuda_params *params)
{
    const cudaError_t error =
        cudaFuncSetAttribute(indexer_keys, cudaFuncAttributeMaxDynamicSharedMemorySize, MEMORY_SIZE);
    if (error != cudaSuccess)
        return error;
    skl_cuda_params slice = *params;
    for (slice.dim_first = 0; slice.dim_first < slice.problem.dim_s; slice.dim_first += SLICE)
        indexer_keys<<<(unsigned)slice.block_count, THREADS, MEMORY_SIZE, slice.call.stream>>>(slice);
    return cudaPeekAtLastError();
}
