/* Gradients of a student from differences G (strip.cuh) on Hopper's tensor cores (sm_90a), bf16.
 *
 *   query kernel   dq_g = scale w_g D_g      D_g = (G [A_g > 0]) k       dw_g = scale <q_g, D_g>
 *   key kernel     dk   = scale sum_g (w_g G [A_g > 0])^T q_g            A_g = q_g k^T, computed again
 *
 * Both have the same main loop: a block keeps its rows in shared memory and streams the other side's, 64 per stage. A
 * of a stage (wgmma) decides which elements of G pass the ReLU. Those are the A operand, in registers, of the product
 * with the same stage, which accumulates in registers (wgmma). The key kernel transposes every 16 x 16 block of G.
 *
 *   block      2 consumer warpgroups of 64 stationary rows; a producer warp; 2 warps that sanitize stages
 *   queries    stationary rows: 128 queries of an index head; streamed: the keys that they attend to
 *   keys       stationary rows: 128 keys; streamed: 64 queries at a time, all index heads of them for the same G
 *   registers  240 per consumer thread (key kernel 224): accumulators (DIM / 2), A (32), G and its elements after the
 *              ReLU (16 each)
 *   shared     stationary rows and STAGES stages: 160 KB at DIM = 128
 *
 *   producer   refills a stage (TMA) as soon as both consumer warpgroups have released it
 *   sanitizer  sets non-finite rows of masked stages to 0; key kernel: also stores the queries' weights
 *   consumer   ReLU of stage n  ->  accumulates stage n, then computes A of stage n + 1 (wgmma); query kernel: G of
 *              stage n + 1 is loaded meanwhile
 *
 * The two consumer warpgroups alternate on the tensor cores (ordered_barrier.cuh). */
#ifndef SKL_CUDA_SM90_STRIPS_GRADIENTS_CUH
#define SKL_CUDA_SM90_STRIPS_GRADIENTS_CUH

#include "cuda/common/row_stats.cuh"
#include "cuda/common/strips/gradients.cuh"
#include "cuda/sm90/tensor_map.cuh"
#include "cuda/sm90/strips/ordered_barrier.cuh"

