/* Forward of heads of up to 128 dimensions: four warpgroups, one stage of logits each.
 *
 *   block   4 warpgroups of 64 queries; one block a multiprocessor
 *   regs    128 a thread: logits of a stage of 64 keys (64), 64 dimensions of the first argument's Q (16), row states
 *   shared  DEPTH stages of 64 keys of both arguments; the other dimensions of Q, 256 queries
 *
 *   warpgroup   products of stage n (wgmma), then its exponentials and sums, with nothing of its own beside them:
 *               what runs beside them are the other three warpgroups, each somewhere else in its stage
 *   last one    its first warp also copies (TMA): at stage n it refills the place of stage n - 1
 *
 * Heads of this size take about as long for exponentials as for products, and more instructions than both: four warps
 * a scheduler keep it busier than two whose products and exponentials overlap. A fifth warpgroup for copies would
 * leave each thread 112 registers. */
#ifndef SKL_CUDA_SM90_FORWARD_NARROW_CUH
#define SKL_CUDA_SM90_FORWARD_NARROW_CUH

#include "cuda/sm90/forward_stage.cuh"

namespace sm90
{

template <typename ELEMENT, int DIM, bool CAPPED> struct narrow_forward {
    static constexpr int GROUPS = 4;
    static constexpr int THREADS = 128 * GROUPS;
    typedef query_place<GROUPS> place;
    static constexpr int HELD = CAPPED ? 0 : 64; /* dimensions of the first argument's queries in registers */
    static constexpr int COPY_WARP = (GROUPS - 1) * 4;
    static constexpr int DEPTH = DIM == 64 ? 8 : HELD > 0 ? 4 : 3; /* stages */

    struct memory {
        key_stage<DIM> stages[DEPTH];
        lying_rows<DIM / 64, place::ROWS> lying_2;
        lying_rows<(DIM - HELD) / 64, place::ROWS> lying_1;
        uint64_t queries_full, full[DEPTH], empty[DEPTH];
        row_stream keys; /* these two from one thread for all of them; the band is only here */
        place tile;
    };
    static_assert(sizeof(memory) <= 227 * 1024, "a block's shared memory");

    const skl_cuda_params &params;
    const forward_maps &maps;
    memory &block;
    /* The same for all lanes of a warp. */
    int group, warp; /* of the block */
    copy_place from; /* of the warp that copies */
    stage_order keys;
    int at, parity; /* the next stage's place, and the parity of the phase that fills it */
    /* Of the thread. */
    uint32_t held[HELD / 16 + (HELD == 0)][4];
    skl_row_state state[2];

    __device__ void copy_stage(int n, int to) const
    {
        copy_keys(block.stages[to], maps, from, keys.row_of(n), block.full[to]);
    }

    /* Barriers are there for others when all warps have met. */
    __device__ void begin_copies(const place &tile)
    {
        if (threadIdx.x % 32 == 0)
            init_barriers<narrow_forward>(block);
        __syncwarp();
        from = common(copy_place::of(params, tile));
        barrier_expect(block.queries_full, block.lying_1.SIZE + block.lying_2.SIZE);
        copy_queries<HELD>(block.lying_1, maps.queries_1, from, block.queries_full);
        copy_queries<0>(block.lying_2, maps.queries_2, from, block.queries_full);
    }

    __device__ void copy_first_stages() const
    {
        for (int n = 0; n < min(DEPTH, keys.stages); n++)
            copy_stage(n, n);
    }

    __device__ void hold_queries(const place &tile)
    {
        if constexpr (HELD > 0) {
            const int rows = (int)skl_min(tile.ROWS, tile.sequence.query_count - tile.first);
            load_rows<HELD>(held, queries_of<ELEMENT>(params.one, tile.sequence, tile.head).from(tile.first), rows);
        }
    }

    /* Goes on behind stage n. The one before it has been left by this warpgroup; the last of them to leave it is
     * seldom far behind. */
    __device__ void leave(int n)
    {
        if (warp == COPY_WARP && n > 0 && n - 1 + DEPTH < keys.stages) {
            const int last = at == 0 ? DEPTH - 1 : at - 1;
            barrier_wait(block.empty[last], at == 0 ? parity ^ 1 : parity);
            copy_stage(n - 1 + DEPTH, last);
        }
        if (++at == DEPTH) {
            at = 0;
            parity ^= 1;
        }
    }

    /* Logits of the next stage. The two arguments' products come in turns: neither waits for its own last one. */
    __device__ void multiply(stage_logits &x, stage_logits &y)
    {
        const uint32_t own = group * (64 * 128 / 16);
        const uint32_t q_1 = row_operand(&block.lying_1) + own, q_2 = row_operand(&block.lying_2) + own;
        const uint32_t k_1 = row_operand(&block.stages[at].one), k_2 = row_operand(&block.stages[at].two);
        barrier_wait(block.full[at], parity);
        wgmma_fence();
#pragma unroll
        for (int step = 0; step < DIM / 16; step++) {
            if (step < HELD / 16)
                wgmma<false>(x, held[step], step_of(k_1, step, STAGE), step > 0, ELEMENT());
            else
                wgmma<false>(x, step_of(q_1, step - HELD / 16, place::ROWS), step_of(k_1, step, STAGE), step > 0,
                             ELEMENT());
            wgmma<false>(y, step_of(q_2, step, place::ROWS), step_of(k_2, step, STAGE), step > 0, ELEMENT());
        }
        wgmma_commit();
        wgmma_wait<0>();
        settle(x);
        settle(y);
        barrier_arrive_if(block.empty[at], threadIdx.x % 32 == 0);
        if (CAPPED) {
            cap_stage(x, x, params.one);
            cap_stage(y, y, params.two);
        }
    }

    __device__ void run()
    {
        const float scale_1 = CAPPED ? 1.0F : params.one.scale, scale_2 = CAPPED ? 1.0F : params.two.scale;
        const int begun = max(keys.edges, min(1, keys.stages)); /* a whole first stage gives stabilisers */
        int n = 0;
#pragma unroll 1
        for (; n < begun; n++) {
            stage_logits x, y;
            multiply(x, y);
            const int first = keys.place_of(n) * KEYS;
            const reach sees = reach_of(block.keys.band, group * 64, 64); /* an edge of the block, not of all */
            if (covers(sees.all, first, KEYS)) {
                begin_rows(state, x, scale_1, y, scale_2);
                add_whole(state, x, scale_1, y, scale_2);
            } else if (meets(sees.any, first, KEYS)) {
                add_edge(state, x, scale_1, y, scale_2, block.keys.band, first);
            }
            leave(n);
        }
#pragma unroll 1
        for (; n < keys.stages; n++) {
            stage_logits x, y;
            multiply(x, y);
            add_whole(state, x, scale_1, y, scale_2);
            leave(n);
        }
    }
};

template <typename ELEMENT, int DIM, bool CAPPED>
__global__ void __launch_bounds__(narrow_forward<ELEMENT, DIM, CAPPED>::THREADS, 1)
    narrow_forward_kernel(const __grid_constant__ skl_cuda_params params, const __grid_constant__ forward_maps maps)
{
#ifdef __CUDA_ARCH_FEAT_SM90_ALL
    typedef narrow_forward<ELEMENT, DIM, CAPPED> forward;
    extern __shared__ __align__(1024) unsigned char raw[];
    typename forward::memory &block = *(typename forward::memory *)(void *)raw;
    typename forward::place tile;
    if (!tile.find(params, params.splits))
        return;
    const int warp = own_warp();
    forward own = {params, maps, block, warp / 4, warp};
    if (warp == forward::COPY_WARP)
        own.begin_copies(tile);
    if (threadIdx.x == 0) {
        block.keys = keys_of_tile(params, tile);
        block.tile = tile;
    }
    own.hold_queries(tile);
    own.state[0] = own.state[1] = skl_state_empty();
    __syncthreads();
    own.keys = common(block.keys);
    if (warp == forward::COPY_WARP)
        own.copy_first_stages();
    barrier_wait(block.queries_full, 0);
    own.run();
    write_rows(params, block.tile, own.state);
#endif
}

} // namespace sm90

#endif
