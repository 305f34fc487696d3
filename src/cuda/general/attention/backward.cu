/* General backward, split: dq with a query tile held fixed, dk with a key tile held fixed (DK). No atomics, so the
 * bits are the same on every run. Each launch gives up to 128 dimensions of the gradient of one side.
 *
 *   block   128 own rows, 64 streamed ones a step: 8 x 4 pairs and 8 x 8 sums of the gradient a thread
 *   regs    the sums, both logits, with a grouped teacher a head's own; chunks on their way; 1 block a multiprocessor
 *   shared  two chunks of both operands, the logit gradient of a tile and what is known of its queries: 72 KB */
#include "cuda/general/gradient_product.cuh"

/* What a backward knows of a query. */
struct row_stats {
    skl_lse2 lse_t, lse_s; /* lse_t: of the head that the gradient is for, or the only one */
    float factor;          /* upstream gradient, scale and share of the group */
    float offset;          /* KL or dot_t: see pair_gradient */
};

struct backward_memory {
    stage_memory stage;
    __align__(16) gradient_tile gradient; /* of the logits */
    row_stats facts[TILE];
    skl_lse2 lse_t[TILE]; /* of a head of a group */
    key_span spans[TILE];
    row_source streamed; /* rows that the logit gradient is multiplied with */
    work_item at;
};

/* The gradient is that of the KL's second argument. */
static __device__ bool is_b(const backward_params &params)
{
    return (params.teacher_side != 0) == (params.problem.direction == SKL_KL_REVERSE);
}

/* dKL/dlogit less the query's factor. `own`: log2 of the probability that the logit makes, which is an argument of
 * the KL, or belongs to a head of a grouped teacher; `first`: log2 of the KL's first argument, for a head of a group
 * its own share of it; difference: first less second argument.
 *
 *     gradient of the first    2^own (ln2 difference - offset)     offset = KL, grouped: dot_t
 *     gradient of the second   -2^own offset - 2^first             offset = -1, grouped: dot_t */
static __device__ float pair_gradient(bool of_second, float own, float first, float difference, float offset)
{
    const float p = ex2(own);
    return of_second ? fmaf(p, -offset, -ex2(first)) : p * fmaf(SKL_LN2, difference, -offset);
}

/* 1 - (logit / cap)^2 */
static __device__ float softcap_slope(float softcap, float logit2)
{
    const float ratio = logit2 * SKL_LN2 / softcap;
    return fmaf(-ratio, ratio, 1.0F);
}

/* What is known of the queries of a tile; others may read it after the next barrier. */
static __device__ void load_row_stats(backward_memory &memory, const backward_params &params, const tile_position &at,
                                      int64_t group)
{
    const skl_inputs &in = params.call.inputs;
    const skl_input kl = skl_known_rows(params.rows_known, &in.kl, &params.call.rows.kl);
    const skl_input dot_t = skl_known_rows(params.rows_known, &in.dot_t, &params.call.rows.dot_t);
    const bool grouped = group > 1 && params.teacher_side;
    const skl_sequence &s = at.in.sequence;
    const int64_t query = at.query_first + threadIdx.x;
    if (threadIdx.x >= TILE || query >= at.in.queries.end)
        return;
    const float scale = params.teacher_side ? params.problem.scale_t / (float)group : params.problem.scale_s;
    const float grad = in.grad_kl.data != NULL ? skl_row_value(&in.grad_kl, &s, at.in.head, query) : 1.0F;
    row_stats facts;
    facts.lse_t = skl_lse2_of(skl_row_value(&in.lse_t, &s, grouped ? at.in.own_head : at.in.head * group, query));
    facts.lse_s = skl_lse2_of(skl_row_value(&in.lse_s, &s, at.in.head, query));
    facts.factor = grad * scale;
    if (grouped)
        facts.offset = skl_row_value(&dot_t, &s, at.in.own_head, query);
    else
        facts.offset = is_b(params) ? -1.0F : skl_row_value(&kl, &s, at.in.head, query);
    memory.facts[threadIdx.x] = facts;
}

/* x = difference of the arguments' logarithms, first less second, from both logits. */
template <bool DK>
static __device__ void subtract_arguments(fragment<COLUMNS> &x, const fragment<COLUMNS> &y,
                                          const backward_memory &memory, bool reverse)
{
#pragma unroll
    for (int i = 0; i < ROWS; i++)
#pragma unroll
        for (int j = 0; j < COLUMNS; j++) {
            const float v = log_probability(y.at[i][j], memory.facts[DK ? acc_column(j) : row_of(i)].lse_s);
            x.at[i][j] = reverse ? v - x.at[i][j] : x.at[i][j] - v;
        }
}

/* x becomes the gradient of the logits; masked pairs are exactly 0. A head of a grouped teacher has its own logits in
 * y, and the difference of the arguments in x. */
