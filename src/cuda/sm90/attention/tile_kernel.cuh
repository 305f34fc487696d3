/* The skeleton of Hopper kernels with one tile of stationary rows per block: consumer warpgroups of 64 rows each, and
 * one producer warpgroup after them. One block per SM. The wide forward, the attention forward, the fused and the
 * joint backward use it.
 *
 *   all threads   find the tile and the rows that it streams, store the visible ones of each row
 *   thread 0      stores the tile and the streamed rows in shared memory, and initializes barriers
 *   then          the producer warpgroup gives registers to the consumers
 *
 * A kernel is a WORKER, an aggregate that begins with {params, maps, smem, warpgroup}. It has
 *
 *   GROUPS, REGS, PRODUCER_REGS   consumer warpgroups; registers per thread of these and of the producer
 *   find()                        all threads: sets the tile and the rows that it streams; false: there is no tile
 *   start()                       the part of thread 0
 *   produce(); run(), store()     the producer warpgroup; a consumer warpgroup */
#ifndef SKL_CUDA_SM90_ATTENTION_TILE_KERNEL_CUH
#define SKL_CUDA_SM90_ATTENTION_TILE_KERNEL_CUH

#include <type_traits>

#include "cuda/sm90/launch.cuh"
#include "cuda/sm90/pipeline.cuh"

namespace sm90
{

template <int ROWS> __device__ inline void fill_visible(row_ranges<ROWS> &to, const bounded_band &band)
{
    to.fill(band);
}

__device__ inline void fill_visible(bounded_band &to, const bounded_band &band)
{
    if (threadIdx.x == 0)
        to = band;
}

template <typename WORKER> using memory_of = std::remove_reference_t<decltype(WORKER::smem)>;
template <typename WORKER> using tile_of = decltype(memory_of<WORKER>::tile);
template <typename WORKER> constexpr int THREADS_OF = 128 * (WORKER::GROUPS + 1);

template <typename WORKER, typename PARAMS, typename MAPS>
__global__ void __launch_bounds__(THREADS_OF<WORKER>, 1)
    tile_kernel(const __grid_constant__ PARAMS params, const __grid_constant__ MAPS maps)
{
#ifdef __CUDA_ARCH_FEAT_SM90_ALL
    extern __shared__ __align__(1024) unsigned char raw[];
    memory_of<WORKER> &smem = *(memory_of<WORKER> *)(void *)raw;
    tile_of<WORKER> tile;
    row_stream stream = {};
    if (!WORKER::find(params, smem, tile, stream))
        return;
    fill_visible(smem.visible, stream.band);
    if (threadIdx.x == 0) {
        WORKER::start(params, smem, tile, stream);
        barrier_init_fence();
    }
    __syncthreads();
    const int warpgroup = warpgroup_index();
    if (warpgroup == WORKER::GROUPS) {
        reg_dealloc<WORKER::PRODUCER_REGS>();
        WORKER producer = {params, maps, smem, warpgroup};
        producer.produce();
    } else {
        reg_alloc<WORKER::REGS>();
        WORKER consumer = {params, maps, smem, warpgroup};
        consumer.run();
        consumer.store();
    }
#endif
}

/* Launches one block per tile: `tiles` of each head. */
template <typename WORKER, typename PARAMS, typename MAPS>
cudaError_t launch_tiles(const PARAMS &params, const MAPS &maps, int64_t heads, int64_t tiles)
{
    constexpr int MEMORY = sizeof(memory_of<WORKER>);
    static_assert(MEMORY <= SMEM_MAX, "shared memory of a block");
    return launch_blocks(tile_kernel<WORKER, PARAMS, MAPS>, grid_of(params.problem.batch, heads, tiles),
                         THREADS_OF<WORKER>, MEMORY, params, maps);
}

} // namespace sm90

#endif
