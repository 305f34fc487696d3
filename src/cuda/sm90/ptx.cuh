/* Wrappers for the PTX instructions of sm_90a, one each: mbarrier, TMA, wgmma. */
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

/* Makes initialised barriers visible to TMA. */
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

/* ---- wgmma -------------------------------------------------------------------------------------------------- */

template <int COUNT> __device__ inline void reg_dealloc()
{
    asm volatile("setmaxnreg.dec.sync.aligned.u32 %0;" ::"n"(COUNT));
}

template <int COUNT> __device__ inline void reg_alloc()
{
    asm volatile("setmaxnreg.inc.sync.aligned.u32 %0;" ::"n"(COUNT));
}

/* Orders earlier register accesses before the wgmmas that follow. */
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

/* The low word of a shared-memory matrix descriptor. An operand has rows of 128 bytes in TMA's 128-byte swizzle.
 * K-major: the contracted dimension runs along a row. MN-major: the other dimension does, and continues `next` bytes
 * later where it does not fit into a row. To advance the operand by n bytes, add n / 16. */
__device__ inline uint32_t k_major_operand(const void *rows)
{
    return 1U << 16 | (shared_address(rows) & 0x3FFFF) >> 4;
}

__device__ inline uint32_t mn_major_operand(const void *rows, int next)
{
    return (uint32_t)next >> 4 << 16 | (shared_address(rows) & 0x3FFFF) >> 4;
}

__device__ inline uint64_t smem_descriptor(uint32_t operand)
{
    constexpr uint32_t SWIZZLE_128 = 1U << 30, EIGHT_ROWS = 1024 >> 4;
    uint64_t descriptor;
    asm("mov.b64 %0, {%1, %2};" : "=l"(descriptor) : "r"(operand), "r"(SWIZZLE_128 | EIGHT_ROWS));
    return descriptor;
}

/* c = a b, or c += a b if `add`: 64 x N += 64 x 16 . 16 x N. a is in registers or, like b, in shared memory.
 * MN_MAJOR: operands in shared memory are MN-major; A_MN_MAJOR: a is, where it differs from b. */
#define SKL_OUT_8(c, n)                                                                                              \
    "+f"(c[n][0]), "+f"(c[n][1]), "+f"(c[n][2]), "+f"(c[n][3]), "+f"(c[n + 1][0]), "+f"(c[n + 1][1]),                \
        "+f"(c[n + 1][2]), "+f"(c[n + 1][3])
#define SKL_OUT_32(c, n) SKL_OUT_8(c, n), SKL_OUT_8(c, n + 2), SKL_OUT_8(c, n + 4), SKL_OUT_8(c, n + 6)
#define SKL_REGS_16      "%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, %13, %14, %15"
#define SKL_REGS_32                                                                                                  \
    "%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, %13, %14, %15, %16, %17, %18, %19, %20, %21, %22, "      \
    "%23, %24, %25, %26, %27, %28, %29, %30, %31"
#define SKL_REGS_48 SKL_REGS_32 ", %32, %33, %34, %35, %36, %37, %38, %39, %40, %41, %42, %43, %44, %45, %46, %47"
#define SKL_REGS_64                                                                                                  \
    SKL_REGS_32 ", %32, %33, %34, %35, %36, %37, %38, %39, %40, %41, %42, %43, %44, %45, %46, %47, %48, %49, "       \
                "%50, %51, %52, %53, %54, %55, %56, %57, %58, %59, %60, %61, %62, %63"
#define SKL_REGS_96                                                                                                  \
    SKL_REGS_64 ", %64, %65, %66, %67, %68, %69, %70, %71, %72, %73, %74, %75, %76, %77, %78, %79, %80, %81, "       \
                "%82, %83, %84, %85, %86, %87, %88, %89, %90, %91, %92, %93, %94, %95"
#define SKL_REGS_128                                                                                                 \
    SKL_REGS_96 ", %96, %97, %98, %99, %100, %101, %102, %103, %104, %105, %106, %107, %108, %109, %110, %111, "     \
                "%112, %113, %114, %115, %116, %117, %118, %119, %120, %121, %122, %123, %124, %125, %126, %127"
#define SKL_WGMMA(n, type, regs, rest, add)                                                                          \
    "{\n"                                                                                                            \
    ".reg .pred add;\n"                                                                                              \
    "setp.ne.b32 add, " add ", 0;\n"                                                                                 \
    "wgmma.mma_async.sync.aligned.m64n" n "k16.f32." type "." type " {" regs "}, " rest ";\n"                        \
    "}"

