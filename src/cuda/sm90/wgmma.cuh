/* Wrappers for wgmma, warpgroup-wide products on tensor cores: one instruction, or four of them. */
#ifndef SKL_CUDA_SM90_WGMMA_CUH
#define SKL_CUDA_SM90_WGMMA_CUH

#include "cuda/common/ptx.cuh"

namespace sm90
{

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
#define SKL_C_REGS_4     "%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, %13, %14, %15"
#define SKL_C_REGS_8                                                                                                 \
    "%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, %13, %14, %15, %16, %17, %18, %19, %20, %21, %22, "      \
    "%23, %24, %25, %26, %27, %28, %29, %30, %31"
#define SKL_C_REGS_12 SKL_C_REGS_8 ", %32, %33, %34, %35, %36, %37, %38, %39, %40, %41, %42, %43, %44, %45, %46, %47"
#define SKL_C_REGS_16                                                                                                \
    SKL_C_REGS_8 ", %32, %33, %34, %35, %36, %37, %38, %39, %40, %41, %42, %43, %44, %45, %46, %47, %48, %49, "      \
                 "%50, %51, %52, %53, %54, %55, %56, %57, %58, %59, %60, %61, %62, %63"
#define SKL_C_REGS_24                                                                                                \
    SKL_C_REGS_16 ", %64, %65, %66, %67, %68, %69, %70, %71, %72, %73, %74, %75, %76, %77, %78, %79, %80, %81, "     \
                  "%82, %83, %84, %85, %86, %87, %88, %89, %90, %91, %92, %93, %94, %95"
#define SKL_C_REGS_32                                                                                                \
    SKL_C_REGS_24 ", %96, %97, %98, %99, %100, %101, %102, %103, %104, %105, %106, %107, %108, %109, %110, %111, "   \
                  "%112, %113, %114, %115, %116, %117, %118, %119, %120, %121, %122, %123, %124, %125, %126, %127"
#define SKL_C_OUT_4  SKL_OUT_8(c, 0), SKL_OUT_8(c, 2)
#define SKL_C_OUT_8  SKL_OUT_32(c, 0)
#define SKL_C_OUT_12 SKL_C_OUT_8, SKL_OUT_8(c, 8), SKL_OUT_8(c, 10)
#define SKL_C_OUT_16 SKL_C_OUT_8, SKL_OUT_32(c, 8)
#define SKL_C_OUT_24 SKL_C_OUT_16, SKL_OUT_32(c, 16)
#define SKL_C_OUT_32 SKL_C_OUT_24, SKL_OUT_32(c, 24)

/* Sizes of c, in blocks of 8 columns. DEFINE gets the type of a and b, the number of columns, and the names of the
 * operands after the registers of c. */
#define SKL_SIZE_4(DEFINE, element, type)                                                                            \
    DEFINE(element, type, 4, "32", "%16", "%17", "%18", "%19", "%20", "%21", "%22", "%23", "%24", "%25", "%26",      \
           "%27", "%28", "%29", "%30", "%31", "%32", "%33", "%34", "%35")
#define SKL_SIZE_8(DEFINE, element, type)                                                                            \
    DEFINE(element, type, 8, "64", "%32", "%33", "%34", "%35", "%36", "%37", "%38", "%39", "%40", "%41", "%42",      \
           "%43", "%44", "%45", "%46", "%47", "%48", "%49", "%50", "%51")
#define SKL_SIZE_12(DEFINE, element, type)                                                                           \
    DEFINE(element, type, 12, "96", "%48", "%49", "%50", "%51", "%52", "%53", "%54", "%55", "%56", "%57", "%58",     \
           "%59", "%60", "%61", "%62", "%63", "%64", "%65", "%66", "%67")
#define SKL_SIZE_16(DEFINE, element, type)                                                                           \
    DEFINE(element, type, 16, "128", "%64", "%65", "%66", "%67", "%68", "%69", "%70", "%71", "%72", "%73", "%74",    \
           "%75", "%76", "%77", "%78", "%79", "%80", "%81", "%82", "%83")
#define SKL_SIZE_24(DEFINE, element, type)                                                                           \
    DEFINE(element, type, 24, "192", "%96", "%97", "%98", "%99", "%100", "%101", "%102", "%103", "%104", "%105",     \
           "%106", "%107", "%108", "%109", "%110", "%111", "%112", "%113", "%114", "%115")
#define SKL_SIZE_32(DEFINE, element, type)                                                                           \
    DEFINE(element, type, 32, "256", "%128", "%129", "%130", "%131", "%132", "%133", "%134", "%135", "%136", "%137", \
           "%138", "%139", "%140", "%141", "%142", "%143", "%144", "%145", "%146", "%147")

#define SKL_WGMMA(blocks, n, type, rest, add)                                                                        \
    "{\n"                                                                                                            \
    ".reg .pred add;\n"                                                                                              \
    "setp.ne.b32 add, " add ", 0;\n"                                                                                 \
    "wgmma.mma_async.sync.aligned.m64n" n "k16.f32." type "." type " {" SKL_C_REGS_##blocks "}, " rest ";\n}"
#define SKL_DEFINE_FRAGS(element, type, blocks, n, a_0, a_1, a_2, a_3, b_, add_, major, ...)                         \
    template <bool MN_MAJOR>                                                                                         \
    __device__ inline void wgmma(float(&c)[blocks][4], const uint32_t(&a)[4], uint64_t b, int add, element)          \
    {                                                                                                                \
        asm volatile(                                                                                                \
            SKL_WGMMA(blocks, n, type, "{" a_0 ", " a_1 ", " a_2 ", " a_3 "}, " b_ ", add, 1, 1, " major, add_)      \
            : SKL_C_OUT_##blocks                                                                                     \
            : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b), "r"(add), "n"(MN_MAJOR));                          \
    }
