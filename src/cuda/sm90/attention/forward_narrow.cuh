/* Forward of heads of up to 128 dimensions: four warpgroups, one stage of logits each.
 *
 *   block   4 warpgroups of 64 queries; one block a multiprocessor. It has one tile or, where all tiles see all keys
 *           (PERSISTENT), takes one after another
 *   regs    128 a thread: logits of a stage of 64 keys (64), 64 dimensions of the first argument's Q (16), row states
 *   shared  DEPTH stages of 64 keys of both arguments; the other dimensions of Q, 256 queries
 *
 *   warpgroup   products of stage n (wgmma), then its exponentials and sums, with nothing of its own beside them:
 *               what runs beside them are the other three warpgroups, each somewhere else in its stage
 *   last one    its first warp also copies (TMA): at stage n it refills the place of stage n - 1; behind the last
 *               stages of a tile with the first ones of the next
 *   a change    of tiles is each warpgroup's own: queries of the next one are copied, then rows of the last written
 *
 * Heads of this size take about as long for exponentials as for products, and more instructions than both: four warps
 * a scheduler keep it busier than two whose products and exponentials overlap. A fifth warpgroup for copies would
 * leave each thread 112 registers. */
#ifndef SKL_CUDA_SM90_ATTENTION_FORWARD_NARROW_CUH
#define SKL_CUDA_SM90_ATTENTION_FORWARD_NARROW_CUH

#include "cuda/sm90/attention/forward_stage.cuh"

