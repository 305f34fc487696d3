/* Forward for head sizes up to 128, and for pairs of sizes with a sum of at most 256: KL and LSEs of each row, in one
 * pass over the keys.
 *
 * Bound: at 128 dimensions tensor cores, exponentials and shared memory are equally busy (1,024 clocks each per 128
 * queries x 64 keys), and other arithmetic competes with them; at 64 dimensions the exponentials.
 *
 *   block      4 warpgroups of 64 queries; one block per SM. A block processes one tile or, if every query attends to
 *              all keys, is PERSISTENT and processes one tile after another. Or two blocks of 2 warpgroups per SM
 *   registers  128 per thread: logits of a stage of 64 keys (64), 64 dimensions of A's Q (16), row states
 *   shared     DEPTH stages of 64 keys of both arguments; the remaining dimensions of Q for 256 queries
 *
 * Each warpgroup alternates between its wgmmas (W) and its exponentials and sums (E). It overlaps nothing by itself:
 * the four warpgroups drift apart, so that one's wgmmas overlap the others' arithmetic.
 *
 *   warpgroup 0   W W E E E E E E W W E E E E E E
 *   warpgroup 1   E E W W E E E E E E W W E E E E
 *   warpgroup 2   E E E E W W E E E E E E W W E E
 *   warpgroup 3   E E E E E E W W E E E E E E W W      its first warp is also the producer (TMA): at stage n it
 *                                                      refills the buffer of stage n - 1, at the end of a tile with
 *                                                      the first stages of the next tile
 *
 * A warpgroup changes tiles independently of the others: it loads the next tile's queries, then writes the last
 * tile's rows.
 *
 * Two blocks per SM pay at 64 dimensions and for few keys: one computes while the other begins or ends, and a mask
 * cuts fewer pairs. In return each loads the keys for itself, and at 128 dimensions two stages are all it has room
 * for.
 *
 * Exponentials take about as long as wgmmas at these head sizes, and both together need fewer issue slots than the
 * other arithmetic. Four warps per scheduler keep it busier than two that overlap wgmmas and exponentials themselves.
 * A producer warpgroup would be the fifth and leave 112 registers per thread. */
#ifndef SKL_CUDA_SM90_ATTENTION_FORWARD_NARROW_CUH
#define SKL_CUDA_SM90_ATTENTION_FORWARD_NARROW_CUH

#include "cuda/sm90/attention/narrow_stage.cuh"

namespace sm90
{

template <typename ELEMENT, int DIM_A, int DIM_B, logit_form FORM, bool PERSISTENT, int WARPGROUPS = 4>
struct narrow_forward : narrow_shape<ELEMENT, DIM_A, DIM_B, WARPGROUPS> {
    typedef narrow_shape<ELEMENT, DIM_A, DIM_B, WARPGROUPS> shape;
    using shape::BLOCKS_PER_SM, shape::DEPTH, shape::GROUPS, shape::PRODUCER_WARP, shape::REFILL_FIRST;
    using shape::REG_DIMS, typename shape::tile_type;
    static constexpr bool IS_PERSISTENT = PERSISTENT, CAPPED = FORM != PLAIN_LOGITS;
    /* Computes no stage that is masked for all of a warpgroup's rows. With many keys the branch costs more. */
    static constexpr bool SKIPS_STAGES = BLOCKS_PER_SM > 1;
    /* The ranges of visible keys take the last bytes where few keys are allowed. */
    typedef std::conditional_t<BLOCKS_PER_SM == 1 || DIM_A + DIM_B <= 128, int, uint16_t> key_index;

    struct memory : narrow_buffers<shape> {
        stage_schedule keys;
        row_ranges<tile_type::ROWS, key_index> visible;
        tile_type tiles[PERSISTENT ? 3 : 1]; /* ring: last, current and next tile */
        tma_coord next_coord;                /* next tile, for the producer warp */
    };
    static_assert(sizeof(memory) <= shape::SMEM, "shared memory of a block");

