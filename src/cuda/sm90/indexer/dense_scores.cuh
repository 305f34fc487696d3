/* Scores of an indexer and of its teacher on Hopper's tensor cores (sm_90a), bf16: row sums of a forward, or G.
 *
 *   block    2 consumer warpgroups of 64 queries, 1 producer warp; one block a multiprocessor
 *   tile     128 queries x 128 keys, which stay while heads stream: all teacher heads, then all index heads
 *   regs     240 a consumer thread: P, Y and the products of a head (64 each), 24 and more for the rest
 *   shared   rings of steps, 128 rows x 128 dimensions: 4 of queries and 2 of keys, 192 KB
 *
 *   producer   copies step after step (TMA); keys that the next head shares stay where they are
 *   consumer   X = Q_h K_h^T (wgmma)  ->  P += 2^(X - lse_h)          one warpgroup's exponentials run beside
 *              X = q_g k^T  (wgmma)  ->  Y += w_g relu(X)             the other one's products
 *              P, Y  ->  row sums, G
 *
 * Head sizes are a matter of how many slabs a head has, so one kernel does them all: 128 teacher heads of 576
 * dimensions with one key head as well as 8 of 64. With as many slabs of keys as of queries a tile of 128 x 128 reads
 * 1 byte from the L2 cache for 65 FLOP, with shared keys for 131. */
#ifndef SKL_CUDA_SM90_INDEXER_DENSE_SCORES_CUH
#define SKL_CUDA_SM90_INDEXER_DENSE_SCORES_CUH

#include "cuda/common/indexer/logit_tile.cuh"
#include "cuda/sm90/tensor_map.cuh"
#include "cuda/sm90/indexer/ordered_barrier.cuh"

namespace sm90
{

static_assert(SIDE == block_tile::ROWS, "two warpgroups own a slot");

constexpr int SCORE_THREADS = 128 * (CONSUMERS + 1);
constexpr int QUERY_STEPS = 4, KEY_STEPS = 2;

typedef unsigned char slab[SIDE][SLAB * 2];
typedef float tile_logits[SIDE / 8][4]; /* 64 x 128 of a warpgroup: [8 keys][half * 2 + parity] of a thread */
typedef __nv_bfloat16 score_element;

/* Up to two slabs of a head; the last step of an odd number has one. */
typedef slab step_slabs[2];

struct score_smem {
    step_slabs queries[QUERY_STEPS], keys[KEY_STEPS];
    uint64_t queries_full[QUERY_STEPS], queries_empty[QUERY_STEPS];
    uint64_t keys_full[KEY_STEPS], keys_empty[KEY_STEPS];
    uint64_t order[CONSUMERS];
    query_slot tile; /* here, and not in the registers of every thread */
    unsigned slot;
    int split, tile_begin, tile_end;
};

struct score_maps {
    CUtensorMap q_t, k_t, q_s, k_s;
};

__device__ inline void init_pipelines(score_smem &smem)
{
    for (int at = 0; at < QUERY_STEPS; at++) {
        barrier_init(smem.queries_full[at], 1);
        barrier_init(smem.queries_empty[at], CONSUMERS * 4);
    }
    for (int at = 0; at < KEY_STEPS; at++) {
        barrier_init(smem.keys_full[at], 1);
        barrier_init(smem.keys_empty[at], CONSUMERS * 4);
    }
    ordered_barrier::init(smem.order);
    barrier_init_fence();
}

/* A place in a ring, and the parity of the phase in which it is filled. What depends on it stands before every
 * product, so it is counted, not divided. */
template <int STEPS> struct pipeline_state {
    int index, phase;

    __device__ void next()
    {
        index = index + 1 == STEPS ? 0 : index + 1;
        phase ^= index == 0;
    }
};

/* ---- Heads, as producer and consumers meet them ------------------------------------------------------------- */

struct head_walk {
    const head_list &heads;
    int head;
    int left; /* heads that share the keys, this one among them */
    bool loads_keys;

    __device__ explicit head_walk(const head_list &list)
        : heads(list), head(list.first), left(list.heads_per_key - list.first % list.heads_per_key), loads_keys(true)
    {
    }

    __device__ bool at_end() const
    {
        return head == heads.first + heads.count;
    }

    /* The next head finds its keys where they are: it shares them, and there is room for those that follow. */
    __device__ bool keys_are_reused() const
    {
        return heads.slabs <= 2 && left > 1 && head + 1 < heads.first + heads.count;
    }

