/* Forward of a student with teacher groups by mma.sync, sm_80 and up: KL and the student's LSE of each row.
 * group_tile_products.cuh describes the tiles, sm90/attention/group_forward.cuh the row state: its shifts are the
 * first head's LSE, until a sum is out of range.
 *
 * Splits over the keys as in forward.cuh. */
#ifndef SKL_CUDA_SM80_ATTENTION_GROUP_TILE_FORWARD_CUH
#define SKL_CUDA_SM80_ATTENTION_GROUP_TILE_FORWARD_CUH

#include "cuda/sm80/attention/group_tile_products.cuh"

namespace sm80
{

/* LSE of the first teacher head of a student head. */
__device__ inline float first_lse(const forward_params &params, const skl_sequence &s, int64_t head, int64_t query)
{
    return skl_row_value(&params.call.inputs.lse_t, &s, head * skl_group_size(&params.problem), query);
}

template <typename ELEMENT, int DIM> struct group_forward_pass {
    const forward_params &params;
    group_smem<DIM> &smem;
    skl_row_state state[GROUP_M][2];

    __device__ void clear()
    {
        const group_thread thread = group_thread::read();
#pragma unroll
        for (int m = 0; m < GROUP_M; m++)
#pragma unroll
            for (int half = 0; half < 2; half++) {
                const int row = min(thread.acc_row(m, half), smem.block.rows - 1);
                const skl_lse2 first =
                    split_lse2(first_lse(params, smem.block.sequence, smem.block.head, smem.block.first_row + row));
                state[m][half] = {0.0F, 0.0F, fabsf(first.value) < INFINITY ? first.value : 0.0F, 0.0F, 0.0F};
            }
    }

    __device__ skl_input lse_of(bool of_student) const
    {
        return of_student ? skl_input{} : params.call.inputs.lse_t;
    }

    __device__ raw_stats load(const group_product &of, bool of_student, int query) const
    {
        const int64_t at = query * params.call.inputs.lse_t.stride_row;
        return of_student ? raw_stats{} : raw_stats{smem.sources[of.n].lse[at], smem.sources[0].lse[at]};
    }

    __device__ query_stats student_stats(const raw_stats &) const
    {
        return {};
    }

    __device__ bool keeps_stationary() const
    {
        return false;
    }

    /* Sums of a stage with the current shifts. MASKED: only of visible pairs, and exact for huge shifts. */
    template <bool MASKED>
    __device__ void sum_stage(row_sums (&sums)[GROUP_M][2], const group_mean &p, const row_frags<DIM, GROUP_M> &frags,
                              const group_tile<DIM> &streamed, int stage_rows) const
    {
        const group_thread thread = group_thread::read();
        for_each_step<ELEMENT>(thread, frags, streamed, stage_rows, [&](const step_logits &y, int step) {
#pragma unroll
            for (int m = 0; m < GROUP_M; m++)
#pragma unroll
                for (int e = 0; e < 4 * GROUP_BLOCKS; e++) {
                    const int half = e % 4 / 2;
                    const float m_b = state[m][half].m_b;
                    const float log_s =
                        minus_shift(y.at[m][e / 4][e % 4], params.b.scale, m_b, MASKED && is_huge(m_b));
                    const bool seen = !MASKED || is_seen(thread, m, step, e);
                    add_probabilities(sums[m][half], seen ? p[step].at[m][e / 4][e % 4] : 0.0F,
                                      seen ? ex2(log_s) : 0.0F, seen ? log_s : 0.0F);
                }
        });
    }

    /* Shifts of the rows that have a bit become the stage's maximum. */
    __device__ void move_shifts(unsigned rows, const row_frags<DIM, GROUP_M> &frags, const group_tile<DIM> &streamed,
                                int stage_rows)
    {
        const group_thread thread = group_thread::read();
        float largest[GROUP_M][2] = {{-INFINITY, -INFINITY}, {-INFINITY, -INFINITY}};
        for_each_step<ELEMENT>(thread, frags, streamed, stage_rows, [&](const step_logits &y, int step) {
#pragma unroll
            for (int m = 0; m < GROUP_M; m++)
#pragma unroll
                for (int e = 0; e < 4 * GROUP_BLOCKS; e++)
                    if (is_seen(thread, m, step, e))
                        largest[m][e % 4 / 2] = fmaxf(largest[m][e % 4 / 2], y.at[m][e / 4][e % 4] * params.b.scale);
        });
#pragma unroll
        for (int m = 0; m < GROUP_M; m++)
#pragma unroll
            for (int half = 0; half < 2; half++)
                if ((rows >> (m * 2 + half) & 1) != 0)
                    state[m][half] = with_shift_for(state[m][half], largest[m][half]);
    }

    __device__ bool is_seen(const group_thread &thread, int m, int step, int e) const
    {
        const stage_range sees = smem.seen[thread.acc_row(m, e % 4 / 2)];
        const int column = thread.acc_column(step, e / 4, e % 2);
        return column >= sees.begin && column < sees.end;
    }

    /* Rows whose sums cannot be added with their shift, a bit each. */
    __device__ unsigned out_of_range(const row_sums (&sums)[GROUP_M][2]) const
    {
        unsigned rows = 0;
#pragma unroll
        for (int m = 0; m < GROUP_M; m++)
#pragma unroll
            for (int half = 0; half < 2; half++)
                rows |= keeps_shift(state[m][half], sums[m][half]) ? 0 : 1U << (m * 2 + half);
        return rows;
    }

    __device__ void add(const row_sums (&sums)[GROUP_M][2])
    {
#pragma unroll
        for (int m = 0; m < GROUP_M; m++)
#pragma unroll
            for (int half = 0; half < 2; half++)
                add_sums(state[m][half], sums[m][half]);
    }

    __device__ void student(const group_mean &p, const row_frags<DIM, GROUP_M> &frags,
                            const group_tile<DIM> &streamed, const query_stats *, const group_product &at)
    {
        const int stage_rows = smem.block.needed - at.first;
        if (covers(smem.block.full, at.first, GROUP_TILE_ROWS)) {
            row_sums sums[GROUP_M][2] = {};
            sum_stage<false>(sums, p, frags, streamed, stage_rows);
            if (!__any_sync(~0U, out_of_range(sums) != 0)) {
                add(sums);
                return;
            }
        }
        for (bool moved = false;; moved = true) {
            row_sums sums[GROUP_M][2] = {};
            sum_stage<true>(sums, p, frags, streamed, stage_rows);
            const unsigned rows = moved ? 0 : out_of_range(sums);
            if (!__any_sync(~0U, rows != 0)) {
                add(sums);
                return;
            }
            move_shifts(rows, frags, streamed, stage_rows);
        }
    }
};

template <typename ELEMENT, int DIM>
__global__ void __launch_bounds__(GROUP_THREADS, 1)
    group_tile_forward_kernel(const __grid_constant__ forward_params params)
{
    extern __shared__ __align__(128) unsigned char raw[];
    group_smem<DIM> &smem = *(group_smem<DIM> *)(void *)raw;
    query_tile<GROUP_M> tile;
    if (!tile.find(params, params.num_splits, (unsigned)params.head_group))
        return;
    const int rows = (int)skl_min(GROUP_TILE_ROWS, tile.sequence.query_count - tile.first);
    if (threadIdx.x == 0) {
        const skl_band band = skl_key_band(&params.problem, &tile.sequence);
        set_group_block<false>(smem, tile.sequence, tile.first, rows,
                               streamed_split(stream_for(band, tile.first, tile.first + rows - 1), GROUP_TILE_ROWS,
                                              tile.split, params.num_splits),
                               tile.head, tile.head + 1, (int)skl_group_size(&params.problem));
        smem.block.full.end = min(smem.block.full.end, smem.block.needed); /* a split's end, within its last stage */
    }
    __syncthreads();
    group_forward_pass<ELEMENT, DIM> pass = {params, smem, {}};
    pass.clear();
    run_group_products<ELEMENT, DIM, false>(params, smem, pass);

    const group_thread thread = group_thread::read();
    skl_row_state(*const merged)[GROUP_TILE_ROWS] = (skl_row_state(*)[GROUP_TILE_ROWS])(void *)smem.stationary;
#pragma unroll
    for (int m = 0; m < GROUP_M; m++)
#pragma unroll
        for (int half = 0; half < 2; half++) {
            const skl_row_state state = merge_lanes(without_shift_if_empty(pass.state[m][half]));
            if (thread.lane % 4 == 0)
                merged[thread.half()][thread.acc_row(m, half)] = state;
        }
    __syncthreads();
    query_tile<GROUP_M> written; /* the same tile, recomputed: `tile` need not stay in registers during the loop */
    (void)written.find(params, params.num_splits, (unsigned)params.head_group);
    const int row = (int)threadIdx.x;
    if (row >= GROUP_TILE_ROWS || written.first + row >= written.sequence.query_count)
        return;
    skl_row_state state = skl_state_merge(merged[0][row], merged[1][row]);
    state.m_a = -split_lse2(first_lse(params, written.sequence, written.head, written.first + row)).low;
    if (params.num_splits > 1)
        params.split_states[written.index * written.ROWS + row] = state;
    else
        write_group_results(params, written.sequence, written.head, written.first + row, state);
}

template <typename ELEMENT, int DIM>
cudaError_t launch_group_tile_forward(const char *kernel, const skl_cuda_params *params,
                                      const skl_cuda_launch *launch)
{
    const forward_params kernel_params = forward_params_of(params, launch);
    const skl_problem *const p = &params->problem;
    const int64_t tiles = skl_ceil_div(p->len_q, GROUP_TILE_ROWS);
    record_launch(kernel, SKL_VARIANT_GROUPS, launch->num_splits);
    const cudaError_t error =
        cudaFuncSetAttribute(group_tile_forward_kernel<ELEMENT, DIM>, cudaFuncAttributeMaxDynamicSharedMemorySize,
                             (int)sizeof(group_smem<DIM>));
    if (error != cudaSuccess)
        return error;
    group_tile_forward_kernel<ELEMENT, DIM>
        <<<grid_of(p->batch, p->heads_s, tiles * launch->num_splits), GROUP_THREADS, sizeof(group_smem<DIM>),
           params->call.stream>>>(kernel_params);
    if (launch->num_splits > 1)
        merge_group_splits<GROUP_M>
            <<<grid_of(p->batch, p->heads_s, tiles), GROUP_TILE_ROWS, 0, params->call.stream>>>(kernel_params);
    return cudaPeekAtLastError();
}

} // namespace sm80

#endif
