/* Attention that carries its KL, on Hopper's tensor cores (sm_90a): the backward of the student's attention and the
 * gradient of its KL in one pass. bf16 and f16, heads of up to 128, one teacher head per student head.
 *
 *   dP = dO V^T    S = 2^(Y - LSE_s)    P = 2^(X - LSE_t)    dS = S (dP - D) + g (S - P)
 *   dv = S^T dO    dk = scale dS^T Q    dq = scale dS K
 *
 * Six products instead of the nine of an attention backward and a one-pass call.
 *
 * Bound: shared memory. At DIM = 128 it takes 4,000 clocks per 128 keys x 64 queries, tensor cores 3,072,
 * exponentials 1,024.
 *
 *   block      2 consumer warpgroups of 64 keys, and a producer warpgroup of which 3 warps work; one block per SM
 *   registers  240 per consumer thread: dk and dv (DIM), Y or X (32), dP or T (32), S (16), 32 for the rest
 *   shared     K and V of the tile, the teacher's K; stages of 64 queries of Q, dO and the teacher's Q; dS of two
 *              stages; dq of a stage in f32, 32 dimensions per warpgroup: 226 KB at DIM = 128
 *
 *   consumer   wgmma       | Y n | dP n  | X n      | dv n        | dq n-1 | dk n             | Y n+1 ...
 *              other pipes |     | exp S | T =      | exp P, dS = |        | dq n-1 to shared |
 *                          |     |       | S (dP -  | T - g P     |        | memory, TMA      |
 *                          |     |       | D + g)   |             |        |                  |
 *
 * Keys are rows of all logits, as in dk.cuh, so that S^T is an A operand from registers, and dk and dv stay in
 * registers. dS of both warpgroups goes through shared memory, because dq sums over all keys of the tile; each
 * warpgroup multiplies half of its dimensions. It does so one stage later: the warpgroups need not meet, and drift
 * apart, so that one computes exponentials while the other multiplies. TMA adds dq of a stage to f32 sums in global
 * memory, in any order, so its last bits differ between runs.
 *
 * Row stats belong to columns of the logits: a thread loads those of 16 queries per stage. The teacher's LSE includes
 * the weight g, which saves a load; only masked stages know its sign. */
#ifndef SKL_CUDA_SM90_ATTENTION_ATTENTION_BACKWARD_CUH
#define SKL_CUDA_SM90_ATTENTION_ATTENTION_BACKWARD_CUH

#include "cuda/sm90/attention/attention_backward_stages.cuh"
#include "cuda/sm90/tensor_map.cuh"

