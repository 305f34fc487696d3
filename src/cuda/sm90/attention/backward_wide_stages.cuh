/* Shared memory and producers of the gradients of wide heads and of two-term rows (backward_wide.cuh). */
#ifndef SKL_CUDA_SM90_ATTENTION_BACKWARD_WIDE_STAGES_CUH
#define SKL_CUDA_SM90_ATTENTION_BACKWARD_WIDE_STAGES_CUH

#include "cuda/sm90/attention/gradient_kernel.cuh"

namespace sm90
{

/* Instances whose registers leave no room for row bounds: cuda/select chooses another kernel for those. */
template <typename ELEMENT, int DIM> struct wide_visible {
    typedef bounded_band band;
};
template <> struct wide_visible<skl_f16, SKL_SM90_UNBOUNDED_F16_DIM> {
    typedef band32 band;
};

/* Kernels that run full stages as masked ones: half of the code to compile, for a few more instructions per pair.
 * Softcapped, f16 and two-term rows; heads of 192 and 256 in bf16 have a separate loop for full stages. */
template <typename ELEMENT, bool CAPPED> constexpr bool HAS_ONE_LOOP = CAPPED || !std::is_same_v<ELEMENT, skl_bf16>;

/* DK: row stats of streamed queries, per stage. Otherwise: row stats of the block's queries, and poison of streamed
 * keys. TWO_TERM: factors of streamed rows; there is no poison, because two-term rows are finite. */
template <int DEPTH, bool DK, bool TWO_TERM> struct wide_row_stats;

template <int DEPTH> struct wide_row_stats<DEPTH, true, false> {
    stage_row_stats staged[DEPTH];
};

template <int DEPTH> struct wide_row_stats<DEPTH, true, true> {
    stage_row_stats staged[DEPTH]; /* upstream gradients are multiplied by the factors of the wrt argument */
    stage_factors factors[DEPTH];
};

template <int DEPTH> struct wide_row_stats<DEPTH, false, false> {
    row_stats stationary[STATIONARY_ROWS]; /* LSEs in base 2; no upstream gradients: store() multiplies by those */
    alignas(8) float poison[DEPTH][STAGE_ROWS];
};

template <int DEPTH> struct wide_row_stats<DEPTH, false, true> {
    row_stats stationary[STATIONARY_ROWS];
    stage_factors factors[DEPTH];
};

template <typename ELEMENT, int DIM, bool DK> struct wide_smem {
    static constexpr int ROW_DIM = DIM * operand<ELEMENT>::TERMS; /* elements of a row in memory */
    static constexpr int WRT_DEPTH = 2, OTHER_DEPTH = ROW_DIM == 256 ? 1 : 2;
    typedef typename wide_visible<ELEMENT, DIM>::band visible_rows;
    smem_rows<ROW_DIM / 64> wrt_rows, other_rows;
    row_stage<ROW_DIM> wrt_stages[WRT_DEPTH], other_stages[OTHER_DEPTH];
    wide_row_stats<WRT_DEPTH, DK, operand<ELEMENT>::TWO_TERM> stats;
    gradient_barriers<WRT_DEPTH> wrt;
    gradient_barriers<OTHER_DEPTH> other;
    uint64_t stats_full[WRT_DEPTH]; /* row stats or poison are stored, and a masked stage is sanitized */
    row_tile<2, DK> tile;           /* in shared memory to save registers */
    int count;                      /* stationary rows that exist */
    int heads;                      /* query heads to process: 0 if the stream is empty */
    stage_schedule stream;
    bounded_band visible;

    __device__ void init_barriers()
    {
        wrt.init(CONSUMERS * 128);
        other.init(CONSUMERS * 4);
        for (uint64_t &barrier : stats_full)
            barrier_init(barrier, 32);
    }

    __device__ int query_head(int h) const
    {
        return (int)tile.head * heads + h;
    }

    /* How often an argument's stationary rows have changed up to query head h of the block. */
    __device__ int row_changes(int h, const skl_cuda_argument &argument) const
    {
        return DK ? query_head(h) / argument.heads_per_key - query_head(0) / argument.heads_per_key : 0;
    }

    __device__ bool has_new_rows(int h, const skl_cuda_argument &argument) const
    {
        return h == 0 || row_changes(h, argument) > row_changes(h - 1, argument);
    }
};

/* ---- Producer ----------------------------------------------------------------------------------------------- */

/* Executed by one warp: all TMA loads of one argument. */
template <bool DK, typename SMEM, int DIM, int DEPTH>
__device__ inline void load_argument(const SMEM &smem, const skl_cuda_argument &argument, const CUtensorMap &rows_map,
                                     const CUtensorMap &stream_map, smem_rows<SMEM::ROW_DIM / 64> &rows,
                                     row_stage<DIM> (&stages)[DEPTH], gradient_barriers<DEPTH> &barriers)
{
    const skl_sequence &sequence = smem.tile.sequence;
    const stage_schedule stream = warp_uniform(smem.stream);
    const int batch = warp_uniform((int)sequence.batch), heads = warp_uniform(smem.heads);
    for (int h = 0, n = 0; h < heads; h++) {
        const int head = warp_uniform(smem.query_head(h)), key_head = head / argument.heads_per_key;
        if (smem.has_new_rows(h, argument)) {
            const int first = warp_uniform((int)((DK ? sequence.key_begin : sequence.query_begin) + smem.tile.first));
            if (h > 0) /* waits until no wgmma reads the last rows any more */
                barrier_wait(barriers.empty[(n - 1) % DEPTH], (n - 1) / DEPTH % 2);
            barrier_expect_tx(barriers.rows_full, rows.SIZE);
            load_slabs(rows.slabs, rows_map, first, DK ? key_head : head, batch, barriers.rows_full);
        }
        for (int s = 0; s < stream.stages; s++, n++)
            load_stage(stages, barriers, stream_map, n, stream.row_at(s), DK ? head : key_head, batch);
    }
}

/* Executed by one warp: factors of two-term rows, with the row stats of streamed queries. */
template <int DIM, bool DK, bool WRT_B>
__device__ inline void produce_factors(const backward_params &params, wide_smem<two_term_f32, DIM, DK> &smem)
{
    const stage_schedule &stream = smem.stream;
    const skl_sequence &sequence = smem.tile.sequence;
    const int end = stream.row + smem.visible.of(smem.count - 1).end; /* end of the rows that some row needs */
    for (int n = 0; n < stream.stages * smem.heads; n++) {
        const int stage = n % smem.WRT_DEPTH, phase = n / smem.WRT_DEPTH % 2, s = n % stream.stages;
        const int64_t head = smem.query_head(n / stream.stages);
        lane_row_stats loaded;
        if constexpr (DK)
            loaded = load_stage_row_stats(params, sequence, stream, end - stream.row, head,
                                          stream.stage_at(s) * STAGE_ROWS);
        const skl_cuda_argument &a = params.a, &b = params.b;
        const lane_factors factors =
            DK ? load_stage_factors(a.q_factors, head, b.q_factors, head, sequence.batch, stream.row_at(s), end)
               : load_stage_factors(a.k_factors, head / a.heads_per_key, b.k_factors, head / b.heads_per_key,
                                    sequence.batch, stream.row_at(s), end);
        for (int n = 0; n < STAGE_ROWS / 32 && DK; n++)
            loaded.stat[n][3] *= (WRT_B ? factors.b : factors.a)[n] * TWO_TERM_LARGEST;
        barrier_wait(smem.wrt.empty[stage], phase ^ 1); /* the loads are in flight meanwhile */
        if constexpr (DK)
            store_stage_row_stats(smem.stats.staged[stage], loaded);
        store_stage_factors(smem.stats.factors[stage], factors);
        barrier_arrive(smem.stats_full[stage]); /* every lane, because every lane has written */
    }
}

/* Executed by one warp: row stats of streamed queries or poison of streamed keys, and masked stages. */
template <typename ELEMENT, int DIM, bool DK, bool WRT_B, bool CAPPED>
__device__ inline void produce_row_stats(const backward_params &params, wide_smem<ELEMENT, DIM, DK> &smem)
{
    const stage_schedule &stream = smem.stream;
    /* Full stages of keys have neither; a loop for both kinds reads zeros. */
    const int stages = DK || HAS_ONE_LOOP<ELEMENT, CAPPED> ? stream.stages : stream.masked_stages;
    for (int n = 0; n < stages * smem.heads; n++) {
        const int stage = n % smem.WRT_DEPTH, phase = n / smem.WRT_DEPTH % 2, s = n % stages;
        float(*poison)[STAGE_ROWS];
        if constexpr (DK) {
            const lane_row_stats loaded =
                load_stage_row_stats(params, smem.tile.sequence, stream, smem.visible.of(smem.count - 1).end,
                                     smem.query_head(n / stages), stream.stage_at(s) * STAGE_ROWS);
            barrier_wait(smem.wrt.empty[stage], phase ^ 1); /* the loads are in flight meanwhile */
            stage_row_stats &stats = smem.stats.staged[stage];
            store_stage_row_stats(stats, loaded);
            poison = WRT_B ? &stats.lse_b : &stats.lse_a;
        } else {
            barrier_wait(smem.wrt.empty[stage], phase ^ 1);
            poison = &smem.stats.poison[stage];
            for (int row = (int)(threadIdx.x % 32); row < STAGE_ROWS; row += 32)
                (*poison)[row] = 0.0F;
        }
        complete_stage<ELEMENT>(s < stream.masked_stages, smem.wrt_stages[stage], *poison, smem.wrt.full[stage],
                                phase, smem.stats_full[stage]);
    }
}

} // namespace sm90

#endif
