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
#ifndef SKL_CUDA_SM90_INDEX_SCORES_CUH
#define SKL_CUDA_SM90_INDEX_SCORES_CUH

#include "cuda/sm80/index_pairs.cuh"
#include "cuda/sm90/tensor_map.cuh"
#include "cuda/sm90/turns.cuh"

namespace sm90
{

static_assert(SIDE == tile_place::ROWS, "two warpgroups own a slot");

constexpr int SCORE_THREADS = 128 * (CONSUMERS + 1);
constexpr int QUERY_STEPS = 4, KEY_STEPS = 2;

typedef unsigned char slab[SIDE][SLAB * 2];
typedef float tile_logits[SIDE / 8][4]; /* 64 x 128 of a warpgroup: [8 keys][half * 2 + parity] of a thread */
typedef __nv_bfloat16 score_element;

/* Up to two slabs of a head; the last step of an odd number has one. */
typedef slab step_slabs[2];

struct score_block {
    step_slabs queries[QUERY_STEPS], keys[KEY_STEPS];
    uint64_t queries_full[QUERY_STEPS], queries_empty[QUERY_STEPS];
    uint64_t keys_full[KEY_STEPS], keys_empty[KEY_STEPS];
    uint64_t turns[CONSUMERS];
    slot_place place; /* here, and not in the registers of every thread */
    unsigned slot;
    int part, tile_begin, tile_end;
};

struct score_maps {
    CUtensorMap q_t, k_t, q_s, k_s;
};

__device__ inline void init_rings(score_block &block)
{
    for (int at = 0; at < QUERY_STEPS; at++) {
        barrier_init(block.queries_full[at], 1);
        barrier_init(block.queries_empty[at], CONSUMERS * 4);
    }
    for (int at = 0; at < KEY_STEPS; at++) {
        barrier_init(block.keys_full[at], 1);
        barrier_init(block.keys_empty[at], CONSUMERS * 4);
    }
    product_turns::init(block.turns);
    barrier_init_fence();
}

/* A place in a ring, and the parity of the phase in which it is filled. What depends on it stands before every
 * product, so it is counted, not divided. */
template <int STEPS> struct ring_place {
    int at, parity;

    __device__ void next()
    {
        at = at + 1 == STEPS ? 0 : at + 1;
        parity ^= at == 0;
    }
};

/* ---- Heads, as producer and consumers meet them ------------------------------------------------------------- */

struct head_walk {
    const head_list &heads;
    int head;
    int left; /* heads that share the keys, this one among them */
    bool keys_are_new;

    __device__ explicit head_walk(const head_list &list)
        : heads(list), head(list.first), left(list.heads_per_key - list.first % list.heads_per_key),
          keys_are_new(true)
    {
    }

    __device__ bool at_end() const
    {
        return head == heads.first + heads.count;
    }

    /* The next head finds its keys where they are: it shares them, and there is room for those that follow. */
    __device__ bool keys_stay() const
    {
        return heads.slabs <= 2 && left > 1 && head + 1 < heads.first + heads.count;
    }

    __device__ void next()
    {
        keys_are_new = !keys_stay();
        left = left == 1 ? heads.heads_per_key : left - 1;
        head++;
    }
};

/* ---- Producer ----------------------------------------------------------------------------------------------- */

struct slab_producer {
    score_block &block;
    ring_place<QUERY_STEPS> query;
    ring_place<KEY_STEPS> key;

    template <int STEPS>
    __device__ static void copy_step(step_slabs (&to)[STEPS], uint64_t (&full)[STEPS], uint64_t (&empty)[STEPS],
                                     ring_place<STEPS> &place, const CUtensorMap &map, int c, int slabs, int row,
                                     int head, int batch)
    {
        const int at = place.at, count = min(slabs - c, 2);
        barrier_wait(empty[at], place.parity ^ 1);
        barrier_expect(full[at], count * (int)sizeof(slab));
        for (int n = 0; n < count; n++)
            copy_box(to[at][n], map, (c + n) * SLAB, row, head, batch, full[at]);
        place.next();
    }

    __device__ void copy_heads(const head_list &heads, const CUtensorMap &q, const CUtensorMap &k, int tile)
    {
        const skl_sequence &s = block.place.sequence;
        const int query_row = common((int)s.query_begin + block.place.first), batch = common((int)s.batch);
        const int key_row = common((int)s.key_begin + tile * SIDE);
        for (head_walk walk(heads); !walk.at_end(); walk.next())
            for (int c = 0; c < heads.slabs; c += 2) {
                if (walk.keys_are_new)
                    copy_step(block.keys, block.keys_full, block.keys_empty, key, k, c, heads.slabs, key_row,
                              walk.head / heads.heads_per_key, batch);
                copy_step(block.queries, block.queries_full, block.queries_empty, query, q, c, heads.slabs, query_row,
                          walk.head, batch);
            }
    }
};

/* ---- Consumers ---------------------------------------------------------------------------------------------- */

struct slab_consumer {
    score_block &block;
    int group; /* of the warp, the same for all lanes */
    ring_place<QUERY_STEPS> query;
    ring_place<KEY_STEPS> key;
    product_turns turns;

    /* x = or += the product of a step, over so many slabs. */
    template <int SLABS> __device__ void multiply_step(tile_logits &x, bool add)
    {
        constexpr int STEPS = SLABS * SLAB / 16;
        const uint32_t a = row_operand(block.queries[query.at]) + group * (64 * 128 / 16);
        const uint32_t b = row_operand(block.keys[key.at]);
        turns.take();
        wgmma_fence();
#pragma unroll
        for (int step = 0; step < STEPS; step++) {
            wgmma<false>(x, step_of(a, step, SIDE), step_of(b, step, SIDE), add || step > 0, score_element());
            if (step == STEPS / 2 - 1)
                wgmma_commit();
        }
        wgmma_commit();
        wgmma_wait<1>();
        turns.pass();
        wgmma_wait<0>();
        settle(x);
    }

