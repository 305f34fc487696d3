/* Gradients of a dense indexer from G (strip.cuh) by mma.sync, sm_80 and up: one kernel for dq and dw, one for dk.
 *
 * Both recompute A = q k^T of an index head, keep the elements of G with A > 0 (the ReLU's gate), and multiply them
 * by the same streamed rows: two products per pair and index head, no exponentials.
 *
 *              stationary rows (64 M)        streamed rows (mma_tile.cuh)          G
 *   queries    queries of an index head      the keys that they attend to          loaded a step ahead, to registers
 *   keys       keys                          all index heads of a stage's queries  in shared memory, for all heads
 *
 *   registers  stationary rows (M DIM / 4), sums (M DIM / 2; for dk of at most 128 dimensions), A (8 M), G (4 M)
 *   shared     2 stages, and for dk the G of one: at most 48 KB; 2 blocks per SM
 *
 *   cp.async   | stage n + 1                        | stage n + 2
 *   warps      | stage n, in steps of 16 rows:      | stage n + 1
 *              |   A (mma)                          |
 *              |   G [A > 0], for dk times weights  |
 *              |   sums += G [A > 0] rows (mma)     |
 *
 * For dk, G is multiplied by weights and upstream gradients of any magnitude: f16 keeps it as a multiple of a unit
 * (row_stats.cuh). */
#ifndef SKL_CUDA_SM80_STRIPS_DIFFERENCE_GRADIENTS_CUH
#define SKL_CUDA_SM80_STRIPS_DIFFERENCE_GRADIENTS_CUH

#include "cuda/sm80/attention/backward.cuh"
#include "cuda/common/strips/gradients.cuh"

