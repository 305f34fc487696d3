/* General backward of any problem, as two kernels: dq with stationary queries, dk with stationary keys (DK). No
 * atomics, so the bits are the same on every run. A launch computes up to 128 dimensions of one gradient. The
 * products are f32 FFMAs, at 20 useful TFLOP/s on an H200 (67 at peak) with heads of 128: x and y are computed again
 * for each gradient.
 *
 *   block   128 stationary x 64 streamed rows per tile, 8 x 4 pairs and 8 x 8 sums of the gradient per thread;
 *           1 resident per SM, grid stride over the tiles of stationary rows
 *   regs    255 per thread: the sums, x and y, with teacher groups also the logits of a head; loads in flight
 *   shared  72 KB: two stages of both operands, the logit gradients of a tile, row stats of its queries
 *
 *   per tile:  x (all heads of a teacher group), y -> logit gradients -> shared memory -> sum += gradients . rows */
#include "cuda/general/gradient_product.cuh"

struct row_stats {
    skl_lse2 lse_t, lse_s; /* lse_t: of grad_head for a teacher gradient, otherwise of the group's first head */
    float factor;          /* upstream gradient times scale, divided by the group size for a teacher gradient */
    float offset;          /* KL or dot_t: see pair_gradient() */
};

struct backward_memory {
    pipeline_memory pipe;
    __align__(16) gradient_tile gradient; /* gradient of the logits */
    row_stats stats[TILE];
    skl_lse2 lse_t[TILE]; /* LSEs of one head of the teacher group */
    key_span spans[TILE];
    row_source streamed; /* rows that the logit gradients are multiplied with */
    work_item work;
};

/* Whether the gradient is taken with respect to B, the second argument of the KL. */
static __device__ bool wrt_b_of(const backward_params &params)
{
    return (params.teacher_side != 0) == (params.problem.direction == SKL_KL_REVERSE);
}

/* dKL/dlogit without the row's factor.
 *
 *     log_p       log2 of the probability that belongs to the logit: A, B, or P_h of a head h in a teacher group
 *     log_ratio   log2 A - log2 B
 *     log_p_a     log2 A; for a head in a teacher group log_p + log_ratio
 *
 *     wrt A   2^log_p (ln2 log_ratio - offset)     offset = KL; for a head in a teacher group dot_t
 *     wrt B   -2^log_p offset - 2^log_p_a          offset = -1; for a head in a teacher group dot_t */
static __device__ float pair_gradient(bool wrt_b, float log_p, float log_p_a, float log_ratio, float offset)
{
    const float p = ex2(log_p);
    return wrt_b ? fmaf(p, -offset, -ex2(log_p_a)) : p * fmaf(SKL_LN2, log_ratio, -offset);
}

/* 1 - (logit / cap)^2; exactly 0 where the logit is the cap in base 2, as scale_products rounds it. */
static __device__ float softcap_slope(float softcap, float logit2)
{
    const float ratio = logit2 / (softcap * SKL_LOG2E);
    return fmaf(-ratio, ratio, 1.0F);
}

/* Loads the row stats of the queries of a tile. Other threads may read them after the next barrier. */
static __device__ void load_row_stats(backward_memory &memory, const backward_params &params,
                                      const tile_position &tile, int64_t group)
{
    const skl_inputs &in = params.call.inputs;
    const skl_input kl = skl_known_rows(params.rows_known, &in.kl, &params.call.rows.kl);
    const skl_input dot_t = skl_known_rows(params.rows_known, &in.dot_t, &params.call.rows.dot_t);
    const bool wrt_group_head = group > 1 && params.teacher_side;
    const skl_sequence &s = tile.work.sequence;
    const int64_t query = tile.query_first + threadIdx.x;
    if (threadIdx.x >= TILE || query >= tile.work.queries.end)
        return;
    const float scale = params.teacher_side ? params.problem.scale_t / (float)group : params.problem.scale_s;
    const float grad = in.grad_kl.data != NULL ? skl_row_value(&in.grad_kl, &s, tile.work.head, query) : 1.0F;
    row_stats stats;
    stats.lse_t = skl_lse2_of(
        skl_row_value(&in.lse_t, &s, wrt_group_head ? tile.work.grad_head : tile.work.head * group, query));
    stats.lse_s = skl_lse2_of(skl_row_value(&in.lse_s, &s, tile.work.head, query));
    stats.factor = grad * scale;
    if (wrt_group_head)
        stats.offset = skl_row_value(&dot_t, &s, tile.work.grad_head, query);
    else
        stats.offset = wrt_b_of(params) ? -1.0F : skl_row_value(&kl, &s, tile.work.head, query);
    memory.stats[threadIdx.x] = stats;
}

