/* One PTX instruction of sm_90a a wrapper: mbarriers, the tensor copy engine, wgmma. */
#ifndef SKL_CUDA_SM90_PTX_CUH
#define SKL_CUDA_SM90_PTX_CUH

#include <cuda.h>

#include "cuda/ptx.cuh"

namespace sm90
{

/* ---- Barriers in shared memory ------------------------------------------------------------------------------ */

__device__ inline void barrier_init(uint64_t &barrier, int arrivals)
{
    asm volatile("mbarrier.init.shared::cta.b64 [%0], %1;" ::"r"(shared_address(&barrier)), "r"(arrivals) : "memory");
}

/* Makes initialised barriers known to the copy engine. */
__device__ inline void barrier_init_fence()
{
    asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
}

__device__ inline void barrier_arrive(uint64_t &barrier)
{
    asm volatile("mbarrier.arrive.shared::cta.b64 _, [%0];" ::"r"(shared_address(&barrier)) : "memory");
}

/* Arrives, and lets the phase wait for so many bytes of copies. */
__device__ inline void barrier_expect(uint64_t &barrier, int bytes)
{
    asm volatile("mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], %1;" ::"r"(shared_address(&barrier)), "r"(bytes)
                 : "memory");
}

/* Waits until the phase of this parity has ended. */
__device__ inline void barrier_wait(uint64_t &barrier, int parity)
{
    asm volatile("{\n"
                 ".reg .pred done;\n"
                 "again: mbarrier.try_wait.parity.shared::cta.b64 done, [%0], %1;\n"
                 "@!done bra again;\n"
                 "}" ::"r"(shared_address(&barrier)),
                 "r"(parity)
                 : "memory");
}

/* ---- The copy engine ---------------------------------------------------------------------------------------- */

/* A box of a tensor {column, row, head, batch}; elements outside of the tensor become 0. */
__device__ inline void copy_box(void *to, const CUtensorMap &tensor, int column, int row, int head, int batch,
                                uint64_t &barrier)
{
    asm volatile("cp.async.bulk.tensor.4d.shared::cluster.global.tile.mbarrier::complete_tx::bytes "
                 "[%0], [%1, {%2, %3, %4, %5}], [%6];" ::"r"(shared_address(to)),
                 "l"(&tensor), "r"(column), "r"(row), "r"(head), "r"(batch), "r"(shared_address(&barrier))
                 : "memory");
}

/* A load that stays behind the waits that come before it. */
__device__ inline float load_shared(const float &from)
{
    float value;
    asm volatile("ld.volatile.shared.f32 %0, [%1];" : "=f"(value) : "r"(shared_address(&from)) : "memory");
    return value;
}

/* ---- Warpgroup products ------------------------------------------------------------------------------------- */

template <int COUNT> __device__ inline void give_registers()
{
    asm volatile("setmaxnreg.dec.sync.aligned.u32 %0;" ::"n"(COUNT));
}

template <int COUNT> __device__ inline void take_registers()
{
    asm volatile("setmaxnreg.inc.sync.aligned.u32 %0;" ::"n"(COUNT));
}

/* Registers written so far may be read by the products that follow. */
__device__ inline void wgmma_fence()
{
    asm volatile("wgmma.fence.sync.aligned;" ::: "memory");
}

__device__ inline void wgmma_commit()
{
    asm volatile("wgmma.commit_group.sync.aligned;" ::: "memory");
}

template <int PENDING> __device__ inline void wgmma_wait()
{
    asm volatile("wgmma.wait_group.sync.aligned %0;" ::"n"(PENDING) : "memory");
}

/* Low word of a descriptor: rows of 128 bytes, swizzled as the copy engine leaves them, the contracted dimension
 * along the row. Bytes further on are 1 / 16 each on top. */
__device__ inline uint32_t row_operand(const void *rows)
{
    return 1U << 16 | (shared_address(rows) & 0x3FFFF) >> 4;
}

__device__ inline uint64_t row_descriptor(uint32_t operand)
{
    constexpr uint32_t SWIZZLE_128 = 1U << 30, EIGHT_ROWS = 1024 >> 4;
    uint64_t descriptor;
    asm("mov.b64 %0, {%1, %2};" : "=l"(descriptor) : "r"(operand), "r"(SWIZZLE_128 | EIGHT_ROWS));
    return descriptor;
}

#define SKL_ACCUMULATOR_8(c, n)                                                                                      \
    "+f"(c[n][0]), "+f"(c[n][1]), "+f"(c[n][2]), "+f"(c[n][3]), "+f"(c[n + 1][0]), "+f"(c[n + 1][1]),                \
        "+f"(c[n + 1][2]), "+f"(c[n + 1][3])
#define SKL_WGMMA_64_64(type)                                                                                        \
    asm volatile("{\n"                                                                                               \
                 ".reg .pred add;\n"                                                                                 \
                 "setp.ne.b32 add, %37, 0;\n"                                                                        \
                 "wgmma.mma_async.sync.aligned.m64n64k16.f32." type "." type " "                                     \
                 "{%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, %13, %14, %15, %16, %17, %18, %19, %20, "  \
                 "%21, %22, %23, %24, %25, %26, %27, %28, %29, %30, %31}, {%32, %33, %34, %35}, %36, add, 1, 1, "    \
                 "0;\n"                                                                                              \
                 "}"                                                                                                 \
                 : SKL_ACCUMULATOR_8(c, 0), SKL_ACCUMULATOR_8(c, 2), SKL_ACCUMULATOR_8(c, 4),                        \
                   SKL_ACCUMULATOR_8(c, 6)                                                                           \
                 : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b), "r"(add))

/* c = a b or c += a b: 64 x 64 += 64 x 16 . 16 x 64, a in registers. */
__device__ inline void wgmma_64_64(float (&c)[8][4], const uint32_t (&a)[4], uint64_t b, int add, __nv_bfloat16)
{
    SKL_WGMMA_64_64("bf16");
}

__device__ inline void wgmma_64_64(float (&c)[8][4], const uint32_t (&a)[4], uint64_t b, int add, __half)
{
    SKL_WGMMA_64_64("f16");
}

#undef SKL_WGMMA_64_64
#undef SKL_ACCUMULATOR_8

} // namespace sm90

#endif
