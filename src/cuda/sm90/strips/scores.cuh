/* Scores of a strip on Hopper's tensor cores (sm_90a), bf16: row states or differences G = S - P (strip.cuh), from
 * teacher probabilities P and the student's logits Y; and the teacher's LSEs if the caller does not give them. The
 * student is an indexer, or an attention head, which is one index head without a ReLU.
 *
 * Bound: at 128 dimensions a teacher head takes 1,024 clocks per tile on the tensor cores, 1,024 for exponentials,
 * and 1,280 on shared memory (1,024 if it shares its keys); an index head has no exponentials.
 *
 *   block      2 consumer warpgroups of 64 queries, 1 producer warp; one block per SM
 *   tile       128 queries x 128 keys, stationary while heads stream: all teacher heads, then all index heads
 *   registers  240 per consumer thread: P, Y and the logits of a head (64 each), at least 24 for the rest
 *   shared     two pipelines with stages of 128 rows x 128 dimensions: 4 of queries and 2 of keys, 192 KB
 *
 *   producer   TMA load of one stage after another; keys stay in place for the next head if it shares them
 *   consumer   teacher head h   X = Q_h K_h^T (wgmma)  ->  P += 2^(X - lse_h) / heads; or P = M of a pooled teacher,
 *                               from the strip's target (pool.cuh)
 *              index head g     X = q_g k^T  (wgmma)   ->  Y += w_g relu(X)
 *              then             P, Y  ->  row sums, G
 *
 *   warpgroup 0   | wgmma      | arithmetic | wgmma      | arithmetic |      the warpgroups alternate on the tensor
 *   warpgroup 1   | arithmetic | wgmma      | arithmetic | wgmma      |      cores (ordered_barrier.cuh)
 *
 * A head is a number of slabs of 64 dimensions, so one kernel handles all head sizes: 128 teacher heads of 576
 * dimensions with one key head as well as 8 heads of 64. A tile does 65 FLOP per byte from the L2 cache if it loads
 * as many slabs of keys as of queries, and 131 if heads share their keys. */
#ifndef SKL_CUDA_SM90_STRIPS_SCORES_CUH
#define SKL_CUDA_SM90_STRIPS_SCORES_CUH

#include "cuda/common/strips/pool.cuh"
#include "cuda/sm90/tensor_map.cuh"
#include "cuda/sm90/strips/ordered_barrier.cuh"
#include <type_traits>

namespace sm90
{

static_assert(SIDE == block_tile::ROWS, "the consumer warpgroups cover a slot");

constexpr int SCORE_THREADS = 128 * (CONSUMERS + 1);
constexpr int QUERY_STAGES = 4, KEY_STAGES = 2;

typedef unsigned char slab[SIDE][SLAB * 2];
typedef float tile_logits[SIDE / 8][4]; /* a thread's accumulators of 64 x 128 logits: [8 keys][half * 2 + parity] */

/* A pipeline stage: two slabs of a head, or one if it is the last of an odd number. */
typedef slab slab_pair[2];

struct score_smem {
    slab_pair queries[QUERY_STAGES], keys[KEY_STAGES];
    uint64_t queries_full[QUERY_STAGES], queries_empty[QUERY_STAGES];
    uint64_t keys_full[KEY_STAGES], keys_empty[KEY_STAGES];
    uint64_t order[CONSUMERS];
    query_slot slot; /* in shared memory to save registers */
    unsigned slot_index;
    int split, tile_begin, tile_end;
};

struct score_maps {
    CUtensorMap q_t, k_t, q_s, k_s;
};

/* The producer fills each stage of queries and of keys, and every consumer warp empties it. */
template <typename SMEM> __device__ inline void init_pipelines(SMEM &smem)
{
    for (int stage = 0; stage < (int)std::extent_v<decltype(SMEM::queries_full)>; stage++) {
        barrier_init(smem.queries_full[stage], 1);
        barrier_init(smem.queries_empty[stage], CONSUMERS * 4);
    }
    for (int stage = 0; stage < (int)std::extent_v<decltype(SMEM::keys_full)>; stage++) {
        barrier_init(smem.keys_full[stage], 1);
        barrier_init(smem.keys_empty[stage], CONSUMERS * 4);
    }
    ordered_barrier::init(smem.order);
    barrier_init_fence();
}

/* Stage index, and the parity of the phase that fills it. Counted, not divided: the instructions that depend on it
 * are in front of every wgmma. */
template <int STAGES> struct pipeline_state {
    int index, phase;

    __device__ void next()
    {
        index = index + 1 == STAGES ? 0 : index + 1;
        phase ^= index == 0;
    }
};

/* ---- Heads, in the order of producer and consumers ---------------------------------------------------------- */

struct head_iterator {
    const head_list &heads;
    int head;
    int left; /* heads that still use these keys, including this one */
    bool loads_keys;

