/* Forward on Hopper's tensor cores (sm_90a): 16-bit types, one teacher head a student head.
 *
 *   block   2 consumer warpgroups of 64 queries, 1 producer warp; one block a multiprocessor
 *   regs    240 a consumer thread: Q of both arguments (DIM / 2; 64 where DIM is more than 128), logits of two stages
 *           of 64 keys (128), row states
 *   shared  DEPTH stages of 64 keys of both arguments, [64 dimensions][64 keys] with the copy engine's 128-byte
 *           swizzle; dimensions of Q behind the first 128
 *
 *   producer   copies stage after stage (TMA) as consumers leave them
 *   consumer   products of stage n + 1 (wgmma)  ||  exponentials and sums of stage n
 *
 * Row states, the blind and the exact way of adding, and keys cut into parts are those of the sm80 forward.
 *
 * Softcap has instances of its own (CAPPED). Logits behind the cap need registers beside the accumulators, so they
 * have those of the second stage: products are hidden behind the other warpgroup's arithmetic only. */
#ifndef SKL_CUDA_SM90_FORWARD_CUH
#define SKL_CUDA_SM90_FORWARD_CUH

#include "cuda/sm90/tensor_map.cuh"
#include "cuda/sm90/tile.cuh"

namespace sm90
{

constexpr int BLOCK_THREADS = 128 * (CONSUMERS + 1);

template <int DIM> constexpr int DEPTH = DIM == 64 ? 8 : DIM == 128 ? 6 : DIM == 192 ? 4 : 2; /* stages */

template <int DIM> constexpr int FORWARD_HELD = DIM < 128 ? DIM : 128; /* dimensions of the queries in registers */

template <int DIM> struct forward_block {
    struct {
        row_stage<DIM> one, two;
    } stages[DEPTH<DIM>];
    lying_rows<(DIM - FORWARD_HELD<DIM>) / 64> lying_1, lying_2;
    uint64_t queries_full, full[DEPTH<DIM>], empty[DEPTH<DIM>];
    row_stream keys; /* here, and not in the registers of every thread */
    float scale_1, scale_2;
};

/* Keys and queries of both arguments. */
struct forward_maps {
    CUtensorMap keys_1, keys_2, queries_1, queries_2;
};

/* ---- Producer ----------------------------------------------------------------------------------------------- */

template <int DIM>
__device__ inline void produce(const skl_cuda_params &params, const forward_maps &maps, forward_block<DIM> &block,
                               const tile_place &place)
{
    const int batch = (int)place.sequence.batch;
    const int head_1 = (int)place.head / params.one.heads_per_key,
              head_2 = (int)place.head / params.two.heads_per_key;
    if constexpr (FORWARD_HELD<DIM> < DIM) {
        const int first = (int)(place.sequence.query_begin + place.first), head = (int)place.head;
        barrier_expect(block.queries_full, block.lying_1.SIZE + block.lying_2.SIZE);
        for (int c = FORWARD_HELD<DIM>; c < DIM; c += 64) {
            const int part = (c - FORWARD_HELD<DIM>) / 64;
            copy_box(block.lying_1.parts[part], maps.queries_1, c, first, head, batch, block.queries_full);
            copy_box(block.lying_2.parts[part], maps.queries_2, c, first, head, batch, block.queries_full);
        }
    }
    for (int n = 0; n < block.keys.stages; n++) {
        const int at = n % DEPTH<DIM>;
        const int row = block.keys.row + block.keys.place_of(n) * KEYS;
        barrier_wait(block.empty[at], n / DEPTH<DIM> % 2 ^ 1);
        barrier_expect(block.full[at], (int)sizeof block.stages[at]);
#pragma unroll
        for (int half = 0; half < DIM / 64; half++) {
            copy_box(block.stages[at].one.halves[half], maps.keys_1, half * 64, row, head_1, batch, block.full[at]);
            copy_box(block.stages[at].two.halves[half], maps.keys_2, half * 64, row, head_2, batch, block.full[at]);
        }
    }
}

/* ---- Consumers ---------------------------------------------------------------------------------------------- */

/* Adds a stage that every row of the warp sees whole; false, and nothing added, if a stabiliser has to move. */
__device__ inline bool add_blindly(skl_row_state (&state)[2], const stage_logits &x, float scale_1,
                                   const stage_logits &y, float scale_2)
{
    row_sums sums[2];
    bool fine = true;
#pragma unroll
    for (int half = 0; half < 2; half++) {
        row_sums even = {}, odd = {};
#pragma unroll
        for (int n = 0; n < 8; n++)
#pragma unroll
            for (int parity = 0; parity < 2; parity++)
                add_pair(parity ? odd : even, fmaf(x[n][half * 2 + parity], scale_1, -state[half].m_1),
                         fmaf(y[n][half * 2 + parity], scale_2, -state[half].m_2));
        sums[half] = {even.l_1 + odd.l_1, even.l_2 + odd.l_2, even.w + odd.w};
        fine = fine && sums[half].l_1 < SKL_LAZY_BOUND && sums[half].l_2 < SKL_LAZY_BOUND;
    }
    if (__any_sync(~0U, !fine))
        return false;
#pragma unroll
    for (int half = 0; half < 2; half++)
        add_sums(state[half], sums[half]);
    return true;
}

/* Logits of an argument in base 2, behind its cap if it has one. */
__device__ inline void cap_stage(stage_logits &to, const stage_logits &x, const skl_cuda_argument &argument)
{
#pragma unroll
    for (int e = 0; e < 32; e++) {
        const float scaled = x[e / 4][e % 4] * argument.scale;
        to[e / 4][e % 4] = argument.capped ? argument.softcap_2 * tanhf(scaled) : scaled;
    }
}

/* Logits of two stages: while one is added, the products of the other are under way. */
template <typename ELEMENT, int DIM> struct consumer {
    const skl_cuda_params &params;
    forward_block<DIM> &block;
    uint32_t group; /* of the warp, the same for all lanes */
    uint32_t q_1[FORWARD_HELD<DIM> / 16][4], q_2[FORWARD_HELD<DIM> / 16][4];
    skl_row_state state[2];

    __device__ void start(stage_logits &x, stage_logits &y, int n)
    {
        const int at = n % DEPTH<DIM>;
        barrier_wait(block.full[at], n / DEPTH<DIM> % 2);
        wgmma_fence();
        const uint32_t keys = row_operand(&block.stages[at]);
        const uint32_t queries = group * (64 * 128 / 16);
        start_products<ELEMENT, DIM, FORWARD_HELD<DIM>>(x, q_1, row_operand(&block.lying_1) + queries, keys);
        start_products<ELEMENT, DIM, FORWARD_HELD<DIM>>(y, q_2, row_operand(&block.lying_2) + queries,
                                                        keys + sizeof(row_stage<DIM>) / 16);
        wgmma_commit();
    }

    __device__ void finish(stage_logits &x, stage_logits &y, int n)
    {
        wgmma_wait<0>();
        settle(x);
        settle(y);
        if (threadIdx.x % 32 == 0)
            barrier_arrive(block.empty[n % DEPTH<DIM>]);
    }

    __device__ void add_edge(const stage_logits &x, float scale_1, const stage_logits &y, float scale_2, int n)
    {
        const int first = block.keys.place_of(n) * KEYS;
#pragma unroll
        for (int half = 0; half < 2; half++) {
            const range32 sees = block.keys.band.of(own_row<1>(0, half));
            add_exactly<true>(state[half], x, scale_1, y, scale_2, half, {sees.begin - first, sees.end - first});
        }
    }

    __device__ void add_whole(const stage_logits &x, float scale_1, const stage_logits &y, float scale_2)
    {
        if (add_blindly(state, x, scale_1, y, scale_2))
            return;
#pragma unroll
        for (int half = 0; half < 2; half++)
            add_exactly<false>(state[half], x, scale_1, y, scale_2, half, {});
    }

    /* The scales come from shared memory, so that no exponential is taken before the wait for the next stage's keys:
     * its products have to start first. */
    __device__ void add_whole(const stage_logits &x, const stage_logits &y)
    {
        const float scale_1 = load_shared(block.scale_1), scale_2 = load_shared(block.scale_2);
        add_whole(x, scale_1, y, scale_2);
    }

    __device__ void run_capped()
    {
        for (int n = 0; n < block.keys.stages; n++) {
            stage_logits x, y, capped_x, capped_y;
            start(x, y, n);
            finish(x, y, n);
            cap_stage(capped_x, x, params.one);
            cap_stage(capped_y, y, params.two);
            if (n < block.keys.edges)
                add_edge(capped_x, 1.0F, capped_y, 1.0F, n);
            else
                add_whole(capped_x, 1.0F, capped_y, 1.0F);
        }
    }

    __device__ void run()
    {
        stage_logits x[2], y[2];
        for (int n = 0; n < block.keys.edges; n++) {
            start(x[0], y[0], n);
            finish(x[0], y[0], n);
            add_edge(x[0], params.one.scale, y[0], params.two.scale, n);
        }
        const int end = block.keys.stages;
        if (block.keys.edges == end)
            return;
        /* Products are started unconditionally and with no branch before the sums: ptxas would wait for them at once,
         * or not mix them with the exponentials. So the last ones are started twice, and not used. */
        start(x[0], y[0], block.keys.edges);
        for (int n = block.keys.edges; n < end; n += 2) {
            finish(x[0], y[0], n);
            start(x[1], y[1], n + 1);
            add_whole(x[0], y[0]);
            finish(x[1], y[1], n + 1);
            start(x[0], y[0], min(n + 2, end - 1));
            add_whole(x[1], y[1]);
        }
        wgmma_wait<0>();
    }
};

template <typename ELEMENT, int DIM, bool CAPPED>
__device__ inline void consume(skl_row_state (&state)[2], const skl_cuda_params &params, forward_block<DIM> &block)
{
    tile_place place;
    (void)place.find(params, params.splits);
    const skl_sequence &s = place.sequence;
    const int rows = (int)skl_min(tile_place::ROWS, s.query_count - place.first);
    consumer<ELEMENT, DIM> own = {params, block, __shfl_sync(~0U, threadIdx.x / 128, 0)};
    load_rows<FORWARD_HELD<DIM>>(own.q_1, queries_of<ELEMENT>(params.one, s, place.head).from(place.first), rows);
    load_rows<FORWARD_HELD<DIM>>(own.q_2, queries_of<ELEMENT>(params.two, s, place.head).from(place.first), rows);
    own.state[0] = own.state[1] = skl_state_empty();
    if (FORWARD_HELD<DIM> < DIM)
        barrier_wait(block.queries_full, 0);
    if (CAPPED)
        own.run_capped();
    else
        own.run();
    state[0] = merge_lanes(own.state[0]);
    state[1] = merge_lanes(own.state[1]);
}

template <typename ELEMENT, int DIM, bool CAPPED>
__global__ void __launch_bounds__(BLOCK_THREADS, 1)
    forward_kernel(const __grid_constant__ skl_cuda_params params, const __grid_constant__ forward_maps maps)
{
#ifdef __CUDA_ARCH_FEAT_SM90_ALL
    extern __shared__ __align__(1024) unsigned char raw[];
    forward_block<DIM> &block = *(forward_block<DIM> *)(void *)raw;
    tile_place here; /* found again where it is used: it holds no registers meanwhile */
    if (!here.find(params, params.splits))
        return;
    if (threadIdx.x == 0) {
        block.keys = keys_of_tile(params, here);
        block.scale_1 = params.one.scale;
        block.scale_2 = params.two.scale;
        barrier_init(block.queries_full, 1);
        for (int at = 0; at < DEPTH<DIM>; at++) {
            barrier_init(block.full[at], 1);
            barrier_init(block.empty[at], CONSUMERS * 4);
        }
        barrier_init_fence();
    }
    __syncthreads();
    if (threadIdx.x / 128 == CONSUMERS) {
        give_registers<24>();
        tile_place place;
        if (threadIdx.x % 128 == 0 && place.find(params, params.splits))
            produce<DIM>(params, maps, block, place);
    } else {
        take_registers<240>();
        skl_row_state state[2];
        consume<ELEMENT, DIM, CAPPED>(state, params, block);
        tile_place place;
        (void)place.find(params, params.splits);
#pragma unroll
        for (int half = 0; half < 2; half++) {
            const int row = own_row<1>(0, half);
            if (threadIdx.x % 4 == 0 && place.first + row < place.sequence.query_count)
                write_part(params, place, row, state[half]);
        }
    }
#endif
}

template <typename ELEMENT, int DIM, bool CAPPED>
cudaError_t launch_query_tiles(const skl_cuda_params *params, const forward_maps *maps)
{
    constexpr int MEMORY = sizeof(forward_block<DIM>);
    const cudaError_t error = cudaFuncSetAttribute(forward_kernel<ELEMENT, DIM, CAPPED>,
                                                   cudaFuncAttributeMaxDynamicSharedMemorySize, MEMORY);
    if (error != cudaSuccess)
        return error;
    const skl_problem *const p = &params->problem;
    const int64_t tiles = skl_ceil_div(p->len_q, tile_place::ROWS);
    skl_cuda_params own = *params;
    own.splits = splits_for(p->batch * p->heads_s * tiles, params->multiprocessors, p->len_k);
    forward_kernel<ELEMENT, DIM, CAPPED>
        <<<grid_of(p->batch, p->heads_s, tiles * own.splits), BLOCK_THREADS, MEMORY, params->call.stream>>>(own,
                                                                                                            *maps);
    if (own.splits > 1)
        merge_parts<2><<<grid_of(p->batch, p->heads_s, tiles), tile_place::ROWS, 0, params->call.stream>>>(own);
    return cudaPeekAtLastError();
}

template <typename ELEMENT, int DIM>
cudaError_t launch_forward(const skl_cuda_params *params, skl_cuda_launcher otherwise)
{
    const skl_problem *const p = &params->problem;
    forward_maps maps;
    if (!encode_keys(&maps.keys_1, p, &params->one, KEYS, ELEMENT()) ||
        !encode_keys(&maps.keys_2, p, &params->two, KEYS, ELEMENT()) ||
        !encode_queries(&maps.queries_1, p, &params->one, tile_place::ROWS, ELEMENT()) ||
        !encode_queries(&maps.queries_2, p, &params->two, tile_place::ROWS, ELEMENT()))
        return otherwise(params);
    return params->one.capped || params->two.capped ? launch_query_tiles<ELEMENT, DIM, true>(params, &maps)
                                                    : launch_query_tiles<ELEMENT, DIM, false>(params, &maps);
}

} // namespace sm90

#endif
