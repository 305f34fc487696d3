/* Targets of a pooled teacher on Hopper's tensor cores (sm_90a), bf16 heads of up to 128 dimensions. See
 * common/strips/pool.cuh.
 *
 * Bound: at 128 dimensions a teacher head takes 2,048 clocks per tile on the tensor cores, 2,048 for exponentials
 * (none for the maximum of heads), and 32 KB of queries and 64 KB of keys from the L2 cache, which the heads of a key
 * head share: 24 bytes per clock with four of them, which is what the cache gives an SM.
 *
 *   block      2 consumer warpgroups of 64 queries, 1 producer warp; one block per SM
 *   tile       128 queries x 256 keys, in two halves, while all teacher heads stream past
 *   registers  240 per consumer thread: P (128) and the logits of half a head (64), at least 24 for the rest
 *   shared     3 stages of 128 queries and 2 of 256 keys, of 128 dimensions: 224 KB
 *
 *   producer   TMA load of one stage after another; keys stay in place for the next head if it shares them
 *   consumer   head h, keys 0..127     X = Q_h K_h^T (wgmma)  ->  P += 2^(X - lse_h) / heads, or the maximum
 *              head h, keys 128..255   X = Q_h K_h^T (wgmma)  ->  the same
 *              after the last head     M of the tile's blocks
 *
 *   warpgroup 0   | wgmma      | arithmetic | wgmma      | arithmetic |      the warpgroups alternate on the tensor
 *   warpgroup 1   | arithmetic | wgmma      | arithmetic | wgmma      |      cores (ordered_barrier.cuh) */
#ifndef SKL_CUDA_SM90_STRIPS_POOL_CUH
#define SKL_CUDA_SM90_STRIPS_POOL_CUH

#include "cuda/common/strips/pool.cuh"
#include "cuda/sm90/strips/scores.cuh"

namespace sm90
{

constexpr int POOL_QUERY_STAGES = 3, POOL_KEY_STAGES = 2;
constexpr int POOL_HALVES = SKL_POOL_KEYS / SIDE;
static_assert(SKL_POOL_DIM_MAX == 2 * SLAB, "a stage holds a head");

typedef pool_tiles<SKL_POOL_KEYS> key_blocks;
typedef float pooled_logits[SKL_POOL_KEYS / 8][4]; /* a thread's accumulators of 64 x 256 pairs */

struct pool_smem {
    slab_pair queries[POOL_QUERY_STAGES], keys[POOL_KEY_STAGES][POOL_HALVES];
    uint64_t queries_full[POOL_QUERY_STAGES], queries_empty[POOL_QUERY_STAGES];
    uint64_t keys_full[POOL_KEY_STAGES], keys_empty[POOL_KEY_STAGES];
    uint64_t order[CONSUMERS];
    query_slot slot; /* in shared memory to save registers */
    unsigned slot_index;
    int tile_begin, tile_end;
};
static_assert(sizeof(pool_smem) <= SMEM_MAX, "a block has an SM to itself");

/* ---- Producer ------------------------------------------------------------------------------------------------- */

struct pool_producer {
    pool_smem &smem;
    pipeline_state<POOL_QUERY_STAGES> query;
    pipeline_state<POOL_KEY_STAGES> key;

    /* Loads the slabs of 128 rows. */
    __device__ static void load_slabs(slab_pair &to, const CUtensorMap &map, int slabs, int row, int head, int batch,
                                      uint64_t &full)
    {
        for (int c = 0; c < slabs; c++)
            tma_load(to[c], map, c * SLAB, row, head, batch, full);
    }

    __device__ void load_keys(const head_list &heads, const CUtensorMap &k, int row, int key_head, int batch)
    {
        uint64_t &full = smem.keys_full[key.index];
        barrier_wait(smem.keys_empty[key.index], key.phase ^ 1);
        barrier_expect_tx(full, POOL_HALVES * heads.slabs * (int)sizeof(slab));
        for (int half = 0; half < POOL_HALVES; half++)
            load_slabs(smem.keys[key.index][half], k, heads.slabs, row + half * SIDE, key_head, batch, full);
        key.next();
    }

    __device__ void load_heads(const head_list &heads, const score_maps &maps, int first_key)
    {
        const skl_sequence &s = smem.slot.sequence;
        const int query_row = warp_uniform((int)s.query_begin + smem.slot.first), batch = warp_uniform((int)s.batch);
        const int key_row = warp_uniform((int)s.key_begin + first_key);
        for (head_iterator it(heads); !it.at_end(); it.next()) {
            if (it.loads_keys)
                load_keys(heads, maps.k_t, key_row, it.head / heads.heads_per_key, batch);
            uint64_t &full = smem.queries_full[query.index];
            barrier_wait(smem.queries_empty[query.index], query.phase ^ 1);
            barrier_expect_tx(full, heads.slabs * (int)sizeof(slab));
            load_slabs(smem.queries[query.index], maps.q_t, heads.slabs, query_row, it.head, batch, full);
            query.next();
        }
    }
};

/* ---- Consumers ------------------------------------------------------------------------------------------------ */

struct pool_consumer {
    pool_smem &smem;
    int warpgroup; /* warp-uniform */
    pipeline_state<POOL_QUERY_STAGES> query;
    pipeline_state<POOL_KEY_STAGES> key;
    ordered_barrier order;