template <bool DK>
static __device__ void logit_gradients(fragment<COLUMNS> &x, const fragment<COLUMNS> &y,
                                       const backward_memory &memory, const backward_params &params, int64_t group,
                                       bool masked)
{
    const skl_problem &p = params.problem;
    const bool teacher_side = params.teacher_side != 0;
    const bool grouped = group > 1 && teacher_side;
    const bool reverse = p.direction == SKL_KL_REVERSE;
    const bool of_second = is_b(params);
    const float softcap = teacher_side ? p.softcap_t : p.softcap_s;
    const key_span all = {0, TILE};
#pragma unroll
    for (int a = 0; a < (DK ? COLUMNS : ROWS); a++) {
        const int query = DK ? acc_column(a) : row_of(a);
        const row_stats facts = memory.facts[query];
        const key_span span = masked ? memory.spans[query] : all;
#pragma unroll
        for (int b = 0; b < (DK ? ROWS : COLUMNS); b++) {
            float &at = x.at[DK ? b : a][DK ? a : b];
            const float other = y.at[DK ? b : a][DK ? a : b];
            const float logit = teacher_side && !grouped ? at : other;
            const float u = group > 1 ? at : log_probability(at, facts.lse_t);
            const float v = log_probability(other, grouped ? facts.lse_t : facts.lse_s);
            const float own = teacher_side && !grouped ? u : v;
            const float difference = grouped ? at : reverse ? v - u : u - v;
            const float first = grouped ? own + difference : reverse ? v : u;
            float g = facts.factor * pair_gradient(of_second, own, first, difference, facts.offset);
            if (softcap > 0.0F)
                g *= softcap_slope(softcap, logit);
            at = sees(span, DK ? row_of(b) : acc_column(b)) ? g : 0.0F;
        }
    }
}

/* Adds one tile to the sums. `next` follows it. */
template <bool DK>
static __device__ void add_tile(fragment<8> &sum, pipeline<COLUMNS> &line, backward_memory &memory,
                                const backward_params &params, const tile_position &at, const tile_position &next,
                                int64_t group)
{
    const skl_problem &p = params.problem;
    const int side = params.teacher_side ? TEACHER : STUDENT;
    const skl_dtype dtype = params.teacher_side ? p.dtype_t : p.dtype_s;
    const bool grouped = group > 1 && params.teacher_side;
    if (threadIdx.x == 0)
        memory.streamed = source_of<DK>(at, side, at.in.own_head).streamed;

    const auto next_tile = [&] { return source_of<DK>(next, TEACHER, at.in.head * group); };
    const auto lse_of = [&](int64_t h) {
        return skl_lse2_of(skl_row_value(&params.call.inputs.lse_t, &at.in.sequence, at.in.head * group + h,
                                         at.query_first + threadIdx.x));
    };
    fragment<COLUMNS> x, y;
    logit_tiles<DK>(x, y, line, at, group, memory.lse_t, lse_of,
                    [&] { return grouped ? source_of<DK>(at, TEACHER, at.in.own_head) : next_tile(); });
    if (grouped) {
        subtract_arguments<DK>(x, y, memory, p.direction == SKL_KL_REVERSE);
        line.prefetch(next_tile);
        line.multiply_tile(y);
        scale_products(y, at.in.sides[TEACHER]);
    }
    raw_quad rows[OWN_QUADS];
    load_steps(rows, memory.streamed, 0, (int)params.dim_first);
    const bool masked = !all_visible(p, at, DK ? STREAMED : TILE, DK ? TILE : STREAMED);
    if (masked)
        find_spans(memory.spans, p, at);
    logit_gradients<DK>(x, y, memory, params, group, masked);
    store_gradients(memory.gradient, x);
    if (masked)
        multiply_gradient<true>(sum, line, memory, rows, dtype, (int)params.dim_first);
    else
        multiply_gradient<false>(sum, line, memory, rows, dtype, (int)params.dim_first);
}

/* ---- dq ----------------------------------------------------------------------------------------------------- */

static __device__ void queries_tile(const backward_params &params, backward_memory &memory)
{
    const skl_problem &p = params.problem;
    const int64_t group = skl_group_size(&p);
    tile_position at = {memory.at, memory.at.queries.begin, memory.at.keys.begin};
    pipeline<COLUMNS> line(memory.stage);
    fragment<8> sum;
    clear(sum);
    load_row_stats(memory, params, at, group);
    line.begin([&] { return source_of<false>(at, TEACHER, at.in.head * group); });
#pragma unroll 1
    for (; at.key_first < at.in.keys.end; at.key_first += STREAMED)
        add_tile<false>(sum, line, memory, params, at, {at.in, at.query_first, at.key_first + STREAMED}, group);
    const skl_side side = params.teacher_side ? skl_teacher_of(&p, &params.call) : skl_student_of(&p, &params.call);
    store_sums(sum, *side.dq, side.grad_dtype,
               SKL_ROW(*side.dq, at.in.sequence.batch, at.in.own_head, at.in.sequence.query_begin), at.query_first,
               at.in.queries.end, params.dim_first, side.dim);
}

