/* Forward of heads of 192 and 256 dimensions: two warpgroups, two stages of logits each.
 *
 *   block   2 consumer warpgroups of 64 queries, 1 producer warp; one block a multiprocessor
 *   regs    240 a consumer thread: 128 dimensions of Q of both arguments (64), logits of two stages of 64 keys (128),
 *           row states
 *   shared  DEPTH stages of 64 keys of both arguments; the other dimensions of Q
 *
 *   producer   copies stage after stage (TMA) as consumers leave them
 *   consumer   products of stage n + 1 (wgmma)  ||  exponentials and sums of stage n
 *
 * Products take longer than exponentials here, and hide them. Softcap has instances of its own (CAPPED): logits
 * behind the cap need registers beside the accumulators, so they have those of the second stage, and products are
 * hidden behind the other warpgroup's arithmetic only. */
#ifndef SKL_CUDA_SM90_ATTENTION_FORWARD_WIDE_CUH
#define SKL_CUDA_SM90_ATTENTION_FORWARD_WIDE_CUH

#include "cuda/sm90/attention/forward_stage.cuh"

namespace sm90
{

template <typename ELEMENT, int DIM, bool CAPPED> struct wide_forward {
    static constexpr int GROUPS = CONSUMERS;
    static constexpr int THREADS = 128 * (GROUPS + 1);
    typedef query_tile<GROUPS> tile_type;
    static constexpr int DEPTH = DIM == 192 ? 4 : 2; /* stages */
    static constexpr int REG_DIMS = 128;             /* dimensions of both queries in registers */

    struct memory {
        key_stage<DIM> stages[DEPTH];
        smem_rows<(DIM - REG_DIMS) / 64> q_a, q_b;
        uint64_t queries_full[1], full[DEPTH], empty[DEPTH];
        row_stream keys; /* these from one thread for all of them; the band is only here */
        tma_coord from;
        tile_type tile;
        float scale_a, scale_b;
    };

    /* ---- Producer ------------------------------------------------------------------------------------------- */

    __device__ static void produce(const forward_maps &maps, memory &smem)
    {
        const tma_coord from = warp_uniform(smem.from);
        const stage_order keys = warp_uniform(smem.keys);
        barrier_expect_tx(smem.queries_full[0], smem.q_a.SIZE + smem.q_b.SIZE);
        load_queries<REG_DIMS>(smem.q_a, maps.queries_a, from, smem.queries_full[0]);
        load_queries<REG_DIMS>(smem.q_b, maps.queries_b, from, smem.queries_full[0]);
        for (int n = 0; n < keys.stages; n++) {
            const int stage = n % DEPTH;
            barrier_wait(smem.empty[stage], n / DEPTH % 2 ^ 1);
            load_keys(smem.stages[stage], maps, from, keys.row_of(n), smem.full[stage]);
        }
    }

    /* ---- Consumers ------------------------------------------------------------------------------------------ */

    const forward_params &params;
    memory &smem;
    /* The same for all lanes of a warp. */
    int group;
    stage_order keys;
    /* Of the thread. */
    uint32_t q_a[REG_DIMS / 16][4], q_b[REG_DIMS / 16][4];
    skl_row_state state[2];

    __device__ void load_q_frags(const tile_type &tile)
    {
        const skl_sequence &s = tile.sequence;
        const int rows = (int)skl_min(tile.ROWS, s.query_count - tile.first);
        load_rows<REG_DIMS>(q_a, queries_of<ELEMENT>(params.a, s, tile.head).from(tile.first), rows);
        load_rows<REG_DIMS>(q_b, queries_of<ELEMENT>(params.b, s, tile.head).from(tile.first), rows);
        barrier_wait(smem.queries_full[0], 0);
    }

    __device__ void start(stage_logits &x, stage_logits &y, int n)
    {
        const int stage = n % DEPTH;
        barrier_wait(smem.full[stage], n / DEPTH % 2);
        wgmma_fence();
        const uint32_t queries = group * (64 * 128 / 16);
        start_products<ELEMENT, DIM, REG_DIMS>(x, q_a, row_operand(&smem.q_a) + queries,
                                               row_operand(&smem.stages[stage].a));
        start_products<ELEMENT, DIM, REG_DIMS>(y, q_b, row_operand(&smem.q_b) + queries,
                                               row_operand(&smem.stages[stage].b));
        wgmma_commit();
    }

    __device__ void finish(stage_logits &x, stage_logits &y, int n)
    {
        wgmma_wait<0>();
        fence_operand(x);
        fence_operand(y);
        barrier_arrive_if(smem.empty[n % DEPTH], threadIdx.x % 32 == 0);
    }

    __device__ void add_masked_stage(const stage_logits &x, float scale_a, const stage_logits &y, float scale_b,
                                     int n)
    {
        add_masked(state, x, scale_a, y, scale_b, smem.keys.band, keys.place_of(n) * STAGE_KEYS);
    }

    /* The scales come from shared memory, so that no exponential is taken before the wait for the next stage's keys:
     * its products have to start first. */
    __device__ void add_full_stage(const stage_logits &x, const stage_logits &y)
    {
        const float scale_a = load_shared(smem.scale_a), scale_b = load_shared(smem.scale_b);
        add_full(state, x, scale_a, y, scale_b);
    }

    __device__ void run_capped()
    {
        for (int n = 0; n < keys.stages; n++) {
            stage_logits x, y, capped_x, capped_y;
            start(x, y, n);
            finish(x, y, n);
            cap_stage(capped_x, x, params.a);
            cap_stage(capped_y, y, params.b);
            if (n < keys.masked_stages)
                add_masked_stage(capped_x, 1.0F, capped_y, 1.0F, n);
            else
                add_full(state, capped_x, 1.0F, capped_y, 1.0F);
        }
    }

    __device__ void run()
    {
        stage_logits x[2], y[2];
        for (int n = 0; n < keys.masked_stages; n++) {
            start(x[0], y[0], n);
            finish(x[0], y[0], n);
            add_masked_stage(x[0], params.a.scale, y[0], params.b.scale, n);
        }
        const int end = keys.stages;
        if (keys.masked_stages == end)
            return;
        /* Products are started unconditionally and with no branch before the sums: ptxas would wait for them at once,
         * or not mix them with the exponentials. So the last ones are started twice, and not used. */
        start(x[0], y[0], keys.masked_stages);
        for (int n = keys.masked_stages; n < end; n += 2) {
            finish(x[0], y[0], n);
            start(x[1], y[1], n + 1);
            add_full_stage(x[0], y[0]);
            finish(x[1], y[1], n + 1);
            start(x[0], y[0], min(n + 2, end - 1));
            add_full_stage(x[1], y[1]);
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
    if (threadIdx.x == 0) {
        smem.keys = keys_of_tile(params, tile, params.num_splits);
        smem.from = tma_coord::of(params, tile);
        smem.tile = tile;
        smem.scale_a = params.a.scale;
        smem.scale_b = params.b.scale;
        init_barriers<forward>(smem);
    }
    __syncthreads();
    const int group = warpgroup_index();
    if (group == forward::GROUPS) {
        reg_dealloc<24>();
        if (warp_index() == forward::GROUPS * 4)
            forward::produce(maps, smem);
    } else {
        reg_alloc<240>();
        forward own = {params, smem, group, warp_uniform(smem.keys)};
        own.load_q_frags(smem.tile);
        own.state[0] = own.state[1] = skl_state_empty();
        if (CAPPED)
            own.run_capped();
        else
            own.run();
        write_row_of_two(params, smem.tile, merge_two_rows(own.state[0], own.state[1]));
    }
#endif
}

} // namespace sm90

#endif
