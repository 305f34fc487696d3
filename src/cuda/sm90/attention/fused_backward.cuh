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
#ifndef SKL_CUDA_SM90_ATTENTION_FUSED_BACKWARD_CUH
#define SKL_CUDA_SM90_ATTENTION_FUSED_BACKWARD_CUH

#include "cuda/common/dk_sums.cuh"
#include "cuda/sm90/attention/logit_gradients.cuh"
#include "cuda/sm90/tensor_map.cuh"

namespace sm90
{

constexpr int DK_WARPGROUP = CONSUMERS; /* the warpgroup behind those of the queries */
constexpr int FUSED_BACKWARD_THREADS = 128 * (CONSUMERS + 1);
constexpr int TILE_QUERIES = block_tile::ROWS;

template <int DIM> constexpr int FUSED_BACKWARD_STAGES = DIM == 64 ? 6 : 3; /* stages */

/* Other queries: dimensions that threads hold in registers. There is no room for the last ones. */
template <int DIM> constexpr int REG_DIMS = DIM == 64 ? 64 : 96;

template <int DIM> struct fused_backward_smem {
    static constexpr int DEPTH = FUSED_BACKWARD_STAGES<DIM>;
    smem_rows<DIM / 64> wrt_queries;
    struct {
        row_stage<DIM> wrt, other;
    } stages[DEPTH];
    unsigned char g[2][TILE_QUERIES][128];         /* [query][key] */
    unsigned char sums[DIM / 32][STAGE_KEYS][128]; /* f32, 32 dimensions each */
    smem_rows<DIM / 64 - REG_DIMS<DIM> / 64> other_queries;
    uint64_t queries_full, full[DEPTH], clean[DEPTH], g_full[2], g_empty[2];
    block_tile tile; /* here, and not in the registers of every thread */
    int count;       /* queries that there are */
    row_stream keys;
    float unit;                      /* of G */
    float poison[DEPTH][STAGE_KEYS]; /* NaN for own keys that are not finite, 0 for others */
    row_stats stats[TILE_QUERIES];   /* LSEs in base 2, upstream gradients in the unit */
};

/* What the sweep reads, and where its sums for keys lie. */
struct fused_backward_maps {
    CUtensorMap wrt_queries, other_queries, wrt_keys, other_keys, sums;
};

/* ---- Copies ------------------------------------------------------------------------------------------------- */

/* What one warp of the key warpgroup copies, and where the block's dk goes. All lanes have the same here. */
template <int DIM> struct stage_loads {
    fused_backward_smem<DIM> &smem;
    const fused_backward_maps &maps;
    stage_order keys;
    int batch, head, wrt_head, other_head;

    __device__ void load_queries(int row) const
    {
        barrier_expect_tx(smem.queries_full, smem.wrt_queries.SIZE + smem.other_queries.SIZE);
#pragma unroll
        for (int half = 0; half < DIM / 64; half++)
            tma_load(smem.wrt_queries.slabs[half], maps.wrt_queries, half * 64, row, head, batch, smem.queries_full);
        if constexpr (REG_DIMS<DIM> < DIM)
            tma_load(smem.other_queries.slabs, maps.other_queries, DIM - 64, row, head, batch, smem.queries_full);
    }

    /* Into memory that is free; nothing behind the last stage. */
    __device__ void load_stage(int n) const
    {
        if (n >= keys.stages)
            return;
        const int stage = n % smem.DEPTH, row = keys.row_of(n);
        barrier_expect_tx(smem.full[stage], (int)sizeof smem.stages[stage]);
#pragma unroll
        for (int half = 0; half < DIM / 64; half++) {
            tma_load(smem.stages[stage].other.slabs[half], maps.other_keys, half * 64, row, other_head, batch,
                     smem.full[stage]);
            tma_load(smem.stages[stage].wrt.slabs[half], maps.wrt_keys, half * 64, row, wrt_head, batch,
                     smem.full[stage]);
        }
    }

    __device__ void add_sums(int n) const
    {
#pragma unroll
        for (int part = 0; part < DIM / 32; part++)
            tma_reduce_add(maps.sums, part * 32, keys.row_of(n), wrt_head, batch, smem.sums[part]);
        tma_commit();
    }
};

/* ---- Queries ------------------------------------------------------------------------------------------------ */

/* G of f16 needs a unit: f16 holds 2^-24 .. 2^16 only. One warp finds it, from the block's largest upstream gradient;
 * G of the second argument is at most that. Rows whose upstream gradient is less than 2^-16 of it lose bits of dq.
 * bf16 has the range of f32. */
template <typename ELEMENT>
__device__ inline float unit_of(const backward_params &params, const block_tile &tile, ELEMENT)
{
    return 1.0F;
}

__device__ inline float unit_of(const backward_params &params, const block_tile &tile, __half)
{
    constexpr int LIMIT = 15; /* values stay below 2^LIMIT units */
    float largest = 0.0F;
    for (int row = (int)threadIdx.x % 32; row < TILE_QUERIES; row += 32) {
        const int64_t query = skl_min(tile.first + row, tile.sequence.query_count - 1);
        const skl_range sees = skl_visible(&params.problem, &tile.sequence, query);
        if (sees.begin >= sees.end)
            continue; /* whatever comes from upstream, its gradient is 0 */
        const float size = fabsf(row_stat(params, 3, tile.sequence, tile.head, query));
        largest = size < INFINITY ? fmaxf(largest, size) : largest;
    }
    const int size = (int)(__float_as_uint(warp_max(largest)) >> 23) - 126; /* largest < 2^size */
    return power_of_2(max(size - LIMIT, -126));
}

/* Facts of the warpgroup's 64 queries, two threads each. Own queries that are not finite become 0 and their LSE NaN:
 * dk of keys that they do not see stays what it is. Rows behind the last may be another sequence's: they become 0,
 * too, and have no probability anywhere. */
template <typename ELEMENT, int DIM, bool OF_B>
__device__ inline void prepare_queries(const backward_params &params, fused_backward_smem<DIM> &smem,
                                       const block_tile &tile)
{
    const int row = (int)threadIdx.x / 2, count = smem.count;
    const bool finite = clean_row<ELEMENT, DIM>(smem.wrt_queries.slabs, row, row < count);
    if constexpr (REG_DIMS<DIM> < DIM)
        for (int c = (int)threadIdx.x % 2; c < 8 && row >= count; c += 2)
            *(uint4 *)(void *)&smem.other_queries.slabs[0][row][c * 16] = make_uint4(0, 0, 0, 0);
    if (threadIdx.x % 2 == 0) {
        constexpr float NOWHERE = 1e30F;
        row_stats stats = {NOWHERE, NOWHERE, 0.0F, 0.0F};
        if (row < count) {
            float stat[4];
#pragma unroll
            for (int which = 0; which < 4; which++)
                stat[which] = row_stat(params, which, tile.sequence, tile.head, tile.first + row);
            stats = {stat[0] * SKL_LOG2E, stat[1] * SKL_LOG2E, stat[2], stat[3] / smem.unit};
            if (!finite)
                (OF_B ? stats.lse_b : stats.lse_a) = NAN;
        }
        smem.stats[row] = stats;
    }
    fence_async_shared();
    named_barrier_sync(1 + (int)threadIdx.x / 128, 128);
}

template <typename ELEMENT, int DIM, bool OF_B, bool CAPPED> struct dq_warpgroup {
    const backward_params &params;
    fused_backward_smem<DIM> &smem;
    int group; /* of the warp, the same for all lanes */
    uint32_t other_q[REG_DIMS<DIM> / 16][4];
    float dq[DIM / 8][4];
    row_sums sums[2]; /* of the second argument's sweep: what a KL is made of */

    __device__ void start_logits(stage_logits &wrt, stage_logits &other, int stage)
    {
        const uint32_t queries = group * (64 * 128 / 16); /* of the warpgroup */
        wgmma_fence();
        start_products<ELEMENT, DIM, REG_DIMS<DIM>>(other, other_q, row_operand(&smem.other_queries) + queries,
                                                    row_operand(&smem.stages[stage].other));
        start_products<ELEMENT, DIM, 0>(wrt, NULL, row_operand(&smem.wrt_queries) + queries,
                                        row_operand(&smem.stages[stage].wrt));
        wgmma_commit();
    }

    /* G of a stage as A operands. MASKED: masked pairs are 0. The logits are only read: ptxas wants accumulators for
     * itself. */
    template <bool MASKED>
    __device__ void weigh_pairs(uint32_t (&g)[4][4], const stage_logits &wrt, const stage_logits &other, int n)
    {
        const int first = MASKED ? smem.keys.place_of(n) * STAGE_KEYS : 0;
#pragma unroll
        for (int half = 0; half < 2; half++) {
            const int row = acc_row<1>(0, half);
            const row_stats query = load_row_stats(smem.stats[row]);
            const range32 sees = MASKED && row < smem.count ? smem.keys.band.of(row) : range32{};
#pragma unroll
            for (int i = 0; i < 8; i++) {
                float pair[2];
#pragma unroll
                for (int parity = 0; parity < 2; parity++) {
                    const int column = acc_column(i, parity);
                    const float lse = OF_B ? query.lse_b : query.lse_a;
                    const log_probability of_wrt =
                        log_of<CAPPED>(wrt[i][half * 2 + parity], wrt_argument<OF_B>(params),
                                       MASKED ? smem.poison[n % smem.DEPTH][column] - lse : -lse);
                    const log_probability of_other =
                        log_of<CAPPED>(other[i][half * 2 + parity], other_argument<OF_B>(params),
                                       -(OF_B ? query.lse_a : query.lse_b));
                    const float u = (OF_B ? of_other : of_wrt).value, v = (OF_B ? of_wrt : of_other).value;
                    const float p_a = ex2(u), p_b = OF_B ? ex2(v) : 0.0F;
                    const bool seen = !MASKED || (first + column >= sees.begin && first + column < sees.end);
                    if (OF_B && seen)
                        sums[half] = {sums[half].l_a + p_a, sums[half].l_b + p_b, fmaf(p_a, u - v, sums[half].w)};
                    float gradient = OF_B ? p_b - p_a : p_a * fmaf(SKL_LN2, u - v, -query.kl);
                    if (CAPPED)
                        gradient *= of_wrt.slope;
                    pair[parity] = seen ? gradient * query.grad : 0.0F;
                }
                g[i / 2][i % 2 * 2 + half] = pack(pair[0], pair[1], ELEMENT());
            }
        }
    }

    /* The 64 x 64 pairs of a stage. */
    template <bool MASKED> __device__ void add_stage(int n)
    {
        const int stage = n % smem.DEPTH, lane = (int)threadIdx.x % 32;
        barrier_wait(MASKED ? smem.clean[stage] : smem.full[stage], n / smem.DEPTH % 2);
        stage_logits wrt, other;
        start_logits(wrt, other, stage);
        wgmma_wait<0>();
        fence_operand(wrt);
        fence_operand(other);
        uint32_t g[4][4];
        weigh_pairs<MASKED>(g, wrt, other, n);
        wgmma_fence();
        const uint32_t k = column_operand(&smem.stages[stage].wrt, STAGE_KEYS * 128);
#pragma unroll
        for (int step = 0; step < STAGE_KEYS / 16; step++)
            wgmma<true>(dq, g[step], descriptor_of(k + step * 16 * 128 / 16), 1, ELEMENT());
        wgmma_commit();
        barrier_wait(smem.g_empty[n % 2], n / 2 % 2 ^ 1);
        const int row = (int)threadIdx.x / 32 * 16 + lane % 16;
        const uint32_t to = shared_address(&smem.g[n % 2][row][(lane / 16 ^ row % 8) * 16]);
#pragma unroll
        for (int step = 0; step < STAGE_KEYS / 16; step++)
            stmatrix_x4(to ^ (uint32_t)(step * 32), g[step]);
        fence_async_shared();
        __syncwarp();
        if (MASKED)
            barrier_arrive(smem.g_full[n % 2]); /* every lane: it read marks that are written anew behind this */
        else if (lane == 0)
            barrier_arrive_count(smem.g_full[n % 2], 32);
    }

    __device__ void run()
    {
#pragma unroll
        for (int e = 0; e < DIM / 2; e++)
            dq[e / 4][e % 4] = 0.0F;
        sums[0] = sums[1] = {};
        for (int n = 0; n < smem.keys.masked_stages; n++)
            add_stage<true>(n);
        wgmma_wait<0>(); /* so that both loops have G in the same registers */
        for (int n = smem.keys.masked_stages; n < smem.keys.stages; n++)
            add_stage<false>(n);
        wgmma_wait<0>();
        fence_operand(dq);
    }

    __device__ void store(const block_tile &tile) const
    {
        const skl_side side = side_of(params);
        const skl_output out = *side.dq;
        const int64_t base = SKL_ROW(out, tile.sequence.batch, tile.head, tile.sequence.query_begin + tile.first);
#pragma unroll
        for (int half = 0; half < 2; half++) {
            const int row = acc_row<1>(0, half);
            const skl_row_state state =
                merge_lanes({0.0F, sums[half].l_a, 0.0F, sums[half].l_b, sums[half].w}); /* less both LSEs */
            if (row >= smem.count)
                continue;
            if (params.kl_in_backward && threadIdx.x % 4 == 0)
                skl_row_set(&params.call.rows.kl, &tile.sequence, tile.head, tile.first + row,
                            skl_kl_report(skl_state_kl(&state)));
            if (out.data != NULL)
                store_row<ELEMENT>(out.data, base + row * out.stride_row, side, dq, half, smem.unit * side.scale);
        }
    }
};

/* ---- Keys --------------------------------------------------------------------------------------------------- */

/* A masked pair weighs 0, but 0 times a value that is not finite is NaN: such keys become 0 before the product with
 * G, and give NaN to just those queries that see them. Only stages that come first have masked pairs. */
template <typename ELEMENT, int DIM> __device__ inline void clean_stage(fused_backward_smem<DIM> &smem, int n)
{
    const int stage = n % smem.DEPTH;
    const int row = (int)threadIdx.x % 128 / 2;
    barrier_wait(smem.full[stage], n / smem.DEPTH % 2);
    const bool finite = clean_row<ELEMENT, DIM>(smem.stages[stage].wrt.slabs, row, true);
    smem.poison[stage][row] = finite ? 0.0F : NAN;
    fence_async_shared();
    barrier_arrive(smem.clean[stage]); /* every thread: it wrote what others read */
}

/* The stage's dk, to where the copy engine takes it from. Lanes of odd rows exchange every two blocks of 8 dimensions
 * with the two behind them: so no bank is met twice. */
template <int DIM>
__device__ inline void stage_sums(fused_backward_smem<DIM> &smem, const float (&dk)[DIM / 8][4], float factor)
{
    const int lane = (int)threadIdx.x % 32;
    const int row = (int)threadIdx.x % 128 / 32 * 16 + lane / 4;
    const bool odd = row % 2;
#pragma unroll
    for (int n = 0; n < DIM / 8; n++) {
        const int chunk = (n % 4 ^ (odd ? 2 : 0)) * 2 + lane % 4 / 2;
        unsigned char *const to = &smem.sums[n / 4][row][(chunk ^ row % 8) * 16 + lane % 2 * 8];
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
__device__ inline void add_key_gradients(fused_backward_smem<DIM> &smem, const stage_loads<DIM> &loads, bool wanted,
                                         float scale)
{
    const bool leads = warp_in_warpgroup() == 0; /* the warpgroup: this warp does */
    const uint32_t q = column_operand(smem.wrt_queries.slabs, TILE_QUERIES * 128);
    float dk[DIM / 8][4];
    if (loads.keys.masked_stages > 0)
        clean_stage<ELEMENT>(smem, 0);
    for (int n = 0; n < loads.keys.stages; n++) {
        if (n + 1 < loads.keys.masked_stages)
            clean_stage<ELEMENT>(smem, n + 1);
        barrier_wait(smem.g_full[n % 2], n / 2 % 2);
        if (leads && n > 0) /* where there is a G, the stage before it has been left */
            loads.load_stage(n + smem.DEPTH - 1);
        if (!wanted) {
            __syncwarp(); /* no lane is still waiting for this G when the next one comes */
            if (threadIdx.x % 32 == 0)
                barrier_arrive(smem.g_empty[n % 2]);
            continue;
        }
        wgmma_fence();
        const uint32_t g = column_operand(smem.g[n % 2], 0);
#pragma unroll
        for (int step = 0; step < TILE_QUERIES / 16; step++)
            wgmma<true>(dk, descriptor_of(g + step * 16 * 128 / 16), descriptor_of(q + step * 16 * 128 / 16),
                        step > 0, ELEMENT());
        wgmma_commit();
        wgmma_wait<0>();
        fence_operand(dk);
        if (threadIdx.x % 32 == 0)
            barrier_arrive(smem.g_empty[n % 2]);
        if (leads)
            tma_wait_read();
        named_barrier_sync(1 + DK_WARPGROUP, 128);
        stage_sums<DIM>(smem, dk, scale * smem.unit);
        fence_async_shared();
        named_barrier_sync(1 + DK_WARPGROUP, 128);
        if (leads)
            loads.add_sums(n);
    }
    if (leads)
        tma_wait_read();
}

/* ---- Kernel ------------------------------------------------------------------------------------------------- */

template <typename ELEMENT, int DIM, bool OF_B, bool CAPPED>
__global__ void __launch_bounds__(FUSED_BACKWARD_THREADS, 1)
    fused_backward_kernel(const __grid_constant__ backward_params params,
                          const __grid_constant__ fused_backward_maps maps)
{
#ifdef __CUDA_ARCH_FEAT_SM90_ALL
    extern __shared__ __align__(1024) unsigned char raw[];
    fused_backward_smem<DIM> &smem = *(fused_backward_smem<DIM> *)(void *)raw;
    block_tile here;
    if (!here.find(params, 1, (unsigned)params.head_group))
        return;
    if (threadIdx.x < 32)
        smem.unit = unit_of(params, here, ELEMENT());
    if (threadIdx.x == 0) {
        smem.tile = here;
        smem.count = (int)skl_min(TILE_QUERIES, here.sequence.query_count - here.first);
        smem.keys = keys_of_tile(params, here, 1);
        if (smem.count < TILE_QUERIES) /* 0 times a key that is not finite: rows that are not there must be masked */
            smem.keys.masked_stages = smem.keys.stages;
        barrier_init(smem.queries_full, 1);
        for (int stage = 0; stage < smem.DEPTH; stage++) {
            barrier_init(smem.full[stage], 1);
            barrier_init(smem.clean[stage], 128);
        }
        for (int stage = 0; stage < 2; stage++) {
            barrier_init(smem.g_full[stage], CONSUMERS * 128);
            barrier_init(smem.g_empty[stage], 4);
        }
        barrier_init_fence();
    }
    __syncthreads();
    const block_tile &tile = smem.tile;
    const int group = warpgroup_index();
    if (group == DK_WARPGROUP) {
        reg_dealloc<104>();
        const int head = warp_uniform((int)tile.head);
        const stage_loads<DIM> loads = {smem,
                                        maps,
                                        warp_uniform(smem.keys),
                                        warp_uniform((int)tile.sequence.batch),
                                        head,
                                        head / wrt_argument<OF_B>(params).heads_per_key,
                                        head / other_argument<OF_B>(params).heads_per_key};
        if (warp_index() == DK_WARPGROUP * 4) {
            loads.load_queries(warp_uniform((int)(tile.sequence.query_begin + tile.first)));
            for (int n = 0; n < smem.DEPTH; n++)
                loads.load_stage(n);
        }
        add_key_gradients<ELEMENT, DIM>(smem, loads, params.dk_sums.data != NULL,
                                        params.teacher_side ? params.problem.scale_t : params.problem.scale_s);
    } else {
        reg_alloc<200>();
        dq_warpgroup<ELEMENT, DIM, OF_B, CAPPED> own = {params, smem, group};
        load_rows<REG_DIMS<DIM>>(
            own.other_q, queries_of<ELEMENT>(other_argument<OF_B>(params), tile.sequence, tile.head).from(tile.first),
            smem.count);
        barrier_wait(smem.queries_full, 0);
        prepare_queries<ELEMENT, DIM, OF_B>(params, smem, tile);
        own.run();
        own.store(tile);
    }
#endif
}

template <typename ELEMENT, int DIM, bool OF_B, bool CAPPED>
cudaError_t launch_fused_backward_tiles(const backward_params &params, const fused_backward_maps &maps)
{
    constexpr int MEMORY = sizeof(fused_backward_smem<DIM>);
    static_assert(TILE_QUERIES == SKL_SM90_BACKWARD_ROWS, "select.c counts tiles");
    const cudaError_t error = cudaFuncSetAttribute(fused_backward_kernel<ELEMENT, DIM, OF_B, CAPPED>,
                                                   cudaFuncAttributeMaxDynamicSharedMemorySize, MEMORY);
    if (error != cudaSuccess)
        return error;
    const skl_problem &p = params.problem;
    fused_backward_kernel<ELEMENT, DIM, OF_B, CAPPED>
        <<<grid_of(p.batch, p.heads_s, skl_ceil_div(p.len_q, TILE_QUERIES)), FUSED_BACKWARD_THREADS, MEMORY,
           params.call.stream>>>(params, maps);
    return cudaPeekAtLastError();
}

template <typename ELEMENT>
inline bool encode_all(fused_backward_maps *maps, const backward_params &params, ELEMENT element)
{
    const skl_problem *const p = &params.problem;
    const bool of_b = is_grad_of_b(params);
    const skl_cuda_argument *const wrt = of_b ? &params.b : &params.a;
    const skl_cuda_argument *const other = of_b ? &params.a : &params.b;
    const skl_output &out = params.dk_sums;
    const skl_input sums = {out.data, out.stride_batch, out.stride_head, out.stride_row};
    return encode_queries(&maps->wrt_queries, p, wrt, TILE_QUERIES, element) &&
           encode_queries(&maps->other_queries, p, other, TILE_QUERIES, element) &&
           encode_keys(&maps->wrt_keys, p, wrt, STAGE_KEYS, element) &&
           encode_keys(&maps->other_keys, p, other, STAGE_KEYS, element) &&
           (sums.data == NULL || skl_tensor_map(&maps->sums, SKL_F32, &sums, wrt->dim,
                                                p->heads_s / wrt->heads_per_key, skl_key_rows(p), STAGE_KEYS));
}

/* f16 has no instances for gradients of A: nothing bounds them that f16 could rely on. */
template <typename ELEMENT> constexpr bool HAS_GRAD_OF_A = true;
template <> constexpr bool HAS_GRAD_OF_A<__half> = false;

template <typename ELEMENT, int DIM>
cudaError_t launch_fused_backward(const char *kernel, const skl_cuda_params *params, const skl_cuda_launch *launch)
{
    const backward_params own = backward_params_of(params, launch);
    const bool of_b = is_grad_of_b(own), capped = own.a.capped || own.b.capped;
    fused_backward_maps maps;
    if (!(of_b || HAS_GRAD_OF_A<ELEMENT>) || !encode_all(&maps, own, ELEMENT()))
        return cudaErrorInvalidValue; /* select.c has tried */
    cudaError_t error = clear_dk_sums(&own);
    record_launch(kernel, capped ? SKL_VARIANT_FUSED_SOFTCAP : SKL_VARIANT_FUSED, 1);
    if (error == cudaSuccess && of_b)
        error = capped ? launch_fused_backward_tiles<ELEMENT, DIM, true, true>(own, maps)
                       : launch_fused_backward_tiles<ELEMENT, DIM, true, false>(own, maps);
    else if constexpr (HAS_GRAD_OF_A<ELEMENT>)
        if (error == cudaSuccess)
            error = capped ? launch_fused_backward_tiles<ELEMENT, DIM, false, true>(own, maps)
                           : launch_fused_backward_tiles<ELEMENT, DIM, false, false>(own, maps);
    return error == cudaSuccess ? store_dk_sums(&own) : error;
}

} // namespace sm90

#endif
