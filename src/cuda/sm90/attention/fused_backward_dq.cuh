/* The dq warpgroups of the fused backward: logits, G, dq, and with respect to B the KL. */
#ifndef SKL_CUDA_SM90_ATTENTION_FUSED_BACKWARD_DQ_CUH
#define SKL_CUDA_SM90_ATTENTION_FUSED_BACKWARD_DQ_CUH

#include "cuda/sm90/attention/fused_backward_stages.cuh"

namespace sm90
{

/* G in f16 needs a unit, because f16 represents 2^-24 .. 2^16 only; bf16 has the range of f32. One warp derives it
 * from the block's largest upstream gradient, which bounds G with respect to B. Rows whose upstream gradient is less
 * than 2^-16 of that lose bits of dq. */
template <typename ELEMENT, int GROUPS>
__device__ inline float find_g_unit(const backward_params &params, const query_tile<GROUPS> &tile, ELEMENT)
{
    return 1.0F;
}

template <int GROUPS>
__device__ inline float find_g_unit(const backward_params &params, const query_tile<GROUPS> &tile, skl_f16)
{
    constexpr int LIMIT = 15; /* values stay below 2^LIMIT units */
    float largest = 0.0F;
#pragma unroll 1
    for (int row = (int)(threadIdx.x % 32); row < tile.ROWS; row += 32) {
        const int64_t query = skl_min(tile.first + row, tile.sequence.query_count - 1);
        const skl_range sees = skl_visible(&params.problem, &tile.sequence, query);
        if (sees.begin >= sees.end)
            continue; /* its gradient is 0, whatever the upstream gradient is */
        const float size = fabsf(row_stat(params, 3, tile.sequence, tile.head, query));
        largest = size < INFINITY ? fmaxf(largest, size) : largest;
    }
    const int size = (int)(__float_as_uint(warp_max(largest)) >> 23) - 126; /* largest < 2^size */
    return power_of_2(max(size - LIMIT, -126));
}

/* Tall tiles spend most of their time outside the tensor cores. So if all queries of a bf16 tile have the same
 * upstream gradient, that is the unit of G, and full stages do not multiply by it. */
template <typename ELEMENT, typename SHAPE>
constexpr bool HAS_GRAD_UNIT = SHAPE::DQ_GROUPS == 3 && std::is_same_v<ELEMENT, skl_bf16>;

/* Executed by one warp. The upstream gradient of all queries of the tile; 0 if they differ. */
template <int GROUPS>
__device__ inline float find_common_grad(const backward_params &params, const query_tile<GROUPS> &tile)
{
    const float first = row_stat(params, 3, tile.sequence, tile.head, tile.first);
    bool same = fabsf(first) < INFINITY;
#pragma unroll 1
    for (int row = (int)(threadIdx.x % 32); row < tile.ROWS; row += 32) {
        const int64_t query = skl_min(tile.first + row, tile.sequence.query_count - 1);
        same = same && row_stat(params, 3, tile.sequence, tile.head, query) == first;
    }
    return __all_sync(~0U, same) ? first : 0.0F;
}

/* Row stats of the warpgroup's 64 queries, two threads each. Non-finite queries of the wrt argument become 0
 * and their LSE NaN, so that they do not affect dk of keys that they do not attend to. Rows after the last one may
 * belong to another sequence: they become 0, too, and an LSE of 1e30 makes all their probabilities 0. */
template <typename ELEMENT, bool WRT_B, typename SHAPE>
__device__ inline void prepare_queries(const backward_params &params, fused_backward_smem<SHAPE> &smem,
                                       const typename SHAPE::tile_type &tile)
{
    const int row = (int)(threadIdx.x / 2), count = smem.count;
    const bool finite = sanitize_row<ELEMENT, SHAPE::DIM>(smem.wrt_queries.slabs, row, row < count);
    if constexpr (smem.OTHER_SLABS > 0)
        for (int slab = 0; slab < smem.OTHER_SLABS; slab++)
            for (int c = (int)(threadIdx.x % 2); c < 8 && row >= count; c += 2)
                *(uint4 *)(void *)&smem.other_queries.slabs[slab][row][c * 16] = make_uint4(0, 0, 0, 0);
    if (threadIdx.x % 2 == 0) {
        constexpr float HUGE_LSE = 1e30F;
        row_stats stats = {HUGE_LSE, HUGE_LSE, 0.0F, 0.0F};
        if (row < count) {
            float stat[4];
#pragma unroll
            for (int which = 0; which < 4; which++)
                stat[which] = row_stat(params, which, tile.sequence, tile.head, tile.first + row);
            stats = {lse2_of(stat[0]), lse2_of(stat[1]), stat[2], stat[3] / smem.unit};
            if (!finite)
                (WRT_B ? stats.lse_b : stats.lse_a) = NAN;
        }
        smem.stats[row] = stats;
    }
    fence_proxy_async();
    named_barrier_sync(1 + (int)(threadIdx.x / 128), 128);
}

/* ---- Stages ------------------------------------------------------------------------------------------------- */

/* Runs the masked stages, then the full ones. */
template <typename DQ> __device__ inline void add_all_stages(DQ &dq, const stage_schedule &keys)
{
    for (int n = 0; n < keys.masked_stages; n++)
        dq.template add_stage<true>(n);
    wgmma_wait<0>(); /* lets ptxas keep G in the same registers in both loops */
    for (int n = keys.masked_stages; n < keys.stages; n++)
        dq.template add_stage<false>(n);
    wgmma_wait<0>();
}

/* ---- Stores ------------------------------------------------------------------------------------------------- */

/* Writes G of the warpgroup's queries and 16 STEPS keys, from first_key on, to [query][key]. */
template <int STEPS, int ROWS>
__device__ inline void write_g(unsigned char (&rows)[ROWS][128], const uint32_t (&g)[STEPS][4], int lane, int row,
                               int first_key = 0)
{
    const uint32_t to = shared_address(&rows[row][(lane / 16 ^ row % 8) * 16]);
#pragma unroll
    for (int step = 0; step < STEPS; step++)
        stmatrix_x4(to ^ (uint32_t)((first_key / 16 + step) * 32), g[step]);
}

/* Where dq of a tile goes. Without data the caller asks for no dq. */
struct dq_output {
    skl_side side;
    skl_output rows;
    int64_t base; /* first row of the tile */

