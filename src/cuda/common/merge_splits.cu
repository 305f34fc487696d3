/* Merges the splits of a forward's keys: compiled once for all kernels that split them. */
#include "cuda/common/launch.cuh"
#include "cuda/common/row_state.cuh"

namespace tensor_core
{

template <int M> static __global__ void merge_kernel(const __grid_constant__ forward_params params)
{
    merge_row_splits<M>(params, [&](const skl_sequence &s, int64_t head, int64_t query, const skl_row_state &state) {
        write_row(params, s, head, query, state);
    });
}

template <int M> cudaError_t merge_splits(const forward_params &params)
{
    const skl_problem &p = params.problem;
    const dim3 blocks = grid_of(p.batch, p.heads_s, skl_ceil_div(p.len_q, TILE_ROWS<M>));
    return launch_blocks(merge_kernel<M>, blocks, TILE_ROWS<M>, 0, params);
}

template cudaError_t merge_splits<1>(const forward_params &params);
template cudaError_t merge_splits<2>(const forward_params &params);
template cudaError_t merge_splits<4>(const forward_params &params);

} // namespace tensor_core
