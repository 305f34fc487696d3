/* Wrappers for the PTX instructions of sm_90a, one each: mbarrier, TMA. wgmma.cuh has the others. */
#ifndef SKL_CUDA_SM90_PTX_CUH
#define SKL_CUDA_SM90_PTX_CUH

#include <cuda.h>

#include "cuda/common/ptx.cuh"

namespace sm90
{

/* ---- Barriers ----------------------------------------------------------------------------------------------- */

__device__ inline void barrier_init(uint64_t &barrier, int arrivals)
{
    asm volatile("mbarrier.init.shared::cta.b64 [%0], %1;" ::"r"(shared_address(&barrier)), "r"(arrivals) : "memory");
}

/* Ends the life of a barrier that nobody uses any more: only then may it be initialized again. */
__device__ inline void barrier_end(uint64_t &barrier)
{
    asm volatile("mbarrier.inval.shared::cta.b64 [%0];" ::"r"(shared_address(&barrier)) : "memory");
}

/* Makes initialized barriers visible to TMA. */
__device__ inline void barrier_init_fence()
{
    asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
}

__device__ inline void barrier_arrive(uint64_t &barrier)
{
    asm volatile("mbarrier.arrive.shared::cta.b64 _, [%0];" ::"r"(shared_address(&barrier)) : "memory");
}

/* Counts as `arrivals` arrivals. */
__device__ inline void barrier_arrive_count(uint64_t &barrier, int arrivals)
{
    asm volatile("mbarrier.arrive.shared::cta.b64 _, [%0], %1;" ::"r"(shared_address(&barrier)), "r"(arrivals)
                 : "memory");
}

/* Predicated, not branched: it may be called while wgmmas are in flight. */
__device__ inline void barrier_arrive_if(uint64_t &barrier, bool condition)
{
    asm volatile("{\n"
                 ".reg .pred arrives;\n"
                 "setp.ne.b32 arrives, %1, 0;\n"
                 "@arrives mbarrier.arrive.shared::cta.b64 _, [%0];\n"
                 "}" ::"r"(shared_address(&barrier)),
                 "r"((int)condition)
                 : "memory");
}

/* Waits until the phase with this parity has completed. */
__device__ inline void barrier_wait(uint64_t &barrier, int phase)
{
    asm volatile("{\n"
                 ".reg .pred done;\n"
                 "again: mbarrier.try_wait.parity.shared::cta.b64 done, [%0], %1;\n"
                 "@!done bra again;\n"
                 "}" ::"r"(shared_address(&barrier)),
                 "r"(phase)
                 : "memory");
}

/* Stores four 8 x 8 matrices of 16-bit elements; lanes 8 i .. 8 i + 7 give the row addresses of matrix i. */
__device__ inline void stmatrix_x4(uint32_t row, const uint32_t (&from)[4])
{
    asm volatile("stmatrix.sync.aligned.m8n8.x4.shared.b16 [%0], {%1, %2, %3, %4};" ::"r"(row), "r"(from[0]),
                 "r"(from[1]), "r"(from[2]), "r"(from[3])
                 : "memory");
}

/* ---- TMA ---------------------------------------------------------------------------------------------------- */

/* All lanes of a warp execute this; one elected lane, always the same, issues the instruction. A branch around the
 * instruction is slower: inside it ptxas uses no uniform registers and wraps every copy in a loop over lanes. */
#define SKL_ELECT_ONE(instruction)                                                                                   \
    "{\n"                                                                                                            \
    ".reg .pred chosen;\n"                                                                                           \
    "elect.sync _|chosen, 0xffffffff;\n"                                                                             \
    "@chosen " instruction ";\n"                                                                                     \
    "}"

/* Arrives, and makes the phase wait for `bytes` bytes of TMA loads. */
__device__ inline void barrier_expect_tx(uint64_t &barrier, int bytes)
{
    asm volatile(
        SKL_ELECT_ONE("mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], %1")::"r"(shared_address(&barrier)),
        "r"(bytes)
        : "memory");
}

/* Loads the box at {column, row, head, batch}; elements outside the tensor become 0. */
__device__ inline void tma_load(void *to, const CUtensorMap &tensor, int column, int row, int head, int batch,
                                uint64_t &barrier)
{
    asm volatile(SKL_ELECT_ONE("cp.async.bulk.tensor.4d.shared::cluster.global.tile.mbarrier::complete_tx::bytes "
                               "[%0], [%1, {%2, %3, %4, %5}], [%6]")::"r"(shared_address(to)),
                 "l"(&tensor), "r"(column), "r"(row), "r"(head), "r"(batch), "r"(shared_address(&barrier))
                 : "memory");
}

/* Adds a box of f32 in shared memory to the tensor; elements outside the tensor are skipped. */
__device__ inline void tma_reduce_add(const CUtensorMap &tensor, int column, int row, int head, int batch,
                                      const void *from)
{
    asm volatile(SKL_ELECT_ONE("cp.reduce.async.bulk.tensor.4d.global.shared::cta.add.tile.bulk_group "
                               "[%0, {%1, %2, %3, %4}], [%5]")::"l"(&tensor),
                 "r"(column), "r"(row), "r"(head), "r"(batch), "r"(shared_address(from))
                 : "memory");
}

__device__ inline void tma_commit()
{
    asm volatile(SKL_ELECT_ONE("cp.async.bulk.commit_group")::: "memory");
}

#undef SKL_ELECT_ONE

/* Adds f32 in shared memory to global memory: `bytes` and both addresses are multiples of 16. Each thread that calls
 * it issues one reduction. */
__device__ inline void bulk_reduce_add(float *to, const float *from, int bytes)
{
    asm volatile("cp.reduce.async.bulk.global.shared::cta.bulk_group.add.f32 [%0], [%1], %2;" ::"l"(to),
                 "r"(shared_address(from)), "r"(bytes)
                 : "memory");
}

/* Ends a group of the thread's reductions. */
__device__ inline void bulk_commit()
{
    asm volatile("cp.async.bulk.commit_group;" ::: "memory");
}

/* Waits until TMA has read the boxes of this warp's reduce-adds, except for the last PENDING groups of them. Only the
 * elected lane waits: the other lanes need a barrier before they overwrite the boxes. */
template <int PENDING = 0> __device__ inline void tma_wait_read()
{
    asm volatile("cp.async.bulk.wait_group.read %0;" ::"n"(PENDING) : "memory");
}

/* Makes this thread's writes to shared memory visible to TMA and wgmma after the next barrier. */
__device__ inline void fence_proxy_async()
{
    asm volatile("fence.proxy.async.shared::cta;" ::: "memory");
}

/* Opaque threadIdx.x: the compiler reads it again instead of keeping derived addresses in registers. */
__device__ inline unsigned thread_again()
{
    unsigned thread;
    asm volatile("mov.u32 %0, %%tid.x;" : "=r"(thread));
    return thread;
}

/* Volatile, so that the compiler does not move the load above an earlier wait. */
__device__ inline float load_shared(const float &from)
{
    float value;
    asm volatile("ld.volatile.shared.f32 %0, [%1];" : "=f"(value) : "r"(shared_address(&from)) : "memory");
    return value;
}

/* Two consecutive values. */
__device__ inline float2 load_shared_2(const float &from)
{
    float2 value;
    asm volatile("ld.volatile.shared.v2.f32 {%0, %1}, [%2];"
                 : "=f"(value.x), "=f"(value.y)
                 : "r"(shared_address(&from))
                 : "memory");
    return value;
}

__device__ inline float4 load_shared(const float4 &from)
{
    float4 value;
    asm volatile("ld.volatile.shared.v4.f32 {%0, %1, %2, %3}, [%4];"
                 : "=f"(value.x), "=f"(value.y), "=f"(value.z), "=f"(value.w)
                 : "r"(shared_address(&from))
                 : "memory");
    return value;
}

} // namespace sm90

#endif
