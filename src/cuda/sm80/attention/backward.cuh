/* Gradients on tensor cores by mma.sync, sm_80 and up: 16-bit types, one teacher head a student head. Split: one
 * kernel gives dq with queries as own rows, its mirror image dk with keys as own rows (DK). Nothing is summed in
 * memory, so the bits are the same on every run, and no workspace is needed. sm80/tile.cuh says how a block works.
 *
 *   block   4 warps of 16 M own rows: 128 for M = 2, 64 for M = 1; 2 blocks a multiprocessor
 *   regs    own rows of both arguments (M DIM / 2), their gradient (M DIM / 2; at DIM = 256 an eighth of it a
 *           launch), logits of a step (16 M)
 *   shared  2 stages of 64 or 32 rows of both arguments, and what a backward knows of as many queries (DK)
 *
 *   stage n + 1 is copied  |  for each of 4 steps of stage n: X, Y (mma); G, in 16 bits; gradient += G rows (mma)
 *
 * G leaves one product in the layout in which the next one wants it: it never goes through memory. Under GQA the
 * block of a key tile walks through all query heads that share the key head. */
#ifndef SKL_CUDA_SM80_ATTENTION_BACKWARD_CUH
#define SKL_CUDA_SM80_ATTENTION_BACKWARD_CUH

#include "base/convert.h"
#include "cuda/common/row_stats.cuh"
#include "cuda/sm80/mma_tile.cuh"

