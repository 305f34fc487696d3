/* Gradients of an indexer from its G (index_work.cuh) on tensor cores by mma.sync, sm_80 and up. Own rows stay in
 * registers, the other side's are streamed as in every mma.sync kernel (tile.cuh); A of a step says which pairs of G
 * count, and those, as A operand from registers, times the same step go into sums that stay in registers.
 *
 *   queries   own: 64 M queries of an index head; streamed: the keys that they see; G is loaded a step ahead
 *   keys      own: 64 M keys; streamed: every index head of each stage's queries, whose G stays in shared memory
 *   regs      own rows (M DIM / 4), sums (M DIM / 2; of keys for 128 dimensions at most), A (8 M), G of a step (4 M)
 *   shared    2 stages, and G of one for keys: 48 KB at most
 *
 * What of G counts for keys has weights and upstream gradients in it, of any size: f16 takes it in a unit that moves
 * (facts.cuh). */
#ifndef SKL_CUDA_SM80_INDEXER_DENSE_GRADIENTS_CUH
#define SKL_CUDA_SM80_INDEXER_DENSE_GRADIENTS_CUH

#include "cuda/sm80/attention/backward.cuh"
#include "cuda/common/indexer/strip_gradients.cuh"

namespace sm80
{

/* A pair that is not seen weighs 0, but 0 times a value that is not finite is NaN. What of a stage is not finite
 * becomes 0: whoever sees such a row has NaN in its G. Not needed where every pair of the stage is seen. */
template <typename ELEMENT, int DIM> __device__ inline void clean_rows(staged_rows<DIM> &rows)
{
    for (int at = (int)threadIdx.x; at < STAGE_ROWS<DIM> * DIM / 8; at += THREADS) {
        uint4 &chunk = rows.chunks[at / (DIM / 8)][at % (DIM / 8)];
        if (!all_finite<ELEMENT>(chunk))
            chunk = make_uint4(0, 0, 0, 0);
    }
    __syncthreads();
}

/* What counts of a 16 x 16 block of G: g(part) as the parts of an A operand, weights(block) of two columns of 8. */
template <typename ELEMENT, int M, typename G, typename WEIGHTS>
__device__ inline void weigh_block(uint32_t (&h)[4], const logits<M, 2> &a, int m, float least, G g, WEIGHTS weights)
{
#pragma unroll
    for (int part = 0; part < 4; part++) {
        const float(&pair)[4] = a.at[m][part / 2];
        h[part] = weigh_pair<ELEMENT>(g(part), pair[part % 2 * 2], pair[part % 2 * 2 + 1], weights(part / 2), least);
    }
}

__device__ inline float2 pair_of(const uint4 &g, int part)
{
    return unpack(part == 0 ? g.x : part == 1 ? g.y : part == 2 ? g.z : g.w, __half());
}

/* With what f16 has left of it in a second plane. */
template <int PLANES> __device__ inline float2 pair_of(const uint4 (&g)[PLANES], int part)
{
    const float2 kept = pair_of(g[0], part), rest = pair_of(g[PLANES - 1], part);
    return PLANES == 1 ? kept : make_float2(kept.x + rest.x, kept.y + rest.y);
}

/* ---- Queries ------------------------------------------------------------------------------------------------ */

template <int DIM> struct query_smem {
    staged_rows<DIM> stages[STAGES];
    query_slot place; /* here, and not in the registers of every thread */
};

template <typename ELEMENT, int DIM, int M>
__global__ void __launch_bounds__(THREADS, 2) index_query_kernel(const __grid_constant__ index_params params)
{
    constexpr int OWN_ROWS = WARPS * 16 * M, PARTS = SIDE / OWN_ROWS, ROWS = STAGE_ROWS<DIM>;
    static_assert(OWN_ROWS <= STAGES * ROWS, "own rows come through the stages");
    extern __shared__ __align__(128) unsigned char raw[];
    query_smem<DIM> &smem = *(query_smem<DIM> *)(void *)raw;
    const unsigned heads = (unsigned)params.problem.index_heads, item = blockIdx.x / PARTS;
    const unsigned slot = (unsigned)params.strip_first + item / heads;
    const int own_first = (int)(blockIdx.x % PARTS) * OWN_ROWS; /* row of the slot */
    if (threadIdx.x == 0)
        smem.place = slot_at(params, slot, (unsigned)params.problem.heads_s);
    __syncthreads();
    const query_slot &at = smem.place;
    if (at.count <= own_first)
        return;
    const skl_cuda_argument &side = params.b;
    const skl_sequence &s = at.sequence;
    const int head = at.head * (int)heads + (int)(item % heads);
    const int first = at.tile_begin * SIDE, stages = (at.tile_end - at.tile_begin) * (SIDE / ROWS);
    const row_source<ELEMENT> queries = {(const ELEMENT *)side.q.data +
                                             SKL_ROW(side.q, s.batch, head, s.query_begin + at.first + own_first),
                                         side.q.stride_row, side.dim};
    const row_source<ELEMENT> keys = {(const ELEMENT *)side.k.data +
                                          SKL_ROW(side.k, s.batch, at.head / side.heads_per_key, s.key_begin + first),
                                      side.k.stride_row, side.dim};
    const int key_count = (int)s.key_count - first;
    own_rows<DIM, M> own;
    load_own(own, smem.stages, queries, at.count - own_first);
    own_gradient<DIM, M> sums = {};
    const float least = params.least;
    const int first_block = own_first / 16 + (int)threadIdx.x / 32 * M;
    uint4 g[M];
    const auto load_g = [&](int step) { /* of 16 keys */
#pragma unroll
                                        for (int m = 0; m < M; m++)
                                            g[m] = __ldg(g_block(params, slot, at.tile_begin + step / G_BLOCKS,
                                                                 first_block + m, step % G_BLOCKS));
    };
    if (stages > 0) {
        copy_rows(smem.stages[0], keys, 0, key_count);
        load_g(0);
    }
    cp_async_commit();
#pragma unroll 1
    for (int n = 0; n < stages; n++) {
        cp_async_wait<0>();
        __syncthreads(); /* this stage is complete, and the other one free */
        if (n + 1 < stages)
            copy_rows(smem.stages[(n + 1) % STAGES], keys, (n + 1) * ROWS, key_count);
        cp_async_commit();
        staged_rows<DIM> &rows = smem.stages[n % STAGES];
        if (!is_full(at, first + n * ROWS, ROWS))
            clean_rows<ELEMENT>(rows);
#pragma unroll 1
        for (int step = 0; step < ROWS / 16; step++) {
            logits<M, 2> a;
            multiply<ELEMENT>(a, own, logit_operand<2>(rows), step * 16);
            uint32_t h[M][4];
#pragma unroll
            for (int m = 0; m < M; m++)
                weigh_block<ELEMENT>(
                    h[m], a, m, least, [&](int part) { return pair_of(g[m], part); },
                    [](int) { return make_float2(1.0F, 1.0F); });
            load_g(min(n * (ROWS / 16) + step + 1, stages * (ROWS / 16) - 1));
            add_operand<ELEMENT, DIM>(sums, h, gradient_operand(rows), step * 16);
        }
    }
    const query_gradients<ELEMENT, DIM> gradients = {params, at, head};
#pragma unroll
    for (int m = 0; m < M; m++)
#pragma unroll
        for (int half = 0; half < 2; half++)
            gradients.store_row(own_first + acc_row<M>(m, half),
                                [&](int c, int parity) { return sums.sum[m][c][half * 2 + parity]; });
}

/* ---- Keys --------------------------------------------------------------------------------------------------- */

template <int DIM, int M, int PLANES> struct key_smem {
    static constexpr int ROWS = STAGE_ROWS<DIM>;
    staged_rows<DIM> stages[STAGES];
    uint4 g[ROWS / 16][M][PLANES][THREADS]; /* every thread's own part of a stage's G, transposed */
    float weights[STAGES][ROWS];            /* of the queries of a stage */
    float factors[SIDE];                    /* what is the same for all index heads of a slot's queries */
    query_slot place;                       /* these too are not in the registers of every thread */
    key_work work;
};

/* Dimensions of dk that a launch gives: sums of more have no room beside the own rows. */
template <int DIM> constexpr int KEY_WIDTH = DIM < 128 ? DIM : 128;

/* The upstream gradient of a query that sees one of the keys [first, first + count), in G's unit; 0 of any other:
 * what such a one holds must not move f16's unit. */
__device__ inline float factor_of(const index_params &params, const query_slot &at, int row, int first, int count)
{
    const range32 sees = visible_range(params, at, row, first);
    const bool some = sees.begin < sees.end && meets(sees, 0, count);
    return some ? upstream_of(params, at, at.first + row) * G_UNIT : 0.0F;
}

/* A slot's queries as they are streamed: a stage of rows, all index heads of it, the next stage of rows. */
template <typename ELEMENT, int DIM, int M> struct query_stream {
    static constexpr int ROWS = STAGE_ROWS<DIM>;
    const index_params &params;
    key_smem<DIM, M, G_PLANES<ELEMENT>> &smem;
    int heads;

    /* Starts copying the rows that come as number n; returns the weight of the thread's row of them. What is not
     * finite becomes 0: where it counts, G is NaN. */
    __device__ float copy(int n) const
    {
        const query_slot &at = smem.place;
        const skl_sequence &s = at.sequence;
        const skl_input &q = params.b.q, &w = params.call.inputs.w_s;
        const int first = n / heads * ROWS, head = n % heads;
        const row_source<ELEMENT> queries = {
            (const ELEMENT *)q.data + SKL_ROW(q, s.batch, at.head * heads + head, s.query_begin + at.first),
            q.stride_row, params.b.dim};
        copy_rows(smem.stages[n % STAGES], queries, first, at.count);
        const int row = first + (int)threadIdx.x % ROWS;
        const int64_t from = SKL_ROW(w, s.batch, at.head, s.query_begin + query_of(at, row)) + head;
        const float weight = skl_load(w.data, params.problem.dtype_w, from) * smem.factors[row];
        return fabsf(weight) < INFINITY ? weight : 0.0F;
    }

    /* Behind its copy, as late as may be: the weight comes from memory. */
    __device__ void keep(int n, float weight) const
    {
        if (threadIdx.x < ROWS)
            smem.weights[n % STAGES][threadIdx.x] = weight;
    }
};

template <typename ELEMENT, int DIM, int M>
__global__ void __launch_bounds__(THREADS, 2) index_key_kernel(const __grid_constant__ index_params params)
{
    constexpr int OWN_ROWS = WARPS * 16 * M, PARTS = SIDE / OWN_ROWS, ROWS = STAGE_ROWS<DIM>, STEPS = ROWS / 16;
    constexpr int PLANES = G_PLANES<ELEMENT>, WIDTH = KEY_WIDTH<DIM>;
    static_assert(OWN_ROWS <= STAGES * ROWS, "own rows come through the stages");
    extern __shared__ __align__(128) unsigned char raw[];
    key_smem<DIM, M, PLANES> &smem = *(key_smem<DIM, M, PLANES> *)(void *)raw;
    const int own_first = (int)(blockIdx.x % PARTS) * OWN_ROWS; /* row of the key tile */
    if (threadIdx.x == 0)
        smem.work = key_work_of_block<ROWS>(params, blockIdx.x / PARTS);
    __syncthreads();
    const key_work &work = smem.work;
    const int own_key = work.tile * SIDE + own_first, own_count = (int)work.sequence.key_count - own_key;
    if (work.stages == 0 || own_count <= 0)
        return;
    const skl_input &k = params.b.k;
    const row_source<ELEMENT> keys = {
        (const ELEMENT *)k.data + SKL_ROW(k, work.sequence.batch, work.key_head, work.sequence.key_begin + own_key),
        k.stride_row, params.b.dim};
    own_rows<DIM, M> own;
    load_own(own, smem.stages, keys, own_count);
    own_gradient<WIDTH, M> sums = {};
    gradient_unit<ELEMENT> unit;
    const float least = params.least;
    const int heads = (int)params.problem.index_heads;
    const query_stream<ELEMENT, DIM, M> queries = {params, smem, heads};
    for_slots(params, work, [&](int slot) {
        __syncthreads(); /* nobody looks at the last slot any more */
        if (threadIdx.x == 0)
            smem.place = slot_at(params, (unsigned)slot, (unsigned)params.problem.heads_s);
        __syncthreads();
        const query_slot &at = smem.place;
        smem.factors[threadIdx.x] = factor_of(params, at, (int)threadIdx.x, own_key, OWN_ROWS);
        __syncthreads();
        const bool whole = is_full(at, own_key, OWN_ROWS);
        const int stages = (at.count + ROWS - 1) / ROWS * heads; /* none if there are no queries */
        if (stages > 0)
            queries.keep(0, queries.copy(0));
        cp_async_commit();
#pragma unroll 1
        for (int n = 0; n < stages; n++) {
            if (n % heads == 0)
#pragma unroll
                for (int e = 0; e < STEPS * M; e++) {
                    const uint4 *const g = g_block(params, (unsigned)slot, work.tile, n / heads * STEPS + e / M,
                                                   own_first / 16 + (int)threadIdx.x / 32 * M + e % M);
#pragma unroll
                    for (int plane = 0; plane < PLANES; plane++)
                        smem.g[e / M][e % M][plane][threadIdx.x] = transpose(__ldg(g + plane * params.rest_at));
                }
            cp_async_wait<0>();
            __syncthreads(); /* this stage is complete, and the other one free */
            const float next_weight = n + 1 < stages ? queries.copy(n + 1) : 0.0F;
            cp_async_commit();
            staged_rows<DIM> &rows = smem.stages[n % STAGES];
            const float(&weights)[ROWS] = smem.weights[n % STAGES];
            if (!whole)
                clean_rows<ELEMENT>(rows);
            if (unit.MOVES) { /* |S - P| <= 1 */
                const int lane = (int)threadIdx.x % 32;
                unit.fit(sums, warp_max(fmaxf(fabsf(weights[lane]), fabsf(weights[ROWS - 32 + lane]))) / G_UNIT);
            }
            const float inverse = unit.inverse();
#pragma unroll 1
            for (int step = 0; step < STEPS; step++) {
                logits<M, 2> a;
                multiply<ELEMENT>(a, own, logit_operand<2>(rows), step * 16);
                uint32_t h[M][4];
#pragma unroll
                for (int m = 0; m < M; m++) {
                    uint4 g[PLANES];
#pragma unroll
                    for (int plane = 0; plane < PLANES; plane++)
                        g[plane] = smem.g[step][m][plane][threadIdx.x];
                    weigh_block<ELEMENT>(
                        h[m], a, m, least, [&](int part) { return pair_of(g, part); },
                        [&](int side) {
                            const float2 pair = *(const float2 *)&weights[step * 16 + acc_column(side, 0)];
                            return make_float2(pair.x * inverse, pair.y * inverse);
                        });
                }
                add_operand<ELEMENT, DIM>(
                    sums, h, at_chunk<DIM>(gradient_operand(rows), 0, WIDTH < DIM ? (int)params.dim_first / 8 : 0),
                    step * 16);
            }
            queries.keep(n + 1, next_weight);
        }
    });
    const float value = unit.value();
#pragma unroll
    for (int m = 0; m < M; m++)
#pragma unroll
        for (int half = 0; half < 2; half++)
            add_key_row<WIDTH>(params, work, own_first + acc_row<M>(m, half), (int)params.dim_first,
                               [&](int c, int parity) { return sums.sum[m][c][half * 2 + parity] * value; });
}

} // namespace sm80

#endif
