/* General backward of the student's attention o = S v, which adds to the gradients of the KL. With dP = do v^T and
 * D = <do, o>:
 *
 *     dq = f32 gradient of the KL + scale (S (dP - D)) k       dk the same with the transpose and q       dv = S^T do
 *
 * As in backward.cu: stationary queries for dq, stationary keys for dk and dv, no atomics, f32 FFMAs, up to 128
 * dimensions of one gradient per launch, y and dP computed again for each. A launch before them computes D.
 *
 *   block   128 stationary x 64 streamed rows per tile, 8 x 4 pairs and 8 x 8 sums of the gradient per thread
 *   shared  72 KB: two stages of both operands, the gradients of a tile, row stats of its queries */
#include "cuda/general/gradient_product.cuh"

/* The student's side is that of the logits. The teacher's place in a work item belongs to dP = do v^T. */
enum { OUTPUT = TEACHER };

enum gradient_kind { DQ, DK, DV };

struct output_params : skl_cuda_params {
    skl_attention of;     /* in the constant bank: call.attention is a host address */
    skl_output gradient;  /* that the launch computes */
    skl_dtype grad_dtype; /* its type */
    skl_output added;     /* f32, of the KL; may be the gradient itself; no data: none */
    const float *dots;    /* D: [batch, heads_s, len_q], packed [heads_s, total_q] */
    int64_t dim_first;    /* first dimension of the slice of the gradient */
};

struct output_memory {
    pipeline_memory pipe;
    __align__(16) gradient_tile gradient; /* of the logits; S for dv */
    skl_lse2 lse[TILE];
    float dots[TILE];
    key_span spans[TILE];
    row_source streamed; /* rows that the logit gradients are multiplied with */
    work_item work;
};

static output_params output_params_of(const skl_cuda_params *params, const skl_cuda_launch *launch)
{
    return {*params,
            *params->call.attention,
            launch->gradient,
            launch->gradient_dtype,
            launch->added,
            launch->output_dots,
            0};
}

/* ---- D ------------------------------------------------------------------------------------------------------- */

constexpr int DOTS_THREADS = 256, WARP = 32;

/* One warp per row. */
static __global__ void __launch_bounds__(DOTS_THREADS)
    general_output_dots(const __grid_constant__ output_params params, float *dots)
{
    const skl_problem &p = params.problem;
    const int64_t rows = p.packed ? p.total_q : p.len_q, count = (p.packed ? 1 : p.batch) * p.heads_s * rows;
    const int64_t first = ((int64_t)blockIdx.x * DOTS_THREADS + threadIdx.x) / WARP;
    for (int64_t n = first; n < count; n += (int64_t)gridDim.x * (DOTS_THREADS / WARP)) {
        const int64_t batch = n / rows / p.heads_s, head = n / rows % p.heads_s;
        const int64_t o = SKL_ROW(params.of.o_s, batch, head, n % rows);
        const int64_t d_o = SKL_ROW(params.of.do_s, batch, head, n % rows);
        float dot = 0.0F;
        for (int64_t c = threadIdx.x % WARP; c < p.dim_s; c += WARP)
            dot = fmaf(skl_load(params.of.o_s.data, p.dtype_s, o + c),
                       skl_load(params.of.do_s.data, p.dtype_s, d_o + c), dot);
#pragma unroll
        for (int lanes = WARP / 2; lanes > 0; lanes /= 2)
            dot += __shfl_xor_sync(0xFFFFFFFFU, dot, lanes);
        if (threadIdx.x % WARP == 0)
            dots[n] = dot;
    }
}

extern "C" cudaError_t skl_cuda_general_output_dots(const skl_cuda_params *params, const skl_cuda_launch *launch)
{
    record_launch("cuda_general", SKL_VARIANT_DOTS, 1);
    general_output_dots<<<(unsigned)launch->sm_count * 8, DOTS_THREADS, 0, params->call.stream>>>(
        output_params_of(params, launch), launch->output_dots);
    return cudaPeekAtLastError();
}

/* ---- Gradients ----------------------------------------------------------------------------------------------- */

/* Loads the row stats of the queries of a tile. Other threads may read them after the next barrier. */
static __device__ void load_row_stats(output_memory &memory, const output_params &params, const tile_position &tile)
{
    const skl_problem &p = params.problem;
    const skl_sequence &s = tile.work.sequence;
    const int64_t query = tile.query_first + threadIdx.x;
    if (threadIdx.x >= TILE || query >= tile.work.queries.end)
        return;
    memory.lse[threadIdx.x] = skl_lse2_of(skl_row_value(&params.call.inputs.lse_s, &s, tile.work.head, query));
    memory.dots[threadIdx.x] = params.dots[skl_state_index(&p, &s, tile.work.head, query)];
}