    /* x = queries times half of the keys of the current stages. */
    __device__ void multiply(tile_logits &x, int slabs, int half)
    {
        const uint32_t a = k_major_operand(smem.queries[query.index]) + warpgroup * (64 * 128 / 16);
        const uint32_t b = k_major_operand(smem.keys[key.index][half]);
        if (slabs > 1) /* a branch waits for its wgmmas: ptxas has to see their registers */
            multiply_slabs<2>(x, a, b, false, order);
        else
            multiply_slabs<1>(x, a, b, false, order);
    }

    /* p = combine(p, x, value of the row) for every head; x are the head's logits. */
    template <typename VALUES, typename COMBINE>
    __device__ void add_heads(pooled_logits &p, const head_list &heads, VALUES (&values)[2], COMBINE combine)
    {
        const bool elected = threadIdx.x % 32 == 0;
        typename VALUES::raw next[2] = {values[0].load(), values[1].load()};
        for (head_iterator it(heads); !it.at_end(); it.next()) {
            const typename VALUES::raw current[2] = {next[0], next[1]};
            if (it.head + 1 < heads.first + heads.count) {
#pragma unroll
                for (int half = 0; half < 2; half++) {
                    values[half].next();
                    next[half] = values[half].load();
                }
            }
            barrier_wait(smem.keys_full[key.index], key.phase);
            barrier_wait(smem.queries_full[query.index], query.phase);
#pragma unroll
            for (int half = 0; half < POOL_HALVES; half++) {
                tile_logits x;
                multiply(x, heads.slabs, half);
                const auto value_0 = values[0].value(current[0]), value_1 = values[1].value(current[1]);
#pragma unroll
                for (int n = 0; n < SIDE / 8; n++)
#pragma unroll
                    for (int e = 0; e < 4; e++) {
                        float &to = p[half * (SIDE / 8) + n][e];
                        to = combine(to, x[n][e], e < 2 ? value_0 : value_1);
                    }
            }
            barrier_arrive_if(smem.queries_empty[query.index], elected);
            query.next();
            if (!it.keys_are_reused()) {
                barrier_arrive_if(smem.keys_empty[key.index], elected);
                key.next();
            }
        }
    }
};

template <bool LARGEST_HEAD>
__device__ inline void consume_pool(const strip_params &params, pool_smem &smem, int warpgroup)
{
    typedef head_pool<LARGEST_HEAD> heads_of;
    const query_slot &slot = smem.slot;
    pool_consumer consumer = {smem, warpgroup, {0, 0}, {0, 0}, ordered_barrier(smem.order, warpgroup)};
    const typename heads_of::combine combine = {params.a.scale};
    for (int tile = smem.tile_begin; tile < smem.tile_end; tile++) {
        const head_list heads = group_heads(params, slot.head);
        const int rows[2] = {acc_row<1>(0, 0), acc_row<1>(0, 1)};
        typename heads_of::reader lses[2] = {{lse_of(params, slot, heads.first, query_of(slot, rows[0]))},
                                             {lse_of(params, slot, heads.first, query_of(slot, rows[1]))}};
        pooled_logits p;
#pragma unroll
        for (int e = 0; e < SKL_POOL_KEYS / 2; e++)
            p[e / 4][e % 4] = heads_of::NOTHING;
        consumer.add_heads(p, heads, lses, combine);
        pool_tile_keys<heads_of>(params, slot, smem.slot_index, key_blocks(params.problem), tile, p, rows);
    }
}

template <bool LARGEST_HEAD>
__global__ void __launch_bounds__(SCORE_THREADS, 1)
    pool_kernel(const __grid_constant__ strip_params params, const __grid_constant__ score_maps maps)
{
#ifdef __CUDA_ARCH_FEAT_SM90_ALL
    extern __shared__ __align__(1024) unsigned char raw[];
    pool_smem &smem = *(pool_smem *)(void *)raw;
    const key_blocks tiles(params.problem);
    if (threadIdx.x == 0) {
        const slot_split work = slot_split_of_block(params);
        smem.slot_index = work.slot;
        smem.slot = slot_at(params, work.slot, (unsigned)params.problem.heads_s);
        const range32 of_split = smem.slot.count > 0
                                     ? tiles.of_split(params.problem, smem.slot, work.split, params.num_splits)
                                     : range32{0, 0};
        smem.tile_begin = of_split.begin;
        smem.tile_end = of_split.end;
        init_pipelines(smem);
    }
    __syncthreads();
    const int warpgroup = warpgroup_index();
    if (warpgroup == CONSUMERS) {
        reg_dealloc<24>();
        if (warp_index() == CONSUMERS * 4) {
            pool_producer producer = {smem, {0, 0}, {0, 0}};
            for (int tile = smem.tile_begin; tile < smem.tile_end; tile++)
                producer.load_heads(group_heads(params, smem.slot.head), maps, tiles.first_key(tile));
        }
    } else {
        reg_alloc<240>();
        consume_pool<LARGEST_HEAD>(params, smem, warpgroup);
    }
#endif
}

} // namespace sm90

#endif