namespace sm80
{

constexpr int STEP_ROWS = 16; /* streamed rows of a step: G is the 16 x 16 operand of the next product */

template <int DIM> struct backward_memory {
    static constexpr int ROWS = STAGE_ROWS<DIM>;
    stage_memory<DIM> stages[STAGES];
    row_stats stats[STAGES][ROWS]; /* DK: as they lie in memory, LSEs natural */
    int poisoned[ROWS];            /* streamed rows that hold a value that is not finite */
};

/* ---- Gradient of the logits --------------------------------------------------------------------------------- */

/* WIDTH dimensions of it: all, or a slice of a head of more than 128; each launch gives one. */
template <int DIM> constexpr int SLICE = DIM > 128 ? 32 : DIM;

template <int WIDTH, int M> struct own_gradient {
    float sum[M][WIDTH / 8][4];

    __device__ void scale(float factor)
    {
#pragma unroll
        for (int m = 0; m < M; m++)
#pragma unroll
            for (int e = 0; e < WIDTH / 2; e++)
                sum[m][e / 4][e % 4] *= factor;
    }
};

/* Largest finite magnitude that the warp holds. */
template <int M> __device__ inline float largest_of(const logits<M, 2> &g)
{
    float largest = 0.0F;
#pragma unroll
    for (int m = 0; m < M; m++)
#pragma unroll
        for (int e = 0; e < 8; e++) {
            const float size = fabsf(g.at[m][e / 4][e % 4]);
            largest = size < INFINITY ? fmaxf(largest, size) : largest;
        }
    return warp_max(largest);
}

/* ---- One tile of own rows ----------------------------------------------------------------------------------- */

/* sum += a, in 16 bits, times the 16 streamed rows from `row` on. */
template <typename ELEMENT, int DIM, int WIDTH, int M>
__device__ inline void add_operand(own_gradient<WIDTH, M> &own, const uint32_t (&a)[M][4], uint32_t operand, int row)
{
#pragma unroll
    for (int pair = 0; pair < WIDTH / 16; pair++) {
        uint32_t b[4];
        ldmatrix_x4_transposed(b, at_chunk<DIM>(operand, row, 2 * pair));
#pragma unroll
        for (int m = 0; m < M; m++) {
            mma_m16n8k16(own.sum[m][2 * pair], a[m], b[0], b[1], ELEMENT());
            mma_m16n8k16(own.sum[m][2 * pair + 1], a[m], b[2], b[3], ELEMENT());
        }
    }
}

/* sum += g times the 16 streamed rows from `row` on. */
template <typename ELEMENT, int DIM, int WIDTH, int M>
__device__ inline void add_product(own_gradient<WIDTH, M> &own, float inverse_unit, const logits<M, 2> &g,
                                   uint32_t operand, int row)
{
    uint32_t a[M][4];
#pragma unroll
    for (int m = 0; m < M; m++)
#pragma unroll
        for (int part = 0; part < 4; part++) {
            const float(&pair)[4] = g.at[m][part / 2];
            a[m][part] = pack(pair[part % 2 * 2] * inverse_unit, pair[part % 2 * 2 + 1] * inverse_unit, ELEMENT());
        }
    add_operand<ELEMENT, DIM>(own, a, operand, row);
}

/* A query's facts belong to own rows, or to streamed ones (DK). Here LSEs are in base 2. */
template <int M, bool DK> struct query_row_stats;

template <int M> struct query_row_stats<M, false> {
    row_stats own[M][2];

    __device__ void load_own(const backward_params &params, const skl_sequence &s, int64_t head, int64_t first,
                             int last_row)
    {
#pragma unroll
        for (int m = 0; m < M; m++)
#pragma unroll
            for (int half = 0; half < 2; half++) {
                const int64_t query = first + min(acc_row<M>(m, half), last_row);
                own[m][half] = {row_stat(params, 0, s, head, query) * SKL_LOG2E,
                                row_stat(params, 1, s, head, query) * SKL_LOG2E, row_stat(params, 2, s, head, query),
                                1.0F};
            }
    }

    __device__ void load_step(const row_stats *)
    {
    }

    __device__ const row_stats &of(int m, int, int e) const
    {
        return own[m][e / 2];
    }

    /* Own rows are weighed when they are stored. */
    __device__ static float weigh(float g, const row_stats &)
    {
        return g;
    }

    template <int ROWS> __device__ static float largest_weight(const row_stats *)
    {
        return 1.0F;
    }
};

template <int M> struct query_row_stats<M, true> {
    row_stats streamed[2][2];

    __device__ void load_own(const backward_params &, const skl_sequence &, int64_t, int64_t, int)
    {
    }

    __device__ void load_step(const row_stats *first)
    {
#pragma unroll
        for (int e = 0; e < 4; e++) {
            const float4 stat = *(const float4 *)(const void *)&first[acc_column(e / 2, e % 2)];
            streamed[e / 2][e % 2] = {stat.x * SKL_LOG2E, stat.y * SKL_LOG2E, stat.z, stat.w};
        }
    }

    __device__ const row_stats &of(int, int block, int e) const
    {
        return streamed[block][e % 2];
    }

    __device__ static float weigh(float g, const row_stats &query)
    {
        return query.grad * g;
    }

    template <int ROWS> __device__ static float largest_weight(const row_stats *stage)
    {
        const int lane = (int)threadIdx.x % 32;
        return warp_max(fmaxf(fabsf(stage[lane].grad), fabsf(stage[ROWS - 32 + lane].grad)));
    }
};

/* Starts copying the facts of a stage's queries, `left` of which are there. */
template <int ROWS>
__device__ inline void copy_row_stats(row_stats (&to)[ROWS], const backward_params &params, const skl_sequence &s,
                                      int64_t head, int64_t first, int left)
{
    const int row = (int)threadIdx.x % ROWS;
    constexpr int SHARE = THREADS / ROWS; /* threads of a query */
#pragma unroll
    for (int which = 0; which < 4; which++) {
        const skl_input source = row_stat_source(params, which);
        if (source.data != NULL && (int)threadIdx.x / ROWS % SHARE == which % SHARE)
            cp_async_4(shared_address(&to[row].lse_a + which),
                       (const float *)source.data + SKL_ROW(source, s.batch, head, s.query_begin + first + row),
                       row < left);
    }
}

/* What is not copied. */
template <int ROWS> __device__ inline void clear_row_stats(row_stats (&stats)[STAGES][ROWS])
{
    for (int row = (int)threadIdx.x; row < STAGES * ROWS; row += THREADS)
        stats[row / ROWS][row % ROWS] = {0.0F, 0.0F, 0.0F, 1.0F};
}

/* Operands of one stage. */
struct stage_operands {
    uint32_t a, b, gradient; /* rows of both arguments, and those of the gradient's side transposed */
    const row_stats *stats;  /* DK */
};

/* A stage whose rows all of the warp's rows meet. */
template <typename ELEMENT, int DIM, int M, bool DK, bool OF_B>
__device__ inline void add_full_stage(own_gradient<SLICE<DIM>, M> &gradient, gradient_unit<ELEMENT> &unit,
                                      const own_rows<DIM, M> &own_a, float scale_a, const own_rows<DIM, M> &own_b,
                                      float scale_b, const stage_operands &stage, query_row_stats<M, DK> &queries)
{
    if (OF_B && unit.MOVES) /* |S - P| <= 1 */
        unit.fit(gradient, queries.template largest_weight<STAGE_ROWS<DIM>>(stage.stats));
#pragma unroll 1
    for (int row = 0; row < STAGE_ROWS<DIM>; row += STEP_ROWS) {
        logits<M, 2> x, y;
        multiply<ELEMENT>(x, own_a, stage.a, row);
        multiply<ELEMENT>(y, own_b, stage.b, row);
        queries.load_step(stage.stats + row);
#pragma unroll
        for (int m = 0; m < M; m++)
#pragma unroll
            for (int block = 0; block < 2; block++)
#pragma unroll
                for (int e = 0; e < 4; e++) {
                    const row_stats &query = queries.of(m, block, e);
                    const float g = pair_gradient<OF_B>(fmaf(x.at[m][block][e], scale_a, -query.lse_a),
                                                        fmaf(y.at[m][block][e], scale_b, -query.lse_b), query);
                    x.at[m][block][e] = queries.weigh(g, query);
                }
        if (!OF_B && unit.MOVES)
            unit.fit(gradient, largest_of(x));
        add_product<ELEMENT, DIM>(gradient, unit.inverse(), x, stage.gradient, row);
    }
}

/* Any other stage: masks, caps, poison. Pairs that are masked add exactly 0. */
template <typename ELEMENT, int DIM, int M, bool DK>
__device__ inline void
add_masked_stage(own_gradient<SLICE<DIM>, M> &gradient, gradient_unit<ELEMENT> &unit, const own_rows<DIM, M> &own_a,
                 const own_rows<DIM, M> &own_b, const backward_params &params, bool of_b, const stage_operands &stage,
                 query_row_stats<M, DK> &queries, const int *poisoned, const band32 &band, int last_row, int first)
{
    const skl_cuda_argument &own_side = of_b ? params.b : params.a;
#pragma unroll 1
    for (int row = 0; row < STAGE_ROWS<DIM>; row += STEP_ROWS) {
        logits<M, 2> x, y;
        multiply<ELEMENT>(x, own_a, stage.a, row);
        multiply<ELEMENT>(y, own_b, stage.b, row);
        queries.load_step(stage.stats + row);
        const float scale_a = cap_logits(x, params.a);
        const float scale_b = cap_logits(y, params.b);
#pragma unroll
        for (int m = 0; m < M; m++)
#pragma unroll
            for (int block = 0; block < 2; block++)
#pragma unroll
                for (int e = 0; e < 4; e++) {
                    const row_stats &query = queries.of(m, block, e);
                    const float u = fmaf(x.at[m][block][e], scale_a, -query.lse_a);
                    const float v = fmaf(y.at[m][block][e], scale_b, -query.lse_b);
                    float g = of_b ? pair_gradient<true>(u, v, query) : pair_gradient<false>(u, v, query);
                    if (own_side.capped) { /* 1 - tanh^2 */
                        const float logit = of_b ? y.at[m][block][e] : x.at[m][block][e];
                        const float ratio = logit * own_side.inverse_softcap_2;
                        g *= 1.0F - ratio * ratio;
                    }
                    const int column = row + acc_column(block, e % 2);
                    const range32 meets = band.of(acc_row<M>(m, e / 2));
                    const bool seen = first + column >= meets.begin && first + column < meets.end &&
                                      (!unit.MOVES || acc_row<M>(m, e / 2) <= last_row);
                    g = poisoned[column] ? NAN : queries.weigh(g, query);
                    x.at[m][block][e] = seen ? g : 0.0F;
                }
        if (unit.MOVES)
            unit.fit(gradient, largest_of(x));
        add_product<ELEMENT, DIM>(gradient, unit.inverse(), x, stage.gradient, row);
    }
}

/* A masked pair weighs 0, but 0 times a value that is not finite is NaN: such rows lose the value before the product,
 * and give NaN to just those rows that meet them. */
template <typename ELEMENT, int DIM>
__device__ inline void find_poison(staged_rows<DIM> &rows, int (&poisoned)[STAGE_ROWS<DIM>])
{
    constexpr int ROWS = STAGE_ROWS<DIM>;
    if (threadIdx.x < ROWS)
        poisoned[threadIdx.x] = 0;
    __syncthreads();
    for (int at = (int)threadIdx.x; at < ROWS * DIM / 8; at += THREADS) {
        uint4 &chunk = rows.chunks[at / (DIM / 8)][at % (DIM / 8)];
        if (!all_finite<ELEMENT>(chunk)) {
            chunk = make_uint4(0, 0, 0, 0);
            poisoned[at / (DIM / 8)] = 1;
        }
    }
    __syncthreads();
}

template <typename ELEMENT, int DIM, int M, bool DK>
__device__ inline void sum_streamed(own_gradient<SLICE<DIM>, M> &gradient, gradient_unit<ELEMENT> &unit,
                                    const backward_params &params, backward_memory<DIM> &memory,
                                    const skl_sequence &s, int64_t head, int64_t own_first, int last_row)
{
    constexpr int ROWS = STAGE_ROWS<DIM>;
    const skl_cuda_argument &a = params.a, &b = params.b;
    const bool of_b = is_grad_of_b(params);
    const bool capped = a.capped || b.capped;
    own_rows<DIM, M> own_a, own_b;
    load_own(own_a, memory.stages,
             (DK ? keys_of<ELEMENT>(a, s, head) : queries_of<ELEMENT>(a, s, head)).from(own_first), last_row + 1);
    load_own(own_b, memory.stages,
             (DK ? keys_of<ELEMENT>(b, s, head) : queries_of<ELEMENT>(b, s, head)).from(own_first), last_row + 1);

    const skl_band band = DK ? skl_query_band(&params.problem, &s) : skl_key_band(&params.problem, &s);
    const streamed_band streamed = stream_for(band, own_first, own_first + last_row);
    const reach warp = reach_of(streamed.band, (int)threadIdx.x / 32 * 16 * M, 16 * M);
    const row_source<ELEMENT> from_a =
        (DK ? queries_of<ELEMENT>(a, s, head) : keys_of<ELEMENT>(a, s, head)).from(streamed.origin);
    const row_source<ELEMENT> from_b =
        (DK ? queries_of<ELEMENT>(b, s, head) : keys_of<ELEMENT>(b, s, head)).from(streamed.origin);

    query_row_stats<M, DK> queries;
    queries.load_own(params, s, head, own_first, last_row);
    if (DK)
        copy_row_stats(memory.stats[0], params, s, head, streamed.origin, streamed.band.count);
    copy_rows(memory.stages[0].a, from_a, 0, streamed.band.count);
    copy_rows(memory.stages[0].b, from_b, 0, streamed.band.count);
    cp_async_commit();
    for (int first = 0, at = 0; first < streamed.needed; first += ROWS, at = 1 - at) {
        cp_async_wait<0>();
        /* Rows behind the last one hold anything, and must not move the unit: that is for the edge stages, too. */
        const bool ragged = unit.MOVES && last_row < WARPS * 16 * M - 1;
        const bool edge = capped || ragged || !covers(warp.all, first, ROWS);
        const bool any_masked = __syncthreads_or(edge); /* also: this stage is complete, and the other one free */
        if (first + ROWS < streamed.needed) {
            copy_rows(memory.stages[1 - at].a, from_a, first + ROWS, streamed.band.count);
            copy_rows(memory.stages[1 - at].b, from_b, first + ROWS, streamed.band.count);
            if (DK)
                copy_row_stats(memory.stats[1 - at], params, s, head, streamed.origin + first + ROWS,
                               streamed.band.count - first - ROWS);
        }
        cp_async_commit();
        stage_memory<DIM> &rows = memory.stages[at];
        const stage_operands stage = {logit_operand<2>(rows.a), logit_operand<2>(rows.b),
                                      at_chunk<DIM>(gradient_operand(of_b ? rows.b : rows.a), 0,
                                                    SLICE<DIM> < DIM ? (int)params.dim_first / 8 : 0),
                                      memory.stats[at]};
        if (any_masked)
            find_poison<ELEMENT>(of_b ? rows.b : rows.a, memory.poisoned);
        if (!meets(warp.any, first, ROWS))
            continue;
        if (edge)
            add_masked_stage<ELEMENT, DIM, M, DK>(gradient, unit, own_a, own_b, params, of_b, stage, queries,
                                                  memory.poisoned, streamed.band, last_row, first);
        else if (of_b)
            add_full_stage<ELEMENT, DIM, M, DK, true>(gradient, unit, own_a, a.scale, own_b, b.scale, stage, queries);
        else
            add_full_stage<ELEMENT, DIM, M, DK, false>(gradient, unit, own_a, a.scale, own_b, b.scale, stage,
                                                       queries);
    }
    cp_async_wait<0>();
    __syncthreads(); /* the stages are free */
}

/* ---- Kernels ------------------------------------------------------------------------------------------------ */

/* Whether the row met anything: if not its gradient is 0, whatever comes from upstream. */
template <int M, bool DK>
__device__ inline bool is_live(const backward_params &params, const row_tile<M, DK> &place, int64_t row)
{
    const skl_range sees = skl_visible(&params.problem, &place.sequence, row);
    return row < place.rows && (DK || sees.begin < sees.end);
}

template <int WIDTH, int M, bool DK>
__device__ inline void store_gradient(const own_gradient<WIDTH, M> &gradient, const backward_params &params,
                                      const row_tile<M, DK> &place, float factor)
{
    const skl_side side = side_of(params);
    const skl_output out = DK ? *side.dk : *side.dq;
    const int64_t base =
        SKL_ROW(out, place.sequence.batch, place.head, DK ? place.sequence.key_begin : place.sequence.query_begin);
#pragma unroll
    for (int m = 0; m < M; m++)
#pragma unroll
        for (int half = 0; half < 2; half++) {
            const int64_t row = place.first + acc_row<M>(m, half);
            if (row >= place.stored)
                continue;
            const bool live = is_live(params, place, row);
            const float weight = live && !DK ? row_stat(params, 3, place.sequence, place.head, row) : 1.0F;
#pragma unroll
            for (int n = 0; n < WIDTH / 4; n++) {
                const float sum = gradient.sum[m][n / 2][half * 2 + n % 2];
                const int c = (int)params.dim_first + acc_column(n / 2, n % 2);
                if (c < side.dim)
                    skl_store(out.data, side.grad_dtype, base + row * out.stride_row + c,
                              live ? sum * factor * weight : 0.0F);
            }
        }
}

template <typename ELEMENT, int DIM, int M, bool DK>
__global__ void __launch_bounds__(THREADS, 2) gradient_kernel(const __grid_constant__ backward_params params)
{
    extern __shared__ __align__(128) unsigned char raw[];
    backward_memory<DIM> &memory = *(backward_memory<DIM> *)(void *)raw;
    row_tile<M, DK> place;
    if (!place.find(params))
        return;
    own_gradient<SLICE<DIM>, M> gradient = {};
    gradient_unit<ELEMENT> unit;
    const skl_cuda_argument &side = is_grad_of_b(params) ? params.b : params.a;
    const int sharing = DK ? side.heads_per_key : 1;
    if (DK)
        clear_row_stats(memory.stats); /* seen by all behind the first barrier */
    const int last_row = (int)skl_min(WARPS * 16 * M, place.rows - place.first) - 1;
    for (int n = 0; n < sharing && last_row >= 0; n++)
        sum_streamed<ELEMENT, DIM, M, DK>(gradient, unit, params, memory, place.sequence, place.head * sharing + n,
                                          place.first, last_row);
    row_tile<M, DK> again; /* the first one need not stay in registers all the way */
    (void)again.find(params);
    store_gradient(gradient, params, again,
                   unit.value() * (params.teacher_side ? params.problem.scale_t : params.problem.scale_s));
}

/* One launch per slice of the gradient. */
template <typename ELEMENT, int DIM, int M, bool DK>
cudaError_t launch_gradient(const char *kernel, const skl_cuda_params *params, const skl_cuda_launch *launch)
{
    const cudaError_t error =
        cudaFuncSetAttribute(gradient_kernel<ELEMENT, DIM, M, DK>, cudaFuncAttributeMaxDynamicSharedMemorySize,
                             (int)sizeof(backward_memory<DIM>));
    if (error != cudaSuccess)
        return error;
    backward_params slice = backward_params_of(params, launch);
    const skl_problem *const p = &slice.problem;
    const dim3 blocks =
        grid_of(p->batch, row_tile<M, DK>::heads(slice), skl_ceil_div(DK ? p->len_k : p->len_q, TILE_ROWS<M>));
    record_launch(kernel, DK ? SKL_VARIANT_DK : SKL_VARIANT_DQ, 1);
    for (; slice.dim_first < side_of(slice).dim; slice.dim_first += SLICE<DIM>)
        gradient_kernel<ELEMENT, DIM, M, DK>
            <<<blocks, THREADS, sizeof(backward_memory<DIM>), slice.call.stream>>>(slice);
    return cudaPeekAtLastError();
}

} // namespace sm80

#endif
