/* Forward of many short masked tiles, where all sequences have the same mask: KL and LSEs of each row.
 *
 * Bound: that of the narrow forward. But a tile has few stages, and a block per tile spends more time on its
 * beginning (find the tile, wait for queries and keys) and its end than on them. So two persistent blocks per SM
 * process one tile after another:
 *
 *   producer    runs ahead over the stages of all tiles of its block: at the end of a tile, the first stages of the
 *               next one are there
 *   consumers   two warpgroups of 64 queries. Each loads its queries of the next tile as soon as it is done with
 *               those of the last one, and writes the last tile's rows meanwhile
 *
 * Tiles are ordered longest first over all heads and sequences. In every round each block computes one of them, in
 * every other round in reverse order, so that all have about the same number of stages. The warpgroups swap their
 * rows from tile to tile: under a causal mask the last 64 queries of a tile have one more stage than the first. */
#ifndef SKL_CUDA_SM90_ATTENTION_FORWARD_SHORT_CUH
#define SKL_CUDA_SM90_ATTENTION_FORWARD_SHORT_CUH

#include "cuda/sm90/attention/narrow_stage.cuh"

namespace sm90
{

/* The mask of every sequence: row i attends to keys [i + begin, i + end), within [key_first, key_count). */
struct common_mask {
    int begin, end, key_first, key_count, query_count;

    __device__ static common_mask of(const skl_cuda_params &params)
    {
        const skl_sequence s = device_sequence(params, 0);
        const skl_band band = skl_key_band(&params.problem, &s);
        return {saturated(band.begin), saturated(band.end), (int)band.first, (int)band.count, (int)s.query_count};
    }

    __device__ int end_of(int row) const
    {
        return max(key_first, min(key_count, row + end));
    }
};

/* A tile of `rows` queries, its keys and its mask. */
struct short_tile {
    tma_coord coord;
    stage_schedule keys;
    band32 band;

    __device__ void set_keys(const common_mask &mask, int rows)
    {
        const int first = coord.query, origin = max(mask.key_first, min(mask.end_of(first), first + mask.begin));
        const int needed = max(0, mask.end_of(min(first + rows, mask.query_count) - 1) - origin);
        const band32 relative = {first + mask.begin - origin, first + mask.end - origin, mask.key_count - origin};
        const range32 all = reach_of(relative, 0, rows).all;
        const int stages = max(1, (needed + STAGE_ROWS - 1) / STAGE_ROWS); /* no keys: a stage that all warps skip */
        const int left = min((all.begin + STAGE_ROWS - 1) / STAGE_ROWS, stages);
        const int full = max(0, min(all.end / STAGE_ROWS, stages) - left) / 2 * 2;
        keys = {origin, stages, stages - full, left};
        band = relative;
    }
};

/* The keys that rows of a warpgroup attend to, from a band in shared memory. Volatile: each use loads it again, which
 * takes fewer registers. Rows count from `offset` on. */
struct smem_band {
    const volatile band32 &band;
    int offset;

    __device__ range32 of(int row) const
    {
        return {max(0, band.begin + row + offset), min(band.count, band.end + row + offset)};
    }
};

template <typename ELEMENT, int DIM_A, int DIM_B>
struct short_forward : narrow_shape<ELEMENT, DIM_A, DIM_B, SKL_SM90_PAIRED_ROWS / 64> {
    typedef narrow_shape<ELEMENT, DIM_A, DIM_B, SKL_SM90_PAIRED_ROWS / 64> shape;
    using shape::DEPTH, shape::GROUPS, shape::PRODUCER_WARP, shape::REFILL_FIRST, shape::REG_DIMS;
    using typename shape::tile_type;
    static constexpr int FINDER_WARP = PRODUCER_WARP + 1;
    /* Tiles are found that much ahead: a stage that is loaded may be of a tile DEPTH later than the current one, and
     * the warpgroup meets once in a tile. */
    static constexpr int AHEAD = DEPTH + 1;
    /* The other warpgroup may lag by DEPTH tiles, and then still writes the rows of the tile before. */
    static constexpr int TILES = AHEAD + DEPTH + 2;

