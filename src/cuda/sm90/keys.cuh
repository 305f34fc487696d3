/* Key gradients with the same bits on every run, on Hopper's tensor cores (sm_90a): 16-bit types, one teacher head a
 * student head. backward.cuh mirrored: a block owns keys and streams the queries that see them, so that dk stays in
 * registers, is stored once, and needs no workspace. "Own" is the argument of the KL that gets its gradient, "other"
 * the remaining one.
 *
 *   block    2 key warpgroups of 64 keys and 1 staging warpgroup; one block a multiprocessor
 *   regs     232 a key thread: other K (DIM / 4), own K (DIM / 4, less 8 at DIM = 128), logits of a stage (64),
 *            dk (DIM / 2), G (16), 24 for the rest; 40 a staging thread
 *   shared   DEPTH stages of 64 queries of both arguments, and what is known of them; half of own K at DIM = 128:
 *            214 KB there, 137 KB at DIM = 64
 *
 *                stage n       stage n + 1
 *              +-------------+-------------+--
 *     64 keys  |  X^T, Y^T   |             |      X^T, Y^T = K Q^T (wgmma)  ->  G^T  ->  dk += G^T Q (wgmma)
 *     64 keys  |             |             |
 *              +-------------+-------------+--
 *
 *   staging  copies stage n + DEPTH (TMA), loads the facts of its queries, cleans it if it is an edge
 *   key      logits of stage n, behind dk of stage n - 1  ->  exponentials  ->  dk of stage n is started
 *
 * G^T comes out of the exponentials in the registers in which the product for dk wants it, and both products read the
 * same bytes of Q. While one warpgroup takes exponentials, the other one's products run. Under GQA the stages of all
 * query heads that share the key head follow one another, in the order of the heads.
 *
 * A query's facts belong to columns here: every thread needs those of 16 queries a stage, and reads them from shared
 * memory just in time. Registers are backward.cuh's wall: all 128 dimensions of both K would be 232, and it has to be
 * less. CAPPED: as there. */
#ifndef SKL_CUDA_SM90_KEYS_CUH
#define SKL_CUDA_SM90_KEYS_CUH

#include "cuda/sm90/gradient.cuh"
#include "cuda/sm90/tensor_map.cuh"

