/* Gradients of one side for heads of more than 128 dimensions on Hopper's tensor cores (sm_90a): 16-bit types, one
 * teacher head a student head. Split, as sm80/backward.cuh is: one kernel gives dq with queries as own rows, its
 * mirror image dk with keys as own rows (KEYS). Nothing is summed in memory: the bits are the same on every run, and
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
#ifndef SKL_CUDA_SM90_WIDE_CUH
#define SKL_CUDA_SM90_WIDE_CUH

#include "cuda/sm90/gradient.cuh"
#include "cuda/sm90/tensor_map.cuh"

namespace sm90
{

constexpr int WIDE_THREADS = 128 * (CONSUMERS + 1);
constexpr int OWN_ROWS = CONSUMERS * 64;

/* What a block knows of streamed queries, stage by stage, or of its own ones and of marks of streamed keys. */
template <int DEPTH, bool KEYS> struct wide_facts {
    stage_facts staged[DEPTH];
};

template <int DEPTH> struct wide_facts<DEPTH, false> {
    query_facts own[OWN_ROWS]; /* LSEs in base 2; upstream gradients wait for the end */
    alignas(8) float marks[DEPTH][STAGE];
};

/* Of one argument: own rows are there; a stage's rows are; all have left it. */
template <int DEPTH> struct wide_barriers {
    uint64_t rows_full, full[DEPTH], empty[DEPTH];

    __device__ void init(int leaving)
    {
        barrier_init(rows_full, 1);
        for (int at = 0; at < DEPTH; at++) {
            barrier_init(full[at], 1);
            barrier_init(empty[at], leaving);
        }
    }
};

template <int DIM, bool KEYS> struct wide_block {
    static constexpr int OWN_DEPTH = 2, OTHER_DEPTH = DIM == 192 ? 2 : 1;
    lying_rows<DIM / 64> own_rows, other_rows;
    row_stage<DIM> own_stages[OWN_DEPTH], other_stages[OTHER_DEPTH];
    wide_facts<OWN_DEPTH, KEYS> facts;
    wide_barriers<OWN_DEPTH> own;
    wide_barriers<OTHER_DEPTH> other;
    uint64_t known[OWN_DEPTH]; /* facts of a stage are there, an edge is clean */
    own_place<2, KEYS> place;  /* here, and not in the registers of every thread */
    int count;                 /* own rows that there are */
    int heads;                 /* query heads whose stages the block meets: none if there is nothing to meet */
    row_stream stream;

    __device__ int query_head(int h) const
    {
        return (int)place.head * heads + h;
    }

    /* How often an argument's own rows have changed before query head h of the block. */
    __device__ int changes(int h, const skl_cuda_argument &argument) const
    {
        return KEYS ? query_head(h) / argument.heads_per_key - query_head(0) / argument.heads_per_key : 0;
    }

    __device__ bool has_new_rows(int h, const skl_cuda_argument &argument) const
    {
        return h == 0 || changes(h, argument) > changes(h - 1, argument);
    }
};

/* Own rows are queries or keys, streamed ones keys or queries. */
struct wide_maps {
    CUtensorMap own_rows, other_rows, own_stream, other_stream;
};

/* ---- Staging ------------------------------------------------------------------------------------------------ */

