/* Forward of heads of up to 128 dimensions: four warpgroups, one stage of logits each.
 *
 *   block   4 warpgroups of 64 queries; one block a multiprocessor. It has one tile or, where all tiles see all keys
 *           (STAYS), takes one after another
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
#ifndef SKL_CUDA_SM90_FORWARD_NARROW_CUH
#define SKL_CUDA_SM90_FORWARD_NARROW_CUH

#include "cuda/sm90/forward_stage.cuh"

namespace sm90
{

template <typename ELEMENT, int DIM, bool CAPPED, bool STAYS> struct narrow_forward {
    static constexpr int GROUPS = 4;
    static constexpr int THREADS = 128 * GROUPS;
    typedef query_place<GROUPS> place;
    static constexpr int HELD = CAPPED ? 0 : 64; /* dimensions of the first argument's queries in registers */
    static constexpr int COPY_WARP = (GROUPS - 1) * 4;
    static constexpr int DEPTH = DIM == 64 ? 8 : HELD > 0 ? 4 : 3; /* stages */

    struct memory {
        key_stage<DIM> stages[DEPTH];
        lying_rows<DIM / 64, place::ROWS> lying_b;
        lying_rows<(DIM - HELD) / 64, place::ROWS> lying_a;
        uint64_t queries_full[GROUPS], full[DEPTH], empty[DEPTH];
        row_stream keys;            /* from one thread for all of them; the band is only here */
        place tiles[STAYS ? 3 : 1]; /* in turns: some warps are still at the last one when the next is looked for */
        copy_place following;       /* of the warp that copies: the next one */
    };
    static_assert(sizeof(memory) <= 227 * 1024, "a block's shared memory");

    const skl_cuda_params &params;
    const forward_maps &maps;
    memory &block;
    /* The same for all lanes of a warp. */
    int group, warp; /* of the block */
    copy_place from; /* of the warp that copies */
    stage_order keys;
    int round, rounds; /* STAYS: tiles done, and all of them */
    int at, parity;    /* the next stage's place, and the parity of the phase that fills it */
    /* Of the thread. */
    uint32_t held[HELD / 16 + (HELD == 0)][4];
    skl_row_state state[2];

    /* ---- Copies --------------------------------------------------------------------------------------------- */

    __device__ void copy_stage(int n, int to) const
    {
        copy_keys(block.stages[to], maps, from, keys.row_of(n), block.full[to]);
    }

    /* The queries of a warpgroup, but for those held. */
    __device__ void copy_queries_of(int of, const copy_place &tile) const
    {
        uint64_t &full = block.queries_full[of];
        barrier_expect(full, (block.lying_a.SIZE + block.lying_b.SIZE) / GROUPS);
        copy_queries<HELD>(block.lying_a, maps.queries_a, tile, full, of * 64);
        copy_queries<0>(block.lying_b, maps.queries_b, tile, full, of * 64);
    }

    /* Barriers are there for others when all warps have met. */
    __device__ void begin_copies(const place &tile)
    {
        if (threadIdx.x % 32 == 0)
            init_barriers<narrow_forward>(block);
        __syncwarp();
        from = common(copy_place::of(params, tile));
        for (int of = 0; of < GROUPS; of++)
            copy_queries_of(of, from);
    }

    /* A block that stays leaves the last place to stage 0, which fills it in every tile. */
    __device__ void copy_first_stages() const
    {
        for (int n = 0; n < min(DEPTH - STAYS, keys.stages); n++)
            copy_stage(n, n);
    }

    /* Goes on behind stage n. The one before it, perhaps of the last tile, has been left by this warpgroup; the last
     * of them to leave it is seldom far behind. */
    __device__ void leave(int n)
    {
        const int later = n - 1 + DEPTH;
        const bool wanted = later < keys.stages || (STAYS && round + 1 < rounds);
        if (warp == COPY_WARP && wanted && (STAYS || n > 0)) {
            const int last = at == 0 ? DEPTH - 1 : at - 1;
            barrier_wait(block.empty[last], at == 0 ? parity ^ 1 : parity);
            if (STAYS && later == keys.stages)
                from = common(block.following);
            copy_stage(STAYS && later >= keys.stages ? later - keys.stages : later, last);
        }
        if (++at == DEPTH) {
            at = 0;
            parity ^= 1;
        }
    }

    /* ---- Tiles ---------------------------------------------------------------------------------------------- */

    __device__ place &tile_of(int number) const
    {
        return block.tiles[STAYS ? number % 3 : 0];
    }

    __device__ void hold_queries(const place &tile)
    {
        if constexpr (HELD > 0) {
            const int rows = (int)skl_min(tile.ROWS, tile.sequence.query_count - tile.first);
            load_rows<HELD>(held, queries_of<ELEMENT>(params.one, tile.sequence, tile.head).from(tile.first), rows);
        }
    }

    /* Finds the tile behind this one. Others read it when they have waited for this one's last stage, which is copied
     * later: there are more stages than places. */
    __device__ void look_ahead() const
    {
        if (round + 1 < rounds) {
            place &next = tile_of(round + 1);
            next.find_in_turn(params, round + 1);
            block.following = copy_place::of(params, next);
        }
        __syncwarp();
    }

    __device__ void begin_next(const place &tile)
    {
        barrier_of(1 + group, 128); /* all four warps are done with the queries of the last one */
        if (warp % 4 == 0)
            copy_queries_of(group, common(copy_place::of(params, tile)));
        hold_queries(tile);
        if (warp == COPY_WARP)
            look_ahead();
    }

    /* Writes the rows of a tile and begins the next; false: there is none. */
    __device__ bool change_tiles()
    {
        const skl_row_state row = merge_two_rows(state[0], state[1]);
        const place &done = tile_of(round);
        const bool goes_on = STAYS && ++round < rounds;
        if (goes_on)
            begin_next(tile_of(round));
        write_row_of_two(params, done, row);
        __syncwarp(); /* else ptxas takes the lanes of the next tile for divided, and copies each of their operands */
        return goes_on;
    }

    /* ---- Stages --------------------------------------------------------------------------------------------- */

    /* Logits of the next stage. */
    __device__ void multiply(stage_logits &x, stage_logits &y)
    {
        const uint32_t own = group * (64 * 128 / 16);
        const uint32_t q_a = row_operand(&block.lying_a) + own, q_b = row_operand(&block.lying_b) + own;
        const uint32_t k_a = row_operand(&block.stages[at].one), k_b = row_operand(&block.stages[at].two);
        barrier_wait(block.full[at], parity);
        wgmma_fence();
#pragma unroll
        for (int step = 0; step < DIM / 16; step++)
            if (step < HELD / 16)
                wgmma<false>(x, held[step], step_of(k_a, step, STAGE), step > 0, ELEMENT());
            else
                wgmma<false>(x, step_of(q_a, step - HELD / 16, place::ROWS), step_of(k_a, step, STAGE), step > 0,
                             ELEMENT());
#pragma unroll
        for (int step = 0; step < DIM / 16; step++)
            wgmma<false>(y, step_of(q_b, step, place::ROWS), step_of(k_b, step, STAGE), step > 0, ELEMENT());
        wgmma_commit();
        wgmma_wait<0>();
        settle(x);
        settle(y);
        barrier_arrive_if(block.empty[at], threadIdx.x % 32 == 0);
        if (CAPPED) {
            cap_stage(x, x, params.one);
            cap_stage(y, y, params.two);
        }
    }

    /* A tile. */
    __device__ void run()
    {
        state[0] = state[1] = skl_state_empty();
        barrier_wait(block.queries_full[group], STAYS ? round % 2 : 0);
        const float scale_a = CAPPED ? 1.0F : params.one.scale, scale_b = CAPPED ? 1.0F : params.two.scale;
        const int begun = max(keys.edges, min(1, keys.stages)); /* a whole first stage gives stabilisers */
        int n = 0;
#pragma unroll 1
        for (; n < begun; n++) {
            stage_logits x, y;
            multiply(x, y);
            const int first = keys.place_of(n) * KEYS;
            const reach sees = reach_of(block.keys.band, group * 64, 64); /* an edge of the block, not of all */
            if (covers(sees.all, first, KEYS)) {
                begin_rows(state, x, scale_a, y, scale_b);
                add_whole(state, x, scale_a, y, scale_b);
            } else if (meets(sees.any, first, KEYS)) {
                add_edge(state, x, scale_a, y, scale_b, block.keys.band, first);
            }
            leave(n);
        }
#pragma unroll 1
        for (; n < keys.stages; n++) {
            stage_logits x, y;
            multiply(x, y);
            add_whole(state, x, scale_a, y, scale_b);
            leave(n);
        }
    }
};

