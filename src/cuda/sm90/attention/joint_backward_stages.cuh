/* Shared memory of the joint backward, and its TMA. */
#ifndef SKL_CUDA_SM90_ATTENTION_JOINT_BACKWARD_STAGES_CUH
#define SKL_CUDA_SM90_ATTENTION_JOINT_BACKWARD_STAGES_CUH

#include "cuda/sm90/attention/query_backward.cuh"

namespace sm90
{

enum { OF_A, OF_B, ARGUMENTS };

template <int D> struct joint_shape {
    static constexpr int DIM = D, ROWS = TILE_QUERIES, DQ_GROUPS = 2;
    static constexpr bool WIDE = DIM > 64;              /* registers and shared memory are short */
    static constexpr int KEYS = WIDE ? 32 : STAGE_KEYS; /* keys of a stage whose logits are in registers together */
    static constexpr int DQ_REGS = 200, DK_REGS = 504 - DQ_GROUPS * DQ_REGS;
    static constexpr int DK_DIMS = WIDE ? 32 : 64; /* dimensions of dk in a buffer */
    static constexpr int DK_BUFFERS = WIDE ? 2 : 1, G_BUFFERS = WIDE ? 1 : 2;
    static constexpr int FIXED = ARGUMENTS * (SLABS_OF<DIM> + G_BUFFERS) * ROWS * 128 +
                                 DK_BUFFERS * DK_DIMS / 32 * STAGE_KEYS * 128 + ROWS * (int)sizeof(row_stats) + 1024;
    static constexpr int DEPTH = depth_for(ARGUMENTS * (int)sizeof(row_stage<DIM>), FIXED, 6);
};

template <typename SHAPE> struct joint_backward_smem : SHAPE {
    using SHAPE::DEPTH;
    static constexpr float unit = 1.0F; /* unit of G: bf16 needs no other one */
    smem_rows<SLABS_OF<SHAPE::DIM>> queries[ARGUMENTS];
    row_stage<SHAPE::DIM> stages[DEPTH][ARGUMENTS];
    unsigned char g[SHAPE::G_BUFFERS][ARGUMENTS][SHAPE::ROWS][128];            /* [query][key] */
    unsigned char dk[SHAPE::DK_BUFFERS][SHAPE::DK_DIMS / 32][STAGE_KEYS][128]; /* f32: slabs of 32 dimensions */
    uint64_t queries_full, full[DEPTH], sanitized[DEPTH], g_full[SHAPE::G_BUFFERS];
    uint64_t g_empty[SHAPE::G_BUFFERS][ARGUMENTS];
    block_tile tile; /* in shared memory to save registers */
    int count;       /* queries of the tile that exist */
    stage_schedule keys;
    row_ranges<SHAPE::ROWS> visible;
    float poison[DEPTH][STAGE_KEYS]; /* NaN for keys that are not finite in one of the arguments, else 0 */
    row_stats stats[SHAPE::ROWS];    /* LSEs in base 2 */

    template <typename ELEMENT> __device__ bool sanitize_key(int stage, int row)
    {
        bool finite = true;
#pragma unroll
        for (int which = 0; which < ARGUMENTS; which++)
            finite = sanitize_row<ELEMENT, SHAPE::DIM>(stages[stage][which].slabs, row, true) && finite;
        return finite;
    }
};

/* `sums`: f32 sums of dk in global memory. */
struct joint_backward_maps {
    CUtensorMap queries[ARGUMENTS], keys[ARGUMENTS], sums[ARGUMENTS];
};

/* ---- TMA ---------------------------------------------------------------------------------------------------- */

/* Loads of the block, issued by one warp. All members are warp-uniform. */
template <typename SHAPE> struct joint_loader {
    joint_backward_smem<SHAPE> &smem;
    const joint_backward_maps &maps;
    stage_schedule keys;
    int batch, head, key_head[ARGUMENTS];

    __device__ void load_queries(int row) const
    {
        barrier_expect_tx(smem.queries_full, ARGUMENTS * smem.queries[0].SIZE);
#pragma unroll
        for (int which = 0; which < ARGUMENTS; which++)
            load_slabs(smem.queries[which].slabs, maps.queries[which], row, head, batch, smem.queries_full);
    }

    /* The stage must have been released. Does nothing after the last stage. */
    __device__ void load_stage(int n) const
    {
        if (n >= keys.stages)
            return;
        const int stage = n % smem.DEPTH, row = keys.row_at(n);
        barrier_expect_tx(smem.full[stage], (int)sizeof smem.stages[stage]);
#pragma unroll
        for (int which = 0; which < ARGUMENTS; which++)
            load_slabs(smem.stages[stage][which].slabs, maps.keys[which], row, key_head[which], batch,
                       smem.full[stage]);
    }
};

} // namespace sm90

#endif
