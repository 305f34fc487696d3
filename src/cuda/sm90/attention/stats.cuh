/* Statistics of keys and rows on Hopper, from the LSEs of the rows, in one pass: sums and maxima over rows for each
 * key; entropy, expected distance and largest logit of each row. stats_tiles.cuh has the loop.
 *
 *   X^T = K Q^T    P^T = 2^(scale X^T - lse)
 *
 * Bound: tensor cores, exponentials and shared memory, 256 clocks each per 64 keys x 64 queries at DIM = 128, and 324
 * instructions, seven per pair and the loop. Without its wgmmas the loop takes 425 clocks, and with them 580: tensor
 * cores and arithmetic share the register file (docs/design/gpu-kernels.md).
 *
 *   H200, 32 heads of 128, causal, N = 8,192, time of the KL forward: 0.75 (0.72 ms), WEIGHTED 0.96; heads of 64:
 * 0.75, heads of 256: 0.60
 *
 *   registers  X^T of two stages (64); LSE, entropy, distance and maximum of 16 queries (64)
 *
 *                 64 queries of WG 0   64 queries of WG 1   ...
 *                +--------------------+--------------------+--
 *     64 keys    |        X^T         |                    |      -> sums of 64 keys, one global add per warpgroup
 *     64 keys    |                    |                    |
 *       ...      +--------------------+--------------------+--
 *                 columns: sums over keys, which stay in registers until the end of a tile
 *
 * Queries are columns, so a thread's 16 columns keep their sums, and the sum of a key is one of a thread's two rows:
 * an addition per pair and two shuffles per stage. With queries as rows, sums of keys would take two instructions per
 * pair: the lanes and warps that share a column would have to add theirs in every stage. */
#ifndef SKL_CUDA_SM90_ATTENTION_STATS_CUH
#define SKL_CUDA_SM90_ATTENTION_STATS_CUH

#include "cuda/sm90/attention/stats_tiles.cuh"

namespace sm90
{

constexpr int THREAD_COLUMNS = STATS_QUERIES / 4;

/* Folds the values of the eight lanes that share columns: afterwards each lane has an eighth of the results, the
 * first of which has the index folded_index(). */
template <int OFFSET = 16, int COUNT, typename OP> __device__ inline void fold_lanes(float (&values)[COUNT], OP op)
{
    constexpr int REST = COUNT * OFFSET / 32;
    const bool upper = (threadIdx.x & (unsigned)OFFSET) != 0;
#pragma unroll
    for (int k = 0; k < REST; k++) {
        const float other = __shfl_xor_sync(~0U, upper ? values[k] : values[k + REST], OFFSET);
        values[k] = op(upper ? values[k + REST] : values[k], other);
    }
    if constexpr (OFFSET > 4)
        fold_lanes<OFFSET / 2>(values, op);
}

__device__ inline int folded_index()
{
    return (int)(threadIdx.x % 32 / 4) * (THREAD_COLUMNS / 8);
}

/* Folds two values over the four lanes of a row: even lanes get the first result, odd lanes the second. */
template <typename OP> __device__ inline float fold_quad(float first, float second, OP op)
{
    const bool odd = threadIdx.x % 2 != 0;
    const float pair = op(odd ? second : first, __shfl_xor_sync(~0U, odd ? first : second, 1));
    return op(pair, __shfl_xor_sync(~0U, pair, 2));
}

/* Adds to a float in global memory; predicated, not branched. Additions of one thread to one address are in order. */
__device__ inline void global_add_if(uint64_t address, float value, bool condition)
{
    asm volatile("{\n"
                 ".reg .pred adds;\n"
                 "setp.ne.b32 adds, %2, 0;\n"
                 "@adds red.relaxed.gpu.global.add.f32 [%0], %1;\n"
                 "}" ::"l"(address),
                 "f"(value), "r"((int)condition)
                 : "memory");
}

/* Raises a float that is not negative, as does a positive value. As integers, such floats have their order. */
__device__ inline void global_raise_if(uint64_t address, float value, bool condition)
{
    asm volatile("{\n"
                 ".reg .pred raises;\n"
                 "setp.ne.b32 raises, %2, 0;\n"
                 "@raises red.relaxed.gpu.global.max.s32 [%0], %1;\n"
                 "}" ::"l"(address),
                 "r"(__float_as_int(value)), "r"((int)condition)
                 : "memory");
}

/* WEIGHTED: rows have weights, which may be 0, and keys have maxima. */
template <typename E, int D, bool CAPPED, bool WEIGHTED>
struct stats_columns : stats_position<stats_smem<stats_columns<E, D, CAPPED, WEIGHTED>>> {
    typedef stats_position<stats_smem<stats_columns>> base;
    using base::chunk, base::first, base::params, base::sequence, base::smem, base::sync, base::warpgroup;
    typedef E ELEMENT;
    static constexpr int DIM = D;
    static constexpr bool KEYS_ARE_ROWS = true, STRIDED = false, PIPELINED = !CAPPED; /* tanhf branches */
    static constexpr int PASSES = 1;
    static constexpr bool KEEPS_LSE = !WEIGHTED; /* LSEs stay in registers */

