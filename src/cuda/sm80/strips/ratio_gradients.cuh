/* Gradients of one side of a teacher group by mma.sync, sm_80 and up, from R of a strip (ratio_scores.cuh).
 *
 *   wrt A   g = p (ln2 R - offset)          p: probability of the pair under the side's own head, recomputed
 *   wrt B   g = -p offset - p 2^R           offset: the KL, -1, or dot_t of a teacher head (docs/design/maths.md)
 *
 *   dq = scale G k,  dk = scale G^T q       scale: with the softcap's slope in G, and 1 / group_size for a teacher
 *
 *              stationary rows (64)       streamed rows (mma_tile.cuh)             R
 *   queries    queries of a head          the keys that they attend to             loaded a step ahead, to registers
 *   keys       keys                       a stage's queries of all heads that      in shared memory, for all of
 *                                         have these keys                          these heads
 *
 * Two products per pair and head, as in difference_gradients.cuh. f16 keeps G as a multiple of a unit (row_stats.cuh). */
#ifndef SKL_CUDA_SM80_STRIPS_RATIO_GRADIENTS_CUH
#define SKL_CUDA_SM80_STRIPS_RATIO_GRADIENTS_CUH

#include "cuda/sm80/strips/ratio_scores.cuh"
#include "cuda/sm80/strips/difference_gradients.cuh"

