/* Gradients of one side on Hopper's tensor cores (sm_90a), dq and dk in one sweep: 16-bit types, one teacher head a
 * student head. "Own" is the argument of the KL that gets its gradients, "other" the remaining one.
 *
 *   block    2 query warpgroups of 64 queries and 1 key warpgroup; one block a multiprocessor
 *   regs     200 a query thread: other Q (DIM / 4), logits of a stage (64), dq (DIM / 2), G (16), 24 for the rest
 *            104 a key thread: dk of a stage (DIM / 2)
 *   shared   own Q, DEPTH stages of 64 keys of both arguments, G twice, dk of a stage in f32: 208 KB at DIM = 128
 *
 *   query    X, Y (wgmma) -> exponentials -> dq += G K (wgmma), G to shared memory      of stage n
 *   key      copies stage n + 2 (TMA);  dk = G^T Q (wgmma) -> memory += dk (TMA)        of stage n - 1
 *
 * dq stays in registers. dk leaves with every stage, through shared memory and the copy engine, which adds it to f32
 * sums in memory: in any order, so its last bits differ between runs. The key warpgroup does nothing else, so that
 * the two query warpgroups never wait for those sums, nor for each other: one's exponentials run beside the other's
 * products. Under GQA all query heads add to the one key head that they share.
 *
 * ptxas gives the first 24 registers to ordinary values and wants all accumulators and operands of wgmma behind them:
 * that is why no more than DIM - 32 dimensions of the other Q are held in registers.
 *
 * CAPPED: instances for arguments of which one has a softcap, or both. */
#ifndef SKL_CUDA_SM90_BACKWARD_CUH
#define SKL_CUDA_SM90_BACKWARD_CUH

#include "cuda/sm90/gradient.cuh"
#include "cuda/sm90/sections.cuh"
#include "cuda/sm90/tensor_map.cuh"

