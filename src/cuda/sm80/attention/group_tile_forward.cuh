/* Forward of a student with teacher groups by mma.sync, sm_80 and up: KL and the student's LSE of each row.
 * group_tile_products.cuh describes the tiles, sm90/attention/group_forward.cuh the row state: its shifts are the
 * first head's LSE, until a sum is out of range.
 *
 * Splits over the keys as in forward.cuh. */
#ifndef SKL_CUDA_SM80_ATTENTION_GROUP_TILE_FORWARD_CUH
#define SKL_CUDA_SM80_ATTENTION_GROUP_TILE_FORWARD_CUH

#include "cuda/common/launch.cuh"
#include "cuda/sm80/attention/group_tile_products.cuh"

namespace sm80
{

/* LSE of the first teacher head of a student head. */
__device__ inline float first_lse(const forward_params &params, const skl_sequence &s, int64_t head, int64_t query)
{
    return skl_row_value(&params.call.inputs.lse_t, &s, head * skl_group_size(&params.problem), query);
}

template <typename ELEMENT, int DIM> struct group_forward_pass {

    const group_tile_params<forward_params> &params;
    group_smem<DIM> &smem;
    unsigned index;
    skl_row_state state[GROUP_M][2];

    __device__ void clear()
    {
        const group_thread thread(index);
#pragma unroll
        for (int m = 0; m < GROUP_M; m++)
#pragma unroll
            for (int half = 0; half < 2; half++) {
                const float shift = reference_of(thread.acc_row(m, half));
                state[m][half] = {0.0F, 0.0F, fabsf(shift) < INFINITY ? shift : 0.0F, 0.0F, 0.0F};
            }
    }

    /* The LSE of the first head in base 2. */
    __device__ float reference_of(int row) const
    {
        const int64_t query = smem.block.first_row + min(row, smem.block.rows - 1);
        return split_lse2(first_lse(params, smem.block.sequence, smem.block.head, query)).value;
    }

    __device__ skl_input lse_of(bool of_student) const
    {
        return of_student ? skl_input{} : params.call.inputs.lse_t;
    }

    __device__ float lse_at(const group_product<false> &of, int n, int query) const
    {
        return smem.sources[of.list()][n].lse[query * params.call.inputs.lse_t.stride_row];
    }

    __device__ float load(const group_product<false> &of, int query) const
    {
        return of.n() < params.group_size ? lse_at(of, of.n(), query) : 0.0F;
    }

    __device__ float reference(const group_product<false> &of, int query) const
    {
        return lse_at(of, 0, query);
    }

    __device__ query_stats student_stats(float, float) const
    {
        return {};
    }

    static constexpr bool USES_STATIONARY = false;
    static constexpr bool LOADS_REFERENCE = false; /* the reference is in the L1 cache */

    template <bool MASKED> __device__ void add(const group_logits &p, const group_logits &y)
    {
        const group_thread thread(index);
#pragma unroll
        for (int m = 0; m < GROUP_M; m++)
#pragma unroll
            for (int half = 0; half < 2; half++)
                add_group_tile<MASKED, false>(state[m][half], p[m], y[m], params.b.scale, half,
                                              MASKED ? smem.seen[thread.acc_row(m, half)].from(thread.column)
                                                     : range32{},
                                              [&] { return reference_of(thread.acc_row(m, half)); });
    }

    __device__ void student(const group_logits &p, const group_logits &y, const group_streamed<DIM> &,
                            const warp_stats<false> &, const group_product<false> &at)
    {
        if (covers(smem.block.full, at.first(), GROUP_STREAMED))
            add<false>(p, y);
        else
            add<true>(p, y);
    }
};

template <typename ELEMENT, int DIM>
__global__ void __launch_bounds__(GROUP_THREADS, GROUP_BLOCKS_PER_SM)
    group_tile_forward_kernel(const __grid_constant__ group_tile_params<forward_params> params)
{
    extern __shared__ __align__(128) unsigned char raw[];
    group_smem<DIM> &smem = *(group_smem<DIM> *)kept_address(raw);
    const unsigned index = kept(threadIdx.x);
    query_tile<GROUP_TILE_M> tile;
    if (!tile.find(params, params.num_splits, (unsigned)params.head_group))
        return;
    const int rows = (int)skl_min(GROUP_STATIONARY, tile.sequence.query_count - tile.first);
    if (threadIdx.x == 0) {
        const skl_band band = skl_key_band(&params.problem, &tile.sequence);
        set_group_block<false>(smem, tile.sequence, tile.first, rows,
                               streamed_split(stream_for(band, tile.first, tile.first + rows - 1), GROUP_STREAMED,
                                              tile.split, params.num_splits),
                               tile.head, tile.head + 1);
        smem.block.full.end = min(smem.block.full.end, smem.block.needed); /* a split's end, within its last stage */
    }
    __syncthreads();
    group_forward_pass<ELEMENT, DIM> pass = {params, smem, index, {}};
    pass.clear();
    run_group_products<ELEMENT, DIM, false>(params, smem, (group_streamed<DIM> *)(void *)(&smem + 1), index, pass);

    const group_thread thread(index);
    skl_row_state(*const merged)[GROUP_STATIONARY] = (skl_row_state(*)[GROUP_STATIONARY])(void *)smem.g;
#pragma unroll
    for (int m = 0; m < GROUP_M; m++)
#pragma unroll
        for (int half = 0; half < 2; half++) {
            const skl_row_state state = merge_lanes(without_shift_if_empty(pass.state[m][half]));
            if (thread.lane % 4 == 0)
                merged[thread.half()][thread.acc_row(m, half)] = state;
        }
    __syncthreads();
    query_tile<GROUP_TILE_M> written; /* `tile` again, so that it need not stay in registers during the loop */
    (void)written.find(params, params.num_splits, (unsigned)params.head_group);
    const int row = (int)threadIdx.x;
    if (row >= GROUP_STATIONARY || written.first + row >= written.sequence.query_count)
        return;
    skl_row_state state = merged[0][row];
    for (int half = 1; half < GROUP_SHARING; half++)
        state = skl_state_merge(state, merged[half][row]);
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
    const auto kernel_params = group_tile_params_of<DIM, group_smem<DIM>>(forward_params_of(params, launch), launch);
    const size_t size = sizeof(group_smem<DIM>) + (size_t)kernel_params.slots * sizeof(group_streamed<DIM>);
    const skl_problem *const p = &params->problem;
    const int64_t tiles = skl_ceil_div(p->len_q, GROUP_STATIONARY);
    record_launch(kernel, SKL_VARIANT_GROUPS, launch->num_splits);
    const cudaError_t error =
        launch_blocks(group_tile_forward_kernel<ELEMENT, DIM>,
                      grid_of(p->batch, p->heads_s, tiles * launch->num_splits), GROUP_THREADS, size, kernel_params);
    return error == cudaSuccess && launch->num_splits > 1
               ? launch_blocks(merge_group_splits<GROUP_TILE_M>, grid_of(p->batch, p->heads_s, tiles),
                               GROUP_STATIONARY, 0, kernel_params)
               : error;
}

} // namespace sm80

#endif
