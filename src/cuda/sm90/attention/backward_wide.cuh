/* dq and dk with respect to one argument for head sizes 192 and 256, on Hopper's tensor cores (sm_90a): 16-bit types,
 * one teacher head per student head. And for two-term rows (sm90/two_term.cuh) of up to 128 dimensions, which take
 * the same memory: G is multiplied by the factors of the streamed rows, and has two terms like them.
 *
 * Two kernels, as in sm80/attention/backward.cuh: one computes dq and keeps a tile of queries stationary; its
 * transpose (DK) computes dk and keeps a tile of keys. The gradient stays in registers: its bits are the same on
 * every run, and it needs no workspace. The fused backward does not fit at these sizes, neither into registers nor
 * into shared memory.
 *
 * Bound: tensor cores and shared memory equally (3,072 clocks each per 128 x 64 pairs at DIM = 256): both operands of
 * X and Y come from shared memory.
 *
 *   block      2 consumer warpgroups of 64 stationary rows and 1 producer warpgroup; one block per SM
 *   registers  224 per consumer thread: the rows' gradient (DIM / 2), logits of a stage (64, reused for G), 24 or
 *              more for the rest; 56 per producer thread
 *   shared     128 stationary rows of both arguments; one pipeline per argument, with stages of 64 streamed rows.
 *              At DIM = 256 there is room for three stages of 32 KB: two for the wrt argument, one for the other
 *
 *              stage n       stage n + 1
 *            +-------------+-------------+--
 *   64 rows  |    X, Y     |             |      X, Y (wgmma)  ->  G  ->  gradient += G streamed rows (wgmma)
 *   64 rows  |             |             |
 *            +-------------+-------------+--
 *
 *   producer   one warp per argument loads stages (TMA) as they are released: a stage of the other argument when its
 *              logits are complete, one of the wrt argument when the gradient is. Another warp loads the row stats of
 *              streamed queries and sanitizes masked stages
 *   consumer   logits of stage n  ->  exponentials  ->  gradient of stage n
 *
 * The exponentials leave G in the registers of the A operand of the next product: it never goes through memory, and
 * the warpgroups never wait for each other. One warpgroup's exponentials overlap the other's wgmmas. A warpgroup
 * waits for its own wgmmas, so that G can reuse the registers of the logits.
 *
 * The dq kernel with respect to B also computes the KL. Under GQA a block with a key tile processes all query heads
 * that share the key head, and loads the other argument's keys again where they change. CAPPED: instances for
 * problems where at least one argument has a softcap. Two-term rows with such instances have no others: there a
 * branch that all threads take alike, once per stage, decides, which is as fast and a third less to compile.
 *
 * gradient_kernel.cuh has the kernel, G and the store. */
#ifndef SKL_CUDA_SM90_ATTENTION_BACKWARD_WIDE_CUH
#define SKL_CUDA_SM90_ATTENTION_BACKWARD_WIDE_CUH

#include "cuda/sm90/attention/backward_wide_stages.cuh"