    /* x = queries of a head times its keys. */
    __device__ void multiply(tile_logits &x, int slabs, bool keys_stay)
    {
        const bool speaks = threadIdx.x % 32 == 0;
        for (int c = 0; c < slabs; c += 2) {
            barrier_wait(block.keys_full[key.at], key.parity);
            barrier_wait(block.queries_full[query.at], query.parity);
            if (c + 1 < slabs) /* products of a branch end inside it: ptxas wants to see their registers */
                multiply_step<2>(x, c > 0);
            else
                multiply_step<1>(x, c > 0);
            barrier_arrive_if(block.queries_empty[query.at], speaks);
            query.next();
            if (!keys_stay) {
                barrier_arrive_if(block.keys_empty[key.at], speaks);
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
            multiply(x, heads.slabs, walk.keys_stay());
            const auto first = values[0].value(now[0]), second = values[1].value(now[1]);
#pragma unroll
            for (int n = 0; n < SIDE / 8; n++)
#pragma unroll
                for (int e = 0; e < 4; e++)
                    sum[n][e] = combine(sum[n][e], x[n][e], e < 2 ? first : second);
        }
    }
};

__device__ inline void clear(tile_logits &x)
{
#pragma unroll
    for (int e = 0; e < SIDE / 2; e++)
        x[e / 4][e % 4] = 0.0F;
}

__device__ inline slab_consumer begin_consumer(score_block &block, int group)
{
    return {block, group, {0, 0}, {0, 0}, product_turns(block.turns, group)};
}

template <bool GRADIENTS>
__device__ inline void consume_scores(const index_params &params, score_block &block, int group)
{
    const slot_place &at = block.place;
    slab_consumer slabs = begin_consumer(block, group);
#pragma unroll
    for (int half = 0; half < 2; half++)
        if (threadIdx.x % 4 == 0)
            part_rows(params, block.slot, block.part)[own_row<1>(0, half)] = empty_row();
    const float scale_t = params.one.scale, least = params.least;
    for (int tile = block.tile_begin; tile < block.tile_end; tile++) {
        tile_logits p, y;
        clear(p);
        const head_list teacher = teacher_heads(params, at.head);
        head_lse lse[2] = {lse_of(params, at, teacher.first, query_of(at, own_row<1>(0, 0))),
                           lse_of(params, at, teacher.first, query_of(at, own_row<1>(0, 1)))};
        slabs.add_heads(p, teacher, lse, [=](float sum, float x, const split_lse &value) {
            return fmaf(ex2(fmaf(x, scale_t, -value.high)), value.factor, sum);
        });
        clear(y);
        head_weight w[2] = {weight_of(params, at, query_of(at, own_row<1>(0, 0))),
                            weight_of(params, at, query_of(at, own_row<1>(0, 1)))};
        slabs.add_heads(y, index_heads(params, at.head), w,
                        [=](float sum, float x, float value) { return fmaf(value, at_least(x, least), sum); });
        const int rows[2] = {own_row<1>(0, 0), own_row<1>(0, 1)};
        const bool sums_wanted = params.call.op != SKL_OP_BACKWARD;
        if (GRADIENTS)
            store_tile<1>(params, at, g_block(params, block.slot, tile, (int)threadIdx.x / 32, 0), p, y, rows,
                          tile * SIDE);
#pragma unroll
        for (int half = 0; sums_wanted && half < 2; half++)
            add_to_row(part_rows(params, block.slot, block.part) + rows[half],
                       sum_row(params, at, p, y, half, rows[half], tile * SIDE));
    }
}

template <bool GRADIENTS>
__global__ void __launch_bounds__(SCORE_THREADS, 1)
    score_kernel(const __grid_constant__ index_params params, const __grid_constant__ score_maps maps)
{
#ifdef __CUDA_ARCH_FEAT_SM90_ALL
    extern __shared__ __align__(1024) unsigned char raw[];
    score_block &block = *(score_block *)(void *)raw;
    if (threadIdx.x == 0) {
        const slot_part own = slot_part_of_block(params);
        block.slot = own.slot;
        block.place = slot_at(params, block.slot, (unsigned)params.problem.heads_s);
        block.part = own.part;
        const int tiles = block.place.tile_end - block.place.tile_begin;
        const int share = (tiles + params.splits - 1) / params.splits;
        block.tile_begin = block.place.tile_begin + min(block.part * share, tiles);
        block.tile_end = min(block.tile_begin + share, block.place.tile_end);
        init_rings(block);
    }
    __syncthreads();
    const int group = own_group();
    if (group == CONSUMERS) {
        give_registers<24>();
        if (own_warp() == CONSUMERS * 4) {
            slab_producer slabs = {block, {0, 0}, {0, 0}};
            for (int tile = block.tile_begin; tile < block.tile_end; tile++) {
                slabs.copy_heads(teacher_heads(params, block.place.head), maps.q_t, maps.k_t, tile);
                slabs.copy_heads(index_heads(params, block.place.head), maps.q_s, maps.k_s, tile);
            }
        }
    } else {
        take_registers<240>();
        consume_scores<GRADIENTS>(params, block, group);
    }
#endif
}

} // namespace sm90

#endif
