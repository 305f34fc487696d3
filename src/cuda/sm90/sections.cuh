/* Which heads are done together, and what launches ask about tiles. */
#ifndef SKL_CUDA_SM90_SECTIONS_CUH
#define SKL_CUDA_SM90_SECTIONS_CUH

#include "cuda/launch.h"

namespace sm90
{

/* Neither side of a query's window ends: tiles may differ in their rows and sequences, not by a mask. */
inline bool without_window(const skl_problem *p)
{
    return skl_is_unlimited(p->window_left) && skl_is_unlimited(p->window_right);
}

inline int64_t query_tiles(const skl_problem *p, int64_t tile_rows)
{
    return p->batch * p->heads_s * skl_ceil_div(p->len_q, tile_rows);
}

/* Heads whose keys, and what else is streamed with them, fill half of the L2 cache: with more of them at once it
 * comes through memory again for every wave of tiles, and sums that are added to are read and written there. But
 * where tiles differ in length, each section has its longest ones first: only where the longest tile is a small part
 * of all that a multiprocessor does may there be more than one section.
 *
 * `bytes_a`, `bytes_b`: of an element of an argument's keys, and of what else there is for it. */
inline int32_t section_for(const skl_cuda_params *params, int64_t tile_rows, int64_t bytes_a, int64_t bytes_b)
{
    constexpr int64_t L2_SHARE = (int64_t)25 << 20, SMALL_PART = 32;
    const skl_problem *const p = &params->problem;
    if (!without_window(p) && query_tiles(p, tile_rows) < 2 * SMALL_PART * params->multiprocessors)
        return SKL_SECTION_MAX;
    const int64_t size_a = p->len_k * params->one.dim * bytes_a, size_b = p->len_k * params->two.dim * bytes_b;
    const int64_t a_head = size_a / params->one.heads_per_key + size_b / params->two.heads_per_key;
    return (int32_t)skl_max(1, skl_min(SKL_SECTION_MAX, L2_SHARE / skl_max(1, a_head)));
}

} // namespace sm90

#endif
