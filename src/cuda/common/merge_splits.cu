/* Merges the splits of a forward's keys: compiled once for all kernels that split them. */
#include "cuda/common/row_state.cuh"

namespace tensor_core
{

/* One block per tile, one thread per query. */
template <int M> static __global__ void merge_kernel(const __grid_constant__ forward_params params)
{
    query_tile<M> tile;
    const int row = (int)threadIdx.x;
    if (!tile.find(params, 1, (unsigned)params.head_group) || tile.first + row >= tile.sequence.query_count)
        return;
    const skl_row_state *const splits = params.split_states + tile.index * params.num_splits * tile.ROWS;
    skl_row_state state = splits[row];
    for (int split = 1; split < params.num_splits; split++)
        state = skl_state_merge(state, splits[split * tile.ROWS + row]);
    write_row(params, tile.sequence, tile.head, tile.first + row, state);
}

template <int M> cudaError_t merge_splits(const forward_params &params)
{
    const skl_problem &p = params.problem;
    const dim3 blocks = grid_of(p.batch, p.heads_s, skl_ceil_div(p.len_q, TILE_ROWS<M>));
    merge_kernel<M><<<blocks, TILE_ROWS<M>, 0, params.call.stream>>>(params);
    return cudaPeekAtLastError();
}

template cudaError_t merge_splits<1>(const forward_params &params);
template cudaError_t merge_splits<2>(const forward_params &params);
template cudaError_t merge_splits<4>(const forward_params &params);

} // namespace tensor_core