namespace sm90
{

constexpr int GRADIENT_THREADS = 128 * (CONSUMERS + 1);
constexpr int SANITIZER_THREADS = 64; /* one per row of a stage */

template <int DIM> constexpr int GRADIENT_STAGES = DIM == 256 ? 4 : 8;

template <int DIM> struct gradient_smem {
    static constexpr int STAGES = GRADIENT_STAGES<DIM>;
    smem_rows<DIM / 64> stationary_rows;
    row_stage<DIM> stages[STAGES];
    float weights[STAGES][STAGE_ROWS]; /* key kernel: of the queries of a stage */
    uint64_t stationary_full, full[STAGES], sanitized[STAGES], empty[STAGES], order[CONSUMERS];
    /* In shared memory to save registers: */
    query_slot slot; /* query kernel */
    key_work work;   /* key kernel */
};

struct gradient_maps {
    CUtensorMap stationary, streamed;
};

/* ---- Consumers ---------------------------------------------------------------------------------------------- */

/* Accumulators of a warpgroup's 64 rows, in chunks of the dimensions that one wgmma covers. */
template <int DIM> struct gradient_sums {
    static constexpr int WGMMA_DIM = DIM < 128 ? DIM : 128;
    float acc[DIM / WGMMA_DIM][WGMMA_DIM / 8][4];

    /* The thread's element in the n-th block of 8 dimensions. */
    __device__ float at(int n, int half, int parity) const
    {
        return acc[n / (WGMMA_DIM / 8)][n % (WGMMA_DIM / 8)][half * 2 + parity];
    }
};

template <int DIM> struct gradient_consumer {
    gradient_smem<DIM> &smem;
    int warpgroup; /* warp-uniform */
    ordered_barrier order;
    gradient_sums<DIM> sums;
    stage_logits a;

    __device__ void wait_stage(int n)
    {
        barrier_wait(smem.sanitized[n % smem.STAGES], n / smem.STAGES % 2);
    }

    __device__ void issue_a(int n)
    {
        issue_logits<skl_bf16, DIM, 0>(a, NULL, k_major_operand(&smem.stationary_rows) + warpgroup * (64 * 128 / 16),
                                       k_major_operand(&smem.stages[n % smem.STAGES]));
    }

    __device__ void clear()
    {
        constexpr int WGMMA_DIM = sums.WGMMA_DIM;
#pragma unroll
        for (int e = 0; e < DIM / 2; e++)
            sums.acc[e / (WGMMA_DIM / 2)][e / 4 % (WGMMA_DIM / 8)][e % 4] = 0.0F;
    }

    /* Computes A of the first stage. */
    __device__ void begin()
    {
        barrier_wait(smem.stationary_full, 0);
        wait_stage(0);
        wgmma_fence();
        issue_a(0);
        wgmma_commit();
        wgmma_wait<0>();
        fence_operand(a);
    }

    /* Adds transform(two elements of G, two of A, stage, block of 8 columns) times stage n, and computes A of stage
     * `next` (after the last stage: of the same one again). G has the layout of A operands. */
    template <typename TRANSFORM>
    __device__ void add_stage(int n, int next, const uint4 (&g)[STAGE_ROWS / 16], TRANSFORM transform)
    {
        uint32_t g_frag[STAGE_ROWS / 16][4];
#pragma unroll
        for (int step = 0; step < STAGE_ROWS / 16; step++) {
            const uint32_t regs[4] = {g[step].x, g[step].y, g[step].z, g[step].w};
#pragma unroll
            for (int reg = 0; reg < 4; reg++) {
                const int i = step * 2 + reg / 2, half = reg % 2;
                g_frag[step][reg] = transform(regs[reg], a[i][half * 2], a[i][half * 2 + 1], n % smem.STAGES, i);
            }
        }
        wait_stage(next);
        order.wait();
        wgmma_fence();
#pragma unroll
        for (int c = 0; c < DIM / sums.WGMMA_DIM; c++) {
            const uint32_t rows =
                mn_major_operand(smem.stages[n % smem.STAGES].slabs[c * sums.WGMMA_DIM / 64], STAGE_ROWS * 128);
            wgmma_steps<true, STAGE_ROWS / 16>(sums.acc[c], g_frag, rows, 1, skl_bf16());
        }
        wgmma_commit();
        issue_a(next);
        wgmma_commit();
        wgmma_wait<1>();
        order.arrive();
        wgmma_wait<0>();
#pragma unroll
        for (int c = 0; c < DIM / sums.WGMMA_DIM; c++)
            fence_operand(sums.acc[c]);
        fence_operand(a);
        barrier_arrive_if(smem.empty[n % smem.STAGES], threadIdx.x % 32 == 0);
    }
};

/* ---- Producer ----------------------------------------------------------------------------------------------- */

template <int DIM>
__device__ inline void load_stationary_rows(gradient_smem<DIM> &smem, const CUtensorMap &map, int row, int head,
                                            int batch)
{
    barrier_expect_tx(smem.stationary_full, smem.stationary_rows.SIZE);
#pragma unroll
    for (int slab = 0; slab < DIM / 64; slab++)
        tma_load(smem.stationary_rows.slabs[slab], map, slab * 64, row, head, batch, smem.stationary_full);
}

template <int DIM>
__device__ inline void load_stage(gradient_smem<DIM> &smem, const CUtensorMap &map, int n, int row, int head,
                                  int batch)
{
    const int stage = n % smem.STAGES;
    barrier_wait(smem.empty[stage], n / smem.STAGES % 2 ^ 1);
    barrier_expect_tx(smem.full[stage], (int)sizeof smem.stages[stage]);
#pragma unroll
    for (int slab = 0; slab < DIM / 64; slab++)
        tma_load(smem.stages[stage].slabs[slab], map, slab * 64, row, head, batch, smem.full[stage]);
}

template <int DIM> __device__ inline void wait_stage_full(gradient_smem<DIM> &smem, int n)
{
    barrier_wait(smem.full[n % smem.STAGES], n / smem.STAGES % 2);
}

/* ---- Sanitizer ---------------------------------------------------------------------------------------------- */

/* G of a masked pair is 0, but 0 times a non-finite value is NaN. So rows with non-finite values become 0: pairs
 * that are not masked have NaN in G already. One thread per row. */
template <int DIM> __device__ inline void sanitize_row(row_stage<DIM> &stage, int row)
{
    bool finite = true;
#pragma unroll 4
    for (int c = 0; c < DIM / 8; c++)
        finite = finite && all_finite<skl_bf16>(*(const uint4 *)(const void *)&stage.slabs[c / 8][row][c % 8 * 16]);
    for (int c = 0; !finite && c < DIM / 8; c++)
        *(uint4 *)(void *)&stage.slabs[c / 8][row][c % 8 * 16] = make_uint4(0, 0, 0, 0);
}

/* Passes stage n on to the consumers. A full stage has no masked pairs and need not be sanitized. */
template <int DIM> __device__ inline void publish_stage(gradient_smem<DIM> &smem, int n, bool is_full_stage)
{
    const int stage = n % smem.STAGES;
    if (!is_full_stage)
        sanitize_row(smem.stages[stage], (int)(threadIdx.x % SANITIZER_THREADS));
    fence_proxy_async();
    barrier_arrive(smem.sanitized[stage]);
}

/* ---- Roles -------------------------------------------------------------------------------------------------- */

template <int DIM> __device__ inline void init_barriers(gradient_smem<DIM> &smem)
{
    barrier_init(smem.stationary_full, 1);
    for (int stage = 0; stage < smem.STAGES; stage++) {
        barrier_init(smem.full[stage], 1);
        barrier_init(smem.sanitized[stage], SANITIZER_THREADS);
        barrier_init(smem.empty[stage], CONSUMERS * 4);
    }
    ordered_barrier::init(smem.order);
    barrier_init_fence();
}

/* Roles of the four warps after the consumers: warp 0 is the producer, warps 2 and 3 sanitize. */
enum warp_role { ROLE_CONSUMER, ROLE_PRODUCER, ROLE_SANITIZER, ROLE_IDLE };

__device__ inline warp_role role_of_warp()
{
    const int warp = warp_index() - CONSUMERS * 4;
    if (warp < 0)
        return ROLE_CONSUMER;
    return warp >= 2 ? ROLE_SANITIZER : warp == 0 ? ROLE_PRODUCER : ROLE_IDLE;
}

/* ---- Query kernel ------------------------------------------------------------------------------------------- */

template <int DIM>
__global__ void __launch_bounds__(GRADIENT_THREADS, 1)
    query_gradient_kernel(const __grid_constant__ strip_params params, const __grid_constant__ gradient_maps maps)
{
#ifdef __CUDA_ARCH_FEAT_SM90_ALL
    extern __shared__ __align__(1024) unsigned char raw[];
    gradient_smem<DIM> &smem = *(gradient_smem<DIM> *)(void *)raw;
    const int index_heads = (int)params.problem.index_heads;
    const unsigned slot_index = (unsigned)params.strip_first + blockIdx.x / index_heads;
    if (threadIdx.x == 0) {
        smem.slot = slot_at(params, slot_index, (unsigned)params.problem.heads_s);
        init_barriers(smem);
    }
    __syncthreads();
    const query_slot &slot = smem.slot;
    if (slot.count <= 0)
        return;
    const int head = slot.head * index_heads + (int)(blockIdx.x % index_heads), batch = (int)slot.sequence.batch;
    const int first = slot.tile_begin * SIDE, stages = (slot.tile_end - slot.tile_begin) * (SIDE / STAGE_KEYS);
    const int warpgroup = warpgroup_index();
    if (warpgroup < CONSUMERS) {
        reg_alloc<240>();
        gradient_consumer<DIM> consumer = {smem, warpgroup, ordered_barrier(smem.order, warpgroup)};
        const float least = params.least;
        consumer.clear();
        uint4 g[2][STAGE_KEYS / 16]; /* G of a stage, and of the next one, whose load is in flight */
        const auto load_g = [&](uint4(&to)[STAGE_KEYS / 16], int n) {
            const uint4 *const from = g_block(params, slot_index, slot.tile_begin + n / 2, (int)(threadIdx.x / 32),
                                              n % 2 * (STAGE_KEYS / 16));
#pragma unroll
            for (int step = 0; step < STAGE_KEYS / 16; step++)
                to[step] = __ldg(from + step * 32);
        };
        const auto apply_relu = [=](uint32_t pair, float low, float high, int, int) {
            return gate_pair<skl_bf16>(unpack(pair, skl_f16()), low, high, make_float2(1.0F, 1.0F), least);
        };
        if (stages > 0) {
            consumer.begin();
            load_g(g[0], 0);
        }
        for (int n = 0; n < stages; n += 2) { /* a tile has two stages */
            load_g(g[1], n + 1);
            consumer.add_stage(n, n + 1, g[0], apply_relu);
            const int next = min(n + 2, stages - 1);
            load_g(g[0], next);
            consumer.add_stage(n + 1, next, g[1], apply_relu);
        }
        const query_gradients<skl_bf16, DIM> gradients = {params, slot, head};
#pragma unroll
        for (int half = 0; half < 2; half++)
            gradients.store_row(acc_row<1>(0, half),
                                [&](int n, int parity) { return consumer.sums.at(n, half, parity); });
        return;
    }
    reg_dealloc<24>();
    switch (role_of_warp()) {
    case ROLE_PRODUCER:
        if (stages > 0)
            load_stationary_rows(smem, maps.stationary, (int)slot.sequence.query_begin + slot.first, head, batch);
        for (int n = 0; n < stages; n++)
            load_stage(smem, maps.streamed, n, (int)slot.sequence.key_begin + first + n * STAGE_KEYS,
                       slot.head / params.b.heads_per_key, batch);
        break;
    case ROLE_SANITIZER:
        for (int n = 0; n < stages; n++) {
            wait_stage_full(smem, n);
            publish_stage(smem, n, is_full(slot, first + n * STAGE_KEYS, STAGE_KEYS));
        }
        break;
    default:
        break;
    }
#endif
}

/* ---- Key kernel --------------------------------------------------------------------------------------------- */

/* A query's weight times its upstream gradient. Non-finite values become 0: G is NaN where they count. */
__device__ inline float scaled_weight_of(const strip_params &params, const query_slot &slot, int row, int index_head)
{
    const int64_t query = slot.first + min(row, slot.count - 1);
    const float weight =
        weight_at(params, slot.sequence.batch, slot.head, slot.sequence.query_begin + query, index_head) *
        upstream_of(params, slot, query) * G_UNIT;
    return fabsf(weight) < INFINITY ? weight : 0.0F;
}

template <int DIM>
__global__ void __launch_bounds__(GRADIENT_THREADS, 1)
    key_gradient_kernel(const __grid_constant__ strip_params params, const __grid_constant__ gradient_maps maps)
{
#ifdef __CUDA_ARCH_FEAT_SM90_ALL
    extern __shared__ __align__(1024) unsigned char raw[];
    gradient_smem<DIM> &smem = *(gradient_smem<DIM> *)(void *)raw;
    if (threadIdx.x == 0) {
        smem.work = key_work_of_block<STAGE_ROWS>(params, blockIdx.x);
        init_barriers(smem);
    }
    __syncthreads();
    const key_work &work = smem.work;
    const int batch = (int)work.sequence.batch, heads = (int)params.problem.index_heads;
    if (work.stages == 0)
        return;
    const int warpgroup = warpgroup_index();
    if (warpgroup < CONSUMERS) {
        reg_alloc<224>();
        gradient_consumer<DIM> consumer = {smem, warpgroup, ordered_barrier(smem.order, warpgroup)};
        consumer.clear();
        consumer.begin();
        const float least = params.least;
        int n = 0;
        for_slots(params, work, [&](int slot_index) {
            for (int half = 0; half < SIDE / STAGE_ROWS; half++) {
                uint4 g[STAGE_ROWS / 16];
#pragma unroll
                for (int step = 0; step < STAGE_ROWS / 16; step++)
                    g[step] = transpose(__ldg(g_block(params, slot_index, work.tile, half * (STAGE_ROWS / 16) + step,
                                                      (int)(threadIdx.x / 32))));
                for (int head = 0; head < heads; head++, n++)
                    consumer.add_stage(
                        n, min(n + 1, work.stages - 1), g,
                        [&](uint32_t pair, float low, float high, int stage, int i) {
                            const float2 weights = *(const float2 *)&smem.weights[stage][acc_column(i, 0)];
                            return gate_pair<skl_bf16>(unpack(pair, skl_f16()), low, high, weights, least);
                        });
            }
        });
#pragma unroll
        for (int half = 0; half < 2; half++)
            add_key_row<DIM>(params, work, acc_row<1>(0, half), 0,
                             [&](int c, int parity) { return consumer.sums.at(c, half, parity); });
        return;
    }
    reg_dealloc<56>();
    int n = 0;
    switch (role_of_warp()) {
    case ROLE_PRODUCER:
        load_stationary_rows(smem, maps.stationary, (int)work.sequence.key_begin + work.tile * SIDE, work.key_head,
                             batch);
        for_slots(params, work, [&](int slot_index) {
            const query_slot slot = slot_at(params, slot_index, (unsigned)params.problem.heads_s);
            for (int half = 0; half < SIDE / STAGE_ROWS; half++)
                for (int head = 0; head < heads; head++, n++)
                    load_stage(smem, maps.streamed, n,
                               (int)slot.sequence.query_begin + slot.first + half * STAGE_ROWS,
                               slot.head * heads + head, batch);
        });
        break;
    case ROLE_SANITIZER:
        for_slots(params, work, [&](int slot_index) {
            const query_slot slot = slot_at(params, slot_index, (unsigned)params.problem.heads_s);
            const bool is_full_stage = is_full(slot, work.tile * SIDE, SIDE);
            for (int half = 0; half < SIDE / STAGE_ROWS; half++)
                for (int head = 0; head < heads; head++, n++) {
                    const int row = (int)(threadIdx.x % SANITIZER_THREADS);
                    const float weight = scaled_weight_of(params, slot, half * STAGE_ROWS + row, head);
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
