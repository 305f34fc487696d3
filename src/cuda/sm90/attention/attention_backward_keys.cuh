/* The consumers of the attention backward that carries its KL: a warpgroup of 64 keys. */
#ifndef SKL_CUDA_SM90_ATTENTION_ATTENTION_BACKWARD_KEYS_CUH
#define SKL_CUDA_SM90_ATTENTION_ATTENTION_BACKWARD_KEYS_CUH

#include "cuda/sm90/attention/attention_backward_stages.cuh"

namespace sm90
{

/* Writes a warp's 16 rows of dq to shared memory, in TMA's 128-byte swizzle. stmatrix moves a 32-bit register as two
 * elements: of every 8 dimensions it stores the even ones first, then the odd ones. */
template <int FIRST> __device__ inline void write_dq(unsigned char (*rows)[128], const float (&dq)[8][4])
{
    const unsigned thread = thread_again(), lane = thread % 32;
    const unsigned row = thread % 128 / 32 * 16 + lane / 16 * 8 + lane % 8;
    const uint32_t to = shared_address(&rows[row][(lane / 8 % 2 ^ row % 8) * 16]);
#pragma unroll
    for (int n = 0; n < 4; n++)
        stmatrix_x4(to ^ (uint32_t)(n * 32), {__float_as_uint(dq[FIRST + n][0]), __float_as_uint(dq[FIRST + n][1]),
                                              __float_as_uint(dq[FIRST + n][2]), __float_as_uint(dq[FIRST + n][3])});
}

__device__ inline uint32_t bits_of(uint32_t value)
{
    return value;
}

__device__ inline uint32_t bits_of(float value)
{
    return __float_as_uint(value);
}

/* Loads a value again wherever a consumer needs it, to save registers. */
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
    /* In stages without dq, dk is multiplied behind Y of the next stage: exponentials wait for Y, and nothing for dk.
     */
    static constexpr bool DK_LATER = DIM > 64;

    /* The product of the warpgroup's keys or values and the queries of a stage. */
    template <int SIZE>
    __device__ void issue_product(stage_logits &x, const smem_rows<SIZE / 64> &keys, const row_stage<SIZE> &stage)
    {
        wgmma_fence();
        issue_logits<ELEMENT, SIZE, 0>(x, NULL, k_major_operand(&keys) + warpgroup * (64 * 128 / 16),
                                       k_major_operand(&stage));
        wgmma_commit();
    }

    /* The product with stage n of a ring, after its load. */
    template <int DEPTH>
    __device__ void issue_loaded(stage_logits &x, const smem_rows<DIM / 64> &keys,
                                 const row_stage<DIM> (&ring)[DEPTH], ring_barriers<DEPTH> &barriers, int n)
    {
        barrier_wait(barriers.full[n % DEPTH], n / DEPTH % 2);
        issue_product<DIM>(x, keys, ring[n % DEPTH]);
    }

    /* Returns the buffer from which 32 dimensions of dq of stage n leave. From dimension 64 on it is that of dS. */
    __device__ unsigned char (*dq_slab(int slab, int n))[128]
    {
        return slab < 2 ? smem.dq[slab] : &smem.ds[n % 2][(slab - 2) * STAGE_ROWS];
    }

    /* Adds 64 dimensions of a warp's 16 rows of dq of stage n to the sums in global memory. */
    template <int FIRST_SLAB> __device__ void reduce_add_dq(const float (&dq)[8][4], int n)
    {
        write_dq<0>(dq_slab(FIRST_SLAB, n), dq);
        write_dq<4>(dq_slab(FIRST_SLAB + 1, n), dq);
        fence_proxy_async();
        __syncwarp();
        const stage_info &info = smem.info[n % smem.INFOS];
        const int row = load_again(info.row), head = load_again(info.head);
#pragma unroll
        for (int slab = FIRST_SLAB; slab < FIRST_SLAB + 2; slab++)
            tma_reduce_add(maps.dq_sums, slab * 32, row + warp * 16, head, load_again(smem.batch),
                           dq_slab(slab, n)[warp * 16]);
        if constexpr (FIRST_SLAB + 2 == DIM / 32)
            tma_commit();
    }

