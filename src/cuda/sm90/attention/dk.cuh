/* Deterministic dk on Hopper's tensor cores (sm_90a): 16-bit types, one teacher head per student head.
 *
 * The fused backward (fused_backward.cuh) transposed: a block keeps a tile of keys and streams the queries that
 * attend to them. dk stays in registers and is stored once, so its bits are the same on every run and it needs no
 * workspace.
 *
 * Bound: tensor cores (1,536 clocks per 128 x 64 pairs at DIM = 128); shared memory takes 1,280, exponentials 1,024.
 *
 *   block      2 consumer warpgroups of 64 keys and 1 producer warpgroup; one block per SM
 *   registers  232 per consumer thread: K of the other argument (DIM / 4), K of the wrt argument (DIM / 4, minus 8 at
 *              DIM = 128), logits of a stage (64), dk (DIM / 2), G (16), 24 for the rest; 40 per producer thread
 *   shared     DEPTH stages of 64 queries of both arguments, and their row stats; at DIM = 128 half of the wrt
 *              argument's K: 214 KB at DIM = 128, 137 KB at DIM = 64
 *
 *                stage n       stage n + 1
 *              +-------------+-------------+--
 *     64 keys  |  X^T, Y^T   |             |      X^T, Y^T = K Q^T (wgmma)  ->  G^T  ->  dk += G^T Q (wgmma)
 *     64 keys  |             |             |
 *              +-------------+-------------+--
 *
 *   producer   loads stage n + DEPTH (TMA) and its queries' row stats, and sanitizes it if it is masked
 *   consumer   issues logits of stage n  ->  waits for them and for dk of stage n - 1  ->  exponentials
 *              ->  issues dk of stage n
 *
 * The exponentials leave G^T in the registers of the A operand of dk += G^T Q, and both products read the same bytes
 * of Q. One warpgroup's exponentials overlap the other's wgmmas. Under GQA a block processes the stages of all query
 * heads that share the key head, head by head.
 *
 * Queries are columns of the logits here: a thread needs the row stats of 16 queries per stage and reads them from
 * shared memory just before it uses them.
 *
 * Registers are the limit, as in the fused backward: with all 128 dimensions of both K they would be 232, and ptxas
 * needs less than that. So the last 32 dimensions of the wrt argument's K come from shared memory. (Not of the other
 * argument's: under GQA that one may change from head to head.)
 *
 * CAPPED: instances for problems where at least one argument has a softcap. */
#ifndef SKL_CUDA_SM90_ATTENTION_DK_CUH
#define SKL_CUDA_SM90_ATTENTION_DK_CUH

#include "cuda/sm90/attention/logit_gradients.cuh"
#include "cuda/sm90/launch.cuh"

namespace sm90
{

constexpr int DK_THREADS = 128 * (CONSUMERS + 1);
typedef row_tile<2, true> key_tile; /* 128 keys */

/* Dimensions of the wrt argument's keys in registers. */
template <int DIM> constexpr int WRT_REG_DIMS = DIM == 64 ? 64 : 96;

template <int DIM> struct dk_smem {
    static constexpr int DEPTH = DIM == 64 ? 8 : 6;
    struct {
        row_stage<DIM> wrt, other;
    } stages[DEPTH];
    smem_rows<DIM / 64 - WRT_REG_DIMS<DIM> / 64> wrt_keys;
    stage_row_stats stats[DEPTH];
    uint64_t full[DEPTH];       /* rows are loaded */
    uint64_t stats_full[DEPTH]; /* row stats are stored, and a masked stage is sanitized */
    uint64_t empty[DEPTH];      /* all consumer threads have released the stage */
    uint64_t keys_full;
    key_tile tile; /* in shared memory to save registers */
    int count;     /* keys of the tile that exist */
    int heads;     /* query heads that share the key head */
    stage_schedule queries;
    int queries_needed; /* up to the last one that attends to a key of the tile */
    row_ranges<CONSUMERS * 64> visible;
};

struct dk_maps {
    CUtensorMap wrt_queries, other_queries, wrt_keys;
};

/* ---- Producer ----------------------------------------------------------------------------------------------- */

/* Each of the four warps loads every fourth stage, so that the latency of the row stats of four stages overlaps. */
template <typename ELEMENT, int DIM, bool WRT_B>
__device__ inline void produce_queries(const backward_params &params, const dk_maps &maps, dk_smem<DIM> &smem)
{
    const stage_schedule queries = warp_uniform(smem.queries);
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
        const int first = queries.stage_at(n % queries.stages) * STAGE_ROWS;
        barrier_wait(smem.empty[stage], phase ^ 1);
        barrier_expect_tx(smem.full[stage], (int)sizeof smem.stages[stage]);
#pragma unroll
        for (int slab = 0; slab < DIM / 64; slab++) {
            tma_load(smem.stages[stage].other.slabs[slab], maps.other_queries, slab * 64, queries.row + first, head,
                     batch, smem.full[stage]);
            tma_load(smem.stages[stage].wrt.slabs[slab], maps.wrt_queries, slab * 64, queries.row + first, head,
                     batch, smem.full[stage]);
        }
        stage_row_stats &stats = smem.stats[stage];
        store_stage_row_stats(
            stats, load_stage_row_stats(params, smem.tile.sequence, smem.queries, smem.queries_needed, head, first));
        if (n % queries.stages < queries.masked_stages) {
            __syncwarp(); /* LSEs are stored before poison overwrites them */
            barrier_wait(smem.full[stage], phase);
            sanitize_rows<ELEMENT>(smem.stages[stage].wrt, WRT_B ? stats.lse_b : stats.lse_a);
            fence_proxy_async();
        }
        barrier_arrive(smem.stats_full[stage]); /* every lane, because every lane has written row stats */
    }
}

