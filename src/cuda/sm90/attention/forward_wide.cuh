/* Forward for head sizes 192 and 256, of one argument or both, and for two-term rows of up to 128: KL and LSEs of
 * each row, in one pass over the keys.
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
 * Two-term rows (sm90/two_term.cuh): high is in registers, low in shared memory. A second producer warp copies the
 * factors of the keys. They are read after their stage is released: there is room for twice as many as stages, each
 * with a barrier.
 *
 * CAPPED (softcap) is a separate instance. Logits after the cap need registers in addition to the accumulators and
 * get those of the second stage. A warpgroup then waits for its own wgmmas, and only the other warpgroup's arithmetic
 * overlaps them. */
#ifndef SKL_CUDA_SM90_ATTENTION_FORWARD_WIDE_CUH
#define SKL_CUDA_SM90_ATTENTION_FORWARD_WIDE_CUH

#include "cuda/sm90/attention/forward_stage.cuh"
#include "cuda/sm90/attention/tile_kernel.cuh"
#include "cuda/sm90/two_term.cuh"

namespace sm90
{

template <typename ELEMENT, int DIM_A, int DIM_B, bool CAPPED> struct wide_forward {
    static constexpr int GROUPS = CONSUMERS, THREADS = 128 * (GROUPS + 1), REGS = 240, PRODUCER_REGS = 24;
    typedef query_tile<GROUPS> tile_type;
    typedef typename operand<ELEMENT>::type element;
    static constexpr bool TWO_TERM = operand<ELEMENT>::TWO_TERM;
    /* Elements of a row in memory, and of the queries in registers. */
    static constexpr int ROW_DIM_A = operand<ELEMENT>::TERMS * DIM_A, ROW_DIM_B = operand<ELEMENT>::TERMS * DIM_B;
    static constexpr int REG_DIMS_A = DIM_A < 128 ? DIM_A : 128, REG_DIMS_B = DIM_B < 128 ? DIM_B : 128;
    typedef smem_rows<(ROW_DIM_A - REG_DIMS_A) / 64> q_a_rows;
    typedef smem_rows<(ROW_DIM_B - REG_DIMS_B) / 64> q_b_rows;
    static constexpr int DEPTH =
        depth_for(sizeof(key_stage<ROW_DIM_A, ROW_DIM_B>), q_a_rows::SIZE + q_b_rows::SIZE, 4); /* pipeline stages */
    static constexpr int FACTOR_DEPTH = TWO_TERM ? 2 * DEPTH : 0;

    struct memory {
        key_stage<ROW_DIM_A, ROW_DIM_B> stages[DEPTH];
        q_a_rows q_a;
        alignas(1024) q_b_rows q_b; /* q_a has one byte if it has no slab */
        factor_ring<FACTOR_DEPTH> factors;
        uint64_t queries_full[1], full[DEPTH], empty[DEPTH];
        stage_schedule keys;
        row_ranges<tile_type::ROWS> visible;
        tma_coord coord;
        tile_type tile;
        float scale_a, scale_b;
    };

    __device__ static bool find(const forward_params &params, memory &, tile_type &tile, row_stream &keys)
    {
        if (!tile.find(params, params.num_splits, (unsigned)params.head_group))
            return false;
        keys = keys_of_tile(params, tile, params.num_splits);
        return true;
    }

    __device__ static void start(const forward_params &params, memory &smem, const tile_type &tile,
                                 const row_stream &keys)
    {
        smem.keys = keys;
        smem.coord = tma_coord::of(params, tile);
        smem.tile = tile;
        smem.scale_a = params.a.scale;
        smem.scale_b = params.b.scale;
        smem.factors.init_barriers();
        init_barriers<wide_forward>(smem, GROUPS * (TWO_TERM ? 128 : 4));
    }

    const forward_params &params;
    const forward_maps &maps;
    memory &smem;
    /* Warp-uniform: */
    int warpgroup;
    stage_schedule keys;
    /* Per thread: */
    uint32_t q_a[REG_DIMS_A / 16][4], q_b[REG_DIMS_B / 16][4];
    skl_row_state state[2];
    row_factors factors_a, factors_b; /* TWO_TERM: of the queries */

    /* ---- Producer ------------------------------------------------------------------------------------------- */

    __device__ void produce()
    {
        if (warp_index() == GROUPS * 4)
            produce_rows();
        if constexpr (TWO_TERM)
            if (warp_index() == GROUPS * 4 + 1)
                produce_factors();
    }

    /* Executed by one warp: queries and keys. */
    __device__ void produce_rows()
    {
        const tma_coord coord = warp_uniform(smem.coord);
        const stage_schedule keys = warp_uniform(smem.keys);
        barrier_expect_tx(smem.queries_full[0], smem.q_a.SIZE + smem.q_b.SIZE);
        load_queries<REG_DIMS_A>(smem.q_a, maps.queries_a, coord, smem.queries_full[0]);
        load_queries<REG_DIMS_B>(smem.q_b, maps.queries_b, coord, smem.queries_full[0]);
        for (int n = 0; n < keys.stages; n++) {
            const int stage = n % DEPTH;
            barrier_wait(smem.empty[stage], n / DEPTH % 2 ^ 1);
            load_keys(smem.stages[stage], maps, coord, keys.row_at(n), smem.full[stage]);
        }
    }

    /* Executed by one warp: factors of the keys. */
    __device__ void produce_factors()
    {
        const int64_t rows = params.problem.packed ? params.problem.total_k : params.problem.len_k;
        for (int n = 0; n < smem.keys.stages; n++) {
            const lane_factors loaded =
                load_stage_factors(params.a.k_factors, smem.coord.head_a, params.b.k_factors, smem.coord.head_b,
                                   smem.coord.batch, smem.keys.row_at(n), rows);
            barrier_wait(smem.empty[n % DEPTH], n / DEPTH % 2 ^ 1); /* the loads are in flight meanwhile */
            store_stage_factors(smem.factors.at[n % FACTOR_DEPTH], loaded);
            barrier_arrive(smem.factors.full[n % FACTOR_DEPTH]); /* every lane, because every lane has written */
        }
    }

    /* ---- Consumers ------------------------------------------------------------------------------------------ */

    __device__ void load_q_frags(const tile_type &tile)
    {
        const skl_sequence &s = tile.sequence;
        const int rows = (int)skl_min(tile.ROWS, s.query_count - tile.first);
        load_a_frag<REG_DIMS_A>(q_a, queries_of<element>(params.a, s, tile.head).from(tile.first), rows);
        load_a_frag<REG_DIMS_B>(q_b, queries_of<element>(params.b, s, tile.head).from(tile.first), rows);
        if constexpr (TWO_TERM) {
            const int64_t first = s.query_begin + tile.first, end = s.query_begin + s.query_count;
            factors_a = load_row_factors(params.a.q_factors, s.batch, tile.head, first, end);
            factors_b = load_row_factors(params.b.q_factors, s.batch, tile.head, first, end);
        }
        barrier_wait(smem.queries_full[0], 0);
    }

    template <int DIM, int REG_DIMS>
    __device__ void issue_argument(stage_logits &x, const uint32_t (&q)[REG_DIMS / 16][4], uint32_t q_smem,
                                   uint32_t stage_smem)
    {
        if constexpr (TWO_TERM)
            issue_two_term_logits<DIM>(
                x, [&](int step) -> const uint32_t(&)[4] { return q[step]; },
                [&](int step) { return k_step_descriptor(q_smem, step, block_tile::ROWS); }, stage_smem);
        else
            issue_logits<ELEMENT, DIM, REG_DIMS>(x, q, q_smem, stage_smem);
    }

    __device__ void issue_stage(stage_logits &x, stage_logits &y, int n)
    {
        const int stage = n % DEPTH;
        if constexpr (TWO_TERM)
            barrier_wait(smem.factors.full[n % FACTOR_DEPTH], n / FACTOR_DEPTH % 2);
        barrier_wait(smem.full[stage], n / DEPTH % 2);
        wgmma_fence();
        const uint32_t queries = warpgroup * (64 * 128 / 16);
        issue_argument<DIM_A, REG_DIMS_A>(x, q_a, k_major_operand(&smem.q_a) + queries,
                                          k_major_operand(&smem.stages[stage].a));
        issue_argument<DIM_B, REG_DIMS_B>(y, q_b, k_major_operand(&smem.q_b) + queries,
                                          k_major_operand(&smem.stages[stage].b));
        wgmma_commit();
    }

    __device__ void wait_stage(stage_logits &x, stage_logits &y, int n)
    {
        wgmma_wait<0>();
        fence_operand(x);
        fence_operand(y);
        if constexpr (TWO_TERM)
            barrier_arrive(smem.empty[n % DEPTH]); /* every lane: it has read factors of stage n - 1 */
        else
            barrier_arrive_if(smem.empty[n % DEPTH], threadIdx.x % 32 == 0);
    }

    /* Calls use(products of A, products of B) for stage n, which the accumulators hold. */
    template <typename USE>
    __device__ void with_products(const stage_logits &x, const stage_logits &y, int n, USE use)
    {
        if constexpr (TWO_TERM) {
            const stage_factors &factors = smem.factors.at[n % FACTOR_DEPTH];
            use(two_term_products<false>{x, factors, factors_a}, two_term_products<true>{y, factors, factors_b});
        } else {
            use(x, y);
        }
    }

    template <typename X, typename Y>
    __device__ void add_masked_stage(const X &x, float scale_a, const Y &y, float scale_b, int n)
    {
        add_masked(state, x, scale_a, y, scale_b, smem.visible, keys.stage_at(n) * STAGE_KEYS);
    }

    /* Reads the scales from shared memory, so that ptxas cannot move exponentials above the wait for the next stage's
     * keys: the next stage's wgmmas have to be issued first. */
    __device__ void add_full_stage(const stage_logits &x, const stage_logits &y, int n)
    {
        const float scale_a = load_shared(smem.scale_a), scale_b = load_shared(smem.scale_b);
        with_products(x, y, n, [&](const auto &a, const auto &b) { add_full(state, a, scale_a, b, scale_b); });
    }

    __device__ void run_capped()
    {
        for (int n = 0; n < keys.stages; n++) {
            stage_logits x, y, capped_x, capped_y;
            issue_stage(x, y, n);
            wait_stage(x, y, n);
            if constexpr (!TWO_TERM)
                if (n >= keys.masked_stages && add_capped<CAPPED_LOGITS>(state, x, y, params))
                    continue;
            with_products(x, y, n, [&](const auto &a, const auto &b) {
                cap_stage(capped_x, a, params.a);
                cap_stage(capped_y, b, params.b);
            });
            if (n < keys.masked_stages)
                add_masked_stage(capped_x, 1.0F, capped_y, 1.0F, n);
            else
                add_full(state, capped_x, 1.0F, capped_y, 1.0F);
        }
    }

    __device__ void run()
    {
        keys = warp_uniform(smem.keys);
        load_q_frags(smem.tile);
        state[0] = state[1] = skl_state_empty();
        if (CAPPED)
            run_capped();
        else
            run_plain();
    }

    __device__ void store() const
    {
        write_row_of_two(params, smem.tile, merge_two_rows(state[0], state[1]));
    }

    __device__ void run_plain()
    {
        stage_logits x[2], y[2];
        for (int n = 0; n < keys.masked_stages; n++) {
            issue_stage(x[0], y[0], n);
            wait_stage(x[0], y[0], n);
            with_products(x[0], y[0], n, [&](const auto &a, const auto &b) {
                add_masked_stage(a, params.a.scale, b, params.b.scale, n);
            });
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

} // namespace sm90

#endif
