/* The skeleton of the Hopper kernels for attention statistics: 3 warpgroups of 64 queries stream the keys that they
 * see, 64 per stage, and hand the products of a stage to a CONSUMER. bf16 and f16, heads of up to 256.
 *
 *   block      3 consumer warpgroups and a producer warpgroup; one block per SM
 *   registers  160 per consumer thread: products of two stages (64), and what the CONSUMER keeps
 *   shared     192 queries; DEPTH stages of 64 keys; what the CONSUMER keeps
 *
 *   producer   one warp (TMA): the stages of all tiles and passes, DEPTH ahead
 *   consumer   wgmma        | stage 0 | stage 1 | stage 2 | stage 3 |
 *              arithmetic             | stage 0 | stage 1 | stage 2 |
 *
 * In runs of full stages, nothing orders the wgmmas of a stage and the arithmetic of the stage before: ptxas spreads
 * these wgmmas through it, which took 0.96 of the time of wgmmas that come first (0.88 with weights). Masked stages
 * are few: a warpgroup waits for their products.
 *
 * A block processes the tiles of a chunk (common/stats.cuh), and a warpgroup changes tiles independently of the
 * others.
 *
 * CONSUMER has ELEMENT, DIM, KEYS_ARE_ROWS (the products are K Q^T, not Q K^T), PASSES over the keys of a tile,
 * PIPELINED, a struct `shared` of a warpgroup, and
 *
 *   start_tile(), end_pass<PASS>(), finish_tile()
 *   plain_until(stage, end)       the end of the full stages from `stage` on that may be pipelined, at most `end`
 *   make_room<PASS>()             called before add_stage, while no wgmma is in flight
 *   add_stage<PASS, BUFFER>(x, first_key), without a branch, and add_masked<PASS>(x, first_key) */
#ifndef SKL_CUDA_SM90_ATTENTION_STATS_TILES_CUH
#define SKL_CUDA_SM90_ATTENTION_STATS_TILES_CUH

#include <limits.h>

#include "cuda/common/stats.cuh"
#include "cuda/sm90/attention/softcap.cuh"
#include "cuda/sm90/launch.cuh"