/* All copies of one argument, by one warp. */
template <int DIM, bool KEYS, int DEPTH>
__device__ inline void copy_argument(const wide_block<DIM, KEYS> &block, const skl_cuda_argument &argument,
                                     const CUtensorMap &rows_map, const CUtensorMap &stream_map,
                                     lying_rows<DIM / 64> &rows, row_stage<DIM> (&stages)[DEPTH],
                                     wide_barriers<DEPTH> &barriers)
{
    const skl_sequence &sequence = block.place.sequence;
    const stage_order stream = common(block.stream);
    const int batch = common((int)sequence.batch), heads = common(block.heads);
    for (int h = 0, n = 0; h < heads; h++) {
        const int head = common(block.query_head(h)), key_head = head / argument.heads_per_key;
        if (block.has_new_rows(h, argument)) {
            const int first = common((int)((KEYS ? sequence.key_begin : sequence.query_begin) + block.place.first));
            if (h > 0) /* no product with the former ones is under way */
                barrier_wait(barriers.empty[(n - 1) % DEPTH], (n - 1) / DEPTH % 2);
            barrier_expect(barriers.rows_full, rows.SIZE);
            for (int part = 0; part < DIM / 64; part++)
                copy_box(rows.parts[part], rows_map, part * 64, first, KEYS ? key_head : head, batch,
                         barriers.rows_full);
        }
        for (int s = 0; s < stream.stages; s++, n++) {
            const int at = n % DEPTH, row = stream.row_of(s);
            barrier_wait(barriers.empty[at], n / DEPTH % 2 ^ 1);
            barrier_expect(barriers.full[at], (int)sizeof stages[at]);
#pragma unroll
            for (int half = 0; half < DIM / 64; half++)
                copy_box(stages[at].halves[half], stream_map, half * 64, row, KEYS ? head : key_head, batch,
                         barriers.full[at]);
        }
    }
}

/* Facts of streamed queries, and edges, by one warp. */
template <typename ELEMENT, int DIM, bool KEYS, bool SECOND>
__device__ inline void know_stages(const skl_cuda_params &params, wide_block<DIM, KEYS> &block)
{
    const row_stream &stream = block.stream;
    const int stages = KEYS ? stream.stages : stream.edges; /* of streamed keys there is no more to know */
    for (int n = 0; n < stages * block.heads; n++) {
        const int at = n % block.OWN_DEPTH, turn = n / block.OWN_DEPTH % 2, s = n % stages;
        float(*marks)[STAGE];
        if constexpr (KEYS) {
            const lane_facts loaded = load_stage_facts(params, block.place.sequence, stream, block.count,
                                                       block.query_head(n / stages), stream.place_of(s) * STAGE);
            barrier_wait(block.own.empty[at], turn ^ 1); /* meanwhile the facts come */
            stage_facts &facts = block.facts.staged[at];
            store_stage_facts(facts, loaded);
            marks = SECOND ? &facts.lse_b : &facts.lse_a;
        } else {
            barrier_wait(block.own.empty[at], turn ^ 1);
            marks = &block.facts.marks[at];
            for (int row = (int)threadIdx.x % 32; row < STAGE; row += 32)
                (*marks)[row] = 0.0F;
        }
        if (s < stream.edges) {
            __syncwarp(); /* a mark that becomes NaN has been written */
            barrier_wait(block.own.full[at], turn);
            clean_rows<ELEMENT>(block.own_stages[at], *marks);
            async_fence();
        }
        barrier_arrive(block.known[at]); /* every lane: it wrote what others read */
    }
}

/* ---- Own rows ----------------------------------------------------------------------------------------------- */

/* Queries that are own rows: their facts belong to rows of the logits, and they are weighed when their gradient is
 * stored. */
template <bool SECOND> struct own_queries {
    query_facts query[2];
    const float (&marks)[STAGE]; /* of streamed keys: NaN for those that are not finite */
    row_sums (&sums)[2];
    float2 mark;

    template <bool EDGE> __device__ void turn_to(int block)
    {
        mark = EDGE ? load_shared_2(marks[column_of(block, 0)]) : make_float2(0.0F, 0.0F);
    }

    __device__ query_facts of(int half, int parity) const
    {
        query_facts facts = query[half];
        (SECOND ? facts.lse_b : facts.lse_a) -= parity ? mark.y : mark.x;
        return facts;
    }

    __device__ void meet(int half, float u, float v)
    {
        if (SECOND)
            add_pair(sums[half], u, v);
    }
};

