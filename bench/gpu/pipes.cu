/* How tensor cores and the other pipes of a Hopper SM compete: throughput of wgmma products, exponentials and other
 * arithmetic, alone and at the same time, in loops that do nothing else. Built with the tool:
 *
 *     cmake --preset release && cmake --build build/release --target pipes && build/release/bench/pipes
 */
#include <algorithm>
#include <cstdio>
#include <cstdlib>
#include <cuda_bf16.h>
#include <cuda_fp16.h>

#include "cuda/sm90/pipeline.cuh"

using namespace sm90;

namespace
{

typedef skl_bf16 element; /* of the products; __nv_bfloat16 in memory, for its conversions */

constexpr int SHARED = 208 * 1024, KEYS_OFFSET = 128 * 1024; /* bytes of shared memory: queries, then keys */
constexpr int LAUNCHES = 6, STAGES = 512, REPEATS = 1000;

struct clocks {
    unsigned products, others, issued;
};

__device__ float sink[132 * 512];

/* Random values of both signs: products of zeros would use less power and run at a higher clock. */
__device__ void fill(unsigned char *shared)
{
    for (int i = (int)threadIdx.x; i < SHARED / 2; i += (int)blockDim.x) {
        unsigned z = ((unsigned)i + 1) * 2654435761U;
        z = (z ^ z >> 15) * 2246822519U;
        z = (z ^ z >> 13) * 3266489917U;
        z ^= z >> 16;
        const float value = (float)(z & 0xFFFF) / 65536.0F + (float)(z >> 16) / 65536.0F - 1.0F;
        ((__nv_bfloat16 *)(void *)shared)[i] = __float2bfloat16(2.4F * value);
    }
    fence_proxy_async();
    __syncthreads();
}

/* ---- Products and one other instruction --------------------------------------------------------------------- */

enum instruction { EXPONENTIAL, FMA, ADD, MULTIPLY };

template <instruction KIND> __device__ void issue(float &to, float a, float b)
{
    if (KIND == EXPONENTIAL)
        asm volatile("ex2.approx.ftz.f32 %0, %0;" : "+f"(to));
    else if (KIND == FMA)
        asm volatile("fma.rn.f32 %0, %1, %2, %0;" : "+f"(to) : "f"(a), "f"(b));
    else if (KIND == ADD)
        asm volatile("add.f32 %0, %0, %1;" : "+f"(to) : "f"(a));
    else
        asm volatile("mul.f32 %0, %0, 0f3F800001;" : "+f"(to));
}

/* Two warpgroups multiply (WITH_PRODUCTS), and a third one issues one kind of instruction until they are done. N:
 * keys per product. A_IN_REGS: the A operand is in registers, not in shared memory. */
template <int N, bool A_IN_REGS, instruction KIND, bool WITH_PRODUCTS>
__global__ void __launch_bounds__(384, 1) concurrent(clocks *to)
{
    extern __shared__ __align__(1024) unsigned char shared[];
    __shared__ volatile int done;
    done = 0;
    fill(shared);
    const int group = warpgroup_index();
    const long long begin = clock64();
    float sum = 0;
    if (group < 2) {
        float x[N / 8][4] = {};
        const uint32_t a[4] = {1, 2, 3, 4};
        const uint32_t q = k_major_operand(shared) + group * 512, k = k_major_operand(shared + KEYS_OFFSET);
#pragma unroll 1
        for (int n = 0; WITH_PRODUCTS && n < REPEATS; n++) {
            wgmma_fence();
#pragma unroll
            for (int step = 0; step < 8; step++)
                if constexpr (A_IN_REGS)
                    wgmma<false>(x, a, k_step_descriptor(k, step % 4, STAGE_ROWS), 1, element());
                else
                    wgmma<false>(x, k_step_descriptor(q, step, 256), k_step_descriptor(k, step % 4, STAGE_ROWS), 1,
                                 element());
            wgmma_commit();
            wgmma_wait<0>();
        }
        fence_operand(x);
        done = WITH_PRODUCTS;
        for (int e = 0; e < N / 2; e++)
            sum += x[e / 4][e % 4];
    } else {
        float x[32], y[32];
        for (int e = 0; e < 32; e++) {
            x[e] = (float)threadIdx.x * 0.001F * (float)e;
            y[e] = (float)e * 0.1F;
        }
        unsigned issued = 0;
        while (WITH_PRODUCTS ? !done : issued < 32 * REPEATS) {
#pragma unroll
            for (int e = 0; e < 128; e++)
                issue<KIND>(x[e % 32], y[e % 32], y[(e + 5) % 32]);
            issued += 128;
        }
        for (int e = 0; e < 32; e++)
            sum += x[e];
        if (blockIdx.x == 0)
            to->issued = issued;
    }
    sink[blockIdx.x * 512 + threadIdx.x] = sum;
    if (blockIdx.x == 0 && threadIdx.x % 128 == 0)
        (group < 2 ? to->products : to->others) = (unsigned)(clock64() - begin);
}

clocks *shared_clocks;

void check(cudaError_t error)
{
    if (error == cudaSuccess)
        return;
    fprintf(stderr, "pipes: %s\n", cudaGetErrorString(error));
    exit(1);
}

template <typename KERNEL> void launch(KERNEL *kernel, int threads)
{
    check(cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, SHARED));
    kernel<<<132, threads, SHARED>>>(shared_clocks);
    check(cudaPeekAtLastError());
    check(cudaDeviceSynchronize());
}