namespace sm90
{

/* ---- Consumers ---------------------------------------------------------------------------------------------- */

/* Row stats where queries are stationary rows: they belong to rows of the logits. Upstream gradients are not
 * included; store() multiplies dq by them. Factors of two-term keys take their place. */
template <bool WRT_B, typename FACTORS> struct stationary_query_stats {
    static constexpr bool TWO_TERM = !std::is_same_v<FACTORS, no_row_factors>;
    row_stats query[2];
    const float *poison; /* per streamed key: NaN for a non-finite key, else 0; two-term rows are finite */
    row_sums (&sums)[2];
    FACTORS factors;
    float2 column_poison;

    template <bool MASKED> __device__ void load_columns(int column_block)
    {
        factors.load_columns(column_block);
        if (!TWO_TERM)
            column_poison = MASKED ? load_shared_2(poison[acc_column(column_block, 0)]) : make_float2(0.0F, 0.0F);
    }

    __device__ row_stats of(int half, int parity) const
    {
        row_stats stats = query[half];
        if constexpr (TWO_TERM)
            stats.grad = factors.template of_column<WRT_B>(parity) * TWO_TERM_LARGEST;
        else
            (WRT_B ? stats.lse_b : stats.lse_a) -= parity ? column_poison.y : column_poison.x;
        return stats;
    }

    __device__ void add_to_kl(int half, float log_p_a, float log_p_b)
    {
        if (WRT_B)
            add_pair(sums[half], log_p_a, log_p_b);
    }
};

template <typename ELEMENT, int DIM, bool DK, bool WRT_B, bool CAPPED>
struct wide_warpgroup : gradient_warpgroup<ELEMENT, DIM, DK, WRT_B, CAPPED, wide_smem<ELEMENT, DIM, DK>> {
    typedef gradient_warpgroup<ELEMENT, DIM, DK, WRT_B, CAPPED, wide_smem<ELEMENT, DIM, DK>> base;
    using base::gradient, base::params, base::smem, base::sums, base::unit, base::warpgroup;
    static constexpr int REGS = 224, PRODUCER_REGS = 56;
    static constexpr bool TWO_TERM = operand<ELEMENT>::TWO_TERM;
    static constexpr bool ONE_LOOP = HAS_ONE_LOOP<ELEMENT, CAPPED>;
    row_factors factors_a, factors_b; /* TWO_TERM: of the stationary rows */

    /* Executed by the producer warpgroup: a warp per argument, and one for row stats. */
    __device__ static void produce(const backward_params &params, const gradient_maps &maps,
                                   wide_smem<ELEMENT, DIM, DK> &smem)
    {
        const int warp = warp_in_warpgroup();
        if (warp == 0) {
            if constexpr (TWO_TERM)
                produce_factors<DIM, DK, WRT_B>(params, smem);
            else
                produce_row_stats<ELEMENT, DIM, DK, WRT_B, CAPPED>(params, smem);
        } else if (warp == 1) {
            load_argument<DK>(smem, wrt_argument<WRT_B>(params), maps.wrt_rows, maps.wrt_stream, smem.wrt_rows,
                              smem.wrt_stages, smem.wrt);
        } else if (warp == 2) {
            load_argument<DK>(smem, other_argument<WRT_B>(params), maps.other_rows, maps.other_stream,
                              smem.other_rows, smem.other_stages, smem.other);
        }
    }

    /* Row stats of the warpgroup's queries, two threads each. Rows that do not exist have no stats, and no result. */
    __device__ void load_query_row_stats()
    {
        const int row = (int)(threadIdx.x / 2);
        if (threadIdx.x % 2 == 0 && row < smem.count) {
            float stat[3];
#pragma unroll
            for (int which = 0; which < 3; which++)
                stat[which] = row_stat(params, which, smem.tile.sequence, smem.tile.head, smem.tile.first + row);
            smem.stats.stationary[row] = {lse2_of(stat[0]), lse2_of(stat[1]), stat[2], 1.0F};
        }
        named_barrier_sync(1 + warpgroup, 128);
    }

    /* Factors of the thread's stationary rows for a query head. */
    __device__ row_factors load_factors_of(const skl_cuda_argument &argument, int head) const
    {
        const skl_sequence &s = smem.tile.sequence;
        const int64_t begin = DK ? s.key_begin : s.query_begin;
        return load_row_factors(DK ? argument.k_factors : argument.q_factors, s.batch,
                                DK ? head / argument.heads_per_key : head, begin + smem.tile.first,
                                begin + smem.tile.rows);
    }

    __device__ auto factors_of_stage(int stage) const
    {
        if constexpr (TWO_TERM)
            return two_term_factors{smem.stats.factors[stage], factors_a, factors_b};
        else
            return no_row_factors();
    }

