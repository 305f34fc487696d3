/* The skeleton of the Hopper kernels for attention statistics: 4 warpgroups of 64 queries stream the keys that they
 * see, 64 per stage, and hand the products of a stage to a CONSUMER. bf16 and f16, heads of up to 256.
 *
 *   block      4 warpgroups, each alternates between its wgmmas (W) and its arithmetic (E), as in the narrow forward;
 *              one block per SM, 128 registers per thread
 *   shared     256 queries; DEPTH stages of 64 keys; what the CONSUMER keeps
 *
 *   warpgroup 0   W E E E W E E E
 *   warpgroup 1   E W E E E W E E
 *   warpgroup 2   E E W E E E W E
 *   warpgroup 3   E E E W E E E W      its first warp is also the producer (TMA): at stage n it refills the buffer of
 *                                      stage n - 1, at the end of a tile with the first stages of the next tile
 *
 * A block processes the tiles of a chunk (common/stats.cuh), and a warpgroup changes tiles independently of the
 * others.
 *
 * CONSUMER has ELEMENT, DIM, KEYS_ARE_ROWS (the products are K Q^T, not Q K^T), a struct `shared` of a warpgroup,
 * start_tile(), which loads nothing but row data, add_stage<MASKED>(x, stage), and finish_tile(). */
#ifndef SKL_CUDA_SM90_ATTENTION_STATS_TILES_CUH
#define SKL_CUDA_SM90_ATTENTION_STATS_TILES_CUH

#include <limits.h>

#include "cuda/common/stats.cuh"
#include "cuda/sm90/attention/softcap.cuh"
#include "cuda/sm90/launch.cuh"

