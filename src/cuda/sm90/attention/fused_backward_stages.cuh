/* Block, shared memory and TMA of the fused backward and of the joint backward. */
#ifndef SKL_CUDA_SM90_ATTENTION_FUSED_BACKWARD_STAGES_CUH
#define SKL_CUDA_SM90_ATTENTION_FUSED_BACKWARD_STAGES_CUH

#include <type_traits>

#include "cuda/sm90/attention/logit_gradients.cuh"
#include "cuda/sm90/launch.cuh"

namespace sm90
{

constexpr int TILE_QUERIES = block_tile::ROWS;

/* The argument with gradients and the remaining one, which has gradients, too, where GRADIENTS is ARGUMENTS. */
enum { WRT, OTHER, ARGUMENTS };

/* dq warpgroups, one dk warpgroup, and a producer warpgroup where PRODUCER_REGS is not 0: without it the dk warpgroup
 * loads. *_REGS: registers of a thread. */
template <int GROUPS, int REGS_OF_DK, int REGS_OF_PRODUCER = 0> struct dq_dk_block {
    static constexpr int DQ_GROUPS = GROUPS;
    static constexpr int DK_WARPGROUP = DQ_GROUPS; /* after the dq warpgroups */
    static constexpr int WARPGROUPS = DQ_GROUPS + 1 + (REGS_OF_PRODUCER > 0);
    static constexpr int THREADS = 128 * WARPGROUPS;
    typedef query_tile<DQ_GROUPS> tile_type;
    static constexpr int ROWS = tile_type::ROWS; /* queries */
    static constexpr int DK_REGS = REGS_OF_DK, PRODUCER_REGS = REGS_OF_PRODUCER;
    static constexpr int DQ_REGS =
        (65536 / THREADS / 8 * 8 * WARPGROUPS - DK_REGS - PRODUCER_REGS) / DQ_GROUPS / 8 * 8;
};

template <int D_OTHER, int GROUPS>
using fused_backward_block = dq_dk_block<GROUPS, (D_OTHER > 128 || GROUPS == 3 ? 72 : 104)>;

/* Gradients of one argument. GROUPS: dq warpgroups. */
template <int D_WRT, int D_OTHER, int GROUPS = 2>
struct fused_backward_shape : fused_backward_block<D_OTHER, GROUPS> {
    using fused_backward_block<D_OTHER, GROUPS>::DQ_REGS;
    using fused_backward_block<D_OTHER, GROUPS>::ROWS;
    static constexpr int DIM = D_WRT, OTHER_DIM = D_OTHER, GRADIENTS = 1;
    static constexpr bool WIDE_OTHER = OTHER_DIM > 128;
    static constexpr int DK_DIMS = WIDE_OTHER ? 64 : DIM; /* dimensions of dk in a buffer */
    static constexpr int DK_PRODUCT_DIMS = DK_DIMS;       /* dimensions of dk in registers */
    static constexpr int DK_BUFFERS = 1, G_BUFFERS = 2;

    /* Registers for queries: ordinary values, logits, G and dq come first; ptxas does not succeed without spare ones.
     */
    static constexpr int Q_REGS = DQ_REGS - 24 - 64 - 16 - DIM / 2 - 8;

    /* Dimensions of the other argument's queries in registers, and slabs of the rest in shared memory. */
    static constexpr int REG_DIMS = Q_REGS * 4 < OTHER_DIM ? Q_REGS / 8 * 32 : OTHER_DIM;
    static constexpr int OTHER_SLABS = REG_DIMS < OTHER_DIM ? SLABS_OF<OTHER_DIM> - REG_DIMS / 64 : 0;

    static constexpr int FIXED = (SLABS_OF<DIM> + OTHER_SLABS + 2) * ROWS * 128 + DK_DIMS / 32 * STAGE_KEYS * 128 +
                                 ROWS * (int)sizeof(row_stats) + 1024;
    static constexpr int STAGE_SIZE = (int)(sizeof(row_stage<DIM>) + sizeof(row_stage<OTHER_DIM>));
    static constexpr int DEPTH = depth_for(STAGE_SIZE, FIXED, 6); /* pipeline stages */