    __device__ void next()
    {
        loads_keys = !keys_are_reused();
        left = left == 1 ? heads.heads_per_key : left - 1;
        head++;
    }
};

/* ---- Producer ----------------------------------------------------------------------------------------------- */

struct slab_producer {
    score_smem &smem;
    pipeline_state<QUERY_STEPS> query;
    pipeline_state<KEY_STEPS> key;

    template <int STEPS>
    __device__ static void load_step(step_slabs (&to)[STEPS], uint64_t (&full)[STEPS], uint64_t (&empty)[STEPS],
                                     pipeline_state<STEPS> &state, const CUtensorMap &map, int c, int slabs, int row,
                                     int head, int batch)
    {
        const int at = state.index, count = min(slabs - c, 2);
        barrier_wait(empty[at], state.phase ^ 1);
        barrier_expect_tx(full[at], count * (int)sizeof(slab));
        for (int n = 0; n < count; n++)
            tma_load(to[at][n], map, (c + n) * SLAB, row, head, batch, full[at]);
        state.next();
    }

    __device__ void load_heads(const head_list &heads, const CUtensorMap &q, const CUtensorMap &k, int tile)
    {
        const skl_sequence &s = smem.tile.sequence;
        const int query_row = warp_uniform((int)s.query_begin + smem.tile.first), batch = warp_uniform((int)s.batch);
        const int key_row = warp_uniform((int)s.key_begin + tile * SIDE);
        for (head_walk walk(heads); !walk.at_end(); walk.next())
            for (int c = 0; c < heads.slabs; c += 2) {
                if (walk.loads_keys)
                    load_step(smem.keys, smem.keys_full, smem.keys_empty, key, k, c, heads.slabs, key_row,
                              walk.head / heads.heads_per_key, batch);
                load_step(smem.queries, smem.queries_full, smem.queries_empty, query, q, c, heads.slabs, query_row,
                          walk.head, batch);
            }
    }
};

/* ---- Consumers ---------------------------------------------------------------------------------------------- */

struct slab_consumer {
    score_smem &smem;
    int group; /* of the warp, the same for all lanes */
    pipeline_state<QUERY_STEPS> query;
    pipeline_state<KEY_STEPS> key;
    ordered_barrier order;

    /* x = or += the product of a step, over so many slabs. */
    template <int SLABS> __device__ void multiply_step(tile_logits &x, bool add)
    {
        constexpr int STEPS = SLABS * SLAB / 16;
        const uint32_t a = row_operand(smem.queries[query.index]) + group * (64 * 128 / 16);
        const uint32_t b = row_operand(smem.keys[key.index]);
        order.wait();
        wgmma_fence();
#pragma unroll
        for (int step = 0; step < STEPS; step++) {
            wgmma<false>(x, step_of(a, step, SIDE), step_of(b, step, SIDE), add || step > 0, score_element());
            if (step == STEPS / 2 - 1)
                wgmma_commit();
        }
        wgmma_commit();
        wgmma_wait<1>();
        order.arrive();
        wgmma_wait<0>();
        fence_operand(x);
    }

    /* x = queries of a head times its keys. */
    __device__ void multiply(tile_logits &x, int slabs, bool keys_are_reused)
    {
        const bool elected = threadIdx.x % 32 == 0;
        for (int c = 0; c < slabs; c += 2) {
            barrier_wait(smem.keys_full[key.index], key.phase);
            barrier_wait(smem.queries_full[query.index], query.phase);
            if (c + 1 < slabs) /* products of a branch end inside it: ptxas wants to see their registers */
                multiply_step<2>(x, c > 0);
            else
                multiply_step<1>(x, c > 0);
            barrier_arrive_if(smem.queries_empty[query.index], elected);
            query.next();
            if (!keys_are_reused) {
                barrier_arrive_if(smem.keys_empty[key.index], elected);
                key.next();
            }
        }
    }

