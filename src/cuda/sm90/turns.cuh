/* Warpgroups of an indexer's kernels take turns. */
#ifndef SKL_CUDA_SM90_TURNS_CUH
#define SKL_CUDA_SM90_TURNS_CUH

#include "cuda/sm90/tile.cuh"

namespace sm90
{

/* Products of the two warpgroups take turns, so that one's run beside what the other one makes of its own. A turn is
 * passed on when half of its products are done: the next ones are in line when the last ones end. */
struct product_turns {
    uint64_t (&barriers)[CONSUMERS];
    int group;  /* of the warp, the same for all lanes */
    int parity; /* of the warpgroup's next turn */

    __device__ static void init(uint64_t (&barriers)[CONSUMERS])
    {
        for (int group = 0; group < CONSUMERS; group++)
            barrier_init(barriers[group], 4);
    }

    /* The first turn is warpgroup 0's. */
    __device__ product_turns(uint64_t (&of)[CONSUMERS], int own_group) : barriers(of), group(own_group), parity(0)
    {
        barrier_arrive_if(barriers[0], group == 1 && threadIdx.x % 32 == 0);
    }

    __device__ void take()
    {
        barrier_wait(barriers[group], parity);
        parity ^= 1;
    }

    __device__ void pass()
    {
        barrier_arrive_if(barriers[1 - group], threadIdx.x % 32 == 0);
    }
};

} // namespace sm90

#endif