/* y = gradient of the logits, or S for dv; exactly 0 for masked pairs. On entry y are the logits. */
template <gradient_kind KIND>
static __device__ void output_gradients(fragment<COLUMNS> &y, const fragment<COLUMNS> &dp,
                                        const output_memory &memory, const skl_problem &p, bool masked)
{
    constexpr bool KEYS = KIND != DQ;
    const key_span all = {0, TILE};
#pragma unroll
    for (int query = 0; query < (KEYS ? COLUMNS : ROWS); query++) {
        const int tile_query = KEYS ? acc_column(query) : acc_row(query);
        const skl_lse2 lse = memory.lse[tile_query];
        const float dot = memory.dots[tile_query];
        const key_span span = masked ? memory.spans[tile_query] : all;
#pragma unroll
        for (int key = 0; key < (KEYS ? ROWS : COLUMNS); key++) {
            float &y_ij = y.at[KEYS ? key : query][KEYS ? query : key];
            const float s = ex2(log_probability(y_ij, lse));
            float g = s;
            if (KIND != DV) {
                g = s * (dp.at[KEYS ? key : query][KEYS ? query : key] - dot) * p.scale_s;
                if (skl_caps_logits(p.softcap_s)) {
                    const float ratio = y_ij / (p.softcap_s * SKL_LOG2E);
                    g *= fmaf(-ratio, ratio, 1.0F);
                }
            }
            y_ij = sees(span, KEYS ? acc_row(key) : acc_column(key)) ? g : 0.0F;
        }
    }
}

/* Adds a tile to the sums of the gradient, and starts to load the tile `next`. */
template <gradient_kind KIND>
static __device__ void add_tile(fragment<8> &sum, pipeline<COLUMNS> &pipe, output_memory &memory,
                                const output_params &params, const tile_position &tile, const tile_position &next)
{
    constexpr bool KEYS = KIND != DQ;
    const skl_problem &p = params.problem;
    const int64_t head = tile.work.head;
    if (threadIdx.x == 0)
        memory.streamed = operands_of<KEYS>(tile, KIND == DV ? OUTPUT : STUDENT, head).streamed;
    const auto next_operands = [&] { return operands_of<KEYS>(next, STUDENT, head); };
    fragment<COLUMNS> y, dp;
    pipe.prefetch([&] { return KIND == DV ? next_operands() : operands_of<KEYS>(tile, OUTPUT, head); });
    pipe.multiply_tile(y);
    scale_products(y, tile.work.sides[STUDENT]);
    if (KIND != DV) {
        pipe.prefetch(next_operands);
        pipe.multiply_tile(dp);
    }
    raw_quad rows[TILE_QUADS];
    load_steps(rows, memory.streamed, 0, (int)params.dim_first);
    const bool masked = !all_visible(p, tile, KEYS ? STREAMED_ROWS : TILE, KEYS ? TILE : STREAMED_ROWS);
    if (masked)
        find_spans(memory.spans, p, tile);
    output_gradients<KIND>(y, dp, memory, p, masked);
    store_gradients(memory.gradient, y);
    if (masked)
        multiply_gradient<true>(sum, pipe, memory, rows, p.dtype_s, (int)params.dim_first);
    else
        multiply_gradient<false>(sum, pipe, memory, rows, p.dtype_s, (int)params.dim_first);
}

/* Stores the sums of rows [row_first, row_end) of a head, with the gradient of the KL added. */
static __device__ void store_with_kl(fragment<8> &sum, const output_params &params, int64_t batch, int64_t head,
                                     int64_t begin, int64_t row_first, int64_t row_end)
{
#pragma unroll 1
    for (int i = 0; i < ROWS; i++, rotate_rows(sum)) {
        const int64_t row = row_first + acc_row(i);
#pragma unroll
        for (int j = 0; j < 8; j++) {
            const int64_t c = params.dim_first + acc_column(j);
            if (row >= row_end || c >= params.problem.dim_s)
                continue;
            const skl_output &added = params.added, &gradient = params.gradient;
            const float of_kl =
                added.data != NULL ? ((const float *)added.data)[SKL_ROW(added, batch, head, begin + row) + c] : 0.0F;
            skl_store(gradient.data, params.grad_dtype, SKL_ROW(gradient, batch, head, begin + row) + c,
                      of_kl + sum.at[0][j]);
        }
    }
}

/* Work items, with the output's side in the teacher's place. */
static __device__ work_item with_output(work_item work, const output_params &params)
{
    tile_side &output = work.sides[OUTPUT] = work.sides[STUDENT];
    output.q = params.of.do_s;
    output.k = params.of.v_s;
    return work;
}

static __device__ void dq_tile(const output_params &params, output_memory &memory)
{
    tile_position tile = {memory.work, memory.work.queries.begin, memory.work.keys.begin};
    pipeline<COLUMNS> pipe(memory.pipe);
    fragment<8> sum;
    clear(sum);
    load_row_stats(memory, params, tile);
    pipe.begin([&] { return operands_of<false>(tile, STUDENT, tile.work.head); });
#pragma unroll 1
    for (; tile.key_first < tile.work.keys.end; tile.key_first += STREAMED_ROWS)
        add_tile<DQ>(sum, pipe, memory, params, tile, {tile.work, tile.query_first, tile.key_first + STREAMED_ROWS});
    const skl_sequence &s = tile.work.sequence;
    store_with_kl(sum, params, s.batch, tile.work.head, s.query_begin, tile.query_first, tile.work.queries.end);
}

