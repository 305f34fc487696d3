/* The kernels of attention statistics share parameters, the tiles of a block, and the results of a row.
 *
 * The tiles of a kernel are queries. Sums of keys therefore cross tiles: a block owns a chunk of the tiles of a head,
 * processes them in order, and adds to a slot of key sums that no other block adds to. A later launch adds the slots.
 * So all sums have one order, and their memory is O(len_k). */
#ifndef SKL_CUDA_COMMON_STATS_CUH
#define SKL_CUDA_COMMON_STATS_CUH

#include "base/stats.h"
#include "cuda/common/row_stats.cuh"

struct stats_params : skl_cuda_params {
    skl_stats stats;         /* in the constant bank: call.stats is a host address */
    skl_stats_layout layout; /* results of the launch, and its part of the workspace */
    skl_input lse;           /* given, or of an earlier launch; it includes the sink */
    float *key_slots;        /* [head][slot][slot_stride], keys of all sequences: sums of w P over some queries */
    float *head_sums;        /* [sequence][head][chunk][2][SKL_STATS_SUMS]: sums by distance, and by range */
    unsigned char *scratch;  /* [block][query of a tile][layout.scratch_size] */
};

stats_params stats_params_of(const skl_cuda_params *params, const skl_cuda_launch *launch);

namespace tensor_core
{

constexpr int STATS_KEYS = SKL_STATS_STAGE_KEYS; /* keys of a stage */
constexpr float STATS_MASKED_LOGIT = -3e38F;     /* P = 0, and P log P = 0 */

/* The chunk of a block: every `chunks`-th query tile of a head of a sequence. Rounds alternate in direction, so that
 * the chunks of a causal mask have the same work. */
struct stats_chunk {
    skl_sequence sequence;
    int64_t number; /* number of the sequence */
    int head, chunk, chunks;
    int tile_rows, tiles, first_tile; /* query tiles of the sequence */

    /* False: the chunk has no tile. */
    __device__ bool find(const stats_params &params, int64_t of_sequence, int of_head, int of_chunk, int rows_of_tile)
    {
        number = of_sequence;
        sequence = device_sequence(params, number);
        chunks = params.layout.chunks;
        head = of_head;
        chunk = of_chunk;
        tile_rows = rows_of_tile;
        const skl_range all = {0, sequence.query_count};
        const bool only_sums = (params.layout.results & SKL_STATS_OF_EVERY_ROW) == 0;
        const skl_range rows = only_sums ? skl_stats_rows(&params.stats, sequence.query_count) : all;
        first_tile = (int)(rows.begin / tile_rows);
        tiles = rows.begin < rows.end ? (int)skl_ceil_div(rows.end, tile_rows) - first_tile : 0;
        return chunk < tiles;
    }

    __device__ int rounds() const
    {
        return (tiles + chunks - 1) / chunks;
    }

    /* First query of the chunk's tile in a round; -1: it has none. Under a causal mask the last round, which may be
     * incomplete, has the shortest tiles. */
    __device__ int first_query(int round) const
    {
        const int number = round * chunks + (round % 2 == 0 ? chunk : chunks - 1 - chunk);
        return number < tiles ? (first_tile + tiles - 1 - number) * tile_rows : -1;
    }

    /* Stages of keys that a row of [first, first + count) sees. */
    __device__ range32 stages(const skl_band &band, int first, int count) const
    {
        const int64_t last = skl_min((int64_t)first + count, sequence.query_count) - 1;
        if (last < first)
            return {0, 0};
        const int64_t begin = skl_band_range(&band, first).begin, end = skl_band_range(&band, last).end;
        const int first_stage = (int)(begin / STATS_KEYS);
        return {first_stage, end > begin ? (int)skl_ceil_div(end, STATS_KEYS) : first_stage};
    }