template <int N, bool A_IN_REGS, instruction KIND> void compare(const char *name)
{
    launch(concurrent<N, A_IN_REGS, KIND, false>, 384);
    const double alone = (double)shared_clocks->issued / shared_clocks->others;
    launch(concurrent<N, A_IN_REGS, KIND, true>, 384);
    const double with_products = (double)shared_clocks->issued / shared_clocks->others;
    const double product = shared_clocks->products / (16.0 * REPEATS) * 64 / N;
    printf("%-14s %.3f per clock alone, %.3f with products of 64 x %3d x 16, A in %s, %.1f clocks per 64 x 64 x 16\n",
           name, alone, with_products, N, A_IN_REGS ? "registers" : "shared memory", product);
}

template <instruction KIND> void compare_all(const char *name)
{
    compare<64, false, KIND>(name);
    compare<64, true, KIND>(name);
    compare<128, false, KIND>(name);
    compare<128, true, KIND>(name);
}

/* ---- The forward's loop over stages ------------------------------------------------------------------------- */

/* Work per stage. ORDERED: named barriers let one warpgroup after another issue its products. */
enum work { PRODUCTS = 1, EXPONENTIALS = 2, SUMS = 4, ADDS = 8, ORDERED = 16 };

/* Without SUMS there is one add per logit, so that its exponential is not removed. */
template <int WORK, int N>
__device__ void add(row_sums (&sums)[2], float (&x)[N / 8][4], float (&y)[N / 8][4], float scale, float m)
{
#pragma unroll
    for (int half = 0; half < 2; half++)
#pragma unroll
        for (int e = 0; e < N / 4; e++) {
            float a = x[e / 2][half * 2 + e % 2], b = y[e / 2][half * 2 + e % 2];
            if (WORK & SUMS) {
                a = fmaf(a, scale, -m);
                b = fmaf(b, scale, m);
            }
            const float exp_a = WORK & EXPONENTIALS ? ex2(a) : a, exp_b = WORK & EXPONENTIALS ? ex2(b) : b;
            sums[half].l_a += exp_a;
            sums[half].l_b += exp_b;
            if (WORK & SUMS)
                sums[half].w = fmaf(exp_a, a - b, sums[half].w);
        }
}

/* Lets warpgroup `group`, which waits in named_barrier_sync(1 + group, 256), issue its products. */
__device__ void release_products_of(int group)
{
    asm volatile("bar.arrive %0, 256;" ::"r"(1 + group) : "memory");
}

/* GROUPS warpgroups of 64 queries, stages of N keys, 128 dimensions. The first REG_DIMS dimensions of A's queries are
 * in registers. */