namespace sm80
{

constexpr int GROUP_DIM = SKL_GROUP_DIM_MAX;
constexpr int GROUP_STAGE = STAGE_ROWS<GROUP_DIM>; /* streamed rows */
constexpr int GROUP_ROWS_PER_BLOCK = WARPS * 16, GROUP_BLOCKS_PER_TILE = SIDE / GROUP_ROWS_PER_BLOCK;
static_assert(GROUP_ROWS_PER_BLOCK <= STAGES * GROUP_STAGE, "the stationary rows are loaded through the stages");

/* What the gradients of a head need of a query. */
struct alignas(16) group_row {
    float lse, low, offset, grad; /* LSE in base 2 as two floats; upstream gradient */
};

/* `n`: of the slot's heads on the side. */
__device__ inline group_row group_row_of(const ratio_params &params, const query_slot &slot, int n, int row)
{
    const int64_t query = query_of(slot, row), head = (int64_t)slot.head * params.wrt.heads + n;
    const skl_lse2 lse = split_lse2(skl_row_value(&params.lse, &slot.sequence, head, query));
    const float offset =
        params.offset.data == NULL ? -1.0F : skl_row_value(&params.offset, &slot.sequence, head, query);
    return {lse.value, lse.low, offset, upstream_of(params, slot, query)};
}

/* Two neighbouring R from both of their halves. */
__device__ inline float2 join_ratios(uint32_t upper, uint32_t lower)
{
    return make_float2(__uint_as_float(__byte_perm(lower, upper, 0x5410)),
                       __uint_as_float(__byte_perm(lower, upper, 0x7632)));
}

template <bool WRT_B>
__device__ inline float group_gradient(float logit, float scale, float ratio, const group_row &row)
{
    const float log_p = fmaf(logit, scale, -row.lse) - row.low, p = ex2(log_p);
    return WRT_B ? fmaf(p, -row.offset, -ex2(log_p + ratio)) : p * fmaf(SKL_LN2, ratio, -row.offset);
}

/* x = G of a 16 x 16 block, from its logits x * scale. tanh_factor: 1 if x is the tanh of a softcap, otherwise 0.
 * ratio(reg): the pair of R in register `reg` of the operand; row_of(block, e): the query of an element. */
template <bool WRT_B, typename RATIO, typename ROW_OF>
__device__ inline void gradient_block(logits<1, 2> &x, float scale, float tanh_factor, RATIO ratio, ROW_OF row_of)
{
#pragma unroll
    for (int reg = 0; reg < 4; reg++) {
        const float2 pair = ratio(reg);
#pragma unroll
        for (int parity = 0; parity < 2; parity++) {
            const int e = reg % 2 * 2 + parity;
            float &at = x.at[0][reg / 2][e];
            const float of_pair = parity == 0 ? pair.x : pair.y, tanh = at * tanh_factor;
            const float gradient = group_gradient<WRT_B>(at, scale, of_pair, row_of(reg / 2, e));
            at = is_masked(of_pair) ? 0.0F : gradient * fmaf(-tanh, tanh, 1.0F);
        }
    }
}

/* The same from products, in either direction. */
template <typename RATIO, typename ROW_OF>
__device__ inline void gradient_block(logits<1, 2> &x, const skl_cuda_argument &wrt, bool wrt_b, RATIO ratio,
                                      ROW_OF row_of)
{
    const float scale = wrt.capped ? wrt.softcap_2 : wrt.scale, tanh_factor = wrt.capped ? 1.0F : 0.0F;
#pragma unroll
    for (int e = 0; wrt.capped && e < 8; e++)
        x.at[0][e / 4][e % 4] = tanhf(x.at[0][e / 4][e % 4] * wrt.scale);
    if (wrt_b)
        gradient_block<true>(x, scale, tanh_factor, ratio, row_of);
    else
        gradient_block<false>(x, scale, tanh_factor, ratio, row_of);
}

__device__ inline const skl_cuda_argument &wrt_of(const ratio_params &params)
{
    return params.of_teacher ? params.a : params.b;
}

__device__ inline uint32_t word_of(const uint4 &words, int reg)
{
    return reg == 0 ? words.x : reg == 1 ? words.y : reg == 2 ? words.z : words.w;
}

/* ---- Queries ------------------------------------------------------------------------------------------------- */

template <typename ELEMENT>
__device__ inline void add_queries(const ratio_params &params, query_smem<GROUP_DIM> &smem, unsigned block)
{
    const unsigned heads = (unsigned)params.wrt.heads, item = block / GROUP_BLOCKS_PER_TILE;
    const unsigned slot_index = (unsigned)params.strip_first + item / heads;
    const int n = (int)(item % heads), block_first = (int)(block % GROUP_BLOCKS_PER_TILE) * GROUP_ROWS_PER_BLOCK;
    if (threadIdx.x == 0)
        smem.slot = slot_at(params, slot_index, (unsigned)params.problem.heads_s);
    __syncthreads();
    const query_slot &slot = smem.slot;
    if (slot.count <= block_first)
        return;
    const skl_cuda_argument &side = wrt_of(params);
    const skl_sequence &s = slot.sequence;
    const int head = slot.head * (int)heads + n;
    const int first = slot.tile_begin * SIDE, stages = (slot.tile_end - slot.tile_begin) * (SIDE / GROUP_STAGE);
    const row_source<ELEMENT> queries = {(const ELEMENT *)side.q.data +
                                             SKL_ROW(side.q, s.batch, head, s.query_begin + slot.first + block_first),
                                         side.q.stride_row, side.dim};
    const row_source<ELEMENT> keys = {(const ELEMENT *)side.k.data +
                                          SKL_ROW(side.k, s.batch, head / side.heads_per_key, s.key_begin + first),
                                      side.k.stride_row, side.dim};
    const int key_count = (int)s.key_count - first;
    row_frags<GROUP_DIM, 1> q_frags;
    load_frags(q_frags, smem.stages, queries, slot.count - block_first);
    gradient_acc<GROUP_DIM, 1> sums = {};
    gradient_unit<ELEMENT> unit;
    const group_row rows[2] = {group_row_of(params, slot, n, block_first + acc_row<1>(0, 0)),
                               group_row_of(params, slot, n, block_first + acc_row<1>(0, 1))};
    const bool wrt_b = params.of_teacher == params.reverse;
    uint4 upper, lower;
    const auto load_ratios = [&](int step) { /* of 16 keys */
                                             const uint4 *const from =
                                                 g_block(params, slot_index, slot.tile_begin + step / G_BLOCKS,
                                                         block_first / 16 + (int)(threadIdx.x / 32), step % G_BLOCKS);
                                             upper = __ldg(from);
                                             lower = __ldg(from + params.rest_at);
    };
    if (stages > 0) {
        copy_rows(smem.stages[0], keys, 0, key_count);
        load_ratios(0);
    }
    cp_async_commit();
    constexpr int STEPS = GROUP_STAGE / 16;
#pragma unroll 1
    for (int stage = 0; stage < stages; stage++) {
        cp_async_wait<0>();
        __syncthreads(); /* this stage is complete, and the other one is free */
        if (stage + 1 < stages)
            copy_rows(smem.stages[(stage + 1) % STAGES], keys, (stage + 1) * GROUP_STAGE, key_count);
        cp_async_commit();
        smem_rows<GROUP_DIM> &streamed = smem.stages[stage % STAGES];
        if (!is_full(slot, first + stage * GROUP_STAGE, GROUP_STAGE))
            clear_non_finite<ELEMENT>(streamed);
#pragma unroll 1
        for (int step = 0; step < STEPS; step++) {
            logits<1, 2> x;
            multiply<ELEMENT>(x, q_frags, logit_b_address<2>(streamed), step * 16);
            gradient_block(
                x, side, wrt_b, [&](int reg) { return join_ratios(word_of(upper, reg), word_of(lower, reg)); },
                [&](int, int e) -> const group_row & { return rows[e / 2]; });
            load_ratios(min(stage * STEPS + step + 1, stages * STEPS - 1));
            if (unit.MOVES)
                unit.fit(sums, largest_of(x));
            pack_multiply_add<ELEMENT, GROUP_DIM>(sums, unit.inverse(), x, gradient_b_address(streamed), step * 16);
        }
    }
    const skl_side of = params.of_teacher ? skl_teacher_of(&params.problem, &params.call)
                                          : skl_student_of(&params.problem, &params.call);
#pragma unroll
    for (int half = 0; half < 2; half++) {
        const int row = block_first + acc_row<1>(0, half);
        if (row >= slot.count)
            continue;
        const range32 sees = visible_range(params, slot, row, 0);
        const bool blind = sees.begin >= sees.end; /* exactly 0, whatever its upstream gradient is */
        const float factor = blind ? 0.0F : params.wrt.scale * rows[half].grad * unit.value();
        const gradient_columns columns(of.dq->data, SKL_ROW(*of.dq, s.batch, head, s.query_begin + slot.first + row),
                                       of.grad_dtype, (int)side.dim);
#pragma unroll
        for (int c = 0; c < GROUP_DIM / 8; c++)
            columns.store_pair(c, sums.sum[0][c][half * 2] * factor, sums.sum[0][c][half * 2 + 1] * factor,
                               ELEMENT());
    }
}

/* ---- Keys ---------------------------------------------------------------------------------------------------- */

struct group_key_smem {
    smem_rows<GROUP_DIM> stages[STAGES];
    uint4 ratios[GROUP_STAGE / 16][2][THREADS]; /* R of a stage, transposed, as the A operands of each thread */
    group_row rows[STAGES][GROUP_STAGE];
    query_slot slot; /* slot and work are in shared memory to save registers */
    key_work work;
};

/* Streams the queries of a slot: those of all heads with the block's keys, 64 queries at a time. */
template <typename ELEMENT> struct group_query_stream {
    const ratio_params &params;
    group_key_smem &smem;
    int first, heads; /* of the slot's heads */

    /* Starts copying stage n, and returns what the thread's query in it needs. */
    __device__ group_row copy(int n) const
    {
        const query_slot &slot = smem.slot;
        const skl_sequence &s = slot.sequence;
        const skl_cuda_argument &side = wrt_of(params);
        const int row = n / heads * GROUP_STAGE, of_slot = first + n % heads;
        const row_source<ELEMENT> queries = {
            (const ELEMENT *)side.q.data +
                SKL_ROW(side.q, s.batch, slot.head * params.wrt.heads + of_slot, s.query_begin + slot.first),
            side.q.stride_row, side.dim};
        copy_rows(smem.stages[n % STAGES], queries, row, slot.count);
        return group_row_of(params, slot, of_slot, row + (int)(threadIdx.x % GROUP_STAGE));
    }

    /* Called as long as possible after copy(n), which hides the latency of its loads. */
    __device__ void store_row(int n, const group_row &row) const
    {
        if (threadIdx.x < GROUP_STAGE)
            smem.rows[n % STAGES][threadIdx.x] = row;
    }

    __device__ void load_ratios(int slot_index, int query_block, int key_block) const
    {
#pragma unroll
        for (int step = 0; step < GROUP_STAGE / 16; step++) {
            const uint4 *const from =
                g_block(params, (unsigned)slot_index, smem.work.tile, query_block + step, key_block);
            smem.ratios[step][0][threadIdx.x] = transpose(__ldg(from));
            smem.ratios[step][1][threadIdx.x] = transpose(__ldg(from + params.rest_at));
        }
    }
};

template <typename ELEMENT>
__device__ inline void add_keys(const ratio_params &params, group_key_smem &smem, unsigned block)
{
    const int block_first = (int)(block % GROUP_BLOCKS_PER_TILE) * GROUP_ROWS_PER_BLOCK;
    if (threadIdx.x == 0)
        smem.work = key_work_of_block<GROUP_STAGE>(params, block / GROUP_BLOCKS_PER_TILE);
    __syncthreads();
    const key_work &work = smem.work;
    const int first_key = work.tile * SIDE + block_first, key_count = (int)work.sequence.key_count - first_key;
    if (work.stages == 0 || key_count <= 0)
        return;
    const skl_cuda_argument &side = wrt_of(params);
    const row_source<ELEMENT> keys = {(const ELEMENT *)side.k.data + SKL_ROW(side.k, work.sequence.batch,
                                                                             work.key_head,
                                                                             work.sequence.key_begin + first_key),
                                      side.k.stride_row, side.dim};
    row_frags<GROUP_DIM, 1> k_frags;
    load_frags(k_frags, smem.stages, keys, key_count);
    gradient_acc<GROUP_DIM, 1> sums = {};
    gradient_unit<ELEMENT> unit;
    const bool wrt_b = params.of_teacher == params.reverse;
    const int key_block = block_first / 16 + (int)(threadIdx.x / 32);
    for_slots(params, work, [&](int slot_index) {
        __syncthreads(); /* all threads are done with the previous slot */
        if (threadIdx.x == 0)
            smem.slot = slot_at(params, (unsigned)slot_index, (unsigned)params.problem.heads_s);
        __syncthreads();
        const query_slot &slot = smem.slot;
        const int slot_first = slot.head * params.wrt.heads, key_first = work.key_head * params.wrt.heads_per_key;
        const int first = max(0, key_first - slot_first);
        const int heads = min(params.wrt.heads, key_first + params.wrt.heads_per_key - slot_first) - first;
        const group_query_stream<ELEMENT> queries = {params, smem, first, heads};
        const bool full = is_full(slot, first_key, GROUP_ROWS_PER_BLOCK);
        const int stages = (slot.count + GROUP_STAGE - 1) / GROUP_STAGE * heads; /* 0 if there are no queries */
        if (stages > 0)
            queries.store_row(0, queries.copy(0));
        cp_async_commit();
#pragma unroll 1
        for (int n = 0; n < stages; n++) {
            if (n % heads == 0)
                queries.load_ratios(slot_index, n / heads * (GROUP_STAGE / 16), key_block);
            cp_async_wait<0>();
            __syncthreads(); /* this stage is complete, and the other one is free */
            group_row next = {};
            if (n + 1 < stages)
                next = queries.copy(n + 1);
            cp_async_commit();
            smem_rows<GROUP_DIM> &streamed = smem.stages[n % STAGES];
            if (!full)
                clear_non_finite<ELEMENT>(streamed);
#pragma unroll 1
            for (int step = 0; step < GROUP_STAGE / 16; step++) {
                logits<1, 2> x;
                multiply<ELEMENT>(x, k_frags, logit_b_address<2>(streamed), step * 16);
                const uint4 upper = smem.ratios[step][0][threadIdx.x], lower = smem.ratios[step][1][threadIdx.x];
                group_row columns[2][2];
#pragma unroll
                for (int e = 0; e < 4; e++) {
                    const float4 row =
                        *(const float4 *)(const void *)&smem.rows[n % STAGES][step * 16 + acc_column(e / 2, e % 2)];
                    columns[e / 2][e % 2] = {row.x, row.y, row.z, row.w};
                }
                gradient_block(
                    x, side, wrt_b, [&](int reg) { return join_ratios(word_of(upper, reg), word_of(lower, reg)); },
                    [&](int block, int e) -> const group_row & { return columns[block][e % 2]; });
#pragma unroll
                for (int e = 0; e < 8; e++) { /* 0 stays 0: the pair may be masked */
                    float &at = x.at[0][e / 4][e % 4];
                    at = at == 0.0F ? 0.0F : at * columns[e / 4][e % 2].grad;
                }
                if (unit.MOVES)
                    unit.fit(sums, largest_of(x));
                pack_multiply_add<ELEMENT, GROUP_DIM>(sums, unit.inverse(), x, gradient_b_address(streamed),
                                                      step * 16);
            }
            queries.store_row(n + 1, next);
        }
    });
#pragma unroll
    for (int half = 0; half < 2; half++)
        add_key_row<GROUP_DIM>(params, work, block_first + acc_row<1>(0, half), 0,
                               [&](int c, int parity) { return sums.sum[0][c][half * 2 + parity] * unit.value(); });
}

/* ---- Kernel -------------------------------------------------------------------------------------------------- */

static_assert(sizeof(query_smem<GROUP_DIM>) <= sizeof(group_key_smem), "a launch has the memory of both");

/* One launch for both: a strip has few blocks of either, and of unequal length. Blocks from params.query_blocks on
 * have keys. */
template <typename ELEMENT>
__global__ void __launch_bounds__(THREADS, 2) group_gradient_kernel(const __grid_constant__ ratio_params params)
{
    extern __shared__ __align__(128) unsigned char raw[];
    if (blockIdx.x < params.query_blocks)
        add_queries<ELEMENT>(params, *(query_smem<GROUP_DIM> *)(void *)raw, blockIdx.x);
    else
        add_keys<ELEMENT>(params, *(group_key_smem *)(void *)raw, blockIdx.x - params.query_blocks);
}

} // namespace sm80

#endif
