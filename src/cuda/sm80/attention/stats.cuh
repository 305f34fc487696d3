/* Statistics of one attention by mma.sync (sm_80 and later): 16-bit types, heads of up to 256. See
 * common/stats_tile.cuh.
 *
 *   block   64 queries x 64 keys per tile; 8 warps of 16 queries x 32 keys
 *   shared  64 queries, one or two stages of 64 keys, log2 P: 67 KB with DIM <= 128, 83 KB with 256 */
#ifndef SKL_CUDA_SM80_ATTENTION_STATS_CUH
#define SKL_CUDA_SM80_ATTENTION_STATS_CUH

#include "cuda/common/stats_tile.cuh"
#include "cuda/sm80/mma_tile.cuh"

namespace sm80
{

template <typename ELEMENT, int DIM> struct stats_product {
    static constexpr int QUERIES = 64, BLOCKS_PER_SM = 2, DEPTH = DIM > 128 ? 1 : 2; /* stages of keys */
    static constexpr bool GENERAL = false;
    typedef uint4 rows[64][DIM / 8];
    struct memory {
        rows queries, keys[DEPTH];
    };

    memory &shared;
    const skl_cuda_argument *argument;
    row_source<ELEMENT> keys;
    int key_count, at; /* stage of keys that comes next */

    __device__ explicit stats_product(memory &of_block) : shared(of_block)
    {
    }

    __device__ void load(int stage, int to) const
    {
        copy_chunks<DIM, STATS_KEYS, STATS_TILE_THREADS>(shared.keys[to], keys, stage * STATS_KEYS, key_count);
    }

    __device__ void begin(const stats_params &params, const stats_chunk &chunk, int first, int stage)
    {
        const skl_sequence &s = chunk.sequence;
        argument = &params.b;
        keys = keys_of<ELEMENT>(params.b, s, chunk.head);
        key_count = (int)s.key_count;
        at = 0;
        copy_chunks<DIM, QUERIES, STATS_TILE_THREADS>(shared.queries, queries_of<ELEMENT>(params.b, s, chunk.head),
                                                      first, (int)s.query_count);
        load(stage, 0);
        cp_async_commit();
    }

    template <typename STORE> __device__ void multiply(int next, STORE store)
    {
        cp_async_wait<0>();
        __syncthreads();
        if (DEPTH == 2 && next >= 0)
            load(next, 1 - at);
        cp_async_commit();
        const int warp = (int)(threadIdx.x / 32), row = warp % 4 * 16, column = warp / 4 * 32;
        float x[1][4][4] = {};
        multiply_add_smem<ELEMENT, DIM>(
            x, at_chunk<DIM>(a_address(*(const smem_rows<DIM> *)(const void *)shared.queries), row, 0),
            at_chunk<DIM>(logit_b_address<2>(*(const smem_rows<DIM> *)(const void *)shared.keys[at]), column, 0));
        if (DEPTH == 1 && next >= 0) {
            __syncthreads();
            load(next, 0);
            cp_async_commit();
        }
        at = DEPTH - 1 - at;
        const float scale = cap_logits(x, *argument);
        const int lane = lane_index();
#pragma unroll
        for (int block = 0; block < 4; block++)
#pragma unroll
            for (int e = 0; e < 4; e++)
                store(row + lane / 4 + e / 2 * 8, column + block * 8 + lane % 4 * 2 + e % 2, x[0][block][e] * scale);
    }
};

template <typename ELEMENT>
cudaError_t launch_stats(const char *kernel, const skl_cuda_params *params, const skl_cuda_launch *launch)
{
    record_launch(kernel, SKL_VARIANT_STATS, 1);
    const int dim = params->b.dim;
    return dim <= 64    ? launch_stats_tiles<stats_product<ELEMENT, 64>>(params, launch)
           : dim <= 128 ? launch_stats_tiles<stats_product<ELEMENT, 128>>(params, launch)
                        : launch_stats_tiles<stats_product<ELEMENT, 256>>(params, launch);
}

} // namespace sm80

#endif