    /* Results of a warpgroup's queries. */
    struct shared {
        row_ranges<STATS_QUERIES> visible; /* keys of the sequence */
        float lse2[STATS_QUERIES], weight[STATS_QUERIES];
        float totals[4][3][STATS_QUERIES]; /* entropy, distance and maximum of each warp */
    };

    uint64_t sums;   /* address of the key sums that this thread adds to, from key 0 of the sequence on; 0: none */
    uint64_t maxima; /* WEIGHTED: address of the maxima that it raises; 0: none */
    float at;        /* position of the sequence's key 0, counted from the thread's first query; its row is added */
    int low;         /* position of the tile's first query */
    bool flipped;
    float2 lse2[KEEPS_LSE ? THREAD_COLUMNS / 2 : 1];
    float entropy[THREAD_COLUMNS], distance[THREAD_COLUMNS], largest[THREAD_COLUMNS];

    __device__ shared &rows() const
    {
        return smem.of_warpgroup[warpgroup];
    }

    /* The maximum of a key in global memory; NULL: it is not wanted. */
    __device__ float *maximum_of(int key) const
    {
        const skl_output &out = params.stats.key_max;
        const skl_sequence &s = sequence();
        const int64_t head = params.stats.per_key_head ? chunk().head / params.b.heads_per_key : chunk().head;
        return (params.layout.results & SKL_STATS_KEY_MAX) == 0
                   ? NULL
                   : (float *)out.data + SKL_ROW(out, s.batch, head, s.key_begin + key);
    }

    /* The thread's first key in a stage. */
    __device__ int key_row() const
    {
        return (int)(threadIdx.x % 128 / 32 * 16 + threadIdx.x % 32 / 4);
    }

    __device__ void start_tile(const skl_band &band)
    {
        const skl_sequence &s = sequence();
        const int column = (int)(threadIdx.x % 128);
        const int64_t query = first + column, head = chunk().head;
        if (column < STATS_QUERIES) {
            const bool exists = query < s.query_count;
            const skl_range none = {0, 0}, sees = exists ? skl_band_range(&band, query) : none;
            rows().visible.ranges[column] = {(int)sees.begin, (int)sees.end};
            rows().lse2[column] = exists ? stats_lse2(params, s, head, query) : 0.0F;
            if (WEIGHTED)
                rows().weight[column] = row_weight(params, s, head, query, sees.begin >= sees.end);
        }
        sync();
#pragma unroll
        for (int n = 0; n < THREAD_COLUMNS / 2 && KEEPS_LSE; n++)
            lse2[n] = load_shared_2(rows().lse2[acc_column(n, 0)]);
#pragma unroll
        for (int c = 0; c < THREAD_COLUMNS; c++) {
            entropy[c] = distance[c] = 0.0F;
            largest[c] = -INFINITY;
        }
        const int lane = (int)(threadIdx.x % 4);
        float *const slot = chunk().slot(params, chunk().chunk * STATS_WARPGROUPS + warpgroup);
        sums = slot != NULL && lane < 2 ? (uint64_t)(slot + key_row() + lane * 8) : 0;
        if (WEIGHTED)
            maxima = lane < 2 ? (uint64_t)maximum_of(key_row() + lane * 8) : 0;
        low = warp_uniform(saturated(first + s.diagonal));
        at = (float)(key_row() - lane * 2 - (first + s.diagonal)); /* `low` is clamped, this position is not */
        flipped = false;
    }

