/* Top keys of each row on Hopper, in two passes over its keys. stats_tiles.cuh has the loop, common/stats_top.cuh the
 * order of candidates.
 *
 *   X = Q K^T
 *
 *   1. maxima of 128 groups of keys; the k-th largest of them, or a little less, is the row's threshold
 *   2. products above the threshold are candidates: at least k of them, and with random keys about 1.4 k
 *      end of a tile: a warp sorts the candidates of a row, as numbers of 32 bits where these suffice
 *
 * A group has every 128th key, so that neighbors, which often are large together, are in different groups. Where
 * the largest keys are in few groups, or equal, a row has more candidates than fit. Then a warp keeps the k largest,
 * and the threshold rises to the smallest of them.
 *
 * Bound: tensor cores, 256 clocks per pass, 64 queries x 64 keys at DIM = 128; in the second pass eight instructions
 * per pair, of which three move a candidate and its address to neighboring registers; 650 instructions per row to
 * sort and to write it. Raw products are compared: scale, softcap and LSE keep their order.
 *
 *   H200, 32 heads of 128, causal, top 64: 1.38 of the KL forward at N = 8,192 (1.32 ms), 1.05 at 131,072
 *
 *   registers  X of two stages (64); 32 groups of two rows (64)
 *   scratch    in the workspace, per block and query: four lists of candidates, one for each lane of the row
 *
 * A warp has 16 queries with all keys of a stage, so its rows, their thresholds and candidates are its own, and warps
 * wait for each other only at wgmmas. */
#ifndef SKL_CUDA_SM90_ATTENTION_STATS_TOP_CUH
#define SKL_CUDA_SM90_ATTENTION_STATS_TOP_CUH

#include "cuda/common/stats_top.cuh"
#include "cuda/sm90/attention/stats_tiles.cuh"