    /* sum += what combine makes of a product and of its row's value, over all heads. */
    template <typename VALUES, typename COMBINE>
    __device__ void add_heads(tile_logits &sum, const head_list &heads, VALUES (&values)[2], COMBINE combine)
    {
        tile_logits x;
        if (heads.count == 0)
            return;
        typename VALUES::raw next[2] = {values[0].load(), values[1].load()};
        for (head_walk walk(heads); !walk.at_end(); walk.next()) {
            const typename VALUES::raw now[2] = {next[0], next[1]};
            if (walk.head + 1 < heads.first + heads.count) {
#pragma unroll
                for (int half = 0; half < 2; half++) {
                    values[half].next();
                    next[half] = values[half].load();
                }
            }
            multiply(x, heads.slabs, walk.keys_are_reused());
            const auto first = values[0].value(now[0]), of_b = values[1].value(now[1]);
#pragma unroll
            for (int n = 0; n < SIDE / 8; n++)
#pragma unroll
                for (int e = 0; e < 4; e++)
                    sum[n][e] = combine(sum[n][e], x[n][e], e < 2 ? first : of_b);
        }
    }
};

__device__ inline void clear(tile_logits &x)
{
#pragma unroll
    for (int e = 0; e < SIDE / 2; e++)
        x[e / 4][e % 4] = 0.0F;
}

__device__ inline slab_consumer begin_consumer(score_smem &smem, int group)
{
    return {smem, group, {0, 0}, {0, 0}, ordered_barrier(smem.order, group)};
}

template <bool GRADIENTS>
__device__ inline void consume_scores(const index_params &params, score_smem &smem, int group)
{
    const query_slot &at = smem.tile;
    slab_consumer slabs = begin_consumer(smem, group);
#pragma unroll
    for (int half = 0; half < 2; half++)
        if (threadIdx.x % 4 == 0)
            rows_of_split(params, smem.slot, smem.split)[acc_row<1>(0, half)] = empty_row();
    const float scale_t = params.a.scale, least = params.least;
    for (int tile = smem.tile_begin; tile < smem.tile_end; tile++) {
        tile_logits p, y;
        clear(p);
        const head_list teacher = teacher_heads(params, at.head);
        head_lse lse[2] = {lse_of(params, at, teacher.first, query_of(at, acc_row<1>(0, 0))),
                           lse_of(params, at, teacher.first, query_of(at, acc_row<1>(0, 1)))};
        slabs.add_heads(p, teacher, lse, [=](float sum, float x, const split_lse &value) {
            return fmaf(ex2(fmaf(x, scale_t, -value.high)), value.factor, sum);
        });
        clear(y);
        head_weight w[2] = {weight_of(params, at, query_of(at, acc_row<1>(0, 0))),
                            weight_of(params, at, query_of(at, acc_row<1>(0, 1)))};
        slabs.add_heads(y, index_heads(params, at.head), w,
                        [=](float sum, float x, float value) { return fmaf(value, at_least(x, least), sum); });
        const int rows[2] = {acc_row<1>(0, 0), acc_row<1>(0, 1)};
        const bool sums_wanted = params.call.op != SKL_OP_BACKWARD;
        if (GRADIENTS)
            store_tile<1>(params, at, g_block(params, smem.slot, tile, (int)threadIdx.x / 32, 0), p, y, rows,
                          tile * SIDE);
#pragma unroll
        for (int half = 0; sums_wanted && half < 2; half++)
            add_to_row(rows_of_split(params, smem.slot, smem.split) + rows[half],
                       sum_row(params, at, p, y, half, rows[half], tile * SIDE));
    }
}

template <bool GRADIENTS>
__global__ void __launch_bounds__(SCORE_THREADS, 1)
    score_kernel(const __grid_constant__ index_params params, const __grid_constant__ score_maps maps)
{
#ifdef __CUDA_ARCH_FEAT_SM90_ALL
    extern __shared__ __align__(1024) unsigned char raw[];
    score_smem &smem = *(score_smem *)(void *)raw;
    if (threadIdx.x == 0) {
        const slot_split own = slot_split_of_block(params);
        smem.slot = own.slot;
        smem.tile = slot_at(params, smem.slot, (unsigned)params.problem.heads_s);
        smem.split = own.split;
        const int tiles = smem.tile.tile_end - smem.tile.tile_begin;
        const int share = (tiles + params.num_splits - 1) / params.num_splits;
        smem.tile_begin = smem.tile.tile_begin + min(smem.split * share, tiles);
        smem.tile_end = min(smem.tile_begin + share, smem.tile.tile_end);
        init_pipelines(smem);
    }
    __syncthreads();
    const int group = warpgroup_index();
    if (group == CONSUMERS) {
        reg_dealloc<24>();
        if (warp_index() == CONSUMERS * 4) {
            slab_producer slabs = {smem, {0, 0}, {0, 0}};
            for (int tile = smem.tile_begin; tile < smem.tile_end; tile++) {
                slabs.load_heads(teacher_heads(params, smem.tile.head), maps.q_t, maps.k_t, tile);
                slabs.load_heads(index_heads(params, smem.tile.head), maps.q_s, maps.k_s, tile);
            }
        }
    } else {
        reg_alloc<240>();
        consume_scores<GRADIENTS>(params, smem, group);
    }
#endif
}

} // namespace sm90

#endif