/* x = log2 A - log2 B, from x = log2 P and the student's logits y. */
template <bool DK>
static __device__ void log_ratios(fragment<COLUMNS> &x, const fragment<COLUMNS> &y, const backward_memory &memory,
                                  bool reverse)
{
#pragma unroll
    for (int i = 0; i < ROWS; i++)
#pragma unroll
        for (int j = 0; j < COLUMNS; j++) {
            const float log_p_s = log_probability(y.at[i][j], memory.stats[DK ? acc_column(j) : acc_row(i)].lse_s);
            x.at[i][j] = reverse ? log_p_s - x.at[i][j] : x.at[i][j] - log_p_s;
        }
}

/* x = gradient of the logits, exactly 0 for masked pairs. On entry x and y are the logits of teacher and student
 * (with a teacher group, x = log2 P). For the gradient wrt a head in a teacher group, x = log2 A - log2 B on entry,
 * and y = logits of that head. */
template <bool DK>
static __device__ void logit_gradients(fragment<COLUMNS> &x, const fragment<COLUMNS> &y,
                                       const backward_memory &memory, const backward_params &params, int64_t group,
                                       bool masked)
{
    const skl_problem &p = params.problem;
    const bool teacher_side = params.teacher_side != 0;
    const bool wrt_group_head = group > 1 && teacher_side;
    const bool reverse = p.direction == SKL_KL_REVERSE;
    const bool wrt_b = wrt_b_of(params);
    const float softcap = teacher_side ? p.softcap_t : p.softcap_s;
    const bool linear = p.link_s == SKL_LINK_LINEAR && !teacher_side;
    const key_span all = {0, TILE};
#pragma unroll
    for (int query = 0; query < (DK ? COLUMNS : ROWS); query++) {
        const int tile_query = DK ? acc_column(query) : acc_row(query);
        const row_stats stats = memory.stats[tile_query];
        const key_span span = masked ? memory.spans[tile_query] : all;
#pragma unroll
        for (int key = 0; key < (DK ? ROWS : COLUMNS); key++) {
            float &x_ij = x.at[DK ? key : query][DK ? query : key];
            const float y_ij = y.at[DK ? key : query][DK ? query : key];
            const float logit = teacher_side && !wrt_group_head ? x_ij : y_ij;
            const float log_x = group > 1 ? x_ij : log_probability(x_ij, stats.lse_t);
            const float log_y = log_probability(y_ij, wrt_group_head ? stats.lse_t : stats.lse_s);
            const float log_p = teacher_side && !wrt_group_head ? log_x : log_y;
            const float log_ratio = wrt_group_head ? x_ij : reverse ? log_y - log_x : log_x - log_y;
            const float log_p_a = wrt_group_head ? log_p + log_ratio : reverse ? log_y : log_x;
            float g = stats.factor * pair_gradient(wrt_b, log_p, log_p_a, log_ratio, stats.offset);
            if (linear)
                g *= linear_slope_of_logit(logit);
            if (skl_caps_logits(softcap))
                g *= softcap_slope(softcap, logit);
            x_ij = sees(span, DK ? acc_row(key) : acc_column(key)) ? g : 0.0F;
        }
    }
}

/* Adds a tile to the sums of the gradient, and starts to load the tile `next`. */
template <bool DK>
static __device__ void add_tile(fragment<8> &sum, pipeline<COLUMNS> &pipe, backward_memory &memory,
                                const backward_params &params, const tile_position &tile, const tile_position &next,
                                int64_t group)
{
    const skl_problem &p = params.problem;
    const int side = params.teacher_side ? TEACHER : STUDENT;
    const skl_dtype dtype = params.teacher_side ? p.dtype_t : p.dtype_s;
    const bool wrt_group_head = group > 1 && params.teacher_side;
    if (threadIdx.x == 0)
        memory.streamed = operands_of<DK>(tile, side, tile.work.grad_head).streamed;

    const auto next_operands = [&] { return operands_of<DK>(next, TEACHER, tile.work.head * group); };
    const auto lse_of = [&](int64_t h) {
        return skl_lse2_of(skl_row_value(&params.call.inputs.lse_t, &tile.work.sequence, tile.work.head * group + h,
                                         tile.query_first + threadIdx.x));
    };
    fragment<COLUMNS> x, y;
    logit_tiles<DK>(x, y, pipe, tile, group, memory.lse_t, lse_of, [&] {
        return wrt_group_head ? operands_of<DK>(tile, TEACHER, tile.work.grad_head) : next_operands();
    });
    if (wrt_group_head) {
        log_ratios<DK>(x, y, memory, p.direction == SKL_KL_REVERSE);
        pipe.prefetch(next_operands);
        pipe.multiply_tile(y);
        scale_products(y, tile.work.sides[TEACHER]);
    }
    raw_quad rows[TILE_QUADS];
    load_steps(rows, memory.streamed, 0, (int)params.dim_first);
    const bool masked = !all_visible(p, tile, DK ? STREAMED_ROWS : TILE, DK ? TILE : STREAMED_ROWS);
    if (masked)
        find_spans(memory.spans, p, tile);
    logit_gradients<DK>(x, y, memory, params, group, masked);
    store_gradients(memory.gradient, x);
    if (masked)
        multiply_gradient<true>(sum, pipe, memory, rows, dtype, (int)params.dim_first);
    else
        multiply_gradient<false>(sum, pipe, memory, rows, dtype, (int)params.dim_first);
}