    const forward_params &params;
    const forward_maps &maps;
    memory &smem;
    /* Warp-uniform: */
    int warpgroup, warp; /* indices in the block */
    tma_coord coord;     /* producer warp: the tile that it loads */
    stage_schedule keys;
    int iteration, iterations; /* PERSISTENT: index of the current tile, number of tiles */
    int stage, phase;          /* pipeline state: the next stage to consume */
    /* Per thread: */
    uint32_t q_frag[REG_DIMS / 16][4];
    skl_row_state state[2];

    /* ---- Producer ------------------------------------------------------------------------------------------- */

    __device__ void load_stage(int n, int to) const
    {
        load_keys(smem.stages[to], maps, coord, keys.row_at(n), smem.full[to]);
    }

    /* Initializes the barriers, which other warps may use after __syncthreads, and loads the first queries. */
    __device__ void start_loads(const tile_type &tile)
    {
        if (threadIdx.x % 32 == 0) {
            init_barriers<narrow_forward>(smem);
            barrier_init_fence();
        }
        __syncwarp();
        coord = warp_uniform(tma_coord::of(params, tile));
        for (int of = 0; of < GROUPS; of++)
            load_queries_of<shape>(smem, maps, of, coord);
    }

    /* PERSISTENT: leaves the last buffer empty; advance_stage(0) fills it, as in every later tile. */
    __device__ void load_first_stages() const
    {
        for (int n = 0; n < min(DEPTH - PERSISTENT, keys.stages); n++)
            load_stage(n, n);
    }

    /* Advances the pipeline state after stage n; the producer warp first refills the buffer of stage n - 1 (for n =
     * 0: of the last tile's final stage). This warpgroup has released that buffer, and the slowest one is rarely far
     * from doing so. */
    __device__ void advance_stage(int n)
    {
        const int refill = n - 1 + DEPTH;
        const bool has_next = refill < keys.stages || (PERSISTENT && iteration + 1 < iterations);
        if (warp == PRODUCER_WARP && has_next && (PERSISTENT || n > 0)) {
            const int previous = stage == 0 ? DEPTH - 1 : stage - 1;
            barrier_wait(smem.empty[previous], stage == 0 ? phase ^ 1 : phase);
            if (PERSISTENT && refill == keys.stages)
                coord = warp_uniform(smem.next_coord);
            load_stage(PERSISTENT && refill >= keys.stages ? refill - keys.stages : refill, previous);
        }
        if (++stage == DEPTH) {
            stage = 0;
            phase ^= 1;
        }
    }

    /* ---- Tiles ---------------------------------------------------------------------------------------------- */

    __device__ tile_type &tile_of(int index) const
    {
        return smem.tiles[PERSISTENT ? index % 3 : 0];
    }

    __device__ void load_q_frag(const tile_type &tile)
    {
        const int rows = (int)skl_min(tile.ROWS, tile.sequence.query_count - tile.first);
        load_a_frag<REG_DIMS>(q_frag, queries_of<ELEMENT>(params.a, tile.sequence, tile.head).from(tile.first), rows);
    }

    /* Finds the next tile. Other warps read it after they have waited for this tile's last stage. That orders the
     * two: a tile has more stages than the pipeline, so this warp issues the last stage's load later. */
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
        named_barrier_sync(1 + warpgroup, 128); /* all four warps are done with the last tile's queries */
        if (warp % 4 == 0)
            load_queries_of<shape>(smem, maps, warpgroup, warp_uniform(tma_coord::of(params, tile)));
        load_q_frag(tile);
        if (warp == PRODUCER_WARP)
            prefetch_next_tile();
    }

    /* Writes a tile's rows and starts the next tile; false if there is none. */
    __device__ bool advance_tile()
    {
        const skl_row_state row = merge_two_rows(state[0], state[1]);
        const tile_type &done = tile_of(iteration);
        const bool has_next = PERSISTENT && ++iteration < iterations;
        if (has_next)
            start_next_tile(tile_of(iteration));
        write_row_of_two(params, done, row);
        __syncwarp(); /* without it ptxas assumes divergent lanes in the next tile, and copies every wgmma operand
                         from ordinary registers: 11 % slower */
        return has_next;
    }