namespace sm80
{

/* A masked pair has G = 0, but 0 times a non-finite value is NaN. So non-finite values of a stage are replaced by 0;
 * a query that sees such a row has NaN in its G already. Full tiles do not need it. */
template <typename ELEMENT, int DIM> __device__ inline void clear_non_finite(smem_rows<DIM> &rows)
{
    for (int n = (int)threadIdx.x; n < STAGE_ROWS<DIM> * DIM / 8; n += THREADS) {
        uint4 &chunk = rows.chunks[n / (DIM / 8)][n % (DIM / 8)];
        if (!all_finite<ELEMENT>(chunk))
            chunk = make_uint4(0, 0, 0, 0);
    }
    __syncthreads();
}

/* The A operand of a 16 x 16 block of G [A > 0], times weights. g(reg) is the pair of G in register `reg` of the
 * operand, weights(block) the weights of the thread's two columns in a block of 8. */
template <typename ELEMENT, int M, typename G, typename WEIGHTS>
__device__ inline void gate_block(uint32_t (&gated)[4], const logits<M, 2> &a, int m, float least, G g,
                                  WEIGHTS weights)
{
#pragma unroll
    for (int reg = 0; reg < 4; reg++) {
        const float(&pair)[4] = a.at[m][reg / 2];
        gated[reg] = gate_pair<ELEMENT>(g(reg), pair[reg % 2 * 2], pair[reg % 2 * 2 + 1], weights(reg / 2), least);
    }
}

__device__ inline float2 g_pair(const uint4 &g, int reg)
{
    return unpack(reg == 0 ? g.x : reg == 1 ? g.y : reg == 2 ? g.z : g.w, skl_f16());
}

/* The same with the residual of a second plane. */
template <int PLANES> __device__ inline float2 g_pair(const uint4 (&g)[PLANES], int reg)
{
    const float2 rounded = g_pair(g[0], reg), residual = g_pair(g[PLANES - 1], reg);
    return PLANES == 1 ? rounded : make_float2(rounded.x + residual.x, rounded.y + residual.y);
}

/* ---- Queries ------------------------------------------------------------------------------------------------ */

template <int DIM> struct query_smem {
    smem_rows<DIM> stages[STAGES];
    query_slot slot; /* in shared memory to save registers */
};

template <typename ELEMENT, int DIM, int M>
__global__ void __launch_bounds__(THREADS, 2) index_query_kernel(const __grid_constant__ strip_params params)
{
    constexpr int BLOCK_ROWS = WARPS * 16 * M, BLOCKS_PER_TILE = SIDE / BLOCK_ROWS, ROWS = STAGE_ROWS<DIM>;
    static_assert(BLOCK_ROWS <= STAGES * ROWS, "the stationary rows are loaded through the stages");
    extern __shared__ __align__(128) unsigned char raw[];
    query_smem<DIM> &smem = *(query_smem<DIM> *)(void *)raw;
    const unsigned heads = (unsigned)params.problem.index_heads, item = blockIdx.x / BLOCKS_PER_TILE;
    const unsigned slot_index = (unsigned)params.strip_first + item / heads;
    const int block_first = (int)(blockIdx.x % BLOCKS_PER_TILE) * BLOCK_ROWS; /* the block's first row in the slot */
    if (threadIdx.x == 0)
        smem.slot = slot_at(params, slot_index, (unsigned)params.problem.heads_s);
    __syncthreads();
    const query_slot &slot = smem.slot;
    if (slot.count <= block_first)
        return;
    const skl_cuda_argument &side = params.b;
    const skl_sequence &s = slot.sequence;
    const int head = slot.head * (int)heads + (int)(item % heads);
    const int first = slot.tile_begin * SIDE, stages = (slot.tile_end - slot.tile_begin) * (SIDE / ROWS);
    const row_source<ELEMENT> queries = {(const ELEMENT *)side.q.data +
                                             SKL_ROW(side.q, s.batch, head, s.query_begin + slot.first + block_first),
                                         side.q.stride_row, side.dim};
    const row_source<ELEMENT> keys = {
        (const ELEMENT *)side.k.data + SKL_ROW(side.k, s.batch, slot.head / side.heads_per_key, s.key_begin + first),
        side.k.stride_row, side.dim};
    const int key_count = (int)s.key_count - first;
    row_frags<DIM, M> q_frags;
    load_frags(q_frags, smem.stages, queries, slot.count - block_first);
    gradient_acc<DIM, M> sums = {};
    const float least = params.least;
    const int first_block = block_first / 16 + (int)threadIdx.x / 32 * M;
    uint4 g[M];
    const auto load_g = [&](int step) { /* of 16 keys */
#pragma unroll
                                        for (int m = 0; m < M; m++)
                                            g[m] =
                                                __ldg(g_block(params, slot_index, slot.tile_begin + step / G_BLOCKS,
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
        __syncthreads(); /* this stage is complete, and the other one is free */
        if (n + 1 < stages)
            copy_rows(smem.stages[(n + 1) % STAGES], keys, (n + 1) * ROWS, key_count);
        cp_async_commit();
        smem_rows<DIM> &rows = smem.stages[n % STAGES];
        if (!is_full(slot, first + n * ROWS, ROWS))
            clear_non_finite<ELEMENT>(rows);
#pragma unroll 1
        for (int step = 0; step < ROWS / 16; step++) {
            logits<M, 2> a;
            multiply<ELEMENT>(a, q_frags, logit_b_address<2>(rows), step * 16);
            uint32_t gated[M][4];
#pragma unroll
            for (int m = 0; m < M; m++)
                gate_block<ELEMENT>(
                    gated[m], a, m, least, [&](int reg) { return g_pair(g[m], reg); },
                    [](int) { return make_float2(1.0F, 1.0F); });
            load_g(min(n * (ROWS / 16) + step + 1, stages * (ROWS / 16) - 1));
            multiply_add<ELEMENT, DIM>(sums, gated, gradient_b_address(rows), step * 16);
        }
    }
    const query_gradients<ELEMENT, DIM> gradients = {params, slot, head};
#pragma unroll
    for (int m = 0; m < M; m++)
#pragma unroll
        for (int half = 0; half < 2; half++)
            gradients.store_row(block_first + acc_row<M>(m, half),
                                [&](int c, int parity) { return sums.sum[m][c][half * 2 + parity]; });
}

/* ---- Keys --------------------------------------------------------------------------------------------------- */

template <int DIM, int M, int PLANES> struct key_smem {
    static constexpr int ROWS = STAGE_ROWS<DIM>;
    smem_rows<DIM> stages[STAGES];
    uint4 g[ROWS / 16][M][PLANES][THREADS]; /* G of a stage, transposed, as the A operands of each thread */
    float weights[STAGES][ROWS];            /* of the queries of a stage */
    float factors[SIDE];                    /* upstream_factor of a slot's queries, the same for all index heads */
    query_slot slot;                        /* slot and work are in shared memory to save registers */
    key_work work;
};

/* Dimensions of dk per launch: the sums of more do not fit into registers next to the stationary rows. */
template <int DIM> constexpr int KEY_WIDTH = DIM < 128 ? DIM : 128;

/* The upstream gradient times G_UNIT of a query that attends to one of the keys [first, first + count). 0 for any
 * other query, so that its values do not change the unit of f16. */
__device__ inline float upstream_factor(const strip_params &params, const query_slot &slot, int row, int first,
                                        int count)
{
    const range32 sees = visible_range(params, slot, row, first);
    const bool any = sees.begin < sees.end && overlaps(sees, 0, count);
    return any ? upstream_of(params, slot, slot.first + row) * G_UNIT : 0.0F;
}

/* Streams a slot's queries: all index heads of the first ROWS queries, then all of the next, and so on. */
template <typename ELEMENT, int DIM, int M> struct query_stream {
    static constexpr int ROWS = STAGE_ROWS<DIM>;
    const strip_params &params;
    key_smem<DIM, M, G_PLANES<ELEMENT>> &smem;
    int heads;

    /* Starts copying stage n and returns the weight of the thread's row in it. Non-finite weights become 0: if they
     * matter, G is NaN already. */
    __device__ float copy(int n) const
    {
        const query_slot &slot = smem.slot;
        const skl_sequence &s = slot.sequence;
        const skl_input &q = params.b.q;
        const int first = n / heads * ROWS, head = n % heads;
        const row_source<ELEMENT> queries = {
            (const ELEMENT *)q.data + SKL_ROW(q, s.batch, slot.head * heads + head, s.query_begin + slot.first),
            q.stride_row, params.b.dim};
        copy_rows(smem.stages[n % STAGES], queries, first, slot.count);
        const int row = first + (int)threadIdx.x % ROWS;
        const float weight =
            weight_at(params, s.batch, slot.head, s.query_begin + query_of(slot, row), head) * smem.factors[row];
        return fabsf(weight) < INFINITY ? weight : 0.0F;
    }

    /* Called as long as possible after copy(n), which hides the latency of loading the weight. */
    __device__ void store_weight(int n, float weight) const
    {
        if (threadIdx.x < ROWS)
            smem.weights[n % STAGES][threadIdx.x] = weight;
    }
};

template <typename ELEMENT, int DIM, int M>
__global__ void __launch_bounds__(THREADS, 2) index_key_kernel(const __grid_constant__ strip_params params)
{
    constexpr int BLOCK_ROWS = WARPS * 16 * M, BLOCKS_PER_TILE = SIDE / BLOCK_ROWS, ROWS = STAGE_ROWS<DIM>,
                  STEPS = ROWS / 16;
    constexpr int PLANES = G_PLANES<ELEMENT>, WIDTH = KEY_WIDTH<DIM>;
    static_assert(BLOCK_ROWS <= STAGES * ROWS, "the stationary rows are loaded through the stages");
    extern __shared__ __align__(128) unsigned char raw[];
    key_smem<DIM, M, PLANES> &smem = *(key_smem<DIM, M, PLANES> *)(void *)raw;
    const int block_first =
        (int)(blockIdx.x % BLOCKS_PER_TILE) * BLOCK_ROWS; /* the block's first row in the key tile */
    if (threadIdx.x == 0)
        smem.work = key_work_of_block<ROWS>(params, blockIdx.x / BLOCKS_PER_TILE);
    __syncthreads();
    const key_work &work = smem.work;
    const int first_key = work.tile * SIDE + block_first, key_count = (int)work.sequence.key_count - first_key;
    if (work.stages == 0 || key_count <= 0)
        return;
    const skl_input &k = params.b.k;
    const row_source<ELEMENT> keys = {
        (const ELEMENT *)k.data + SKL_ROW(k, work.sequence.batch, work.key_head, work.sequence.key_begin + first_key),
        k.stride_row, params.b.dim};
    row_frags<DIM, M> k_frags;
    load_frags(k_frags, smem.stages, keys, key_count);
    gradient_acc<WIDTH, M> sums = {};
    gradient_unit<ELEMENT> unit;
    const float least = params.least;
    const int heads = (int)params.problem.index_heads;
    const query_stream<ELEMENT, DIM, M> queries = {params, smem, heads};
    for_slots(params, work, [&](int slot_index) {
        __syncthreads(); /* all threads are done with the previous slot */
        if (threadIdx.x == 0)
            smem.slot = slot_at(params, (unsigned)slot_index, (unsigned)params.problem.heads_s);
        __syncthreads();
        const query_slot &slot = smem.slot;
        smem.factors[threadIdx.x] = upstream_factor(params, slot, (int)threadIdx.x, first_key, BLOCK_ROWS);
        __syncthreads();
        const bool full = is_full(slot, first_key, BLOCK_ROWS);
        const int stages = (slot.count + ROWS - 1) / ROWS * heads; /* 0 if there are no queries */
        if (stages > 0)
            queries.store_weight(0, queries.copy(0));
        cp_async_commit();
#pragma unroll 1
        for (int n = 0; n < stages; n++) {
            if (n % heads == 0)
#pragma unroll
                for (int e = 0; e < STEPS * M; e++) {
                    const uint4 *const g = g_block(params, (unsigned)slot_index, work.tile, n / heads * STEPS + e / M,
                                                   block_first / 16 + (int)threadIdx.x / 32 * M + e % M);
#pragma unroll
                    for (int plane = 0; plane < PLANES; plane++)
                        smem.g[e / M][e % M][plane][threadIdx.x] = transpose(__ldg(g + plane * params.rest_at));
                }
            cp_async_wait<0>();
            __syncthreads(); /* this stage is complete, and the other one is free */
            const float next_weight = n + 1 < stages ? queries.copy(n + 1) : 0.0F;
            cp_async_commit();
            smem_rows<DIM> &rows = smem.stages[n % STAGES];
            const float(&weights)[ROWS] = smem.weights[n % STAGES];
            if (!full)
                clear_non_finite<ELEMENT>(rows);
            if (unit.MOVES) { /* |S - P| <= 1: the weights bound their product with G */
                const int lane = (int)threadIdx.x % 32;
                unit.fit(sums, warp_max(fmaxf(fabsf(weights[lane]), fabsf(weights[ROWS - 32 + lane]))) / G_UNIT);
            }
            const float inverse = unit.inverse();
#pragma unroll 1
            for (int step = 0; step < STEPS; step++) {
                logits<M, 2> a;
                multiply<ELEMENT>(a, k_frags, logit_b_address<2>(rows), step * 16);
                uint32_t gated[M][4];
#pragma unroll
                for (int m = 0; m < M; m++) {
                    uint4 g[PLANES];
#pragma unroll
                    for (int plane = 0; plane < PLANES; plane++)
                        g[plane] = smem.g[step][m][plane][threadIdx.x];
                    gate_block<ELEMENT>(
                        gated[m], a, m, least, [&](int reg) { return g_pair(g, reg); },
                        [&](int block) {
                            const float2 pair = *(const float2 *)&weights[step * 16 + acc_column(block, 0)];
                            return make_float2(pair.x * inverse, pair.y * inverse);
                        });
                }
                multiply_add<ELEMENT, DIM>(
                    sums, gated,
                    at_chunk<DIM>(gradient_b_address(rows), 0, WIDTH < DIM ? (int)params.dim_first / 8 : 0),
                    step * 16);
            }
            queries.store_weight(n + 1, next_weight);
        }
    });
    const float value = unit.value();
#pragma unroll
    for (int m = 0; m < M; m++)
#pragma unroll
        for (int half = 0; half < 2; half++)
            add_key_row<WIDTH>(params, work, block_first + acc_row<M>(m, half), (int)params.dim_first,
                               [&](int c, int parity) { return sums.sum[m][c][half * 2 + parity] * value; });
}

} // namespace sm80

#endif
