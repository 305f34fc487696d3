/* Gradients of one side for heads of more than 128 dimensions on Hopper's tensor cores (sm_90a): 16-bit types, one
 * teacher head a student head. Split, as sm80/backward.cuh is: one kernel gives dq with queries as own rows, its
 * mirror image dk with keys as own rows (DK). Nothing is summed in memory: the bits are the same on every run, and
 * no workspace is needed. "Own" is the argument of the KL that gets its gradients, "other" the remaining one.
 *
 *   block    2 warpgroups of 64 own rows and 1 staging warpgroup; one block a multiprocessor
 *   regs     224 a thread with rows: their gradient (DIM / 2), logits of a stage (64, G takes their place), 24 and
 *            more for the rest; 56 a staging thread
 *   shared   128 own rows of both arguments; stages of 64 streamed rows in two rings, one an argument: at DIM = 256
 *            there is room for three of 32 KB, two of them for the own argument
 *
 *                  stage n       stage n + 1
 *                +-------------+-------------+--
 *   64 own rows  |    X, Y     |             |      X, Y (wgmma)  ->  G  ->  gradient += G streamed rows (wgmma)
 *   64 own rows  |             |             |
 *                +-------------+-------------+--
 *
 *   staging  a warp an argument copies stages (TMA) as they are left: the other argument's when its products have
 *            ended, the own one's when G has been multiplied; a warp loads facts of streamed queries and cleans edges
 *   rows     X, Y of stage n  ->  exponentials  ->  gradient of stage n
 *
 * G leaves the exponentials as the A operand of the next product: it never goes through memory, and the warpgroups
 * never wait for each other. While one takes exponentials, the other one's products run. A warpgroup waits for its
 * own products, so that G needs no registers beside the logits.
 *
 * dq of a second argument brings the KL along. Under GQA the block of a key tile walks through all query heads that
 * share the key head; the other argument's keys are copied anew where they change. CAPPED: instances for arguments of
 * which one has a softcap, or both. */
#ifndef SKL_CUDA_SM90_ATTENTION_BACKWARD_WIDE_CUH
#define SKL_CUDA_SM90_ATTENTION_BACKWARD_WIDE_CUH

#include "cuda/sm90/attention/logit_gradients.cuh"
#include "cuda/sm90/tensor_map.cuh"

