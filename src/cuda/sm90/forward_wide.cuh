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
#ifndef SKL_CUDA_SM90_FORWARD_WIDE_CUH
#define SKL_CUDA_SM90_FORWARD_WIDE_CUH

#include "cuda/sm90/forward_stage.cuh"

namespace sm90
{

template <typename ELEMENT, int DIM, bool CAPPED> struct wide_forward {
    static constexpr int GROUPS = CONSUMERS;
    static constexpr int THREADS = 128 * (GROUPS + 1);
    typedef query_place<GROUPS> place;
    static constexpr int DEPTH = DIM == 192 ? 4 : 2; /* stages */
    static constexpr int HELD = 128;                 /* dimensions of both queries in registers */

    struct memory {
        key_stage<DIM> stages[DEPTH];
        lying_rows<(DIM - HELD) / 64> lying_a, lying_b;
        uint64_t queries_full[1], full[DEPTH], empty[DEPTH];
        row_stream keys; /* these from one thread for all of them; the band is only here */
        copy_place from;
        place tile;
        float scale_a, scale_b;
    };

    /* ---- Producer ------------------------------------------------------------------------------------------- */

    __device__ static void produce(const forward_maps &maps, memory &block)
    {
        const copy_place from = common(block.from);
        const stage_order keys = common(block.keys);
        barrier_expect(block.queries_full[0], block.lying_a.SIZE + block.lying_b.SIZE);
        copy_queries<HELD>(block.lying_a, maps.queries_a, from, block.queries_full[0]);
        copy_queries<HELD>(block.lying_b, maps.queries_b, from, block.queries_full[0]);
        for (int n = 0; n < keys.stages; n++) {
            const int at = n % DEPTH;
            barrier_wait(block.empty[at], n / DEPTH % 2 ^ 1);
            copy_keys(block.stages[at], maps, from, keys.row_of(n), block.full[at]);
        }
    }

    /* ---- Consumers ------------------------------------------------------------------------------------------ */

    const skl_cuda_params &params;
    memory &block;
    /* The same for all lanes of a warp. */
    int group;
    stage_order keys;
    /* Of the thread. */
    uint32_t q_a[HELD / 16][4], q_b[HELD / 16][4];
    skl_row_state state[2];

    __device__ void load_queries(const place &tile)
    {
        const skl_sequence &s = tile.sequence;
        const int rows = (int)skl_min(tile.ROWS, s.query_count - tile.first);
        load_rows<HELD>(q_a, queries_of<ELEMENT>(params.one, s, tile.head).from(tile.first), rows);
        load_rows<HELD>(q_b, queries_of<ELEMENT>(params.two, s, tile.head).from(tile.first), rows);
        barrier_wait(block.queries_full[0], 0);
    }

    __device__ void start(stage_logits &x, stage_logits &y, int n)
    {
        const int at = n % DEPTH;
        barrier_wait(block.full[at], n / DEPTH % 2);
        wgmma_fence();
        const uint32_t queries = group * (64 * 128 / 16);
        start_products<ELEMENT, DIM, HELD>(x, q_a, row_operand(&block.lying_a) + queries,
                                           row_operand(&block.stages[at].one));
        start_products<ELEMENT, DIM, HELD>(y, q_b, row_operand(&block.lying_b) + queries,
                                           row_operand(&block.stages[at].two));
        wgmma_commit();
    }

    __device__ void finish(stage_logits &x, stage_logits &y, int n)
    {
        wgmma_wait<0>();
        settle(x);
        settle(y);
        barrier_arrive_if(block.empty[n % DEPTH], threadIdx.x % 32 == 0);
    }

    __device__ void edge(const stage_logits &x, float scale_a, const stage_logits &y, float scale_b, int n)
    {
        add_edge(state, x, scale_a, y, scale_b, block.keys.band, keys.place_of(n) * KEYS);
    }

    /* The scales come from shared memory, so that no exponential is taken before the wait for the next stage's keys:
     * its products have to start first. */
    __device__ void whole(const stage_logits &x, const stage_logits &y)
    {
        const float scale_a = load_shared(block.scale_a), scale_b = load_shared(block.scale_b);
        add_whole(state, x, scale_a, y, scale_b);
    }

    __device__ void run_capped()
    {
        for (int n = 0; n < keys.stages; n++) {
            stage_logits x, y, capped_x, capped_y;
            start(x, y, n);
            finish(x, y, n);
            cap_stage(capped_x, x, params.one);
            cap_stage(capped_y, y, params.two);
            if (n < keys.edges)
                edge(capped_x, 1.0F, capped_y, 1.0F, n);
            else
                add_whole(state, capped_x, 1.0F, capped_y, 1.0F);
        }
    }

    __device__ void run()
    {
        stage_logits x[2], y[2];
        for (int n = 0; n < keys.edges; n++) {
            start(x[0], y[0], n);
            finish(x[0], y[0], n);
            edge(x[0], params.one.scale, y[0], params.two.scale, n);
        }
        const int end = keys.stages;
        if (keys.edges == end)
            return;
        /* Products are started unconditionally and with no branch before the sums: ptxas would wait for them at once,
         * or not mix them with the exponentials. So the last ones are started twice, and not used. */
        start(x[0], y[0], keys.edges);
        for (int n = keys.edges; n < end; n += 2) {
            finish(x[0], y[0], n);
            start(x[1], y[1], n + 1);
            whole(x[0], y[0]);
            finish(x[1], y[1], n + 1);
            start(x[0], y[0], min(n + 2, end - 1));
            whole(x[1], y[1]);
        }
        wgmma_wait<0>();
    }
};

template <typename ELEMENT, int DIM, bool CAPPED>
__global__ void __launch_bounds__(wide_forward<ELEMENT, DIM, CAPPED>::THREADS, 1)
    wide_forward_kernel(const __grid_constant__ skl_cuda_params params, const __grid_constant__ forward_maps maps)
{
#ifdef __CUDA_ARCH_FEAT_SM90_ALL
    typedef wide_forward<ELEMENT, DIM, CAPPED> forward;
    extern __shared__ __align__(1024) unsigned char raw[];
    typename forward::memory &block = *(typename forward::memory *)(void *)raw;
    typename forward::place tile;
    if (!tile.find(params, params.splits))
        return;
    if (threadIdx.x == 0) {
        block.keys = keys_of_tile(params, tile);
        block.from = copy_place::of(params, tile);
        block.tile = tile;
        block.scale_a = params.one.scale;
        block.scale_b = params.two.scale;
        init_barriers<forward>(block);
    }
    __syncthreads();
    const int group = own_group();
    if (group == forward::GROUPS) {
        give_registers<24>();
        if (own_warp() == forward::GROUPS * 4)
            forward::produce(maps, block);
    } else {
        take_registers<240>();
        forward own = {params, block, group, common(block.keys)};
        own.load_queries(block.tile);
        own.state[0] = own.state[1] = skl_state_empty();
        if (CAPPED)
            own.run_capped();
        else
            own.run();
        write_row_of_two(params, block.tile, merge_two_rows(own.state[0], own.state[1]));
    }
#endif
}

} // namespace sm90

#endif