    __device__ explicit head_iterator(const head_list &list)
        : heads(list), head(list.first), left(list.heads_per_key - list.first % list.heads_per_key), loads_keys(true)
    {
    }

    __device__ bool at_end() const
    {
        return head == heads.first + heads.count;
    }

    /* Whether the next head finds its keys in shared memory: it shares them, and a head's keys fit into one stage. */
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
    pipeline_state<QUERY_STAGES> query;
    pipeline_state<KEY_STAGES> key;

    /* Loads slabs c and c + 1 of `slabs`. */
    template <int STAGES>
    __device__ static void load_stage(slab_pair (&to)[STAGES], uint64_t (&full)[STAGES], uint64_t (&empty)[STAGES],
                                      pipeline_state<STAGES> &state, const CUtensorMap &map, int c, int slabs,
                                      int row, int head, int batch)
    {
        const int stage = state.index, count = min(slabs - c, 2);
        barrier_wait(empty[stage], state.phase ^ 1);
        barrier_expect_tx(full[stage], count * (int)sizeof(slab));
        for (int n = 0; n < count; n++)
            tma_load(to[stage][n], map, (c + n) * SLAB, row, head, batch, full[stage]);
        state.next();
    }

    __device__ void load_heads(const head_list &heads, const CUtensorMap &q, const CUtensorMap &k, int tile)
    {
        const skl_sequence &s = smem.slot.sequence;
        const int query_row = warp_uniform((int)s.query_begin + smem.slot.first), batch = warp_uniform((int)s.batch);
        const int key_row = warp_uniform((int)s.key_begin + tile * SIDE);
        for (head_iterator it(heads); !it.at_end(); it.next())
            for (int c = 0; c < heads.slabs; c += 2) {
                if (it.loads_keys)
                    load_stage(smem.keys, smem.keys_full, smem.keys_empty, key, k, c, heads.slabs, key_row,
                               it.head / heads.heads_per_key, batch);
                load_stage(smem.queries, smem.queries_full, smem.queries_empty, query, q, c, heads.slabs, query_row,
                           it.head, batch);
            }
    }
};

/* ---- Consumers ---------------------------------------------------------------------------------------------- */

/* x = or += queries times keys of SLABS slabs. The warpgroup's turn ends when half of its wgmmas are complete. */
template <int SLABS>
__device__ inline void multiply_slabs(tile_logits &x, uint32_t queries, uint32_t keys, bool add,
                                      ordered_barrier &order)
{
    constexpr int STEPS = SLABS * SLAB / 16;
    order.wait();
    wgmma_fence();
#pragma unroll
    for (int step = 0; step < STEPS; step++) {
        wgmma<false>(x, k_step_descriptor(queries, step, SIDE), k_step_descriptor(keys, step, SIDE), add || step > 0,
                     skl_bf16());
        if (step == STEPS / 2 - 1)
            wgmma_commit();
    }
    wgmma_commit();
    wgmma_wait<1>();
    order.arrive();
    wgmma_wait<0>();
    fence_operand(x);
}

struct slab_consumer {
    score_smem &smem;
    int warpgroup; /* warp-uniform */
    pipeline_state<QUERY_STAGES> query;
    pipeline_state<KEY_STAGES> key;
    ordered_barrier order;

    /* x = or += queries times keys of a stage, which has SLABS slabs. */
    template <int SLABS> __device__ void multiply_stage(tile_logits &x, bool add)
    {
        multiply_slabs<SLABS>(x, k_major_operand(smem.queries[query.index]) + warpgroup * (64 * 128 / 16),
                              k_major_operand(smem.keys[key.index]), add, order);
    }

