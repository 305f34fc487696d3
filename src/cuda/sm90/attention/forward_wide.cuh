/* Forward for head sizes 192 and 256, and for split rows of up to 128: KL and LSEs of each row, in one pass over the
 * keys.
 *
 * Bound: tensor cores. At 256 dimensions wgmmas take twice as long as the exponentials, and hide them.
 *
 *   block      2 consumer warpgroups of 64 queries, 1 producer warp; one block per SM
 *   registers  240 per consumer thread: 128 dimensions of Q of both arguments (64), logits of two stages of 64 keys
 *              (128), row states
 *   shared     DEPTH stages of 64 keys of both arguments; the remaining dimensions of Q
 *
 *   producer   TMA load of stage n + DEPTH, as soon as both consumers have released stage n
 *   consumer   wgmma          | stage 0 | stage 1     | stage 2     | stage 3     |
 *              exponentials             | stage 0     | stage 1     | stage 2     |
 *
 * Split rows (sm90/split.cuh): high is in registers and low in shared memory. A second producer warp copies the
 * factors of the keys. They are read after their stage is released, so there are twice as many places for them as
 * stages.
 *
 * CAPPED (softcap) is a separate instance. Logits after the cap need registers in addition to the accumulators and
 * get those of the second stage. A warpgroup then waits for its own wgmmas, and only the other warpgroup's arithmetic
 * overlaps them. */
#ifndef SKL_CUDA_SM90_ATTENTION_FORWARD_WIDE_CUH
#define SKL_CUDA_SM90_ATTENTION_FORWARD_WIDE_CUH

#include "cuda/sm90/attention/forward_stage.cuh"
#include "cuda/sm90/split.cuh"

