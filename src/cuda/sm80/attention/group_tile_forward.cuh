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

    __device__ raw_stats load(const group_product<false> &of, bool of_student, int query) const
    {
        const int64_t at = query * params.call.inputs.lse_t.stride_row;
        return of_student ? raw_stats{} : raw_stats{smem.sources[of.n()].lse[at], smem.sources[0].lse[at]};
    }

    __device__ query_stats student_stats(const raw_stats &) const
    {
        return {};
    }

    static constexpr bool USES_STATIONARY = false;

    template <bool MASKED> __device__ void add(const group_logits &p, const group_logits &y)
    {
        const group_thread thread = group_thread::read();
#pragma unroll
        for (int m = 0; m < GROUP_M; m++)
#pragma unroll
            for (int half = 0; half < 2; half++)
                add_group_tile<MASKED>(state[m][half], p[m], y[m], params.b.scale, half,
                                       MASKED ? smem.seen[thread.acc_row(m, half)].from(thread.column) : range32{});
    }

    __device__ void student(const group_logits &p, const group_logits &y, const group_tile<DIM> &,
                            const query_stats *, const group_product<false> &at)
    {
        if (covers(smem.block.full, at.first(), GROUP_TILE_ROWS))
            add<false>(p, y);
        else
            add<true>(p, y);
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
                merged[thread.quarter()][thread.acc_row(m, half)] = state;
        }
    __syncthreads();
    query_tile<GROUP_M> written; /* the same tile, recomputed: `tile` need not stay in registers during the loop */
    (void)written.find(params, params.num_splits, (unsigned)params.head_group);
    const int row = (int)threadIdx.x;
    if (row >= GROUP_TILE_ROWS || written.first + row >= written.sequence.query_count)
        return;
    skl_row_state state = merged[0][row];
    for (int quarter = 1; quarter < GROUP_SHARING; quarter++)
        state = skl_state_merge(state, merged[quarter][row]);
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