    /* ---- Stages --------------------------------------------------------------------------------------------- */

    __device__ void run_tile()
    {
        state[0] = state[1] = skl_state_empty();
        barrier_wait(smem.queries_full[warpgroup], PERSISTENT ? iteration % 2 : 0);
        const float scale_a = CAPPED ? 1.0F : params.a.scale, scale_b = CAPPED ? 1.0F : params.b.scale;
        const int prologue = max(keys.masked_stages, min(1, keys.stages)); /* a first full stage initializes shifts */
        int n = 0;
#pragma unroll 1
        for (; n < (CAPPED ? keys.stages : prologue); n++) {
            const int first = keys.stage_at(n) * STAGE_KEYS;
            const reach sees = reach_of(smem.visible, warpgroup * 64, 64); /* masked for another warpgroup, maybe */
            if (SKIPS_STAGES && !overlaps(sees.any, first, STAGE_KEYS)) {
                skip_stage<shape>(smem, stage, phase);
                advance_stage(n);
                continue;
            }
            stage_logits x, y;
            compute_logits<shape>(x, y, smem, q_frag, warpgroup, stage, phase);
            if (REFILL_FIRST)
                advance_stage(n);
            if (!CAPPED || n < prologue || !add_capped<FORM>(state, x, y, params)) {
                if (CAPPED) {
                    cap_stage(x, x, params.a);
                    cap_stage(y, y, params.b);
                }
                if (overlaps(sees.any, first, STAGE_KEYS))
                    add_masked(state, x, scale_a, y, scale_b, smem.visible, first,
                               covers(sees.all, first, STAGE_KEYS));
            }
            if (!REFILL_FIRST)
                advance_stage(n);
        }
#pragma unroll 1
        for (; n < keys.stages; n++) {
            stage_logits x, y;
            compute_logits<shape>(x, y, smem, q_frag, warpgroup, stage, phase);
            if (REFILL_FIRST)
                advance_stage(n);
            add_full(state, x, scale_a, y, scale_b);
            if (!REFILL_FIRST)
                advance_stage(n);
        }
    }
};

template <typename FORWARD>
__global__ void __launch_bounds__(FORWARD::THREADS, FORWARD::BLOCKS_PER_SM)
    narrow_forward_kernel(const __grid_constant__ forward_params params, const __grid_constant__ forward_maps maps)
{
#ifdef __CUDA_ARCH_FEAT_SM90_ALL
    typedef FORWARD forward;
    constexpr bool PERSISTENT = FORWARD::IS_PERSISTENT;
    extern __shared__ __align__(1024) unsigned char raw[];
    typename forward::memory &smem = *(typename forward::memory *)(void *)raw;
    typename forward::tile_type tile;
    if (PERSISTENT ? !tile.find_persistent(params, 0, (unsigned)params.head_group)
                   : !tile.find(params, params.num_splits, (unsigned)params.head_group))
        return;
    const int warp = warp_index();
    forward worker = {{}, params, maps, smem, warp / 4, warp};
    if (warp == forward::PRODUCER_WARP)
        worker.start_loads(tile);
    const row_stream keys = keys_of_tile(params, tile, params.num_splits);
    smem.visible.fill(keys.band);
    if (threadIdx.x == 0) {
        smem.keys = keys;
        smem.tiles[0] = tile;
    }
    worker.load_q_frag(tile);
    __syncthreads();
    worker.keys = warp_uniform(smem.keys);
    if (PERSISTENT) {
        worker.keys.left = 0; /* only the last stages are masked, and a constant helps ptxas */
        worker.iterations = warp_uniform(tile.iterations(params));
    }
    if (warp == forward::PRODUCER_WARP) {
        worker.load_first_stages();
        if (PERSISTENT)
            worker.prefetch_next_tile();
    }
    do
        worker.run_tile();
    while (worker.advance_tile());
#endif
}

} // namespace sm90

#endif