namespace sm90
{

template <typename ELEMENT, int DIM, bool CAPPED> struct wide_forward {
    static constexpr int GROUPS = CONSUMERS;
    static constexpr int THREADS = 128 * (GROUPS + 1);
    typedef query_tile<GROUPS> tile_type;
    typedef typename operand<ELEMENT>::type element;
    static constexpr bool SPLIT = operand<ELEMENT>::SPLIT;
    static constexpr int ROW_DIM = DIM * operand<ELEMENT>::PARTS; /* elements of a row in memory */
    static constexpr int DEPTH = ROW_DIM == 256 ? 2 : 4;          /* pipeline stages */
    static constexpr int REG_DIMS = SPLIT ? DIM : 128; /* elements of both arguments' queries in registers */
    static constexpr int FACTOR_DEPTH = SPLIT ? 2 * DEPTH : 0;
    static constexpr int LOADS =
        SPLIT ? 1 + 32 : 1; /* arrivals that fill a stage: TMA's, those of the factors' warp */

    struct memory {
        key_stage<ROW_DIM> stages[DEPTH];
        smem_rows<(ROW_DIM - REG_DIMS) / 64> q_a, q_b;
        factor_ring<FACTOR_DEPTH> factors;
        uint64_t queries_full[1], full[DEPTH], empty[DEPTH];
        stage_schedule keys;
        row_ranges<tile_type::ROWS> visible;
        tma_coord coord;
        tile_type tile;
        float scale_a, scale_b;
    };

    /* ---- Producer ------------------------------------------------------------------------------------------- */

    __device__ static void produce(const forward_maps &maps, memory &smem)
    {
        const tma_coord coord = warp_uniform(smem.coord);
        const stage_schedule keys = warp_uniform(smem.keys);
        barrier_expect_tx(smem.queries_full[0], smem.q_a.SIZE + smem.q_b.SIZE);
        load_queries<REG_DIMS>(smem.q_a, maps.queries_a, coord, smem.queries_full[0]);
        load_queries<REG_DIMS>(smem.q_b, maps.queries_b, coord, smem.queries_full[0]);
        for (int n = 0; n < keys.stages; n++) {
            const int stage = n % DEPTH;
            barrier_wait(smem.empty[stage], n / DEPTH % 2 ^ 1);
            load_keys(smem.stages[stage], maps, coord, keys.row_at(n), smem.full[stage]);
        }
    }

    /* Executed by one warp: factors of split keys. */
    __device__ static void produce_factors(const forward_params &params, memory &smem)
    {
        const skl_problem &p = params.problem;
        const int64_t rows = p.packed ? p.total_k : p.len_k;
        const int lane = (int)threadIdx.x % 32;
        for (int n = 0; n < smem.keys.stages; n++) {
            const int row = smem.keys.row_at(n) + lane;
            float a[2], b[2];
            for (int half = 0; half < 2; half++) { /* in flight during the wait */
                a[half] = row_factor(params.a.k_factors, smem.coord.batch, smem.coord.head_a, row + half * 32, rows);
                b[half] = row_factor(params.b.k_factors, smem.coord.batch, smem.coord.head_b, row + half * 32, rows);
            }
            barrier_wait(smem.empty[n % DEPTH], n / DEPTH % 2 ^ 1);
            stage_factors &to = smem.factors.at[n % FACTOR_DEPTH];
            for (int half = 0; half < 2; half++)
                to.set(lane + half * 32, a[half], b[half]);
            barrier_arrive(smem.full[n % DEPTH]);
        }
    }

    /* ---- Consumers ------------------------------------------------------------------------------------------ */

    const forward_params &params;
    memory &smem;
    /* Warp-uniform: */
    int warpgroup;
    stage_schedule keys;
    /* Per thread: */
    uint32_t q_a[REG_DIMS / 16][4], q_b[REG_DIMS / 16][4];
    skl_row_state state[2];
    row_scales scale_a, scale_b; /* SPLIT */

    __device__ void load_q_frags(const tile_type &tile)
    {
        const skl_sequence &s = tile.sequence;
        const int rows = (int)skl_min(tile.ROWS, s.query_count - tile.first);
        load_a_frag<REG_DIMS>(q_a, queries_of<element>(params.a, s, tile.head).from(tile.first), rows);
        load_a_frag<REG_DIMS>(q_b, queries_of<element>(params.b, s, tile.head).from(tile.first), rows);
        for (int half = 0; half < 2 && SPLIT; half++) {
            const int64_t row = s.query_begin + tile.first + acc_row<1>(0, half), end = s.query_begin + s.query_count;
            scale_a.of[half] = params.a.scale * row_factor(params.a.q_factors, s.batch, tile.head, row, end);
            scale_b.of[half] = params.b.scale * row_factor(params.b.q_factors, s.batch, tile.head, row, end);
        }
        barrier_wait(smem.queries_full[0], 0);
    }

    __device__ void issue_argument(stage_logits &x, const uint32_t (&q)[REG_DIMS / 16][4], uint32_t q_smem,
                                   uint32_t stage_smem)
    {
        if constexpr (SPLIT)
            issue_split_logits<DIM>(
                x, [&](int step) -> const uint32_t(&)[4] { return q[step]; },
                [&](int step) { return k_step_descriptor(q_smem, step, block_tile::ROWS); }, stage_smem);
        else
            issue_logits<ELEMENT, DIM, REG_DIMS>(x, q, q_smem, stage_smem);
    }

    __device__ void issue_stage(stage_logits &x, stage_logits &y, int n)
    {
        const int stage = n % DEPTH;
        barrier_wait(smem.full[stage], n / DEPTH % 2);
        wgmma_fence();
        const uint32_t queries = warpgroup * (64 * 128 / 16);
        issue_argument(x, q_a, k_major_operand(&smem.q_a) + queries, k_major_operand(&smem.stages[stage].a));
        issue_argument(y, q_b, k_major_operand(&smem.q_b) + queries, k_major_operand(&smem.stages[stage].b));
        wgmma_commit();
    }

    __device__ void wait_stage(stage_logits &x, stage_logits &y, int n)
    {
        wgmma_wait<0>();
        fence_operand(x);
        fence_operand(y);
        barrier_arrive_if(smem.empty[n % DEPTH], threadIdx.x % 32 == 0);
    }

    /* Calls use(products of A, their scale, products of B, their scale) for stage n. Reads scales or factors from
     * shared memory, so that ptxas cannot move exponentials above the wait for the next stage's keys: the next
     * stage's wgmmas have to be issued first. */
    template <typename USE>
    __device__ void with_products(const stage_logits &x, const stage_logits &y, int n, USE use)
    {
        if constexpr (SPLIT) {
            const stage_factors &factors = smem.factors.at[n % FACTOR_DEPTH];
            use(split_products<false>{x, factors}, scale_a, split_products<true>{y, factors}, scale_b);
        } else {
            use(x, load_shared(smem.scale_a), y, load_shared(smem.scale_b));
        }
    }

    __device__ void add_masked_stage(const stage_logits &x, const stage_logits &y, int n)
    {
        with_products(x, y, n, [&](const auto &a, const auto &for_a, const auto &b, const auto &for_b) {
            add_masked(state, a, for_a, b, for_b, smem.visible, keys.stage_at(n) * STAGE_KEYS);
        });
    }

    __device__ void add_full_stage(const stage_logits &x, const stage_logits &y, int n)
    {
        with_products(x, y, n, [&](const auto &a, const auto &for_a, const auto &b, const auto &for_b) {
            add_full(state, a, for_a, b, for_b);
        });
    }

    __device__ void run_capped()
    {
        for (int n = 0; n < keys.stages; n++) {
            stage_logits x, y, capped_x, capped_y;
            issue_stage(x, y, n);
            wait_stage(x, y, n);
            with_products(x, y, n, [&](const auto &a, const auto &for_a, const auto &b, const auto &for_b) {
                cap_stage(capped_x, a, for_a, params.a);
                cap_stage(capped_y, b, for_b, params.b);
            });
            if (n < keys.masked_stages)
                add_masked(state, capped_x, 1.0F, capped_y, 1.0F, smem.visible, keys.stage_at(n) * STAGE_KEYS);
            else
                add_full(state, capped_x, 1.0F, capped_y, 1.0F);
        }
    }

    __device__ void run()
    {
        stage_logits x[2], y[2];
        for (int n = 0; n < keys.masked_stages; n++) {
            issue_stage(x[0], y[0], n);
            wait_stage(x[0], y[0], n);
            add_masked_stage(x[0], y[0], n);
        }
        const int end = keys.stages;
        if (keys.masked_stages == end)
            return;
        /* wgmmas are issued unconditionally, with no branch between them and the sums. Otherwise ptxas waits for them
         * at once, or does not overlap them with the exponentials. So the last stage is issued twice, and its second
         * result not used. */
        issue_stage(x[0], y[0], keys.masked_stages);
        for (int n = keys.masked_stages; n < end; n += 2) {
            wait_stage(x[0], y[0], n);
            issue_stage(x[1], y[1], n + 1);
            add_full_stage(x[0], y[0], n);
            wait_stage(x[1], y[1], n + 1);
            issue_stage(x[0], y[0], min(n + 2, end - 1));
            add_full_stage(x[1], y[1], n + 1);
        }
        wgmma_wait<0>();
    }
};

template <typename ELEMENT, int DIM, bool CAPPED>
__global__ void __launch_bounds__(wide_forward<ELEMENT, DIM, CAPPED>::THREADS, 1)
    wide_forward_kernel(const __grid_constant__ forward_params params, const __grid_constant__ forward_maps maps)
{
#ifdef __CUDA_ARCH_FEAT_SM90_ALL
    typedef wide_forward<ELEMENT, DIM, CAPPED> forward;
    extern __shared__ __align__(1024) unsigned char raw[];
    typename forward::memory &smem = *(typename forward::memory *)(void *)raw;
    typename forward::tile_type tile;
    if (!tile.find(params, params.num_splits, (unsigned)params.head_group))
        return;
    const row_stream keys = keys_of_tile(params, tile, params.num_splits);
    smem.visible.fill(keys.band);
    if (threadIdx.x == 0) {
        smem.keys = keys;
        smem.coord = tma_coord::of(params, tile);
        smem.tile = tile;
        smem.scale_a = params.a.scale;
        smem.scale_b = params.b.scale;
        init_barriers<forward>(smem, forward::LOADS);
    }
    __syncthreads();
    const int warpgroup = warpgroup_index();
    if (warpgroup == forward::GROUPS) {
        reg_dealloc<24>();
        if (warp_index() == forward::GROUPS * 4)
            forward::produce(maps, smem);
        if constexpr (forward::SPLIT)
            if (warp_index() == forward::GROUPS * 4 + 1)
                forward::produce_factors(params, smem);
    } else {
        reg_alloc<240>();
        forward consumer = {params, smem, warpgroup, warp_uniform(smem.keys)};
        consumer.load_q_frags(smem.tile);
        consumer.state[0] = consumer.state[1] = skl_state_empty();
        if (CAPPED)
            consumer.run_capped();
        else
            consumer.run();
        write_row_of_two(params, smem.tile, merge_two_rows(consumer.state[0], consumer.state[1]));
    }
#endif
}

} // namespace sm90

#endif