    struct memory : narrow_buffers<shape> {
        common_mask mask;
        int iterations;                   /* tiles of this block */
        int load_iteration, load_segment; /* next load of the producer warp; see next_segment() */
        short_tile tiles[TILES];          /* ring: of the iterations around the current one */
    };
    static_assert(sizeof(memory) <= shape::SMEM, "shared memory of a block");
    static_assert(GROUPS == 2, "two warpgroups swap their rows");

    const forward_params &params;
    const forward_maps &maps;
    memory &smem;
    /* Warp-uniform: */
    int warpgroup, warp;                                            /* indices in the block */
    int iteration;                                                  /* index of the current tile */
    int stage, phase;                                               /* pipeline state: the next stage to consume */
    int load_row, load_count, load_batch, load_head_a, load_head_b; /* producer warp: the next stages to load */
    /* Per thread: */
    uint32_t q_frag[REG_DIMS / 16][4];
    skl_row_state state[2];

    /* ---- Tiles ---------------------------------------------------------------------------------------------- */

    __device__ int count_tiles() const
    {
        const unsigned all = (unsigned)(params.problem.heads_s * params.problem.batch) * tile_type::tiles(params);
        const unsigned rounds = all / gridDim.x;
        return (int)(rounds + (index_in_round(rounds) < all % gridDim.x));
    }

    __device__ static unsigned index_in_round(unsigned n)
    {
        return n % 2 != 0 ? gridDim.x - 1 - blockIdx.x : blockIdx.x;
    }

    /* Finds the block's n-th tile, if there is one and it has a place in the ring. */
    __device__ void find(int n) const
    {
        if (n >= min(smem.iterations, iteration + AHEAD + 1))
            return;
        const unsigned heads = (unsigned)params.problem.heads_s, all = heads * (unsigned)params.problem.batch;
        const unsigned number = (unsigned)n * gridDim.x + index_in_round((unsigned)n), in_order = number / all;
        const int head = (int)(number % all % heads);
        short_tile &tile = smem.tiles[n % TILES];
        tile.coord = {(int)(number % all / heads), (int)(tile_type::tiles(params) - 1 - in_order) * tile_type::ROWS,
                      head, head / params.a.heads_per_key, head / params.b.heads_per_key};
        tile.set_keys(smem.mask, tile_type::ROWS);
    }

    __device__ const short_tile &tile_of(int n) const
    {
        return smem.tiles[n % TILES];
    }

    /* Returns the offset that makes the warpgroups swap their rows of a tile. */
    __device__ int row_offset(int n, int of_warpgroup) const
    {
        return n % 2 == 0 ? 0 : of_warpgroup == 0 ? 64 : -64;
    }

    /* ---- Loads ---------------------------------------------------------------------------------------------- */

    __device__ void load_queries(int n, int of_warpgroup) const
    {
        tma_coord coord = warp_uniform(tile_of(n).coord);
        coord.query += row_offset(n, of_warpgroup);
        load_queries_of<shape>(smem, maps, of_warpgroup, coord);
    }

    __device__ void load_q_frag()
    {
        const tma_coord &tile = tile_of(iteration).coord;
        const int first = tile.query + row_offset(iteration, warpgroup);
        const row_source<ELEMENT> queries = {(const ELEMENT *)params.a.q.data +
                                                 SKL_ROW(params.a.q, tile.batch, tile.head, first),
                                             params.a.q.stride_row, params.a.dim};
        load_a_frag<REG_DIMS>(q_frag, queries, (int)params.problem.len_q - first);
    }

