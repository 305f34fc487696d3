/* Forward by mma.sync, sm_80 and up: KL and LSEs of each row in one pass over the keys. 16-bit types, one teacher
 * head per student head. mma_tile.cuh describes the tiles.
 *
 * X and Y are on the tensor cores, two exponentials per pair on the special function units. One block alternates
 * between them; two or three blocks per SM overlap them. Registers limit the number of blocks.
 *
 *   block      4 warps of 16 M queries: 128 queries for M = 2, 64 for M = 1; 2 or 3 blocks per SM
 *   registers  Q of A and B (M DIM / 2), logits of a step (8 M), states and sums of 2 M rows (16 M)
 *   shared     2 stages of 64 keys of A and B: 64 KB at DIM = 128
 *
 *   cp.async   | stage n + 1                  | stage n + 2
 *   warps      | stage n, in steps of 8 keys: | stage n + 1
 *              |   X, Y (mma)                 |
 *              |   2^x, 2^y, row sums         |
 *
 * Row sums use a lazy shift. A full tile is added with the current shifts and without looking for a maximum. If a
 * sum exceeds its bound, nothing is added and the stage is computed again on the slow path, with the maximum of each
 * step as the shift. A row's first stage, masked tiles, and all tiles with softcap take the slow path, too.
 *
 * If there are too few query tiles to fill the GPU, the keys of a tile are divided into splits, one block each. The
 * blocks write their row states to the workspace, and a second kernel merges them. */
#ifndef SKL_CUDA_SM80_ATTENTION_FORWARD_CUH
#define SKL_CUDA_SM80_ATTENTION_FORWARD_CUH

#include "cuda/common/launch.cuh"
#include "cuda/common/row_state.cuh"

