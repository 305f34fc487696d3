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
#ifndef SKL_CUDA_SM90_ATTENTION_DK_CUH
#define SKL_CUDA_SM90_ATTENTION_DK_CUH

#include "cuda/sm90/attention/logit_gradients.cuh"
#include "cuda/sm90/tensor_map.cuh"

namespace sm90
{

constexpr int KEY_THREADS = 128 * (CONSUMERS + 1);
typedef row_tile<2, true> key_tile; /* 128 keys */

/* Own keys: dimensions that threads hold in registers. There is no room for the last ones. */
template <int DIM> constexpr int WRT_REG_DIMS = DIM == 64 ? 64 : 96;

template <int DIM> struct dk_smem {
    static constexpr int DEPTH = DIM == 64 ? 8 : 6;
    struct {
        row_stage<DIM> wrt, other;
    } stages[DEPTH];
    smem_rows<DIM / 64 - WRT_REG_DIMS<DIM> / 64> wrt_keys;
    stage_row_stats stats[DEPTH];
    /* Of a stage: its rows are there; its facts are, too, and an edge is clean; all warps have left it. */
    uint64_t full[DEPTH], stats_full[DEPTH], empty[DEPTH], keys_full;
    key_tile tile; /* here, and not in the registers of every thread */
    int count;     /* keys that there are */
    int heads;     /* query heads that share the key head */
    row_stream queries;
};

struct key_maps {
    CUtensorMap wrt_queries, other_queries, wrt_keys;
};

/* ---- Staging ------------------------------------------------------------------------------------------------ */

/* Each of the four warps brings every fourth stage: while one waits for facts, the next one's are on their way. */
template <typename ELEMENT, int DIM, bool OF_B>
__device__ inline void stage_queries(const backward_params &params, const key_maps &maps, dk_smem<DIM> &smem)
{
    const stage_order queries = warp_uniform(smem.queries);
    const int batch = warp_uniform((int)smem.tile.sequence.batch), warp = warp_in_warpgroup();
    const int heads = warp_uniform(smem.heads), first_head = warp_uniform((int)smem.tile.head) * heads;
    if constexpr (WRT_REG_DIMS<DIM> < DIM)
        if (warp == 0) {
            barrier_expect_tx(smem.keys_full, smem.wrt_keys.SIZE);
            tma_load(smem.wrt_keys.slabs, maps.wrt_keys, DIM - 64,
                     (int)(smem.tile.sequence.key_begin + smem.tile.first), (int)smem.tile.head, batch,
                     smem.keys_full);
        }
    for (int n = warp; n < queries.stages * heads; n += 4) {
        const int stage = n % smem.DEPTH, phase = n / smem.DEPTH % 2;
        const int head = first_head + n / queries.stages;
        const int first = queries.place_of(n % queries.stages) * STAGE_ROWS;
        barrier_wait(smem.empty[stage], phase ^ 1);
        barrier_expect_tx(smem.full[stage], (int)sizeof smem.stages[stage]);
#pragma unroll
        for (int half = 0; half < DIM / 64; half++) {
            tma_load(smem.stages[stage].other.slabs[half], maps.other_queries, half * 64, queries.row + first, head,
                     batch, smem.full[stage]);
            tma_load(smem.stages[stage].wrt.slabs[half], maps.wrt_queries, half * 64, queries.row + first, head,
                     batch, smem.full[stage]);
        }
        stage_row_stats &stats = smem.stats[stage];
        store_stage_row_stats(
            stats, load_stage_row_stats(params, smem.tile.sequence, smem.queries, smem.count, head, first));
        if (n % queries.stages < queries.masked_stages) {
            __syncwarp(); /* an LSE that becomes NaN has been written */
            barrier_wait(smem.full[stage], phase);
            clean_rows<ELEMENT>(smem.stages[stage].wrt, OF_B ? stats.lse_b : stats.lse_a);
            fence_async_shared();
        }
        barrier_arrive(smem.stats_full[stage]); /* every lane: it wrote what others read */
    }
}

/* ---- Keys --------------------------------------------------------------------------------------------------- */

template <typename ELEMENT, int DIM, bool OF_B, bool CAPPED> struct dk_warpgroup {
    const backward_params &params;
    dk_smem<DIM> &smem;
    int group; /* of the warp, the same for all lanes */
    uint32_t wrt_k[WRT_REG_DIMS<DIM> / 16][4], other_k[DIM / 16][4];
    float dk[DIM / 8][4];
    gradient_unit<ELEMENT> unit;

    /* The block's keys of one argument, as a query head sees them. */
    __device__ row_source<ELEMENT> keys(const skl_cuda_argument &argument, int64_t head) const
    {
        return keys_of<ELEMENT>(argument, smem.tile.sequence, head).from(smem.tile.first);
    }

    __device__ void scale(float factor)
    {
#pragma unroll
        for (int e = 0; e < DIM / 2; e++)
            dk[e / 4][e % 4] *= factor;
    }

    /* A bound of the stage's gradients: |S - P| <= 1; those of a first argument have none, and are looked at. */
    template <bool MASKED>
    __device__ float bound_of(const logits_of_stage &logits, const stage_row_stats &stats) const
    {
        if (OF_B)
            return load_shared(stats.largest);
        return largest_pair<MASKED, OF_B, CAPPED>(params, logits, smem.queries.band, smem.count,
                                                  streamed_queries<OF_B>{stats});
    }

    /* The 64 x 64 pairs of stage n, which is stage `s` of its query head. */
    template <bool MASKED> __device__ void add_stage(int n, int s)
    {
        const int stage = n % smem.DEPTH, phase = n / smem.DEPTH % 2;
        barrier_wait(smem.full[stage], phase);
        barrier_wait(smem.stats_full[stage], phase);
        logits_of_stage logits = {MASKED ? smem.queries.place_of(s) * STAGE_ROWS : 0};
        wgmma_fence();
        start_products<ELEMENT, DIM, DIM>(logits.other, other_k, 0, row_operand(&smem.stages[stage].other));
        start_products<ELEMENT, DIM, WRT_REG_DIMS<DIM>>(logits.wrt, wrt_k,
                                                        row_operand(&smem.wrt_keys) + group * (64 * 128 / 16),
                                                        row_operand(&smem.stages[stage].wrt));
        wgmma_commit();
        wgmma_wait<0>();
        fence_operand(logits.wrt);
        fence_operand(logits.other);
        if (n > 0) /* every lane: it read facts; the product for dk has ended, too */
            barrier_arrive(smem.empty[(n - 1) % smem.DEPTH]);
        const stage_row_stats &stats = smem.stats[stage];
        if (unit.MOVES) {
            fence_operand(dk);
            unit.fit(*this, bound_of<MASKED>(logits, stats));
        }
        uint32_t g[4][4];
        const float inverse = unit.inverse(); /* times upstream gradients it might overflow */
        weigh_pairs<MASKED, OF_B, CAPPED>(params, logits, smem.queries.band, streamed_queries<OF_B>{stats},
                                          [&](int i, int half, float low, float high) {
                                              g[i / 2][i % 2 * 2 + half] =
                                                  pack(low * inverse, high * inverse, ELEMENT());
                                          });
        wgmma_fence();
        const uint32_t q = column_operand(&smem.stages[stage].wrt, STAGE_ROWS * 128);
#pragma unroll
        for (int step = 0; step < STAGE_ROWS / 16; step++)
            wgmma<true>(dk, g[step], descriptor_of(q + step * 16 * 128 / 16), 1, ELEMENT());
        wgmma_commit();
    }

    __device__ void run()
    {
#pragma unroll
        for (int e = 0; e < DIM / 2; e++)
            dk[e / 4][e % 4] = 0.0F;
        const stage_order queries = warp_uniform(smem.queries);
        const int heads = warp_uniform(smem.heads);
        const int64_t head = smem.tile.head * heads;
        load_rows<WRT_REG_DIMS<DIM>>(wrt_k, keys(wrt_argument<OF_B>(params), head), smem.count);
        if (WRT_REG_DIMS<DIM> < DIM)
            barrier_wait(smem.keys_full, 0);
        for (int h = 0, n = 0; h < heads; h++) {
            load_rows<DIM>(other_k, keys(other_argument<OF_B>(params), head + h), smem.count);
            for (int s = 0; s < queries.masked_stages; s++, n++)
                add_stage<true>(n, s);
            wgmma_wait<0>(); /* so that both loops have G in the same registers */
            for (int s = queries.masked_stages; s < queries.stages; s++, n++)
                add_stage<false>(n, s);
            wgmma_wait<0>();
        }
        fence_operand(dk);
    }

    /* Padding keys have a gradient of 0, whatever was multiplied for them. */
    __device__ void store()
    {
        const key_tile &tile = smem.tile;
        const skl_side side = side_of(params);
        const skl_output &out = *side.dk;
        const int64_t base = SKL_ROW(out, tile.sequence.batch, tile.head, tile.sequence.key_begin);
#pragma unroll
        for (int half = 0; half < 2; half++) {
            const int64_t row = tile.first + acc_row<1>(0, half);
#pragma unroll
            for (int e = 0; e < DIM / 4 && row >= tile.rows; e++)
                dk[e / 2][half * 2 + e % 2] = 0.0F;
            if (row < tile.stored)
                store_row<ELEMENT>(out.data, base + row * out.stride_row, side, dk, half, unit.value() * side.scale);
        }
    }
};

/* ---- Kernel ------------------------------------------------------------------------------------------------- */

template <typename ELEMENT, int DIM, bool OF_B, bool CAPPED>
__global__ void __launch_bounds__(KEY_THREADS, 1)
    dk_kernel(const __grid_constant__ backward_params params, const __grid_constant__ key_maps maps)
{
#ifdef __CUDA_ARCH_FEAT_SM90_ALL
    extern __shared__ __align__(1024) unsigned char raw[];
    dk_smem<DIM> &smem = *(dk_smem<DIM> *)(void *)raw;
    key_tile here;
    if (!here.find(params))
        return;
    if (threadIdx.x == 0) {
        const skl_sequence &s = here.sequence;
        const int64_t last = skl_min(here.first + CONSUMERS * 64, here.rows) - 1;
        smem.tile = here;
        smem.count = (int)(last + 1 - here.first);
        smem.heads = wrt_argument<OF_B>(params).heads_per_key;
        smem.queries = {};
        if (smem.count > 0)
            smem.queries =
                in_stages(stream_for(skl_query_band(&params.problem, &s), here.first, last), s.query_begin);
        barrier_init(smem.keys_full, 1);
        for (int stage = 0; stage < smem.DEPTH; stage++) {
            barrier_init(smem.full[stage], 1);
            barrier_init(smem.stats_full[stage], 32);
            barrier_init(smem.empty[stage], CONSUMERS * 128);
        }
        barrier_init_fence();
    }
    __syncthreads();
    const int group = warpgroup_index();
    if (group == CONSUMERS) {
        reg_dealloc<40>();
        stage_queries<ELEMENT, DIM, OF_B>(params, maps, smem);
    } else {
        reg_alloc<232>();
        dk_warpgroup<ELEMENT, DIM, OF_B, CAPPED> own = {params, smem, group};
        own.run();
        own.store();
    }
#endif
}

template <typename ELEMENT, int DIM, bool OF_B, bool CAPPED>
cudaError_t launch_key_tiles(const backward_params &params, const key_maps &maps)
{
    constexpr int MEMORY = sizeof(dk_smem<DIM>);
    const cudaError_t error = cudaFuncSetAttribute(dk_kernel<ELEMENT, DIM, OF_B, CAPPED>,
                                                   cudaFuncAttributeMaxDynamicSharedMemorySize, MEMORY);
    if (error != cudaSuccess)
        return error;
    const skl_problem &p = params.problem;
    const dim3 blocks = grid_of(p.batch, key_tile::heads(params), skl_ceil_div(p.len_k, CONSUMERS * 64));
    dk_kernel<ELEMENT, DIM, OF_B, CAPPED><<<blocks, KEY_THREADS, MEMORY, params.call.stream>>>(params, maps);
    return cudaPeekAtLastError();
}

template <typename ELEMENT, int DIM>
cudaError_t launch_dk(const char *kernel, const skl_cuda_params *params, const skl_cuda_launch *launch)
{
    const backward_params own = backward_params_of(params, launch);
    const skl_problem *const p = &own.problem;
    const bool of_b = is_grad_of_b(own), capped = own.a.capped || own.b.capped;
    const skl_cuda_argument *const wrt = of_b ? &own.b : &own.a;
    const skl_cuda_argument *const other = of_b ? &own.a : &own.b;
    key_maps maps;
    if (!encode_queries(&maps.wrt_queries, p, wrt, STAGE_ROWS, ELEMENT()) ||
        !encode_queries(&maps.other_queries, p, other, STAGE_ROWS, ELEMENT()) ||
        !encode_keys(&maps.wrt_keys, p, wrt, CONSUMERS * 64, ELEMENT()))
        return cudaErrorInvalidValue; /* select.c has tried */
    record_launch(kernel, capped ? SKL_VARIANT_DK_SOFTCAP : SKL_VARIANT_DK, 1);
    if (capped)
        return of_b ? launch_key_tiles<ELEMENT, DIM, true, true>(own, maps)
                    : launch_key_tiles<ELEMENT, DIM, false, true>(own, maps);
    return of_b ? launch_key_tiles<ELEMENT, DIM, true, false>(own, maps)
                : launch_key_tiles<ELEMENT, DIM, false, false>(own, maps);
}

} // namespace sm90

#endif