template <gradient_kind KIND> static __device__ void keys_tile(const output_params &params, output_memory &memory)
{
    const skl_problem &p = params.problem;
    const int64_t heads_per_key = p.heads_s / p.key_heads_s;
    const int64_t key_head = memory.work.index / skl_ceil_div(p.len_k, TILE) % p.key_heads_s;
    tile_position tile = {memory.work, memory.work.queries.begin, memory.work.keys.begin};
    pipeline<COLUMNS> pipe(memory.pipe);
    fragment<8> sum;
    clear(sum);
#pragma unroll 1
    for (int64_t n = 0; n < heads_per_key; n++) {
        __syncthreads();
        if (threadIdx.x == 0)
            memory.work.head = key_head * heads_per_key + n;
        __syncthreads();
        tile.query_first = tile.work.queries.begin;
        pipe.begin([&] { return operands_of<true>(tile, STUDENT, tile.work.head); });
#pragma unroll 1
        for (; tile.query_first < tile.work.queries.end; tile.query_first += STREAMED_ROWS) {
            load_row_stats(memory, params, tile);
            add_tile<KIND>(sum, pipe, memory, params, tile,
                           {tile.work, tile.query_first + STREAMED_ROWS, tile.key_first});
        }
    }
    const skl_sequence &s = tile.work.sequence;
    store_with_kl(sum, params, s.batch, key_head, s.key_begin, tile.key_first, key_rows(p, s));
}

/* Rows after the last packed sequence become 0. */
static __device__ void clear_tail(const output_params &params, int64_t heads, int64_t used, int64_t total)
{
    const int64_t dim = params.problem.dim_s, tail = total - skl_max(0, skl_min(total, used));
    const int64_t step = (int64_t)gridDim.x * THREADS;
    for (int64_t n = (int64_t)blockIdx.x * THREADS + threadIdx.x; n < heads * tail * dim; n += step)
        skl_store(params.gradient.data, params.grad_dtype,
                  SKL_ROW(params.gradient, 0, n / dim / tail, total - tail + n / dim % tail) + n % dim, 0.0F);
}

template <gradient_kind KIND>
static __global__ void __launch_bounds__(THREADS, 1)
    general_output_gradient(const __grid_constant__ output_params params)
{
    extern __shared__ __align__(16) unsigned char raw[];
    output_memory &memory = *(output_memory *)(void *)raw;
    const skl_problem &p = params.problem;
    const auto find = [&](int64_t index) {
        return with_output(KIND == DQ ? query_item(params, index) : key_tile_item(params, index, p.key_heads_s),
                           params);
    };
    for_each_item(memory.work, find, [&] {
        if (KIND != DQ && memory.work.keys.begin < key_rows(p, memory.work.sequence))
            keys_tile<KIND>(params, memory);
        if (KIND == DQ && memory.work.queries.begin < memory.work.queries.end)
            dq_tile(params, memory);
    });
    if (p.packed && params.dim_first == 0)
        clear_tail(params, KIND == DQ ? p.heads_s : p.key_heads_s,
                   (KIND == DQ ? params.call.inputs.cu_seqlens_q : params.call.inputs.cu_seqlens_k)[p.batch],
                   KIND == DQ ? p.total_q : p.total_k);
}

/* One launch per slice of SLICE dimensions. */
template <gradient_kind KIND>
static cudaError_t launch_slices(const char *variant, const skl_cuda_params *params, const skl_cuda_launch *launch)
{
    const cudaError_t error = cudaFuncSetAttribute(
        general_output_gradient<KIND>, cudaFuncAttributeMaxDynamicSharedMemorySize, (int)sizeof(output_memory));
    if (error != cudaSuccess)
        return error;
    record_launch("cuda_general", variant, 1);
    output_params slice = output_params_of(params, launch);
    for (; slice.dim_first < slice.problem.dim_s; slice.dim_first += SLICE)
        general_output_gradient<KIND><<<(unsigned)launch->sm_count * SKL_GENERAL_BLOCKS_PER_SM, THREADS,
                                        sizeof(output_memory), slice.call.stream>>>(slice);
    return cudaPeekAtLastError();
}

extern "C" cudaError_t skl_cuda_general_output_dq(const skl_cuda_params *params, const skl_cuda_launch *launch)
{
    return launch_slices<DQ>(SKL_VARIANT_OUTPUT_DQ, params, launch);
}

extern "C" cudaError_t skl_cuda_general_output_dk(const skl_cuda_params *params, const skl_cuda_launch *launch)
{
    return launch_slices<DK>(SKL_VARIANT_OUTPUT_DK, params, launch);
}

extern "C" cudaError_t skl_cuda_general_output_dv(const skl_cuda_params *params, const skl_cuda_launch *launch)
{
    return launch_slices<DV>(SKL_VARIANT_OUTPUT_DV, params, launch);
}
