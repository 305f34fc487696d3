/* Fused backward on Hopper's tensor cores (sm_90a): dq and dk with respect to one argument, and with respect to B
 * also the KL, in one pass over the keys. 16-bit types, one teacher head per student head. DIM is the head size of
 * the wrt argument, up to 128, and OTHER_DIM that of the other one, up to 256.
 *
 * Bound: tensor cores and shared memory nearly equally: 2,048 and 2,250 clocks per 128 queries x 64 keys at
 * DIM = OTHER_DIM = 128. Exponentials take 1,024.
 *
 *   block      2 dq warpgroups of 64 queries and 1 dk warpgroup, which is also the producer; one block per SM
 *   registers  200 per dq thread: Q of the other argument (OTHER_DIM / 4), logits of a stage (64), dq (DIM / 2), G
 *              (16), 24 for the rest; 104 per dk thread: dk of a stage (DIM / 2)
 *   shared     Q of the wrt argument, DEPTH stages of 64 keys of both arguments, two buffers of G, dk of a stage in
 *              f32: 208 KB at DIM = OTHER_DIM = 128
 *
 *   dq warpgroups   stage n       X, Y (wgmma)  ->  exponentials  ->  dq += G K (wgmma), G to shared memory
 *   dk warpgroup    stage n - 1   dk = G^T Q (wgmma)  ->  shared memory  ->  global memory += dk (TMA)
 *                   stage n + 2   TMA load (at DEPTH = 3)
 *
 * dq stays in registers. dk of a stage leaves through shared memory; TMA adds it to f32 sums in global memory, in any
 * order, so its last bits differ between runs. A separate warpgroup for dk keeps these stores out of the path from
 * logits to logits: the dq warpgroups wait neither for the sums nor for each other, and one's exponentials overlap
 * the other's wgmmas. Under GQA all query heads add to the key head that they share.
 *
 * ptxas reserves the first 24 registers for ordinary values and places accumulators and operands of wgmma after them.
 * At DIM = OTHER_DIM = 128 that leaves room for 96 dimensions of the other argument's Q; the last 32 come from shared
 * memory.
 *
 * Tall tiles: 192 queries and 3 dq warpgroups, at DIM = 64 and OTHER_DIM = 64 or 128. Exponentials and the chain from
 * logits to logits take most of the time there, and a third warpgroup overlaps them with the others'. That leaves 144
 * registers per dq thread and 72 per dk thread: all of the other argument's Q comes from shared memory.
 *
 * WIDE_OTHER: an other argument of more than 128 dimensions needs more of both. dk is then multiplied and staged 64
 * dimensions at a time, which leaves 216 registers per dq thread and takes half of the shared memory. The two
 * arguments of a stage arrive separately: the dq warpgroups release the other argument's keys as soon as they have
 * the logits, so that its next load starts one stage earlier, and the load of the wrt argument's keys overlaps the
 * products of the other argument.
 *
 * CAPPED: instances for problems where at least one argument has a softcap. */
#ifndef SKL_CUDA_SM90_ATTENTION_FUSED_BACKWARD_CUH
#define SKL_CUDA_SM90_ATTENTION_FUSED_BACKWARD_CUH

#include <type_traits>

#include "cuda/common/dk_sums.cuh"
#include "cuda/sm90/attention/logit_gradients.cuh"
#include "cuda/sm90/tensor_map.cuh"

