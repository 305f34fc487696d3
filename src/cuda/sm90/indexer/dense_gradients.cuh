/* Gradients of an indexer from its G (index_strip.cuh), on Hopper's tensor cores (sm_90a), bf16.
 *
 *   queries    dq_g = scale w_g D_g      D_g = (G [A_g > 0]) k       dw_g = scale <q_g, D_g>
 *   keys       dk   = scale sum_g (w_g G [A_g > 0])^T q_g            A_g = q_g k^T, again
 *
 * Both are one loop: own rows stay in shared memory, the other side's are streamed, 64 a stage; A of a stage (wgmma)
 * says which pairs of G count; those, as A operand from registers, times the same stage go into sums that stay in
 * registers (wgmma). The keys' kernel takes every block of G transposed.
 *
 *   block     2 consumer warpgroups of 64 own rows; a producer warp, 2 warps that make stages clean
 *   queries   own: 128 queries of an index head; streamed: the keys that they see
 *   keys      own: 128 keys; streamed: every index head of each 64 queries, whose G stays meanwhile
 *   regs      240 a consumer thread: sums (DIM / 2), A (32), G and what counts of it (16 each)
 *   shared    own rows and STAGES stages: 160 KB at DIM = 128 */
#ifndef SKL_CUDA_SM90_INDEXER_DENSE_GRADIENTS_CUH
#define SKL_CUDA_SM90_INDEXER_DENSE_GRADIENTS_CUH

#include "cuda/common/row_stats.cuh"
#include "cuda/common/indexer/strip_gradients.cuh"
#include "cuda/sm90/tensor_map.cuh"
#include "cuda/sm90/indexer/ordered_barrier.cuh"

