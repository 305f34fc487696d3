/* Backward by mma.sync, sm_80 and up: dq or dk of one side. 16-bit types, one teacher head per student head. dq has
 * queries as stationary rows; dk (DK) is the same kernel mirrored, with keys as stationary rows. mma_tile.cuh
 * describes the tiles.
 *
 * Three products per pair and gradient (X, Y, the gradient) on the tensor cores, two exponentials on the special
 * function units. dq and dk each compute X and Y. In return nothing is summed in memory: results have the same bits
 * on every run, and there is no workspace.
 *
 *   block      4 warps of 16 M stationary rows: 128 rows for M = 2, 64 for M = 1; 2 blocks per SM
 *   registers  stationary rows of A and B (M DIM / 2), their gradient (M DIM / 2; at DIM = 256 one eighth of it per
 *              launch), logits of a step (16 M)
 *   shared     2 stages of 64 or 32 rows of A and B, and for dk the row stats of their queries
 *
 *   cp.async   | stage n + 1                   | stage n + 2
 *   warps      | stage n, in steps of 16 rows: | stage n + 1
 *              |   X, Y (mma)                  |
 *              |   G in 16 bits                |
 *              |   gradient += G rows (mma)    |
 *
 * The accumulator layout of the logits is the operand layout of G, so G stays in registers. Under GQA the block of a
 * key tile goes through all query heads that share the key head. */
#ifndef SKL_CUDA_SM80_ATTENTION_BACKWARD_CUH
#define SKL_CUDA_SM80_ATTENTION_BACKWARD_CUH

#include "base/convert.h"
#include "cuda/common/gradient_row.cuh"
#include "cuda/common/launch.cuh"
#include "cuda/common/row_stats.cuh"
#include "cuda/sm80/mma_tile.cuh"