namespace sm80
{

template <int DIM, int M> struct forward_memory {
    union {
        smem_stage<DIM> stages[STAGES];
        skl_row_state rows[WARPS * 16 * M];
    };
    row_ranges<WARPS * 16 * M> visible;
};

/* Adds a full tile with the current shifts. Returns false, and adds nothing, if a shift has to change. */
template <typename ELEMENT, int BLOCKS, int DIM, int M>
__device__ inline bool add_with_shift(skl_row_state (&state)[M][2], const row_frags<DIM, M> &q_a, uint32_t k_a,
                                      float scale_a, const row_frags<DIM, M> &q_b, uint32_t k_b, float scale_b)
{
    row_sums sums[M][2] = {};
#pragma unroll 1
    for (int row = 0; row < STAGE_ROWS<DIM>; row += 8 * BLOCKS) {
        logits<M, BLOCKS> x, y;
        multiply<ELEMENT>(x, q_a, k_a, row);
        multiply<ELEMENT>(y, q_b, k_b, row);
#pragma unroll
        for (int m = 0; m < M; m++)
#pragma unroll
            for (int e = 0; e < BLOCKS * 4; e++)
                add_pair(sums[m][e % 4 / 2], fmaf(x.at[m][e / 4][e % 4], scale_a, -state[m][e % 4 / 2].m_a),
                         fmaf(y.at[m][e / 4][e % 4], scale_b, -state[m][e % 4 / 2].m_b));
    }
    bool in_range = true;
#pragma unroll
    for (int m = 0; m < M; m++)
#pragma unroll
        for (int half = 0; half < 2; half++)
            in_range = in_range && sums[m][half].l_a < SKL_LAZY_BOUND && sums[m][half].l_b < SKL_LAZY_BOUND &&
                       !is_huge(state[m][half].m_a) && !is_huge(state[m][half].m_b);
    if (__any_sync(~0U, !in_range))
        return false;
#pragma unroll
    for (int m = 0; m < M; m++)
#pragma unroll
        for (int half = 0; half < 2; half++)
            add_sums(state[m][half], sums[m][half]);
    return true;
}

/* ---- One query tile ----------------------------------------------------------------------------------------- */

/* Adds the keys of a split to the states of the thread's rows. */
template <typename ELEMENT, int DIM, int M>
__device__ inline void sum_keys(skl_row_state (&state)[M][2], const forward_params &params,
                                forward_memory<DIM, M> &memory, const skl_sequence &s, int64_t head,
                                int64_t query_first, int split)
{
    const skl_cuda_argument &a = params.a, &b = params.b;
    const int last_row = (int)skl_min(WARPS * 16 * M, s.query_count - query_first) - 1;
    const streamed_band keys =
        streamed_split(stream_for(skl_key_band(&params.problem, &s), query_first, query_first + last_row),
                       STAGE_ROWS<DIM>, split, params.num_splits);
    memory.visible.fill(keys.band);
    const reach warp = reach_of(keys.band, (int)(threadIdx.x / 32) * 16 * M, 16 * M);
    const row_source<ELEMENT> from_a = keys_of<ELEMENT>(a, s, head).from(keys.origin);
    const row_source<ELEMENT> from_b = keys_of<ELEMENT>(b, s, head).from(keys.origin);
    const bool capped = a.capped || b.capped;

    row_frags<DIM, M> q_a, q_b;
    load_frags(q_a, memory.stages, queries_of<ELEMENT>(a, s, head).from(query_first), last_row + 1);
    load_frags(q_b, memory.stages, queries_of<ELEMENT>(b, s, head).from(query_first), last_row + 1);

    copy_rows(memory.stages[0].a, from_a, 0, keys.band.count);
    copy_rows(memory.stages[0].b, from_b, 0, keys.band.count);
    cp_async_commit();
    for (int first = 0, stage = 0; first < keys.needed; first += STAGE_ROWS<DIM>, stage = 1 - stage) {
        cp_async_wait<0>();
        __syncthreads(); /* this stage is complete, and the other one is free */
        if (first + STAGE_ROWS<DIM> < keys.needed) {
            copy_rows(memory.stages[1 - stage].a, from_a, first + STAGE_ROWS<DIM>, keys.band.count);
            copy_rows(memory.stages[1 - stage].b, from_b, first + STAGE_ROWS<DIM>, keys.band.count);
        }
        cp_async_commit();
        if (!overlaps(warp.any, first, STAGE_ROWS<DIM>))
            continue;

        constexpr int BLOCKS = 1; /* a step has 8 keys: with 16, logits need more registers, which was slower */
        const uint32_t k_a = logit_b_address<BLOCKS>(memory.stages[stage].a);
        const uint32_t k_b = logit_b_address<BLOCKS>(memory.stages[stage].b);
        if (covers(warp.all, first, STAGE_ROWS<DIM>) && !capped &&
            add_with_shift<ELEMENT, BLOCKS>(state, q_a, k_a, a.scale, q_b, k_b, b.scale))
            continue;
#pragma unroll 1
        for (int row = 0; row < STAGE_ROWS<DIM>; row += 8 * BLOCKS) {
            logits<M, BLOCKS> x, y;
            multiply<ELEMENT>(x, q_a, k_a, row);
            multiply<ELEMENT>(y, q_b, k_b, row);
            const float scale_a = cap_logits(x.at, a);
            const float scale_b = cap_logits(y.at, b);
#pragma unroll
            for (int m = 0; m < M; m++)
#pragma unroll
                for (int half = 0; half < 2; half++) {
                    const range32 sees = memory.visible.of(acc_row<M>(m, half));
                    add_with_max<true, BLOCKS>(state[m][half], x.at[m], scale_a, y.at[m], scale_b, half,
                                               {sees.begin - first - row, sees.end - first - row});
                }
        }
    }
    cp_async_wait<0>();
    __syncthreads();
}

/* Registers limit the blocks per SM. */
#if defined(__CUDA_ARCH__)
template <int DIM> constexpr int FORWARD_BLOCKS_PER_SM = SKL_SM80_FORWARD_BLOCKS(DIM, __CUDA_ARCH__ / 10);
#else
template <int DIM> constexpr int FORWARD_BLOCKS_PER_SM = 2;
#endif

template <typename ELEMENT, int DIM, int M>
__global__ void __launch_bounds__(THREADS, FORWARD_BLOCKS_PER_SM<DIM>)
    forward_kernel(const __grid_constant__ forward_params params)
{
    extern __shared__ __align__(128) unsigned char raw[];
    forward_memory<DIM, M> &memory = *(forward_memory<DIM, M> *)(void *)raw;
    query_tile<M> tile;
    if (!tile.find(params, params.num_splits, (unsigned)params.head_group))
        return;
    skl_row_state state[M][2];
#pragma unroll
    for (int m = 0; m < M; m++)
        state[m][0] = state[m][1] = skl_state_empty();
    sum_keys<ELEMENT, DIM, M>(state, params, memory, tile.sequence, tile.head, tile.first, tile.split);
#pragma unroll
    for (int m = 0; m < M; m++)
#pragma unroll
        for (int half = 0; half < 2; half++) {
            const skl_row_state merged = merge_lanes(state[m][half]);
            if (threadIdx.x % 4 == 0)
                memory.rows[acc_row<M>(m, half)] = merged;
        }
    __syncthreads();
    query_tile<M> written; /* `tile` again, so that it need not stay in registers during the loop */
    (void)written.find(params, params.num_splits, (unsigned)params.head_group);
    const int row = (int)threadIdx.x;
    if (row < written.ROWS && written.first + row < written.sequence.query_count)
        write_split(params, written, row, memory.rows[row]);
}

template <typename ELEMENT, int DIM, int M> struct forward_launch {
    static constexpr int ROWS = query_tile<M>::ROWS, MEMORY = sizeof(forward_memory<DIM, M>);
    static_assert(ROWS == SKL_SM80_FORWARD_ROWS(DIM), "cuda/select counts tiles");
    static_assert(MEMORY == SKL_SM80_FORWARD_SMEM(DIM), "cuda/select counts blocks per SM");

    static cudaError_t run(const char *kernel, const skl_cuda_params *params, const skl_cuda_launch *launch)
    {
        const forward_params kernel_params = forward_params_of(params, launch);
        const skl_problem *const p = &kernel_params.problem;
        const int64_t tiles = skl_ceil_div(p->len_q, ROWS);
        record_launch(kernel, SKL_VARIANT_TILES, kernel_params.num_splits);
        const cudaError_t error = launch_blocks(forward_kernel<ELEMENT, DIM, M>,
                                                grid_of(p->batch, p->heads_s, tiles * kernel_params.num_splits),
                                                THREADS, MEMORY, kernel_params);
        return error == cudaSuccess && kernel_params.num_splits > 1 ? merge_splits<M>(kernel_params) : error;
    }
};

} // namespace sm80

#endif