namespace sm90
{

/* ---- Consumers ---------------------------------------------------------------------------------------------- */

/* threadIdx.x, which the compiler reads again: addresses that depend on it take no registers meanwhile. */
__device__ inline int thread_again()
{
    int thread;
    asm volatile("mov.u32 %0, %%tid.x;" : "=r"(thread));
    return thread;
}

/* Writes a warp's 16 rows of dq to shared memory, in TMA's 128-byte swizzle. stmatrix moves a 32-bit register as two
 * elements: of every 8 dimensions it stores the even ones first, then the odd ones. */
template <int FIRST, int BLOCKS>
__device__ inline void write_dq(unsigned char (&rows)[STAGE_ROWS][128], const float (&dq)[BLOCKS][4])
{
    const int thread = thread_again(), lane = thread % 32;
    const int row = thread % 128 / 32 * 16 + lane / 16 * 8 + lane % 8;
    const uint32_t to = shared_address(&rows[row][(lane / 8 % 2 ^ row % 8) * 16]);
#pragma unroll
    for (int n = 0; n < 4; n++)
        stmatrix_x4(to ^ (uint32_t)(n * 32), {__float_as_uint(dq[FIRST + n][0]), __float_as_uint(dq[FIRST + n][1]),
                                              __float_as_uint(dq[FIRST + n][2]), __float_as_uint(dq[FIRST + n][3])});
}

/* For what consumers load wherever they need it, to save registers. */
__device__ inline int load_again(const int &from)
{
    return __float_as_int(load_shared(*(const float *)(const void *)&from));
}

constexpr int CONSUMERS_SYNC = 1; /* named barrier */

template <typename ELEMENT, int DIM, int DIM_A> struct key_warpgroup {
    const attention_backward_params &params;
    const attention_backward_maps &maps;
    attention_backward_smem<DIM, DIM_A> &smem;
    int warpgroup, warp; /* warp-uniform; of the block, of the warpgroup */
    float dk[DIM / 8][4], dv[DIM / 8][4];

    template <int SIZE>
    __device__ void issue_product(stage_logits &x, const smem_rows<SIZE / 64> &keys, const row_stage<SIZE> &stage)
    {
        issue_logits<ELEMENT, SIZE, 0>(x, NULL, k_major_operand(&keys) + warpgroup * (64 * 128 / 16),
                                       k_major_operand(&stage));
    }

    __device__ void issue_dp(stage_logits &dp, int n)
    {
        barrier_wait(smem.of_d_out.full[n % smem.DEPTH], n / smem.DEPTH % 2);
        wgmma_fence();
        issue_product<DIM>(dp, smem.v, smem.d_out[n % smem.DEPTH]);
        wgmma_commit();
    }

    __device__ void issue_y(stage_logits &y, int n)
    {
        barrier_wait(smem.of_q_b.full[n % smem.DEPTH], n / smem.DEPTH % 2);
        wgmma_fence();
        issue_product<DIM>(y, smem.k_b, smem.q_b[n % smem.DEPTH]);
        wgmma_commit();
    }

    /* Adds 32 dimensions of a warp's 16 rows of dq to the sums in global memory. */
    template <int SLAB> __device__ void reduce_add_slab(const float (&dq)[DIM / 16][4], int n)
    {
        tma_wait_read();
        __syncwarp();
        write_dq<SLAB * 4>(smem.dq[warpgroup], dq);
        fence_proxy_async();
        __syncwarp();
        const stage_info &info = smem.info[n % smem.INFOS];
        const int row = load_again(info.row), head = load_again(info.head);
        tma_reduce_add(maps.dq_sums, warpgroup * (DIM / 2) + SLAB * 32, row + warp * 16, head, load_again(smem.batch),
                       smem.dq[warpgroup][warp * 16]);
        tma_commit();
    }

    __device__ void reduce_add_dq(const float (&dq)[DIM / 16][4], int n)
    {
        reduce_add_slab<0>(dq, n);
        if constexpr (DIM > 64)
            reduce_add_slab<1>(dq, n);
    }

    /* Of all consumers' threads, two per key. Returns whether a key is not finite. */
    __device__ bool sanitize_keys()
    {
        const int key = (int)threadIdx.x / 2;
        const bool finite = sanitize_row<ELEMENT, DIM>(smem.k_b.slabs, key, key < smem.count);
        smem.poison[key] = finite ? 0.0F : NAN;
        if (!finite && key < smem.count)
            smem.poisoned = 1;
        fence_proxy_async();
        named_barrier_sync(CONSUMERS_SYNC, CONSUMERS * 128);
        return warp_uniform(smem.poisoned);
    }

    /* One warpgroup sanitizes the queries of a masked stage, the other the gradients of their outputs. */
    __device__ void sanitize_stage(int n)
    {
        const int row = thread_again() % 128 / 2, stage = n % smem.DEPTH, phase = n / smem.DEPTH % 2;
        barrier_wait(smem.of_q_b.full[stage], phase);
        barrier_wait(smem.of_d_out.full[stage], phase);
        barrier_wait(smem.stats_full[stage], phase);
        const bool finite =
            sanitize_row<ELEMENT, DIM>(warpgroup == 0 ? smem.q_b[stage].slabs : smem.d_out[stage].slabs, row, true);
        if (!finite)
            smem.stats[stage][row / 2].lse_b[row % 2] = NAN;
        fence_proxy_async();
        named_barrier_sync(CONSUMERS_SYNC, CONSUMERS * 128);
    }

    /* dv += S^T dO: 64 keys x DIM += 64 keys x 64 queries . 64 queries x DIM */
    __device__ void issue_dv(const uint32_t (&s)[4][4], const row_stage<DIM> &rows)
    {
        const uint32_t operand = mn_major_operand(&rows, STAGE_ROWS * 128);
#pragma unroll
        for (int step = 0; step < STAGE_ROWS / 16; step++)
            wgmma<true>(dv, s[step], smem_descriptor(operand + step * 16 * 128 / 16), 1, ELEMENT());
    }

    /* dk += dS^T Q, with dS of the warpgroup's keys from registers, or from shared memory where there are too few. */
    __device__ void issue_dk(const uint32_t (&from)[4][4], const row_stage<DIM> &rows, int buffer)
    {
        const uint32_t operand = mn_major_operand(&rows, STAGE_ROWS * 128);
        if constexpr (DIM == 64) {
#pragma unroll
            for (int step = 0; step < STAGE_ROWS / 16; step++)
                wgmma<true>(dk, from[step], smem_descriptor(operand + step * 16 * 128 / 16), 1, ELEMENT());
            return;
        }
        const uint32_t ds = k_major_operand(smem.ds[buffer]) + warpgroup * (64 * 128 / 16);
#pragma unroll
        for (int step = 0; step < STAGE_ROWS / 16; step++)
            wgmma<true, false>(dk, smem_descriptor(ds + step * 32 / 16),
                               smem_descriptor(operand + step * 16 * 128 / 16), 1, ELEMENT());
    }

    /* dq = dS K of all keys of the tile, the warpgroup's share of the dimensions. */
    __device__ void issue_dq(float (&dq)[DIM / 16][4], int buffer)
    {
        const uint32_t ds = mn_major_operand(smem.ds[buffer], 0);
        const uint32_t k = mn_major_operand(&smem.k_b, 0) + warpgroup * ((DIM == 64 ? 64 : TILE_KEYS * 128) / 16);
#pragma unroll
        for (int step = 0; step < TILE_KEYS / 16; step++)
            wgmma<true>(dq, smem_descriptor(ds + step * 16 * 128 / 16), smem_descriptor(k + step * 16 * 128 / 16),
                        step > 0, ELEMENT());
    }

    template <bool MASKED> __device__ range32 visible_columns(int half, int first) const
    {
        if (!MASKED)
            return {};
        const int thread = thread_again(), row = thread / 32 * 16 + thread % 32 / 4 + half * 8;
        const int column = first + thread % 4 * 2;
        const range32 range = row < smem.count ? smem.visible.of(row) : range32{};
        return {range.begin - column, range.end - column};
    }

    /* `phase`, known only after S: ptxas would compute S after the wait for dP, not before it. Two packed
     * probabilities are never all ones. */
    __device__ int phase_after(const uint32_t (&s)[4][4], int phase)
    {
        uint32_t all = ~0U;
#pragma unroll
        for (int i = 0; i < 16; i++)
            all &= s[i / 4][i % 4];
        return all == ~0U ? 2 : phase;
    }

    /* S, also as A operands. */
    template <bool MASKED>
    __device__ void compute_s(uint32_t (&s)[4][4], float (&p)[8][4], const stage_logits &y, const stage_pair *stats,
                              int first)
    {
        const range32 sees[2] = {visible_columns<MASKED>(0, first), visible_columns<MASKED>(1, first)};
        const float *const of_key = &smem.poison[thread_again() / 32 * 16 + thread_again() % 32 / 4];
        const float poison[2] = {MASKED ? of_key[0] : 0.0F, MASKED ? of_key[8] : 0.0F};
        const stage_pair *const mine = stats + thread_again() % 4;
#pragma unroll
        for (int i = 0; i < 8; i++) {
            const float2 pair = load_shared_2(mine[i * 4].lse_b[0]);
            const float lse[2] = {pair.x, pair.y};
#pragma unroll
            for (int half = 0; half < 2; half++) {
#pragma unroll
                for (int parity = 0; parity < 2; parity++) {
                    const int e = half * 2 + parity, column = i * 8 + parity;
                    const bool seen = !MASKED || (column >= sees[half].begin && column < sees[half].end);
                    const float minus_lse = MASKED ? poison[half] - lse[parity] : -lse[parity];
                    const float probability = ex2(fmaf(y[i][e], params.b.scale, minus_lse));
                    p[i][e] = seen ? probability : 0.0F;
                }
                s[i / 2][i % 2 * 2 + half] = pack(p[i][half * 2], p[i][half * 2 + 1], ELEMENT());
            }
        }
    }

    /* T = S (dP - D + g), in place of S. */
    __device__ void compute_t(float (&p)[8][4], const stage_logits &dp, const stage_pair *stats)
    {
        const stage_pair *const mine = stats + thread_again() % 4;
#pragma unroll
        for (int i = 0; i < 8; i++) {
            const float2 shift = load_shared_2(mine[i * 4].shift[0]);
#pragma unroll
            for (int e = 0; e < 4; e++)
                p[i][e] *= dp[i][e] - (e % 2 == 0 ? shift.x : shift.y);
        }
    }

    /* dS = T - g P, to shared memory, and as A operands. */
    template <bool MASKED>
    __device__ void compute_ds(uint32_t (&ds)[4][4], const float (&t)[8][4], const stage_logits &x,
                               const stage_pair *stats, int first, int n)
    {
        const range32 sees[2] = {visible_columns<MASKED>(0, first), visible_columns<MASKED>(1, first)};
        const int thread = thread_again(), lane = thread % 32, key = thread / 32 * 16 + lane % 16;
        const stage_pair *const mine = stats + thread_again() % 4;
        const uint32_t to = shared_address(&smem.ds[n % 2][key][(lane / 16 ^ key % 8) * 16]);
#pragma unroll
        for (int step = 0; step < STAGE_ROWS / 16; step++) {
#pragma unroll
            for (int i = step * 2; i < step * 2 + 2; i++) {
                const stage_pair &columns = mine[i * 4];
                const float2 lse = load_shared_2(columns.lse_a[0]);
                const float2 weight = MASKED ? load_shared_2(columns.weight[0]) : make_float2(0.0F, 0.0F);
#pragma unroll
                for (int half = 0; half < 2; half++) {
                    float pair[2];
#pragma unroll
                    for (int parity = 0; parity < 2; parity++) {
                        const int e = half * 2 + parity, column = i * 8 + parity;
                        const bool seen = !MASKED || (column >= sees[half].begin && column < sees[half].end);
                        const float p = ex2(fmaf(x[i][e], params.a.scale, parity == 0 ? -lse.x : -lse.y));
                        const float value = t[i][e] - (MASKED ? copysignf(p, parity == 0 ? weight.x : weight.y) : p);
                        pair[parity] = seen ? value : 0.0F;
                    }
                    ds[step][i % 2 * 2 + half] = pack(pair[0], pair[1], ELEMENT());
                }
            }
            if (step == 0)
                barrier_wait(smem.ds_empty[n % 2], n / 2 % 2 ^ 1);
            stmatrix_x4(to ^ (uint32_t)(step * 32), ds[step]);
        }
    }

    /* Adds the 64 x 64 pairs of stage n, and dq of the stage before it. */
    template <bool MASKED> __device__ void add_stage(int n)
    {
        const int stage = n % smem.DEPTH, buffer = n % 2;
        const int q_a_stage = n % smem.Q_A_DEPTH, q_a_phase = n / smem.Q_A_DEPTH % 2;
        const stage_pair *const stats = smem.stats[stage];
        if (MASKED)
            barrier_wait(smem.stats_full[stage], n / smem.DEPTH % 2);
        const int first = MASKED ? load_again(smem.info[n % smem.INFOS].row) - load_again(smem.queries.row) : 0;
        stage_logits y, dp; /* y: also X */
        if (MASKED)
            sanitize_stage(n);
        issue_y(y, n);
        issue_dp(dp, n);
        barrier_wait(smem.stats_full[stage], n / smem.DEPTH % 2);
        wgmma_wait<1>(); /* also for dk of stage n - 1 */
        fence_operand(y);
        if (n > 0 && thread_again() % 32 == 0)
            barrier_arrive(smem.of_q_b.empty[(n - 1) % smem.DEPTH]);
        uint32_t s[4][4];
        float t[8][4];
        compute_s<MASKED>(s, t, y, stats, first);
        fence_operand(t);
        barrier_wait(smem.of_q_a.full[q_a_stage], MASKED ? q_a_phase : phase_after(s, q_a_phase));
        wgmma_wait<0>();
        fence_operand(dp);
        compute_t(t, dp, stats);
        fence_operand(t); /* else it is computed later, and its factors take more registers */
        wgmma_fence();
        issue_product<DIM_A>(y, smem.k_a, smem.q_a[q_a_stage]);
        wgmma_commit();
        wgmma_fence();
        issue_dv(s, smem.d_out[stage]);
        wgmma_commit();
        wgmma_wait<1>();
        fence_operand(y);
        if (thread_again() % 32 == 0)
            barrier_arrive(smem.of_q_a.empty[q_a_stage]);
        uint32_t ds[4][4];
        compute_ds<MASKED>(ds, t, y, stats, first, n);
        fence_proxy_async();
        named_barrier_sync(2 + warpgroup, 128);
        if (thread_again() % 128 == 0)
            barrier_arrive(smem.ds_full[buffer]);
        if (DIM == 64)
            wgmma_wait<0>(); /* for dv, whose operands leave room for those of dk */
        float dq[DIM / 16][4];
        barrier_wait(smem.ds_full[buffer ^ 1], (n + 1) / 2 % 2 ^ 1);
        wgmma_fence();
        issue_dq(dq, buffer ^ 1);
        wgmma_commit();
        wgmma_fence();
        issue_dk(ds, smem.q_b[stage], buffer);
        wgmma_commit();
        wgmma_wait<1>();
        fence_operand(dq);
        if (thread_again() % 32 == 0) {
            barrier_arrive(smem.of_d_out.empty[stage]);
            if (n > 0)
                barrier_arrive(smem.ds_empty[buffer ^ 1]);
        }
        if (n > 0)
            reduce_add_dq(dq, n - 1);
    }

    /* dq of the last stage. */
    __device__ void add_dq(int n)
    {
        float dq[DIM / 16][4];
        barrier_wait(smem.ds_full[n % 2], n / 2 % 2);
        wgmma_fence();
        issue_dq(dq, n % 2);
        wgmma_commit();
        wgmma_wait<0>();
        fence_operand(dq);
        reduce_add_dq(dq, n);
    }

    __device__ void run()
    {
#pragma unroll
        for (int e = 0; e < DIM / 2; e++)
            dk[e / 4][e % 4] = dv[e / 4][e % 4] = 0.0F;
        const int stages = warp_uniform(smem.queries.stages * smem.heads);
        if (stages == 0)
            return;
        barrier_wait(smem.keys_full, 0);
        /* Only masked stages know keys that are not finite, and negative weights. */
        const bool all_masked = warp_uniform(sanitize_keys() || params.largest->negative != 0);
        for (int n = 0; n < stages;) {
            barrier_wait(smem.stats_full[n % smem.DEPTH], n / smem.DEPTH % 2);
            const int flags = load_again(smem.info[n % smem.INFOS].flags);
            if (flags & STAGE_NEW_K_A)
                barrier_wait(smem.k_a_full, flags / STAGE_K_A_PHASE % 2);
            const int of_head = load_again(smem.queries.stages), end = warp_uniform(n + of_head);
            const int masked_end = warp_uniform(n + (all_masked ? of_head : load_again(smem.queries.masked_stages)));
            for (; n < masked_end; n++)
                add_stage<true>(n);
            for (; n < end; n++)
                add_stage<false>(n);
            wgmma_wait<0>();
            if (load_again(smem.info[(n - 1) % smem.INFOS].flags) & STAGE_LAST_OF_K_A && threadIdx.x % 32 == 0)
                barrier_arrive(smem.k_a_empty);
        }
        add_dq(stages - 1);
        wgmma_wait<0>();
        fence_operand(dk);
        fence_operand(dv);
        tma_wait_read();
    }

    /* Rows of whole 16-byte vectors, by way of shared memory. */
    __device__ void store_vectors(ELEMENT *rows, int64_t stride, int64_t stored, const float (&sum)[DIM / 8][4],
                                  float factor)
    {
        unsigned char(*const staged)[128] = &smem.dq[warpgroup][warp * 16];
        const int lane = (int)threadIdx.x % 32, row = lane % 16, first = warpgroup * 64 + warp * 16;
#pragma unroll
        for (int slab = 0; slab < DIM / 64; slab++) {
            __syncwarp();
#pragma unroll
            for (int n = 0; n < 8; n += 2) {
                uint32_t pairs[4];
#pragma unroll
                for (int i = 0; i < 4; i++) {
                    const float *const from = &sum[slab * 8 + n + i / 2][i % 2 * 2];
                    pairs[i] = pack(from[0] * factor, from[1] * factor, ELEMENT());
                }
                stmatrix_x4(shared_address(&staged[row][((n + lane / 16) ^ row % 8) * 16]), pairs);
            }
            __syncwarp();
#pragma unroll
            for (int i = 0; i < 4; i++) {
                const int r = i * 4 + lane / 8, chunk = lane % 8, column = slab * 64 + chunk * 8;
                const int64_t key = smem.first + first + r;
                const uint4 vector = *(const uint4 *)(const void *)&staged[r][(chunk ^ r % 8) * 16];
                if (key < stored && column < params.b.dim)
                    *(uint4 *)(void *)(rows + key * stride + column) =
                        first + r < smem.count ? vector : make_uint4(0, 0, 0, 0); /* padding keys */
            }
        }
    }

    __device__ void store_sum(const skl_output &out, float (&sum)[DIM / 8][4], float factor)
    {
        if (out.data == NULL)
            return;
        const skl_sequence &s = smem.sequence;
        const int64_t stored = params.problem.packed ? s.key_count : params.problem.len_k;
        const int64_t base = SKL_ROW(out, s.batch, (int64_t)smem.key_head, s.key_begin);
        const skl_side side = skl_student_of(&params.problem, &params.call);
        const int64_t offsets = (int64_t)(uintptr_t)out.data / (int64_t)sizeof(ELEMENT) | base | out.stride_row;
        if (side.grad_dtype != SKL_F32 && offsets % 8 == 0) {
            store_vectors((ELEMENT *)out.data + base, out.stride_row, stored, sum, factor);
            return;
        }
#pragma unroll
        for (int half = 0; half < 2; half++) {
            const int row = acc_row<1>(0, half);
            const int64_t key = smem.first + row;
#pragma unroll
            for (int e = 0; e < DIM / 4 && row >= smem.count; e++)
                sum[e / 2][half * 2 + e % 2] = 0.0F; /* padding keys */
            if (key < stored)
                store_row<ELEMENT>(out.data, base + key * out.stride_row, side, sum, half, factor);
        }
    }
};

/* ---- Kernel ------------------------------------------------------------------------------------------------- */

template <typename ELEMENT, int DIM, int DIM_A>
__global__ void __launch_bounds__(ATTENTION_BACKWARD_THREADS, 1)
    attention_backward_kernel(const __grid_constant__ attention_backward_params params,
                              const __grid_constant__ attention_backward_maps maps)
{
#ifdef __CUDA_ARCH_FEAT_SM90_ALL
    extern __shared__ __align__(1024) unsigned char raw[];
    attention_backward_smem<DIM, DIM_A> &smem = *(attention_backward_smem<DIM, DIM_A> *)(void *)raw;
    const skl_problem &p = params.problem;
    const unsigned tiles = (unsigned)skl_ceil_div(p.len_k, TILE_KEYS);
    const tile_coord tile = tile_of_block((unsigned)p.key_heads_s, tiles, (unsigned)params.head_group);
    if (tile.sequence >= p.batch)
        return;
    const skl_sequence s = device_sequence(params, tile.sequence);
    const int64_t first = (int64_t)tile.tile * TILE_KEYS, last = skl_min(first + TILE_KEYS, s.key_count) - 1;
    if (first >= (p.packed ? s.key_count : p.len_k))
        return;
    row_stream queries = {};
    if (last >= first)
        queries = make_row_stream(stream_for(skl_query_band(&p, &s), first, last), s.query_begin);
    for (int i = (int)threadIdx.x; i < (int)sizeof smem.ds / 16; i += ATTENTION_BACKWARD_THREADS)
        ((uint4 *)(void *)smem.ds)[i] = make_uint4(0, 0, 0, 0);
    fence_proxy_async();
    if (threadIdx.x == 0) {
        smem.sequence = s;
        smem.first = (int)first;
        smem.batch = (int)s.batch;
        smem.count = (int)(last + 1 - first);
        smem.key_head = tile.head;
        smem.heads = params.b.heads_per_key;
        smem.queries = queries;
        smem.poisoned = 0;
        smem.visible = queries.band;
        if (smem.count < TILE_KEYS)
            smem.queries.masked_stages = smem.queries.stages;
        smem.queries_needed = queries.band.of((int)(last - first)).end;
        barrier_init(smem.keys_full, 1);
        for (int buffer = 0; buffer < 2; buffer++) {
            barrier_init(smem.ds_full[buffer], CONSUMERS);
            barrier_init(smem.ds_empty[buffer], CONSUMERS * 4);
        }
        barrier_init(smem.k_a_full, 1);
        barrier_init(smem.k_a_empty, CONSUMERS * 4);
        for (int stage = 0; stage < smem.DEPTH; stage++) {
            barrier_init(smem.of_d_out.full[stage], 1);
            barrier_init(smem.stats_full[stage], STAGE_ROWS);
            barrier_init(smem.of_d_out.empty[stage], CONSUMERS * 4);
            barrier_init(smem.of_q_b.full[stage], 1);
            barrier_init(smem.of_q_b.empty[stage], CONSUMERS * 4);
        }
        for (int stage = 0; stage < smem.Q_A_DEPTH; stage++) {
            barrier_init(smem.of_q_a.full[stage], 1);
            barrier_init(smem.of_q_a.empty[stage], CONSUMERS * 4);
        }
        barrier_init_fence();
    }
    __syncthreads();
    const int warpgroup = warpgroup_index();
    if (warpgroup == CONSUMERS) {
        reg_dealloc<PRODUCER_REGS>();
        if (warp_index() == CONSUMERS * 4)
            produce(params, maps, smem);
        else if (warp_index() >= CONSUMERS * 4 + 4 - STATS_WARPS)
            produce_stats<ELEMENT>(params, smem);
    } else {
        reg_alloc<KEY_WARPGROUP_REGS>();
        key_warpgroup<ELEMENT, DIM, DIM_A> consumer = {params, maps, smem, warpgroup, warp_in_warpgroup()};
        consumer.run();
        const float unit = exp2f(-log2_unit<ELEMENT>(*params.largest));
        consumer.store_sum(params.call.gradients.dk_s, consumer.dk, params.problem.scale_s * unit);
        consumer.store_sum(params.of.dv_s, consumer.dv, unit);
    }
#endif
}

template <typename ELEMENT, int DIM, int DIM_A>
cudaError_t launch_attention_backward_tiles(const attention_backward_params &params,
                                            const attention_backward_maps &maps)
{
    constexpr int MEMORY = sizeof(attention_backward_smem<DIM, DIM_A>);
    static_assert(MEMORY <= 227 * 1024, "shared memory of a block");
    const skl_problem *const p = &params.problem;
    const cudaError_t error = cudaFuncSetAttribute(attention_backward_kernel<ELEMENT, DIM, DIM_A>,
                                                   cudaFuncAttributeMaxDynamicSharedMemorySize, MEMORY);
    if (error != cudaSuccess)
        return error;
    attention_backward_kernel<ELEMENT, DIM, DIM_A>
        <<<grid_of(p->batch, p->key_heads_s, skl_ceil_div(p->len_k, TILE_KEYS)), ATTENTION_BACKWARD_THREADS, MEMORY,
           params.call.stream>>>(params, maps);
    return cudaPeekAtLastError();
}

template <typename ELEMENT>
inline bool encode_all(attention_backward_maps *maps, const attention_backward_params &params, ELEMENT element)
{
    const skl_problem *const p = &params.problem;
    skl_cuda_argument values = params.b;
    values.q = params.of.do_s;
    values.k = params.of.v_s;
    const skl_output &out = params.dq_sums;
    const skl_input sums = {out.data, out.stride_batch, out.stride_head, out.stride_row};
    return encode_queries(&maps->q_a, p, &params.a, STAGE_ROWS, element) &&
           encode_queries(&maps->q_b, p, &params.b, STAGE_ROWS, element) &&
           encode_queries(&maps->d_out, p, &values, STAGE_ROWS, element) &&
           encode_keys(&maps->k_a, p, &params.a, TILE_KEYS, element) &&
           encode_keys(&maps->k_b, p, &params.b, TILE_KEYS, element) &&
           encode_keys(&maps->v, p, &values, TILE_KEYS, element) &&
           skl_tensor_map(&maps->dq_sums, SKL_F32, &sums, params.b.dim, p->heads_s, skl_query_rows(p), 16) ==
               CUDA_SUCCESS;
}

template <typename ELEMENT>
cudaError_t launch_attention_backward(const char *kernel, const skl_cuda_params *params,
                                      const skl_cuda_launch *launch)
{
    const attention_backward_params kernel_params = attention_backward_params_of(params, launch);
    const bool wide = params->problem.dim_s > 64, wide_a = params->problem.dim_t > 64;
    attention_backward_maps maps;
    if (!encode_all(&maps, kernel_params, ELEMENT()))
        return encode_error();
    cudaError_t error = prepare_attention_rows(&kernel_params);
    record_launch(kernel, SKL_VARIANT_CARRYING, 1);
    if (error == cudaSuccess)
        error = wide     ? launch_attention_backward_tiles<ELEMENT, 128, 128>(kernel_params, maps)
                : wide_a ? launch_attention_backward_tiles<ELEMENT, 64, 128>(kernel_params, maps)
                         : launch_attention_backward_tiles<ELEMENT, 64, 64>(kernel_params, maps);
    return error == cudaSuccess ? store_dq_sums(&kernel_params) : error;
}

} // namespace sm90

#endif