    /* All keys of a plain stage are on one side of all queries: distances have one sign. Keys after all queries have
     * negative ones, so the sums change their sign first. */
    __device__ int plain_until(int stage, int end)
    {
        const int high = low + STATS_QUERIES - 1;
        if (!flipped && stage * STAGE_KEYS >= high) {
            flipped = true;
#pragma unroll
            for (int c = 0; c < THREAD_COLUMNS; c++)
                distance[c] = -distance[c];
        }
        return flipped ? end : min(end, (low + 1) >> 6);
    }

    template <int> __device__ void make_room() const
    {
    }

    template <int> __device__ void end_pass() const
    {
    }

    template <int, int> __device__ void add_stage(stage_logits &x, int first_key)
    {
        add<false>(x, first_key);
    }

    template <int> __device__ void add_masked(stage_logits &x, int first_key)
    {
        if (CAPPED)
            cap_stage(x, x, params.b);
        add<true>(x, first_key);
        __syncwarp();
    }

    /* Keeps products, not logits relative to an LSE: a sink or an LSE of more keys may be far above the logits, and
     * the difference would lose their last bits. The loop is separate from the loop of the sums: together, ptxas runs
     * out of registers and serializes the wgmmas (C7511). */
    template <bool MASKED> __device__ void add_largest(const stage_logits &x, int key)
    {
#pragma unroll
        for (int c = 0; c < THREAD_COLUMNS; c++) {
            const range32 sees = MASKED ? rows().visible.of(acc_column(c / 2, c % 2)) : range32{};
            if (MASKED && c % 4 == 3)
                __syncwarp(); /* ends what ptxas loads ahead: ranges of all columns would spill */
#pragma unroll
            for (int half = 0; half < 2; half++) {
                const bool seen = !MASKED || (key + half * 8 >= sees.begin && key + half * 8 < sees.end);
                largest[c] = fmaxf(largest[c], seen ? x[c / 2][half * 2 + c % 2] : -INFINITY);
            }
        }
        if (CAPPED)
            __syncwarp(); /* the sums load the ranges again */
    }

    template <bool MASKED> __device__ void add(const stage_logits &x, int first_key)
    {
        const int key = first_key + key_row();
        const float position = at + (float)first_key;
        const float scale = CAPPED ? 1.0F : MASKED ? params.b.scale : load_shared(smem.scale);
        float key_sums[2] = {}, largest_p[2] = {};
        add_largest<MASKED>(x, key);
#pragma unroll
        for (int n = 0; n < THREAD_COLUMNS / 2; n++) {
            const float2 lse = MASKED || !KEEPS_LSE ? load_shared_2(rows().lse2[acc_column(n, 0)]) : lse2[n];
#pragma unroll
            for (int parity = 0; parity < 2; parity++) {
                const int c = n * 2 + parity;
                const range32 sees = MASKED ? rows().visible.of(acc_column(n, parity)) : range32{};
                const float weight = WEIGHTED ? load_shared(rows().weight[acc_column(n, parity)]) : 1.0F;
                const float of_query = parity == 0 ? lse.x : lse.y;
#pragma unroll
                for (int half = 0; half < 2; half++) {
                    float log_p = fmaf(x[n][half * 2 + parity], scale, -of_query);
                    float away = (float)(n * 8 + parity - half * 8) - position;
                    if (MASKED) {
                        const bool seen = key + half * 8 >= sees.begin && key + half * 8 < sees.end;
                        log_p = seen ? log_p : STATS_MASKED_LOGIT;
                        away = flipped ? away : fabsf(away);
                    }
                    const float p = ex2(log_p);
                    const float counted = WEIGHTED ? weight != 0.0F ? p : 0.0F : p;
                    key_sums[half] = WEIGHTED ? fmaf(counted, weight, key_sums[half]) : key_sums[half] + p;
                    if (WEIGHTED)
                        largest_p[half] = fmaxf(largest_p[half], counted);
                    entropy[c] = fmaf(p, log_p, entropy[c]);
                    distance[c] = fmaf(p, away, distance[c]);
                }
            }
        }
        const float sum = fold_quad(key_sums[0], key_sums[1], [](float a, float b) { return a + b; });
        global_add_if(sums + (int64_t)first_key * 4, sum, sums != 0);
        if (WEIGHTED) { /* keys that no row sees have p = 0 */
            const float p = fold_quad(largest_p[0], largest_p[1], [](float a, float b) { return fmaxf(a, b); });
            global_raise_if(maxima + first_key * params.stats.key_max.stride_row * 4, at_most_1(p),
                            maxima != 0 && p > 0.0F);
        }
    }

