/* Forward on tensor cores by mma.sync, sm_80 and up: 16-bit types, one teacher head a student head. sm80/tile.cuh
 * says how a block works.
 *
 *   block   4 warps of 16 M queries: 128 for M = 2, 64 for M = 1; 2 or 3 blocks a multiprocessor
 *   regs    Q of both arguments (M DIM / 2), logits of a step (8 M), states and sums of 2 M rows (16 M)
 *   shared  2 stages of 64 keys of both arguments: 64 KB at DIM = 128
 *
 *   stage n + 1 is copied (cp.async)  |  for each step of 8 or 16 keys of stage n: X, Y (mma), both exponentials,
 * sums
 *
 * A thread keeps the state of its own columns of each of its rows; four lanes merge theirs at the end. Stages that a
 * warp sees whole are summed blindly, with the stabilisers as they are; where that does not hold (a row's first
 * stage, masks, logits that outgrew the stabiliser, softcap) the stage is done over, with a maximum for each step.
 *
 * When there are too few query tiles to fill the GPU, a tile's keys are cut into parts, a block each. Their states go
 * through the workspace, and a second kernel merges them. */
#ifndef SKL_CUDA_SM80_FORWARD_CUH
#define SKL_CUDA_SM80_FORWARD_CUH

#include "cuda/sm80/tile.cuh"