    /* Producer warp: finds the stages to load next, with keys in memory order: those masked at the left end of a
     * tile's keys, then those at the right end, then the full ones. None are left after the last tile. */
    __device__ void next_segment()
    {
        const int iterations = warp_uniform(smem.iterations);
        int of = warp_uniform(smem.load_iteration), segment = warp_uniform(smem.load_segment);
        load_count = 0;
        while (load_count == 0 && of < iterations) {
            const stage_schedule keys = warp_uniform(tile_of(of).keys);
            const int counts[] = {keys.left, keys.masked_stages - keys.left, keys.stages - keys.masked_stages};
            load_count = segment == 0 ? counts[0] : segment == 1 ? counts[1] : counts[2];
            load_row = keys.row + STAGE_ROWS * (segment == 0 ? 0 : segment == 1 ? keys.left + counts[2] : keys.left);
            load_batch = warp_uniform(tile_of(of).coord.batch);
            load_head_a = warp_uniform(tile_of(of).coord.head_a);
            load_head_b = warp_uniform(tile_of(of).coord.head_b);
            of += segment == 2;
            segment = segment == 2 ? 0 : segment + 1;
        }
        __syncwarp(); /* all lanes have read them */
        smem.load_iteration = of;
        smem.load_segment = segment;
        __syncwarp();
    }

    /* Producer warp: loads the next stage into a free buffer, if there is one. It has to be short: all wait for it.
     */
    __device__ void load_next(int to)
    {
        if (load_count == 0)
            return;
        load_keys(smem.stages[to], maps, {load_batch, 0, 0, load_head_a, load_head_b}, load_row, smem.full[to]);
        load_row += STAGE_ROWS;
        if (--load_count == 0)
            next_segment();
    }

    /* Advances the pipeline state; the producer warp first refills the buffer of the stage before this one. */
    __device__ void advance_stage()
    {
        if (warp == PRODUCER_WARP) {
            const int previous = stage == 0 ? DEPTH - 1 : stage - 1;
            barrier_wait(smem.empty[previous], stage == 0 ? phase ^ 1 : phase);
            load_next(previous);
        }
        if (++stage == DEPTH) {
            stage = 0;
            phase ^= 1;
        }
    }

    /* ---- Stages --------------------------------------------------------------------------------------------- */

    __device__ void run_tile()
    {
        state[0] = state[1] = skl_state_empty();
        barrier_wait(smem.queries_full[warpgroup], iteration % 2);
        const int stages = warp_uniform(tile_of(iteration).keys.stages);
        const int prologue = max(warp_uniform(tile_of(iteration).keys.masked_stages), 1); /* initializes shifts */
        const float scale_a = params.a.scale, scale_b = params.b.scale;
        int n = 0;
#pragma unroll 1
        for (; n < prologue; n++) {
            const int first = warp_uniform(tile_of(iteration).keys).stage_at(n) * STAGE_KEYS;
            const smem_band visible = {tile_of(iteration).band, row_offset(iteration, warpgroup)};
            if (!overlaps(reach_of(visible, warpgroup * 64, 64).any, first, STAGE_KEYS)) {
                skip_stage<shape>(smem, stage, phase);
                advance_stage();
                continue;
            }
            stage_logits x, y;
            compute_logits<shape>(x, y, smem, q_frag, warpgroup, stage, phase);
            if (REFILL_FIRST)
                advance_stage();
            const bool full = covers(reach_of(visible, warpgroup * 64, 64).all, first, STAGE_KEYS);
            add_masked(state, x, scale_a, y, scale_b, visible, first, full);
            if (!REFILL_FIRST)
                advance_stage();
        }
#pragma unroll 1
        for (; n < stages; n++) {
            stage_logits x, y;
            compute_logits<shape>(x, y, smem, q_frag, warpgroup, stage, phase);
            if (REFILL_FIRST)
                advance_stage();
            add_full(state, x, scale_a, y, scale_b);
            if (!REFILL_FIRST)
                advance_stage();
        }
    }

    __device__ static void set_row(const skl_output &rows, const tma_coord &tile, int query, float value)
    {
        if (rows.data != NULL)
            ((float *)rows.data)[SKL_ROW(rows, tile.batch, tile.head, query)] = value;
    }