#define SKL_DEFINE_WGMMA(element, type, blocks, n, a_, b_, add_, major_a, major_b, ...)                              \
    template <bool MN_MAJOR, bool A_MN_MAJOR = MN_MAJOR>                                                             \
    __device__ inline void wgmma(float(&c)[blocks][4], uint64_t a, uint64_t b, int add, element)                     \
    {                                                                                                                \
        asm volatile(SKL_WGMMA(blocks, n, type, a_ ", " b_ ", add, 1, 1, " major_a ", " major_b, add_)               \
                     : SKL_C_OUT_##blocks                                                                            \
                     : "l"(a), "l"(b), "r"(add), "n"(A_MN_MAJOR), "n"(MN_MAJOR));                                    \
    }

/* Four steps of the same, 64 x N += 64 x 64 . 64 x N, in one statement: C++ to PTX then takes a tenth less time.
 * Operands in shared memory are given as low words of their descriptors. */
template <bool MN_MAJOR> constexpr int OPERAND_STEP = MN_MAJOR ? 16 * 128 / 16 : 32 / 16;

/* clang-format off */
#define SKL_DESCRIPTORS_4(name, low, step)                                                                           \
    ".reg .b64 " name "_0, " name "_1, " name "_2, " name "_3;\n"                                                    \
    "mov.b64 " name "_0, {" low ", high};\n"                                                                         \
    "add.u32 next, " low ", " step ";\nmov.b64 " name "_1, {next, high};\n"                                          \
    "add.u32 next, " low ", 2 * " step ";\nmov.b64 " name "_2, {next, high};\n"                                      \
    "add.u32 next, " low ", 3 * " step ";\nmov.b64 " name "_3, {next, high};\n"
#define SKL_STEP(blocks, n, type, a, b, add, tail)                                                                     \
    "wgmma.mma_async.sync.aligned.m64n" n "k16.f32." type "." type " {" SKL_C_REGS_##blocks "}, " a ", " b ", " add ", 1, 1, " tail \
    ";\n"
#define SKL_BEGIN_4(b, add, step)                                                                                    \
    "{\n"                                                                                                            \
    ".reg .pred add, more;\n"                                                                                        \
    ".reg .b32 high, next;\n"                                                                                        \
    "setp.ne.b32 add, " add ", 0;\n"                                                                                 \
    "mov.b32 high, 0x40000040;\n" /* the high word of smem_descriptor */                                                        \
    "setp.ne.b32 more, high, 0;\n" SKL_DESCRIPTORS_4("b", b, step)
#define SKL_WGMMA_4_FRAGS(blocks, n, type, a_0, a_1, a_2, a_3, b, add, step, tail)                                     \
    SKL_BEGIN_4(b, add, step)                                                                                        \
    SKL_STEP(blocks, n, type, "{" a_0 "}", "b_0", "add", tail)                                                         \
    SKL_STEP(blocks, n, type, "{" a_1 "}", "b_1", "more", tail)                                                        \
    SKL_STEP(blocks, n, type, "{" a_2 "}", "b_2", "more", tail)                                                        \
    SKL_STEP(blocks, n, type, "{" a_3 "}", "b_3", "more", tail)                                                        \
    "}"