/* ---- Consumers ---------------------------------------------------------------------------------------------- */

template <typename ELEMENT, int DIM, bool WRT_B, bool CAPPED> struct dk_warpgroup {
    const backward_params &params;
    dk_smem<DIM> &smem;
    int warpgroup; /* warp-uniform */
    uint32_t wrt_k[WRT_REG_DIMS<DIM> / 16][4], other_k[DIM / 16][4];
    float dk[DIM / 8][4];
    gradient_unit<ELEMENT> unit;

    /* The tile's keys of one argument, for a query head. */
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

    /* G of a stage as A operands. f16: with respect to B, |p_b - p_a| <= 1 and the upstream gradients bound G; with
     * respect to A only G itself tells how large it is. */
    template <bool MASKED>
    __device__ void compute_g(uint32_t (&g)[4][4], const argument_logits &logits, const stage_row_stats &stats)
    {
        const streamed_query_stats<WRT_B> queries{stats};
        if constexpr (decltype(unit)::MOVES && !WRT_B) {
            stage_logits values;
            const float largest = compute_logit_gradients<MASKED, WRT_B, CAPPED>(values, params, logits, smem.visible,
                                                                                 smem.count, queries);
            fence_operand(dk);
            unit.fit(*this, largest);
            pack_logit_gradients<ELEMENT>(g, values, unit.inverse());
        } else {
            if (unit.MOVES) {
                fence_operand(dk);
                unit.fit(*this, load_shared(stats.largest));
            }
            const float inverse = unit.inverse(); /* applied last: times an upstream gradient it could overflow */
            for_each_logit_gradient<MASKED, WRT_B, CAPPED>(
                params, logits, smem.visible, queries, [&](int i, int half, float low, float high) {
                    g[i / 2][i % 2 * 2 + half] = pack(low * inverse, high * inverse, ELEMENT());
                });
        }
    }

    /* Adds the 64 x 64 pairs of stage n, which is stage `s` of its query head. */
    template <bool MASKED> __device__ void add_stage(int n, int s)
    {
        const int stage = n % smem.DEPTH, phase = n / smem.DEPTH % 2;
        barrier_wait(smem.full[stage], phase);
        barrier_wait(smem.stats_full[stage], phase);
        argument_logits logits = {MASKED ? smem.queries.stage_at(s) * STAGE_ROWS : 0};
        wgmma_fence();
        issue_logits<ELEMENT, DIM, DIM>(logits.other, other_k, 0, k_major_operand(&smem.stages[stage].other));
        issue_logits<ELEMENT, DIM, WRT_REG_DIMS<DIM>>(logits.wrt, wrt_k,
                                                      k_major_operand(&smem.wrt_keys) + warpgroup * (64 * 128 / 16),
                                                      k_major_operand(&smem.stages[stage].wrt));
        wgmma_commit();
        wgmma_wait<0>();
        fence_operand(logits.wrt);
        fence_operand(logits.other);
        if (n > 0) /* dk of stage n - 1 is complete, too; every lane, because every lane has read row stats */
            barrier_arrive(smem.empty[(n - 1) % smem.DEPTH]);
        uint32_t g[4][4];
        compute_g<MASKED>(g, logits, smem.stats[stage]);
        wgmma_fence();
        const uint32_t q = mn_major_operand(&smem.stages[stage].wrt, STAGE_ROWS * 128);
        wgmma_steps<true, STAGE_ROWS / 16>(dk, g, q, 1, ELEMENT());
        wgmma_commit();
    }

    __device__ void run()
    {
#pragma unroll
        for (int e = 0; e < DIM / 2; e++)
            dk[e / 4][e % 4] = 0.0F;
        const stage_schedule queries = warp_uniform(smem.queries);
        const int heads = warp_uniform(smem.heads);
        const int64_t head = smem.tile.head * heads;
        load_a_frag<WRT_REG_DIMS<DIM>>(wrt_k, keys(wrt_argument<WRT_B>(params), head), smem.count);
        if (WRT_REG_DIMS<DIM> < DIM)
            barrier_wait(smem.keys_full, 0);
        for (int h = 0, n = 0; h < heads; h++) {
            load_a_frag<DIM>(other_k, keys(other_argument<WRT_B>(params), head + h), smem.count);
            int s = 0; /* CAPPED: full stages run as masked ones, which halves the code to compile */
            for (; s < (CAPPED ? queries.stages : queries.masked_stages); s++, n++)
                add_stage<true>(n, s);
            wgmma_wait<0>(); /* lets ptxas keep G in the same registers in both loops */
            if constexpr (!CAPPED) {
                for (; s < queries.stages; s++, n++)
                    add_stage<false>(n, s);
                wgmma_wait<0>();
            }
        }
        fence_operand(dk);
    }

    /* Padding keys get a gradient of 0, whatever their accumulators contain. */
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

template <typename ELEMENT, int DIM, bool WRT_B, bool CAPPED>
__global__ void __launch_bounds__(DK_THREADS, 1)
    dk_kernel(const __grid_constant__ backward_params params, const __grid_constant__ dk_maps maps)
{
#ifdef __CUDA_ARCH_FEAT_SM90_ALL
    extern __shared__ __align__(1024) unsigned char raw[];
    dk_smem<DIM> &smem = *(dk_smem<DIM> *)(void *)raw;
    key_tile tile;
    if (!tile.find(params))
        return;
    const skl_sequence &s = tile.sequence;
    const int64_t last = skl_min(tile.first + CONSUMERS * 64, tile.rows) - 1;
    row_stream queries = {};
    if (last >= tile.first)
        queries = make_row_stream(stream_for(skl_query_band(&params.problem, &s), tile.first, last), s.query_begin);
    smem.visible.fill(queries.band);
    if (threadIdx.x == 0) {
        smem.tile = tile;
        smem.count = (int)(last + 1 - tile.first);
        smem.heads = wrt_argument<WRT_B>(params).heads_per_key;
        smem.queries = queries;
        smem.queries_needed = queries.band.of((int)(last - tile.first)).end;
        barrier_init(smem.keys_full, 1);
        for (int stage = 0; stage < smem.DEPTH; stage++) {
            barrier_init(smem.full[stage], 1);
            barrier_init(smem.stats_full[stage], 32);
            barrier_init(smem.empty[stage], CONSUMERS * 128);
        }
        barrier_init_fence();
    }
    __syncthreads();
    const int warpgroup = warpgroup_index();
    if (warpgroup == CONSUMERS) {
        reg_dealloc<40>();
        produce_queries<ELEMENT, DIM, WRT_B>(params, maps, smem);
    } else {
        reg_alloc<232>();
        dk_warpgroup<ELEMENT, DIM, WRT_B, CAPPED> consumer = {params, smem, warpgroup};
        consumer.run();
        consumer.store();
    }
#endif
}

template <typename ELEMENT, int DIM, bool WRT_B, bool CAPPED>
cudaError_t launch_dk_tiles(const backward_params &params, const dk_maps &maps)
{
    constexpr int MEMORY = sizeof(dk_smem<DIM>);
    const skl_problem &p = params.problem;
    const dim3 blocks = grid_of(p.batch, key_tile::heads(params), skl_ceil_div(p.len_k, CONSUMERS * 64));
    return launch_blocks(dk_kernel<ELEMENT, DIM, WRT_B, CAPPED>, blocks, DK_THREADS, MEMORY, params.call.stream,
                         params, maps);
}

template <typename ELEMENT, int DIM, bool SOFTCAP>
cudaError_t launch_dk(const char *kernel, const skl_cuda_params *params, const skl_cuda_launch *launch)
{
    const backward_params kernel_params = backward_params_of(params, launch);
    const skl_problem *const p = &kernel_params.problem;
    const bool wrt_b = is_grad_of_b(kernel_params);
    const skl_cuda_argument *const wrt = wrt_b ? &kernel_params.b : &kernel_params.a;
    const skl_cuda_argument *const other = wrt_b ? &kernel_params.a : &kernel_params.b;
    dk_maps maps;
    if (!encode_queries(&maps.wrt_queries, p, wrt, STAGE_ROWS, ELEMENT()) ||
        !encode_queries(&maps.other_queries, p, other, STAGE_ROWS, ELEMENT()) ||
        !encode_keys(&maps.wrt_keys, p, wrt, CONSUMERS * 64, ELEMENT()))
        return encode_error();
    return with_softcap<SOFTCAP>(kernel_params, [&](auto capped) {
        record_launch(kernel, capped() ? SKL_VARIANT_DK_SOFTCAP : SKL_VARIANT_DK, 1);
        return wrt_b ? launch_dk_tiles<ELEMENT, DIM, true, capped()>(kernel_params, maps)
                     : launch_dk_tiles<ELEMENT, DIM, false, capped()>(kernel_params, maps);
    });
}

} // namespace sm90

#endif