    /* dq of stage n has left shared memory. */
    __device__ void release_dq(int n)
    {
        tma_wait_read();
        __syncwarp();
        if (thread_again() % 32 == 0)
            barrier_arrive(smem.ds_empty[n & 1]);
    }

    /* Waits until dq of stage n has left shared memory. n begins at -2, which passes at once. */
    __device__ void wait_for_dq(int n)
    {
        barrier_wait(smem.ds_empty[n & 1], (n + 3) / 2 % 2 ^ 1);
    }

    /* Executed by all consumers, two threads per key. Returns whether a key is not finite. */
    __device__ bool sanitize_keys()
    {
        const int key = (int)(threadIdx.x / 2);
        const bool finite = sanitize_row<ELEMENT, DIM>(smem.k_b.slabs, key, key < smem.count);
        smem.poison[key] = finite ? 0.0F : NAN;
        if (!finite && key < smem.count)
            smem.poisoned = 1;
        fence_proxy_async();
        named_barrier_sync(CONSUMERS_SYNC, CONSUMERS * 128);
        return warp_uniform(smem.poisoned);
    }

    /* Waits for the row statistics of a masked stage. If it may have queries that are not finite, one warpgroup
     * sanitizes them, the other the gradients of their outputs. */
    __device__ void sanitize_stage(int n)
    {
        const int row = (int)(thread_again() % 128 / 2), stage = n % smem.DEPTH, phase = n / smem.DEPTH % 2;
        barrier_wait(smem.stats_full[stage], phase);
        const stage_info &info = smem.info[n % smem.INFOS];
        if (warp_uniform(load_again(info.unknown[0]) | load_again(info.unknown[1])) == 0)
            return;
        barrier_wait(smem.of_q_b.full[stage], phase);
        barrier_wait(smem.of_d_out.full[stage], phase);
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
        wgmma_fence();
        wgmma_steps<true, STAGE_ROWS / 16>(dv, s, operand, 1, ELEMENT());
        wgmma_commit();
    }

    /* dk += dS^T Q of stage n, with dS of the warpgroup's keys from registers, or from shared memory where there are
     * too few. dS of stage -1 is 0. */
    __device__ void issue_dk(const uint32_t (&from)[4][4], int n)
    {
        const uint32_t ds = k_major_operand(smem.ds[n & 1]) + warpgroup * (64 * 128 / 16);
        const uint32_t q = mn_major_operand(&smem.q_b[max(n, 0) % smem.DEPTH], STAGE_ROWS * 128);
        wgmma_fence();
        if constexpr (DIM == 64)
            wgmma_steps<true, STAGE_ROWS / 16>(dk, from, q, 1, ELEMENT());
        else
            wgmma_steps<true, STAGE_ROWS / 16, false>(dk, ds, q, 1, ELEMENT());
        wgmma_commit();
    }

    /* dq = dS K of 64 dimensions, summed over all keys of the tile. */
    template <int HALF> __device__ void issue_dq(float (&dq)[8][4], int buffer)
    {
        const uint32_t ds = mn_major_operand(smem.ds[buffer], 0);
        const uint32_t k = mn_major_operand(smem.k_b.slabs[HALF], TILE_KEYS * 128);
        wgmma_fence();
        wgmma_steps<true, TILE_KEYS / 16>(dq, ds, k, 0, ELEMENT());
        wgmma_commit();
    }

    template <bool MASKED> __device__ range32 visible_columns(int half, int first) const
    {
        if (!MASKED)
            return {};
        const unsigned thread = thread_again();
        const int row = (int)(thread / 32 * 16 + thread % 32 / 4) + half * 8, column = first + (int)(thread % 4 * 2);
        const range32 range = row < smem.count ? smem.visible.of(row) : range32{};
        return {range.begin - column, range.end - column};
    }