    /* x = queries times keys of a head. */
    __device__ void multiply(tile_logits &x, int slabs, bool keys_are_reused)
    {
        const bool elected = threadIdx.x % 32 == 0;
        for (int c = 0; c < slabs; c += 2) {
            barrier_wait(smem.keys_full[key.index], key.phase);
            barrier_wait(smem.queries_full[query.index], query.phase);
            if (c + 1 < slabs) /* a branch waits for its wgmmas: ptxas has to see their registers */
                multiply_stage<2>(x, c > 0);
            else
                multiply_stage<1>(x, c > 0);
            barrier_arrive_if(smem.queries_empty[query.index], elected);
            query.next();
            if (!keys_are_reused) {
                barrier_arrive_if(smem.keys_empty[key.index], elected);
                key.next();
            }
        }
    }

    /* sum = combine(sum, x, value of the row) for every head; x are the head's logits. */
    template <typename VALUES, typename COMBINE>
    __device__ void add_heads(tile_logits &sum, const head_list &heads, VALUES (&values)[2], COMBINE combine)
    {
        tile_logits x;
        if (heads.count == 0)
            return;
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
            multiply(x, heads.slabs, it.keys_are_reused());
            const auto value_0 = values[0].value(current[0]), value_1 = values[1].value(current[1]);
#pragma unroll
            for (int n = 0; n < SIDE / 8; n++)
#pragma unroll
                for (int e = 0; e < 4; e++)
                    sum[n][e] = combine(sum[n][e], x[n][e], e < 2 ? value_0 : value_1);
        }
    }
};

__device__ inline void clear(tile_logits &x)
{
#pragma unroll
    for (int e = 0; e < SIDE / 2; e++)
        x[e / 4][e % 4] = 0.0F;
}

__device__ inline slab_consumer make_consumer(score_smem &smem, int warpgroup)
{
    return {smem, warpgroup, {0, 0}, {0, 0}, ordered_barrier(smem.order, warpgroup)};
}

template <bool GRADIENTS>
__device__ inline void consume_scores(const strip_params &params, score_smem &smem, int warpgroup)
{
    const query_slot &slot = smem.slot;
    slab_consumer consumer = make_consumer(smem, warpgroup);
#pragma unroll
    for (int half = 0; half < 2; half++)
        if (threadIdx.x % 4 == 0)
            rows_of_split(params, smem.slot_index, smem.split)[acc_row<1>(0, half)] = empty_row();
    const float scale_t = params.a.scale, least = params.least;
    for (int tile = smem.tile_begin; tile < smem.tile_end; tile++) {
        const int rows[2] = {acc_row<1>(0, 0), acc_row<1>(0, 1)};
        tile_logits p, y;
        clear(p);
        if (params.target != NULL)
            load_target(p, params, smem.slot_index, rows, tile * SIDE);
        const head_list teacher = teacher_heads(params, slot.head);
        head_lse lse[2] = {lse_of(params, slot, teacher.first, query_of(slot, acc_row<1>(0, 0))),
                           lse_of(params, slot, teacher.first, query_of(slot, acc_row<1>(0, 1)))};
        consumer.add_heads(p, teacher, lse, mean_of_heads{scale_t});
        clear(y);
        head_weight w[2] = {weight_of(params, slot, query_of(slot, acc_row<1>(0, 0))),
                            weight_of(params, slot, query_of(slot, acc_row<1>(0, 1)))};
        consumer.add_heads(y, student_heads(params, slot.head), w, index_sum{least});
        const bool sums_wanted = params.call.op != SKL_OP_BACKWARD;
        if (GRADIENTS)
            store_tile<1>(params, slot, g_block(params, smem.slot_index, tile, (int)(threadIdx.x / 32), 0), p, y,
                          rows, tile * SIDE);
#pragma unroll
        for (int half = 0; sums_wanted && half < 2; half++)
            add_to_row(rows_of_split(params, smem.slot_index, smem.split) + rows[half],
                       sum_row(params, slot, p, y, half, rows[half], tile * SIDE));
    }
}

