/* Scores of a sparse indexer and its teacher by wgmma: the rows of a forward, and dy, the gradient of the index
 * logits.
 *
 *   P_j = mean_h 2^(x_hj - lse_h)      y_j = sum_g w_g relu(z_gj)      dy_j = S_j - P_j
 *
 * Heads are the rows of a product and gathered keys its columns, so that a key is read once for all heads. The
 * queries stay in registers: 64 heads of 576 take 144 per thread, and shared memory is left to the keys. Per 64 keys
 * of 576, 128 heads take 2,304 clocks of the tensor cores; the L2 cache, at about 24 bytes per clock and SM, takes
 * 3,072 to deliver them. The gather is the bound.
 *
 *   block      persistent, one per SM, one row at a time; a producer and two consumer warpgroups
 *   heads      up to 128 on a key head: 64 per warpgroup. Up to 64: both have all of them, and every other tile
 *   registers  224 per consumer thread: queries (DIM / 4), logits of 64 keys (32); 56 per producer thread
 *   shared     stages of 64 teacher keys (72 KB at 576; 128 keys at 128 dimensions) or as many index keys as fit;
 *              queries travel through the same stages. 3 to 8 of them, 225 KB
 *   memory     [top_k] scores per block: the teacher's mean of each warpgroup and the index logits
 *
 *   producer   | q WG 0 | q WG 1 | tile 0 | tile 1 | ...    | index q | index tiles ...   | next row
 *   WG 0       | ldmatrix        | X 0 | exp 0 | X 1 | ...  | ldmatrix | Z 0 | Z 2 | ...  | KL, dy
 *   WG 1       |        ldmatrix | X 0   | exp 0 | X 1 | ...           | Z 1 | Z 3 | ...  | KL, dy
 *
 * A warp sums a tile over its 16 heads by shuffles, and its warpgroup sums four of them in a fixed order. If the
 * caller does not give the teacher's LSEs, a pass over the list computes them first. */
#ifndef SKL_CUDA_SM90_INDEXER_SPARSE_SCORES_CUH
#define SKL_CUDA_SM90_INDEXER_SPARSE_SCORES_CUH

#include "cuda/common/indexer/write_row.cuh"
#include "cuda/common/strips/logit_tile.cuh"
#include "cuda/sm90/indexer/gather_ring.cuh"

