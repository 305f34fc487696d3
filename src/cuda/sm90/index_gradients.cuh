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
#ifndef SKL_CUDA_SM90_INDEX_GRADIENTS_CUH
#define SKL_CUDA_SM90_INDEX_GRADIENTS_CUH

#include "cuda/sm80/facts.cuh"
#include "cuda/sm80/index_work.cuh"
#include "cuda/sm90/tensor_map.cuh"
#include "cuda/sm90/turns.cuh"

namespace sm90
{

constexpr int INDEX_THREADS = 128 * (CONSUMERS + 1);
constexpr int CLEANERS = 64; /* threads: one a row of a stage */

template <int DIM> constexpr int INDEX_STAGES = DIM == 256 ? 4 : 8;

template <int DIM> struct index_block {
    static constexpr int STAGES = INDEX_STAGES<DIM>;
    lying_rows<DIM / 64> own; /* 128 rows */
    row_stage<DIM> stages[STAGES];
    float weights[STAGES][KEYS]; /* keys' kernel: of the queries of a stage */
    uint64_t own_full, full[STAGES], clean[STAGES], empty[STAGES], turns[CONSUMERS];
    /* Here, and not in the registers of every thread. */
    slot_place place; /* queries' kernel */
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
    index_block<DIM> &block;
    int group; /* of the warp, the same for all lanes */
    product_turns turns;
    index_sums<DIM> sums;
    stage_logits a;

    __device__ void await(int n)
    {
        barrier_wait(block.clean[n % block.STAGES], n / block.STAGES % 2);
    }

    __device__ void start_a(int n)
    {
        start_products<__nv_bfloat16, DIM, 0>(a, NULL, row_operand(&block.own) + group * (64 * 128 / 16),
                                              row_operand(&block.stages[n % block.STAGES]));
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
        barrier_wait(block.own_full, 0);
        await(0);
        wgmma_fence();
        start_a(0);
        wgmma_commit();
        wgmma_wait<0>();
        settle(a);
    }

    /* Adds what counts of G, which pick makes of it and of A, times stage n; with it A of the next stage is made, or
     * behind the last one the same again. G lies as A operands do. */
    template <typename PICK> __device__ void add_stage(int n, int next, const uint4 (&g)[KEYS / 16], PICK pick)
    {
        uint32_t h[KEYS / 16][4];
#pragma unroll
        for (int step = 0; step < KEYS / 16; step++) {
            const uint32_t parts[4] = {g[step].x, g[step].y, g[step].z, g[step].w};
#pragma unroll
            for (int part = 0; part < 4; part++) {
                const int i = step * 2 + part / 2, half = part % 2;
                h[step][part] = pick(parts[part], a[i][half * 2], a[i][half * 2 + 1], n % block.STAGES, i);
            }
        }
        await(next);
        turns.take();
        wgmma_fence();
#pragma unroll
        for (int part = 0; part < DIM / sums.PART; part++) {
            const uint32_t rows =
                column_operand(block.stages[n % block.STAGES].halves[part * sums.PART / 64], KEYS * 128);
#pragma unroll
            for (int step = 0; step < KEYS / 16; step++)
                wgmma<true>(sums.parts[part], h[step], descriptor_of(rows + step * 16 * 128 / 16), 1,
                            __nv_bfloat16());
        }
        wgmma_commit();
        start_a(next);
        wgmma_commit();
        wgmma_wait<1>();
        turns.pass();
        wgmma_wait<0>();
#pragma unroll
        for (int part = 0; part < DIM / sums.PART; part++)
            settle(sums.parts[part]);
        settle(a);
        barrier_arrive_if(block.empty[n % block.STAGES], threadIdx.x % 32 == 0);
    }
};

/* ---- Copies ------------------------------------------------------------------------------------------------- */

template <int DIM>
__device__ inline void copy_own(index_block<DIM> &block, const CUtensorMap &map, int row, int head, int batch)
{
    barrier_expect(block.own_full, block.own.SIZE);
#pragma unroll
    for (int part = 0; part < DIM / 64; part++)
        copy_box(block.own.parts[part], map, part * 64, row, head, batch, block.own_full);
}

template <int DIM>
__device__ inline void copy_stage(index_block<DIM> &block, const CUtensorMap &map, int n, int row, int head,
                                  int batch)
{
    const int at = n % block.STAGES;
    barrier_wait(block.empty[at], n / block.STAGES % 2 ^ 1);
    barrier_expect(block.full[at], (int)sizeof block.stages[at]);
#pragma unroll
    for (int part = 0; part < DIM / 64; part++)
        copy_box(block.stages[at].halves[part], map, part * 64, row, head, batch, block.full[at]);
}

template <int DIM> __device__ inline void await_stage(index_block<DIM> &block, int n)
{
    barrier_wait(block.full[n % block.STAGES], n / block.STAGES % 2);
}

/* A pair that is not seen weighs 0, but 0 times a value that is not finite is NaN. Rows of a stage that hold one
 * become 0: whoever sees such a row has NaN in its G. One thread a row. */
template <int DIM> __device__ inline void clean_rows(row_stage<DIM> &stage, int row)
{
    bool finite = true;
#pragma unroll 4
    for (int c = 0; c < DIM / 8; c++)
        finite =
            finite && all_finite<__nv_bfloat16>(*(const uint4 *)(const void *)&stage.halves[c / 8][row][c % 8 * 16]);
    for (int c = 0; !finite && c < DIM / 8; c++)
        *(uint4 *)(void *)&stage.halves[c / 8][row][c % 8 * 16] = make_uint4(0, 0, 0, 0);
}

/* Gives stage n to the consumers; only where a pair of it is not seen do values that are not finite matter. */
template <int DIM> __device__ inline void hand_over(index_block<DIM> &block, int n, bool whole)
{
    const int at = n % block.STAGES;
    if (!whole)
        clean_rows(block.stages[at], (int)threadIdx.x % CLEANERS);
    async_fence();
    barrier_arrive(block.clean[at]);
}

template <int DIM> __device__ inline void init_barriers(index_block<DIM> &block)
{
    barrier_init(block.own_full, 1);
    for (int at = 0; at < block.STAGES; at++) {
        barrier_init(block.full[at], 1);
        barrier_init(block.clean[at], CLEANERS);
        barrier_init(block.empty[at], CONSUMERS * 4);
    }
    product_turns::init(block.turns);
    barrier_init_fence();
}

/* Behind the consumers: warp 0 copies, warps 2 and 3 clean. */
enum index_role { CONSUMES, COPIES, CLEANS, IDLES };

__device__ inline index_role role_of_warp()
{
    const int warp = own_warp() - CONSUMERS * 4;
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
    index_block<DIM> &block = *(index_block<DIM> *)(void *)raw;
    const int index_heads = (int)params.problem.index_heads;
    const unsigned slot = (unsigned)params.strip_first + blockIdx.x / index_heads;
    if (threadIdx.x == 0) {
        block.place = slot_at(params, slot, (unsigned)params.problem.heads_s);
        init_barriers(block);
    }
    __syncthreads();
    const slot_place &at = block.place;
    if (at.count <= 0)
        return;
    const int head = at.head * index_heads + (int)(blockIdx.x % index_heads), batch = (int)at.sequence.batch;
    const int first = at.tile_begin * SIDE, stages = (at.tile_end - at.tile_begin) * (SIDE / KEYS);
    const int group = own_group();
    if (group < CONSUMERS) {
        take_registers<240>();
        index_consumer<DIM> own = {block, group, product_turns(block.turns, group)};
        const float least = params.least;
        own.clear();
        uint4 g[2][KEYS / 16]; /* of a stage, and of the next one, which is on its way */
        const auto load_g = [&](uint4(&to)[KEYS / 16], int n) {
            const uint4 *const from =
                g_block(params, slot, at.tile_begin + n / 2, (int)threadIdx.x / 32, n % 2 * (KEYS / 16));
#pragma unroll
            for (int step = 0; step < KEYS / 16; step++)
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
            gradients.store_row(own_row<1>(0, half), [&](int n, int parity) { return own.sums.at(n, half, parity); });
        return;
    }
    give_registers<24>();
    switch (role_of_warp()) {
    case COPIES:
        if (stages > 0)
            copy_own(block, maps.own, (int)at.sequence.query_begin + at.first, head, batch);
        for (int n = 0; n < stages; n++)
            copy_stage(block, maps.streamed, n, (int)at.sequence.key_begin + first + n * KEYS,
                       at.head / params.two.heads_per_key, batch);
        break;
    case CLEANS:
        for (int n = 0; n < stages; n++) {
            await_stage(block, n);
            hand_over(block, n, is_whole(at, first + n * KEYS, KEYS));
        }
        break;
    default:
        break;
    }
#endif
}

/* ---- Keys --------------------------------------------------------------------------------------------------- */

/* With the upstream gradient. What is not finite becomes 0: where it counts, G is NaN. */
__device__ inline float weight_of(const index_params &params, const slot_place &at, int row, int index_head)
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
    index_block<DIM> &block = *(index_block<DIM> *)(void *)raw;
    if (threadIdx.x == 0) {
        block.work = key_work_of_block<KEYS>(params, blockIdx.x);
        init_barriers(block);
    }
    __syncthreads();
    const key_work &work = block.work;
    const int batch = (int)work.sequence.batch, heads = (int)params.problem.index_heads;
    if (work.stages == 0)
        return;
    const int group = own_group();
    if (group < CONSUMERS) {
        take_registers<224>();
        index_consumer<DIM> own = {block, group, product_turns(block.turns, group)};
        own.clear();
        own.begin();
        const float least = params.least;
        int n = 0;
        for_slots(params, work, [&](int slot) {
            for (int half = 0; half < SIDE / KEYS; half++) {
                uint4 g[KEYS / 16];
#pragma unroll
                for (int step = 0; step < KEYS / 16; step++)
                    g[step] = transpose(
                        __ldg(g_block(params, slot, work.tile, half * (KEYS / 16) + step, (int)threadIdx.x / 32)));
                for (int head = 0; head < heads; head++, n++)
                    own.add_stage(
                        n, min(n + 1, work.stages - 1), g, [&](uint32_t pair, float low, float high, int at, int i) {
                            const float2 weights = *(const float2 *)&block.weights[at][column_of(i, 0)];
                            return weigh_pair<__nv_bfloat16>(unpack(pair, __half()), low, high, weights, least);
                        });
            }
        });
#pragma unroll
        for (int half = 0; half < 2; half++)
            add_key_row<DIM>(params, work, own_row<1>(0, half), 0,
                             [&](int c, int parity) { return own.sums.at(c, half, parity); });
        return;
    }
    give_registers<56>();
    int n = 0;
    switch (role_of_warp()) {
    case COPIES:
        copy_own(block, maps.own, (int)work.sequence.key_begin + work.tile * SIDE, work.key_head, batch);
        for_slots(params, work, [&](int slot) {
            const slot_place at = slot_at(params, slot, (unsigned)params.problem.heads_s);
            for (int half = 0; half < SIDE / KEYS; half++)
                for (int head = 0; head < heads; head++, n++)
                    copy_stage(block, maps.streamed, n, (int)at.sequence.query_begin + at.first + half * KEYS,
                               at.head * heads + head, batch);
        });
        break;
    case CLEANS:
        for_slots(params, work, [&](int slot) {
            const slot_place at = slot_at(params, slot, (unsigned)params.problem.heads_s);
            const bool whole = is_whole(at, work.tile * SIDE, SIDE);
            for (int half = 0; half < SIDE / KEYS; half++)
                for (int head = 0; head < heads; head++, n++) {
                    const int row = (int)threadIdx.x % CLEANERS;
                    const float weight = weight_of(params, at, half * KEYS + row, head);
                    await_stage(block, n);
                    block.weights[n % block.STAGES][row] = weight;
                    hand_over(block, n, whole);
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