template <int WORK, int N, int REG_DIMS, int GROUPS>
__global__ void __launch_bounds__(128 * GROUPS, 1) stages(clocks *to)
{
    constexpr int STEPS = 8; /* of 16 dimensions, in the product of each argument */
    extern __shared__ __align__(1024) unsigned char shared[];
    fill(shared);
    const int group = warpgroup_index(), next = group == GROUPS - 1 ? 0 : group + 1;
    const uint32_t q = k_major_operand(shared) + group * 512, k = k_major_operand(shared + KEYS_OFFSET);
    const float scale = 0.128F;
    float m = (float)threadIdx.x * 0.001F;
    uint32_t q_frag[REG_DIMS / 16 + (REG_DIMS == 0)][4];
    for (int e = 0; e < REG_DIMS / 4; e++)
        q_frag[e / 4][e % 4] = ((const uint32_t *)(const void *)shared)[threadIdx.x * 16 + e];
    float x[N / 8][4], y[N / 8][4];
    for (int e = 0; e < N / 2; e++) {
        x[e / 4][e % 4] = __bfloat162float(((const __nv_bfloat16 *)(const void *)shared)[threadIdx.x * 128 + e]);
        y[e / 4][e % 4] = __bfloat162float(((const __nv_bfloat16 *)(const void *)shared)[threadIdx.x * 128 + 64 + e]);
    }
    row_sums sums[2] = {};
    const long long begin = clock64();
    if (WORK & ORDERED && group == GROUPS - 1)
        release_products_of(0);
#pragma unroll 1
    for (int n = 0; n < STAGES * 64 / N; n++) {
        if (WORK & PRODUCTS) {
            const uint32_t stage = k + n % 2 * 1024;
            if (WORK & ORDERED)
                named_barrier_sync(1 + group, 256);
            wgmma_fence();
#pragma unroll
            for (int step = 0; step < STEPS; step++)
                if (step < REG_DIMS / 16)
                    wgmma<false>(x, q_frag[step], k_step_descriptor(stage, step, STAGE_ROWS), step > 0, element());
                else
                    wgmma<false>(x, k_step_descriptor(q, step, 256), k_step_descriptor(stage, step, STAGE_ROWS),
                                 step > 0, element());
#pragma unroll
            for (int step = 0; step < STEPS; step++) {
                wgmma<false>(y, k_step_descriptor(q + 4096, step, 256),
                             k_step_descriptor(stage + 1024, step, STAGE_ROWS), step > 0, element());
                if (WORK & ORDERED && step == STEPS - 4)
                    wgmma_commit();
            }
            wgmma_commit();
            if (WORK & ORDERED) {
                wgmma_wait<1>();
                release_products_of(next);
            }
            wgmma_wait<0>();
        }
        fence_operand(x);
        fence_operand(y);
        if (WORK != PRODUCTS)
            add<WORK, N>(sums, x, y, scale, m);
        m += 0.001F; /* without products, the only value that changes: keeps the loop from being optimised away */
    }
    if (WORK & ORDERED && group == 0)
        named_barrier_sync(1, 256);
    if (blockIdx.x == 0 && threadIdx.x % 128 == 0)
        atomicMax(&to->products, (unsigned)(clock64() - begin)); /* of the slowest warpgroup */
    float sum = sums[0].l_a + sums[0].l_b + sums[0].w + sums[1].l_a + sums[1].l_b + sums[1].w;
    for (int e = 0; e < N / 2; e++)
        sum += x[e / 4][e % 4] + y[e / 4][e % 4];
    sink[blockIdx.x * 512 + threadIdx.x] = sum;
}

template <int WORK, int N, int REG_DIMS, int GROUPS> void time_stages(const char *name)
{
    unsigned fastest = ~0U;
    for (int n = 0; n < LAUNCHES; n++) {
        shared_clocks->products = 0;
        launch(stages<WORK, N, REG_DIMS, GROUPS>, 128 * GROUPS);
        fastest = std::min(fastest, shared_clocks->products);
    }
    printf("%-36s %d warpgroups, stages of %3d keys, %3d dimensions in registers: %6.0f clocks per 64 x 64 pairs\n",
           name, GROUPS, N, REG_DIMS, (double)fastest / (STAGES * GROUPS));
}

} // namespace

int main()
{
    check(cudaMallocManaged(&shared_clocks, sizeof *shared_clocks));
    compare_all<EXPONENTIAL>("exponentials");
    compare_all<FMA>("fma, 3 sources");
    compare_all<ADD>("add, 2 sources");
    compare_all<MULTIPLY>("mul, 1 source");
    constexpr int ALL = PRODUCTS | EXPONENTIALS | SUMS;
    time_stages<PRODUCTS, 64, 64, 4>("products");
    time_stages<PRODUCTS, 64, 64, 1>("products");
    time_stages<EXPONENTIALS | SUMS, 64, 64, 4>("exponentials, sums");
    time_stages<SUMS, 64, 64, 4>("sums");
    time_stages<PRODUCTS | ADDS, 64, 64, 4>("products, an add per logit");
    time_stages<PRODUCTS | EXPONENTIALS, 64, 64, 4>("products, exponentials, adds");
    time_stages<PRODUCTS | SUMS, 64, 64, 4>("products, sums");
    time_stages<ALL, 64, 64, 4>("all");
    time_stages<ALL, 64, 0, 4>("all");
    time_stages<ALL | ORDERED, 64, 64, 4>("all, products in order");
    time_stages<ALL, 64, 0, 3>("all");
    time_stages<ALL, 128, 0, 3>("all");
    time_stages<ALL | ORDERED, 128, 0, 3>("all, products in order");
    time_stages<ALL, 128, 0, 2>("all");
}