namespace sm80
{

template <int DIM, int M> union forward_memory {
    stage_memory<DIM> stages[STAGES];
    skl_row_state rows[WARPS * 16 * M];
};

/* ---- Row states --------------------------------------------------------------------------------------------- */

struct row_sums {
    float l_1, l_2, w;
};

__device__ inline void add_pair(row_sums &sums, float u, float v)
{
    const float p = ex2(u);
    sums.l_1 += p;
    sums.l_2 += ex2(v);
    sums.w = fmaf(p, u - v, sums.w);
}

__device__ inline void add_sums(skl_row_state &state, const row_sums &sums)
{
    state.l_1 += sums.l_1;
    state.l_2 += sums.l_2;
    state.w += sums.w;
}

/* Adds a stage that every row of the warp sees whole; false, and nothing added, if a stabiliser has to move. */
template <typename ELEMENT, int BLOCKS, int DIM, int M>
__device__ inline bool add_blindly(skl_row_state (&state)[M][2], const own_rows<DIM, M> &q_1, uint32_t k_1,
                                   float scale_1, const own_rows<DIM, M> &q_2, uint32_t k_2, float scale_2)
{
    row_sums sums[M][2] = {};
#pragma unroll 1
    for (int row = 0; row < STAGE_ROWS<DIM>; row += 8 * BLOCKS) {
        logits<M, BLOCKS> x, y;
        multiply<ELEMENT>(x, q_1, k_1, row);
        multiply<ELEMENT>(y, q_2, k_2, row);
#pragma unroll
        for (int m = 0; m < M; m++)
#pragma unroll
            for (int e = 0; e < BLOCKS * 4; e++)
                add_pair(sums[m][e % 4 / 2], fmaf(x.at[m][e / 4][e % 4], scale_1, -state[m][e % 4 / 2].m_1),
                         fmaf(y.at[m][e / 4][e % 4], scale_2, -state[m][e % 4 / 2].m_2));
    }
    bool fine = true;
#pragma unroll
    for (int m = 0; m < M; m++)
#pragma unroll
        for (int half = 0; half < 2; half++)
            fine = fine && sums[m][half].l_1 < SKL_LAZY_BOUND && sums[m][half].l_2 < SKL_LAZY_BOUND;
    if (__any_sync(~0U, !fine))
        return false;
#pragma unroll
    for (int m = 0; m < M; m++)
#pragma unroll
        for (int half = 0; half < 2; half++)
            add_sums(state[m][half], sums[m][half]);
    return true;
}

/* Adds a row's columns of one step with their true maximum; `sees` counts from the step's first key. */
template <int BLOCKS>
__device__ inline void add_exactly(skl_row_state &state, const float (&a)[BLOCKS][4], float scale_1,
                                   const float (&b)[BLOCKS][4], float scale_2, int half, const range32 &sees)
{
    float m_1 = state.m_1, m_2 = state.m_2;
    bool any = false;
#pragma unroll
    for (int block = 0; block < BLOCKS; block++)
#pragma unroll
        for (int parity = 0; parity < 2; parity++) {
            const int column = column_of(block, parity);
            const bool seen = column >= sees.begin && column < sees.end;
            m_1 = seen ? fmaxf(m_1, a[block][half * 2 + parity] * scale_1) : m_1;
            m_2 = seen ? fmaxf(m_2, b[block][half * 2 + parity] * scale_2) : m_2;
            any = any || seen;
        }
    if (!any)
        return;
    state = skl_state_move(state, m_1, m_2);
    row_sums sums = {};
#pragma unroll
    for (int block = 0; block < BLOCKS; block++)
#pragma unroll
        for (int parity = 0; parity < 2; parity++) {
            const int column = column_of(block, parity);
            if (column >= sees.begin && column < sees.end)
                add_pair(sums, fmaf(a[block][half * 2 + parity], scale_1, -m_1),
                         fmaf(b[block][half * 2 + parity], scale_2, -m_2));
        }
    add_sums(state, sums);
}

/* Four lanes hold a row; the lower one goes first on both sides, so that all get the same bits. */
__device__ inline skl_row_state merge_lanes(skl_row_state state)
{
#pragma unroll
    for (int offset = 1; offset < 4; offset *= 2) {
        skl_row_state other;
        other.m_1 = __shfl_xor_sync(~0U, state.m_1, offset);
        other.l_1 = __shfl_xor_sync(~0U, state.l_1, offset);
        other.m_2 = __shfl_xor_sync(~0U, state.m_2, offset);
        other.l_2 = __shfl_xor_sync(~0U, state.l_2, offset);
        other.w = __shfl_xor_sync(~0U, state.w, offset);
        const bool lower = (threadIdx.x & (unsigned)offset) == 0;
        state = lower ? skl_state_merge(state, other) : skl_state_merge(other, state);
    }
    return state;
}

__device__ inline void write_row(const skl_cuda_params &params, const skl_sequence &s, int64_t head, int64_t query,
                                 const skl_row_state &state)
{
    if (params.call.op == SKL_OP_PARTIAL) {
        params.call.states[skl_state_index(&params.problem, &s, head, query)] = state;
        return;
    }
    const bool reverse = params.problem.direction == SKL_KL_REVERSE;
    const float lse_1 = skl_lse(state.m_1, state.l_1);
    const float lse_2 = skl_lse(state.m_2, state.l_2);
    skl_row_set(&params.call.rows.kl, &s, head, query, skl_kl_report(skl_state_kl(&state)));
    skl_row_set(&params.call.rows.lse_t, &s, head, query, reverse ? lse_2 : lse_1);
    skl_row_set(&params.call.rows.lse_s, &s, head, query, reverse ? lse_1 : lse_2);
}

/* ---- One query tile ----------------------------------------------------------------------------------------- */

template <int M> struct query_place {
    static constexpr int ROWS = WARPS * 16 * M;
    skl_sequence sequence;
    int64_t head, first; /* query */
    int64_t slot;        /* of the tile, or of the part, among all */
    int part;            /* of the tile's keys */

    /* `parts` blocks a tile. False: there is nothing at this block's place. */
    __device__ bool find(const skl_cuda_params &params, int parts)
    {
        const skl_problem &p = params.problem;
        const unsigned tiles = (unsigned)skl_ceil_div(p.len_q, ROWS);
        const work at = work_of_block((unsigned)p.heads_s, tiles * parts);
        if (at.sequence >= p.batch)
            return false;
        sequence = device_sequence(params, at.sequence);
        head = at.head;
        part = at.tile % parts;
        slot = (at.sequence * p.heads_s + head) * tiles * parts + at.tile;
        first = (int64_t)(tiles - 1 - at.tile / parts) * ROWS; /* causal: longest first */
        return first < sequence.query_count;
    }
};

template <typename ELEMENT, int DIM, int M>
__device__ inline void sum_keys(skl_row_state (&state)[M][2], const skl_cuda_params &params,
                                forward_memory<DIM, M> &memory, const skl_sequence &s, int64_t head,
                                int64_t query_first, int part)
{
    const skl_cuda_argument &one = params.one, &two = params.two;
    const int last_row = (int)skl_min(WARPS * 16 * M, s.query_count - query_first) - 1;
    const streamed_band keys = cut(stream_for(skl_key_band(&params.problem, &s), query_first, query_first + last_row),
                                   STAGE_ROWS<DIM>, part, params.splits);
    const reach warp = reach_of(keys.band, (int)threadIdx.x / 32 * 16 * M, 16 * M);
    const row_source<ELEMENT> from_1 = keys_of<ELEMENT>(one, s, head).from(keys.origin);
    const row_source<ELEMENT> from_2 = keys_of<ELEMENT>(two, s, head).from(keys.origin);
    const bool capped = one.capped || two.capped;

    own_rows<DIM, M> q_1, q_2;
    load_own(q_1, memory.stages, queries_of<ELEMENT>(one, s, head).from(query_first), last_row + 1);
    load_own(q_2, memory.stages, queries_of<ELEMENT>(two, s, head).from(query_first), last_row + 1);

    copy_rows(memory.stages[0].one, from_1, 0, keys.band.count);
    copy_rows(memory.stages[0].two, from_2, 0, keys.band.count);
    cp_async_commit();
    for (int first = 0, stage = 0; first < keys.needed; first += STAGE_ROWS<DIM>, stage = 1 - stage) {
        cp_async_wait<0>();
        __syncthreads(); /* this stage is complete, and the other one free */
        if (first + STAGE_ROWS<DIM> < keys.needed) {
            copy_rows(memory.stages[1 - stage].one, from_1, first + STAGE_ROWS<DIM>, keys.band.count);
            copy_rows(memory.stages[1 - stage].two, from_2, first + STAGE_ROWS<DIM>, keys.band.count);
        }
        cp_async_commit();
        if (!meets(warp.any, first, STAGE_ROWS<DIM>))
            continue;

        constexpr int BLOCKS = 1; /* in eights: steps of 16 keys were slower, their logits take registers */
        const uint32_t k_1 = logit_operand<BLOCKS>(memory.stages[stage].one);
        const uint32_t k_2 = logit_operand<BLOCKS>(memory.stages[stage].two);
        if (covers(warp.all, first, STAGE_ROWS<DIM>) && !capped &&
            add_blindly<ELEMENT, BLOCKS>(state, q_1, k_1, one.scale, q_2, k_2, two.scale))
            continue;
#pragma unroll 1
        for (int row = 0; row < STAGE_ROWS<DIM>; row += 8 * BLOCKS) {
            logits<M, BLOCKS> x, y;
            multiply<ELEMENT>(x, q_1, k_1, row);
            multiply<ELEMENT>(y, q_2, k_2, row);
            const float rest_1 = cap_logits(x, one);
            const float rest_2 = cap_logits(y, two);
#pragma unroll
            for (int m = 0; m < M; m++)
#pragma unroll
                for (int half = 0; half < 2; half++) {
                    const range32 sees = keys.band.of(own_row<M>(m, half));
                    add_exactly(state[m][half], x.at[m], rest_1, y.at[m], rest_2, half,
                                {sees.begin - first - row, sees.end - first - row});
                }
        }
    }
    cp_async_wait<0>();
    __syncthreads();
}

/* Blocks that share a multiprocessor: what one leaves idle another one uses. Their registers bound it. */
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 1200
template <int DIM> constexpr int FORWARD_RESIDENT = 2;
#else
template <int DIM> constexpr int FORWARD_RESIDENT = DIM == 64 ? 3 : 2;
#endif

template <typename ELEMENT, int DIM, int M>
__global__ void __launch_bounds__(THREADS, FORWARD_RESIDENT<DIM>)
    forward_kernel(const __grid_constant__ skl_cuda_params params)
{
    extern __shared__ __align__(128) unsigned char raw[];
    forward_memory<DIM, M> &memory = *(forward_memory<DIM, M> *)(void *)raw;
    query_place<M> place;
    if (!place.find(params, params.splits))
        return;
    skl_row_state state[M][2];
#pragma unroll
    for (int m = 0; m < M; m++)
        state[m][0] = state[m][1] = skl_state_empty();
    sum_keys<ELEMENT, DIM, M>(state, params, memory, place.sequence, place.head, place.first, place.part);
#pragma unroll
    for (int m = 0; m < M; m++)
#pragma unroll
        for (int half = 0; half < 2; half++) {
            const skl_row_state merged = merge_lanes(state[m][half]);
            if (threadIdx.x % 4 == 0)
                memory.rows[own_row<M>(m, half)] = merged;
        }
    __syncthreads();
    (void)place.find(params, params.splits);
    const int row = (int)threadIdx.x;
    if (row >= place.ROWS || place.first + row >= place.sequence.query_count)
        return;
    if (params.splits > 1)
        ((skl_row_state *)params.scratch)[place.slot * place.ROWS + row] = memory.rows[row];
    else
        write_row(params, place.sequence, place.head, place.first + row, memory.rows[row]);
}

/* The parts of a tile, in their order: a thread a query. */
template <int M> __global__ void merge_parts(const __grid_constant__ skl_cuda_params params)
{
    query_place<M> place;
    const int row = (int)threadIdx.x;
    if (!place.find(params, 1) || place.first + row >= place.sequence.query_count)
        return;
    const skl_row_state *const parts =
        (const skl_row_state *)params.scratch + place.slot * params.splits * place.ROWS;
    skl_row_state state = parts[row];
    for (int part = 1; part < params.splits; part++)
        state = skl_state_merge(state, parts[part * place.ROWS + row]);
    write_row(params, place.sequence, place.head, place.first + row, state);
}

/* As many parts as fill a GPU that runs `resident` blocks at once, if there are keys enough for them. */
inline int32_t splits_for(int64_t tiles, int64_t resident, int64_t keys)
{
    constexpr int64_t KEYS_MIN = 256;
    return (int32_t)skl_max(1, skl_min(resident / tiles, keys / KEYS_MIN));
}

template <typename ELEMENT, int DIM, int M> cudaError_t launch_forward(const skl_cuda_params *params)
{
    constexpr int MEMORY = sizeof(forward_memory<DIM, M>);
    int resident = 0;
    cudaError_t error =
        cudaFuncSetAttribute(forward_kernel<ELEMENT, DIM, M>, cudaFuncAttributeMaxDynamicSharedMemorySize, MEMORY);
    if (error == cudaSuccess)
        error = cudaOccupancyMaxActiveBlocksPerMultiprocessor(&resident, forward_kernel<ELEMENT, DIM, M>, THREADS,
                                                              MEMORY);
    if (error != cudaSuccess)
        return error;
    const skl_problem *const p = &params->problem;
    const int64_t tiles = skl_ceil_div(p->len_q, query_place<M>::ROWS);
    skl_cuda_params own = *params;
    own.splits = splits_for(p->batch * p->heads_s * tiles,
                            (int64_t)params->multiprocessors * skl_min(resident, SKL_SM80_RESIDENT_MAX), p->len_k);
    forward_kernel<ELEMENT, DIM, M>
        <<<grid_of(p->batch, p->heads_s, tiles * own.splits), THREADS, MEMORY, params->call.stream>>>(own);
    if (own.splits > 1)
        merge_parts<M><<<grid_of(p->batch, p->heads_s, tiles), query_place<M>::ROWS, 0, params->call.stream>>>(own);
    return cudaPeekAtLastError();
}

} // namespace sm80

#endif