namespace sm90
{

constexpr int WIDE_THREADS = 128 * (CONSUMERS + 1);
constexpr int OWN_ROWS = CONSUMERS * 64;

/* What a block knows of streamed queries, stage by stage, or of its own ones and of marks of streamed keys. */
template <int DEPTH, bool DK> struct wide_row_stats {
    stage_row_stats staged[DEPTH];
};

template <int DEPTH> struct wide_row_stats<DEPTH, false> {
    row_stats wrt[OWN_ROWS]; /* LSEs in base 2; upstream gradients wait for the end */
    alignas(8) float marks[DEPTH][STAGE_ROWS];
};

/* Of one argument: own rows are there; a stage's rows are; all have left it. */
template <int DEPTH> struct wide_barriers {
    uint64_t rows_full, full[DEPTH], empty[DEPTH];

    __device__ void init(int leaving)
    {
        barrier_init(rows_full, 1);
        for (int stage = 0; stage < DEPTH; stage++) {
            barrier_init(full[stage], 1);
            barrier_init(empty[stage], leaving);
        }
    }
};

template <int DIM, bool DK> struct wide_smem {
    static constexpr int WRT_DEPTH = 2, OTHER_DEPTH = DIM == 192 ? 2 : 1;
    smem_rows<DIM / 64> wrt_rows, other_rows;
    row_stage<DIM> wrt_stages[WRT_DEPTH], other_stages[OTHER_DEPTH];
    wide_row_stats<WRT_DEPTH, DK> stats;
    wide_barriers<WRT_DEPTH> wrt;
    wide_barriers<OTHER_DEPTH> other;
    uint64_t stats_full[WRT_DEPTH]; /* facts of a stage are there, an edge is clean */
    row_tile<2, DK> tile;           /* here, and not in the registers of every thread */
    int count;                      /* own rows that there are */
    int heads;                      /* query heads whose stages the block meets: none if there is nothing to meet */
    row_stream stream;

    __device__ int query_head(int h) const
    {
        return (int)tile.head * heads + h;
    }

    /* How often an argument's own rows have changed before query head h of the block. */
    __device__ int changes(int h, const skl_cuda_argument &argument) const
    {
        return DK ? query_head(h) / argument.heads_per_key - query_head(0) / argument.heads_per_key : 0;
    }

    __device__ bool has_new_rows(int h, const skl_cuda_argument &argument) const
    {
        return h == 0 || changes(h, argument) > changes(h - 1, argument);
    }
};

/* Own rows are queries or keys, streamed ones keys or queries. */
struct wide_maps {
    CUtensorMap wrt_rows, other_rows, wrt_stream, other_stream;
};

/* ---- Staging ------------------------------------------------------------------------------------------------ */

/* All copies of one argument, by one warp. */
template <int DIM, bool DK, int DEPTH>
__device__ inline void load_argument(const wide_smem<DIM, DK> &smem, const skl_cuda_argument &argument,
                                     const CUtensorMap &rows_map, const CUtensorMap &stream_map,
                                     smem_rows<DIM / 64> &rows, row_stage<DIM> (&stages)[DEPTH],
                                     wide_barriers<DEPTH> &barriers)
{
    const skl_sequence &sequence = smem.tile.sequence;
    const stage_order stream = warp_uniform(smem.stream);
    const int batch = warp_uniform((int)sequence.batch), heads = warp_uniform(smem.heads);
    for (int h = 0, n = 0; h < heads; h++) {
        const int head = warp_uniform(smem.query_head(h)), key_head = head / argument.heads_per_key;
        if (smem.has_new_rows(h, argument)) {
            const int first = warp_uniform((int)((DK ? sequence.key_begin : sequence.query_begin) + smem.tile.first));
            if (h > 0) /* no product with the former ones is under way */
                barrier_wait(barriers.empty[(n - 1) % DEPTH], (n - 1) / DEPTH % 2);
            barrier_expect_tx(barriers.rows_full, rows.SIZE);
            for (int part = 0; part < DIM / 64; part++)
                tma_load(rows.slabs[part], rows_map, part * 64, first, DK ? key_head : head, batch,
                         barriers.rows_full);
        }
        for (int s = 0; s < stream.stages; s++, n++) {
            const int stage = n % DEPTH, row = stream.row_of(s);
            barrier_wait(barriers.empty[stage], n / DEPTH % 2 ^ 1);
            barrier_expect_tx(barriers.full[stage], (int)sizeof stages[stage]);
#pragma unroll
            for (int half = 0; half < DIM / 64; half++)
                tma_load(stages[stage].slabs[half], stream_map, half * 64, row, DK ? head : key_head, batch,
                         barriers.full[stage]);
        }
    }
}

/* Facts of streamed queries, and edges, by one warp. */
template <typename ELEMENT, int DIM, bool DK, bool OF_B>
__device__ inline void produce_row_stats(const backward_params &params, wide_smem<DIM, DK> &smem)
{
    const row_stream &stream = smem.stream;
    const int stages = DK ? stream.stages : stream.masked_stages; /* of streamed keys there is no more to know */
    for (int n = 0; n < stages * smem.heads; n++) {
        const int stage = n % smem.WRT_DEPTH, phase = n / smem.WRT_DEPTH % 2, s = n % stages;
        float(*marks)[STAGE_ROWS];
        if constexpr (DK) {
            const lane_row_stats loaded =
                load_stage_row_stats(params, smem.tile.sequence, stream, smem.count, smem.query_head(n / stages),
                                     stream.place_of(s) * STAGE_ROWS);
            barrier_wait(smem.wrt.empty[stage], phase ^ 1); /* meanwhile the facts come */
            stage_row_stats &stats = smem.stats.staged[stage];
            store_stage_row_stats(stats, loaded);
            marks = OF_B ? &stats.lse_b : &stats.lse_a;
        } else {
            barrier_wait(smem.wrt.empty[stage], phase ^ 1);
            marks = &smem.stats.marks[stage];
            for (int row = (int)threadIdx.x % 32; row < STAGE_ROWS; row += 32)
                (*marks)[row] = 0.0F;
        }
        if (s < stream.masked_stages) {
            __syncwarp(); /* a mark that becomes NaN has been written */
            barrier_wait(smem.wrt.full[stage], phase);
            clean_rows<ELEMENT>(smem.wrt_stages[stage], *marks);
            fence_async_shared();
        }
        barrier_arrive(smem.stats_full[stage]); /* every lane: it wrote what others read */
    }
}

/* ---- Own rows ----------------------------------------------------------------------------------------------- */

/* Queries that are own rows: their facts belong to rows of the logits, and they are weighed when their gradient is
 * stored. */
template <bool OF_B> struct wrt_queries {
    row_stats query[2];
    const float (&marks)[STAGE_ROWS]; /* of streamed keys: NaN for those that are not finite */
    row_sums (&sums)[2];
    float2 mark;

    template <bool MASKED> __device__ void load_columns(int column_block)
    {
        mark = MASKED ? load_shared_2(marks[acc_column(column_block, 0)]) : make_float2(0.0F, 0.0F);
    }

    __device__ row_stats of(int half, int parity) const
    {
        row_stats stats = query[half];
        (OF_B ? stats.lse_b : stats.lse_a) -= parity ? mark.y : mark.x;
        return stats;
    }

    __device__ void meet(int half, float u, float v)
    {
        if (OF_B)
            add_pair(sums[half], u, v);
    }
};

template <typename ELEMENT, int DIM, bool DK, bool OF_B, bool CAPPED> struct wide_warpgroup {
    const backward_params &params;
    wide_smem<DIM, DK> &smem;
    int group; /* of the warp, the same for all lanes */
    float gradient[DIM / 8][4];
    row_sums sums[2]; /* dq of a second argument: what a KL is made of */
    gradient_unit<ELEMENT> unit;

    __device__ void scale(float factor)
    {
#pragma unroll
        for (int e = 0; e < DIM / 2; e++)
            gradient[e / 4][e % 4] *= factor;
    }

    /* Facts of the warpgroup's own queries, two threads each; those behind the last have none, nor a result. */
    __device__ void load_query_row_stats()
    {
        const int row = (int)threadIdx.x / 2;
        if (threadIdx.x % 2 == 0 && row < smem.count) {
            float stat[3];
#pragma unroll
            for (int which = 0; which < 3; which++)
                stat[which] = row_stat(params, which, smem.tile.sequence, smem.tile.head, smem.tile.first + row);
            smem.stats.wrt[row] = {stat[0] * SKL_LOG2E, stat[1] * SKL_LOG2E, stat[2], 1.0F};
        }
        named_barrier_sync(1 + group, 128);
    }

    /* What is known of a stage's queries. Upstream gradients of own ones wait for the end. */
    __device__ auto queries_of_stage(int stage)
    {
        if constexpr (DK) {
            return streamed_queries<OF_B>{smem.stats.staged[stage]};
        } else {
            wrt_queries<OF_B> queries = {{}, smem.stats.marks[stage], sums};
#pragma unroll
            for (int half = 0; half < 2; half++) {
                queries.query[half] = load_row_stats(smem.stats.wrt[acc_row<1>(0, half)]);
                queries.query[half].grad = 1.0F;
            }
            return queries;
        }
    }

    /* Makes room for the stage's gradients: |S - P| <= 1, and no more will come; those of a first argument have no
     * bound, and are looked at. */
    template <bool MASKED> __device__ void fit_unit(const logits_of_stage &logits, int stage)
    {
        fence_operand(gradient);
        if constexpr (!OF_B)
            unit.fit(*this, largest_pair<MASKED, OF_B, CAPPED>(params, logits, smem.stream.band, smem.count,
                                                               queries_of_stage(stage)));
        else if constexpr (DK)
            unit.fit(*this, load_shared(smem.stats.staged[stage].largest));
        else
            unit.template fit<0>(*this, 1.0F);
    }

    /* Products of one argument. */
    __device__ void start_logits(stage_logits &x, const void *rows, const void *stage)
    {
        wgmma_fence();
        start_products<ELEMENT, DIM, 0>(x, NULL, row_operand(rows) + group * (64 * 128 / 16), row_operand(stage));
        wgmma_commit();
    }

    /* The 64 x 64 pairs of stage n, which is stage `s` of its query head. */
    template <bool MASKED> __device__ void add_stage(int n, int s)
    {
        const int wrt_stage = n % smem.WRT_DEPTH, wrt_phase = n / smem.WRT_DEPTH % 2;
        const int other_stage = n % smem.OTHER_DEPTH;
        logits_of_stage logits = {MASKED ? smem.stream.place_of(s) * STAGE_ROWS : 0};
        barrier_wait(smem.other.full[other_stage], n / smem.OTHER_DEPTH % 2);
        start_logits(logits.other, &smem.other_rows, &smem.other_stages[other_stage]);
        barrier_wait(smem.wrt.full[wrt_stage], wrt_phase);
        if (DK || MASKED)
            barrier_wait(smem.stats_full[wrt_stage], wrt_phase);
        start_logits(logits.wrt, &smem.wrt_rows, &smem.wrt_stages[wrt_stage]);
        wgmma_wait<1>();
        barrier_arrive_if(smem.other.empty[other_stage], threadIdx.x % 32 == 0);
        wgmma_wait<0>();
        fence_operand(logits.other);
        fence_operand(logits.wrt);
        if (unit.MOVES)
            fit_unit<MASKED>(logits, wrt_stage);
        uint32_t g[4][4];
        const float inverse = unit.inverse(); /* times upstream gradients it might overflow */
        weigh_pairs<MASKED, OF_B, CAPPED>(params, logits, smem.stream.band, queries_of_stage(wrt_stage),
                                          [&](int i, int half, float low, float high) {
                                              g[i / 2][i % 2 * 2 + half] =
                                                  pack(low * inverse, high * inverse, ELEMENT());
                                          });
        wgmma_fence();
        const uint32_t rows = column_operand(&smem.wrt_stages[wrt_stage], STAGE_ROWS * 128);
#pragma unroll
        for (int step = 0; step < STAGE_ROWS / 16; step++)
            wgmma<true>(gradient, g[step], descriptor_of(rows + step * 16 * 128 / 16), 1, ELEMENT());
        wgmma_commit();
        wgmma_wait<0>();
        barrier_arrive(smem.wrt.empty[wrt_stage]); /* every lane: it read facts or marks */
    }

    __device__ void run()
    {
#pragma unroll
        for (int e = 0; e < DIM / 2; e++)
            gradient[e / 4][e % 4] = 0.0F;
        sums[0] = sums[1] = {};
        if constexpr (!DK)
            load_query_row_stats();
        const stage_order stream = warp_uniform(smem.stream);
        const int heads = warp_uniform(smem.heads);
        const skl_cuda_argument &other = other_argument<OF_B>(params);
        for (int h = 0, n = 0; h < heads; h++) {
            barrier_wait(smem.other.rows_full, smem.changes(h, other) % 2);
            barrier_wait(smem.wrt.rows_full, 0);
            for (int s = 0; s < stream.masked_stages; s++, n++)
                add_stage<true>(n, s);
            for (int s = stream.masked_stages; s < stream.stages; s++, n++)
                add_stage<false>(n, s);
        }
        fence_operand(gradient);
    }

    /* The KL of an own query that the sums are of. */
    __device__ void store_kl(int half, int row) const
    {
        const row_tile<2, DK> &tile = smem.tile;
        const skl_row_state state =
            merge_lanes({0.0F, sums[half].l_a, 0.0F, sums[half].l_b, sums[half].w}); /* less both LSEs */
        if (row < smem.count && threadIdx.x % 4 == 0)
            skl_row_set(&params.call.rows.kl, &tile.sequence, tile.head, tile.first + row,
                        skl_kl_report(skl_state_kl(&state)));
    }

    /* What comes from upstream for an own query: nothing where it sees no key. */
    __device__ float upstream_of(int row) const
    {
        const range32 sees = smem.stream.band.of(row);
        return sees.begin < sees.end ? row_stat(params, 3, smem.tile.sequence, smem.tile.head, smem.tile.first + row)
                                     : 0.0F;
    }

    /* Padding keys have a gradient of 0, whatever was multiplied for them. */
    __device__ void store()
    {
        const row_tile<2, DK> &tile = smem.tile;
        const skl_side side = side_of(params);
        const skl_output out = DK ? *side.dk : *side.dq;
        const int64_t base =
            SKL_ROW(out, tile.sequence.batch, tile.head, DK ? tile.sequence.key_begin : tile.sequence.query_begin) +
            tile.first * out.stride_row;
#pragma unroll
        for (int half = 0; half < 2; half++) {
            const int row = acc_row<1>(0, half);
            if (!DK && OF_B && params.kl_in_backward)
                store_kl(half, row);
#pragma unroll
            for (int e = 0; e < DIM / 4 && DK && row >= smem.count; e++)
                gradient[e / 2][half * 2 + e % 2] = 0.0F;
            if (tile.first + row >= tile.stored)
                continue;
            const float weight = DK ? 1.0F : upstream_of(row);
            store_row<ELEMENT>(out.data, base + row * out.stride_row, side, gradient, half,
                               unit.value() * side.scale * weight);
        }
    }
};

/* ---- Kernel ------------------------------------------------------------------------------------------------- */

template <typename ELEMENT, int DIM, bool DK, bool OF_B, bool CAPPED>
__global__ void __launch_bounds__(WIDE_THREADS, 1)
    wide_kernel(const __grid_constant__ backward_params params, const __grid_constant__ wide_maps maps)
{
#ifdef __CUDA_ARCH_FEAT_SM90_ALL
    extern __shared__ __align__(1024) unsigned char raw[];
    wide_smem<DIM, DK> &smem = *(wide_smem<DIM, DK> *)(void *)raw;
    row_tile<2, DK> here;
    if (!here.find(params))
        return;
    if (threadIdx.x == 0) {
        const skl_sequence &s = here.sequence;
        const int64_t last = skl_min(here.first + OWN_ROWS, here.rows) - 1;
        const skl_band band = DK ? skl_query_band(&params.problem, &s) : skl_key_band(&params.problem, &s);
        smem.tile = here;
        smem.count = (int)(last + 1 - here.first);
        smem.stream = {};
        if (smem.count > 0)
            smem.stream = in_stages(stream_for(band, here.first, last), DK ? s.query_begin : s.key_begin);
        smem.heads = smem.stream.stages == 0 ? 0 : DK ? wrt_argument<OF_B>(params).heads_per_key : 1;
        smem.wrt.init(CONSUMERS * 128);
        smem.other.init(CONSUMERS * 4);
        for (int stage = 0; stage < smem.WRT_DEPTH; stage++)
            barrier_init(smem.stats_full[stage], 32);
        barrier_init_fence();
    }
    __syncthreads();
    const int group = warpgroup_index();
    if (group == CONSUMERS) {
        reg_dealloc<56>();
        const int warp = warp_in_warpgroup();
        if (warp == 0)
            produce_row_stats<ELEMENT, DIM, DK, OF_B>(params, smem);
        else if (warp == 1)
            load_argument<DIM, DK>(smem, wrt_argument<OF_B>(params), maps.wrt_rows, maps.wrt_stream, smem.wrt_rows,
                                   smem.wrt_stages, smem.wrt);
        else if (warp == 2)
            load_argument<DIM, DK>(smem, other_argument<OF_B>(params), maps.other_rows, maps.other_stream,
                                   smem.other_rows, smem.other_stages, smem.other);
    } else {
        reg_alloc<224>();
        wide_warpgroup<ELEMENT, DIM, DK, OF_B, CAPPED> own = {params, smem, group};
        own.run();
        own.store();
    }
#endif
}

template <typename ELEMENT, int DIM, bool DK, bool OF_B, bool CAPPED>
cudaError_t launch_wide_tiles(const backward_params &params, const wide_maps &maps)
{
    constexpr int MEMORY = sizeof(wide_smem<DIM, DK>);
    static_assert(MEMORY <= 227 * 1024, "shared memory per block");
    const cudaError_t error = cudaFuncSetAttribute(wide_kernel<ELEMENT, DIM, DK, OF_B, CAPPED>,
                                                   cudaFuncAttributeMaxDynamicSharedMemorySize, MEMORY);
    if (error != cudaSuccess)
        return error;
    const skl_problem &p = params.problem;
    const dim3 blocks =
        grid_of(p.batch, row_tile<2, DK>::heads(params), skl_ceil_div(DK ? p.len_k : p.len_q, OWN_ROWS));
    wide_kernel<ELEMENT, DIM, DK, OF_B, CAPPED><<<blocks, WIDE_THREADS, MEMORY, params.call.stream>>>(params, maps);
    return cudaPeekAtLastError();
}

/* dq or dk; dq of B with the KL. */
template <typename ELEMENT, int DIM, bool DK>
cudaError_t launch_wide(const char *kernel, const skl_cuda_params *params, const skl_cuda_launch *launch)
{
    const backward_params own = backward_params_of(params, launch);
    const skl_problem *const p = &own.problem;
    const bool of_b = is_grad_of_b(own), capped = own.a.capped || own.b.capped;
    const skl_cuda_argument *const wrt = of_b ? &own.b : &own.a;
    const skl_cuda_argument *const other = of_b ? &own.a : &own.b;
    constexpr int QUERY_ROWS = DK ? STAGE_ROWS : OWN_ROWS, KEY_ROWS = DK ? OWN_ROWS : STAGE_ROWS;
    wide_maps maps;
    if (!encode_queries(DK ? &maps.wrt_stream : &maps.wrt_rows, p, wrt, QUERY_ROWS, ELEMENT()) ||
        !encode_queries(DK ? &maps.other_stream : &maps.other_rows, p, other, QUERY_ROWS, ELEMENT()) ||
        !encode_keys(DK ? &maps.wrt_rows : &maps.wrt_stream, p, wrt, KEY_ROWS, ELEMENT()) ||
        !encode_keys(DK ? &maps.other_rows : &maps.other_stream, p, other, KEY_ROWS, ELEMENT()))
        return cudaErrorInvalidValue; /* select.c has tried */
    if (DK)
        record_launch(kernel, capped ? SKL_VARIANT_DK_SOFTCAP : SKL_VARIANT_DK, 1);
    else
        record_launch(kernel, capped ? SKL_VARIANT_DQ_SOFTCAP : SKL_VARIANT_DQ, 1);
    if (capped)
        return of_b ? launch_wide_tiles<ELEMENT, DIM, DK, true, true>(own, maps)
                    : launch_wide_tiles<ELEMENT, DIM, DK, false, true>(own, maps);
    return of_b ? launch_wide_tiles<ELEMENT, DIM, DK, true, false>(own, maps)
                : launch_wide_tiles<ELEMENT, DIM, DK, false, false>(own, maps);
}

} // namespace sm90

#endif