namespace sm90
{

constexpr int KEY_GROUP = CONSUMERS; /* the warpgroup behind those of the queries */
constexpr int GRADIENT_THREADS = 128 * (CONSUMERS + 1);
constexpr int QUERIES = tile_place::ROWS;

template <int DIM> constexpr int GRADIENT_DEPTH = DIM == 64 ? 6 : 3; /* stages */

/* Other queries: dimensions that threads hold in registers. There is no room for the last ones. */
template <int DIM> constexpr int HELD = DIM == 64 ? 64 : 96;

template <int DIM> struct gradient_block {
    static constexpr int DEPTH = GRADIENT_DEPTH<DIM>;
    lying_rows<DIM / 64> own_queries;
    struct {
        row_stage<DIM> own, other;
    } stages[DEPTH];
    unsigned char g[2][QUERIES][128];        /* [query][key] */
    unsigned char sums[DIM / 32][KEYS][128]; /* f32, 32 dimensions each */
    lying_rows<DIM / 64 - HELD<DIM> / 64> other_queries;
    uint64_t queries_full, full[DEPTH], clean[DEPTH], g_full[2], g_empty[2];
    tile_place place; /* here, and not in the registers of every thread */
    int count;        /* queries that there are */
    row_stream keys;
    float unit;                 /* of G */
    float poison[DEPTH][KEYS];  /* NaN for own keys that are not finite, 0 for others */
    query_facts facts[QUERIES]; /* LSEs in base 2, upstream gradients in the unit */
};

/* What the sweep reads, and where its sums for keys lie. */
struct gradient_maps {
    CUtensorMap own_queries, other_queries, own_keys, other_keys, sums;
};

/* ---- Copies ------------------------------------------------------------------------------------------------- */

/* What one warp of the key warpgroup copies, and where the block's dk goes. All lanes have the same here. */
template <int DIM> struct stage_copies {
    gradient_block<DIM> &block;
    const gradient_maps &maps;
    stage_order keys;
    int batch, head, own_head, other_head;

    __device__ void copy_queries(int row) const
    {
        barrier_expect(block.queries_full, block.own_queries.SIZE + block.other_queries.SIZE);
#pragma unroll
        for (int half = 0; half < DIM / 64; half++)
            copy_box(block.own_queries.parts[half], maps.own_queries, half * 64, row, head, batch,
                     block.queries_full);
        if constexpr (HELD<DIM> < DIM)
            copy_box(block.other_queries.parts, maps.other_queries, DIM - 64, row, head, batch, block.queries_full);
    }

    /* Into memory that is free; nothing behind the last stage. */
    __device__ void copy_stage(int n) const
    {
        if (n >= keys.stages)
            return;
        const int at = n % block.DEPTH, row = keys.row_of(n);
        barrier_expect(block.full[at], (int)sizeof block.stages[at]);
#pragma unroll
        for (int half = 0; half < DIM / 64; half++) {
            copy_box(block.stages[at].other.halves[half], maps.other_keys, half * 64, row, other_head, batch,
                     block.full[at]);
            copy_box(block.stages[at].own.halves[half], maps.own_keys, half * 64, row, own_head, batch,
                     block.full[at]);
        }
    }

    __device__ void add_sums(int n) const
    {
#pragma unroll
        for (int part = 0; part < DIM / 32; part++)
            add_box(maps.sums, part * 32, keys.row_of(n), own_head, batch, block.sums[part]);
        boxes_commit();
    }
};

/* ---- Queries ------------------------------------------------------------------------------------------------ */

/* G of f16 needs a unit: f16 holds 2^-24 .. 2^16 only. One warp finds it, from the block's largest upstream gradient;
 * G of the second argument is at most that. Rows whose upstream gradient is less than 2^-16 of it lose bits of dq.
 * bf16 has the range of f32. */
template <typename ELEMENT>
__device__ inline float unit_of(const skl_cuda_params &params, const tile_place &place, ELEMENT)
{
    return 1.0F;
}

__device__ inline float unit_of(const skl_cuda_params &params, const tile_place &place, __half)
{
    constexpr int LIMIT = 15; /* values stay below 2^LIMIT units */
    float largest = 0.0F;
    for (int row = (int)threadIdx.x % 32; row < QUERIES; row += 32) {
        const int64_t query = skl_min(place.first + row, place.sequence.query_count - 1);
        const skl_range sees = skl_visible(&params.problem, &place.sequence, query);
        if (sees.begin >= sees.end)
            continue; /* whatever comes from upstream, its gradient is 0 */
        const float size = fabsf(fact_of(params, 3, place.sequence, place.head, query));
        largest = size < INFINITY ? fmaxf(largest, size) : largest;
    }
    const int size = (int)(__float_as_uint(warp_max(largest)) >> 23) - 126; /* largest < 2^size */
    return power_of_2(max(size - LIMIT, -126));
}

/* Facts of the warpgroup's 64 queries, two threads each. Own queries that are not finite become 0 and their LSE NaN:
 * dk of keys that they do not see stays what it is. Rows behind the last may be another sequence's: they become 0,
 * too, and have no probability anywhere. */
template <typename ELEMENT, int DIM, bool SECOND>
__device__ inline void know_queries(const skl_cuda_params &params, gradient_block<DIM> &block,
                                    const tile_place &place)
{
    const int row = (int)threadIdx.x / 2, count = block.count;
    const bool finite = clean_row<ELEMENT, DIM>(block.own_queries.parts, row, row < count);
    if constexpr (HELD<DIM> < DIM)
        for (int c = (int)threadIdx.x % 2; c < 8 && row >= count; c += 2)
            *(uint4 *)(void *)&block.other_queries.parts[0][row][c * 16] = make_uint4(0, 0, 0, 0);
    if (threadIdx.x % 2 == 0) {
        constexpr float NOWHERE = 1e30F;
        query_facts facts = {NOWHERE, NOWHERE, 0.0F, 0.0F};
        if (row < count) {
            float fact[4];
#pragma unroll
            for (int which = 0; which < 4; which++)
                fact[which] = fact_of(params, which, place.sequence, place.head, place.first + row);
            facts = {fact[0] * SKL_LOG2E, fact[1] * SKL_LOG2E, fact[2], fact[3] / block.unit};
            if (!finite)
                (SECOND ? facts.lse_b : facts.lse_a) = NAN;
        }
        block.facts[row] = facts;
    }
    async_fence();
    barrier_of(1 + (int)threadIdx.x / 128, 128);
}

template <typename ELEMENT, int DIM, bool SECOND, bool CAPPED> struct query_group {
    const skl_cuda_params &params;
    gradient_block<DIM> &block;
    int group; /* of the warp, the same for all lanes */
    uint32_t other_q[HELD<DIM> / 16][4];
    float dq[DIM / 8][4];
    row_sums sums[2]; /* of the second argument's sweep: what a KL is made of */

    __device__ void start_logits(stage_logits &own, stage_logits &other, int at)
    {
        const uint32_t queries = group * (64 * 128 / 16); /* of the warpgroup */
        wgmma_fence();
        start_products<ELEMENT, DIM, HELD<DIM>>(other, other_q, row_operand(&block.other_queries) + queries,
                                                row_operand(&block.stages[at].other));
        start_products<ELEMENT, DIM, 0>(own, NULL, row_operand(&block.own_queries) + queries,
                                        row_operand(&block.stages[at].own));
        wgmma_commit();
    }

    /* G of a stage as A operands. EDGE: masked pairs are 0. The logits are only read: ptxas wants accumulators for
     * itself. */
    template <bool EDGE>
    __device__ void weigh_pairs(uint32_t (&g)[4][4], const stage_logits &own, const stage_logits &other, int n)
    {
        const int first = EDGE ? block.keys.place_of(n) * KEYS : 0;
#pragma unroll
        for (int half = 0; half < 2; half++) {
            const int row = own_row<1>(0, half);
            const query_facts query = load_facts(block.facts[row]);
            const range32 sees = EDGE && row < block.count ? block.keys.band.of(row) : range32{};
#pragma unroll
            for (int i = 0; i < 8; i++) {
                float pair[2];
#pragma unroll
                for (int parity = 0; parity < 2; parity++) {
                    const int column = column_of(i, parity);
                    const float lse = SECOND ? query.lse_b : query.lse_a;
                    const log_probability of_own =
                        log_of<CAPPED>(own[i][half * 2 + parity], own_of<SECOND>(params),
                                       EDGE ? block.poison[n % block.DEPTH][column] - lse : -lse);
                    const log_probability of_other = log_of<CAPPED>(
                        other[i][half * 2 + parity], other_of<SECOND>(params), -(SECOND ? query.lse_a : query.lse_b));
                    const float u = (SECOND ? of_other : of_own).value, v = (SECOND ? of_own : of_other).value;
                    const float p = ex2(u), q = SECOND ? ex2(v) : 0.0F;
                    const bool seen = !EDGE || (first + column >= sees.begin && first + column < sees.end);
                    if (SECOND && seen)
                        sums[half] = {sums[half].l_a + p, sums[half].l_b + q, fmaf(p, u - v, sums[half].w)};
                    float gradient = SECOND ? q - p : p * fmaf(SKL_LN2, u - v, -query.kl);
                    if (CAPPED)
                        gradient *= of_own.slope;
                    pair[parity] = seen ? gradient * query.grad : 0.0F;
                }
                g[i / 2][i % 2 * 2 + half] = pack(pair[0], pair[1], ELEMENT());
            }
        }
    }

    /* The 64 x 64 pairs of a stage. */
    template <bool EDGE> __device__ void add_stage(int n)
    {
        const int at = n % block.DEPTH, lane = (int)threadIdx.x % 32;
        barrier_wait(EDGE ? block.clean[at] : block.full[at], n / block.DEPTH % 2);
        stage_logits own, other;
        start_logits(own, other, at);
        wgmma_wait<0>();
        settle(own);
        settle(other);
        uint32_t g[4][4];
        weigh_pairs<EDGE>(g, own, other, n);
        wgmma_fence();
        const uint32_t k = column_operand(&block.stages[at].own, KEYS * 128);
#pragma unroll
        for (int step = 0; step < KEYS / 16; step++)
            wgmma<true>(dq, g[step], descriptor_of(k + step * 16 * 128 / 16), 1, ELEMENT());
        wgmma_commit();
        barrier_wait(block.g_empty[n % 2], n / 2 % 2 ^ 1);
        const int row = (int)threadIdx.x / 32 * 16 + lane % 16;
        const uint32_t to = shared_address(&block.g[n % 2][row][(lane / 16 ^ row % 8) * 16]);
#pragma unroll
        for (int step = 0; step < KEYS / 16; step++)
            stmatrix_x4(to ^ (uint32_t)(step * 32), g[step]);
        async_fence();
        __syncwarp();
        if (EDGE)
            barrier_arrive(block.g_full[n % 2]); /* every lane: it read marks that are written anew behind this */
        else if (lane == 0)
            barrier_arrive_for(block.g_full[n % 2], 32);
    }

    __device__ void run()
    {
#pragma unroll
        for (int e = 0; e < DIM / 2; e++)
            dq[e / 4][e % 4] = 0.0F;
        sums[0] = sums[1] = {};
        for (int n = 0; n < block.keys.edges; n++)
            add_stage<true>(n);
        wgmma_wait<0>(); /* so that both loops have G in the same registers */
        for (int n = block.keys.edges; n < block.keys.stages; n++)
            add_stage<false>(n);
        wgmma_wait<0>();
        settle(dq);
    }

    __device__ void store(const tile_place &place) const
    {
        const skl_side side = skl_cuda_side(&params);
        const skl_output out = *side.dq;
        const int64_t base = SKL_ROW(out, place.sequence.batch, place.head, place.sequence.query_begin + place.first);
#pragma unroll
        for (int half = 0; half < 2; half++) {
            const int row = own_row<1>(0, half);
            const skl_row_state state =
                merge_lanes({0.0F, sums[half].l_a, 0.0F, sums[half].l_b, sums[half].w}); /* less both LSEs */
            if (row >= block.count)
                continue;
            if (params.kl_in_sweep && threadIdx.x % 4 == 0)
                skl_row_set(&params.call.rows.kl, &place.sequence, place.head, place.first + row,
                            skl_kl_report(skl_state_kl(&state)));
            if (out.data != NULL)
                store_row<ELEMENT>(out.data, base + row * out.stride_row, side, dq, half, block.unit * side.scale);
        }
    }
};

/* ---- Keys --------------------------------------------------------------------------------------------------- */

/* A masked pair weighs 0, but 0 times a value that is not finite is NaN: such keys become 0 before the product with
 * G, and give NaN to just those queries that see them. Only stages that come first have masked pairs. */
template <typename ELEMENT, int DIM> __device__ inline void clean_stage(gradient_block<DIM> &block, int n)
{
    const int at = n % block.DEPTH;
    const int row = (int)threadIdx.x % 128 / 2;
    barrier_wait(block.full[at], n / block.DEPTH % 2);
    const bool finite = clean_row<ELEMENT, DIM>(block.stages[at].own.halves, row, true);
    block.poison[at][row] = finite ? 0.0F : NAN;
    async_fence();
    barrier_arrive(block.clean[at]); /* every thread: it wrote what others read */
}

/* The stage's dk, to where the copy engine takes it from. Lanes of odd rows exchange every two blocks of 8 dimensions
 * with the two behind them: so no bank is met twice. */
template <int DIM>
__device__ inline void stage_sums(gradient_block<DIM> &block, const float (&dk)[DIM / 8][4], float factor)
{
    const int lane = (int)threadIdx.x % 32;
    const int row = (int)threadIdx.x % 128 / 32 * 16 + lane / 4;
    const bool odd = row % 2;
#pragma unroll
    for (int n = 0; n < DIM / 8; n++) {
        const int chunk = (n % 4 ^ (odd ? 2 : 0)) * 2 + lane % 4 / 2;
        unsigned char *const to = &block.sums[n / 4][row][(chunk ^ row % 8) * 16 + lane % 2 * 8];
#pragma unroll
        for (int half = 0; half < 2; half++) {
            const float low = odd ? dk[n ^ 2][half * 2] : dk[n][half * 2];
            const float high = odd ? dk[n ^ 2][half * 2 + 1] : dk[n][half * 2 + 1];
            *(float2 *)(void *)(to + half * 8 * 128) = make_float2(low * factor, high * factor);
        }
    }
}

/* Not wanted: the warpgroup copies stages only. */
template <typename ELEMENT, int DIM>
__device__ inline void add_key_gradients(gradient_block<DIM> &block, const stage_copies<DIM> &copies, bool wanted,
                                         float scale)
{
    const bool leads = own_warp_of_group() == 0; /* the warpgroup: this warp does */
    const uint32_t q = column_operand(block.own_queries.parts, QUERIES * 128);
    float dk[DIM / 8][4];
    if (copies.keys.edges > 0)
        clean_stage<ELEMENT>(block, 0);
    for (int n = 0; n < copies.keys.stages; n++) {
        if (n + 1 < copies.keys.edges)
            clean_stage<ELEMENT>(block, n + 1);
        barrier_wait(block.g_full[n % 2], n / 2 % 2);
        if (leads && n > 0) /* where there is a G, the stage before it has been left */
            copies.copy_stage(n + block.DEPTH - 1);
        if (!wanted) {
            __syncwarp(); /* no lane is still waiting for this G when the next one comes */
            if (threadIdx.x % 32 == 0)
                barrier_arrive(block.g_empty[n % 2]);
            continue;
        }
        wgmma_fence();
        const uint32_t g = column_operand(block.g[n % 2], 0);
#pragma unroll
        for (int step = 0; step < QUERIES / 16; step++)
            wgmma<true>(dk, descriptor_of(g + step * 16 * 128 / 16), descriptor_of(q + step * 16 * 128 / 16),
                        step > 0, ELEMENT());
        wgmma_commit();
        wgmma_wait<0>();
        settle(dk);
        if (threadIdx.x % 32 == 0)
            barrier_arrive(block.g_empty[n % 2]);
        if (leads)
            boxes_wait();
        barrier_of(1 + KEY_GROUP, 128);
        stage_sums<DIM>(block, dk, scale * block.unit);
        async_fence();
        barrier_of(1 + KEY_GROUP, 128);
        if (leads)
            copies.add_sums(n);
    }
    if (leads)
        boxes_wait();
}

/* ---- Kernel ------------------------------------------------------------------------------------------------- */

template <typename ELEMENT, int DIM, bool SECOND, bool CAPPED>
__global__ void __launch_bounds__(GRADIENT_THREADS, 1)
    gradient_kernel(const __grid_constant__ skl_cuda_params params, const __grid_constant__ gradient_maps maps)
{
#ifdef __CUDA_ARCH_FEAT_SM90_ALL
    extern __shared__ __align__(1024) unsigned char raw[];
    gradient_block<DIM> &block = *(gradient_block<DIM> *)(void *)raw;
    tile_place here;
    if (!here.find(params, 1))
        return;
    if (threadIdx.x < 32)
        block.unit = unit_of(params, here, ELEMENT());
    if (threadIdx.x == 0) {
        block.place = here;
        block.count = (int)skl_min(QUERIES, here.sequence.query_count - here.first);
        block.keys = keys_of_tile(params, here);
        if (block.count < QUERIES) /* 0 times a key that is not finite: rows that are not there must be masked */
            block.keys.edges = block.keys.stages;
        barrier_init(block.queries_full, 1);
        for (int at = 0; at < block.DEPTH; at++) {
            barrier_init(block.full[at], 1);
            barrier_init(block.clean[at], 128);
        }
        for (int at = 0; at < 2; at++) {
            barrier_init(block.g_full[at], CONSUMERS * 128);
            barrier_init(block.g_empty[at], 4);
        }
        barrier_init_fence();
    }
    __syncthreads();
    const tile_place &place = block.place;
    const int group = own_group();
    if (group == KEY_GROUP) {
        give_registers<104>();
        const int head = common((int)place.head);
        const stage_copies<DIM> copies = {block,
                                          maps,
                                          common(block.keys),
                                          common((int)place.sequence.batch),
                                          head,
                                          head / own_of<SECOND>(params).heads_per_key,
                                          head / other_of<SECOND>(params).heads_per_key};
        if (own_warp() == KEY_GROUP * 4) {
            copies.copy_queries(common((int)(place.sequence.query_begin + place.first)));
            for (int n = 0; n < block.DEPTH; n++)
                copies.copy_stage(n);
        }
        add_key_gradients<ELEMENT, DIM>(block, copies, params.sums.data != NULL,
                                        params.teacher_side ? params.problem.scale_t : params.problem.scale_s);
    } else {
        take_registers<200>();
        query_group<ELEMENT, DIM, SECOND, CAPPED> own = {params, block, group};
        load_rows<HELD<DIM>>(
            own.other_q, queries_of<ELEMENT>(other_of<SECOND>(params), place.sequence, place.head).from(place.first),
            block.count);
        barrier_wait(block.queries_full, 0);
        know_queries<ELEMENT, DIM, SECOND>(params, block, place);
        own.run();
        own.store(place);
    }
#endif
}

template <typename ELEMENT, int DIM, bool SECOND, bool CAPPED>
cudaError_t launch_sweep(const skl_cuda_params *params, const gradient_maps *maps)
{
    constexpr int MEMORY = sizeof(gradient_block<DIM>);
    const cudaError_t error = cudaFuncSetAttribute(gradient_kernel<ELEMENT, DIM, SECOND, CAPPED>,
                                                   cudaFuncAttributeMaxDynamicSharedMemorySize, MEMORY);
    if (error != cudaSuccess)
        return error;
    const skl_problem *const p = &params->problem;
    gradient_kernel<ELEMENT, DIM, SECOND, CAPPED><<<grid_of(p->batch, p->heads_s, skl_ceil_div(p->len_q, QUERIES)),
                                                    GRADIENT_THREADS, MEMORY, params->call.stream>>>(*params, *maps);
    return cudaPeekAtLastError();
}

/* False where the copy engine cannot read or write such tensors. */
template <typename ELEMENT>
inline bool encode_all(gradient_maps *maps, const skl_cuda_params *params, bool second, ELEMENT element)
{
    const skl_problem *const p = &params->problem;
    const skl_cuda_argument *const own = second ? &params->two : &params->one;
    const skl_cuda_argument *const other = second ? &params->one : &params->two;
    const skl_output *const out = &params->sums;
    const skl_input sums = {out->data, out->stride_batch, out->stride_head, out->stride_row};
    return encode_queries(&maps->own_queries, p, own, QUERIES, element) &&
           encode_queries(&maps->other_queries, p, other, QUERIES, element) &&
           encode_keys(&maps->own_keys, p, own, KEYS, element) &&
           encode_keys(&maps->other_keys, p, other, KEYS, element) &&
           (sums.data == NULL || encode(&maps->sums, CU_TENSOR_MAP_DATA_TYPE_FLOAT32, &sums, own->dim,
                                        p->heads_s / own->heads_per_key, key_rows(p), KEYS));
}

/* G of a first argument has no bound that f16 could rely on. */
template <typename ELEMENT> constexpr bool ANY_G = true;
template <> constexpr bool ANY_G<__half> = false;

template <typename ELEMENT, int DIM>
cudaError_t launch_gradients(const skl_cuda_params *params, const split_launchers &otherwise)
{
    const bool second = skl_cuda_of_second(params);
    gradient_maps maps;
    const bool capped = params->one.capped || params->two.capped;
    if (!(second || ANY_G<ELEMENT>) || !encode_all(&maps, params, second, ELEMENT()))
        return otherwise.run(params);
    skl_cuda_params own = *params;
    own.splits = 1;
    own.section = section_for(params, QUERIES, second ? 2 : 2 + 4, second ? 2 + 4 : 2); /* own keys have sums */
    cudaError_t error = skl_cuda_clear_sums(&own);
    if (error == cudaSuccess && second)
        error = capped ? launch_sweep<ELEMENT, DIM, true, true>(&own, &maps)
                       : launch_sweep<ELEMENT, DIM, true, false>(&own, &maps);
    else if constexpr (ANY_G<ELEMENT>)
        if (error == cudaSuccess)
            error = capped ? launch_sweep<ELEMENT, DIM, false, true>(&own, &maps)
                           : launch_sweep<ELEMENT, DIM, false, false>(&own, &maps);
    return error == cudaSuccess ? skl_cuda_store_sums(&own) : error;
}

} // namespace sm90

#endif
