/* Wrappers of one PTX instruction each, sm_80 and up. */
#ifndef SKL_CUDA_COMMON_PTX_CUH
#define SKL_CUDA_COMMON_PTX_CUH

#include <stdint.h>

#include "cuda/common/element.cuh"

__device__ inline uint32_t shared_address(const void *pointer)
{
    return (uint32_t)__cvta_generic_to_shared(pointer);
}

/* Copies 16 bytes from global to shared memory: `bytes` are read, zeros fill the rest. */
__device__ inline void cp_async_16(uint32_t to, const void *from, int bytes)
{
    asm volatile("cp.async.cg.shared.global [%0], [%1], 16, %2;" ::"r"(to), "l"(from), "r"(bytes) : "memory");
}

/* Copies 4 bytes, or zeros if not `inside`. */
__device__ inline void cp_async_4(uint32_t to, const void *from, bool inside)
{
    asm volatile("cp.async.ca.shared.global [%0], [%1], 4, %2;" ::"r"(to), "l"(from), "r"(inside ? 4 : 0) : "memory");
}

__device__ inline void cp_async_commit()
{
    asm volatile("cp.async.commit_group;" ::: "memory");
}

/* Waits until at most PENDING of this thread's groups are in flight. */
template <int PENDING> __device__ inline void cp_async_wait()
{
    asm volatile("cp.async.wait_group %0;" ::"n"(PENDING) : "memory");
}

/* Loads four 8 x 8 matrices of 16-bit elements; lanes 8 i .. 8 i + 7 give the row addresses of matrix i. */
__device__ inline void ldmatrix_x4(uint32_t (&to)[4], uint32_t row)
{
    asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0, %1, %2, %3}, [%4];"
                 : "=r"(to[0]), "=r"(to[1]), "=r"(to[2]), "=r"(to[3])
                 : "r"(row));
}

/* Loads four 8 x 8 matrices, each transposed. */
__device__ inline void ldmatrix_x4_transposed(uint32_t (&to)[4], uint32_t row)
{
    asm volatile("ldmatrix.sync.aligned.m8n8.x4.trans.shared.b16 {%0, %1, %2, %3}, [%4];"
                 : "=r"(to[0]), "=r"(to[1]), "=r"(to[2]), "=r"(to[3])
                 : "r"(row));
}

/* c += a b: 16 x 8 += 16 x 16 . 16 x 8, f32 accumulation. */
__device__ inline void mma_m16n8k16(float (&c)[4], const uint32_t (&a)[4], uint32_t b_0, uint32_t b_1, skl_bf16)
{
    asm("mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, "
        "{%0, %1, %2, %3};"
        : "+f"(c[0]), "+f"(c[1]), "+f"(c[2]), "+f"(c[3])
        : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b_0), "r"(b_1));
}

__device__ inline void mma_m16n8k16(float (&c)[4], const uint32_t (&a)[4], uint32_t b_0, uint32_t b_1, skl_f16)
{
    asm("mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, "
        "{%0, %1, %2, %3};"
        : "+f"(c[0]), "+f"(c[1]), "+f"(c[2]), "+f"(c[3])
        : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b_0), "r"(b_1));
}

/* Rounds two values to 16 bits and packs them. */
__device__ inline uint32_t pack(float low, float high, skl_bf16)
{
    uint32_t both;
    asm("cvt.rn.bf16x2.f32 %0, %1, %2;" : "=r"(both) : "f"(high), "f"(low));
    return both;
}

__device__ inline uint32_t pack(float low, float high, skl_f16)
{
    uint32_t both;
    asm("cvt.rn.f16x2.f32 %0, %1, %2;" : "=r"(both) : "f"(high), "f"(low));
    return both;
}

/* The two values of a packed pair, low half first. */
__device__ inline float2 unpack(uint32_t pair, skl_bf16)
{
    return make_float2(__uint_as_float(pair << 16), __uint_as_float(pair & 0xFFFF0000U));
}

__device__ inline float2 unpack(uint32_t pair, skl_f16)
{
    return make_float2(skl_from_f16((uint16_t)pair), skl_from_f16((uint16_t)(pair >> 16)));
}

/* Maximum over the warp of values that are not negative: as integers they have the same order. */
__device__ inline float warp_max(float value)
{
    return __uint_as_float(__reduce_max_sync(~0U, __float_as_uint(value)));
}

/* 2^x on the special function unit, with an error of about 2 ulp. */
__device__ inline float ex2(float x)
{
    float y;
    asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
    return y;
}

/* log2 x on the special function unit, for normal x. */
__device__ inline float lg2(float x)
{
    float y;
    asm("lg2.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
    return y;
}

/* 1 / x on the special function unit, with an error of about 1 ulp. */
__device__ inline float rcp(float x)
{
    float y;
    asm("rcp.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
    return y;
}

/* The lane. Every call reads it: where few registers are left, what depends on it is computed again, not kept. */
__device__ inline unsigned read_lane()
{
    unsigned lane;
    asm volatile("mov.u32 %0, %%laneid;" : "=r"(lane));
    return lane;
}

/* The thread's index, for divisions. They are unsigned, which takes fewer instructions and registers. Then the
 * compiler keeps more results, and some kernels of sm80 would spill on 8.0: their instance headers ask for signed
 * ones. */
#ifndef SKL_SIGNED_THREAD_INDEX
__device__ inline unsigned thread_index()
{
    return threadIdx.x;
}
#else
__device__ inline int thread_index()
{
    return (int)threadIdx.x;
}
#endif

/* A barrier for some of the block's warps; number 0 is __syncthreads. */
__device__ inline void named_barrier_sync(int number, int threads)
{
    asm volatile("bar.sync %0, %1;" ::"r"(number), "r"(threads) : "memory");
}

/* Counts the warp at the barrier without waiting. */
__device__ inline void named_barrier_arrive(int number, int threads)
{
    asm volatile("bar.arrive %0, %1;" ::"r"(number), "r"(threads) : "memory");
}

#endif
