/* Shared memory of the fused backward, and the loads of its stages. */
#ifndef SKL_CUDA_SM90_ATTENTION_FUSED_BACKWARD_STAGES_CUH
#define SKL_CUDA_SM90_ATTENTION_FUSED_BACKWARD_STAGES_CUH

#include <type_traits>

#include "cuda/sm90/attention/query_backward.cuh"

namespace sm90
{

/* GROUPS: dq warpgroups. */
template <int D_WRT, int D_OTHER, int GROUPS = 2> struct fused_backward_shape {
    static constexpr int DIM = D_WRT, OTHER_DIM = D_OTHER;
    static constexpr bool WIDE_OTHER = OTHER_DIM > 128;
    static constexpr int DK_DIMS = WIDE_OTHER ? 64 : DIM; /* dimensions of dk at a time */
    static constexpr int DQ_GROUPS = GROUPS;
    static constexpr int THREADS = 128 * (DQ_GROUPS + 1);
    typedef query_tile<DQ_GROUPS> tile_type;
    static constexpr int ROWS = tile_type::ROWS; /* queries */

    /* Registers of a thread: 24 ordinary ones, 64 logits, 16 of G, DIM / 2 of dq and 8 spare ones, without which
     * ptxas does not succeed. Queries of the other argument get the rest. */
    static constexpr int DK_REGS = WIDE_OTHER || DQ_GROUPS == 3 ? 72 : 104;
    static constexpr int DQ_REGS = (65536 / THREADS / 8 * 8 * (DQ_GROUPS + 1) - DK_REGS) / DQ_GROUPS / 8 * 8;
    static constexpr int Q_REGS = DQ_REGS - 24 - 64 - 16 - DIM / 2 - 8;

    /* Dimensions of the other argument's queries in registers, and slabs of the rest in shared memory. */
    static constexpr int REG_DIMS = Q_REGS * 4 < OTHER_DIM ? Q_REGS / 8 * 32 : OTHER_DIM;
    static constexpr int OTHER_SLABS = REG_DIMS < OTHER_DIM ? SLABS_OF<OTHER_DIM> - REG_DIMS / 64 : 0;

    static constexpr int FIXED = (SLABS_OF<DIM> + OTHER_SLABS + 2) * ROWS * 128 + DK_DIMS / 32 * STAGE_KEYS * 128 +
                                 ROWS * (int)sizeof(row_stats) + 1024;
    static constexpr int STAGE_SIZE = (int)(sizeof(row_stage<DIM>) + sizeof(row_stage<OTHER_DIM>));
    static constexpr int DEPTH = depth_for(STAGE_SIZE, FIXED, 6); /* pipeline stages */

    /* Sums of the KL in double, where they do not take the place of a stage. */
    typedef std::conditional_t<DQ_GROUPS == 3, quad_long_sums<384>, long_sums<256>> long_totals;
    static constexpr bool HAS_LONG_SUMS =
        !WIDE_OTHER && depth_for(STAGE_SIZE, FIXED + (int)sizeof(long_totals), 6) == DEPTH;
    typedef std::conditional_t<HAS_LONG_SUMS, long_totals, long_sums<1>> totals_type;
};

template <typename SHAPE> struct fused_backward_smem : SHAPE {
    using SHAPE::DEPTH;
    smem_rows<SLABS_OF<SHAPE::DIM>, SHAPE::ROWS> wrt_queries;
    struct {
        row_stage<SHAPE::DIM> wrt;
        row_stage<SHAPE::OTHER_DIM> other;
    } stages[DEPTH];
    unsigned char g[2][SHAPE::ROWS][128];                   /* [query][key] */
    unsigned char dk[SHAPE::DK_DIMS / 32][STAGE_KEYS][128]; /* dk of a stage, f32: slabs of 32 dimensions */
    smem_rows<SHAPE::OTHER_SLABS, SHAPE::ROWS> other_queries;
    uint64_t queries_full, full[DEPTH], sanitized[DEPTH], g_full[2], g_empty[2];
    typename SHAPE::tile_type tile; /* in shared memory to save registers */
    int count;                      /* queries of the tile that exist */
    stage_schedule keys;
    row_ranges<SHAPE::ROWS> visible;
    float unit;                                         /* unit of G */
    int in_units;                                       /* whether all upstream gradients are the unit */
    float poison[DEPTH][STAGE_KEYS];                    /* NaN for non-finite keys of the wrt argument, else 0 */
    row_stats stats[SHAPE::ROWS];                       /* LSEs in base 2, upstream gradients divided by the unit */
    uint64_t other_full[SHAPE::WIDE_OTHER ? DEPTH : 1]; /* WIDE_OTHER: `full` is of the wrt argument alone */
    typename SHAPE::totals_type totals;                 /* sums of the KL */

    template <typename ELEMENT> __device__ bool sanitize_key(int stage, int row)
    {
        return sanitize_row<ELEMENT, SHAPE::DIM>(stages[stage].wrt.slabs, row, true);
    }
};

/* `sums`: f32 sums of dk in global memory. */
struct fused_backward_maps {
    CUtensorMap wrt_queries, other_queries, wrt_keys, other_keys, sums;
};

/* ---- TMA ---------------------------------------------------------------------------------------------------- */

/* Loads of the block, issued by one warp. All members are warp-uniform. */
template <typename SHAPE> struct stage_loader {
    fused_backward_smem<SHAPE> &smem;
    const fused_backward_maps &maps;
    stage_schedule keys;
    int batch, head, wrt_head, other_head;

    __device__ void load_queries(int row) const
    {
        uint64_t &full = smem.queries_full;
        barrier_expect_tx(full, smem.wrt_queries.SIZE + smem.other_queries.SIZE);
        load_slabs(smem.wrt_queries.slabs, maps.wrt_queries, row, head, batch, full);
        if constexpr (SHAPE::OTHER_SLABS > 0)
            load_slabs(smem.other_queries.slabs, maps.other_queries, row, head, batch, full,
                       SHAPE::REG_DIMS / 64 * 64);
    }

    /* The stage must have been released. Does nothing after the last stage. */
    __device__ void load_stage(int n) const
    {
        if (n >= keys.stages)
            return;
        constexpr int WRT = SLABS_OF<SHAPE::DIM>, OTHER = SHAPE::WIDE_OTHER ? 0 : SLABS_OF<SHAPE::OTHER_DIM>;
        const int stage = n % smem.DEPTH, row = keys.row_at(n);
        auto &to = smem.stages[stage];
        uint64_t &full = smem.full[stage];
        barrier_expect_tx(full, (WRT + OTHER) * STAGE_ROWS * 128);
#pragma unroll
        for (int slab = 0; slab < (WRT > OTHER ? WRT : OTHER); slab++) {
            if (slab < OTHER)
                tma_load(to.other.slabs[slab], maps.other_keys, slab * 64, row, other_head, batch, full);
            if (slab < WRT)
                tma_load(to.wrt.slabs[slab], maps.wrt_keys, slab * 64, row, wrt_head, batch, full);
        }
    }

    /* WIDE_OTHER: the other argument's keys of a stage. */
    __device__ void load_other_stage(int n) const
    {
        if (n >= keys.stages)
            return;
        const int stage = n % smem.DEPTH, row = keys.row_at(n);
        barrier_expect_tx(smem.other_full[stage], (int)sizeof smem.stages[stage].other);
        load_slabs(smem.stages[stage].other.slabs, maps.other_keys, row, other_head, batch, smem.other_full[stage]);
    }
};

} // namespace sm90

#endif
