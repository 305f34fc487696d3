/* Top keys of rows. A row collects candidates above a threshold, the k-th largest of those before. When its buffer
 * may overflow, a warp keeps the k largest and raises the threshold; in random order that happens about log(len_k)
 * times. Candidates are ordered by a value that grows with P, a logit or a product. */
#ifndef SKL_CUDA_COMMON_STATS_TOP_CUH
#define SKL_CUDA_COMMON_STATS_TOP_CUH

#include "cuda/common/stats.cuh"

namespace tensor_core
{

constexpr int TOP_CANDIDATES = SKL_STATS_TOP_CANDIDATES; /* maximum number per row */
constexpr int LANE_CANDIDATES = TOP_CANDIDATES / 32;

/* A candidate as a number: larger values first, then smaller keys. */
__device__ inline uint64_t candidate_of(float value, int key)
{
    const uint32_t bits = __float_as_uint(value), ordered = bits & 0x80000000U ? ~bits : bits | 0x80000000U;
    return (uint64_t)ordered << 32 | (uint32_t)~key;
}

__device__ inline int candidate_key(uint64_t candidate)
{
    return (int)~(uint32_t)candidate;
}

__device__ inline float candidate_value(uint64_t candidate)
{
    const uint32_t ordered = (uint32_t)(candidate >> 32);
    return __uint_as_float(ordered & 0x80000000U ? ordered & 0x7FFFFFFFU : ~ordered);
}

/* The k-th largest of a warp's candidates, by bisection; there are at least k, and 0 stands for none. */
template <int COUNT> __device__ inline uint64_t kth_largest(const uint64_t (&mine)[COUNT], int k)
{
    uint64_t kth = 0;
#pragma unroll 1
    for (int bit = 63; bit >= 0; bit--) {
        const uint64_t next = kth | (uint64_t)1 << bit;
        int at_least = 0;
#pragma unroll
        for (int n = 0; n < COUNT; n++)
            at_least += mine[n] >= next;
        at_least = __reduce_add_sync(~0U, at_least);
        if (at_least >= k)
            kth = next;
        if (at_least == k)
            break;
    }
    return kth;
}

/* Keeps the k largest of a row's candidates. Executed by a warp. Returns how many there are. */
__device__ inline int keep_largest(uint64_t *candidates, int count, int k, float &threshold)
{
    if (count <= k)
        return count;
    const int lane = (int)(threadIdx.x % 32);
    uint64_t mine[LANE_CANDIDATES];
#pragma unroll
    for (int n = 0; n < LANE_CANDIDATES; n++)
        mine[n] = n * 32 + lane < count ? candidates[n * 32 + lane] : 0;
    const uint64_t kth = kth_largest(mine, k);
    int kept = 0;
    float smallest = INFINITY;
#pragma unroll
    for (int n = 0; n < LANE_CANDIDATES; n++) {
        const bool keeps = mine[n] >= kth;
        const unsigned lanes = __ballot_sync(~0U, keeps);
        if (keeps) {
            candidates[kept + __popc(lanes & ((1U << lane) - 1))] = mine[n];
            smallest = fminf(smallest, candidate_value(mine[n]));
        }
        kept += __popc(lanes);
    }
#pragma unroll
    for (int offset = 16; offset > 0; offset /= 2)
        smallest = fminf(smallest, __shfl_xor_sync(~0U, smallest, offset));
    threshold = smallest;
    __syncwarp();
    return kept;
}

/* Writes the top keys of a row, which are its candidates. Executed by a warp. probability(value): P of a candidate.
 */
template <typename PROBABILITY>
__device__ inline void write_top(const stats_params &params, const skl_sequence &s, int64_t head, int64_t query,
                                 const uint64_t *candidates, int count, PROBABILITY probability)
{
    const skl_stats &stats = params.stats;
    const int lane = (int)(threadIdx.x % 32);
    uint64_t mine[2];
    int rank[2] = {};
#pragma unroll
    for (int n = 0; n < 2; n++)
        mine[n] = n * 32 + lane < count ? candidates[n * 32 + lane] : 0;
#pragma unroll 1
    for (int other = 0; other < count; other++) {
        const uint64_t value = __shfl_sync(~0U, other < 32 ? mine[0] : mine[1], other % 32);
        rank[0] += value > mine[0];
        rank[1] += value > mine[1];
    }
    const int64_t keys = SKL_ROW(stats.top_keys, s.batch, head, s.query_begin + query);
    const int64_t probabilities = SKL_ROW(stats.top_p, s.batch, head, s.query_begin + query);
#pragma unroll
    for (int n = 0; n < 2; n++) {
        const bool exists = n * 32 + lane < count;
        const int at = exists ? rank[n] : n * 32 + lane;
        if (at < stats.top_k && stats.top_keys.data != NULL)
            ((int32_t *)stats.top_keys.data)[keys + at] = exists ? candidate_key(mine[n]) : -1;
        if (at < stats.top_k && stats.top_p.data != NULL)
            ((float *)stats.top_p.data)[probabilities + at] =
                exists ? at_most_1(probability(candidate_value(mine[n]))) : 0.0F;
    }
}

} // namespace tensor_core

#endif