template <bool GRADIENTS>
__global__ void __launch_bounds__(SCORE_THREADS, 1)
    score_kernel(const __grid_constant__ strip_params params, const __grid_constant__ score_maps maps)
{
#ifdef __CUDA_ARCH_FEAT_SM90_ALL
    extern __shared__ __align__(1024) unsigned char raw[];
    score_smem &smem = *(score_smem *)(void *)raw;
    if (threadIdx.x == 0) {
        const slot_split work = slot_split_of_block(params);
        smem.slot_index = work.slot;
        smem.slot = slot_at(params, smem.slot_index, (unsigned)params.problem.heads_s);
        smem.split = work.split;
        const range32 tiles = tiles_of_split(smem.slot, smem.split, params.num_splits);
        smem.tile_begin = tiles.begin;
        smem.tile_end = tiles.end;
        init_pipelines(smem);
    }
    __syncthreads();
    const int warpgroup = warpgroup_index();
    if (warpgroup == CONSUMERS) {
        reg_dealloc<24>();
        if (warp_index() == CONSUMERS * 4) {
            slab_producer producer = {smem, {0, 0}, {0, 0}};
            for (int tile = smem.tile_begin; tile < smem.tile_end; tile++) {
                producer.load_heads(teacher_heads(params, smem.slot.head), maps.q_t, maps.k_t, tile);
                producer.load_heads(student_heads(params, smem.slot.head), maps.q_s, maps.k_s, tile);
            }
        }
    } else {
        reg_alloc<240>();
        consume_scores<GRADIENTS>(params, smem, warpgroup);
    }
#endif
}

/* LSEs of the teacher's heads, for callers that have none, written to rows.lse_t: the pipelines of the scores, with
 * one head per block and all keys that its 128 queries attend to. */
static __global__ void __launch_bounds__(SCORE_THREADS, 1)
    lse_kernel(const __grid_constant__ strip_params params, const __grid_constant__ score_maps maps)
{
#ifdef __CUDA_ARCH_FEAT_SM90_ALL
    extern __shared__ __align__(1024) unsigned char raw[];
    score_smem &smem = *(score_smem *)(void *)raw;
    if (threadIdx.x == 0) {
        smem.slot = slot_at(params, blockIdx.x, (unsigned)params.problem.heads_t);
        init_pipelines(smem);
    }
    __syncthreads();
    const query_slot &slot = smem.slot;
    const head_list head = {slot.head, 1, params.a.heads_per_key, (params.a.dim + SLAB - 1) / SLAB, false};
    const int warpgroup = warpgroup_index();
    if (warpgroup == CONSUMERS) {
        reg_dealloc<24>();
        if (warp_index() == CONSUMERS * 4) {
            slab_producer producer = {smem, {0, 0}, {0, 0}};
            for (int tile = slot.tile_begin; tile < slot.tile_end; tile++)
                producer.load_heads(head, maps.q_t, maps.k_t, tile);
        }
        return;
    }
    reg_alloc<240>();
    slab_consumer consumer = make_consumer(smem, warpgroup);
    lse_row rows[2] = {{-INFINITY, 0.0F}, {-INFINITY, 0.0F}};
    for (int tile = slot.tile_begin; tile < slot.tile_end; tile++) {
        tile_logits x;
        consumer.multiply(x, head.slabs, false);
        const range32 sees[2] = {visible_range(params, slot, acc_row<1>(0, 0), tile * SIDE),
                                 visible_range(params, slot, acc_row<1>(0, 1), tile * SIDE)};
        if (is_full(slot, tile * SIDE, SIDE))
            add_tile<false>(rows, x, params.a.scale, sees);
        else
            add_tile<true>(rows, x, params.a.scale, sees);
    }
#pragma unroll
    for (int half = 0; half < 2; half++) {
        const int row = acc_row<1>(0, half);
        const float lse = lse_of_lanes(params, slot, row, rows[half]);
        if (threadIdx.x % 4 == 0 && row < slot.count)
            skl_row_set(&params.call.rows.lse_t, &slot.sequence, slot.head, slot.first + row, lse);
    }
#endif
}

} // namespace sm90

#endif