    /* Writes a row as write_row_of_two does, in the 32-bit arithmetic that this kernel's problems allow. */
    __device__ void write_row(int n, const skl_row_state &of_keys) const
    {
        const int lane = (int)(threadIdx.x % 4), row = acc_row<1>(0, lane % 2), offset = row_offset(n, warpgroup);
        const bool of_b = lane / 2 != 0, of_s = of_b != (params.problem.direction == SKL_KL_REVERSE);
        const tma_coord &tile = tile_of(n).coord;
        const int query = tile.query + offset + row;
        if (query >= (int)params.problem.len_q)
            return;
        const skl_rows &rows = params.call.rows;
        const range32 sees = smem_band{tile_of(n).band, offset}.of(row);
        skl_row_state row_state = of_keys;
        if (params.problem.sinks && sees.begin < sees.end)
            row_state = add_sink(of_keys, skl_sink_logits_of(&params.call.inputs, tile.head, NO_LSES),
                                 params.problem.direction == SKL_KL_REVERSE);
        const bool one_outcome = sees.end - sees.begin == 1 && !params.problem.sinks;
        const float lse = fast_lse(of_b ? row_state.m_b : row_state.m_a, of_b ? row_state.l_b : row_state.l_a);
        if (of_s)
            set_row(rows.lse_s, tile, query, lse);
        else
            set_row(rows.lse_t, tile, query, lse);
        if (of_b)
            return;
        set_row(rows.kl, tile, query, reported_kl(one_outcome, skl_state_kl(&row_state)));
    }

    /* Starts the next tile and writes the rows of the last one; false if there is none. */
    __device__ bool advance_tile()
    {
        const skl_row_state row = merge_two_rows(state[0], state[1]);
        const bool has_next = ++iteration < warp_uniform(smem.iterations);
        if (has_next) {
            named_barrier_sync(1 + warpgroup, 128); /* all four warps are done with the last tile's queries */
            if (warp % 4 == 0)
                load_queries(iteration, warpgroup);
            load_q_frag();
            if (warp == FINDER_WARP)
                find(iteration + AHEAD);
        }
        write_row(iteration - 1, row);
        __syncwarp(); /* see narrow_forward::advance_tile */
        return has_next;
    }

    /* Initializes barriers and tiles, which other warps may use after __syncthreads, and starts the first loads. */
    __device__ void start_loads()
    {
        if (threadIdx.x % 32 == 0) {
            init_barriers<short_forward>(smem);
            barrier_init_fence();
            smem.mask = common_mask::of(params);
            smem.iterations = count_tiles();
            smem.load_iteration = smem.load_segment = 0;
        }
        __syncwarp();
        find((int)(threadIdx.x % 32));
        __syncwarp();
        next_segment();
        for (int of = 0; of < GROUPS; of++)
            load_queries(0, of);
        for (int n = 0; n < DEPTH - 1; n++)
            load_next(n); /* advance_stage() fills the last buffer, as in every later tile */
    }

    __device__ void run()
    {
        if (warp == PRODUCER_WARP)
            start_loads();
        __syncthreads();
        load_q_frag();
        do
            run_tile();
        while (advance_tile());
    }
};

template <typename FORWARD>
__global__ void __launch_bounds__(FORWARD::THREADS, FORWARD::BLOCKS_PER_SM)
    short_forward_kernel(const __grid_constant__ forward_params params, const __grid_constant__ forward_maps maps)
{
#ifdef __CUDA_ARCH_FEAT_SM90_ALL
    extern __shared__ __align__(1024) unsigned char raw[];
    typename FORWARD::memory &smem = *(typename FORWARD::memory *)(void *)raw;
    const int warp = warp_index();
    FORWARD worker = {{}, params, maps, smem, warp / 4, warp};
    worker.run();
#endif
}

} // namespace sm90

#endif
