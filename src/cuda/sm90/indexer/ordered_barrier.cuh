/* Warpgroups of an indexer's kernels take turns. */
#ifndef SKL_CUDA_SM90_INDEXER_ORDERED_BARRIER_CUH
#define SKL_CUDA_SM90_INDEXER_ORDERED_BARRIER_CUH

#include "cuda/sm90/pipeline.cuh"

namespace sm90
{

/* Products of the two warpgroups take turns, so that one's run beside what the other one makes of its own. A turn is
 * passed on when half of its products are done: the next ones are in line when the last ones end. */
struct ordered_barrier {
    uint64_t (&barriers)[CONSUMERS];
    int group; /* of the warp, the same for all lanes */
    int phase; /* of the warpgroup's next turn */

    __device__ static void init(uint64_t (&barriers)[CONSUMERS])
    {
        for (int group = 0; group < CONSUMERS; group++)
            barrier_init(barriers[group], 4);
    }

    /* The first turn is warpgroup 0's. */
    __device__ ordered_barrier(uint64_t (&of)[CONSUMERS], int warpgroup_index)
        : barriers(of), group(warpgroup_index), phase(0)
    {
        barrier_arrive_if(barriers[0], group == 1 && threadIdx.x % 32 == 0);
    }

    __device__ void wait()
    {
        barrier_wait(barriers[group], phase);
        phase ^= 1;
    }

    __device__ void arrive()
    {
        barrier_arrive_if(barriers[1 - group], threadIdx.x % 32 == 0);
    }
};

} // namespace sm90

#endif