    /* kl_sums: where the KL is added up. */
    __device__ auto stats_of_stage(int stage, row_sums (&kl_sums)[2])
    {
        typedef std::conditional_t<TWO_TERM, two_term_factors, no_row_factors> factors_type;
        if constexpr (DK) {
            return streamed_query_stats<WRT_B, factors_type>{smem.stats.staged[stage], factors_of_stage(stage)};
        } else {
            stationary_query_stats<WRT_B, factors_type> stats = {{}, NULL, kl_sums, factors_of_stage(stage)};
            if constexpr (!TWO_TERM)
                stats.poison = smem.stats.poison[stage];
#pragma unroll
            for (int half = 0; half < 2; half++) {
                stats.query[half] = load_row_stats(smem.stats.stationary[acc_row<1>(0, half)]);
                stats.query[half].grad = 1.0F;
            }
            return stats;
        }
    }

    __device__ void issue_argument(stage_logits &x, const void *rows, const void *stage)
    {
        wgmma_fence();
        const uint32_t operand = k_major_operand(rows) + warpgroup * (64 * 128 / 16);
        if constexpr (TWO_TERM)
            issue_two_term_logits<DIM>(
                x, [&](int step) { return k_step_descriptor(operand, step, STATIONARY_ROWS); },
                [&](int step) { return k_step_descriptor(operand, DIM / 16 + step, STATIONARY_ROWS); },
                k_major_operand(stage));
        else
            issue_logits<ELEMENT, DIM, 0>(x, NULL, operand, k_major_operand(stage));
        wgmma_commit();
    }

    template <bool MASKED> __device__ void add_gradient(const argument_logits &logits, int stage)
    {
        uint32_t g[4][4];
        base::template compute_g<MASKED>(
            g, logits, [&] { return stats_of_stage(stage, sums); },
            [&] {
                if constexpr (DK)
                    unit.fit(*this, load_shared(smem.stats.staged[stage].largest));
                else
                    unit.template fit<0>(*this, 1.0F);
            });
        base::issue_gradient(g, smem.wrt_stages[stage]);
        wgmma_wait<0>();
    }

    /* Tensor cores truncate their sums. So a stage has its own, in the registers of the logits, and they are added to
     * the gradient here. The same for the sums of the KL: an f32 sum loses digits as a row grows. */
    template <bool MASKED> __device__ void add_two_term_gradient(const argument_logits &logits, int stage)
    {
        float values[8][4], largest[2] = {};
        row_sums of_stage[2] = {};
        const auto keep = [&](int i, int half, float first, float second) {
            values[i][half * 2] = first;
            values[i][half * 2 + 1] = second;
            const float size = fmaxf(fabsf(first), fabsf(second));
            largest[half] = size < INFINITY ? fmaxf(largest[half], size) : largest[half];
        };
        if (CAPPED && (params.a.capped || params.b.capped))
            for_each_logit_gradient<MASKED, WRT_B, CAPPED, true>(params, logits, base::visible(),
                                                                 stats_of_stage(stage, of_stage), keep);
        else
            for_each_logit_gradient<MASKED, WRT_B, false, false>(params, logits, base::visible(),
                                                                 stats_of_stage(stage, of_stage), keep);
#pragma unroll
        for (int half = 0; half < 2; half++) {
            add_sums(sums[half], of_stage[half]);
#pragma unroll
            for (int lane = 1; lane < 4; lane *= 2) /* four lanes hold a row */
                largest[half] = fmaxf(largest[half], __shfl_xor_sync(~0U, largest[half], lane));
        }
        unit.fit(gradient, largest);
        uint32_t high[4][4], low[4][4];
#pragma unroll
        for (int i = 0; i < 8; i++)
#pragma unroll
            for (int half = 0; half < 2; half++) {
                const float inverse = unit.of[half].inverse();
                const two_terms pair = two_terms_of(values[i][half * 2] * inverse, values[i][half * 2 + 1] * inverse);
                high[i / 2][i % 2 * 2 + half] = pair.high;
                low[i / 2][i % 2 * 2 + half] = pair.low;
            }
        float sum[DIM / 8][4];
        wgmma_fence();
        issue_two_term_gradient<DIM>(sum, high, low, smem.wrt_stages[stage]);
        wgmma_commit();
        wgmma_wait<0>();
        fence_operand(sum);
#pragma unroll
        for (int e = 0; e < DIM / 2; e++)
            gradient[e / 4][e % 4] += sum[e / 4][e % 4];
    }