/* ---- dq ----------------------------------------------------------------------------------------------------- */

static __device__ void dq_tile(const backward_params &params, backward_memory &memory)
{
    const skl_problem &p = params.problem;
    const int64_t group = skl_group_size(&p);
    tile_position tile = {memory.work, memory.work.queries.begin, memory.work.keys.begin};
    pipeline<COLUMNS> pipe(memory.pipe);
    fragment<8> sum;
    clear(sum);
    load_row_stats(memory, params, tile, group);
    pipe.begin([&] { return operands_of<false>(tile, TEACHER, tile.work.head * group); });
#pragma unroll 1
    for (; tile.key_first < tile.work.keys.end; tile.key_first += STREAMED_ROWS)
        add_tile<false>(sum, pipe, memory, params, tile,
                        {tile.work, tile.query_first, tile.key_first + STREAMED_ROWS}, group);
    const skl_side side = params.teacher_side ? skl_teacher_of(&p, &params.call) : skl_student_of(&p, &params.call);
    store_sums(sum, *side.dq, side.grad_dtype,
               SKL_ROW(*side.dq, tile.work.sequence.batch, tile.work.grad_head, tile.work.sequence.query_begin),
               tile.query_first, tile.work.queries.end, params.dim_first, side.dim);
}

/* ---- dk ----------------------------------------------------------------------------------------------------- */

static __device__ void dk_tile(const backward_params &params, backward_memory &memory)
{
    const skl_problem &p = params.problem;
    const int64_t group = skl_group_size(&p);
    const skl_side side = params.teacher_side ? skl_teacher_of(&p, &params.call) : skl_student_of(&p, &params.call);
    const int64_t heads_per_key = side.heads / side.key_heads;
    const int64_t key_head = memory.work.index / skl_ceil_div(p.len_k, TILE) % side.key_heads;
    tile_position tile = {memory.work, memory.work.queries.begin, memory.work.keys.begin};
    pipeline<COLUMNS> pipe(memory.pipe);
    fragment<8> sum;
    clear(sum);
#pragma unroll 1
    for (int64_t n = 0; n < heads_per_key; n++) {
        __syncthreads();
        if (threadIdx.x == 0) {
            memory.work.grad_head = key_head * heads_per_key + n;
            memory.work.head = params.teacher_side ? memory.work.grad_head / group : memory.work.grad_head;
        }
        __syncthreads();
        tile.query_first = tile.work.queries.begin;
        pipe.begin([&] { return operands_of<true>(tile, TEACHER, tile.work.head * group); });
#pragma unroll 1
        for (; tile.query_first < tile.work.queries.end; tile.query_first += STREAMED_ROWS) {
            load_row_stats(memory, params, tile, group);
            add_tile<true>(sum, pipe, memory, params, tile,
                           {tile.work, tile.query_first + STREAMED_ROWS, tile.key_first}, group);
        }
    }
    store_sums(sum, *side.dk, side.grad_dtype,
               SKL_ROW(*side.dk, tile.work.sequence.batch, key_head, tile.work.sequence.key_begin), tile.key_first,
               key_rows(p, tile.work.sequence), params.dim_first, side.dim);
}

/* ---- Kernels ------------------------------------------------------------------------------------------------ */

template <bool DK>
static __global__ void __launch_bounds__(THREADS, 1) general_gradient(const __grid_constant__ backward_params params)
{
    extern __shared__ __align__(16) unsigned char raw[];
    backward_memory &memory = *(backward_memory *)(void *)raw;
    const auto find = [&](int64_t index) {
        return DK ? key_tile_item(params, index, side_of(params).key_heads)
                  : query_item(params, index, params.teacher_side != 0);
    };
    for_each_item(memory.work, find, [&] {
        if (DK && memory.work.keys.begin < key_rows(params.problem, memory.work.sequence))
            dk_tile(params, memory);
        if (!DK && memory.work.queries.begin < memory.work.queries.end)
            dq_tile(params, memory);
    });
}

/* One launch per slice of SLICE dimensions. */
template <bool DK> static cudaError_t launch_slices(const skl_cuda_params *params, const skl_cuda_launch *launch)
{
    record_launch("cuda_general", DK ? SKL_VARIANT_DK : SKL_VARIANT_DQ, 1);
    cudaError_t error = cudaSuccess;
    backward_params slice = backward_params_of(params, launch);
    for (; slice.dim_first < side_of(slice).dim && error == cudaSuccess; slice.dim_first += SLICE)
        error = launch_general(general_gradient<DK>, slice, launch, sizeof(backward_memory));
    return error;
}

extern "C" cudaError_t skl_cuda_general_dq(const skl_cuda_params *params, const skl_cuda_launch *launch)
{
    return launch_slices<false>(params, launch);
}

extern "C" cudaError_t skl_cuda_general_dk(const skl_cuda_params *params, const skl_cuda_launch *launch)
{
    return launch_slices<true>(params, launch);
}