template <typename ELEMENT, int DIM, bool CAPPED, bool STAYS>
__global__ void __launch_bounds__(narrow_forward<ELEMENT, DIM, CAPPED, STAYS>::THREADS, 1)
    narrow_forward_kernel(const __grid_constant__ skl_cuda_params params, const __grid_constant__ forward_maps maps)
{
#ifdef __CUDA_ARCH_FEAT_SM90_ALL
    typedef narrow_forward<ELEMENT, DIM, CAPPED, STAYS> forward;
    extern __shared__ __align__(1024) unsigned char raw[];
    typename forward::memory &block = *(typename forward::memory *)(void *)raw;
    typename forward::place tile;
    if (STAYS ? !tile.find_in_turn(params, 0) : !tile.find(params, params.splits))
        return;
    const int warp = own_warp();
    forward own = {params, maps, block, warp / 4, warp};
    if (warp == forward::COPY_WARP)
        own.begin_copies(tile);
    if (threadIdx.x == 0) {
        block.keys = keys_of_tile(params, tile);
        block.tiles[0] = tile;
    }
    own.hold_queries(tile);
    __syncthreads();
    own.keys = common(block.keys);
    if (STAYS) {
        own.keys.left = 0; /* all keys are seen: an edge is at their end, and ptxas may know */
        own.rounds = common(tile.rounds(params));
    }
    if (warp == forward::COPY_WARP) {
        own.copy_first_stages();
        if (STAYS)
            own.look_ahead();
    }
    do
        own.run();
    while (own.change_tiles());
#endif
}

} // namespace sm90

#endif