namespace sm90
{

constexpr int STATS_WARPGROUPS = 3, STATS_QUERIES = 64; /* queries of a warpgroup */
constexpr int STATS_TILE = STATS_WARPGROUPS * STATS_QUERIES;
constexpr int STATS_THREADS = 128 * (STATS_WARPGROUPS + 1);
constexpr int STATS_REGS = 160, STATS_PRODUCER_REGS = 32;

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
    float scale;

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

/* The next stage of the pipeline. */
template <int DEPTH> struct stats_slot {
    int index, phase;

    __device__ void advance()
    {
        if (++index == DEPTH) {
            index = 0;
            phase ^= 1;
        }
    }
};

/* Executed by one warp: loads the stages of all tiles of the chunk in the consumers' order. */
template <typename CONSUMER>
__device__ inline void produce_stages(const stats_params &params, const stats_maps &maps, stats_smem<CONSUMER> &smem)
{
    const stats_chunk &tiles = smem.chunk;
    const skl_sequence &s = tiles.sequence;
    const skl_band band = skl_key_band(&params.problem, &s);
    const int rounds = warp_uniform(tiles.rounds()), head = warp_uniform(tiles.head / params.b.heads_per_key);
    const int batch = warp_uniform((int)s.batch), first_row = warp_uniform((int)s.key_begin);
    stats_slot<stats_smem<CONSUMER>::DEPTH> slot = {};
#pragma unroll 1
    for (int round = 0; round < rounds; round++) {
        const int first = tiles.first_query(round);
        const range32 of_tile = first < 0 ? range32{} : tiles.stages(band, first, STATS_TILE);
        const int begin = warp_uniform(of_tile.begin), end = warp_uniform(of_tile.end);
#pragma unroll 1
        for (int pass = 0; pass < CONSUMER::PASSES; pass++)
#pragma unroll 1
            for (int stage = begin; stage < end; stage++, slot.advance()) {
                uint64_t &full = smem.barriers.full[slot.index];
                barrier_wait(smem.barriers.empty[slot.index], slot.phase ^ 1);
                barrier_expect_tx(full, (int)sizeof smem.stages[0]);
                load_slabs(smem.stages[slot.index].slabs, maps.keys, first_row + stage * STAGE_KEYS, head, batch,
                           full);
            }
    }
}

template <typename CONSUMER> struct stats_warpgroup : CONSUMER {
    typedef stats_smem<CONSUMER> memory;
    static constexpr int DEPTH = memory::DEPTH, DIM = CONSUMER::DIM;
    using CONSUMER::chunk, CONSUMER::first, CONSUMER::maps, CONSUMER::params, CONSUMER::sequence, CONSUMER::smem;
    using CONSUMER::warp, CONSUMER::warpgroup;
    stats_slot<DEPTH> slot; /* the next stage to consume */

    /* The stages of a tile that this warpgroup sees: `any` query, and `all` of them. */
    struct stage_ranges {
        range32 any, all;
    };

    __device__ void load_queries() const
    {
        const skl_sequence &s = sequence();
        uint64_t &full = smem.queries_full[warpgroup];
        barrier_expect_tx(full, memory::query_rows::SIZE);
        load_slabs(smem.queries[warpgroup].slabs, maps.queries, warp_uniform((int)s.query_begin + first),
                   warp_uniform(chunk().head), warp_uniform((int)s.batch), full);
    }

    __device__ void wait_keys() const
    {
        barrier_wait(smem.barriers.full[slot.index], slot.phase);
    }

    __device__ void release(bool condition = true) const
    {
        barrier_arrive_if(smem.barriers.empty[slot.index], condition && threadIdx.x % 32 == 0);
    }

    /* Issues the wgmmas of the next stage, whose keys have arrived. */
    __device__ void issue(stage_logits &x) const
    {
        const uint32_t keys = k_major_operand(&smem.stages[slot.index]);
        const uint32_t queries = k_major_operand(&smem.queries[warpgroup]);
        constexpr bool KEYS_ARE_ROWS = CONSUMER::KEYS_ARE_ROWS;
        wgmma_fence();
        wgmma_slabs<typename CONSUMER::ELEMENT, DIM, 64, 64>(x, KEYS_ARE_ROWS ? keys : queries,
                                                             KEYS_ARE_ROWS ? queries : keys);
        wgmma_commit();
    }

    __device__ static void wait(stage_logits &x)
    {
        wgmma_wait<0>();
        fence_operand(x);
    }

    /* An even number of full stages, from `stage` on. wgmmas are issued without a condition, with no branch between
     * them and the arithmetic; otherwise ptxas waits for them at once. So the last stage is issued twice, and its
     * second result not used. */
    template <int PASS> __device__ void add_run(int stage, int end)
    {
        stage_logits x[2];
        wait_keys();
        issue(x[0]);
#pragma unroll 1
        for (; stage < end; stage += 2) {
            wait(x[0]);
            release();
            slot.advance();
            CONSUMER::template make_room<PASS>();
            wait_keys();
            issue(x[1]);
            CONSUMER::template add_stage<PASS, 0>(x[0], stage * STAGE_KEYS);
            wait(x[1]);
            const bool last = stage + 2 >= end;
            release(!last);
            if (!last)
                slot.advance();
            CONSUMER::template make_room<PASS>();
            wait_keys();
            issue(x[0]);
            CONSUMER::template add_stage<PASS, 1>(x[1], (stage + 1) * STAGE_KEYS);
        }
        wgmma_wait<0>();
        release();
        slot.advance();
    }

    template <int PASS> __device__ void run_pass(int begin, int end, const stage_ranges &sees)
    {
#pragma unroll 1
        for (int stage = begin; stage < end;) {
            if constexpr (CONSUMER::PIPELINED) {
                const int until = stage >= sees.all.begin ? CONSUMER::plain_until(stage, sees.all.end) : 0;
                const int run = warp_uniform((until - stage) / 2 * 2);
                if (run > 0) {
                    add_run<PASS>(stage, stage + run);
                    stage += run;
                    continue;
                }
            }
            wait_keys();
            if (stage >= sees.any.begin && stage < sees.any.end) {
                stage_logits x;
                issue(x);
                wait(x);
                release();
                CONSUMER::template make_room<PASS>();
                CONSUMER::template add_masked<PASS>(x, stage * STAGE_KEYS);
            } else {
                __syncwarp();
                release();
            }
            slot.advance();
            stage++;
        }
        CONSUMER::template end_pass<PASS>();
    }

    __device__ void run_tile(int first_of_block, int tiles_done)
    {
        const stats_chunk &tiles = chunk();
        const skl_band band = skl_key_band(&params.problem, &tiles.sequence);
        first = first_of_block + warpgroup * STATS_QUERIES;
        if (warp % 4 == 0)
            load_queries();
        CONSUMER::start_tile(band);
        const range32 of_tile = tiles.stages(band, first_of_block, STATS_TILE);
        const int begin = warp_uniform(of_tile.begin), end = warp_uniform(of_tile.end);
        const int count = (int)skl_max(0, skl_min(STATS_QUERIES, tiles.sequence.query_count - first));
        const reach keys = reach_of(smem.of_warpgroup[warpgroup].visible, 0, max(count, 1));
        const int last = STAGE_KEYS - 1, full_end = count == STATS_QUERIES ? keys.all.end / STAGE_KEYS : 0;
        const stage_ranges sees = {
            {warp_uniform(keys.any.begin / STAGE_KEYS),
             warp_uniform(count > 0 ? (keys.any.end + last) / STAGE_KEYS : 0)},
            {warp_uniform((keys.all.begin + last) / STAGE_KEYS), warp_uniform(full_end)},
        };
        barrier_wait(smem.queries_full[warpgroup], tiles_done % 2);
        run_pass<0>(begin, end, sees);
        if constexpr (CONSUMER::PASSES == 2)
            run_pass<1>(begin, end, sees);
        CONSUMER::sync(); /* the warpgroup is done with its queries */
        CONSUMER::finish_tile();
        __syncwarp();
    }

    __device__ void run()
    {
        const int rounds = warp_uniform(chunk().rounds());
        int tiles_done = 0;
#pragma unroll 1
        for (int round = 0; round < rounds; round++) {
            const int first_query = warp_uniform(chunk().first_query(round));
            if (first_query >= 0)
                run_tile(first_query, tiles_done++);
        }
    }
};

/* Calls run() for chunks blockIdx.x, blockIdx.x + gridDim.x, ..., with barriers and the chunk in shared memory; if
 * CONSUMER is not STRIDED, a block has one chunk. CONSUMES: the code of the consumers, which have thread 0 and more
 * registers. */
template <bool CONSUMES, typename CONSUMER, typename RUN>
__device__ inline void for_chunks(const stats_params &params, stats_smem<CONSUMER> &smem, RUN run)
{
    const unsigned chunks = (unsigned)params.layout.chunks, heads = (unsigned)params.problem.heads_s;
    unsigned item = blockIdx.x;
    do {
        if (CONSUMES && threadIdx.x == 0) {
            smem.exists = smem.chunk.find(params, item / chunks / heads, (int)(item / chunks % heads),
                                          (int)(item % chunks), STATS_TILE);
            smem.scale = params.b.scale;
            smem.init_barriers();
        }
        named_barrier_sync(0, STATS_THREADS);
        if (warp_uniform(smem.exists))
            run();
        named_barrier_sync(0, STATS_THREADS);
        if (CONSUMES && threadIdx.x == 0)
            smem.end_barriers();
        item += gridDim.x;
    } while (CONSUMER::STRIDED && item < (unsigned)params.problem.batch * heads * chunks);
}

template <typename CONSUMER>
__global__ void __launch_bounds__(STATS_THREADS, 1)
    stats_kernel(const __grid_constant__ stats_params params, const __grid_constant__ stats_maps maps)
{
#ifdef __CUDA_ARCH_FEAT_SM90_ALL
    extern __shared__ __align__(1024) unsigned char raw[];
    stats_smem<CONSUMER> &smem = *(stats_smem<CONSUMER> *)(void *)raw;
    const int warp = warp_index();
    if (warp / 4 == STATS_WARPGROUPS) {
        reg_dealloc<STATS_PRODUCER_REGS>();
        for_chunks<false>(params, smem, [&]() {
            if (warp % 4 == 0)
                produce_stages(params, maps, smem);
        });
    } else {
        reg_alloc<STATS_REGS>();
        for_chunks<true>(params, smem, [&]() {
            stats_warpgroup<CONSUMER> warpgroup = {{{params, maps, smem, warp / 4, warp}}};
            warpgroup.run();
        });
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
    return launch_blocks(stats_kernel<CONSUMER>, (int64_t)params.layout.blocks, STATS_THREADS, MEMORY, params, maps);
}

} // namespace sm90

#endif
