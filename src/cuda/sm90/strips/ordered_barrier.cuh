/* Lets the two consumer warpgroups of the strip kernels alternate on the tensor cores. */
#ifndef SKL_CUDA_SM90_STRIPS_ORDERED_BARRIER_CUH
#define SKL_CUDA_SM90_STRIPS_ORDERED_BARRIER_CUH

#include "cuda/sm90/pipeline.cuh"

namespace sm90
{

/* A warpgroup issues its wgmmas between wait() and arrive(); the other warpgroup's arithmetic on its own results
 * overlaps them. arrive() comes when half of the wgmmas are complete, so that the other warpgroup's are queued when
 * the last ones end. */
struct ordered_barrier {
    uint64_t (&barriers)[CONSUMERS];
    int warpgroup; /* warp-uniform */
    int phase;     /* phase of the warpgroup's next wait */

    __device__ static void init(uint64_t (&barriers)[CONSUMERS])
    {
        for (int warpgroup = 0; warpgroup < CONSUMERS; warpgroup++)
            barrier_init(barriers[warpgroup], 4);
    }

    /* Warpgroup 0 goes first. */
    __device__ ordered_barrier(uint64_t (&shared_barriers)[CONSUMERS], int index)
        : barriers(shared_barriers), warpgroup(index), phase(0)
    {
        barrier_arrive_if(barriers[0], warpgroup == 1 && threadIdx.x % 32 == 0);
    }

    __device__ void wait()
    {
        barrier_wait(barriers[warpgroup], phase);
        phase ^= 1;
    }

    __device__ void arrive()
    {
        barrier_arrive_if(barriers[1 - warpgroup], threadIdx.x % 32 == 0);
    }
};

} // namespace sm90

#endif
