/* The fused backward of a tile of queries: what its dq warpgroups and its dk warpgroup do. */
#ifndef SKL_CUDA_SM90_ATTENTION_FUSED_BACKWARD_TILE_CUH
#define SKL_CUDA_SM90_ATTENTION_FUSED_BACKWARD_TILE_CUH

#include "cuda/sm90/attention/fused_backward_stages.cuh"

namespace sm90
{

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

template <typename ELEMENT, typename SHAPE, bool WRT_B, logit_form FORM> struct fused_backward {
    typedef fused_backward_smem<SHAPE> memory;
    typedef typename SHAPE::tile_type tile_type;
    static constexpr int GROUPS = SHAPE::DQ_GROUPS, REGS = SHAPE::DQ_REGS, PRODUCER_REGS = SHAPE::DK_REGS;
    static constexpr int DIM = SHAPE::DIM;
    static constexpr bool CAPPED = FORM == CAPPED_LOGITS;
    const backward_params &params;
    const fused_backward_maps &maps;
    memory &smem;
    int warpgroup; /* warp-uniform */
    uint32_t other_q[SHAPE::REG_DIMS / 16 + (SHAPE::REG_DIMS == 0)][4];
    float dq[DIM / 8][4];
    static constexpr bool HAS_LONG_SUMS = WRT_B && SHAPE::HAS_LONG_SUMS;
    row_sums sums[2]; /* gradients of B: sums of the KL */

    __device__ static bool find(const backward_params &params, memory &smem, tile_type &tile, row_stream &keys)
    {
        if (!tile.find(params, 1, (unsigned)params.head_group))
            return false;
        if (threadIdx.x < 32) {
            const float common = HAS_GRAD_UNIT<ELEMENT, SHAPE> ? find_common_grad(params, tile) : 0.0F;
            smem.in_units = common != 0.0F;
            smem.unit = common != 0.0F ? common : find_g_unit(params, tile, ELEMENT());
        }
        keys = keys_of_tile(params, tile, 1);
        return true;
    }

    __device__ static void start(const backward_params &, memory &smem, const tile_type &tile, const row_stream &keys)
    {
        smem.tile = tile;
        set_rows(smem, tile, keys);
        barrier_init(smem.queries_full, 1);
        for (int stage = 0; stage < smem.DEPTH; stage++) {
            barrier_init(smem.full[stage], 1);
            barrier_init(smem.sanitized[stage], 128);
            if (smem.WIDE_OTHER)
                barrier_init(smem.other_full[stage], 1);
        }
        for (int buffer = 0; buffer < 2; buffer++) {
            barrier_init(smem.g_full[buffer], SHAPE::DQ_GROUPS * 128);
            barrier_init(smem.g_empty[buffer], 4);
        }
    }

    /* ---- dk ------------------------------------------------------------------------------------------------- */

    __device__ void produce()
    {
        const tile_type &tile = smem.tile;
        const int head = warp_uniform((int)tile.head);
        const stage_loader<SHAPE> loader = {smem,
                                            maps,
                                            warp_uniform(smem.keys),
                                            warp_uniform((int)tile.sequence.batch),
                                            head,
                                            head / wrt_argument<WRT_B>(params).heads_per_key,
                                            head / other_argument<WRT_B>(params).heads_per_key};
        if (warp_index() == GROUPS * 4) {
            loader.load_queries(warp_uniform((int)(tile.sequence.query_begin + tile.first)));
            for (int n = 0; n < smem.DEPTH; n++) {
                if (smem.WIDE_OTHER)
                    loader.load_other_stage(n);
                loader.load_stage(n);
            }
        }
        add_dk(loader, params.dk_sums.data != NULL,
               params.teacher_side ? params.problem.scale_t : params.problem.scale_s);
    }

    /* Adds dk of all stages. Without `with_dk` the warpgroup is only the producer. */
    __device__ void add_dk(const stage_loader<SHAPE> &loader, bool with_dk, float scale)
    {
        constexpr int DK_DIMS = SHAPE::DK_DIMS;
        constexpr bool LOADS_LATE = memory::DEPTH == 2; /* the next stage waits for G of this one */
        const int warp = warp_in_warpgroup();
        const bool is_leader = warp == 0; /* the warp that issues loads */
        const uint32_t q = mn_major_operand(smem.wrt_queries.slabs, smem.ROWS * 128);
        float dk[DK_DIMS / 8][4];
        if (loader.keys.masked_stages > 0)
            sanitize_stage<ELEMENT>(smem, 0);
        for (int n = 0; n < loader.keys.stages; n++) {
            if (!LOADS_LATE && n + 1 < loader.keys.masked_stages)
                sanitize_stage<ELEMENT>(smem, n + 1);
            barrier_wait(smem.g_full[n % 2], n / 2 % 2);
            if (is_leader && n > 0) /* G of stage n is full: every dq warpgroup has released stage n - 1 */
                loader.load_stage(n + smem.DEPTH - 1);
            if (is_leader && smem.WIDE_OTHER) /* its logits are complete: the other argument's keys are free, too */
                loader.load_other_stage(n + smem.DEPTH);
            if (LOADS_LATE && n + 1 < loader.keys.masked_stages)
                sanitize_stage<ELEMENT>(smem, n + 1);
            if (!with_dk) {
                __syncwarp(); /* all lanes have passed the wait before the buffer can be filled again */
                if (threadIdx.x % 32 == 0)
                    barrier_arrive(smem.g_empty[n % 2]);
                continue;
            }
            const uint32_t g = mn_major_operand(smem.g[n % 2], 0);
#pragma unroll
            for (int first_dim = 0; first_dim < DIM; first_dim += DK_DIMS) {
                multiply_dk<ELEMENT, SHAPE::ROWS>(dk, g, q + first_dim / 64 * (smem.ROWS * 128 / 16));
                if (first_dim + DK_DIMS == DIM && threadIdx.x % 32 == 0)
                    barrier_arrive(smem.g_empty[n % 2]);
                tma_wait_read(); /* a warp's 16 keys leave by themselves: warps do not wait for each other */
                __syncwarp();
                write_dk<DK_DIMS>(smem.dk, dk, scale * smem.unit);
                fence_proxy_async();
                __syncwarp();
                reduce_add_dk(maps.sums, smem.dk, first_dim, loader.keys, n, warp, loader.wrt_head, loader.batch);
            }
        }
        tma_wait_read();
    }

    /* ---- dq ------------------------------------------------------------------------------------------------- */

    __device__ bool sanitize_query(int row, int count) const
    {
        const bool finite = sanitize_row<ELEMENT, DIM>(smem.wrt_queries.slabs, row, row < count);
        if constexpr (SHAPE::OTHER_SLABS > 0)
            for (int slab = 0; slab < SHAPE::OTHER_SLABS; slab++)
                for (int c = (int)(threadIdx.x % 2); c < 8 && row >= count; c += 2)
                    *(uint4 *)(void *)&smem.other_queries.slabs[slab][row][c * 16] = make_uint4(0, 0, 0, 0);
        return finite;
    }

    __device__ void set_stats(row_stats &stats, const float (&stat)[4], bool finite) const
    {
        stats = {lse2_of(stat[0]), lse2_of(stat[1]), stat[2], stat[3] / smem.unit};
        if (!finite)
            (WRT_B ? stats.lse_b : stats.lse_a) = NAN;
    }

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
     * logits are only read: ptxas serializes wgmmas whose accumulators are written by other instructions. */
    template <bool MASKED, logits_kind LOGITS, bool IN_UNITS>
    __device__ void compute_g(uint32_t (&g)[4][4], const stage_logits &wrt, const stage_logits &other, int n)
    {
        constexpr logits_kind OF_A = LOGITS == logits_kind::LINEAR_B ? logits_kind::PLAIN : LOGITS;
        constexpr logits_kind OF_WRT = WRT_B ? LOGITS : OF_A, OF_OTHER = WRT_B ? OF_A : LOGITS;
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
                        log_probability_of<OF_WRT>(wrt[i][half * 2 + parity], wrt_argument<WRT_B>(params),
                                                   MASKED ? smem.poison[n % smem.DEPTH][column] - lse : -lse);
                    const log_probability of_other =
                        log_probability_of<OF_OTHER>(other[i][half * 2 + parity], other_argument<WRT_B>(params),
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
        if constexpr (SHAPE::REG_DIMS > 0)
            load_a_frag<SHAPE::REG_DIMS>(
                other_q,
                queries_of<ELEMENT>(other_argument<WRT_B>(params), smem.tile.sequence, smem.tile.head)
                    .from(smem.tile.first),
                smem.count);
        barrier_wait(smem.queries_full, 0);
        prepare_queries(*this);
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

    __device__ void store() const
    {
        const tile_type &tile = smem.tile;
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
