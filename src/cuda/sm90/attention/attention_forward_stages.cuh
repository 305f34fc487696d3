/* Shared memory of the attention forward that carries its KL, and its producer. */
#ifndef SKL_CUDA_SM90_ATTENTION_ATTENTION_FORWARD_STAGES_CUH
#define SKL_CUDA_SM90_ATTENTION_ATTENTION_FORWARD_STAGES_CUH

#include "cuda/sm90/attention/forward_stage.cuh"

namespace sm90
{

constexpr int FORWARD_KEYS = 96; /* keys per tile */

struct attention_forward_maps {
    CUtensorMap q_a, q_b, k_a, k_b, v;
};

/* DIM: head size of the student, DIM_A: of the teacher. */
template <int DIM, int DIM_A> struct attention_forward_smem {
    static constexpr int KEYS = FORWARD_KEYS;
    struct key_tile {
        unsigned char slabs[(DIM > DIM_A ? DIM : DIM_A) / 64][KEYS][128];
    };
    typedef smem_rows<DIM / 64> q_b_rows;
    typedef smem_rows<DIM_A / 64> q_a_rows;
    static constexpr int DEPTH = depth_for(sizeof(key_tile), q_b_rows::SIZE + q_a_rows::SIZE, 8);
    key_tile ring[DEPTH]; /* K_s, K_t and V of a tile follow each other */
    q_b_rows q_b;
    q_a_rows q_a;
    ring_barriers<DEPTH> barriers;
    uint64_t queries_full;
    block_tile tile;
    stage_schedule keys;
    int queries; /* queries of the tile that exist */
    int needed;  /* keys up to the last one that a query of the tile sees */
    row_ranges<block_tile::ROWS> visible;
};

/* Position in the ring of key tiles. */
template <int DEPTH> struct key_ring_position {
    int slot, phase;

    __device__ void advance()
    {
        const bool wraps = slot == DEPTH - 1;
        slot = wraps ? 0 : slot + 1;
        phase ^= (int)wraps;
    }
};

/* ---- Producer ----------------------------------------------------------------------------------------------- */

template <int SLABS, typename TILE>
__device__ inline void load_key_tile(TILE &to, const CUtensorMap &map, int row, int head, int batch, uint64_t &full)
{
    barrier_expect_tx(full, SLABS * (int)sizeof to.slabs[0]);
#pragma unroll
    for (int slab = 0; slab < SLABS; slab++)
        tma_load(to.slabs[slab], map, slab * 64, row, head, batch, full);
}

template <int DIM, int DIM_A>
__device__ inline void produce_keys(const forward_params &params, const attention_forward_maps &maps,
                                    attention_forward_smem<DIM, DIM_A> &smem)
{
    const tma_coord coord = warp_uniform(tma_coord::of(params, smem.tile));
    const stage_schedule keys = warp_uniform(smem.keys);
    barrier_expect_tx(smem.queries_full, smem.q_a.SIZE + smem.q_b.SIZE);
    load_slabs(smem.q_b.slabs, maps.q_b, coord.query, coord.head, coord.batch, smem.queries_full);
    load_slabs(smem.q_a.slabs, maps.q_a, coord.query, coord.head, coord.batch, smem.queries_full);
    key_ring_position<smem.DEPTH> at = {0, 0};
    for (int n = 0; n < keys.stages; n++) {
        const int row = keys.row_at(n, smem.KEYS);
#pragma unroll
        for (int part = 0; part < 3; part++, at.advance()) {
            uint64_t &full = smem.barriers.full[at.slot];
            barrier_wait(smem.barriers.empty[at.slot], at.phase ^ 1);
            if (part == 1)
                load_key_tile<DIM_A / 64>(smem.ring[at.slot], maps.k_a, row, coord.head_a, coord.batch, full);
            else
                load_key_tile<DIM / 64>(smem.ring[at.slot], part == 0 ? maps.k_b : maps.v, row, coord.head_b,
                                        coord.batch, full);
        }
    }
}

} // namespace sm90

#endif