namespace sm90
{

constexpr int TILE_QUERIES = block_tile::ROWS;

/* GROUPS: dq warpgroups. */
template <int D_WRT, int D_OTHER, int GROUPS = 2> struct fused_backward_shape {
    static constexpr int DIM = D_WRT, OTHER_DIM = D_OTHER;
    static constexpr bool WIDE_OTHER = OTHER_DIM > 128;
    static constexpr int DK_DIMS = WIDE_OTHER ? 64 : DIM; /* dimensions of dk at a time */
    static constexpr int DQ_GROUPS = GROUPS;
    static constexpr int DK_WARPGROUP = DQ_GROUPS; /* after the dq warpgroups */
    static constexpr int THREADS = 128 * (DQ_GROUPS + 1);
    typedef query_tile<DQ_GROUPS> tile_type;
    static constexpr int ROWS = tile_type::ROWS; /* queries */

    /* Registers of a thread. Ordinary values, logits, G and dq come first; ptxas does not succeed without spare ones.
     */
    static constexpr int DK_REGS = WIDE_OTHER || DQ_GROUPS == 3 ? 72 : 104;
    static constexpr int DQ_REGS = (65536 / THREADS / 8 * 8 * (DQ_GROUPS + 1) - DK_REGS) / DQ_GROUPS / 8 * 8;
    static constexpr int Q_REGS = DQ_REGS - 24 - 64 - 16 - DIM / 2 - 8;

    /* Dimensions of the other argument's queries in registers, and slabs of the rest in shared memory. */
    static constexpr int REG_DIMS = Q_REGS * 4 < OTHER_DIM ? Q_REGS / 8 * 32 : OTHER_DIM;
    static constexpr int OTHER_SLABS = REG_DIMS < OTHER_DIM ? SLABS_OF<OTHER_DIM> - REG_DIMS / 64 : 0;

    static constexpr int FIXED = (SLABS_OF<DIM> + OTHER_SLABS + 2) * ROWS * 128 + DK_DIMS / 32 * STAGE_KEYS * 128 +
                                 ROWS * (int)sizeof(row_stats) + 1024;
    static constexpr int STAGE_SIZE = (int)(sizeof(row_stage<DIM>) + sizeof(row_stage<OTHER_DIM>));
    static constexpr int DEPTH = depth_for(STAGE_SIZE, FIXED, 6); /* pipeline stages */

    /* Sums of the KL in double, where they do not take the place of a stage. */
    typedef std::conditional_t<DQ_GROUPS == 3, quad_long_sums<384>, long_sums<256>> long_totals;
    static constexpr bool HAS_LONG_SUMS =
        !WIDE_OTHER && depth_for(STAGE_SIZE, FIXED + (int)sizeof(long_totals), 6) == DEPTH;
    typedef std::conditional_t<HAS_LONG_SUMS, long_totals, long_sums<1>> totals_type;
};

template <typename SHAPE> struct fused_backward_smem : SHAPE {
    using SHAPE::DEPTH;
    smem_rows<SLABS_OF<SHAPE::DIM>, SHAPE::ROWS> wrt_queries;
    struct {
        row_stage<SHAPE::DIM> wrt;
        row_stage<SHAPE::OTHER_DIM> other;
    } stages[DEPTH];
    unsigned char g[2][SHAPE::ROWS][128];                   /* [query][key] */
    unsigned char dk[SHAPE::DK_DIMS / 32][STAGE_KEYS][128]; /* of a stage, f32: slabs of 32 dimensions */
    smem_rows<SHAPE::OTHER_SLABS, SHAPE::ROWS> other_queries;
    uint64_t queries_full, full[DEPTH], sanitized[DEPTH], g_full[2], g_empty[2];
    typename SHAPE::tile_type tile; /* in shared memory to save registers */
    int count;                      /* queries of the tile that exist */
    stage_schedule keys;
    row_ranges<SHAPE::ROWS> visible;
    float unit;                                         /* of G */
    float poison[DEPTH][STAGE_KEYS];                    /* NaN for non-finite keys of the wrt argument, else 0 */
    row_stats stats[SHAPE::ROWS];                       /* LSEs in base 2, upstream gradients divided by the unit */
    uint64_t other_full[SHAPE::WIDE_OTHER ? DEPTH : 1]; /* WIDE_OTHER: `full` is of the wrt argument alone */
    typename SHAPE::totals_type totals;                 /* of the KL */
};

/* `sums`: f32 sums of dk in global memory. */
struct fused_backward_maps {
    CUtensorMap wrt_queries, other_queries, wrt_keys, other_keys, sums;
};

/* ---- TMA ---------------------------------------------------------------------------------------------------- */

/* Loads and reduce-adds of the block, all issued by one warp. All members are warp-uniform. */
template <typename SHAPE> struct stage_loader {
    fused_backward_smem<SHAPE> &smem;
    const fused_backward_maps &maps;
    stage_schedule keys;
    int batch, head, wrt_head, other_head;

    __device__ void load_queries(int row) const
    {
        barrier_expect_tx(smem.queries_full, smem.wrt_queries.SIZE + smem.other_queries.SIZE);
#pragma unroll
        for (int slab = 0; slab < SLABS_OF<SHAPE::DIM>; slab++)
            tma_load(smem.wrt_queries.slabs[slab], maps.wrt_queries, slab * 64, row, head, batch, smem.queries_full);
        if constexpr (SHAPE::OTHER_SLABS > 0)
#pragma unroll
            for (int slab = 0; slab < SHAPE::OTHER_SLABS; slab++)
                tma_load(smem.other_queries.slabs[slab], maps.other_queries, (SHAPE::REG_DIMS / 64 + slab) * 64, row,
                         head, batch, smem.queries_full);
    }

    __device__ void load_wrt(int stage, int row, int slab) const
    {
        tma_load(smem.stages[stage].wrt.slabs[slab], maps.wrt_keys, slab * 64, row, wrt_head, batch,
                 smem.full[stage]);
    }

    __device__ void load_other(int stage, int row, int slab, uint64_t &full) const
    {
        tma_load(smem.stages[stage].other.slabs[slab], maps.other_keys, slab * 64, row, other_head, batch, full);
    }

    /* The stage must have been released. Does nothing after the last stage. */
    __device__ void load_stage(int n) const
    {
        if (n >= keys.stages)
            return;
        constexpr int WRT = SLABS_OF<SHAPE::DIM>, OTHER = SHAPE::WIDE_OTHER ? 0 : SLABS_OF<SHAPE::OTHER_DIM>;
        const int stage = n % smem.DEPTH, row = keys.row_at(n);
        barrier_expect_tx(smem.full[stage], (WRT + OTHER) * STAGE_ROWS * 128);
#pragma unroll
        for (int slab = 0; slab < (WRT > OTHER ? WRT : OTHER); slab++) {
            if (slab < OTHER)
                load_other(stage, row, slab, smem.full[stage]);
            if (slab < WRT)
                load_wrt(stage, row, slab);
        }
    }

    /* WIDE_OTHER: the other argument's keys of a stage. */
    __device__ void load_other_stage(int n) const
    {
        if (n >= keys.stages)
            return;
        const int stage = n % smem.DEPTH, row = keys.row_at(n);
        barrier_expect_tx(smem.other_full[stage], (int)sizeof smem.stages[stage].other);
#pragma unroll
        for (int slab = 0; slab < SLABS_OF<SHAPE::OTHER_DIM>; slab++)
            load_other(stage, row, slab, smem.other_full[stage]);
    }

    __device__ void reduce_add_dk(int n, int first_dim) const
    {
#pragma unroll
        for (int slab = 0; slab < SHAPE::DK_DIMS / 32; slab++)
            tma_reduce_add(maps.sums, first_dim + slab * 32, keys.row_at(n), wrt_head, batch, smem.dk[slab]);
        tma_commit();
    }
};

/* ---- dq ----------------------------------------------------------------------------------------------------- */

/* G in f16 needs a unit, because f16 represents 2^-24 .. 2^16 only; bf16 has the range of f32. One warp derives it
 * from the block's largest upstream gradient, which bounds G with respect to B. Rows whose upstream gradient is less
 * than 2^-16 of that lose bits of dq. */
template <typename ELEMENT, int GROUPS>
__device__ inline float find_g_unit(const backward_params &params, const query_tile<GROUPS> &tile, ELEMENT)
{
    return 1.0F;
}

template <int GROUPS>
__device__ inline float find_g_unit(const backward_params &params, const query_tile<GROUPS> &tile, __half)
{
    constexpr int LIMIT = 15; /* values stay below 2^LIMIT units */
    float largest = 0.0F;
    for (int row = (int)threadIdx.x % 32; row < tile.ROWS; row += 32) {
        const int64_t query = skl_min(tile.first + row, tile.sequence.query_count - 1);
        const skl_range sees = skl_visible(&params.problem, &tile.sequence, query);
        if (sees.begin >= sees.end)
            continue; /* its gradient is 0, whatever the upstream gradient is */
        const float size = fabsf(row_stat(params, 3, tile.sequence, tile.head, query));
        largest = size < INFINITY ? fmaxf(largest, size) : largest;
    }
    const int size = (int)(__float_as_uint(warp_max(largest)) >> 23) - 126; /* largest < 2^size */
    return power_of_2(max(size - LIMIT, -126));
}

/* Row stats of the warpgroup's 64 queries, two threads each. Non-finite queries of the wrt argument become 0
 * and their LSE NaN, so that they do not affect dk of keys that they do not attend to. Rows after the last one may
 * belong to another sequence: they become 0, too, and an LSE of 1e30 makes all their probabilities 0. */
template <typename ELEMENT, bool WRT_B, typename SHAPE>
__device__ inline void prepare_queries(const backward_params &params, fused_backward_smem<SHAPE> &smem,
                                       const typename SHAPE::tile_type &tile)
{
    const int row = (int)threadIdx.x / 2, count = smem.count;
    const bool finite = sanitize_row<ELEMENT, SHAPE::DIM>(smem.wrt_queries.slabs, row, row < count);
    if constexpr (smem.OTHER_SLABS > 0)
        for (int slab = 0; slab < smem.OTHER_SLABS; slab++)
            for (int c = (int)threadIdx.x % 2; c < 8 && row >= count; c += 2)
                *(uint4 *)(void *)&smem.other_queries.slabs[slab][row][c * 16] = make_uint4(0, 0, 0, 0);
    if (threadIdx.x % 2 == 0) {
        constexpr float HUGE_LSE = 1e30F;
        row_stats stats = {HUGE_LSE, HUGE_LSE, 0.0F, 0.0F};
        if (row < count) {
            float stat[4];
#pragma unroll
            for (int which = 0; which < 4; which++)
                stat[which] = row_stat(params, which, tile.sequence, tile.head, tile.first + row);
            stats = {lse2_of(stat[0]), lse2_of(stat[1]), stat[2], stat[3] / smem.unit};
            if (!finite)
                (WRT_B ? stats.lse_b : stats.lse_a) = NAN;
        }
        smem.stats[row] = stats;
    }
    fence_proxy_async();
    named_barrier_sync(1 + (int)threadIdx.x / 128, 128);
}

template <typename ELEMENT, typename SHAPE, bool WRT_B, bool CAPPED> struct dq_warpgroup {
    static constexpr int DIM = SHAPE::DIM;
    const backward_params &params;
    fused_backward_smem<SHAPE> &smem;
    int warpgroup; /* warp-uniform */
    uint32_t other_q[SHAPE::REG_DIMS / 16 + (SHAPE::REG_DIMS == 0)][4];
    float dq[DIM / 8][4];
    static constexpr bool HAS_LONG_SUMS = WRT_B && SHAPE::HAS_LONG_SUMS;
    row_sums sums[2]; /* with respect to B: of the KL */

    template <bool MASKED> __device__ void issue_stage_logits(stage_logits &wrt, stage_logits &other, int n)
    {
        const int stage = n % smem.DEPTH, phase = n / smem.DEPTH % 2;
        const uint32_t queries = warpgroup * (64 * 128 / 16); /* offset of the warpgroup's rows */
        uint64_t &wrt_full = MASKED ? smem.sanitized[stage] : smem.full[stage];
        barrier_wait(SHAPE::WIDE_OTHER ? smem.other_full[stage] : wrt_full, phase);
        wgmma_fence();
        issue_logits<ELEMENT, SHAPE::OTHER_DIM, SHAPE::REG_DIMS, SHAPE::ROWS>(
            other, other_q, k_major_operand(&smem.other_queries) + queries,
            k_major_operand(&smem.stages[stage].other));
        if (SHAPE::WIDE_OTHER) {
            barrier_wait(wrt_full, phase);
            wgmma_fence();
        }
        issue_logits<ELEMENT, DIM, 0, SHAPE::ROWS>(wrt, NULL, k_major_operand(&smem.wrt_queries) + queries,
                                                   k_major_operand(&smem.stages[stage].wrt));
        wgmma_commit();
    }

    /* G of a stage as A operands. MASKED: masked pairs are 0. The logits are only read: ptxas serialises wgmmas whose
     * accumulators are written by other instructions. */
    template <bool MASKED, logits_kind LOGITS>
    __device__ void compute_g(uint32_t (&g)[4][4], const stage_logits &wrt, const stage_logits &other, int n)
    {
        const int first = MASKED ? smem.keys.stage_at(n) * STAGE_KEYS : 0;
#pragma unroll
        for (int half = 0; half < 2; half++) {
            const int row = acc_row<1>(0, half);
            const row_stats query = load_row_stats(smem.stats[row]);
            const range32 sees = MASKED && row < smem.count ? smem.visible.of(row) : range32{};
#pragma unroll
            for (int i = 0; i < 8; i++) {
                float pair[2];
#pragma unroll
                for (int parity = 0; parity < 2; parity++) {
                    const int column = acc_column(i, parity);
                    const float lse = WRT_B ? query.lse_b : query.lse_a;
                    const log_probability of_wrt =
                        log_probability_of<LOGITS>(wrt[i][half * 2 + parity], wrt_argument<WRT_B>(params),
                                                   MASKED ? smem.poison[n % smem.DEPTH][column] - lse : -lse);
                    const log_probability of_other =
                        log_probability_of<LOGITS>(other[i][half * 2 + parity], other_argument<WRT_B>(params),
                                                   -(WRT_B ? query.lse_a : query.lse_b));
                    const float log_p_a = (WRT_B ? of_other : of_wrt).value;
                    const float log_p_b = (WRT_B ? of_wrt : of_other).value;
                    const float p_a = ex2(log_p_a), p_b = WRT_B ? ex2(log_p_b) : 0.0F;
                    const bool seen = !MASKED || (first + column >= sees.begin && first + column < sees.end);
                    if (WRT_B && seen)
                        sums[half] = {sums[half].l_a + p_a, sums[half].l_b + p_b,
                                      fmaf(p_a, log_p_a - log_p_b, sums[half].w)};
                    float gradient = WRT_B ? p_b - p_a : p_a * fmaf(SKL_LN2, log_p_a - log_p_b, -query.kl);
                    if (LOGITS != logits_kind::LINEAR)
                        gradient *= of_wrt.slope;
                    pair[parity] = seen ? gradient * query.grad : 0.0F;
                }
                g[i / 2][i % 2 * 2 + half] = pack(pair[0], pair[1], ELEMENT());
            }
        }
    }

    /* Adds the 64 x 64 pairs of stage n. */
    template <bool MASKED> __device__ void add_stage(int n)
    {
        const int stage = n % smem.DEPTH, lane = (int)threadIdx.x % 32;
        stage_logits wrt, other;
        issue_stage_logits<MASKED>(wrt, other, n);
        wgmma_wait<0>();
        fence_operand(wrt);
        fence_operand(other);
        uint32_t g[4][4];
        constexpr logits_kind OTHERWISE = CAPPED ? logits_kind::EXACT : logits_kind::LINEAR;
        if (CAPPED && !MASKED &&
            polynomials_cover(wrt, wrt_argument<WRT_B>(params), other, other_argument<WRT_B>(params)))
            compute_g<MASKED, logits_kind::POLYNOMIAL>(g, wrt, other, n);
        else
            compute_g<MASKED, OTHERWISE>(g, wrt, other, n);
        wgmma_fence();
        const uint32_t k = mn_major_operand(&smem.stages[stage].wrt, STAGE_KEYS * 128);
#pragma unroll
        for (int step = 0; step < STAGE_KEYS / 16; step++)
            wgmma<true>(dq, g[step], smem_descriptor(k + step * 16 * 128 / 16), 1, ELEMENT());
        wgmma_commit();
        barrier_wait(smem.g_empty[n % 2], n / 2 % 2 ^ 1);
        const int row = (int)threadIdx.x / 32 * 16 + lane % 16;
        const uint32_t to = shared_address(&smem.g[n % 2][row][(lane / 16 ^ row % 8) * 16]);
#pragma unroll
        for (int step = 0; step < STAGE_KEYS / 16; step++)
            stmatrix_x4(to ^ (uint32_t)(step * 32), g[step]);
        fence_proxy_async();
        __syncwarp();
        if (MASKED)
            barrier_arrive(smem.g_full[n % 2]); /* every lane: it has read poison, which is overwritten next */
        else if (lane == 0)
            barrier_arrive_count(smem.g_full[n % 2], 32);
    }

    __device__ void run()
    {
#pragma unroll
        for (int e = 0; e < DIM / 2; e++)
            dq[e / 4][e % 4] = 0.0F;
        sums[0] = sums[1] = {};
        if (HAS_LONG_SUMS)
            smem.totals.clear();
        for (int n = 0; n < smem.keys.masked_stages; n++) {
            add_stage<true>(n);
            if (HAS_LONG_SUMS && n % FLUSH_STAGES == FLUSH_STAGES - 1)
                smem.totals.flush(sums);
        }
        wgmma_wait<0>(); /* lets ptxas keep G in the same registers in both loops */
        for (int n = smem.keys.masked_stages; n < smem.keys.stages; n++) {
            add_stage<false>(n);
            if (HAS_LONG_SUMS && n % FLUSH_STAGES == FLUSH_STAGES - 1)
                smem.totals.flush(sums);
        }
        if (HAS_LONG_SUMS)
            smem.totals.flush(sums);
        wgmma_wait<0>();
        fence_operand(dq);
    }

    __device__ void store(const typename SHAPE::tile_type &tile) const
    {
        const skl_side side = side_of(params);
        const skl_output out = *side.dq;
        const int64_t base = SKL_ROW(out, tile.sequence.batch, tile.head, tile.sequence.query_begin + tile.first);
#pragma unroll
        for (int half = 0; half < 2; half++) {
            const int row = acc_row<1>(0, half);
            const skl_row_state state = merge_lanes(HAS_LONG_SUMS ? smem.totals.state(half) : state_of(sums[half]));
            if (row >= smem.count)
                continue;
            if (params.kl_in_backward && threadIdx.x % 4 == 0)
                write_one_pass_row(params, tile.sequence, tile.head, tile.first + row, state);
            if (out.data != NULL)
                store_row<ELEMENT>(out.data, base + row * out.stride_row, side, dq, half, smem.unit * side.scale);
        }
    }
};

/* ---- dk ----------------------------------------------------------------------------------------------------- */

/* Executed by the dk warpgroup. Only masked stages need it: see logit_gradients.cuh. */
template <typename ELEMENT, typename SHAPE>
__device__ inline void sanitize_stage(fused_backward_smem<SHAPE> &smem, int n)
{
    const int stage = n % smem.DEPTH;
    const int row = (int)threadIdx.x % 128 / 2;
    barrier_wait(smem.full[stage], n / smem.DEPTH % 2);
    const bool finite = sanitize_row<ELEMENT, SHAPE::DIM>(smem.stages[stage].wrt.slabs, row, true);
    smem.poison[stage][row] = finite ? 0.0F : NAN;
    fence_proxy_async();
    barrier_arrive(smem.sanitized[stage]); /* every thread, because every thread has written rows or poison */
}

/* Writes dk of a stage to shared memory, in TMA's 128-byte swizzle. Lanes of odd rows swap pairs of 8-dimension
 * blocks with the next pair, which avoids bank conflicts. */
template <int DIM>
__device__ inline void write_dk(unsigned char (&rows)[DIM / 32][STAGE_KEYS][128], const float (&dk)[DIM / 8][4],
                                float factor)
{
    const int lane = (int)threadIdx.x % 32;
    const int row = (int)threadIdx.x % 128 / 32 * 16 + lane / 4;
    const bool odd = row % 2;
#pragma unroll
    for (int n = 0; n < DIM / 8; n++) {
        const int chunk = (n % 4 ^ (odd ? 2 : 0)) * 2 + lane % 4 / 2;
        unsigned char *const to = &rows[n / 4][row][(chunk ^ row % 8) * 16 + lane % 2 * 8];
#pragma unroll
        for (int half = 0; half < 2; half++) {
            const float low = odd ? dk[n ^ 2][half * 2] : dk[n][half * 2];
            const float high = odd ? dk[n ^ 2][half * 2 + 1] : dk[n][half * 2 + 1];
            *(float2 *)(void *)(to + half * 8 * 128) = make_float2(low * factor, high * factor);
        }
    }
}

/* Without `with_dk` the warpgroup is only the producer. */
template <typename ELEMENT, typename SHAPE>
__device__ inline void run_dk_warpgroup(fused_backward_smem<SHAPE> &smem, const stage_loader<SHAPE> &loader,
                                        bool with_dk, float scale)
{
    constexpr int DIM = SHAPE::DIM, DK_DIMS = SHAPE::DK_DIMS;
    constexpr bool LOADS_LATE = smem.DEPTH == 2; /* the next stage is not requested before G of this one is full */
    const bool is_leader = warp_in_warpgroup() == 0; /* the warp that issues TMA */
    const uint32_t q = mn_major_operand(smem.wrt_queries.slabs, smem.ROWS * 128);
    float dk[DK_DIMS / 8][4];
    if (loader.keys.masked_stages > 0)
        sanitize_stage<ELEMENT>(smem, 0);
    for (int n = 0; n < loader.keys.stages; n++) {
        if (!LOADS_LATE && n + 1 < loader.keys.masked_stages)
            sanitize_stage<ELEMENT>(smem, n + 1);
        barrier_wait(smem.g_full[n % 2], n / 2 % 2);
        if (is_leader && n > 0) /* G of stage n is full, so both dq warpgroups have released stage n - 1 */
            loader.load_stage(n + smem.DEPTH - 1);
        if (is_leader && smem.WIDE_OTHER) /* ... and the other argument's keys of stage n */
            loader.load_other_stage(n + smem.DEPTH);
        if (LOADS_LATE && n + 1 < loader.keys.masked_stages)
            sanitize_stage<ELEMENT>(smem, n + 1);
        if (!with_dk) {
            __syncwarp(); /* all lanes have passed the wait before the buffer can be filled again */
            if (threadIdx.x % 32 == 0)
                barrier_arrive(smem.g_empty[n % 2]);
            continue;
        }
        const uint32_t g = mn_major_operand(smem.g[n % 2], 0);
#pragma unroll
        for (int first_dim = 0; first_dim < DIM; first_dim += DK_DIMS) {
            const uint32_t q_slice = q + first_dim / 64 * (smem.ROWS * 128 / 16);
            wgmma_fence();
#pragma unroll
            for (int step = 0; step < smem.ROWS / 16; step++)
                wgmma<true>(dk, smem_descriptor(g + step * 16 * 128 / 16),
                            smem_descriptor(q_slice + step * 16 * 128 / 16), step > 0, ELEMENT());
            wgmma_commit();
            wgmma_wait<0>();
            fence_operand(dk);
            if (first_dim + DK_DIMS == DIM && threadIdx.x % 32 == 0)
                barrier_arrive(smem.g_empty[n % 2]);
            if (is_leader)
                tma_wait_read();
            named_barrier_sync(1 + smem.DK_WARPGROUP, 128);
            write_dk<DK_DIMS>(smem.dk, dk, scale * smem.unit);
            fence_proxy_async();
            named_barrier_sync(1 + smem.DK_WARPGROUP, 128);
            if (is_leader)
                loader.reduce_add_dk(n, first_dim);
        }
    }
    if (is_leader)
        tma_wait_read();
}

/* ---- Kernel ------------------------------------------------------------------------------------------------- */

template <typename ELEMENT, typename SHAPE, bool WRT_B, bool CAPPED>
__global__ void __launch_bounds__(SHAPE::THREADS, 1)
    fused_backward_kernel(const __grid_constant__ backward_params params,
                          const __grid_constant__ fused_backward_maps maps)
{
#ifdef __CUDA_ARCH_FEAT_SM90_ALL
    extern __shared__ __align__(1024) unsigned char raw[];
    typedef fused_backward_smem<SHAPE> memory;
    memory &smem = *(memory *)(void *)raw;
    typename SHAPE::tile_type assigned;
    if (!assigned.find(params, 1, (unsigned)params.head_group))
        return;
    if (threadIdx.x < 32)
        smem.unit = find_g_unit(params, assigned, ELEMENT());
    const row_stream keys = keys_of_tile(params, assigned, 1);
    smem.visible.fill(keys.band);
    if (threadIdx.x == 0) {
        smem.tile = assigned;
        smem.count = (int)skl_min(smem.ROWS, assigned.sequence.query_count - assigned.first);
        smem.keys = keys;
        if (smem.count < smem.ROWS) /* rows that do not exist must be masked: 0 times a non-finite key is NaN */
            smem.keys.masked_stages = smem.keys.stages;
        barrier_init(smem.queries_full, 1);
        for (int stage = 0; stage < smem.DEPTH; stage++) {
            barrier_init(smem.full[stage], 1);
            barrier_init(smem.sanitized[stage], 128);
            if (smem.WIDE_OTHER)
                barrier_init(smem.other_full[stage], 1);
        }
        for (int stage = 0; stage < 2; stage++) {
            barrier_init(smem.g_full[stage], SHAPE::DQ_GROUPS * 128);
            barrier_init(smem.g_empty[stage], 4);
        }
        barrier_init_fence();
    }
    __syncthreads();
    const typename SHAPE::tile_type &tile = smem.tile;
    const int warpgroup = warpgroup_index();
    if (warpgroup == SHAPE::DK_WARPGROUP) {
        reg_dealloc<SHAPE::DK_REGS>();
        const int head = warp_uniform((int)tile.head);
        const stage_loader<SHAPE> loader = {smem,
                                            maps,
                                            warp_uniform(smem.keys),
                                            warp_uniform((int)tile.sequence.batch),
                                            head,
                                            head / wrt_argument<WRT_B>(params).heads_per_key,
                                            head / other_argument<WRT_B>(params).heads_per_key};
        if (warp_index() == SHAPE::DK_WARPGROUP * 4) {
            loader.load_queries(warp_uniform((int)(tile.sequence.query_begin + tile.first)));
            for (int n = 0; n < smem.DEPTH; n++) {
                if (smem.WIDE_OTHER)
                    loader.load_other_stage(n);
                loader.load_stage(n);
            }
        }
        run_dk_warpgroup<ELEMENT>(smem, loader, params.dk_sums.data != NULL,
                                  params.teacher_side ? params.problem.scale_t : params.problem.scale_s);
    } else {
        reg_alloc<SHAPE::DQ_REGS>();
        dq_warpgroup<ELEMENT, SHAPE, WRT_B, CAPPED> consumer = {params, smem, warpgroup};
        if constexpr (SHAPE::REG_DIMS > 0)
            load_a_frag<SHAPE::REG_DIMS>(
                consumer.other_q,
                queries_of<ELEMENT>(other_argument<WRT_B>(params), tile.sequence, tile.head).from(tile.first),
                smem.count);
        barrier_wait(smem.queries_full, 0);
        prepare_queries<ELEMENT, WRT_B>(params, smem, tile);
        consumer.run();
        consumer.store(tile);
    }
#endif
}

template <typename ELEMENT, typename SHAPE, bool WRT_B, bool CAPPED>
cudaError_t launch_fused_backward_tiles(const backward_params &params, const fused_backward_maps &maps)
{
    constexpr int MEMORY = sizeof(fused_backward_smem<SHAPE>);
    static_assert(MEMORY <= SMEM_MAX, "shared memory of a block");
    static_assert(SHAPE::ROWS == (SHAPE::DQ_GROUPS == 3 ? SKL_SM90_TALL_ROWS : SKL_SM90_BACKWARD_ROWS),
                  "cuda/select counts tiles");
    const cudaError_t error = cudaFuncSetAttribute(fused_backward_kernel<ELEMENT, SHAPE, WRT_B, CAPPED>,
                                                   cudaFuncAttributeMaxDynamicSharedMemorySize, MEMORY);
    if (error != cudaSuccess)
        return error;
    const skl_problem &p = params.problem;
    fused_backward_kernel<ELEMENT, SHAPE, WRT_B, CAPPED>
        <<<grid_of(p.batch, p.heads_s, skl_ceil_div(p.len_q, SHAPE::ROWS)), SHAPE::THREADS, MEMORY,
           params.call.stream>>>(params, maps);
    return cudaPeekAtLastError();
}

template <typename ELEMENT>
inline bool encode_all(fused_backward_maps *maps, const backward_params &params, int tile_rows, ELEMENT element)
{
    const skl_problem *const p = &params.problem;
    const bool wrt_b = is_grad_of_b(params);
    const skl_cuda_argument *const wrt = wrt_b ? &params.b : &params.a;
    const skl_cuda_argument *const other = wrt_b ? &params.a : &params.b;
    const skl_output &out = params.dk_sums;
    const skl_input sums = {out.data, out.stride_batch, out.stride_head, out.stride_row};
    return encode_queries(&maps->wrt_queries, p, wrt, tile_rows, element) &&
           encode_queries(&maps->other_queries, p, other, tile_rows, element) &&
           encode_keys(&maps->wrt_keys, p, wrt, STAGE_KEYS, element) &&
           encode_keys(&maps->other_keys, p, other, STAGE_KEYS, element) &&
           (sums.data == NULL ||
            skl_tensor_map(&maps->sums, SKL_F32, &sums, wrt->dim, p->heads_s / wrt->heads_per_key, skl_key_rows(p),
                           STAGE_KEYS) == CUDA_SUCCESS);
}

/* f16 has no instances for gradients of A: nothing bounds them that f16 could rely on. */
template <typename ELEMENT> constexpr bool HAS_GRAD_OF_A = true;
template <> constexpr bool HAS_GRAD_OF_A<__half> = false;

/* Tall tiles are for gradients of B. */
template <typename ELEMENT, typename SHAPE> constexpr bool HAS_INSTANCE_OF_A = HAS_GRAD_OF_A<ELEMENT>;
template <typename ELEMENT, int DIM, int OTHER_DIM>
constexpr bool HAS_INSTANCE_OF_A<ELEMENT, fused_backward_shape<DIM, OTHER_DIM, 3>> = false;

template <typename ELEMENT, typename SHAPE, bool CAPPED>
cudaError_t launch_fused_backward_of(const char *kernel, const backward_params &params)
{
    constexpr bool OF_A = HAS_INSTANCE_OF_A<ELEMENT, SHAPE>;
    const bool wrt_b = is_grad_of_b(params);
    fused_backward_maps maps;
    if (!(wrt_b || OF_A) || !encode_all(&maps, params, SHAPE::ROWS, ELEMENT()))
        return encode_error();
    cudaError_t error = clear_dk_sums(&params);
    record_launch(kernel,
                  CAPPED                  ? SKL_VARIANT_FUSED_SOFTCAP
                  : SHAPE::DQ_GROUPS == 3 ? SKL_VARIANT_FUSED_TALL
                                          : SKL_VARIANT_FUSED,
                  1);
    if (error == cudaSuccess && wrt_b)
        error = launch_fused_backward_tiles<ELEMENT, SHAPE, true, CAPPED>(params, maps);
    else if constexpr (OF_A)
        if (error == cudaSuccess)
            error = launch_fused_backward_tiles<ELEMENT, SHAPE, false, CAPPED>(params, maps);
    return error == cudaSuccess ? store_dk_sums(&params) : error;
}

/* Without softcaps. */
template <typename ELEMENT, int DIM, int OTHER_DIM>
cudaError_t launch_fused_backward_tiled(const char *kernel, const backward_params &params, bool tall_tiles)
{
    if constexpr (DIM == SKL_SM90_TALL_DIM && OTHER_DIM <= SKL_SM90_TALL_OTHER_DIM)
        if (tall_tiles)
            return launch_fused_backward_of<ELEMENT, fused_backward_shape<DIM, OTHER_DIM, 3>, false>(kernel, params);
    return launch_fused_backward_of<ELEMENT, fused_backward_shape<DIM, OTHER_DIM>, false>(kernel, params);
}

template <typename ELEMENT, int DIM, bool SOFTCAP>
cudaError_t launch_fused_backward(const char *kernel, const skl_cuda_params *params, const skl_cuda_launch *launch)
{
    const backward_params kernel_params = backward_params_of(params, launch);
    return with_softcap<SOFTCAP>(kernel_params, [&](auto capped) {
        if constexpr (capped())
            return launch_fused_backward_of<ELEMENT, fused_backward_shape<DIM, DIM>, true>(kernel, kernel_params);
        else
            return launch_fused_backward_tiled<ELEMENT, DIM, DIM>(kernel, kernel_params, launch->tall_tiles);
    });
}

/* Head sizes that differ: one argument has at most SMALL dimensions, the other one at most LARGE. cuda/select asks
 * for no gradient of more than 128 dimensions, and not with softcaps. */
template <typename ELEMENT, int LARGE, int SMALL>
cudaError_t launch_fused_pair(const char *kernel, const skl_cuda_params *params, const skl_cuda_launch *launch)
{
    const backward_params kernel_params = backward_params_of(params, launch);
    const skl_cuda_argument &wrt = is_grad_of_b(kernel_params) ? kernel_params.b : kernel_params.a;
    if constexpr (LARGE > SMALL && LARGE <= SKL_SM90_FUSED_DIM_MAX)
        if (wrt.dim > SMALL)
            return launch_fused_backward_of<ELEMENT, fused_backward_shape<LARGE, SMALL>, false>(kernel,
                                                                                                kernel_params);
    return launch_fused_backward_tiled<ELEMENT, SMALL, LARGE>(kernel, kernel_params, launch->tall_tiles);
}

} // namespace sm90

#endif