    /* `phase`, known only after all values: ptxas would compute them after the wait for it, and keep their factors in
     * registers meanwhile. No 16 packed probabilities, or 32 floats, are all ones. */
    template <typename VALUE, int ROWS> __device__ int phase_after(const VALUE (&values)[ROWS][4], int phase)
    {
        uint32_t all = ~0U;
#pragma unroll
        for (int i = 0; i < ROWS * 4; i++)
            all &= bits_of(values[i / 4][i % 4]);
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
        const unsigned thread = thread_again(), lane = thread % 32, key = thread / 32 * 16 + lane % 16;
        const stage_pair *const mine = stats + thread_again() % 4;
        const uint32_t to = shared_address(&smem.ds[n % 2][key][(lane / 16 ^ key % 8) * 16]);
        float2 next[2] = {load_shared_2(mine[0].lse_a[0]), load_shared_2(mine[4].lse_a[0])};
#pragma unroll
        for (int step = 0; step < STAGE_ROWS / 16; step++) {
            const float2 current[2] = {next[0], next[1]};
#pragma unroll
            for (int i = 0; i < 2 && step + 1 < STAGE_ROWS / 16; i++)
                next[i] = load_shared_2(mine[((step + 1) * 2 + i) * 4].lse_a[0]);
#pragma unroll
            for (int i = step * 2; i < step * 2 + 2; i++) {
                const stage_pair &columns = mine[i * 4];
                const float2 lse = current[i % 2];
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
                wait_for_dq(n - 2);
            stmatrix_x4(to ^ (uint32_t)(step * 32), ds[step]);
        }
    }

    /* Adds the 64 x 64 pairs of stage n, and dq of the stage before it (WITH_DQ: every second stage). */
    template <bool MASKED, bool WITH_DQ> __device__ void add_stage(int n)
    {
        constexpr bool DK_BEHIND_Y = WITH_DQ && DK_LATER;
        const int stage = n % smem.DEPTH, buffer = n % 2;
        const int q_a_stage = n % smem.Q_A_DEPTH, q_a_phase = n / smem.Q_A_DEPTH % 2;
        const stage_pair *const stats = smem.stats[stage];
        const stage_info &info = smem.info[n % smem.INFOS]; /* sanitize_stage has waited for a masked stage */
        const int first = MASKED ? load_again(info.row) - load_again(smem.queries.row) : 0;
        stage_logits y, dp; /* y: also X */
        issue_loaded(y, smem.k_b, smem.q_b, smem.of_q_b, n);
        if constexpr (DK_BEHIND_Y)
            issue_dk({}, n - 1);
        issue_loaded(dp, smem.v, smem.d_out, smem.of_d_out, n);
        barrier_wait(smem.stats_full[stage], n / smem.DEPTH % 2);
        wgmma_wait<DK_BEHIND_Y ? 2 : 1>(); /* waits for Y; unless DK_BEHIND_Y, also for dk of stage n - 1 */
        fence_operand(y);
        if (!WITH_DQ && n > 0)
            release_dq(n - 2); /* dq of stage n - 1 may now replace its dS: dk has been multiplied */
        if (!DK_BEHIND_Y && n > 0 && thread_again() % 32 == 0)
            barrier_arrive(smem.of_q_b.empty[(n - 1) % smem.DEPTH]);
        uint32_t s[4][4];
        float t[8][4];
        compute_s<MASKED>(s, t, y, stats, first);
        fence_operand(t);
        barrier_wait(smem.of_q_a.full[q_a_stage], MASKED ? q_a_phase : phase_after(s, q_a_phase));
        wgmma_wait<0>();
        fence_operand(dp);
        if (DK_BEHIND_Y && n > 0 && thread_again() % 32 == 0)
            barrier_arrive(smem.of_q_b.empty[(n - 1) % smem.DEPTH]);
        compute_t(t, dp, stats);
        fence_operand(t);
        barrier_wait(smem.of_q_a.full[q_a_stage], phase_after(t, q_a_phase)); /* has passed already */
        issue_product<DIM_A>(y, smem.k_a, smem.q_a[q_a_stage]);
        issue_dv(s, smem.d_out[stage]);
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
        if constexpr (WITH_DQ)
            add_dq<true>(n - 1, ds);
        else {
            wgmma_wait<0>();                            /* waits for dv: dk needs the registers of its operands */
            barrier_arrive(smem.of_d_out.empty[stage]); /* every lane arrives: every lane has read row stats */
            if constexpr (!DK_LATER)
                issue_dk(ds, n);
        }
    }

    /* Adds dq of stage n, while dv and dk of the next one are multiplied. dk is still in flight on return. */
    template <bool WITH_DK> __device__ void add_dq(int n, const uint32_t (&next_ds)[4][4])
    {
        constexpr int HALVES = DIM / 64;
        constexpr int DK_BEHIND_DQ = WITH_DK && HALVES == 2; /* takes no operands from registers */
        float low[8][4], high[8][4];                         /* dimensions of dq below 64, and from 64 on */
        barrier_wait(smem.ds_full[n & 1], (n + 2) / 2 % 2 ^ 1);
        issue_dq<0>(low, n & 1);
        if constexpr (HALVES == 2)
            issue_dq<1>(high, n & 1);
        if constexpr (DK_BEHIND_DQ)
            issue_dk(next_ds, n + 1);
        if constexpr (WITH_DK) {
            wgmma_wait<HALVES + DK_BEHIND_DQ>(); /* waits for dv */
            barrier_arrive(smem.of_d_out.empty[(n + 1) % smem.DEPTH]);
        }
        wait_for_dq(n - 1);
        wgmma_wait<HALVES - 1 + DK_BEHIND_DQ>();
        fence_operand(low);
        if constexpr (WITH_DK && !DK_BEHIND_DQ)
            issue_dk(next_ds, n + 1);
        if (n >= 0)
            reduce_add_dq<0>(low, n);
        if constexpr (HALVES == 2) {
            wgmma_wait<DK_BEHIND_DQ>();
            fence_operand(high);
            if (n >= 0) {
                named_barrier_sync(2 + warpgroup, 128); /* all warps have multiplied dS, where this half goes */
                reduce_add_dq<2>(high, n);
            }
        }
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
        if constexpr (DK_LATER)
            for (int i = (int)threadIdx.x; i < (int)sizeof smem.ds[1] / 16; i += CONSUMERS * 128)
                ((uint4 *)(void *)smem.ds[1])[i] = make_uint4(0, 0, 0, 0);
        /* Only masked stages know keys that are not finite, and negative weights. */
        const bool all_masked = warp_uniform(sanitize_keys() || params.largest->negative != 0);
        for (int n = 0; n < stages;) {
            barrier_wait(smem.stats_full[n % smem.DEPTH], n / smem.DEPTH % 2);
            const int flags = load_again(smem.info[n % smem.INFOS].flags);
            if (flags & STAGE_NEW_K_A)
                barrier_wait(smem.k_a_full, flags / STAGE_K_A_PHASE % 2);
            const int of_head = load_again(smem.queries.stages), end = warp_uniform(n + of_head);
            const int masked_end = warp_uniform(n + (all_masked ? of_head : load_again(smem.queries.masked_stages)));
            for (; n < masked_end; n++) {
                sanitize_stage(n); /* outside of add_stage, which exists twice: the warpgroups meet in it */
                n % 2 == warpgroup ? add_stage<true, false>(n) : add_stage<true, true>(n);
            }
            for (; n < end; n++)
                n % 2 == warpgroup ? add_stage<false, false>(n) : add_stage<false, true>(n);
            if (load_again(smem.info[(n - 1) % smem.INFOS].flags) & STAGE_LAST_OF_K_A && threadIdx.x % 32 == 0)
                barrier_arrive(smem.k_a_empty);
        }
        wgmma_wait<0>();
        if (stages % 2 != warpgroup) {
            if constexpr (DK_LATER)
                issue_dk({}, stages - 1);
            add_dq<false>(stages - 1, {});
        } else
            release_dq(stages - 2);
        fence_operand(dk);
        fence_operand(dv);
        tma_wait_read();
        named_barrier_sync(CONSUMERS_SYNC, CONSUMERS * 128); /* dk and dv take the place of dq */
    }
};

} // namespace sm90

#endif
