/* Deterministic dk on Hopper's tensor cores (sm_90a): 16-bit types, one teacher head per student head.
 *
 * The fused backward (fused_backward.cuh) transposed: a block keeps a tile of keys and streams the queries that
 * attend to them. dk stays in registers and is stored once, so its bits are the same on every run and it needs no
 * workspace.
 *
 * Bound: tensor cores (1,536 clocks per 128 x 64 pairs at DIM = 128); shared memory takes 1,280, exponentials 1,024.
 *
 *   block      2 consumer warpgroups of 64 keys and 1 producer warpgroup; one block per SM
 *   registers  232 per consumer thread: K of the other argument (DIM / 4), K of the wrt argument (DIM / 4, minus 8 at
 *              DIM = 128), logits of a stage (64), dk (DIM / 2), G (16), 24 for the rest; 40 per producer thread
 *   shared     DEPTH stages of 64 queries of both arguments, and their row stats; at DIM = 128 half of the wrt
 *              argument's K: 214 KB at DIM = 128, 137 KB at DIM = 64
 *
 *                stage n       stage n + 1
 *              +-------------+-------------+--
 *     64 keys  |  X^T, Y^T   |             |      X^T, Y^T = K Q^T (wgmma)  ->  G^T  ->  dk += G^T Q (wgmma)
 *     64 keys  |             |             |
 *              +-------------+-------------+--
 *
 *   producer   loads stage n + DEPTH (TMA) and its queries' row stats, and sanitizes it if it is masked
 *   consumer   issues logits of stage n  ->  waits for them and for dk of stage n - 1  ->  exponentials
 *              ->  issues dk of stage n
 *
 * The exponentials leave G^T in the registers of the A operand of dk += G^T Q, and both products read the same bytes
 * of Q. One warpgroup's exponentials overlap the other's wgmmas. Under GQA a block processes the stages of all query
 * heads that share the key head, head by head.
 *
 * Queries are columns of the logits here: a thread needs the row stats of 16 queries per stage and reads them from
 * shared memory just before it uses them.
 *
 * Registers are the limit, as in the fused backward: with all 128 dimensions of both K they would be 232, and ptxas
 * needs less than that. So the last 32 dimensions of the wrt argument's K come from shared memory. (Not of the other
 * argument's: under GQA that one may change from head to head.)
 *
 * CAPPED: instances for problems where at least one argument has a softcap.
 *
 * gradient_kernel.cuh has the kernel, G and the store. The loop over stages is separate from that of wide heads,
 * which keeps no rows in registers, loads the two arguments apart, and waits for the gradient of each stage. */
#ifndef SKL_CUDA_SM90_ATTENTION_DK_CUH
#define SKL_CUDA_SM90_ATTENTION_DK_CUH

#include "cuda/sm90/attention/gradient_kernel.cuh"

namespace sm90
{

/* Dimensions of the wrt argument's keys in registers. */
template <int DIM> constexpr int WRT_REG_DIMS = DIM == 64 ? 64 : 96;

template <int DIM> struct dk_smem {
    static constexpr int DEPTH = DIM == 64 ? 8 : 6;
    struct {
        row_stage<DIM> wrt, other;
    } stages[DEPTH];
    smem_rows<DIM / 64 - WRT_REG_DIMS<DIM> / 64> wrt_keys;
    stage_row_stats stats[DEPTH];
    gradient_barriers<DEPTH> barriers; /* empty: all consumer threads have released the stage */
    uint64_t stats_full[DEPTH];        /* row stats are stored, and a masked stage is sanitized */
    row_tile<2, true> tile;            /* in shared memory to save registers */
    int count;                         /* keys of the tile that exist */
    int heads;                         /* query heads that share the key head: 0 if the stream is empty */
    stage_schedule stream;
    typedef row_ranges<STATIONARY_ROWS> visible_rows;
    visible_rows visible;

    __device__ void init_barriers()
    {
        barriers.init(CONSUMERS * 128);
        for (uint64_t &barrier : stats_full)
            barrier_init(barrier, 32);
    }
};

/* ---- Producer ----------------------------------------------------------------------------------------------- */

/* Each of the four warps loads every fourth stage, so that the latency of the row stats of four stages overlaps. */
template <typename ELEMENT, int DIM, bool WRT_B>
__device__ inline void produce_queries(const backward_params &params, const gradient_maps &maps, dk_smem<DIM> &smem)
{
    const stage_schedule queries = warp_uniform(smem.stream);
    const int batch = warp_uniform((int)smem.tile.sequence.batch), warp = warp_in_warpgroup();
    const int heads = warp_uniform(smem.heads), first_head = warp_uniform((int)smem.tile.head) * heads;
    if constexpr (WRT_REG_DIMS<DIM> < DIM)
        if (warp == 0) {
            barrier_expect_tx(smem.barriers.rows_full, smem.wrt_keys.SIZE);
            tma_load(smem.wrt_keys.slabs, maps.wrt_rows, DIM - 64,
                     (int)(smem.tile.sequence.key_begin + smem.tile.first), (int)smem.tile.head, batch,
                     smem.barriers.rows_full);
        }
    for (int n = warp; n < queries.stages * heads; n += 4) {
        const int stage = n % smem.DEPTH, phase = n / smem.DEPTH % 2;
        const int head = first_head + n / queries.stages;
        const int first = queries.stage_at(n % queries.stages) * STAGE_ROWS;
        uint64_t &full = smem.barriers.full[stage];
        barrier_wait(smem.barriers.empty[stage], phase ^ 1);
        barrier_expect_tx(full, (int)sizeof smem.stages[stage]);
        load_slabs(smem.stages[stage].other.slabs, maps.other_stream, queries.row + first, head, batch, full);
        load_slabs(smem.stages[stage].wrt.slabs, maps.wrt_stream, queries.row + first, head, batch, full);
        stage_row_stats &stats = smem.stats[stage];
        store_stage_row_stats(stats, load_stage_row_stats(params, smem.tile.sequence, smem.stream,
                                                          smem.visible.of(smem.count - 1).end, head, first));
        complete_stage<ELEMENT>(n % queries.stages < queries.masked_stages, smem.stages[stage].wrt,
                                WRT_B ? stats.lse_b : stats.lse_a, full, phase, smem.stats_full[stage]);
    }
}

/* ---- Consumers ---------------------------------------------------------------------------------------------- */

template <typename ELEMENT, int DIM, bool WRT_B, bool CAPPED>
struct dk_warpgroup : gradient_warpgroup<ELEMENT, DIM, true, WRT_B, CAPPED, dk_smem<DIM>> {
    typedef gradient_warpgroup<ELEMENT, DIM, true, WRT_B, CAPPED, dk_smem<DIM>> base;
    using base::gradient, base::params, base::smem, base::unit, base::warpgroup;
    static constexpr int REGS = 232, PRODUCER_REGS = 40;
    uint32_t wrt_k[WRT_REG_DIMS<DIM> / 16][4], other_k[DIM / 16][4];