namespace sm90
{

constexpr int SCORE_CONSUMERS = CONSUMERS * 128; /* threads */
constexpr int SCORE_THREADS = 128 + SCORE_CONSUMERS;
constexpr int SCORE_REGISTERS = 224; /* registers per consumer thread */
constexpr int INDEX_SLABS = 2;       /* slabs per index head, padded to 128 dimensions */

template <int DIM> struct score_smem {
    static constexpr int SLABS = DIM / 64;
    static constexpr int TILES = DIM <= 128 ? 2 : 1; /* tiles of teacher keys per stage */
    static constexpr int STAGE_SIZE = TILES * SLABS * SLAB_SIZE;
    static constexpr int INDEX_TILES = STAGE_SIZE / (INDEX_SLABS * SLAB_SIZE);
    static constexpr int FIXED_SIZE = 8 * 1024;
    static constexpr int DEPTH = depth_for(STAGE_SIZE, FIXED_SIZE, 8, SMEM_MAX);

    alignas(1024) unsigned char stages[DEPTH][STAGE_SIZE];
    float columns[CONSUMERS][2][4][STAGE_KEYS]; /* column sums of a tile by each warp; two tiles in turn */
    lse_row lse[CONSUMERS][64];
    index_row warp_sums[SCORE_CONSUMERS / 32]; /* sums of the row by each warp */
    row_ring rows;
    uint64_t full[DEPTH], empty[DEPTH];

    __device__ void init_barriers()
    {
        for (int n = 0; n < DEPTH; n++) {
            barrier_init(full[n], 128);
            barrier_init(empty[n], SCORE_CONSUMERS);
        }
        for (int n = 0; n < ROW_SLOTS; n++) {
            barrier_init(rows.full[n], 128);
            barrier_init(rows.empty[n], SCORE_CONSUMERS);
        }
    }
};

/* Teacher heads that share a key head: the rows of a product. */
struct head_group {
    int first, count;
};

/* Calls visit(heads, is_first) for each product of the row's teacher heads. */
template <typename VISIT>
__device__ inline void for_teacher_heads(const sparse_params &params, const sparse_row32 &row, VISIT visit)
{
    const int group = params.with_teacher ? (int)skl_group_size(&params.problem) : 0;
    const int first = (int)row.head * group, sharing = params.a.heads_per_key;
    const int most = params.splits_heads ? 2 * 64 : 64;
#pragma unroll 1
    for (int h = first, count; h < first + group; h += count) {
        count = warp_uniform(min(min(first + group - h, sharing - h % sharing), most));
        visit(head_group{h, count}, h == first);
    }
}

/* The given LSEs are not computed. */
__device__ inline bool computes_lse(const sparse_params &params)
{
    return params.call.inputs.lse_t.data == NULL;
}

/* ---- Producer ------------------------------------------------------------------------------------------------- */

template <typename ELEMENT, int DIM> struct score_producer {
    typedef score_smem<DIM> memory;
    score_smem<DIM> &smem;
    const sparse_params &params;
    ring_position<memory::DEPTH> at;

    __device__ void begin_stage() const
    {
        barrier_wait(smem.empty[at.stage], at.phase ^ 1);
    }
    __device__ void end_stage()
    {
        cp_async_arrive(smem.full[at.stage]);
        at.next();
    }

    /* Copies all keys of the list, `TILES` tiles of SLABS slabs per stage. */
    template <int SLABS, int TILES>
    __device__ void copy_keys(const sparse_row32 &row, const row_source<ELEMENT> &keys, int count)
    {
        const int first = looked_up_row(), tiles = (count + STAGE_KEYS - 1) / STAGE_KEYS;
        int next = row.key(first);
#pragma unroll 1
        for (int tile = 0; tile < tiles; tile += TILES) {
            begin_stage();
#pragma unroll
            for (int n = 0; n < TILES; n++) {
                if (tile + n >= tiles)
                    break;
                const int key = next;
                next = row.key(first + (tile + n + 1) * STAGE_KEYS);
                copy_tile<SLABS>(smem.stages[at.stage] + n * SLABS * SLAB_SIZE, keys, key);
            }
            end_stage();
        }
    }

    __device__ void copy_row(const sparse_row32 &row, int count)
    {
        for_teacher_heads(params, row, [&](const head_group &heads, bool) {
#pragma unroll 1
            for (int part = 0; part < (params.splits_heads ? CONSUMERS : 1); part++) {
                begin_stage();
                copy_heads<memory::SLABS>(smem.stages[at.stage],
                                          heads_of<ELEMENT>(params.a, row, heads.first + part * 64),
                                          heads.count - part * 64);
                end_stage();
            }
            const row_source<ELEMENT> keys =
                keys_of_row<ELEMENT>(params.a, row, heads.first / params.a.heads_per_key);
            const int passes = computes_lse(params) + params.with_mean;
#pragma unroll 1
            for (int pass = 0; pass < passes; pass++)
                copy_keys<memory::SLABS, memory::TILES>(row, keys, count);
        });
        begin_stage();
        const int index_heads = (int)params.problem.index_heads;
        copy_heads<INDEX_SLABS>(smem.stages[at.stage], heads_of<ELEMENT>(params.b, row, row.head * index_heads),
                                index_heads);
        end_stage();
        copy_keys<INDEX_SLABS, memory::INDEX_TILES>(
            row, keys_of_row<ELEMENT>(params.b, row, row.head / params.b.heads_per_key), count);
    }

    __device__ void run()
    {
        ring_position<ROW_SLOTS> slot;
#pragma unroll 1
        for (int n = (int)blockIdx.x; n < params.row_count; n += (int)gridDim.x, slot.next()) {
            barrier_wait(smem.rows.empty[slot.stage], slot.phase ^ 1);
            const int count = find_row(smem.rows, smem.rows.slots[slot.stage], params, n);
            barrier_arrive(smem.rows.full[slot.stage]);
            if (count > 0)
                copy_row(smem.rows.slots[slot.stage].row, count);
        }
    }
};

/* ---- Consumers ------------------------------------------------------------------------------------------------ */

/* Sums of columns over the 16 rows of a warp. Each step halves the columns that a lane keeps; the last one leaves
 * two, values[0] and values[1], of block `block`. A thread begins with two columns of each of 8 blocks. */
template <int KEPT = 8> __device__ inline void sum_rows_of_warp(float (&values)[2 * STAGE_KEYS / 8], int &block)
{
    const bool high = (threadIdx.x & (unsigned)(KEPT * 2)) != 0;
#pragma unroll
    for (int n = 0; n < KEPT; n++) {
        const float sent = high ? values[n] : values[n + KEPT], own = high ? values[n + KEPT] : values[n];
        values[n] = own + __shfl_xor_sync(~0U, sent, KEPT * 2);
    }
    block += high ? KEPT / 2 : 0;
    if constexpr (KEPT > 2)
        sum_rows_of_warp<KEPT / 2>(values, block);
}

template <typename ELEMENT, int DIM> struct score_consumer {
    typedef score_smem<DIM> memory;
    enum { ALL = 4, WARPGROUP = 2 }; /* named barriers; one per warpgroup */
    score_smem<DIM> &smem;
    const sparse_params &params;
    int warpgroup;                                 /* 0 or 1 */
    uint32_t queries[DIM > 128 ? DIM / 16 : 8][4]; /* operand A: 64 heads */
    int buffer;                                    /* buffer of smem.columns to write next */
    ring_position<memory::DEPTH> at;

    /* The thread among the consumers; read again for every use, because registers are short. */
    __device__ static int thread()
    {
        return (int)thread_again() - 128;
    }
    /* The warp of the warpgroup. */
    __device__ static int warp()
    {
        return thread() % 128 / 32;
    }
    /* Row of the product, 0 to 63, of the thread's accumulators. */
    __device__ static int head_row(int half)
    {
        return warp() * 16 + (int)(threadIdx.x % 32 / 4) + half * 8;
    }
    __device__ void wait_stage() const
    {
        barrier_wait(smem.full[at.stage], at.phase);
    }
    __device__ void release_stage()
    {
        barrier_arrive(smem.empty[at.stage]);
    }

    template <int SLABS> __device__ void load_queries()
    {
        const int lane = (int)(threadIdx.x % 32), row = warp() * 16 + lane % 16;
        const uint32_t address = shared_address(smem.stages[at.stage]) + (uint32_t)row * 128;
#pragma unroll
        for (int k = 0; k < SLABS * 4; k++)
            ldmatrix_x4(queries[k],
                        address + (uint32_t)(k / 4 * SLAB_SIZE + ((k % 4 * 2 + lane / 16) ^ row % 8) * 16));
    }

    /* Multiplies the queries with the row's keys. before(tile) runs before a tile's product is waited for, and
     * finish(logits, tile, its value) after it. `step` 2: every other tile, from `first` on. */
    template <int SLABS, int TILES, typename BEFORE, typename FINISH>
    __device__ void multiply(int tiles, int first, int step, BEFORE before, FINISH finish)
    {
#pragma unroll 1
        for (int base = 0; base < tiles; base += TILES) {
            wait_stage();
            fence_proxy_async();
            bool releases_later = true;
            const int end = min(tiles - base, TILES);
#pragma unroll 1
            for (int n = step == 2 ? (first + base) % 2 : 0; n < end; n += step) {
                const auto known = before(base + n);
                stage_logits x;
                wgmma_fence();
                wgmma_frags<ELEMENT, SLABS * 64>(x, queries,
                                                 k_major_operand(smem.stages[at.stage] + n * SLABS * SLAB_SIZE));
                wgmma_commit();
                wgmma_wait<0>();
                fence_operand(x);
                if (n + step >= end) {
                    release_stage();
                    releases_later = false;
                }
                finish(x, base + n, known);
            }
            if (releases_later)
                release_stage();
            at.next();
        }
    }

    /* The block's scores of the row: the mean of the teacher in parts 0 and 1, index logits in part 2. */
    __device__ float *scores(int part) const
    {
        return params.scores + (blockIdx.x * 3 + part) * params.problem.top_k;
    }

    /* Adds the columns of a tile to scores(part); is_first: the sums start with them. */
    __device__ void add_columns(float (&values)[16], int part, int tile, int count, bool is_first)
    {
        int block = 0;
        sum_rows_of_warp(values, block);
        *(float2 *)(void *)&smem.columns[warpgroup][buffer][warp()][block * 8 + threadIdx.x % 4 * 2] =
            make_float2(values[0], values[1]);
        named_barrier_sync(WARPGROUP + warpgroup, 128);
        const int column = (int)(threadIdx.x % 128), entry = tile * STAGE_KEYS + column;
        const float(&of_warp)[4][STAGE_KEYS] = smem.columns[warpgroup][buffer];
        buffer ^= 1;
        if (column >= STAGE_KEYS || entry >= count)
            return;
        const float sum = (of_warp[0][column] + of_warp[1][column]) + (of_warp[2][column] + of_warp[3][column]);
        float &score = scores(part)[entry];
        score = is_first ? sum : score + sum;
    }

    /* ---- The teacher ---- */

    /* LSEs of the thread's two heads, in base 2, over the row's entries. */
    __device__ void compute_lse(const sparse_row32 &row, int tiles, int first, int step, double (&lse)[2])
    {
        lse_row rows[2] = {{-INFINITY, 0.0F}, {-INFINITY, 0.0F}};
        const float scale = params.a.scale;
        multiply<memory::SLABS, memory::TILES>(
            tiles, first, step,
            [&](int tile) {
                const int entry = tile * STAGE_KEYS + (int)(threadIdx.x % 32);
                const uint64_t low = __ballot_sync(~0U, row.key(entry) >= 0);
                return low | (uint64_t)__ballot_sync(~0U, row.key(entry + 32) >= 0) << 32;
            },
            [&](const stage_logits &x, int, uint64_t seen) {
                const int first_column =
                    (int)(threadIdx.x % 4 * 2); /* the thread's first column; the others are constants later */
                const uint64_t own = seen >> first_column;
                if (seen == ~(uint64_t)0)
                    add_tile(rows, x, scale, [](int, int) { return true; });
                else
                    add_tile(rows, x, scale,
                             [&](int, int column) { return (own >> (column - first_column) & 1U) != 0; });
            });
        rows[0] = merge_lanes(rows[0]);
        rows[1] = merge_lanes(rows[1]);
        if (step == 2) {                              /* the other warpgroup has the other tiles */
            named_barrier_sync(ALL, SCORE_CONSUMERS); /* all threads have read the LSEs of the product before */
#pragma unroll
            for (int half = 0; half < 2; half++)
                smem.lse[warpgroup][head_row(half)] = rows[half];
            named_barrier_sync(ALL, SCORE_CONSUMERS);
#pragma unroll
            for (int half = 0; half < 2; half++)
                rows[half] = merge_rows(smem.lse[0][head_row(half)], smem.lse[1][head_row(half)]);
        }
#pragma unroll
        for (int half = 0; half < 2; half++)
            lse[half] = rows[half].l == 0.0F ? -INFINITY : (double)rows[half].m + log2((double)rows[half].l);
    }

    /* 2^(x - lse) / heads = 2^(x - high) * factor. A missing head has a factor of 0. */
    __device__ split_lse split(double lse2, bool exists) const
    {
        const skl_lse2 lse = skl_lse2_split(lse2);
        const float mean = 1.0F / (float)skl_group_size(&params.problem);
        return {exists ? lse.value : 0.0F, exists ? fmaf(-lse.low * SKL_LN2, mean, mean) : 0.0F};
    }

    /* Adds the probabilities of a product's heads to the mean. */
    __device__ void add_heads(const sparse_row32 &row, const head_group &heads, int tiles, bool is_first)
    {
        const bool splits = params.splits_heads;
        const int first = splits ? 0 : warpgroup, step = splits ? 1 : 2, head = splits ? warpgroup * 64 : 0;
        const skl_call &call = params.call;
        split_lse lse[2];
        if (!computes_lse(params)) {
            const head_lse given = {NULL, 0, 1.0F / (float)skl_group_size(&params.problem)};
#pragma unroll
            for (int half = 0; half < 2; half++) {
                const int h = head + head_row(half);
                const bool exists = h < heads.count;
                const split_lse value = given.value(
                    skl_row_value(&call.inputs.lse_t, &row.sequence, heads.first + (exists ? h : 0), row.query));
                lse[half] = {exists ? value.high : 0.0F, exists ? value.factor : 0.0F};
            }
        }
        for (int part = 0; part < (splits ? CONSUMERS : 1); part++) {
            wait_stage();
            if (!splits || part == warpgroup)
                load_queries<memory::SLABS>();
            release_stage();
            at.next();
        }
        if (computes_lse(params)) {
            double lse2[2];
            compute_lse(row, tiles, first, step, lse2);
#pragma unroll
            for (int half = 0; half < 2; half++) {
                const int h = head + head_row(half);
                lse[half] = split(lse2[half], h < heads.count);
                if (h < heads.count && threadIdx.x % 4 == 0 && (splits || warpgroup == 0))
                    skl_row_set(&call.rows.lse_t, &row.sequence, heads.first + h, row.query,
                                (float)(lse2[half] * SKL_LN2_DOUBLE));
            }
        }
        if (!params.with_mean)
            return;
        const float scale = params.a.scale;
        const int part = splits ? warpgroup : 0;
        multiply<memory::SLABS, memory::TILES>(
            tiles, first, step, [](int) { return 0; },
            [&](const stage_logits &x, int tile, int) {
                const mean_of_heads add = {scale};
                float values[16];
#pragma unroll
                for (int e = 0; e < 16; e++)
                    values[e] = add(add(0.0F, x[e / 2][e % 2], lse[0]), x[e / 2][2 + e % 2], lse[1]);
                add_columns(values, part, tile, row.count, is_first);
            });
    }

    /* ---- The indexer ---- */

    __device__ void score_keys(const row_slot &slot, int tiles)
    {
        wait_stage();
        load_queries<INDEX_SLABS>();
        release_stage();
        at.next();
        const float weights[2] = {slot.weights[head_row(0)], slot.weights[head_row(1)]};
        const index_sum add = {params.least};
        multiply<INDEX_SLABS, memory::INDEX_TILES>(
            tiles, warpgroup, 2, [](int) { return 0; },
            [&](const stage_logits &x, int tile, int) {
                float values[16];
#pragma unroll
                for (int e = 0; e < 16; e++)
                    values[e] = add(add(0.0F, x[e / 2][e % 2], weights[0]), x[e / 2][2 + e % 2], weights[1]);
                add_columns(values, 2, tile, slot.row.count, true);
            });
    }

    /* ---- Rows ---- */

    /* Sums over the thread's entries, and dy. P needs no shift: it is relative to the LSEs. */
    __device__ index_row sum_entries(const sparse_row32 &row, float *dy) const
    {
        const float *const mean = scores(0), *const other_mean = scores(1), *const logits = scores(2);
        const skl_lse2 lse_s =
            dy != NULL ? skl_lse2_of(skl_row_value(&params.call.inputs.lse_s, &row.sequence, row.head, row.query))
                       : skl_lse2{0.0F, 0.0F};
        float m = -3e38F, l_t = 0.0F, l_s = 0.0F, w = 0.0F, p_log_p = 0.0F; /* finite: inf - inf would be NaN */
        constexpr int LOADS = 8;                                            /* entries in flight */
#pragma unroll 1
        for (int begin = thread(); begin < row.count; begin += LOADS * SCORE_CONSUMERS) {
            float logit[LOADS], p[LOADS];
            bool valid[LOADS];
#pragma unroll
            for (int i = 0; i < LOADS; i++) {
                const int n = begin + i * SCORE_CONSUMERS, inside = n < row.count ? n : begin;
                valid[i] = row.key(n) >= 0;
                logit[i] = logits[inside];
                p[i] = params.with_mean ? mean[inside] : 0.0F;
                p[i] += params.with_mean && params.splits_heads ? other_mean[inside] : 0.0F;
            }
#pragma unroll
            for (int i = 0; i < LOADS; i++) {
                const float y = __fmul_rn(logit[i], params.b.scale);
                if (dy != NULL && begin + i * SCORE_CONSUMERS < row.count)
                    dy[begin + i * SCORE_CONSUMERS] = valid[i] ? ex2((y - lse_s.value) - lse_s.low) - p[i] : 0.0F;
                if (!valid[i])
                    continue;
                const float larger = fmaxf(m, y), moved = larger - m, log_p = log2_probability(p[i]);
                l_s = fmaf(l_s, ex2(-moved), ex2(y - larger));
                w = fmaf(p[i], log_p - (y - larger), fmaf(l_t, moved, w));
                l_t += p[i];
                p_log_p = fmaf(p[i], log_p, p_log_p);
                m = larger;
            }
        }
        return {{l_t == 0.0F ? -INFINITY : 0.0F, l_t, l_s == 0.0F ? -INFINITY : m, l_s, w}, p_log_p};
    }

    __device__ void write_results(const sparse_row32 &row, const index_row &sums) const
    {
        const skl_row_state &state = sums.state;
        const skl_row_state entropy_state = {state.m_a, state.l_a, 0.0F, 0.0F, sums.p_log_p};
        const skl_input &given = params.call.inputs.lse_t;
        if (thread() == 0)
            (void)::write_row(params, row.sequence, row.head, row.query, state, entropy_state);
        if (params.call.rows.lse_t.data == NULL || (given.data == NULL && row.count > 0))
            return; /* computed LSEs have been written already */
        const float mean_lse_t = skl_lse(state.m_a, state.l_a);
        const int64_t group = skl_group_size(&params.problem);
        for (int64_t h = row.head * group + thread(); h < (row.head + 1) * group; h += SCORE_CONSUMERS)
            write_lse_t(params, row.sequence, h, row.query,
                        skl_lse2_of(given.data == NULL ? 0.0F : skl_row_value(&given, &row.sequence, h, row.query)),
                        mean_lse_t);
    }

    __device__ void finish_row(const sparse_row32 &row, float *dy)
    {
        named_barrier_sync(ALL, SCORE_CONSUMERS); /* scores are complete */
        const index_row sum = merge_lanes<32>(sum_entries(row, dy));
        if (threadIdx.x % 32 == 0)
            smem.warp_sums[thread() / 32] = sum;
        named_barrier_sync(ALL, SCORE_CONSUMERS); /* scores may be overwritten */
        if (params.call.op != SKL_OP_BACKWARD)
            write_results(row, merge_lanes<SCORE_CONSUMERS / 32>(smem.warp_sums[thread() % (SCORE_CONSUMERS / 32)]));
    }

    __device__ void run()
    {
        ring_position<ROW_SLOTS> at_row;
#pragma unroll 1
        for (int n = (int)blockIdx.x; n < params.row_count; n += (int)gridDim.x, at_row.next()) {
            barrier_wait(smem.rows.full[at_row.stage], at_row.phase);
            const row_slot &slot = smem.rows.slots[at_row.stage];
            const sparse_row32 &row = slot.row;
            const int tiles = warp_uniform((row.count + STAGE_KEYS - 1) / STAGE_KEYS);
            if (tiles > 0) {
                for_teacher_heads(params, row, [&](const head_group &heads, bool is_first) {
                    add_heads(row, heads, tiles, is_first);
                });
                score_keys(slot, tiles);
            }
            if (row.exists)
                finish_row(row, params.dy != NULL ? params.dy + n * params.problem.top_k : NULL);
            barrier_arrive(smem.rows.empty[at_row.stage]);
        }
    }
};

/* ---- Kernel --------------------------------------------------------------------------------------------------- */

template <typename ELEMENT, int DIM>
__global__ void __launch_bounds__(SCORE_THREADS, 1) sparse_score_kernel(const __grid_constant__ sparse_params params)
{
    extern __shared__ __align__(1024) unsigned char raw[];
    score_smem<DIM> &smem = *(score_smem<DIM> *)(void *)raw;
    static_assert(sizeof smem <= SMEM_MAX, "the stages leave room for the rest");
    if (threadIdx.x == 0)
        smem.init_barriers();
    barrier_init_fence();
    __syncthreads();
    const int warpgroup = warpgroup_index();
    static_assert(PRODUCER_REGISTERS + 2 * SCORE_REGISTERS <= 3 * 168, "the block has 168 per thread");
    if (warpgroup == 0) {
        reg_dealloc<PRODUCER_REGISTERS>();
        score_producer<ELEMENT, DIM> producer = {smem, params, {}};
        producer.run();
    } else {
        reg_alloc<SCORE_REGISTERS>();
        score_consumer<ELEMENT, DIM> consumer = {smem, params, warpgroup - 1, {}, 0, {}};
        consumer.run();
    }
}

} // namespace sm90

#endif
