/* Gradients from a strip by mma.sync, sm_80 and up: the loops for queries and for keys. A policy, PAIRS, says what
 * the strip holds of a pair and how the gradient of its logit follows: difference_gradients.cuh, ratio_gradients.cuh.
 *
 * Both loops recompute the logits of a head, turn them into G, and multiply G by the same streamed rows: two products
 * per pair and head.
 *
 *              stationary rows (64 M)        streamed rows (mma_tile.cuh)          planes of the strip
 *   queries    queries of a head             the keys that they attend to          loaded a step ahead, to registers
 *   keys       keys                          a stage's queries of all heads that   in shared memory, for all of these
 *                                            have these keys                       heads
 *
 *   registers  stationary rows (M DIM / 4), sums (M DIM / 2; for dk of at most 128 dimensions), logits (8 M), planes
 *              (4 M each)
 *   shared     2 stages, and for dk the planes of one: at most 48 KB; 2 blocks per SM
 *
 *   cp.async   | stage n + 1                        | stage n + 2
 *   warps      | stage n, in steps of 16 rows:      | stage n + 1
 *              |   logits (mma)                     |
 *              |   G (PAIRS)                        |
 *              |   sums += G rows (mma)             |
 *
 * f16 keeps G as a multiple of a unit (row_stats.cuh). */
#ifndef SKL_CUDA_SM80_STRIPS_GRADIENTS_CUH
#define SKL_CUDA_SM80_STRIPS_GRADIENTS_CUH

#include "cuda/common/strips/gradients.cuh"
#include "cuda/sm80/attention/backward.cuh"