    /* Adds the 64 x 64 pairs of stage n, which is stage `s` of its query head. */
    template <bool MASKED> __device__ void add_stage(int n, int s)
    {
        const int wrt_stage = n % smem.WRT_DEPTH, wrt_phase = n / smem.WRT_DEPTH % 2;
        const int other_stage = n % smem.OTHER_DEPTH;
        argument_logits logits = {MASKED ? smem.stream.stage_at(s) * STAGE_ROWS : 0};
        barrier_wait(smem.other.full[other_stage], n / smem.OTHER_DEPTH % 2);
        issue_argument(logits.other, &smem.other_rows, &smem.other_stages[other_stage]);
        barrier_wait(smem.wrt.full[wrt_stage], wrt_phase);
        if (DK || MASKED || TWO_TERM)
            barrier_wait(smem.stats_full[wrt_stage], wrt_phase);
        issue_argument(logits.wrt, &smem.wrt_rows, &smem.wrt_stages[wrt_stage]);
        wgmma_wait<1>();
        barrier_arrive_if(smem.other.empty[other_stage], threadIdx.x % 32 == 0);
        wgmma_wait<0>();
        fence_operand(logits.other);
        fence_operand(logits.wrt);
        if constexpr (TWO_TERM)
            add_two_term_gradient<MASKED>(logits, wrt_stage);
        else
            add_gradient<MASKED>(logits, wrt_stage);
        barrier_arrive(smem.wrt.empty[wrt_stage]); /* every lane arrives: every lane has read row stats or poison */
    }

    __device__ void run()
    {
        base::clear();
        if constexpr (!DK)
            load_query_row_stats();
        const stage_schedule stream = warp_uniform(smem.stream);
        const int heads = warp_uniform(smem.heads);
        const skl_cuda_argument &other = other_argument<WRT_B>(params);
        for (int h = 0, n = 0; h < heads; h++) {
            if constexpr (TWO_TERM) {
                factors_a = load_factors_of(params.a, smem.query_head(h));
                factors_b = load_factors_of(params.b, smem.query_head(h));
            }
            barrier_wait(smem.other.rows_full, smem.row_changes(h, other) % 2);
            barrier_wait(smem.wrt.rows_full, 0);
            int s = 0;
            for (; s < (ONE_LOOP ? stream.stages : stream.masked_stages); s++, n++)
                add_stage<true>(n, s);
            if constexpr (!ONE_LOOP)
                for (; s < stream.stages; s++, n++)
                    add_stage<false>(n, s);
            if (!DK)
                break; /* a tile of queries has one head: no register for the number of heads */
        }
        fence_operand(gradient);
    }
};

template <typename ELEMENT, int DIM, bool DK> struct wide_family {
    template <bool WRT_B, bool CAPPED> using consumer = wide_warpgroup<ELEMENT, DIM, DK, WRT_B, CAPPED>;
};

/* dq or dk; dq with respect to B also gives the KL. */
template <typename ELEMENT, int DIM, bool DK, bool SOFTCAP>
cudaError_t launch_wide(const char *kernel, const skl_cuda_params *params, const skl_cuda_launch *launch)
{
    return launch_gradient<wide_family<ELEMENT, DIM, DK>, ELEMENT, DK, SOFTCAP>(kernel, params, launch);
}

} // namespace sm90

#endif