namespace sm90
{

constexpr int STATS_WARPGROUPS = 4, STATS_QUERIES = 64; /* queries of a warpgroup */
constexpr int STATS_TILE = STATS_WARPGROUPS * STATS_QUERIES;
constexpr int STATS_THREADS = 128 * STATS_WARPGROUPS;
constexpr int STATS_PRODUCER_WARP = 4 * (STATS_WARPGROUPS - 1);

struct stats_maps {
    CUtensorMap queries, keys;
};

template <typename CONSUMER> struct stats_smem {
    static constexpr int DIM = CONSUMER::DIM;
    typedef smem_rows<SLABS_OF<DIM>, STATS_QUERIES> query_rows;
    static constexpr int FIXED = STATS_WARPGROUPS * (query_rows::SIZE + (int)sizeof(typename CONSUMER::shared));
    static constexpr int DEPTH = depth_for(sizeof(row_stage<DIM>), FIXED, 8);
    row_stage<DIM> stages[DEPTH];
    query_rows queries[STATS_WARPGROUPS];
    ring_barriers<DEPTH> barriers;
    uint64_t queries_full[STATS_WARPGROUPS];
    typename CONSUMER::shared of_warpgroup[STATS_WARPGROUPS];
    stats_chunk chunk;
    int exists;

    __device__ void init_barriers()
    {
        barriers.init(STATS_WARPGROUPS * 4);
        for (uint64_t &barrier : queries_full)
            barrier_init(barrier, 1);
        barrier_init_fence();
    }

    __device__ void end_barriers()
    {
        for (int stage = 0; stage < DEPTH; stage++) {
            barrier_end(barriers.full[stage]);
            barrier_end(barriers.empty[stage]);
        }
        for (uint64_t &barrier : queries_full)
            barrier_end(barrier);
    }
};

/* The state of a warpgroup. */
template <typename SMEM> struct stats_position {
    const stats_params &params;
    const stats_maps &maps;
    SMEM &smem;
    int warpgroup, warp; /* warp-uniform */
    int first;           /* first query of the warpgroup in the current tile */

    __device__ const stats_chunk &chunk() const
    {
        return smem.chunk;
    }

    __device__ const skl_sequence &sequence() const
    {
        return smem.chunk.sequence;
    }

    /* Waits for the other warps of the warpgroup. */
    __device__ void sync() const
    {
        named_barrier_sync(1 + warpgroup, 128);
    }
};

template <typename CONSUMER> struct stats_warpgroup : CONSUMER {
    typedef stats_smem<CONSUMER> memory;
    static constexpr int DEPTH = memory::DEPTH, DIM = CONSUMER::DIM;
    using CONSUMER::chunk, CONSUMER::first, CONSUMER::maps, CONSUMER::params, CONSUMER::sequence, CONSUMER::smem;
    using CONSUMER::warp, CONSUMER::warpgroup;
    int slot, phase;                      /* the next stage to consume */
    int load_round, load_stage, load_end; /* producer warp: the next stage to load */

    /* ---- Producer warp -------------------------------------------------------------------------------------- */

    /* Finds the next stage to load; false: there is none. */
    __device__ bool find_load()
    {
        const stats_chunk &tiles = chunk();
        const int rounds = tiles.rounds();
        while (load_stage >= load_end && load_round < rounds) {
            const int of_tile = tiles.first_query(load_round++);
            if (of_tile < 0)
                continue;
            const skl_band band = skl_key_band(&params.problem, &tiles.sequence);
            const range32 stages = tiles.stages(band, of_tile, STATS_TILE);
            load_stage = warp_uniform(stages.begin);
            load_end = warp_uniform(stages.end);
        }
        __syncwarp();
        return load_stage < load_end;
    }

    __device__ void load(int to)
    {
        const skl_sequence &s = sequence();
        uint64_t &full = smem.barriers.full[to];
        barrier_expect_tx(full, (int)sizeof smem.stages[to]);
        load_slabs(smem.stages[to].slabs, maps.keys, warp_uniform((int)s.key_begin) + load_stage * STAGE_KEYS,
                   warp_uniform(chunk().head / params.b.heads_per_key), warp_uniform((int)s.batch), full);
        load_stage++;
    }

    /* Advances after a stage. The producer warp refills the buffer of the stage before, which this warpgroup has
     * released. */
    __device__ void advance(bool first_stage)
    {
        if (warp == STATS_PRODUCER_WARP && !first_stage && find_load()) {
            const int previous = slot == 0 ? DEPTH - 1 : slot - 1;
            barrier_wait(smem.barriers.empty[previous], slot == 0 ? phase ^ 1 : phase);
            load(previous);
        }
        if (++slot == DEPTH) {
            slot = 0;
            phase ^= 1;
        }
    }

    __device__ void load_queries() const
    {
        const skl_sequence &s = sequence();
        uint64_t &full = smem.queries_full[warpgroup];
        barrier_expect_tx(full, memory::query_rows::SIZE);
        load_slabs(smem.queries[warpgroup].slabs, maps.queries, warp_uniform((int)s.query_begin + first),
                   warp_uniform(chunk().head), warp_uniform((int)s.batch), full);
    }

    /* ---- Consumers ------------------------------------------------------------------------------------------ */

    __device__ void release() const
    {
        barrier_arrive_if(smem.barriers.empty[slot], threadIdx.x % 32 == 0);
    }

    __device__ void multiply(stage_logits &x) const
    {
        const uint32_t keys = k_major_operand(&smem.stages[slot]);
        const uint32_t queries = k_major_operand(&smem.queries[warpgroup]);
        constexpr bool KEYS_ARE_ROWS = CONSUMER::KEYS_ARE_ROWS;
        wgmma_fence();
        wgmma_slabs<typename CONSUMER::ELEMENT, DIM, 64, 64>(x, KEYS_ARE_ROWS ? keys : queries,
                                                             KEYS_ARE_ROWS ? queries : keys);
        wgmma_commit();
        wgmma_wait<0>();
        fence_operand(x);
        release();
    }

    __device__ void run_tile(int first_of_block, int &stages_done, int tiles_done)
    {
        const stats_chunk &tiles = chunk();
        const skl_band band = skl_key_band(&params.problem, &tiles.sequence);
        first = first_of_block + warpgroup * STATS_QUERIES;
        if (warp % 4 == 0)
            load_queries();
        CONSUMER::start_tile(band);
        const range32 all = tiles.stages(band, first_of_block, STATS_TILE);
        const int begin = warp_uniform(all.begin), end = warp_uniform(all.end);
        const int count = (int)skl_max(0, skl_min(STATS_QUERIES, tiles.sequence.query_count - first));
        const bool whole = count == STATS_QUERIES;
        const reach sees = reach_of(smem.of_warpgroup[warpgroup].visible, 0, max(count, 1));
        const int any_begin = warp_uniform(sees.any.begin), any_end = warp_uniform(count > 0 ? sees.any.end : 0);
        const int all_begin = warp_uniform(sees.all.begin), all_end = warp_uniform(whole ? sees.all.end : 0);
        barrier_wait(smem.queries_full[warpgroup], tiles_done % 2);
#pragma unroll 1
        for (int stage = begin; stage < end; stage++) {
            const int key = stage * STAGE_KEYS;
            barrier_wait(smem.barriers.full[slot], phase);
            if (key >= any_end || key + STAGE_KEYS <= any_begin) {
                release();
            } else {
                stage_logits x;
                multiply(x);
                if (key >= all_begin && key + STAGE_KEYS <= all_end && CONSUMER::is_plain(key))
                    CONSUMER::template add_stage<false>(x, key);
                else
                    CONSUMER::template add_stage<true>(x, key);
            }
            advance(stages_done++ == 0);
        }
        CONSUMER::sync(); /* the warpgroup is done with its queries */
        CONSUMER::finish_tile();
        __syncwarp();
    }

    __device__ void run()
    {
        const int rounds = warp_uniform(chunk().rounds());
        int stages_done = 0, tiles_done = 0;
        if (warp == STATS_PRODUCER_WARP)
            for (int n = 0; n < DEPTH && find_load(); n++)
                load(n);
#pragma unroll 1
        for (int round = 0; round < rounds; round++) {
            const int first_query = warp_uniform(chunk().first_query(round));
            if (first_query >= 0)
                run_tile(first_query, stages_done, tiles_done++);
        }
    }
};

/* Blocks take chunks blockIdx.x, blockIdx.x + gridDim.x, ... */
template <typename CONSUMER>
__global__ void __launch_bounds__(STATS_THREADS, 1)
    stats_kernel(const __grid_constant__ stats_params params, const __grid_constant__ stats_maps maps)
{
#ifdef __CUDA_ARCH_FEAT_SM90_ALL
    extern __shared__ __align__(1024) unsigned char raw[];
    stats_smem<CONSUMER> &smem = *(stats_smem<CONSUMER> *)(void *)raw;
    const int64_t chunks = params.layout.chunks, heads = params.problem.heads_s;
#pragma unroll 1
    for (int64_t item = blockIdx.x; item < params.problem.batch * heads * chunks; item += gridDim.x) {
        if (threadIdx.x == 0) {
            smem.exists = smem.chunk.find(params, item / (heads * chunks), (int)(item / chunks % heads),
                                          (int)(item % chunks), STATS_TILE);
            smem.init_barriers();
        }
        __syncthreads();
        if (warp_uniform(smem.exists)) {
            const int warp = warp_index();
            stats_warpgroup<CONSUMER> warpgroup = {{{params, maps, smem, warp / 4, warp}}};
            warpgroup.run();
        }
        __syncthreads();
        if (threadIdx.x == 0)
            smem.end_barriers();
    }
#endif
}

template <typename CONSUMER> cudaError_t launch_stats_blocks(const stats_params &params)
{
    typedef typename CONSUMER::ELEMENT element;
    constexpr int MEMORY = sizeof(stats_smem<CONSUMER>);
    static_assert(MEMORY <= SMEM_MAX, "shared memory of a block");
    const skl_problem &p = params.problem;
    stats_maps maps;
    if (!encode_queries(&maps.queries, &p, &params.b, STATS_QUERIES, element()) ||
        !encode_keys(&maps.keys, &p, &params.b, STAGE_KEYS, element()))
        return encode_error();
    return launch_blocks(stats_kernel<CONSUMER>, dim3((unsigned)params.layout.blocks), STATS_THREADS, MEMORY,
                         params.call.stream, params, maps);
}

} // namespace sm90

#endif