template <typename ELEMENT, int DIM, bool KEYS, bool SECOND, bool CAPPED> struct wide_group {
    const skl_cuda_params &params;
    wide_block<DIM, KEYS> &block;
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
    __device__ void know_own_rows()
    {
        const int row = (int)threadIdx.x / 2;
        if (threadIdx.x % 2 == 0 && row < block.count) {
            float fact[3];
#pragma unroll
            for (int which = 0; which < 3; which++)
                fact[which] = fact_of(params, which, block.place.sequence, block.place.head, block.place.first + row);
            block.facts.own[row] = {fact[0] * SKL_LOG2E, fact[1] * SKL_LOG2E, fact[2], 1.0F};
        }
        barrier_of(1 + group, 128);
    }

    /* What is known of a stage's queries. Upstream gradients of own ones wait for the end. */
    __device__ auto queries_of_stage(int at)
    {
        if constexpr (KEYS) {
            return streamed_queries<SECOND>{block.facts.staged[at]};
        } else {
            own_queries<SECOND> queries = {{}, block.facts.marks[at], sums};
#pragma unroll
            for (int half = 0; half < 2; half++) {
                queries.query[half] = load_facts(block.facts.own[own_row<1>(0, half)]);
                queries.query[half].grad = 1.0F;
            }
            return queries;
        }
    }

    /* Makes room for the stage's gradients: |S - P| <= 1, and no more will come; those of a first argument have no
     * bound, and are looked at. */
    template <bool EDGE> __device__ void fit_unit(const logits_of_stage &logits, int at)
    {
        settle(gradient);
        if constexpr (!SECOND)
            unit.fit(*this, largest_pair<EDGE, SECOND, CAPPED>(params, logits, block.stream.band, block.count,
                                                               queries_of_stage(at)));
        else if constexpr (KEYS)
            unit.fit(*this, load_shared(block.facts.staged[at].largest));
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
    template <bool EDGE> __device__ void add_stage(int n, int s)
    {
        const int own_at = n % block.OWN_DEPTH, own_turn = n / block.OWN_DEPTH % 2;
        const int other_at = n % block.OTHER_DEPTH;
        logits_of_stage logits = {EDGE ? block.stream.place_of(s) * STAGE : 0};
        barrier_wait(block.other.full[other_at], n / block.OTHER_DEPTH % 2);
        start_logits(logits.other, &block.other_rows, &block.other_stages[other_at]);
        barrier_wait(block.own.full[own_at], own_turn);
        if (KEYS || EDGE)
            barrier_wait(block.known[own_at], own_turn);
        start_logits(logits.own, &block.own_rows, &block.own_stages[own_at]);
        wgmma_wait<1>();
        barrier_arrive_if(block.other.empty[other_at], threadIdx.x % 32 == 0);
        wgmma_wait<0>();
        settle(logits.other);
        settle(logits.own);
        if (unit.MOVES)
            fit_unit<EDGE>(logits, own_at);
        uint32_t g[4][4];
        const float inverse = unit.inverse(); /* times upstream gradients it might overflow */
        weigh_pairs<EDGE, SECOND, CAPPED>(
            params, logits, block.stream.band, queries_of_stage(own_at), [&](int i, int half, float low, float high) {
                g[i / 2][i % 2 * 2 + half] = pack(low * inverse, high * inverse, ELEMENT());
            });
        wgmma_fence();
        const uint32_t rows = column_operand(&block.own_stages[own_at], STAGE * 128);
#pragma unroll
        for (int step = 0; step < STAGE / 16; step++)
            wgmma<true>(gradient, g[step], descriptor_of(rows + step * 16 * 128 / 16), 1, ELEMENT());
        wgmma_commit();
        wgmma_wait<0>();
        barrier_arrive(block.own.empty[own_at]); /* every lane: it read facts or marks */
    }

    __device__ void run()
    {
#pragma unroll
        for (int e = 0; e < DIM / 2; e++)
            gradient[e / 4][e % 4] = 0.0F;
        sums[0] = sums[1] = {};
        if constexpr (!KEYS)
            know_own_rows();
        const stage_order stream = common(block.stream);
        const int heads = common(block.heads);
        const skl_cuda_argument &other = other_of<SECOND>(params);
        for (int h = 0, n = 0; h < heads; h++) {
            barrier_wait(block.other.rows_full, block.changes(h, other) % 2);
            barrier_wait(block.own.rows_full, 0);
            for (int s = 0; s < stream.edges; s++, n++)
                add_stage<true>(n, s);
            for (int s = stream.edges; s < stream.stages; s++, n++)
                add_stage<false>(n, s);
        }
        settle(gradient);
    }

    /* The KL of an own query that the sums are of. */
    __device__ void store_kl(int half, int row) const
    {
        const own_place<2, KEYS> &place = block.place;
        const skl_row_state state =
            merge_lanes({0.0F, sums[half].l_a, 0.0F, sums[half].l_b, sums[half].w}); /* less both LSEs */
        if (row < block.count && threadIdx.x % 4 == 0)
            skl_row_set(&params.call.rows.kl, &place.sequence, place.head, place.first + row,
                        skl_kl_report(skl_state_kl(&state)));
    }

    /* What comes from upstream for an own query: nothing where it sees no key. */
    __device__ float upstream_of(int row) const
    {
        const range32 sees = block.stream.band.of(row);
        return sees.begin < sees.end
                   ? fact_of(params, 3, block.place.sequence, block.place.head, block.place.first + row)
                   : 0.0F;
    }

    /* Padding keys have a gradient of 0, whatever was multiplied for them. */
    __device__ void store()
    {
        const own_place<2, KEYS> &place = block.place;
        const skl_side side = skl_cuda_side(&params);
        const skl_output out = KEYS ? *side.dk : *side.dq;
        const int64_t base = SKL_ROW(out, place.sequence.batch, place.head,
                                     KEYS ? place.sequence.key_begin : place.sequence.query_begin) +
                             place.first * out.stride_row;
#pragma unroll
        for (int half = 0; half < 2; half++) {
            const int row = own_row<1>(0, half);
            if (!KEYS && SECOND && params.kl_in_sweep)
                store_kl(half, row);
#pragma unroll
            for (int e = 0; e < DIM / 4 && KEYS && row >= block.count; e++)
                gradient[e / 2][half * 2 + e % 2] = 0.0F;
            if (place.first + row >= place.stored)
                continue;
            const float weight = KEYS ? 1.0F : upstream_of(row);
            store_row<ELEMENT>(out.data, base + row * out.stride_row, side, gradient, half,
                               unit.value() * side.scale * weight);
        }
    }
};

/* ---- Kernel ------------------------------------------------------------------------------------------------- */

template <typename ELEMENT, int DIM, bool KEYS, bool SECOND, bool CAPPED>
__global__ void __launch_bounds__(WIDE_THREADS, 1)
    wide_kernel(const __grid_constant__ skl_cuda_params params, const __grid_constant__ wide_maps maps)
{
#ifdef __CUDA_ARCH_FEAT_SM90_ALL
    extern __shared__ __align__(1024) unsigned char raw[];
    wide_block<DIM, KEYS> &block = *(wide_block<DIM, KEYS> *)(void *)raw;
    own_place<2, KEYS> here;
    if (!here.find(params))
        return;
    if (threadIdx.x == 0) {
        const skl_sequence &s = here.sequence;
        const int64_t last = skl_min(here.first + OWN_ROWS, here.rows) - 1;
        const skl_band band = KEYS ? skl_query_band(&params.problem, &s) : skl_key_band(&params.problem, &s);
        block.place = here;
        block.count = (int)(last + 1 - here.first);
        block.stream = {};
        if (block.count > 0)
            block.stream = in_stages(stream_for(band, here.first, last), KEYS ? s.query_begin : s.key_begin);
        block.heads = block.stream.stages == 0 ? 0 : KEYS ? own_of<SECOND>(params).heads_per_key : 1;
        block.own.init(CONSUMERS * 128);
        block.other.init(CONSUMERS * 4);
        for (int at = 0; at < block.OWN_DEPTH; at++)
            barrier_init(block.known[at], 32);
        barrier_init_fence();
    }
    __syncthreads();
    const int group = own_group();
    if (group == CONSUMERS) {
        give_registers<56>();
        const int warp = own_warp_of_group();
        if (warp == 0)
            know_stages<ELEMENT, DIM, KEYS, SECOND>(params, block);
        else if (warp == 1)
            copy_argument<DIM, KEYS>(block, own_of<SECOND>(params), maps.own_rows, maps.own_stream, block.own_rows,
                                     block.own_stages, block.own);
        else if (warp == 2)
            copy_argument<DIM, KEYS>(block, other_of<SECOND>(params), maps.other_rows, maps.other_stream,
                                     block.other_rows, block.other_stages, block.other);
    } else {
        take_registers<224>();
        wide_group<ELEMENT, DIM, KEYS, SECOND, CAPPED> own = {params, block, group};
        own.run();
        own.store();
    }
#endif
}

template <typename ELEMENT, int DIM, bool KEYS, bool SECOND, bool CAPPED>
cudaError_t launch_wide_tiles(const skl_cuda_params *params, const wide_maps *maps)
{
    constexpr int MEMORY = sizeof(wide_block<DIM, KEYS>);
    static_assert(MEMORY <= 227 * 1024, "what a block can have");
    const cudaError_t error = cudaFuncSetAttribute(wide_kernel<ELEMENT, DIM, KEYS, SECOND, CAPPED>,
                                                   cudaFuncAttributeMaxDynamicSharedMemorySize, MEMORY);
    if (error != cudaSuccess)
        return error;
    const skl_problem *const p = &params->problem;
    const dim3 blocks =
        grid_of(p->batch, own_place<2, KEYS>::heads(*params), skl_ceil_div(KEYS ? p->len_k : p->len_q, OWN_ROWS));
    wide_kernel<ELEMENT, DIM, KEYS, SECOND, CAPPED>
        <<<blocks, WIDE_THREADS, MEMORY, params->call.stream>>>(*params, *maps);
    return cudaPeekAtLastError();
}

/* dq or dk; dq of a second argument with the KL. */
template <typename ELEMENT, int DIM, bool KEYS>
cudaError_t launch_wide(const skl_cuda_params *params, const split_launchers &otherwise)
{
    const skl_problem *const p = &params->problem;
    const bool second = skl_cuda_of_second(params);
    const skl_cuda_argument *const own = second ? &params->two : &params->one;
    const skl_cuda_argument *const other = second ? &params->one : &params->two;
    constexpr int QUERY_ROWS = KEYS ? STAGE : OWN_ROWS, KEY_ROWS = KEYS ? OWN_ROWS : STAGE;
    wide_maps maps;
    if (!encode_queries(KEYS ? &maps.own_stream : &maps.own_rows, p, own, QUERY_ROWS, ELEMENT()) ||
        !encode_queries(KEYS ? &maps.other_stream : &maps.other_rows, p, other, QUERY_ROWS, ELEMENT()) ||
        !encode_keys(KEYS ? &maps.own_rows : &maps.own_stream, p, own, KEY_ROWS, ELEMENT()) ||
        !encode_keys(KEYS ? &maps.other_rows : &maps.other_stream, p, other, KEY_ROWS, ELEMENT()))
        return KEYS ? otherwise.keys(params) : otherwise.run(params);
    if (own->capped || other->capped)
        return second ? launch_wide_tiles<ELEMENT, DIM, KEYS, true, true>(params, &maps)
                      : launch_wide_tiles<ELEMENT, DIM, KEYS, false, true>(params, &maps);
    return second ? launch_wide_tiles<ELEMENT, DIM, KEYS, true, false>(params, &maps)
                  : launch_wide_tiles<ELEMENT, DIM, KEYS, false, false>(params, &maps);
}

} // namespace sm90

#endif