#define SKL_DEFINE_WGMMA(element, type)                                                                              \
    template <bool MN_MAJOR>                                                                                         \
    __device__ inline void wgmma(float(&c)[8][4], const uint32_t(&a)[4], uint64_t b, int add, element)               \
    {                                                                                                                \
        asm volatile(SKL_WGMMA("64", type, SKL_REGS_32, "{%32, %33, %34, %35}, %36, add, 1, 1, %38", "%37")          \
                     : SKL_OUT_32(c, 0)                                                                              \
                     : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b), "r"(add), "n"(MN_MAJOR));                 \
    }                                                                                                                \
    template <bool MN_MAJOR>                                                                                         \
    __device__ inline void wgmma(float(&c)[12][4], const uint32_t(&a)[4], uint64_t b, int add, element)              \
    {                                                                                                                \
        asm volatile(SKL_WGMMA("96", type, SKL_REGS_48, "{%48, %49, %50, %51}, %52, add, 1, 1, %54", "%53")          \
                     : SKL_OUT_32(c, 0), SKL_OUT_8(c, 8), SKL_OUT_8(c, 10)                                           \
                     : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b), "r"(add), "n"(MN_MAJOR));                 \
    }                                                                                                                \
    template <bool MN_MAJOR>                                                                                         \
    __device__ inline void wgmma(float(&c)[16][4], const uint32_t(&a)[4], uint64_t b, int add, element)              \
    {                                                                                                                \
        asm volatile(SKL_WGMMA("128", type, SKL_REGS_64, "{%64, %65, %66, %67}, %68, add, 1, 1, %70", "%69")         \
                     : SKL_OUT_32(c, 0), SKL_OUT_32(c, 8)                                                            \
                     : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b), "r"(add), "n"(MN_MAJOR));                 \
    }                                                                                                                \
    template <bool MN_MAJOR>                                                                                         \
    __device__ inline void wgmma(float(&c)[24][4], const uint32_t(&a)[4], uint64_t b, int add, element)              \
    {                                                                                                                \
        asm volatile(SKL_WGMMA("192", type, SKL_REGS_96, "{%96, %97, %98, %99}, %100, add, 1, 1, %102", "%101")      \
                     : SKL_OUT_32(c, 0), SKL_OUT_32(c, 8), SKL_OUT_32(c, 16)                                         \
                     : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b), "r"(add), "n"(MN_MAJOR));                 \
    }                                                                                                                \
    template <bool MN_MAJOR>                                                                                         \
    __device__ inline void wgmma(float(&c)[32][4], const uint32_t(&a)[4], uint64_t b, int add, element)              \
    {                                                                                                                \
        asm volatile(SKL_WGMMA("256", type, SKL_REGS_128, "{%128, %129, %130, %131}, %132, add, 1, 1, %134", "%133") \
                     : SKL_OUT_32(c, 0), SKL_OUT_32(c, 8), SKL_OUT_32(c, 16), SKL_OUT_32(c, 24)                      \
                     : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b), "r"(add), "n"(MN_MAJOR));                 \
    }                                                                                                                \
    template <bool MN_MAJOR, bool A_MN_MAJOR = MN_MAJOR>                                                             \
    __device__ inline void wgmma(float(&c)[4][4], uint64_t a, uint64_t b, int add, element)                          \
    {                                                                                                                \
        asm volatile(SKL_WGMMA("32", type, SKL_REGS_16, "%16, %17, add, 1, 1, %19, %20", "%18")                      \
                     : SKL_OUT_8(c, 0), SKL_OUT_8(c, 2)                                                              \
                     : "l"(a), "l"(b), "r"(add), "n"(A_MN_MAJOR), "n"(MN_MAJOR));                                    \
    }                                                                                                                \
    template <bool MN_MAJOR, bool A_MN_MAJOR = MN_MAJOR>                                                             \
    __device__ inline void wgmma(float(&c)[8][4], uint64_t a, uint64_t b, int add, element)                          \
    {                                                                                                                \
        asm volatile(SKL_WGMMA("64", type, SKL_REGS_32, "%32, %33, add, 1, 1, %35, %36", "%34")                      \
                     : SKL_OUT_32(c, 0)                                                                              \
                     : "l"(a), "l"(b), "r"(add), "n"(A_MN_MAJOR), "n"(MN_MAJOR));                                    \
    }                                                                                                                \
    template <bool MN_MAJOR>                                                                                         \
    __device__ inline void wgmma(float(&c)[12][4], uint64_t a, uint64_t b, int add, element)                         \
    {                                                                                                                \
        asm volatile(SKL_WGMMA("96", type, SKL_REGS_48, "%48, %49, add, 1, 1, %51, %51", "%50")                      \
                     : SKL_OUT_32(c, 0), SKL_OUT_8(c, 8), SKL_OUT_8(c, 10)                                           \
                     : "l"(a), "l"(b), "r"(add), "n"(MN_MAJOR));                                                     \
    }                                                                                                                \
    template <bool MN_MAJOR, bool A_MN_MAJOR = MN_MAJOR>                                                             \
    __device__ inline void wgmma(float(&c)[16][4], uint64_t a, uint64_t b, int add, element)                         \
    {                                                                                                                \
        asm volatile(SKL_WGMMA("128", type, SKL_REGS_64, "%64, %65, add, 1, 1, %67, %68", "%66")                     \
                     : SKL_OUT_32(c, 0), SKL_OUT_32(c, 8)                                                            \
                     : "l"(a), "l"(b), "r"(add), "n"(A_MN_MAJOR), "n"(MN_MAJOR));                                    \
    }
SKL_DEFINE_WGMMA(skl_bf16, "bf16")
SKL_DEFINE_WGMMA(skl_f16, "f16")

#undef SKL_DEFINE_WGMMA
#undef SKL_WGMMA
#undef SKL_REGS_128
#undef SKL_REGS_96
#undef SKL_REGS_64
#undef SKL_REGS_48
#undef SKL_REGS_32
#undef SKL_REGS_16
#undef SKL_OUT_32
#undef SKL_OUT_8

} // namespace sm90

#endif