namespace sm90
{

constexpr int KEY_THREADS = 128 * (CONSUMERS + 1);
typedef own_place<2, true> key_place; /* 128 keys */

/* Own keys: dimensions that threads hold in registers. There is no room for the last ones. */
template <int DIM> constexpr int OWN_HELD = DIM == 64 ? 64 : 96;

template <int DIM> struct keys_block {
    static constexpr int DEPTH = DIM == 64 ? 8 : 6;
    struct {
        row_stage<DIM> own, other;
    } stages[DEPTH];
    lying_rows<DIM / 64 - OWN_HELD<DIM> / 64> own_keys;
    stage_facts facts[DEPTH];
    /* Of a stage: its rows are there; its facts are, too, and an edge is clean; all warps have left it. */
    uint64_t copied[DEPTH], known[DEPTH], empty[DEPTH], keys_copied;
    key_place place; /* here, and not in the registers of every thread */
    int count;       /* keys that there are */
    int heads;       /* query heads that share the key head */
    row_stream queries;
};

struct key_maps {
    CUtensorMap own_queries, other_queries, own_keys;
};

/* ---- Staging ------------------------------------------------------------------------------------------------ */

/* Each of the four warps brings every fourth stage: while one waits for facts, the next one's are on their way. */
template <typename ELEMENT, int DIM, bool SECOND>
__device__ inline void stage_queries(const skl_cuda_params &params, const key_maps &maps, keys_block<DIM> &block)
{
    const stage_order queries = common(block.queries);
    const int batch = common((int)block.place.sequence.batch), warp = own_warp_of_group();
    const int heads = common(block.heads), first_head = common((int)block.place.head) * heads;
    if constexpr (OWN_HELD<DIM> < DIM)
        if (warp == 0) {
            barrier_expect(block.keys_copied, block.own_keys.SIZE);
            copy_box(block.own_keys.parts, maps.own_keys, DIM - 64,
                     (int)(block.place.sequence.key_begin + block.place.first), (int)block.place.head, batch,
                     block.keys_copied);
        }
    for (int n = warp; n < queries.stages * heads; n += 4) {
        const int at = n % block.DEPTH, turn = n / block.DEPTH % 2;
        const int head = first_head + n / queries.stages;
        const int first = queries.place_of(n % queries.stages) * STAGE;
        barrier_wait(block.empty[at], turn ^ 1);
        barrier_expect(block.copied[at], (int)sizeof block.stages[at]);
#pragma unroll
        for (int half = 0; half < DIM / 64; half++) {
            copy_box(block.stages[at].other.halves[half], maps.other_queries, half * 64, queries.row + first, head,
                     batch, block.copied[at]);
            copy_box(block.stages[at].own.halves[half], maps.own_queries, half * 64, queries.row + first, head, batch,
                     block.copied[at]);
        }
        stage_facts &facts = block.facts[at];
        store_stage_facts(facts,
                          load_stage_facts(params, block.place.sequence, block.queries, block.count, head, first));
        if (n % queries.stages < queries.edges) {
            __syncwarp(); /* an LSE that becomes NaN has been written */
            barrier_wait(block.copied[at], turn);
            clean_rows<ELEMENT>(block.stages[at].own, SECOND ? facts.lse_b : facts.lse_a);
            async_fence();
        }
        barrier_arrive(block.known[at]); /* every lane: it wrote what others read */
    }
}

/* ---- Keys --------------------------------------------------------------------------------------------------- */

template <typename ELEMENT, int DIM, bool SECOND, bool CAPPED> struct key_group {
    const skl_cuda_params &params;
    keys_block<DIM> &block;
    int group; /* of the warp, the same for all lanes */
    uint32_t own_k[OWN_HELD<DIM> / 16][4], other_k[DIM / 16][4];
    float dk[DIM / 8][4];
    gradient_unit<ELEMENT> unit;

    /* The block's keys of one argument, as a query head sees them. */
    __device__ row_source<ELEMENT> keys(const skl_cuda_argument &argument, int64_t head) const
    {
        return keys_of<ELEMENT>(argument, block.place.sequence, head).from(block.place.first);
    }

    __device__ void scale(float factor)
    {
#pragma unroll
        for (int e = 0; e < DIM / 2; e++)
            dk[e / 4][e % 4] *= factor;
    }

    /* A bound of the stage's gradients: |S - P| <= 1; those of a first argument have none, and are looked at. */
    template <bool EDGE> __device__ float bound_of(const logits_of_stage &logits, const stage_facts &facts) const
    {
        if (SECOND)
            return load_shared(facts.largest);
        return largest_pair<EDGE, SECOND, CAPPED>(params, logits, block.queries.band, block.count,
                                                  streamed_queries<SECOND>{facts});
    }

    /* The 64 x 64 pairs of stage n, which is stage `s` of its query head. */
    template <bool EDGE> __device__ void add_stage(int n, int s)
    {
        const int at = n % block.DEPTH, turn = n / block.DEPTH % 2;
        barrier_wait(block.copied[at], turn);
        barrier_wait(block.known[at], turn);
        logits_of_stage logits = {EDGE ? block.queries.place_of(s) * STAGE : 0};
        wgmma_fence();
        start_products<ELEMENT, DIM, DIM>(logits.other, other_k, 0, row_operand(&block.stages[at].other));
        start_products<ELEMENT, DIM, OWN_HELD<DIM>>(logits.own, own_k,
                                                    row_operand(&block.own_keys) + group * (64 * 128 / 16),
                                                    row_operand(&block.stages[at].own));
        wgmma_commit();
        wgmma_wait<0>();
        settle(logits.own);
        settle(logits.other);
        if (n > 0) /* every lane: it read facts; the product for dk has ended, too */
            barrier_arrive(block.empty[(n - 1) % block.DEPTH]);
        const stage_facts &facts = block.facts[at];
        if (unit.MOVES) {
            settle(dk);
            unit.fit(*this, bound_of<EDGE>(logits, facts));
        }
        uint32_t g[4][4];
        const float inverse = unit.inverse(); /* times upstream gradients it might overflow */
        weigh_pairs<EDGE, SECOND, CAPPED>(params, logits, block.queries.band, streamed_queries<SECOND>{facts},
                                          [&](int i, int half, float low, float high) {
                                              g[i / 2][i % 2 * 2 + half] =
                                                  pack(low * inverse, high * inverse, ELEMENT());
                                          });
        wgmma_fence();
        const uint32_t q = column_operand(&block.stages[at].own, STAGE * 128);
#pragma unroll
        for (int step = 0; step < STAGE / 16; step++)
            wgmma<true>(dk, g[step], descriptor_of(q + step * 16 * 128 / 16), 1, ELEMENT());
        wgmma_commit();
    }

    __device__ void run()
    {
#pragma unroll
        for (int e = 0; e < DIM / 2; e++)
            dk[e / 4][e % 4] = 0.0F;
        const stage_order queries = common(block.queries);
        const int heads = common(block.heads);
        const int64_t head = block.place.head * heads;
        load_rows<OWN_HELD<DIM>>(own_k, keys(own_of<SECOND>(params), head), block.count);
        if (OWN_HELD<DIM> < DIM)
            barrier_wait(block.keys_copied, 0);
        for (int h = 0, n = 0; h < heads; h++) {
            load_rows<DIM>(other_k, keys(other_of<SECOND>(params), head + h), block.count);
            for (int s = 0; s < queries.edges; s++, n++)
                add_stage<true>(n, s);
            wgmma_wait<0>(); /* so that both loops have G in the same registers */
            for (int s = queries.edges; s < queries.stages; s++, n++)
                add_stage<false>(n, s);
            wgmma_wait<0>();
        }
        settle(dk);
    }

    /* Padding keys have a gradient of 0, whatever was multiplied for them. */
    __device__ void store()
    {
        const key_place &place = block.place;
        const skl_side side = skl_cuda_side(&params);
        const skl_output &out = *side.dk;
        const int64_t base = SKL_ROW(out, place.sequence.batch, place.head, place.sequence.key_begin);
#pragma unroll
        for (int half = 0; half < 2; half++) {
            const int64_t row = place.first + own_row<1>(0, half);
#pragma unroll
            for (int e = 0; e < DIM / 4 && row >= place.rows; e++)
                dk[e / 2][half * 2 + e % 2] = 0.0F;
            if (row < place.stored)
                store_row<ELEMENT>(out.data, base + row * out.stride_row, side, dk, half, unit.value() * side.scale);
        }
    }
};

/* ---- Kernel ------------------------------------------------------------------------------------------------- */

template <typename ELEMENT, int DIM, bool SECOND, bool CAPPED>
__global__ void __launch_bounds__(KEY_THREADS, 1)
    keys_kernel(const __grid_constant__ skl_cuda_params params, const __grid_constant__ key_maps maps)
{
#ifdef __CUDA_ARCH_FEAT_SM90_ALL
    extern __shared__ __align__(1024) unsigned char raw[];
    keys_block<DIM> &block = *(keys_block<DIM> *)(void *)raw;
    key_place here;
    if (!here.find(params))
        return;
    if (threadIdx.x == 0) {
        const skl_sequence &s = here.sequence;
        const int64_t last = skl_min(here.first + CONSUMERS * 64, here.rows) - 1;
        block.place = here;
        block.count = (int)(last + 1 - here.first);
        block.heads = own_of<SECOND>(params).heads_per_key;
        block.queries = {};
        if (block.count > 0)
            block.queries =
                in_stages(stream_for(skl_query_band(&params.problem, &s), here.first, last), s.query_begin);
        barrier_init(block.keys_copied, 1);
        for (int at = 0; at < block.DEPTH; at++) {
            barrier_init(block.copied[at], 1);
            barrier_init(block.known[at], 32);
            barrier_init(block.empty[at], CONSUMERS * 128);
        }
        barrier_init_fence();
    }
    __syncthreads();
    const int group = own_group();
    if (group == CONSUMERS) {
        give_registers<40>();
        stage_queries<ELEMENT, DIM, SECOND>(params, maps, block);
    } else {
        take_registers<232>();
        key_group<ELEMENT, DIM, SECOND, CAPPED> own = {params, block, group};
        own.run();
        own.store();
    }
#endif
}

template <typename ELEMENT, int DIM, bool SECOND, bool CAPPED>
cudaError_t launch_key_tiles(const skl_cuda_params *params, const key_maps *maps)
{
    constexpr int MEMORY = sizeof(keys_block<DIM>);
    const cudaError_t error = cudaFuncSetAttribute(keys_kernel<ELEMENT, DIM, SECOND, CAPPED>,
                                                   cudaFuncAttributeMaxDynamicSharedMemorySize, MEMORY);
    if (error != cudaSuccess)
        return error;
    const skl_problem *const p = &params->problem;
    const dim3 blocks = grid_of(p->batch, key_place::heads(*params), skl_ceil_div(p->len_k, CONSUMERS * 64));
    keys_kernel<ELEMENT, DIM, SECOND, CAPPED><<<blocks, KEY_THREADS, MEMORY, params->call.stream>>>(*params, *maps);
    return cudaPeekAtLastError();
}

template <typename ELEMENT, int DIM>
cudaError_t launch_keys(const skl_cuda_params *params, skl_cuda_launcher otherwise)
{
    const skl_problem *const p = &params->problem;
    const bool second = skl_cuda_of_second(params);
    const skl_cuda_argument *const own = second ? &params->two : &params->one;
    const skl_cuda_argument *const other = second ? &params->one : &params->two;
    key_maps maps;
    if (!encode_queries(&maps.own_queries, p, own, STAGE, ELEMENT()) ||
        !encode_queries(&maps.other_queries, p, other, STAGE, ELEMENT()) ||
        !encode_keys(&maps.own_keys, p, own, CONSUMERS * 64, ELEMENT()))
        return otherwise(params);
    if (own->capped || other->capped)
        return second ? launch_key_tiles<ELEMENT, DIM, true, true>(params, &maps)
                      : launch_key_tiles<ELEMENT, DIM, false, true>(params, &maps);
    return second ? launch_key_tiles<ELEMENT, DIM, true, false>(params, &maps)
                  : launch_key_tiles<ELEMENT, DIM, false, false>(params, &maps);
}

} // namespace sm90

#endif