namespace sm90
{

constexpr int TOP_LIST = SKL_SM90_STATS_TOP_LIST; /* candidates of a lane and row */
constexpr int TOP_ENTRY = 4 * sizeof(uint64_t);   /* bytes from one candidate of a list to the next */
constexpr int TOP_ROW = TOP_LIST * TOP_ENTRY;     /* bytes of a row */
constexpr int SORTED = 128;                       /* candidates that a warp sorts at once: four per lane */
static_assert(TOP_ROW == SKL_SM90_STATS_TOP_ROW && (TOP_ROW & (TOP_ROW - 1)) == 0, "an address has a count");

/* Appends a candidate to a lane's list if its value is above the threshold; predicated, not branched. A row does not
 * cross a multiple of 2^32, so only the low word of the address changes. */
__device__ inline void append_above(float threshold, uint64_t &end, float value, int key)
{
    asm volatile("{\n"
                 ".reg .pred above;\n"
                 ".reg .b32 low, high;\n"
                 "setp.gt.f32 above, %1, %2;\n"
                 "@above st.global.v2.b32 [%0], {%3, %1};\n"
                 "mov.b64 {low, high}, %0;\n"
                 "@above add.u32 low, low, %4;\n"
                 "mov.b64 %0, {low, high};\n"
                 "}"
                 : "+l"(end)
                 : "f"(value), "f"(threshold), "r"(key), "n"(TOP_ENTRY)
                 : "memory");
}

/* Orders two numbers. */
template <typename NUMBER> __device__ inline void order(NUMBER &first, NUMBER &second, bool descending)
{
    const NUMBER larger = max(first, second), smaller = min(first, second);
    first = descending ? larger : smaller;
    second = descending ? smaller : larger;
}

/* Sorts a warp's SORTED numbers, the largest first; lane n has numbers 4 n .. 4 n + 3. Bitonic. UNROLLED: steps of
 * each loop. */
template <int UNROLLED, typename NUMBER> __device__ inline void sort_numbers(NUMBER (&mine)[4])
{
    const unsigned lane = threadIdx.x % 32;
    order(mine[0], mine[1], true);
    order(mine[2], mine[3], false);
#pragma unroll UNROLLED
    for (unsigned size = 1; size <= 32; size *= 2) { /* lanes of a sorted run */
        const bool descending = (lane & size) == 0;
#pragma unroll UNROLLED
        for (unsigned offset = size / 2; offset > 0; offset /= 2) {
            const bool keeps_larger = ((lane & offset) == 0) == descending;
#pragma unroll
            for (NUMBER &number : mine) {
                const NUMBER other = __shfl_xor_sync(~0U, number, offset);
                number = keeps_larger ? max(number, other) : min(number, other);
            }
        }
        order(mine[0], mine[2], descending);
        order(mine[1], mine[3], descending);
        order(mine[0], mine[1], descending);
        order(mine[2], mine[3], descending);
    }
}

template <typename E, int D> struct stats_top : stats_position<stats_smem<stats_top<E, D>>> {
    typedef stats_position<stats_smem<stats_top>> base;
    using base::chunk, base::first, base::params, base::sequence, base::smem, base::sync, base::warpgroup;
    typedef E ELEMENT;
    static constexpr int DIM = D;
    static constexpr bool KEYS_ARE_ROWS = false, STRIDED = true, PIPELINED = true;
    static constexpr int PASSES = 2;

    /* Results of a warpgroup's queries. */
    struct shared {
        row_ranges<STATS_QUERIES> visible; /* keys of the sequence */
        uint64_t staged[4][SORTED];        /* candidates of a row of each warp, as stored */
    };

    /* State of the thread's two rows: */
    float maxima[2][8][4]; /* maxima of the groups, as the products of two stages */
    float threshold[2];    /* smaller products are no candidates */
    uint64_t end[2];       /* address of the next candidate */

    __device__ shared &rows() const
    {
        return smem.of_warpgroup[warpgroup];
    }

    /* One of the thread's two rows. */
    __device__ static int row(int half)
    {
        return (int)(threadIdx.x % 128 / 32 * 16 + threadIdx.x % 32 / 4) + half * 8;
    }

    /* A row's scratch, at a multiple of its size. */
    __device__ uint64_t *candidates(int of_row) const
    {
        const uint64_t begin = ((uint64_t)params.scratch + TOP_ROW - 1) / TOP_ROW * TOP_ROW;
        const uint64_t query = (uint64_t)blockIdx.x * STATS_TILE + (uint64_t)(warpgroup * STATS_QUERIES + of_row);
        return (uint64_t *)(begin + query * TOP_ROW);
    }

    /* Candidates of the thread's list of a row. */
    __device__ int count(int half) const
    {
        return (int)(end[half] % TOP_ROW) / TOP_ENTRY;
    }

    __device__ void set_count(int half, int to)
    {
        end[half] = end[half] / TOP_ROW * TOP_ROW + (uint64_t)(to * TOP_ENTRY) + threadIdx.x % 4 * 8;
    }

    __device__ void start_tile(const skl_band &band)
    {
        const int query = (int)(threadIdx.x % 128);
        if (query < STATS_QUERIES) {
            const skl_range none = {0, 0};
            const skl_range sees =
                first + query < sequence().query_count ? skl_band_range(&band, first + query) : none;
            rows().visible.ranges[query] = {(int)sees.begin, (int)sees.end};
        }
#pragma unroll
        for (int n = 0; n < 64; n++)
            maxima[n / 32][n / 4 % 8][n % 4] = -INFINITY;
#pragma unroll
        for (int half = 0; half < 2; half++) {
            end[half] = (uint64_t)candidates(row(half));
            set_count(half, 0);
        }
        sync();
    }

    __device__ int plain_until(int, int until) const
    {
        return until;
    }

    template <int PASS, int BUFFER> __device__ void add_stage(const stage_logits &x, int first_key)
    {
        const float above[2] = {threshold[0], threshold[1]};
#pragma unroll
        for (int n = 0; n < 8; n++)
#pragma unroll
            for (int e = 0; e < 4; e++) {
                float &largest = maxima[BUFFER][n][e];
                if (PASS == 0)
                    largest = fmaxf(largest, x[n][e]);
                else
                    append_above(above[e / 2], end[e / 2], x[n][e], first_key + acc_column(n, e % 2));
            }
    }

    template <int PASS> __device__ void add_masked(const stage_logits &x, int first_key)
    {
        const range32 sees[2] = {rows().visible.of(row(0)), rows().visible.of(row(1))};
#pragma unroll
        for (int n = 0; n < 8; n++)
#pragma unroll
            for (int e = 0; e < 4; e++) {
                const int key = first_key + acc_column(n, e % 2);
                const bool seen = key >= sees[e / 2].begin && key < sees[e / 2].end;
                float &largest = maxima[0][n][e];
                if (PASS == 0)
                    largest = fmaxf(largest, seen ? x[n][e] : -INFINITY);
                else
                    append_above(seen ? threshold[e / 2] : INFINITY, end[e / 2], x[n][e], key);
            }
        __syncwarp();
    }

    /* ---- Thresholds ----------------------------------------------------------------------------------------- */

    /* The maximum of one of the thread's 32 groups of a row. */
    __device__ float group(int half, int n) const
    {
        return maxima[n / 16][n / 2 % 8][half * 2 + n % 2];
    }

    /* Groups of a row whose maximum is above `limit`. */
    __device__ int groups_above(int half, float limit) const
    {
        int above = 0;
#pragma unroll
        for (int n = 0; n < 32; n++)
            above += group(half, n) > limit;
        above += __shfl_xor_sync(~0U, above, 1);
        return above + __shfl_xor_sync(~0U, above, 2);
    }

    /* Raises the thresholds by bisection, as long as k groups are above them; two more than k are close enough. A row
     * with fewer groups has no threshold. */
    __device__ void find_thresholds()
    {
        const int k = params.stats.top_k;
        float most[2], limit[2]; /* fewer than k groups are above `most`; `limit` is tried next */
        int above[2] = {};       /* groups above the threshold */
#pragma unroll
        for (int half = 0; half < 2; half++) {
            float smallest = INFINITY;
            most[half] = threshold[half] = -INFINITY;
#pragma unroll
            for (int n = 0; n < 32; n++) {
                const float maximum = group(half, n);
                most[half] = fmaxf(most[half], maximum);
                smallest = maximum > -INFINITY ? fminf(smallest, maximum) : smallest;
            }
            most[half] = quad_max(most[half]);
            smallest = -quad_max(-smallest);
            limit[half] = smallest - (fabsf(smallest) * 1e-6F + 1e-37F); /* below all groups */
        }
#pragma unroll 1
        for (int step = 0; step < 12; step++) {
#pragma unroll
            for (int half = 0; half < 2; half++) {
                const int of_limit = groups_above(half, limit[half]);
                const bool raises = of_limit >= k;
                threshold[half] = raises ? limit[half] : threshold[half];
                above[half] = raises ? of_limit : above[half];
                most[half] = raises ? most[half] : limit[half];
                limit[half] = 0.5F * threshold[half] + 0.5F * most[half];
            }
            if (__all_sync(~0U, above[0] <= k + 2 && above[1] <= k + 2))
                break;
        }
    }

    template <int PASS> __device__ void end_pass()
    {
        if constexpr (PASS == 0)
            find_thresholds();
    }

    /* ---- Candidates ----------------------------------------------------------------------------------------- */

    /* The counts of a row's lists. Lanes 4 n .. 4 n + 3 have the lists of rows n and n + 8 of the warp. */
    __device__ int4 counts_of(int of_row) const
    {
        const int mine = of_row < 8 ? count(0) : count(1), lane = of_row % 8 * 4;
        return {__shfl_sync(~0U, mine, lane), __shfl_sync(~0U, mine, lane + 1), __shfl_sync(~0U, mine, lane + 2),
                __shfl_sync(~0U, mine, lane + 3)};
    }

    /* Stored are the key and the value. */
    static constexpr uint64_t NO_CANDIDATE = (uint64_t)0xFF800000 << 32; /* -inf */

    __device__ static float stored_value(uint64_t stored)
    {
        return __uint_as_float((uint32_t)(stored >> 32));
    }

    __device__ static uint64_t candidate_of_stored(uint64_t stored)
    {
        return candidate_of(stored_value(stored), (int)(uint32_t)stored);
    }

    __device__ static uint64_t stored_of(uint64_t candidate)
    {
        return (uint64_t)__float_as_uint(candidate_value(candidate)) << 32 | (uint32_t)candidate_key(candidate);
    }

    __device__ static int total(const int4 &counts)
    {
        return counts.x + counts.y + counts.z + counts.w;
    }

    __device__ static int longest(const int4 &counts)
    {
        return max(max(counts.x, counts.y), max(counts.z, counts.w));
    }

    /* The length of the lists that this lane reads. */
    __device__ static int of_list(const int4 &counts)
    {
        const unsigned list = threadIdx.x % 4;
        return list == 0 ? counts.x : list == 1 ? counts.y : list == 2 ? counts.z : counts.w;
    }

    /* Keeps the k largest candidates of a row of the warp in lists of equal length. If there are more, the threshold
     * rises to the smallest of them. */
    __device__ void keep_largest_of(int of_row)
    {
        constexpr int MOST = TOP_LIST * 4 / 32;
        const int lane = (int)(threadIdx.x % 32), k = params.stats.top_k;
        uint64_t *const of = candidates(row_of_warp(of_row));
        const int4 counts = counts_of(of_row);
        const bool raises = total(counts) > k;
        const int length = of_list(counts);
        uint64_t mine[MOST];
        __syncwarp(); /* lanes read the lists of others */
#pragma unroll
        for (int n = 0; n < MOST; n++)
            mine[n] = n * 8 + lane / 4 < length ? candidate_of_stored(of[n * 32 + lane]) : 0;
        const uint64_t kth = raises ? kth_largest(mine, k) : 1;
        __syncwarp(); /* all lanes have read the list that they overwrite */
        int kept = 0;
#pragma unroll
        for (int n = 0; n < MOST; n++) {
            const unsigned lanes = __ballot_sync(~0U, mine[n] >= kth);
            if (mine[n] >= kth)
                of[kept + __popc(lanes & ((1U << lane) - 1))] = stored_of(mine[n]);
            kept += __popc(lanes);
        }
#pragma unroll
        for (int half = 0; half < 2; half++) {
            if (lane / 4 + half * 8 != of_row)
                continue;
            set_count(half, (kept + 3 - lane % 4) / 4);
            threshold[half] = raises ? candidate_value(kth) : threshold[half];
        }
        __syncwarp();
    }

    __device__ static int row_of_warp(int of_row)
    {
        return (int)(threadIdx.x % 128 / 32) * 16 + of_row;
    }

    /* Makes room in rows whose list a stage could fill: the address of a full list would be that of an empty one. */
    template <int PASS> __device__ void make_room()
    {
        constexpr int LIMIT = TOP_LIST - STAGE_KEYS / 4;
        if constexpr (PASS == 1) {
            if (!__any_sync(~0U, count(0) >= LIMIT || count(1) >= LIMIT))
                return;
#pragma unroll 1
            for (int of_row = 0; of_row < 16; of_row++) {
                const int4 counts = counts_of(of_row);
                if (longest(counts) >= LIMIT)
                    keep_largest_of(of_row);
            }
        }
    }

    /* ---- Results -------------------------------------------------------------------------------------------- */

    __device__ void store(int64_t query, float lse2, const uint64_t (&sorted)[4], int count) const
    {
        const skl_stats &stats = params.stats;
        const skl_sequence &s = sequence();
        const int64_t head = chunk().head;
        const int at = (int)(threadIdx.x % 32) * 4;
        float logits[4];
#pragma unroll
        for (int n = 0; n < 4; n++)
            logits[n] = stored_value(sorted[n]) * params.b.scale;
        if (params.b.capped)
#pragma unroll
            for (int n = 0; n < 4; n++)
                logits[n] = exact_logit(stored_value(sorted[n]), params.b);
        if (stats.top_keys.data != NULL) {
            const int64_t to = SKL_ROW(stats.top_keys, s.batch, head, s.query_begin + query) + at;
#pragma unroll
            for (int n = 0; n < 4; n++)
                if (at + n < stats.top_k)
                    ((int32_t *)stats.top_keys.data)[to + n] = at + n < count ? (int)(uint32_t)sorted[n] : -1;
        }
        if (stats.top_p.data != NULL) {
            const int64_t to = SKL_ROW(stats.top_p, s.batch, head, s.query_begin + query) + at;
#pragma unroll
            for (int n = 0; n < 4; n++) {
                const float p = at + n < count ? at_most_1(exp2f(logits[n] - lse2)) : 0.0F;
                if (at + n < stats.top_k)
                    ((float *)stats.top_p.data)[to + n] = p;
            }
        }
    }

    /* The number-th candidate of a row, through all of its lists. */
    __device__ static uint64_t candidate_at(const uint64_t *of_row, const int4 &counts, int number)
    {
        const int ends[3] = {counts.x, counts.x + counts.y, counts.x + counts.y + counts.z};
        const int list = (number >= ends[0]) + (number >= ends[1]) + (number >= ends[2]);
        const int begin = list == 0 ? 0 : list == 1 ? ends[0] : list == 2 ? ends[1] : ends[2];
        return number < total(counts) ? of_row[(number - begin) * 4 + list] : NO_CANDIDATE;
    }

    /* Four candidates of a row for each lane, as stored. Where no list is longer than what a warp reads of it, that
     * is the same memory for all rows. */
    __device__ void load_row(uint64_t (&mine)[4], int of_row) const
    {
        const uint64_t *const of = candidates(row_of_warp(of_row));
        const int4 counts = counts_of(of_row);
        const int lane = (int)(threadIdx.x % 32), length = of_list(counts);
        if (longest(counts) > SORTED / 4) {
#pragma unroll
            for (int n = 0; n < 4; n++)
                mine[n] = candidate_at(of, counts, n * 32 + lane);
            return;
        }
#pragma unroll
        for (int n = 0; n < 4; n++)
            mine[n] = n * 8 + lane / 4 < length ? of[n * 32 + lane] : NO_CANDIDATE;
    }

    /* A number for each candidate of a row, and its place n 32 + lane in the last bits. A candidate's number is its
     * distance from the smallest one, in bit patterns; up to 2^25 of them are exact, which are four octaves. */
    __device__ static void number_row(uint32_t (&numbers)[4], const uint64_t (&mine)[4])
    {
        uint32_t ordered[4], least = ~0U, most = 0;
#pragma unroll
        for (int n = 0; n < 4; n++) {
            const bool exists = mine[n] != NO_CANDIDATE;
            ordered[n] = exists ? (uint32_t)(candidate_of_stored(mine[n]) >> 32) : 0;
            least = min(least, exists ? ordered[n] : ~0U);
            most = max(most, ordered[n]);
        }
        least = __reduce_min_sync(~0U, least);
        most = __reduce_max_sync(~0U, most);
        const int shift = max(0, 32 - __clz((int)(most - least + 1)) - 25);
#pragma unroll
        for (int n = 0; n < 4; n++) {
            const uint32_t number = ordered[n] != 0 ? ((ordered[n] - least) >> shift) + 1 : 0;
            numbers[n] = min(number, (1U << 25) - 1) * SORTED + (uint32_t)n * 32 + threadIdx.x % 32;
        }
    }

    /* Sorts a row that load_row() returned: afterwards lane n has candidates 4 n .. 4 n + 3. Numbers of 32 bits are
     * sorted in a quarter of the time of candidates, which are sorted where the numbers were too short. */
    __device__ void sort_row(uint64_t (&mine)[4]) const
    {
        const int lane = (int)(threadIdx.x % 32);
        uint64_t(&staged)[SORTED] = rows().staged[threadIdx.x % 128 / 32];
        uint32_t numbers[4];
        number_row(numbers, mine);
        __syncwarp(); /* lanes have read the row before */
#pragma unroll
        for (int n = 0; n < 4; n++)
            staged[n * 32 + lane] = mine[n];
        __syncwarp();
        sort_numbers<6>(numbers);
#pragma unroll
        for (int n = 0; n < 4; n++)
            mine[n] = staged[numbers[n] % SORTED];
        const float next = __shfl_down_sync(~0U, stored_value(mine[0]), 1);
        bool ordered = lane == 31 || stored_value(mine[3]) >= next;
#pragma unroll
        for (int n = 1; n < 4; n++)
            ordered = ordered && stored_value(mine[n - 1]) >= stored_value(mine[n]);
        if (__all_sync(~0U, ordered))
            return;
#pragma unroll
        for (uint64_t &candidate : mine)
            candidate = candidate_of_stored(candidate);
        sort_numbers<1>(mine);
#pragma unroll
        for (uint64_t &candidate : mine)
            candidate = stored_of(candidate);
    }

    /* Loads a row while the two before are sorted. */
    __device__ void finish_tile()
    {
        const int lane = (int)(threadIdx.x % 32);
        const int64_t begin = first + row_of_warp(0), left = sequence().query_count - begin;
        const int count = (int)skl_max(0, skl_min(16, left));
        const float lse2 = lane < count ? stats_lse2(params, sequence(), chunk().head, begin + lane) : 0.0F;
#pragma unroll 1
        for (int of_row = 0; of_row < count; of_row++)
            if (total(counts_of(of_row)) > SORTED)
                keep_largest_of(of_row);
        __syncwarp(); /* lanes read the lists of others */
        uint64_t next[2][4];
        load_row(next[0], 0);
        load_row(next[1], 1);
#pragma unroll 1
        for (int of_row = 0; of_row < count; of_row++) {
            uint64_t mine[4];
#pragma unroll
            for (int n = 0; n < 4; n++) {
                mine[n] = next[0][n];
                next[0][n] = next[1][n];
            }
            load_row(next[1], min(of_row + 2, 15));
            sort_row(mine);
            store(begin + of_row, __shfl_sync(~0U, lse2, of_row), mine, total(counts_of(of_row)));
        }
        sync(); /* start_tile() overwrites what was read */
    }
};

template <typename ELEMENT>
cudaError_t launch_top(const char *kernel, const skl_cuda_params *params, const skl_cuda_launch *launch)
{
    record_launch(kernel, SKL_VARIANT_STATS_TOP, 1);
    const stats_params of = stats_params_of(params, launch);
    return of.b.dim <= 64    ? launch_stats_blocks<stats_top<ELEMENT, 64>>(of)
           : of.b.dim <= 128 ? launch_stats_blocks<stats_top<ELEMENT, 128>>(of)
                             : launch_stats_blocks<stats_top<ELEMENT, 256>>(of);
}

} // namespace sm90

#endif