namespace sm80
{

/* Stationary rows of a block, and blocks of a tile of 128. */
template <typename PAIRS> constexpr int BLOCK_ROWS = WARPS * 16 * PAIRS::M;
template <typename PAIRS> constexpr int BLOCKS_PER_TILE = SIDE / BLOCK_ROWS<PAIRS>;

/* A masked pair has G = 0, but 0 times a non-finite value is NaN. So non-finite values of a stage are replaced by 0;
 * a query that sees such a row has NaN in the strip already. Full tiles do not need it. */
template <typename ELEMENT, int DIM> __device__ inline void clear_non_finite(smem_rows<DIM> &rows)
{
    for (int n = (int)threadIdx.x; n < STAGE_ROWS<DIM> * DIM / 8; n += THREADS) {
        uint4 &chunk = rows.chunks[n / (DIM / 8)][n % (DIM / 8)];
        if (!all_finite<ELEMENT>(chunk))
            chunk = make_uint4(0, 0, 0, 0);
    }
    __syncthreads();
}

__device__ inline uint32_t word_of(const uint4 &words, int reg)
{
    return reg == 0 ? words.x : reg == 1 ? words.y : reg == 2 ? words.z : words.w;
}

/* ---- Queries ------------------------------------------------------------------------------------------------ */

template <int DIM> struct query_smem {
    smem_rows<DIM> stages[STAGES];
    query_slot slot; /* in shared memory to save registers */
};

/* dq of 64 M queries of a head. PAIRS has
 *
 *   element, DIM, M, PLANES, params_type
 *   HAS_UNIT                         whether G of f16 needs a unit
 *   PAIRS(params, slot, head, block_first)
 *   apply(x, planes)                 turns the logits of 16 keys into G
 *   store_row(row, half, unit, sum) */
template <typename PAIRS>
__device__ inline void add_queries(const typename PAIRS::params_type &params, query_smem<PAIRS::DIM> &smem,
                                   unsigned block)
{
    typedef typename PAIRS::element element;
    constexpr int DIM = PAIRS::DIM, M = PAIRS::M, PLANES = PAIRS::PLANES, ROWS = STAGE_ROWS<DIM>, STEPS = ROWS / 16;
    static_assert(BLOCK_ROWS<PAIRS> <= STAGES * ROWS, "the stationary rows are loaded through the stages");
    const unsigned heads = (unsigned)params.wrt.heads, item = block / BLOCKS_PER_TILE<PAIRS>;
    const unsigned slot_index = (unsigned)params.strip_first + item / heads;
    /* The block's first row in the slot. */
    const int block_first = (int)(block % BLOCKS_PER_TILE<PAIRS>)*BLOCK_ROWS<PAIRS>;
    if (threadIdx.x == 0)
        smem.slot = slot_at(params, slot_index, (unsigned)params.problem.heads_s);
    __syncthreads();
    const query_slot &slot = smem.slot;
    if (slot.count <= block_first)
        return;
    const skl_cuda_argument &side = wrt_of(params);
    const skl_sequence &s = slot.sequence;
    const int head = slot.head * (int)heads + (int)(item % heads);
    const int first = slot.tile_begin * SIDE, stages = (slot.tile_end - slot.tile_begin) * (SIDE / ROWS);
    const row_source<element> queries = query_rows<element>(side, s, head, slot.first + block_first);
    const row_source<element> keys = key_rows<element>(side, s, head / params.wrt.heads_per_key, first);
    const int key_count = (int)s.key_count - first;
    row_frags<DIM, M> q_frags;
    load_frags(q_frags, smem.stages, queries, slot.count - block_first);
    gradient_acc<DIM, M> sums = {};
    gradient_unit<element> unit;
    const PAIRS pairs(params, slot, head, block_first);
    const int first_block = block_first / 16 + (int)(thread_index() / 32) * M;
    uint4 planes[M][PLANES];
    const auto load_planes = [&](int step) { /* a step has 16 keys */
#pragma unroll
                                             for (int m = 0; m < M; m++) {
                                                 const uint4 *const from =
                                                     g_block(params, slot_index, slot.tile_begin + step / G_BLOCKS,
                                                             first_block + m, step % G_BLOCKS);
#pragma unroll
                                                 for (int plane = 0; plane < PLANES; plane++)
                                                     planes[m][plane] = __ldg(from + plane * params.rest_at);
                                             }
    };
    if (stages > 0) {
        copy_rows(smem.stages[0], keys, 0, key_count);
        load_planes(0);
    }
    cp_async_commit();
#pragma unroll 1
    for (int n = 0; n < stages; n++) {
        cp_async_wait<0>();
        __syncthreads(); /* this stage is complete, and the other one is free */
        if (n + 1 < stages)
            copy_rows(smem.stages[(n + 1) % STAGES], keys, (n + 1) * ROWS, key_count);
        cp_async_commit();
        smem_rows<DIM> &streamed = smem.stages[n % STAGES];
        if (!is_full(slot, first + n * ROWS, ROWS))
            clear_non_finite<element>(streamed);
#pragma unroll 1
        for (int step = 0; step < STEPS; step++) {
            logits<M, 2> x;
            multiply<element>(x, q_frags, logit_b_address<2>(streamed), step * 16);
            pairs.apply(x, planes);
            load_planes(min(n * STEPS + step + 1, stages * STEPS - 1));
            if (PAIRS::HAS_UNIT && unit.MOVES)
                unit.fit(sums, largest_of(x));
            pack_multiply_add<element, DIM>(sums, PAIRS::HAS_UNIT ? unit.inverse() : 1.0F, x,
                                            gradient_b_address(streamed), step * 16);
        }
    }
#pragma unroll
    for (int m = 0; m < M; m++)
#pragma unroll
        for (int half = 0; half < 2; half++)
            pairs.store_row(block_first + acc_row<M>(m, half), half, unit.value(),
                            [&](int c, int parity) { return sums.sum[m][c][half * 2 + parity]; });
}

/* ---- Keys --------------------------------------------------------------------------------------------------- */

/* A stage's queries: their vectors, the strip's planes, and what PAIRS needs of each of them. */
template <typename PAIRS> struct streamed_queries {
    static constexpr int ROWS = STAGE_ROWS<PAIRS::DIM>;
    smem_rows<PAIRS::DIM> stages[STAGES];
    uint4 planes[ROWS / 16][PAIRS::M][PAIRS::PLANES][THREADS]; /* transposed, as the A operands of each thread */
    typename PAIRS::row rows[STAGES][ROWS];
};

/* slot_values: what PAIRS keeps of a slot's queries for all of their heads. */
template <typename PAIRS> struct key_smem : streamed_queries<PAIRS>, PAIRS::slot_values {
    query_slot slot; /* slot and work are in shared memory to save registers */
    key_work work;
};

/* Starts copying stage n of the slot's queries, all heads of the first ROWS queries, then all of the next, and so on.
 * Returns what PAIRS needs of the thread's query. */
template <typename PAIRS>
__device__ inline typename PAIRS::row copy_queries(const PAIRS &pairs, key_smem<PAIRS> &smem, int n)
{
    constexpr int ROWS = STAGE_ROWS<PAIRS::DIM>;
    const query_slot &slot = smem.slot;
    const int first = n / pairs.heads * ROWS, head = pairs.first_head + n % pairs.heads; /* head: within the slot */
    copy_rows(smem.stages[n % STAGES],
              query_rows<typename PAIRS::element>(wrt_of(pairs.params), slot.sequence,
                                                  slot.head * pairs.params.wrt.heads + head, slot.first),
              first, slot.count);
    return pairs.row_of(head, first + (int)(thread_index() % ROWS));
}

/* Called as long as possible after copy_queries, which hides the latency of its loads. */
template <typename PAIRS>
__device__ inline void store_row(key_smem<PAIRS> &smem, int n, const typename PAIRS::row &row)
{
    if (threadIdx.x < STAGE_ROWS<PAIRS::DIM>)
        smem.rows[n % STAGES][threadIdx.x] = row;
}

/* WIDTH dimensions of dk, from params.dim_first on, of 64 M keys. PAIRS has
 *
 *   element, DIM, M, PLANES, WIDTH, row, slot_values, params_type
 *   begin_slot(first_key)            sets heads and first_head: those of the slot that have these keys
 *   row_of(head, row)                what G needs of a query
 *   BOUNDED, bound(stage)     whether a stage of f16 has a bound of |G|; otherwise the unit fits every step
 *   apply(x, planes, rows, inverse)   turns the logits of 16 queries, `rows`, into G; inverse: of the unit of a
 * BOUNDED stage
 */
template <typename PAIRS>
__device__ inline void add_keys(const typename PAIRS::params_type &params, key_smem<PAIRS> &smem, unsigned block)
{
    typedef typename PAIRS::element element;
    constexpr int DIM = PAIRS::DIM, M = PAIRS::M, PLANES = PAIRS::PLANES, WIDTH = PAIRS::WIDTH;
    constexpr int ROWS = STAGE_ROWS<DIM>, STEPS = ROWS / 16;
    static_assert(BLOCK_ROWS<PAIRS> <= STAGES * ROWS, "the stationary rows are loaded through the stages");
    /* The block's first row in the key tile. */
    const int block_first = (int)(block % BLOCKS_PER_TILE<PAIRS>)*BLOCK_ROWS<PAIRS>;
    if (threadIdx.x == 0)
        smem.work = key_work_of_block<ROWS>(params, block / BLOCKS_PER_TILE<PAIRS>);
    __syncthreads();
    const key_work &work = smem.work;
    const int first_key = work.tile * SIDE + block_first, key_count = (int)work.sequence.key_count - first_key;
    if (work.stages == 0 || key_count <= 0)
        return;
    const int dim_first = WIDTH < DIM ? (int)params.dim_first : 0;
    row_frags<DIM, M> k_frags;
    load_frags(k_frags, smem.stages, key_rows<element>(wrt_of(params), work.sequence, work.key_head, first_key),
               key_count);
    gradient_acc<WIDTH, M> sums = {};
    gradient_unit<element> unit;
    PAIRS pairs(params, smem);
    const int key_block = block_first / 16 + (int)(thread_index() / 32) * M;
    for_slots(params, work, [&](int slot_index) {
        __syncthreads(); /* all threads are done with the previous slot */
        if (threadIdx.x == 0)
            smem.slot = slot_at(params, (unsigned)slot_index, (unsigned)params.problem.heads_s);
        __syncthreads();
        const query_slot &slot = smem.slot;
        pairs.begin_slot(first_key);
        const bool full = is_full(slot, first_key, BLOCK_ROWS<PAIRS>);
        const int stages = (slot.count + ROWS - 1) / ROWS * pairs.heads; /* 0 if there are no queries */
        if (stages > 0)
            store_row(smem, 0, copy_queries(pairs, smem, 0));
        cp_async_commit();
#pragma unroll 1
        for (int n = 0; n < stages; n++) {
            if (n % pairs.heads == 0)
#pragma unroll
                for (int e = 0; e < STEPS * M; e++) {
                    const uint4 *const from = g_block(params, (unsigned)slot_index, work.tile,
                                                      n / pairs.heads * STEPS + e / M, key_block + e % M);
#pragma unroll
                    for (int plane = 0; plane < PLANES; plane++)
                        smem.planes[e / M][e % M][plane][threadIdx.x] =
                            transpose(__ldg(from + plane * params.rest_at));
                }
            cp_async_wait<0>();
            __syncthreads(); /* this stage is complete, and the other one is free */
            typename PAIRS::row next = {};
            if (n + 1 < stages)
                next = copy_queries(pairs, smem, n + 1);
            cp_async_commit();
            smem_rows<DIM> &streamed = smem.stages[n % STAGES];
            if (!full)
                clear_non_finite<element>(streamed);
            if constexpr (PAIRS::BOUNDED && gradient_unit<element>::MOVES)
                unit.fit(sums, pairs.bound(n % STAGES));
            const float inverse = unit.inverse();
#pragma unroll 1
            for (int step = 0; step < STEPS; step++) {
                logits<M, 2> x;
                multiply<element>(x, k_frags, logit_b_address<2>(streamed), step * 16);
                uint4 planes[M][PLANES];
#pragma unroll
                for (int e = 0; e < M * PLANES; e++)
                    planes[e / PLANES][e % PLANES] = smem.planes[step][e / PLANES][e % PLANES][threadIdx.x];
                pairs.apply(x, planes, &smem.rows[n % STAGES][step * 16], inverse);
                if (!PAIRS::BOUNDED && unit.MOVES)
                    unit.fit(sums, largest_of(x));
                pack_multiply_add<element, DIM>(sums, PAIRS::BOUNDED ? 1.0F : unit.inverse(), x,
                                                at_chunk<DIM>(gradient_b_address(streamed), 0, dim_first / 8),
                                                step * 16);
            }
            store_row(smem, n + 1, next);
        }
    });
    const float value = unit.value();
#pragma unroll
    for (int m = 0; m < M; m++)
#pragma unroll
        for (int half = 0; half < 2; half++)
            add_key_row<WIDTH>(params, work, block_first + acc_row<M>(m, half), dim_first,
                               [&](int c, int parity) { return sums.sum[m][c][half * 2 + parity] * value; });
}

/* ---- Kernels ------------------------------------------------------------------------------------------------ */

template <typename PAIRS>
__global__ void __launch_bounds__(THREADS, 2)
    query_gradient_kernel(const __grid_constant__ typename PAIRS::params_type params)
{
    extern __shared__ __align__(128) unsigned char raw[];
    add_queries<PAIRS>(params, *(query_smem<PAIRS::DIM> *)(void *)raw, blockIdx.x);
}

template <typename PAIRS>
__global__ void __launch_bounds__(THREADS, 2)
    key_gradient_kernel(const __grid_constant__ typename PAIRS::params_type params)
{
    extern __shared__ __align__(128) unsigned char raw[];
    add_keys<PAIRS>(params, *(key_smem<PAIRS> *)(void *)raw, blockIdx.x);
}

/* One launch for both, where a strip has few blocks of either, and of unequal length. Blocks from params.query_blocks
 * on have keys. */
template <typename QUERIES, typename KEYS>
__global__ void __launch_bounds__(THREADS, 2)
    gradient_kernel(const __grid_constant__ typename KEYS::params_type params)
{
    static_assert(sizeof(query_smem<QUERIES::DIM>) <= sizeof(key_smem<KEYS>), "a launch has the memory of both");
    extern __shared__ __align__(128) unsigned char raw[];
    if (blockIdx.x < params.query_blocks)
        add_queries<QUERIES>(params, *(query_smem<QUERIES::DIM> *)(void *)raw, blockIdx.x);
    else
        add_keys<KEYS>(params, *(key_smem<KEYS> *)(void *)raw, blockIdx.x - params.query_blocks);
}

} // namespace sm80

#endif