namespace sm90
{

constexpr int INDEX_THREADS = 128 * (CONSUMERS + 1);
constexpr int CLEANERS = 64; /* threads: one a row of a stage */

template <int DIM> constexpr int INDEX_STAGES = DIM == 256 ? 4 : 8;

template <int DIM> struct index_smem {
    static constexpr int STAGES = INDEX_STAGES<DIM>;
    smem_rows<DIM / 64> own; /* 128 rows */
    row_stage<DIM> stages[STAGES];
    float weights[STAGES][STAGE_KEYS]; /* keys' kernel: of the queries of a stage */
    uint64_t own_full, full[STAGES], clean[STAGES], empty[STAGES], order[CONSUMERS];
    /* Here, and not in the registers of every thread. */
    query_slot place; /* queries' kernel */
    key_work work;    /* keys' kernel */
};

/* Own rows and streamed rows. */
struct index_maps {
    CUtensorMap own, streamed;
};

/* ---- The loop's body ---------------------------------------------------------------------------------------- */

/* 64 rows of a warpgroup, in parts that one wgmma fills. */
template <int DIM> struct index_sums {
    static constexpr int PART = DIM < 128 ? DIM : 128;
    float parts[DIM / PART][PART / 8][4];

    /* Of the thread's columns: n-th block of 8 dimensions. */
    __device__ float at(int n, int half, int parity) const
    {
        return parts[n / (PART / 8)][n % (PART / 8)][half * 2 + parity];
    }
};

template <int DIM> struct index_consumer {
    index_smem<DIM> &smem;
    int group; /* of the warp, the same for all lanes */
    ordered_barrier order;
    index_sums<DIM> sums;
    stage_logits a;

    __device__ void wait_stage(int n)
    {
        barrier_wait(smem.clean[n % smem.STAGES], n / smem.STAGES % 2);
    }

    __device__ void start_a(int n)
    {
        start_products<__nv_bfloat16, DIM, 0>(a, NULL, row_operand(&smem.own) + group * (64 * 128 / 16),
                                              row_operand(&smem.stages[n % smem.STAGES]));
    }

    __device__ void clear()
    {
        constexpr int PART = sums.PART;
#pragma unroll
        for (int e = 0; e < DIM / 2; e++)
            sums.parts[e / (PART / 2)][e / 4 % (PART / 8)][e % 4] = 0.0F;
    }

    /* A of the first stage. */
    __device__ void begin()
    {
        barrier_wait(smem.own_full, 0);
        wait_stage(0);
        wgmma_fence();
        start_a(0);
        wgmma_commit();
        wgmma_wait<0>();
        fence_operand(a);
    }

    /* Adds what counts of G, which pick makes of it and of A, times stage n; with it A of the next stage is made, or
     * behind the last one the same again. G lies as A operands do. */
    template <typename PICK> __device__ void add_stage(int n, int next, const uint4 (&g)[STAGE_KEYS / 16], PICK pick)
    {
        uint32_t h[STAGE_KEYS / 16][4];
#pragma unroll
        for (int step = 0; step < STAGE_KEYS / 16; step++) {
            const uint32_t parts[4] = {g[step].x, g[step].y, g[step].z, g[step].w};
#pragma unroll
            for (int part = 0; part < 4; part++) {
                const int i = step * 2 + part / 2, half = part % 2;
                h[step][part] = pick(parts[part], a[i][half * 2], a[i][half * 2 + 1], n % smem.STAGES, i);
            }
        }
        wait_stage(next);
        order.wait();
        wgmma_fence();
#pragma unroll
        for (int part = 0; part < DIM / sums.PART; part++) {
            const uint32_t rows =
                column_operand(smem.stages[n % smem.STAGES].slabs[part * sums.PART / 64], STAGE_KEYS * 128);
#pragma unroll
            for (int step = 0; step < STAGE_KEYS / 16; step++)
                wgmma<true>(sums.parts[part], h[step], descriptor_of(rows + step * 16 * 128 / 16), 1,
                            __nv_bfloat16());
        }
        wgmma_commit();
        start_a(next);
        wgmma_commit();
        wgmma_wait<1>();
        order.arrive();
        wgmma_wait<0>();
#pragma unroll
        for (int part = 0; part < DIM / sums.PART; part++)
            fence_operand(sums.parts[part]);
        fence_operand(a);
        barrier_arrive_if(smem.empty[n % smem.STAGES], threadIdx.x % 32 == 0);
    }
};

/* ---- Copies ------------------------------------------------------------------------------------------------- */

template <int DIM>
__device__ inline void load_block_rows(index_smem<DIM> &smem, const CUtensorMap &map, int row, int head, int batch)
{
    barrier_expect_tx(smem.own_full, smem.own.SIZE);
#pragma unroll
    for (int part = 0; part < DIM / 64; part++)
        tma_load(smem.own.slabs[part], map, part * 64, row, head, batch, smem.own_full);
}

template <int DIM>
__device__ inline void load_stage(index_smem<DIM> &smem, const CUtensorMap &map, int n, int row, int head, int batch)
{
    const int at = n % smem.STAGES;
    barrier_wait(smem.empty[at], n / smem.STAGES % 2 ^ 1);
    barrier_expect_tx(smem.full[at], (int)sizeof smem.stages[at]);
#pragma unroll
    for (int part = 0; part < DIM / 64; part++)
        tma_load(smem.stages[at].slabs[part], map, part * 64, row, head, batch, smem.full[at]);
}

template <int DIM> __device__ inline void wait_stage_full(index_smem<DIM> &smem, int n)
{
    barrier_wait(smem.full[n % smem.STAGES], n / smem.STAGES % 2);
}

/* A pair that is not seen weighs 0, but 0 times a value that is not finite is NaN. Rows of a stage that hold one
 * become 0: whoever sees such a row has NaN in its G. One thread a row. */
template <int DIM> __device__ inline void clean_rows(row_stage<DIM> &stage, int row)
{
    bool finite = true;
#pragma unroll 4
    for (int c = 0; c < DIM / 8; c++)
        finite =
            finite && all_finite<__nv_bfloat16>(*(const uint4 *)(const void *)&stage.slabs[c / 8][row][c % 8 * 16]);
    for (int c = 0; !finite && c < DIM / 8; c++)
        *(uint4 *)(void *)&stage.slabs[c / 8][row][c % 8 * 16] = make_uint4(0, 0, 0, 0);
}

/* Gives stage n to the consumers; only where a pair of it is not seen do values that are not finite matter. */
template <int DIM> __device__ inline void publish_stage(index_smem<DIM> &smem, int n, bool is_full_stage)
{
    const int at = n % smem.STAGES;
    if (!is_full_stage)
        clean_rows(smem.stages[at], (int)threadIdx.x % CLEANERS);
    fence_async_shared();
    barrier_arrive(smem.clean[at]);
}

template <int DIM> __device__ inline void init_barriers(index_smem<DIM> &smem)
{
    barrier_init(smem.own_full, 1);
    for (int at = 0; at < smem.STAGES; at++) {
        barrier_init(smem.full[at], 1);
        barrier_init(smem.clean[at], CLEANERS);
        barrier_init(smem.empty[at], CONSUMERS * 4);
    }
    ordered_barrier::init(smem.order);
    barrier_init_fence();
}

/* Behind the consumers: warp 0 copies, warps 2 and 3 clean. */
enum index_role { CONSUMES, COPIES, CLEANS, IDLES };

__device__ inline index_role role_of_warp()
{
    const int warp = warp_index() - CONSUMERS * 4;
    if (warp < 0)
        return CONSUMES;
    return warp >= 2 ? CLEANS : warp == 0 ? COPIES : IDLES;
}

/* ---- Queries ------------------------------------------------------------------------------------------------ */

template <int DIM>
__global__ void __launch_bounds__(INDEX_THREADS, 1)
    index_query_kernel(const __grid_constant__ index_params params, const __grid_constant__ index_maps maps)
{
#ifdef __CUDA_ARCH_FEAT_SM90_ALL
    extern __shared__ __align__(1024) unsigned char raw[];
    index_smem<DIM> &smem = *(index_smem<DIM> *)(void *)raw;
    const int index_heads = (int)params.problem.index_heads;
    const unsigned slot = (unsigned)params.strip_first + blockIdx.x / index_heads;
    if (threadIdx.x == 0) {
        smem.place = slot_at(params, slot, (unsigned)params.problem.heads_s);
        init_barriers(smem);
    }
    __syncthreads();
    const query_slot &at = smem.place;
    if (at.count <= 0)
        return;
    const int head = at.head * index_heads + (int)(blockIdx.x % index_heads), batch = (int)at.sequence.batch;
    const int first = at.tile_begin * SIDE, stages = (at.tile_end - at.tile_begin) * (SIDE / STAGE_KEYS);
    const int group = warpgroup_index();
    if (group < CONSUMERS) {
        reg_alloc<240>();
        index_consumer<DIM> own = {smem, group, ordered_barrier(smem.order, group)};
        const float least = params.least;
        own.clear();
        uint4 g[2][STAGE_KEYS / 16]; /* of a stage, and of the next one, which is on its way */
        const auto load_g = [&](uint4(&to)[STAGE_KEYS / 16], int n) {
            const uint4 *const from =
                g_block(params, slot, at.tile_begin + n / 2, (int)threadIdx.x / 32, n % 2 * (STAGE_KEYS / 16));
#pragma unroll
            for (int step = 0; step < STAGE_KEYS / 16; step++)
                to[step] = __ldg(from + step * 32);
        };
        const auto count = [=](uint32_t pair, float low, float high, int, int) {
            return weigh_pair<__nv_bfloat16>(unpack(pair, __half()), low, high, make_float2(1.0F, 1.0F), least);
        };
        if (stages > 0) {
            own.begin();
            load_g(g[0], 0);
        }
        for (int n = 0; n < stages; n += 2) { /* there are two stages in a tile */
            load_g(g[1], n + 1);
            own.add_stage(n, n + 1, g[0], count);
            const int next = min(n + 2, stages - 1);
            load_g(g[0], next);
            own.add_stage(n + 1, next, g[1], count);
        }
        const query_gradients<__nv_bfloat16, DIM> gradients = {params, at, head};
#pragma unroll
        for (int half = 0; half < 2; half++)
            gradients.store_row(acc_row<1>(0, half), [&](int n, int parity) { return own.sums.at(n, half, parity); });
        return;
    }
    reg_dealloc<24>();
    switch (role_of_warp()) {
    case COPIES:
        if (stages > 0)
            load_block_rows(smem, maps.own, (int)at.sequence.query_begin + at.first, head, batch);
        for (int n = 0; n < stages; n++)
            load_stage(smem, maps.streamed, n, (int)at.sequence.key_begin + first + n * STAGE_KEYS,
                       at.head / params.b.heads_per_key, batch);
        break;
    case CLEANS:
        for (int n = 0; n < stages; n++) {
            wait_stage_full(smem, n);
            publish_stage(smem, n, is_full(at, first + n * STAGE_KEYS, STAGE_KEYS));
        }
        break;
    default:
        break;
    }
#endif
}

/* ---- Keys --------------------------------------------------------------------------------------------------- */

/* With the upstream gradient. What is not finite becomes 0: where it counts, G is NaN. */
__device__ inline float weight_of(const index_params &params, const query_slot &at, int row, int index_head)
{
    const skl_input &w = params.call.inputs.w_s;
    const int64_t query = at.first + min(row, at.count - 1);
    const int64_t offset = SKL_ROW(w, at.sequence.batch, at.head, at.sequence.query_begin + query) + index_head;
    const float weight = skl_load(w.data, params.problem.dtype_w, offset) * upstream_of(params, at, query) * G_UNIT;
    return fabsf(weight) < INFINITY ? weight : 0.0F;
}

template <int DIM>
__global__ void __launch_bounds__(INDEX_THREADS, 1)
    index_key_kernel(const __grid_constant__ index_params params, const __grid_constant__ index_maps maps)
{
#ifdef __CUDA_ARCH_FEAT_SM90_ALL
    extern __shared__ __align__(1024) unsigned char raw[];
    index_smem<DIM> &smem = *(index_smem<DIM> *)(void *)raw;
    if (threadIdx.x == 0) {
        smem.work = key_work_of_block<STAGE_KEYS>(params, blockIdx.x);
        init_barriers(smem);
    }
    __syncthreads();
    const key_work &work = smem.work;
    const int batch = (int)work.sequence.batch, heads = (int)params.problem.index_heads;
    if (work.stages == 0)
        return;
    const int group = warpgroup_index();
    if (group < CONSUMERS) {
        reg_alloc<224>();
        index_consumer<DIM> own = {smem, group, ordered_barrier(smem.order, group)};
        own.clear();
        own.begin();
        const float least = params.least;
        int n = 0;
        for_slots(params, work, [&](int slot) {
            for (int half = 0; half < SIDE / STAGE_KEYS; half++) {
                uint4 g[STAGE_KEYS / 16];
#pragma unroll
                for (int step = 0; step < STAGE_KEYS / 16; step++)
                    g[step] = transpose(__ldg(
                        g_block(params, slot, work.tile, half * (STAGE_KEYS / 16) + step, (int)threadIdx.x / 32)));
                for (int head = 0; head < heads; head++, n++)
                    own.add_stage(
                        n, min(n + 1, work.stages - 1), g, [&](uint32_t pair, float low, float high, int at, int i) {
                            const float2 weights = *(const float2 *)&smem.weights[at][acc_column(i, 0)];
                            return weigh_pair<__nv_bfloat16>(unpack(pair, __half()), low, high, weights, least);
                        });
            }
        });
#pragma unroll
        for (int half = 0; half < 2; half++)
            add_key_row<DIM>(params, work, acc_row<1>(0, half), 0,
                             [&](int c, int parity) { return own.sums.at(c, half, parity); });
        return;
    }
    reg_dealloc<56>();
    int n = 0;
    switch (role_of_warp()) {
    case COPIES:
        load_block_rows(smem, maps.own, (int)work.sequence.key_begin + work.tile * SIDE, work.key_head, batch);
        for_slots(params, work, [&](int slot) {
            const query_slot at = slot_at(params, slot, (unsigned)params.problem.heads_s);
            for (int half = 0; half < SIDE / STAGE_KEYS; half++)
                for (int head = 0; head < heads; head++, n++)
                    load_stage(smem, maps.streamed, n, (int)at.sequence.query_begin + at.first + half * STAGE_KEYS,
                               at.head * heads + head, batch);
        });
        break;
    case CLEANS:
        for_slots(params, work, [&](int slot) {
            const query_slot at = slot_at(params, slot, (unsigned)params.problem.heads_s);
            const bool is_full_stage = is_full(at, work.tile * SIDE, SIDE);
            for (int half = 0; half < SIDE / STAGE_KEYS; half++)
                for (int head = 0; head < heads; head++, n++) {
                    const int row = (int)threadIdx.x % CLEANERS;
                    const float weight = weight_of(params, at, half * STAGE_KEYS + row, head);
                    wait_stage_full(smem, n);
                    smem.weights[n % smem.STAGES][row] = weight;
                    publish_stage(smem, n, is_full_stage);
                }
        });
        break;
    default:
        break;
    }
#endif
}

} // namespace sm90

#endif