    __device__ static void produce(const backward_params &params, const gradient_maps &maps, dk_smem<DIM> &smem)
    {
        produce_queries<ELEMENT, DIM, WRT_B>(params, maps, smem);
    }

    /* The tile's keys of one argument, for a query head. */
    __device__ row_source<ELEMENT> keys(const skl_cuda_argument &argument, int64_t head) const
    {
        return keys_of<ELEMENT>(argument, smem.tile.sequence, head).from(smem.tile.first);
    }

    /* Adds the 64 x 64 pairs of stage n, which is stage `s` of its query head. */
    template <bool MASKED> __device__ void add_stage(int n, int s)
    {
        const int stage = n % smem.DEPTH, phase = n / smem.DEPTH % 2;
        barrier_wait(smem.barriers.full[stage], phase);
        barrier_wait(smem.stats_full[stage], phase);
        argument_logits logits = {MASKED ? smem.stream.stage_at(s) * STAGE_ROWS : 0};
        wgmma_fence();
        issue_logits<ELEMENT, DIM, DIM>(logits.other, other_k, 0, k_major_operand(&smem.stages[stage].other));
        issue_logits<ELEMENT, DIM, WRT_REG_DIMS<DIM>>(logits.wrt, wrt_k,
                                                      k_major_operand(&smem.wrt_keys) + warpgroup * (64 * 128 / 16),
                                                      k_major_operand(&smem.stages[stage].wrt));
        wgmma_commit();
        wgmma_wait<0>();
        fence_operand(logits.wrt);
        fence_operand(logits.other);
        if (n > 0) /* dk of stage n - 1 is complete, too; every lane, because every lane has read row stats */
            barrier_arrive(smem.barriers.empty[(n - 1) % smem.DEPTH]);
        uint32_t g[4][4];
        const stage_row_stats &stats = smem.stats[stage];
        base::template compute_g<MASKED>(
            g, logits, [&] { return streamed_query_stats<WRT_B>{stats}; },
            [&] { unit.fit(*this, load_shared(stats.largest)); });
        base::issue_gradient(g, smem.stages[stage].wrt);
    }

    __device__ void run()
    {
        base::clear();
        const stage_schedule queries = warp_uniform(smem.stream);
        const int heads = warp_uniform(smem.heads);
        const int64_t head = smem.tile.head * heads;
        load_a_frag<WRT_REG_DIMS<DIM>>(wrt_k, keys(wrt_argument<WRT_B>(params), head), smem.count);
        if (WRT_REG_DIMS<DIM> < DIM)
            barrier_wait(smem.barriers.rows_full, 0);
        for (int h = 0, n = 0; h < heads; h++) {
            load_a_frag<DIM>(other_k, keys(other_argument<WRT_B>(params), head + h), smem.count);
            int s = 0; /* CAPPED: full stages run as masked ones, which halves the code to compile */
            for (; s < (CAPPED ? queries.stages : queries.masked_stages); s++, n++)
                add_stage<true>(n, s);
            wgmma_wait<0>(); /* lets ptxas keep G in the same registers in both loops */
            if constexpr (!CAPPED) {
                for (; s < queries.stages; s++, n++)
                    add_stage<false>(n, s);
                wgmma_wait<0>();
            }
        }
        fence_operand(gradient);
    }
};

template <typename ELEMENT, int DIM> struct dk_family {
    template <bool WRT_B, bool CAPPED> using consumer = dk_warpgroup<ELEMENT, DIM, WRT_B, CAPPED>;
};

template <typename ELEMENT, int DIM, bool SOFTCAP>
cudaError_t launch_dk(const char *kernel, const skl_cuda_params *params, const skl_cuda_launch *launch)
{
    return launch_gradient<dk_family<ELEMENT, DIM>, ELEMENT, true, SOFTCAP>(kernel, params, launch);
}

} // namespace sm90

#endif