    /* Folds the sums of the threads that share a query, and writes its results. */
    __device__ void finish_tile()
    {
        const auto add = [](float a, float b) { return a + b; };
        const int warp = warp_in_warpgroup(), index = folded_index(), column = (int)(threadIdx.x % 128);
        fold_lanes(entropy, add);
        fold_lanes(distance, add);
        fold_lanes(largest, [](float a, float b) { return fmaxf(a, b); });
        float(&totals)[4][3][STATS_QUERIES] = rows().totals;
#pragma unroll
        for (int k = 0; k < THREAD_COLUMNS / 8; k++) {
            const int to = acc_column((index + k) / 2, k % 2);
            totals[warp][0][to] = entropy[k];
            totals[warp][1][to] = flipped ? -distance[k] : distance[k];
            totals[warp][2][to] = largest[k];
        }
        sync();
        if (column < STATS_QUERIES && first + column < sequence().query_count) {
            row_totals row = {totals[0][0][column], totals[0][1][column], totals[0][2][column]};
#pragma unroll
            for (int other = 1; other < 4; other++) {
                row.entropy += totals[other][0][column];
                row.distance += totals[other][1][column];
                row.max_logit = fmaxf(row.max_logit, totals[other][2][column]);
            }
            row.max_logit *= CAPPED ? 1.0F : params.b.scale;
            write_stats_row(params, chunk(), first + column, rows().visible.of(column), rows().lse2[column], row);
        }
        sync(); /* start_tile() overwrites what was read */
    }
};

template <typename ELEMENT, int DIM, bool SOFTCAP> cudaError_t launch_stats_of(const stats_params &params)
{
    const skl_stats &stats = params.stats;
    const bool weighted = stats.row_weights.data != NULL || stats.row_begin != 0 || stats.row_end != 0 ||
                          params.layout.results & SKL_STATS_KEY_MAX;
    if constexpr (SOFTCAP)
        if (params.b.capped)
            return launch_stats_blocks<stats_columns<ELEMENT, DIM, true, true>>(params);
    return weighted ? launch_stats_blocks<stats_columns<ELEMENT, DIM, false, true>>(params)
                    : launch_stats_blocks<stats_columns<ELEMENT, DIM, false, false>>(params);
}

/* Softcaps of narrow heads run padded. */
template <typename ELEMENT, bool SOFTCAP>
cudaError_t launch_stats(const char *kernel, const skl_cuda_params *params, const skl_cuda_launch *launch)
{
    static_assert(STATS_TILE == SKL_SM90_STATS_ROWS && STATS_WARPGROUPS == SKL_SM90_STATS_ADDERS,
                  "cuda/select counts tiles and slots");
    record_launch(kernel, SKL_VARIANT_STATS_COLUMNS, 1);
    const stats_params of = stats_params_of(params, launch);
    return of.b.dim <= 64 && !of.b.capped ? launch_stats_of<ELEMENT, 64, false>(of)
           : of.b.dim <= 128              ? launch_stats_of<ELEMENT, 128, SOFTCAP>(of)
                                          : launch_stats_of<ELEMENT, 256, SOFTCAP>(of);
}

} // namespace sm90

#endif