namespace sm90
{

template <typename ELEMENT, int DIM, bool CAPPED, bool PERSISTENT> struct narrow_forward {
    static constexpr int GROUPS = 4;
    static constexpr int THREADS = 128 * GROUPS;
    typedef query_tile<GROUPS> tile_type;
    static constexpr int REG_DIMS = CAPPED ? 0 : 64; /* dimensions of the first argument's queries in registers */
    static constexpr int PRODUCER_WARP = (GROUPS - 1) * 4;
    static constexpr int DEPTH = DIM == 64 ? 8 : REG_DIMS > 0 ? 4 : 3; /* stages */

    struct memory {
        key_stage<DIM> stages[DEPTH];
        smem_rows<DIM / 64, tile_type::ROWS> q_b;
        smem_rows<(DIM - REG_DIMS) / 64, tile_type::ROWS> q_a;
        uint64_t queries_full[GROUPS], full[DEPTH], empty[DEPTH];
        row_stream keys;                     /* from one thread for all of them; the band is only here */
        tile_type tiles[PERSISTENT ? 3 : 1]; /* in turns: some warps are still at the last one when the next is looked
                                                for */
        tma_coord next_coord;                /* of the warp that copies: the next one */
    };
    static_assert(sizeof(memory) <= 227 * 1024, "a block's shared memory");

    const forward_params &params;
    const forward_maps &maps;
    memory &smem;
    /* The same for all lanes of a warp. */
    int group, warp; /* of the block */
    tma_coord from;  /* of the warp that copies */
    stage_order keys;
    int iteration, iterations; /* PERSISTENT: tiles done, and all of them */
    int stage, phase;          /* the next stage's place, and the parity of the phase that fills it */
    /* Of the thread. */
    uint32_t q_frag[REG_DIMS / 16 + (REG_DIMS == 0)][4];
    skl_row_state state[2];

    /* ---- Copies --------------------------------------------------------------------------------------------- */

    __device__ void load_stage(int n, int to) const
    {
        load_keys(smem.stages[to], maps, from, keys.row_of(n), smem.full[to]);
    }

    /* The queries of a warpgroup, but for those held. */
    __device__ void load_queries_of(int of, const tma_coord &tile) const
    {
        uint64_t &full = smem.queries_full[of];
        barrier_expect_tx(full, (smem.q_a.SIZE + smem.q_b.SIZE) / GROUPS);
        load_queries<REG_DIMS>(smem.q_a, maps.queries_a, tile, full, of * 64);
        load_queries<0>(smem.q_b, maps.queries_b, tile, full, of * 64);
    }

    /* Barriers are there for others when all warps have met. */
    __device__ void start_loads(const tile_type &tile)
    {
        if (threadIdx.x % 32 == 0)
            init_barriers<narrow_forward>(smem);
        __syncwarp();
        from = warp_uniform(tma_coord::of(params, tile));
        for (int of = 0; of < GROUPS; of++)
            load_queries_of(of, from);
    }

    /* A block that stays leaves the last place to stage 0, which fills it in every tile. */
    __device__ void load_first_stages() const
    {
        for (int n = 0; n < min(DEPTH - PERSISTENT, keys.stages); n++)
            load_stage(n, n);
    }

    /* Goes on behind stage n. The one before it, perhaps of the last tile, has been left by this warpgroup; the last
     * of them to leave it is seldom far behind. */
    __device__ void release_stage(int n)
    {
        const int later = n - 1 + DEPTH;
        const bool has_next = later < keys.stages || (PERSISTENT && iteration + 1 < iterations);
        if (warp == PRODUCER_WARP && has_next && (PERSISTENT || n > 0)) {
            const int last = stage == 0 ? DEPTH - 1 : stage - 1;
            barrier_wait(smem.empty[last], stage == 0 ? phase ^ 1 : phase);
            if (PERSISTENT && later == keys.stages)
                from = warp_uniform(smem.next_coord);
            load_stage(PERSISTENT && later >= keys.stages ? later - keys.stages : later, last);
        }
        if (++stage == DEPTH) {
            stage = 0;
            phase ^= 1;
        }
    }

    /* ---- Tiles ---------------------------------------------------------------------------------------------- */

    __device__ tile_type &tile_of(int number) const
    {
        return smem.tiles[PERSISTENT ? number % 3 : 0];
    }

    __device__ void load_q_frag(const tile_type &tile)
    {
        if constexpr (REG_DIMS > 0) {
            const int rows = (int)skl_min(tile.ROWS, tile.sequence.query_count - tile.first);
            load_rows<REG_DIMS>(q_frag, queries_of<ELEMENT>(params.a, tile.sequence, tile.head).from(tile.first),
                                rows);
        }
    }

    /* Finds the tile behind this one. Others read it when they have waited for this one's last stage, which is copied
     * later: there are more stages than places. */
    __device__ void prefetch_next_tile() const
    {
        if (iteration + 1 < iterations) {
            tile_type &next = tile_of(iteration + 1);
            next.find_persistent(params, iteration + 1, (unsigned)params.head_group);
            smem.next_coord = tma_coord::of(params, next);
        }
        __syncwarp();
    }

    __device__ void start_next_tile(const tile_type &tile)
    {
        named_barrier_sync(1 + group, 128); /* all four warps are done with the queries of the last one */
        if (warp % 4 == 0)
            load_queries_of(group, warp_uniform(tma_coord::of(params, tile)));
        load_q_frag(tile);
        if (warp == PRODUCER_WARP)
            prefetch_next_tile();
    }

    /* Writes the rows of a tile and begins the next; false: there is none. */
    __device__ bool advance_tile()
    {
        const skl_row_state row = merge_two_rows(state[0], state[1]);
        const tile_type &done = tile_of(iteration);
        const bool goes_on = PERSISTENT && ++iteration < iterations;
        if (goes_on)
            start_next_tile(tile_of(iteration));
        write_row_of_two(params, done, row);
        __syncwarp(); /* else ptxas takes the lanes of the next tile for divided, and copies each of their operands */
        return goes_on;
    }

    /* ---- Stages --------------------------------------------------------------------------------------------- */

    /* Logits of the next stage. */
    __device__ void multiply(stage_logits &x, stage_logits &y)
    {
        const uint32_t own = group * (64 * 128 / 16);
        const uint32_t q_a = row_operand(&smem.q_a) + own, q_b = row_operand(&smem.q_b) + own;
        const uint32_t k_a = row_operand(&smem.stages[stage].a), k_b = row_operand(&smem.stages[stage].b);
        barrier_wait(smem.full[stage], phase);
        wgmma_fence();
#pragma unroll
        for (int step = 0; step < DIM / 16; step++)
            if (step < REG_DIMS / 16)
                wgmma<false>(x, q_frag[step], step_of(k_a, step, STAGE_ROWS), step > 0, ELEMENT());
            else
                wgmma<false>(x, step_of(q_a, step - REG_DIMS / 16, tile_type::ROWS), step_of(k_a, step, STAGE_ROWS),
                             step > 0, ELEMENT());
#pragma unroll
        for (int step = 0; step < DIM / 16; step++)
            wgmma<false>(y, step_of(q_b, step, tile_type::ROWS), step_of(k_b, step, STAGE_ROWS), step > 0, ELEMENT());
        wgmma_commit();
        wgmma_wait<0>();
        fence_operand(x);
        fence_operand(y);
        barrier_arrive_if(smem.empty[stage], threadIdx.x % 32 == 0);
        if (CAPPED) {
            cap_stage(x, x, params.a);
            cap_stage(y, y, params.b);
        }
    }

    /* A tile. */
    __device__ void run()
    {
        state[0] = state[1] = skl_state_empty();
        barrier_wait(smem.queries_full[group], PERSISTENT ? iteration % 2 : 0);
        const float scale_a = CAPPED ? 1.0F : params.a.scale, scale_b = CAPPED ? 1.0F : params.b.scale;
        const int begun = max(keys.masked_stages, min(1, keys.stages)); /* a whole first stage gives stabilisers */
        int n = 0;
#pragma unroll 1
        for (; n < begun; n++) {
            stage_logits x, y;
            multiply(x, y);
            const int first = keys.place_of(n) * STAGE_KEYS;
            const reach sees = reach_of(smem.keys.band, group * 64, 64); /* an edge of the block, not of all */
            if (covers(sees.all, first, STAGE_KEYS)) {
                init_shift(state, x, scale_a, y, scale_b);
                add_full(state, x, scale_a, y, scale_b);
            } else if (meets(sees.any, first, STAGE_KEYS)) {
                add_masked(state, x, scale_a, y, scale_b, smem.keys.band, first);
            }
            release_stage(n);
        }
#pragma unroll 1
        for (; n < keys.stages; n++) {
            stage_logits x, y;
            multiply(x, y);
            add_full(state, x, scale_a, y, scale_b);
            release_stage(n);
        }
    }
};

template <typename ELEMENT, int DIM, bool CAPPED, bool PERSISTENT>
__global__ void __launch_bounds__(narrow_forward<ELEMENT, DIM, CAPPED, PERSISTENT>::THREADS, 1)
    narrow_forward_kernel(const __grid_constant__ forward_params params, const __grid_constant__ forward_maps maps)
{
#ifdef __CUDA_ARCH_FEAT_SM90_ALL
    typedef narrow_forward<ELEMENT, DIM, CAPPED, PERSISTENT> forward;
    extern __shared__ __align__(1024) unsigned char raw[];
    typename forward::memory &smem = *(typename forward::memory *)(void *)raw;
    typename forward::tile_type tile;
    if (PERSISTENT ? !tile.find_persistent(params, 0, (unsigned)params.head_group)
                   : !tile.find(params, params.num_splits, (unsigned)params.head_group))
        return;
    const int warp = warp_index();
    forward own = {params, maps, smem, warp / 4, warp};
    if (warp == forward::PRODUCER_WARP)
        own.start_loads(tile);
    if (threadIdx.x == 0) {
        smem.keys = keys_of_tile(params, tile, params.num_splits);
        smem.tiles[0] = tile;
    }
    own.load_q_frag(tile);
    __syncthreads();
    own.keys = warp_uniform(smem.keys);
    if (PERSISTENT) {
        own.keys.left = 0; /* all keys are seen: an edge is at their end, and ptxas may know */
        own.iterations = warp_uniform(tile.iterations(params));
    }
    if (warp == forward::PRODUCER_WARP) {
        own.load_first_stages();
        if (PERSISTENT)
            own.prefetch_next_tile();
    }
    do
        own.run();
    while (own.advance_tile());
#endif
}

} // namespace sm90

#endif
