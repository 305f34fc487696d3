/* Which heads are processed together so that their keys stay in the L2 cache (L2 swizzle). */
#ifndef SKL_CUDA_SM90_ATTENTION_HEAD_GROUP_CUH
#define SKL_CUDA_SM90_ATTENTION_HEAD_GROUP_CUH

#include "cuda/launch.h"

namespace sm90
{

/* No causal mask and no window: tiles differ in length by their sequences at most. */
inline bool without_window(const skl_problem *p)
{
    return skl_is_unlimited(p->window_left) && skl_is_unlimited(p->window_right);
}

inline int64_t query_tiles(const skl_problem *p, int64_t tile_rows)
{
    return p->batch * p->heads_s * skl_ceil_div(p->len_q, tile_rows);
}

/* Size of a head group: the number of heads whose streamed data (keys, and dk sums that are added to) fill half of
 * the L2 cache. With more heads at once every wave of tiles reads the keys from memory again, and reads and writes
 * the sums there.
 *
 * Under a mask tiles differ in length, and each head group processes its longest tiles first, so the last group ends
 * late. There is more than one group only where the longest tile is a small part of an SM's work.
 *
 * `bytes_a`, `bytes_b`: streamed bytes per key and dimension of each argument. */
inline int32_t head_group_for(const skl_cuda_params *params, int64_t tile_rows, int64_t bytes_a, int64_t bytes_b)
{
    constexpr int64_t L2_SHARE = (int64_t)25 << 20, SMALL_PART = 32;
    const skl_problem *const p = &params->problem;
    if (!without_window(p) && query_tiles(p, tile_rows) < 2 * SMALL_PART * params->sm_count)
        return SKL_HEAD_GROUP_MAX;
    const int64_t size_a = p->len_k * params->a.dim * bytes_a, size_b = p->len_k * params->b.dim * bytes_b;
    const int64_t a_head = size_a / params->a.heads_per_key + size_b / params->b.heads_per_key;
    return (int32_t)skl_max(1, skl_min(SKL_HEAD_GROUP_MAX, L2_SHARE / skl_max(1, a_head)));
}

} // namespace sm90

#endif