namespace sm80
{

constexpr int STEP_ROWS = 16; /* streamed rows of a step: G is the 16 x 16 operand of the next product */

template <int DIM> struct backward_memory {
    static constexpr int ROWS = STAGE_ROWS<DIM>;
    smem_stage<DIM> stages[STAGES];
    row_stats stats[STAGES][ROWS];  /* DK: copied unchanged, LSEs in nats */
    int poisoned[ROWS];             /* whether a streamed row has a non-finite value */
    row_ranges<WARPS * 32> visible; /* up to two tiles of 16 rows per warp */
    skl_sequence sequence;          /* in shared memory to save registers */
};

/* ---- Gradient of the logits --------------------------------------------------------------------------------- */

/* Dimensions of the gradient per launch: all, or a slice of a head of more than 128. */
template <int DIM> constexpr int SLICE = DIM > 128 ? 32 : DIM;

/* Accumulators of WIDTH dimensions of the gradient. */
template <int WIDTH, int M> struct gradient_acc {
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

/* Largest finite magnitude in the warp. */
template <int M> __device__ inline float largest_of(const logits<M, 2> &g)
{
    float largest = 0.0F;
#pragma unroll
    for (int m = 0; m < M; m++)
#pragma unroll
        for (int e = 0; e < 8; e++) {
            const float magnitude = fabsf(g.at[m][e / 4][e % 4]);
            largest = magnitude < INFINITY ? fmaxf(largest, magnitude) : largest;
        }
    return warp_max(largest);
}

/* ---- Products ----------------------------------------------------------------------------------------------- */

/* acc += a times the 16 streamed rows from `row` on. */
template <typename ELEMENT, int DIM, int WIDTH, int M>
__device__ inline void multiply_add(gradient_acc<WIDTH, M> &acc, const uint32_t (&a)[M][4], uint32_t b_address,
                                    int row)
{
#pragma unroll
    for (int pair = 0; pair < WIDTH / 16; pair++) {
        uint32_t b[4];
        ldmatrix_x4_transposed(b, at_chunk<DIM>(b_address, row, 2 * pair));
#pragma unroll
        for (int m = 0; m < M; m++) {
            mma_m16n8k16(acc.sum[m][2 * pair], a[m], b[0], b[1], ELEMENT());
            mma_m16n8k16(acc.sum[m][2 * pair + 1], a[m], b[2], b[3], ELEMENT());
        }
    }
}

/* acc += g, rounded to 16 bits, times the 16 streamed rows from `row` on. */
template <typename ELEMENT, int DIM, int WIDTH, int M>
__device__ inline void pack_multiply_add(gradient_acc<WIDTH, M> &acc, float inverse_unit, const logits<M, 2> &g,
                                         uint32_t b_address, int row)
{
    uint32_t a[M][4];
#pragma unroll
    for (int m = 0; m < M; m++)
#pragma unroll
        for (int reg = 0; reg < 4; reg++) {
            const float(&pair)[4] = g.at[m][reg / 2];
            a[m][reg] = pack(pair[reg % 2 * 2] * inverse_unit, pair[reg % 2 * 2 + 1] * inverse_unit, ELEMENT());
        }
    multiply_add<ELEMENT, DIM>(acc, a, b_address, row);
}

/* ---- Row stats ---------------------------------------------------------------------------------------------- */

/* Row stats of queries, which are the stationary rows, or for dk the streamed ones. LSEs are in base 2 here. */
template <int M, bool DK> struct query_row_stats;

template <int M> struct query_row_stats<M, false> {
    row_stats stationary[M][2];

    __device__ void load_stationary(const backward_params &params, const skl_sequence &s, int64_t head, int64_t first,
                                    int last_row)
    {
#pragma unroll
        for (int m = 0; m < M; m++)
#pragma unroll
            for (int half = 0; half < 2; half++) {
                const int64_t query = first + min(acc_row<M>(m, half), last_row);
                stationary[m][half] = {lse2_of(row_stat(params, 0, s, head, query)),
                                       lse2_of(row_stat(params, 1, s, head, query)),
                                       row_stat(params, 2, s, head, query), 1.0F};
            }
    }

    __device__ void load_step(const row_stats *)
    {
    }

    __device__ const row_stats &of(int m, int, int e) const
    {
        return stationary[m][e / 2];
    }

    /* Stationary rows are multiplied by their upstream gradient when they are stored. */
    __device__ static float weighted(float g, const row_stats &)
    {
        return g;
    }

    template <int ROWS> __device__ static float largest_grad(const row_stats *)
    {
        return 1.0F;
    }
};

template <int M> struct query_row_stats<M, true> {
    row_stats streamed[2][2];

    __device__ void load_stationary(const backward_params &, const skl_sequence &, int64_t, int64_t, int)
    {
    }

    __device__ void load_step(const row_stats *first)
    {
#pragma unroll
        for (int e = 0; e < 4; e++) {
            const float4 stat = *(const float4 *)(const void *)&first[acc_column(e / 2, e % 2)];
            streamed[e / 2][e % 2] = {lse2_of(stat.x), lse2_of(stat.y), stat.z, stat.w};
        }
    }

    __device__ const row_stats &of(int, int block, int e) const
    {
        return streamed[block][e % 2];
    }

    __device__ static float weighted(float g, const row_stats &query)
    {
        return query.grad * g;
    }

    template <int ROWS> __device__ static float largest_grad(const row_stats *stage)
    {
        const int lane = (int)(threadIdx.x % 32);
        return warp_max(fmaxf(fabsf(stage[lane].grad), fabsf(stage[ROWS - 32 + lane].grad)));
    }
};

/* Starts copying the row stats of a stage's queries; `left` of them exist. */
template <int ROWS>
__device__ inline void copy_row_stats(row_stats (&to)[ROWS], const backward_params &params, const skl_sequence &s,
                                      int64_t head, int64_t first, int left)
{
    const int row = (int)(threadIdx.x % ROWS);
    constexpr int SHARE = THREADS / ROWS; /* threads per query */
#pragma unroll
    for (int which = 0; which < 4; which++) {
        const skl_input source = row_stat_source(params, which);
        if (source.data != NULL && (int)(threadIdx.x / ROWS % SHARE) == which % SHARE)
            cp_async_4(shared_address(&to[row].lse_a + which),
                       (const float *)source.data + SKL_ROW(source, s.batch, head, s.query_begin + first + row),
                       row < left);
    }
}

/* Sets the defaults of row stats that have no source and are never copied. */
template <int ROWS> __device__ inline void clear_row_stats(row_stats (&stats)[STAGES][ROWS])
{
    for (int row = (int)threadIdx.x; row < STAGES * ROWS; row += THREADS)
        stats[row / ROWS][row % ROWS] = {0.0F, 0.0F, 0.0F, 1.0F};
}

/* ---- Stages ------------------------------------------------------------------------------------------------- */

/* Addresses of the operands of one stage. */
struct stage_operands {
    uint32_t a, b;          /* rows of both arguments */
    uint32_t gradient;      /* transposed rows of the argument that the gradient is wrt */
    const row_stats *stats; /* DK */
};

/* A full tile: every row of the warp sees every row of the stage. */
template <typename ELEMENT, int DIM, int M, bool DK, bool WRT_B>
__device__ inline void add_full_stage(gradient_acc<SLICE<DIM>, M> &gradient, gradient_unit<ELEMENT> &unit,
                                      const row_frags<DIM, M> &frags_a, float scale_a,
                                      const row_frags<DIM, M> &frags_b, float scale_b, const stage_operands &operands,
                                      query_row_stats<M, DK> &queries)
{
    if (WRT_B && unit.MOVES) /* |p_b - p_a| <= 1: the upstream gradients bound G */
        unit.fit(gradient, queries.template largest_grad<STAGE_ROWS<DIM>>(operands.stats));
#pragma unroll 1
    for (int row = 0; row < STAGE_ROWS<DIM>; row += STEP_ROWS) {
        logits<M, 2> x, y;
        multiply<ELEMENT>(x, frags_a, operands.a, row);
        multiply<ELEMENT>(y, frags_b, operands.b, row);
        queries.load_step(operands.stats + row);
#pragma unroll
        for (int m = 0; m < M; m++)
#pragma unroll
            for (int block = 0; block < 2; block++)
#pragma unroll
                for (int e = 0; e < 4; e++) {
                    const row_stats &query = queries.of(m, block, e);
                    const float g = pair_gradient<WRT_B>(fmaf(x.at[m][block][e], scale_a, -query.lse_a),
                                                         fmaf(y.at[m][block][e], scale_b, -query.lse_b), query);
                    x.at[m][block][e] = queries.weighted(g, query);
                }
        if (!WRT_B && unit.MOVES)
            unit.fit(gradient, largest_of(x));
        pack_multiply_add<ELEMENT, DIM>(gradient, unit.inverse(), x, operands.gradient, row);
    }
}

/* A masked tile, or one with softcap. Masked pairs add exactly 0. */
template <typename ELEMENT, int DIM, int M, bool DK>
__device__ inline void add_masked_stage(gradient_acc<SLICE<DIM>, M> &gradient, gradient_unit<ELEMENT> &unit,
                                        const row_frags<DIM, M> &frags_a, const row_frags<DIM, M> &frags_b,
                                        const backward_params &params, bool wrt_b, const stage_operands &operands,
                                        query_row_stats<M, DK> &queries, const backward_memory<DIM> &memory,
                                        int last_row, int first)
{
    const skl_cuda_argument &wrt = wrt_b ? params.b : params.a;
#pragma unroll 1
    for (int row = 0; row < STAGE_ROWS<DIM>; row += STEP_ROWS) {
        logits<M, 2> x, y;
        multiply<ELEMENT>(x, frags_a, operands.a, row);
        multiply<ELEMENT>(y, frags_b, operands.b, row);
        queries.load_step(operands.stats + row);
        const float scale_a = cap_logits(x.at, params.a);
        const float scale_b = cap_logits(y.at, params.b);
#pragma unroll
        for (int m = 0; m < M; m++)
#pragma unroll
            for (int block = 0; block < 2; block++)
#pragma unroll
                for (int e = 0; e < 4; e++) {
                    const row_stats &query = queries.of(m, block, e);
                    const float log_p_a = fmaf(x.at[m][block][e], scale_a, -query.lse_a);
                    const float log_p_b = fmaf(y.at[m][block][e], scale_b, -query.lse_b);
                    float g = wrt_b ? pair_gradient<true>(log_p_a, log_p_b, query)
                                    : pair_gradient<false>(log_p_a, log_p_b, query);
                    const float logit = wrt_b ? y.at[m][block][e] : x.at[m][block][e];
                    if (wrt.linear) {
                        g *= linear_slope_of_logit(logit);
                    } else if (wrt.capped) { /* 1 - tanh^2, exactly 0 where tanh is 1 */
                        const float ratio = logit * wrt.inverse_softcap_2;
                        g *= fabsf(logit) == wrt.softcap_2 ? 0.0F : 1.0F - ratio * ratio;
                    }
                    const int column = row + acc_column(block, e % 2);
                    const range32 sees = memory.visible.of(acc_row<M>(m, e / 2));
                    const bool seen = first + column >= sees.begin && first + column < sees.end &&
                                      (!unit.MOVES || acc_row<M>(m, e / 2) <= last_row);
                    g = memory.poisoned[column] ? NAN : queries.weighted(g, query);
                    x.at[m][block][e] = seen ? g : 0.0F;
                }
        if (unit.MOVES)
            unit.fit(gradient, largest_of(x));
        pack_multiply_add<ELEMENT, DIM>(gradient, unit.inverse(), x, operands.gradient, row);
    }
}

/* A masked pair has G = 0, but 0 times a non-finite value is NaN. So non-finite values of streamed rows are replaced
 * by 0 before the product, and only the rows that see such a row get NaN in their G. */
template <typename ELEMENT, int DIM>
__device__ inline void clear_non_finite(smem_rows<DIM> &rows, int (&poisoned)[STAGE_ROWS<DIM>])
{
    constexpr int ROWS = STAGE_ROWS<DIM>;
    if (threadIdx.x < ROWS)
        poisoned[threadIdx.x] = 0;
    __syncthreads();
    for (int n = (int)threadIdx.x; n < ROWS * DIM / 8; n += THREADS) {
        uint4 &chunk = rows.chunks[n / (DIM / 8)][n % (DIM / 8)];
        if (!all_finite<ELEMENT>(chunk)) {
            chunk = make_uint4(0, 0, 0, 0);
            poisoned[n / (DIM / 8)] = 1;
        }
    }
    __syncthreads();
}

/* ---- One tile ----------------------------------------------------------------------------------------------- */

/* The rows that a block streams for every head, without what only their mask needs. */
struct streamed_rows {
    int64_t origin;
    int needed, count;
    reach warp; /* streamed rows that the rows of this warp see */
};

/* Adds all streamed rows of a head to the gradient of the block's rows first_row .. first_row + last_row. */
template <typename ELEMENT, int DIM, int M, bool DK>
__device__ inline void sum_streamed(gradient_acc<SLICE<DIM>, M> &gradient, gradient_unit<ELEMENT> &unit,
                                    const backward_params &params, backward_memory<DIM> &memory,
                                    const streamed_rows &streamed, int64_t head, int64_t first_row, int last_row)
{
    const skl_sequence &s = memory.sequence;
    const reach &warp = streamed.warp;
    constexpr int ROWS = STAGE_ROWS<DIM>;
    const skl_cuda_argument &a = params.a, &b = params.b;
    const bool wrt_b = is_grad_of_b(params);
    const bool capped = a.capped || b.capped;
    row_frags<DIM, M> frags_a, frags_b;
    load_frags(frags_a, memory.stages,
               (DK ? keys_of<ELEMENT>(a, s, head) : queries_of<ELEMENT>(a, s, head)).from(first_row), last_row + 1);
    load_frags(frags_b, memory.stages,
               (DK ? keys_of<ELEMENT>(b, s, head) : queries_of<ELEMENT>(b, s, head)).from(first_row), last_row + 1);

    const row_source<ELEMENT> from_a =
        (DK ? queries_of<ELEMENT>(a, s, head) : keys_of<ELEMENT>(a, s, head)).from(streamed.origin);
    const row_source<ELEMENT> from_b =
        (DK ? queries_of<ELEMENT>(b, s, head) : keys_of<ELEMENT>(b, s, head)).from(streamed.origin);

    query_row_stats<M, DK> queries;
    queries.load_stationary(params, s, head, first_row, last_row);
    if (DK)
        copy_row_stats(memory.stats[0], params, s, head, streamed.origin, streamed.count);
    copy_rows(memory.stages[0].a, from_a, 0, streamed.count);
    copy_rows(memory.stages[0].b, from_b, 0, streamed.count);
    cp_async_commit();
    for (int first = 0, stage = 0; first < streamed.needed; first += ROWS, stage = 1 - stage) {
        cp_async_wait<0>();
        /* The values of rows after the last one are undefined and must not change the unit: take the masked path. */
        const bool ragged = unit.MOVES && last_row < WARPS * 16 * M - 1;
        const bool masked = capped || ragged || !covers(warp.all, first, ROWS);
        const bool any_masked =
            __syncthreads_or(masked); /* barrier: this stage is complete, and the other one is free */
        if (first + ROWS < streamed.needed) {
            copy_rows(memory.stages[1 - stage].a, from_a, first + ROWS, streamed.count);
            copy_rows(memory.stages[1 - stage].b, from_b, first + ROWS, streamed.count);
            if (DK)
                copy_row_stats(memory.stats[1 - stage], params, s, head, streamed.origin + first + ROWS,
                               streamed.count - first - ROWS);
        }
        cp_async_commit();
        smem_stage<DIM> &rows = memory.stages[stage];
        const stage_operands operands = {logit_b_address<2>(rows.a), logit_b_address<2>(rows.b),
                                         at_chunk<DIM>(gradient_b_address(wrt_b ? rows.b : rows.a), 0,
                                                       SLICE<DIM> < DIM ? (int)params.dim_first / 8 : 0),
                                         memory.stats[stage]};
        if (any_masked)
            clear_non_finite<ELEMENT>(wrt_b ? rows.b : rows.a, memory.poisoned);
        if (!overlaps(warp.any, first, ROWS))
            continue;
        if (masked)
            add_masked_stage<ELEMENT, DIM, M, DK>(gradient, unit, frags_a, frags_b, params, wrt_b, operands, queries,
                                                  memory, last_row, first);
        else if (wrt_b)
            add_full_stage<ELEMENT, DIM, M, DK, true>(gradient, unit, frags_a, a.scale, frags_b, b.scale, operands,
                                                      queries);
        else
            add_full_stage<ELEMENT, DIM, M, DK, false>(gradient, unit, frags_a, a.scale, frags_b, b.scale, operands,
                                                       queries);
    }
    cp_async_wait<0>();
    __syncthreads(); /* the stages are free */
}

/* ---- Kernels ------------------------------------------------------------------------------------------------ */

/* Whether the row takes part and attends to a key. If not, its gradient is 0, whatever its upstream gradient is. */
template <int M, bool DK>
__device__ inline bool is_live(const backward_params &params, const row_tile<M, DK> &tile, int64_t row)
{
    const skl_range sees = skl_visible(&params.problem, &tile.sequence, row);
    return row < tile.rows && (DK || sees.begin < sees.end);
}

/* Stores the warp's rows, from warp_row of the tile on, and their dimensions from dim_first on. */
template <typename ELEMENT, int WIDTH, int M, int TILE_M, bool DK>
__device__ inline void store_gradient(const gradient_acc<WIDTH, M> &gradient, const backward_params &params,
                                      const row_tile<TILE_M, DK> &tile, float factor, int warp_row, int dim_first)
{
    const skl_side side = side_of(params);
    const skl_output out = DK ? *side.dk : *side.dq;
    const int64_t base =
        SKL_ROW(out, tile.sequence.batch, tile.head, DK ? tile.sequence.key_begin : tile.sequence.query_begin);
#pragma unroll
    for (int m = 0; m < M; m++)
#pragma unroll
        for (int half = 0; half < 2; half++) {
            const int64_t row = tile.first + warp_row + m * 16 + (int)(threadIdx.x % 32 / 4) + half * 8;
            if (row >= tile.stored)
                continue;
            const bool live = is_live(params, tile, row);
            const float weight = live && !DK ? row_stat(params, 3, tile.sequence, tile.head, row) : 1.0F;
            const gradient_columns columns(out.data, base + row * out.stride_row + dim_first, side.grad_dtype,
                                           (int)side.dim - dim_first);
#pragma unroll
            for (int n = 0; n < WIDTH / 8; n++) {
                const float low = gradient.sum[m][n][half * 2] * factor * weight;
                const float high = gradient.sum[m][n][half * 2 + 1] * factor * weight;
                columns.store_pair(n, live ? low : 0.0F, live ? high : 0.0F, ELEMENT());
            }
        }
}

template <typename ELEMENT, int DIM, int M, bool DK>
__global__ void __launch_bounds__(THREADS, 2) gradient_kernel(const __grid_constant__ backward_params params)
{
    extern __shared__ __align__(128) unsigned char raw[];
    backward_memory<DIM> &memory = *(backward_memory<DIM> *)(void *)raw;
    row_tile<M, DK> tile;
    if (!tile.find(params))
        return;
    const int last_row = (int)skl_min(WARPS * 16 * M, tile.rows - tile.first) - 1;
    streamed_rows streamed = {};
    if (last_row >= 0) {
        const skl_sequence &s = tile.sequence;
        const skl_band band = DK ? skl_query_band(&params.problem, &s) : skl_key_band(&params.problem, &s);
        const streamed_band all = stream_for(band, tile.first, tile.first + last_row);
        memory.visible.fill(all.band);
        streamed = {all.origin, all.needed, all.band.count,
                    reach_of(all.band, (int)(threadIdx.x / 32) * 16 * M, 16 * M)};
    }
    if (threadIdx.x == 0)
        memory.sequence = tile.sequence;
    __syncthreads();
    gradient_acc<SLICE<DIM>, M> gradient = {};
    gradient_unit<ELEMENT> unit;
    const skl_cuda_argument &side = is_grad_of_b(params) ? params.b : params.a;
    const int sharing = DK ? side.heads_per_key : 1;
    if (DK)
        clear_row_stats(memory.stats); /* visible to all threads after the first barrier */
    for (int n = 0; n < sharing && last_row >= 0; n++)
        sum_streamed<ELEMENT, DIM, M, DK>(gradient, unit, params, memory, streamed, tile.head * sharing + n,
                                          tile.first, last_row);
    row_tile<M, DK> stored; /* `tile` again, so that it need not stay in registers during the loop */
    (void)stored.find(params);
    store_gradient<ELEMENT>(gradient, params, stored,
                            unit.value() * (params.teacher_side ? params.problem.scale_t : params.problem.scale_s),
                            (int)(threadIdx.x / 32) * 16 * M, (int)params.dim_first);
}

/* One launch per slice of the gradient. */
template <typename ELEMENT, int DIM, int M, bool DK>
cudaError_t launch_gradient(const char *kernel, const skl_cuda_params *params, const skl_cuda_launch *launch)
{
    backward_params slice = backward_params_of(params, launch);
    const skl_problem *const p = &slice.problem;
    const dim3 blocks =
        grid_of(p->batch, row_tile<M, DK>::heads(slice), skl_ceil_div(DK ? p->len_k : p->len_q, TILE_ROWS<M>));
    record_launch(kernel, DK ? SKL_VARIANT_DK : SKL_VARIANT_DQ, 1);
    cudaError_t error = cudaSuccess;
    for (; slice.dim_first < side_of(slice).dim && error == cudaSuccess; slice.dim_first += SLICE<DIM>)
        error =
            launch_blocks(gradient_kernel<ELEMENT, DIM, M, DK>, blocks, THREADS, sizeof(backward_memory<DIM>), slice);
    return error;
}

} // namespace sm80

#endif