    template <typename TILE> __device__ static dq_output of(const skl_side &side, const TILE &tile)
    {
        const skl_output rows = *side.dq;
        return {side, rows, SKL_ROW(rows, tile.sequence.batch, tile.head, tile.sequence.query_begin + tile.first)};
    }

    /* Stores the thread's rows that exist if dq is `wanted`. SMEM has the number of the tile's queries and the unit
     * of G. */
    template <typename ELEMENT, typename SMEM, int BLOCKS>
    __device__ void store(const SMEM &smem, const float (&dq)[BLOCKS][4], bool wanted = true) const
    {
#pragma unroll
        for (int half = 0; half < 2; half++) {
            const int row = acc_row<1>(0, half);
            if (row < smem.count && wanted)
                store_row<ELEMENT>(rows.data, base + row * rows.stride_row, side, dq, half, smem.unit * side.scale);
        }
    }
};

/* ---- dq ----------------------------------------------------------------------------------------------------- */

template <typename ELEMENT, typename SHAPE, bool WRT_B, logit_form FORM> struct dq_warpgroup {
    static constexpr int DIM = SHAPE::DIM;
    static constexpr bool CAPPED = FORM == CAPPED_LOGITS;
    const backward_params &params;
    fused_backward_smem<SHAPE> &smem;
    int warpgroup; /* warp-uniform */
    uint32_t other_q[SHAPE::REG_DIMS / 16 + (SHAPE::REG_DIMS == 0)][4];
    float dq[DIM / 8][4];
    static constexpr bool HAS_LONG_SUMS = WRT_B && SHAPE::HAS_LONG_SUMS;
    row_sums sums[2]; /* with respect to B: of the KL */

    template <bool MASKED> __device__ void issue_stage_logits(stage_logits &wrt, stage_logits &other, int n)
    {
        const int stage = n % smem.DEPTH, phase = n / smem.DEPTH % 2;
        const uint32_t queries = warpgroup * (64 * 128 / 16); /* offset of the warpgroup's rows */
        uint64_t &wrt_full = MASKED ? smem.sanitized[stage] : smem.full[stage];
        barrier_wait(SHAPE::WIDE_OTHER ? smem.other_full[stage] : wrt_full, phase);
        wgmma_fence();
        issue_logits<ELEMENT, SHAPE::OTHER_DIM, SHAPE::REG_DIMS, SHAPE::ROWS>(
            other, other_q, k_major_operand(&smem.other_queries) + queries,
            k_major_operand(&smem.stages[stage].other));
        if (SHAPE::WIDE_OTHER) {
            barrier_wait(wrt_full, phase);
            wgmma_fence();
        }
        issue_logits<ELEMENT, DIM, 0, SHAPE::ROWS>(wrt, NULL, k_major_operand(&smem.wrt_queries) + queries,
                                                   k_major_operand(&smem.stages[stage].wrt));
        wgmma_commit();
    }

    /* G of a stage as A operands. MASKED: masked pairs are 0. IN_UNITS: all upstream gradients are the unit. The
     * logits are only read: ptxas serialises wgmmas whose accumulators are written by other instructions. */
    template <bool MASKED, logits_kind LOGITS, bool IN_UNITS>
    __device__ void compute_g(uint32_t (&g)[4][4], const stage_logits &wrt, const stage_logits &other, int n)
    {
        constexpr logits_kind OF_A = LOGITS == logits_kind::LINEAR_B ? logits_kind::PLAIN : LOGITS;
        const int first = MASKED ? smem.keys.stage_at(n) * STAGE_KEYS : 0;
#pragma unroll
        for (int half = 0; half < 2; half++) {
            const int row = acc_row<1>(0, half);
            const row_stats query = load_row_stats(smem.stats[row]);
            const range32 sees = MASKED && row < smem.count ? smem.visible.of(row) : range32{};
            const float inverse_sum = LOGITS == logits_kind::LINEAR_B ? ex2(-query.lse_b) : 0.0F;
#pragma unroll
            for (int i = 0; i < 8; i++) {
                float pair[2];
#pragma unroll
                for (int parity = 0; parity < 2; parity++) {
                    const int column = acc_column(i, parity);
                    const float lse = WRT_B ? query.lse_b : query.lse_a;
                    const log_probability of_wrt =
                        log_probability_of < WRT_B
                            ? LOGITS
                            : OF_A > (wrt[i][half * 2 + parity], wrt_argument<WRT_B>(params),
                                      MASKED ? smem.poison[n % smem.DEPTH][column] - lse : -lse);
                    const log_probability of_other =
                        log_probability_of < WRT_B
                            ? OF_A
                            : LOGITS > (other[i][half * 2 + parity], other_argument<WRT_B>(params),
                                        -(WRT_B ? query.lse_a : query.lse_b));
                    const float log_p_a = (WRT_B ? of_other : of_wrt).value;
                    const float log_p_b = (WRT_B ? of_wrt : of_other).value;
                    const float p_a = ex2(log_p_a);
                    const float p_b = !WRT_B                            ? 0.0F
                                      : LOGITS == logits_kind::LINEAR_B ? wrt[i][half * 2 + parity] * inverse_sum
                                                                        : ex2(log_p_b);
                    const bool seen = !MASKED || (first + column >= sees.begin && first + column < sees.end);
                    if (WRT_B && seen)
                        sums[half] = {sums[half].l_a + p_a, sums[half].l_b + p_b,
                                      fmaf(p_a, log_p_a - log_p_b, sums[half].w)};
                    float gradient = WRT_B ? p_b - p_a : p_a * fmaf(SKL_LN2, log_p_a - log_p_b, -query.kl);
                    if (LOGITS != logits_kind::PLAIN)
                        gradient *= of_wrt.slope;
                    pair[parity] = IN_UNITS ? gradient : seen ? gradient * query.grad : 0.0F;
                }
                g[i / 2][i % 2 * 2 + half] = pack(pair[0], pair[1], ELEMENT());
            }
        }
    }

    /* Adds the 64 x 64 pairs of stage n. */
    template <bool MASKED, bool IN_UNITS> __device__ void add_stage(int n)
    {
        const int stage = n % smem.DEPTH, lane = (int)(threadIdx.x % 32);
        stage_logits wrt, other;
        issue_stage_logits<MASKED>(wrt, other, n);
        wgmma_wait<0>();
        fence_operand(wrt);
        fence_operand(other);
        uint32_t g[4][4];
        constexpr logits_kind OTHERWISE = FORM != PLAIN_LOGITS ? logits_kind::EXACT : logits_kind::PLAIN;
        if (FORM == LINEAR_LOGITS && !MASKED && is_linear(WRT_B ? wrt : other, params))
            compute_g<MASKED, logits_kind::LINEAR_B, IN_UNITS>(g, wrt, other, n);
        else if (CAPPED && !MASKED &&
                 polynomials_cover(wrt, wrt_argument<WRT_B>(params), other, other_argument<WRT_B>(params)))
            compute_g<MASKED, logits_kind::POLYNOMIAL, IN_UNITS>(g, wrt, other, n);
        else
            compute_g<MASKED, OTHERWISE, IN_UNITS>(g, wrt, other, n);
        wgmma_fence();
        const uint32_t k = mn_major_operand(&smem.stages[stage].wrt, STAGE_KEYS * 128);
        wgmma_steps<true, STAGE_KEYS / 16>(dq, g, k, 1, ELEMENT());
        wgmma_commit();
        barrier_wait(smem.g_empty[n % 2], n / 2 % 2 ^ 1);
        const int row = (int)(threadIdx.x / 32) * 16 + lane % 16;
        write_g(smem.g[n % 2], g, lane, row);
        fence_proxy_async();
        __syncwarp();
        if (MASKED)
            barrier_arrive(smem.g_full[n % 2]); /* every lane: it has read poison, which is overwritten next */
        else if (lane == 0)
            barrier_arrive_count(smem.g_full[n % 2], 32);
    }

    /* Stages n to end - 1. The sums leave the registers outside the inner loop: as a branch in it they made heads of
     * 64 5 % slower. */
    template <bool MASKED, bool IN_UNITS> __device__ void add_stages(int n, int end)
    {
        while (n < end) {
            const int flush = HAS_LONG_SUMS ? min(end, n / FLUSH_STAGES * FLUSH_STAGES + FLUSH_STAGES) : end;
            for (; n < flush; n++)
                add_stage<MASKED, IN_UNITS>(n);
            if (HAS_LONG_SUMS)
                smem.totals.flush(sums);
        }
    }

    __device__ void run()
    {
#pragma unroll
        for (int e = 0; e < DIM / 2; e++)
            dq[e / 4][e % 4] = 0.0F;
        sums[0] = sums[1] = {};
        if (HAS_LONG_SUMS)
            smem.totals.clear();
        add_stages<true, false>(0, smem.keys.masked_stages);
        wgmma_wait<0>(); /* lets ptxas keep G in the same registers in all loops */
        constexpr bool HAS_UNIT = HAS_GRAD_UNIT<ELEMENT, SHAPE>;
        if (HAS_UNIT && smem.in_units)
            add_stages<false, HAS_UNIT>(smem.keys.masked_stages, smem.keys.stages);
        else
            add_stages<false, false>(smem.keys.masked_stages, smem.keys.stages);
        wgmma_wait<0>();
        fence_operand(dq);
    }

    __device__ void store(const typename SHAPE::tile_type &tile) const
    {
        const dq_output out = dq_output::of(side_of(params), tile);
        if (WRT_B && params.kl_in_backward)
            write_one_pass_rows(
                params, tile, smem.count,
                {HAS_LONG_SUMS ? smem.totals.of(0) : sums[0], HAS_LONG_SUMS ? smem.totals.of(1) : sums[1]});
        if (out.rows.data != NULL)
            out.store<ELEMENT>(smem, dq);
    }
};

} // namespace sm90

#endif