#define SKL_WGMMA_4(blocks, n, type, a, b, add, step_a, step_b, tail)                                                  \
    SKL_BEGIN_4(b, add, step_b)                                                                                      \
    SKL_DESCRIPTORS_4("a", a, step_a)                                                                                \
    SKL_STEP(blocks, n, type, "a_0", "b_0", "add", tail)                                                               \
    SKL_STEP(blocks, n, type, "a_1", "b_1", "more", tail)                                                              \
    SKL_STEP(blocks, n, type, "a_2", "b_2", "more", tail)                                                              \
    SKL_STEP(blocks, n, type, "a_3", "b_3", "more", tail)                                                              \
    "}"
/* clang-format on */
#define SKL_IN_16(a)                                                                                                 \
    "r"(a[0][0]), "r"(a[0][1]), "r"(a[0][2]), "r"(a[0][3]), "r"(a[1][0]), "r"(a[1][1]), "r"(a[1][2]), "r"(a[1][3]),  \
        "r"(a[2][0]), "r"(a[2][1]), "r"(a[2][2]), "r"(a[2][3]), "r"(a[3][0]), "r"(a[3][1]), "r"(a[3][2]),            \
        "r"(a[3][3])

#define SKL_DEFINE_FRAGS_4(element, type, blocks, n, a_0, a_1, a_2, a_3, a_4, a_5, a_6, a_7, a_8, a_9, a_10, a_11,   \
                           a_12, a_13, a_14, a_15, b_, add_, step, major)                                            \
    template <bool MN_MAJOR>                                                                                         \
    __device__ inline void wgmma_4(float(&c)[blocks][4], const uint32_t(*a)[4], uint32_t b, int add, element)        \
    {                                                                                                                \
        asm volatile(SKL_WGMMA_4_FRAGS(blocks, n, type, a_0 ", " a_1 ", " a_2 ", " a_3,                              \
                                       a_4 ", " a_5 ", " a_6 ", " a_7, a_8 ", " a_9 ", " a_10 ", " a_11,             \
                                       a_12 ", " a_13 ", " a_14 ", " a_15, b_, add_, step, major)                    \
                     : SKL_C_OUT_##blocks                                                                            \
                     : SKL_IN_16(a), "r"(b), "r"(add), "n"(OPERAND_STEP<MN_MAJOR>), "n"(MN_MAJOR));                  \
    }
#define SKL_DEFINE_WGMMA_4(element, type, blocks, n, a_, b_, add_, step_a, step_b, major_a, major_b, ...)            \
    template <bool MN_MAJOR, bool A_MN_MAJOR = MN_MAJOR>                                                             \
    __device__ inline void wgmma_4(float(&c)[blocks][4], uint32_t a, uint32_t b, int add, element)                   \
    {                                                                                                                \
        asm volatile(SKL_WGMMA_4(blocks, n, type, a_, b_, add_, step_a, step_b, major_a ", " major_b)                \
                     : SKL_C_OUT_##blocks                                                                            \
                     : "r"(a), "r"(b), "r"(add), "n"(OPERAND_STEP<A_MN_MAJOR>), "n"(OPERAND_STEP<MN_MAJOR>),         \
                       "n"(A_MN_MAJOR), "n"(MN_MAJOR));                                                              \
    }

#define SKL_DEFINE_ALL(element, type)                                                                                \
    SKL_SIZE_8(SKL_DEFINE_FRAGS, element, type)                                                                      \
    SKL_SIZE_16(SKL_DEFINE_FRAGS, element, type)                                                                     \
    SKL_SIZE_4(SKL_DEFINE_WGMMA, element, type)                                                                      \
    SKL_SIZE_8(SKL_DEFINE_WGMMA, element, type)                                                                      \
    SKL_SIZE_12(SKL_DEFINE_WGMMA, element, type)                                                                     \
    SKL_SIZE_16(SKL_DEFINE_WGMMA, element, type)                                                                     \
    SKL_SIZE_8(SKL_DEFINE_FRAGS_4, element, type)                                                                    \
    SKL_SIZE_12(SKL_DEFINE_FRAGS_4, element, type)                                                                   \
    SKL_SIZE_16(SKL_DEFINE_FRAGS_4, element, type)                                                                   \
    SKL_SIZE_24(SKL_DEFINE_FRAGS_4, element, type)                                                                   \
    SKL_SIZE_32(SKL_DEFINE_FRAGS_4, element, type)                                                                   \
    SKL_SIZE_4(SKL_DEFINE_WGMMA_4, element, type)                                                                    \
    SKL_SIZE_8(SKL_DEFINE_WGMMA_4, element, type)                                                                    \
    SKL_SIZE_12(SKL_DEFINE_WGMMA_4, element, type)                                                                   \
    SKL_SIZE_16(SKL_DEFINE_WGMMA_4, element, type)
SKL_DEFINE_ALL(skl_bf16, "bf16")
SKL_DEFINE_ALL(skl_f16, "f16")

} // namespace sm90

#endif