/* ---- dk ----------------------------------------------------------------------------------------------------- */

static __device__ work_item key_item_of(const backward_params &params, int64_t item)
{
    const skl_problem &p = params.problem;
    const int64_t heads = params.teacher_side ? p.key_heads_t : p.key_heads_s;
    const int64_t tiles = skl_ceil_div(p.len_k, TILE);
    work_item at = work_item_at(params, item, heads * tiles);
    if (!at.exists)
        return at;
    at.keys.begin = item % tiles * TILE;
    at.keys.end = at.sequence.key_count;
    at.queries = queries_seeing(p, at.sequence, at.keys.begin);
    return at;
}

static __device__ void keys_tile(const backward_params &params, backward_memory &memory)
{
    const skl_problem &p = params.problem;
    const int64_t group = skl_group_size(&p);
    const skl_side side = params.teacher_side ? skl_teacher_of(&p, &params.call) : skl_student_of(&p, &params.call);
    const int64_t sharing = side.heads / side.key_heads;
    const int64_t key_head = memory.at.item / skl_ceil_div(p.len_k, TILE) % side.key_heads;
    tile_position at = {memory.at, memory.at.queries.begin, memory.at.keys.begin};
    pipeline<COLUMNS> line(memory.stage);
    fragment<8> sum;
    clear(sum);
#pragma unroll 1
    for (int64_t shared = 0; shared < sharing; shared++) {
        __syncthreads();
        if (threadIdx.x == 0) {
            memory.at.own_head = key_head * sharing + shared;
            memory.at.head = params.teacher_side ? memory.at.own_head / group : memory.at.own_head;
        }
        __syncthreads();
        at.query_first = at.in.queries.begin;
        line.begin([&] { return source_of<true>(at, TEACHER, at.in.head * group); });
#pragma unroll 1
        for (; at.query_first < at.in.queries.end; at.query_first += STREAMED) {
            load_row_stats(memory, params, at, group);
            add_tile<true>(sum, line, memory, params, at, {at.in, at.query_first + STREAMED, at.key_first}, group);
        }
    }
    store_sums(sum, *side.dk, side.grad_dtype,
               SKL_ROW(*side.dk, at.in.sequence.batch, key_head, at.in.sequence.key_begin), at.key_first,
               key_rows(p, at.in.sequence), params.dim_first, side.dim);
}

/* ---- Kernels ------------------------------------------------------------------------------------------------ */

template <bool DK>
static __global__ void __launch_bounds__(THREADS, 1) general_gradient(const __grid_constant__ backward_params params)
{
    extern __shared__ __align__(16) unsigned char raw[];
    backward_memory &memory = *(backward_memory *)(void *)raw;
    const auto find = [&](int64_t item) {
        return DK ? key_item_of(params, item) : query_item(params, item, params.teacher_side != 0);
    };
    for_items(memory.at, find, [&] {
        if (DK && memory.at.keys.begin < key_rows(params.problem, memory.at.sequence))
            keys_tile(params, memory);
        if (!DK && memory.at.queries.begin < memory.at.queries.end)
            queries_tile(params, memory);
    });
}

/* One launch per slice of the gradient. */
template <bool DK> static cudaError_t launch_slices(const skl_cuda_params *params, const skl_cuda_launch *launch)
{
    const cudaError_t error = cudaFuncSetAttribute(general_gradient<DK>, cudaFuncAttributeMaxDynamicSharedMemorySize,
                                                   (int)sizeof(backward_memory));
    if (error != cudaSuccess)
        return error;
    record_launch("cuda_general", DK ? SKL_VARIANT_DK : SKL_VARIANT_DQ, 1);
    backward_params slice = backward_params_of(params, launch);
    for (; slice.dim_first < side_of(slice).dim; slice.dim_first += SLICE)
        general_gradient<DK><<<(unsigned)launch->sm_count * SKL_GENERAL_BLOCKS_PER_SM, THREADS,
                               sizeof(backward_memory), slice.call.stream>>>(slice);
    return cudaPeekAtLastError();
}

extern "C" cudaError_t skl_cuda_general_dq(const skl_cuda_params *params, const skl_cuda_launch *launch)
{
    return launch_slices<false>(params, launch);
}

extern "C" cudaError_t skl_cuda_general_dk(const skl_cuda_params *params, const skl_cuda_launch *launch)
{
    return launch_slices<true>(params, launch);
}