    /* Sums of the KL in double, where they do not take the place of a stage. */
    typedef std::conditional_t<GROUPS == 3, quad_long_sums<384>, long_sums<256>> long_totals;
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
    unsigned char g[SHAPE::G_BUFFERS][SHAPE::GRADIENTS][SHAPE::ROWS][128];     /* [query][key] */
    unsigned char dk[SHAPE::DK_BUFFERS][SHAPE::DK_DIMS / 32][STAGE_KEYS][128]; /* f32: slabs of 32 dimensions */
    smem_rows<SHAPE::OTHER_SLABS, SHAPE::ROWS> other_queries;
    uint64_t queries_full, full[DEPTH], sanitized[DEPTH], g_full[SHAPE::G_BUFFERS];
    uint64_t g_empty[SHAPE::G_BUFFERS][SHAPE::GRADIENTS];
    typename SHAPE::tile_type tile; /* in shared memory to save registers */
    int count;                      /* queries of the tile that exist */
    stage_schedule keys;
    row_ranges<SHAPE::ROWS> visible;
    float unit;                      /* of G */
    int in_units;                    /* whether all upstream gradients are the unit */
    float poison[DEPTH][STAGE_KEYS]; /* NaN for non-finite keys of arguments with gradients, else 0 */
    row_stats stats[SHAPE::ROWS];    /* LSEs in base 2, upstream gradients divided by the unit */
    uint64_t other_full[SHAPE::WIDE_OTHER ? DEPTH : 1]; /* WIDE_OTHER: `full` is of the wrt argument alone */
    typename SHAPE::totals_type totals;                 /* of the KL */

    /* Executed by all threads. */
    __device__ void fill_visible(const bounded_band &band)
    {
        visible.fill(band);
    }

    __device__ void init_barriers()
    {
        barrier_init(queries_full, 1);
        for (int stage = 0; stage < DEPTH; stage++) {
            barrier_init(full[stage], 1);
            barrier_init(sanitized[stage], 128);
            if (SHAPE::WIDE_OTHER)
                barrier_init(other_full[stage], 1);
        }
        for (int buffer = 0; buffer < SHAPE::G_BUFFERS; buffer++) {
            barrier_init(g_full[buffer], SHAPE::DQ_GROUPS * 128);
            for (int which = 0; which < SHAPE::GRADIENTS; which++)
                barrier_init(g_empty[buffer][which], 4);
        }
    }

    /* Queries of an argument with gradients, as the operand of dk. */
    __device__ uint32_t dk_queries(int which) const
    {
        const void *const rows = which == WRT ? (const void *)&wrt_queries : &other_queries;
        return mn_major_operand(rows, SHAPE::ROWS * 128);
    }
};

/* `sums`: f32 sums of dk in global memory. */
template <int GRADIENTS> struct fused_backward_maps {
    CUtensorMap wrt_queries, other_queries, wrt_keys, other_keys, sums[GRADIENTS];
};

/* ---- TMA ---------------------------------------------------------------------------------------------------- */

/* Where dk goes: f32 sums in global memory. All members are warp-uniform. */
template <int GRADIENTS> struct dk_target {
    const CUtensorMap (&sums)[GRADIENTS];
    stage_schedule keys;
    int batch;
    int key_head[ARGUMENTS];
    float factor[ARGUMENTS]; /* dk = factor G^T q */

    /* Adds dk of a warp's 16 keys of stage n, from dimension first_dim on. */
    template <int SLABS>
    __device__ void reduce_add(int n, int which, int first_dim, const unsigned char (&dk)[SLABS][STAGE_KEYS][128],
                               int warp) const
    {
#pragma unroll
        for (int slab = 0; slab < SLABS; slab++)
            tma_reduce_add(sums[which], first_dim + slab * 32, keys.row_at(n) + warp * 16, key_head[which], batch,
                           dk[slab][warp * 16]);
        tma_commit();
    }
};

/* Loads of the block, issued by one warp. All members are warp-uniform. */
template <typename SHAPE> struct stage_loader : dk_target<SHAPE::GRADIENTS> {
    fused_backward_smem<SHAPE> &smem;
    const fused_backward_maps<SHAPE::GRADIENTS> &maps;
    int head;
    using dk_target<SHAPE::GRADIENTS>::keys;
    using dk_target<SHAPE::GRADIENTS>::batch;
    using dk_target<SHAPE::GRADIENTS>::key_head;

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
        const int stage = n % smem.DEPTH, row = keys.row_at(n);
        auto &to = smem.stages[stage];
        uint64_t &full = smem.full[stage];
        barrier_expect_tx(full, (int)(SHAPE::WIDE_OTHER ? sizeof to.wrt : sizeof to));
        if (!SHAPE::WIDE_OTHER)
            load_slabs(to.other.slabs, maps.other_keys, row, key_head[OTHER], batch, full);
        load_slabs(to.wrt.slabs, maps.wrt_keys, row, key_head[WRT], batch, full);
    }

    /* WIDE_OTHER: the other argument's keys of a stage. */
    __device__ void load_other_stage(int n) const
    {
        if (n >= keys.stages)
            return;
        const int stage = n % smem.DEPTH;
        barrier_expect_tx(smem.other_full[stage], (int)sizeof smem.stages[stage].other);
        load_slabs(smem.stages[stage].other.slabs, maps.other_keys, keys.row_at(n), key_head[OTHER], batch,
                   smem.other_full[stage]);
    }
};

} // namespace sm90

#endif