    /* Key sums of the sequence in a slot; NULL: they are not wanted. A stage may reach beyond the sequence, where it
     * adds zeros. */
    __device__ float *slot(const stats_params &params, int index) const
    {
        const int64_t first_key = params.problem.packed ? sequence.key_begin : number * params.problem.len_k;
        return (params.layout.results & SKL_STATS_KEY_SUM) == 0
                   ? NULL
                   : params.key_slots + ((int64_t)head * params.layout.slots + index) * params.layout.slot_stride +
                         first_key;
    }
};

/* The weight of a row in sums over rows, 0 if it sees no key. */
__device__ inline float row_weight(const stats_params &params, const skl_sequence &s, int64_t head, int64_t query,
                                   bool empty)
{
    const skl_range rows = skl_stats_rows(&params.stats, s.query_count);
    if (empty || query < rows.begin || query >= rows.end)
        return 0.0F;
    return params.stats.row_weights.data != NULL ? skl_row_value(&params.stats.row_weights, &s, head, query) : 1.0F;
}

/* The LSE of a row in base 2, rounded once. */
__device__ inline float stats_lse2(const stats_params &params, const skl_sequence &s, int64_t head, int64_t query)
{
    return skl_lse2_of(skl_row_value(&params.lse, &s, head, query)).value;
}

/* Sums over the visible keys of a row, in base 2. */
struct row_totals {
    float entropy;  /* sum P log2 P */
    float distance; /* sum P d */
    float max_logit;
};

/* A probability as it is written: an LSE may have been rounded to a number below a logit. NaN stays. */
__device__ inline float at_most_1(float p)
{
    return p > 1.0F ? 1.0F : p;
}

/* Raises a maximum in memory. As integers, floats that are not negative have their order, and others the reverse. */
__device__ inline void raise(float *to, float value)
{
    if (__float_as_int(value) >= 0)
        atomicMax((int *)(void *)to, __float_as_int(value));
    else
        atomicMin((unsigned *)(void *)to, __float_as_uint(value));
}

/* Writes the results of a row. `sees`: its keys; lse2: its LSE in base 2. */
__device__ inline void write_stats_row(const stats_params &params, const stats_chunk &chunk, int64_t query,
                                       const range32 &sees, float lse2, const row_totals &row)
{
    const skl_stats &stats = params.stats;
    const skl_sequence &s = chunk.sequence;
    const int64_t head = chunk.head;
    const uint32_t results = params.layout.results;
    const bool empty = sees.begin >= sees.end;
    const float max_logit = empty ? -INFINITY : (float)((double)row.max_logit * SKL_LN2_DOUBLE);
    if (results & SKL_STATS_ENTROPY) {
        const float sink = params.problem.sinks ? params.call.inputs.sink_s[head] * SKL_LOG2E - lse2 : -INFINITY;
        const float of_sink = sink > -126.0F ? exp2f(sink) * sink : 0.0F;
        const float entropy = -(row.entropy + of_sink) * SKL_LN2;
        skl_row_set(&stats.entropy, &s, head, query, empty ? 0.0F : skl_kl_report(entropy));
    }
    if (results & SKL_STATS_EXPECTED_DISTANCE)
        skl_row_set(&stats.expected_distance, &s, head, query, empty ? 0.0F : row.distance);
    if (results & SKL_STATS_MAX_LOGIT)
        skl_row_set(&stats.max_logit, &s, head, query, max_logit);
    if (results & SKL_STATS_HEAD_MAX_LOGIT && row_weight(params, s, head, query, empty) != 0.0F)
        raise(&stats.head_max_logit[chunk.number * params.problem.heads_s + head], max_logit);
}

/* Raises the maximum of a key. */
__device__ inline void raise_key(const stats_params &params, const skl_sequence &s, int64_t head, int64_t key,
                                 float p)
{
    const skl_output &out = params.stats.key_max;
    const int64_t out_head = params.stats.per_key_head ? head / params.b.heads_per_key : head;
    if (p > 0.0F)
        raise((float *)out.data + SKL_ROW(out, s.batch, out_head, s.key_begin + key), at_most_1(p));
}

} // namespace tensor_core

#endif
