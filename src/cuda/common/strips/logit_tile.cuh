/* A tile of logits after the products: heads are summed, rows reduced, and differences G (strip.cuh) stored.
 *
 * Tiles have the accumulator layout of mma m16n8: a thread holds two rows and two of every 8 columns, of 8 N. */
#ifndef SKL_CUDA_COMMON_STRIPS_LOGIT_TILE_CUH
#define SKL_CUDA_COMMON_STRIPS_LOGIT_TILE_CUH

#include "base/convert.h"
#include "cuda/common/strips/strip.cuh"
#include "cuda/common/row_stats.cuh"

/* Weight of attention heads. In a namespace its name would contain a hash of the source's path, and the library would
 * depend on where it was built. */
static __device__ const float skl_unit_weight = 1.0F;

namespace tensor_core
{

/* ---- Sum over heads ----------------------------------------------------------------------------------------- */

/* max(x, least) that propagates NaN. */
__device__ inline float at_least(float x, float least)
{
    float y;
    asm("max.NaN.f32 %0, %1, %2;" : "=f"(y) : "f"(x), "f"(least));
    return y;
}

/* head_weight and head_lse read one value of a row per head. They load a head ahead of its use. The raw bits are
 * converted only after the products have been issued, because a warp that waits for a load issues none. */
struct head_weight {
    const char *next_head;
    int64_t size;
    skl_dtype dtype;

    typedef uint32_t raw;

    __device__ raw load() const
    {
        return dtype == SKL_F32 ? *(const uint32_t *)(const void *)next_head
                                : *(const uint16_t *)(const void *)next_head;
    }

    __device__ void next()
    {
        next_head += size;
    }

    __device__ float value(raw bits) const
    {
        return dtype == SKL_F32    ? __uint_as_float(bits)
               : dtype == SKL_BF16 ? __uint_as_float(bits << 16)
                                   : skl_from_f16((uint16_t)bits);
    }
};

/* An LSE in base 2: 2^(x - lse) / heads = 2^(x - high) * factor. The factor holds the rounding error of `high`, and
 * the 1 / heads of the mean. */
struct split_lse {
    float high, factor;
};

struct head_lse {
    const float *next_head;
    int64_t stride;
    float mean; /* 1 / heads */

    typedef float raw;

    __device__ raw load() const
    {
        return *next_head;
    }

    __device__ void next()
    {
        next_head += stride;
    }

    __device__ split_lse value(float lse) const
    {
        const skl_lse2 lse2 = split_lse2(lse);
        return {lse2.value, fmaf(-lse2.low * SKL_LN2, mean, mean)};
    }
};

__device__ inline head_lse lse_of(const strip_params &params, const query_slot &slot, int first_head, int64_t query)
{
    const skl_input &lse = params.call.inputs.lse_t;
    if (lse.data == NULL)
        return {NULL, 0, 0.0F};
    return {(const float *)lse.data +
                SKL_ROW(lse, slot.sequence.batch, first_head, slot.sequence.query_begin + query),
            lse.stride_head, 1.0F / (float)skl_group_size(&params.problem)};
}

__device__ inline head_weight weight_of(const strip_params &params, const query_slot &slot, int64_t query)
{
    const skl_input &w = params.call.inputs.w_s;
    const skl_dtype dtype = params.problem.dtype_w;
    if (w.data == NULL)
        return {(const char *)&skl_unit_weight, 0, SKL_F32};
    const int64_t size = (int64_t)skl_dtype_size(dtype);
    return {(const char *)w.data +
                SKL_ROW(w, slot.sequence.batch, slot.head, slot.sequence.query_begin + query) * size,
            size, dtype};
}

/* P from heads: P += 2^(X - lse_h) / heads. */
struct mean_of_heads {
    float scale;

    __device__ float operator()(float sum, float x, const split_lse &lse) const
    {
        return fmaf(ex2(fmaf(x, scale, -lse.high)), lse.factor, sum);
    }
};

/* The student's logits from index heads: Y += w_g max(X, least). */
struct index_sum {
    float least;

    __device__ float operator()(float sum, float x, float weight) const
    {
        return fmaf(weight, at_least(x, least), sum);
    }
};

/* ---- LSEs --------------------------------------------------------------------------------------------------- */

/* Maximum and sum over the thread's columns of a row. */
struct lse_row {
    float m, l;

    __device__ void move(float to)
    {
        l = l == 0.0F ? 0.0F : l * ex2(m - to);
        m = to;
    }
};

__device__ inline lse_row merge_rows(lse_row a, lse_row b)
{
    const float m = fmaxf(a.m, b.m);
    a.move(m);
    b.move(m);
    return {m, a.l + b.l};
}

/* Sum of 2^(x - m) over the thread's columns of a row. HUGE: as for minus_shift. */
template <bool HUGE, int N, typename SEES>
__device__ inline float sum_exponentials(const float (&x)[N][4], float scale, float m, int half, SEES sees)
{
    float sum = 0.0F;
#pragma unroll
    for (int n = 0; n < N; n++)
#pragma unroll
        for (int parity = 0; parity < 2; parity++)
            sum +=
                sees(half, acc_column(n, parity)) ? ex2(minus_shift(x[n][half * 2 + parity], scale, m, HUGE)) : 0.0F;
    return sum;
}

/* Adds a tile of logits to one of the thread's rows. sees(half, column) says whether the row attends to the key. */
template <int N, typename SEES>
__device__ inline void add_logits(lse_row &row, const float (&x)[N][4], float scale, int half, SEES sees)
{
    float m = row.m;
#pragma unroll
    for (int n = 0; n < N; n++)
#pragma unroll
        for (int parity = 0; parity < 2; parity++)
            m = sees(half, acc_column(n, parity)) ? fmaxf(m, x[n][half * 2 + parity] * scale) : m;
    row.move(m);
    row.l += is_huge(m) && m > -INFINITY ? sum_exponentials<true>(x, scale, m, half, sees)
                                         : sum_exponentials<false>(x, scale, m, half, sees);
}

/* Adds a tile to both of the thread's rows. */
template <int N, typename SEES>
__device__ inline void add_tile(lse_row (&rows)[2], const float (&x)[N][4], float scale, SEES sees)
{
#pragma unroll
    for (int half = 0; half < 2; half++)
        add_logits(rows[half], x, scale, half, sees);
}

/* Adds a tile to both rows, each with a range of visible keys, or a full tile (not MASKED). */
template <bool MASKED, int N>
__device__ inline void add_tile(lse_row (&rows)[2], const float (&x)[N][4], float scale, const range32 (&sees)[2])
{
    add_tile(rows, x, scale, [&](int half, int column) {
        return !MASKED || (column >= sees[half].begin && column < sees[half].end);
    });
}

/* Merges the four lanes that hold a row; each of them gets the result. */
__device__ inline lse_row merge_lanes(const lse_row &row)
{
    float m = row.m;
    m = fmaxf(m, __shfl_xor_sync(~0U, m, 1));
    m = fmaxf(m, __shfl_xor_sync(~0U, m, 2));
    lse_row moved = row;
    moved.move(m);
    moved.l += __shfl_xor_sync(~0U, moved.l, 1);
    moved.l += __shfl_xor_sync(~0U, moved.l, 2);
    return moved;
}

/* The LSE of a query of a teacher head's slot, with its sink. */
__device__ inline float lse_of_lanes(const strip_params &params, const query_slot &slot, int row,
                                     const lse_row &of_lane)
{
    lse_row merged = merge_lanes(of_lane);
    if (row < slot.count && has_sink(params.problem, slot.sequence, slot.first + row)) {
        const sink_term sink(params.call.inputs.sink_t[slot.head]);
        merged = merge_rows(merged, {sink.m, sink.l});
    }
    return skl_lse(merged.m, merged.l);
}

/* ---- Rows and G --------------------------------------------------------------------------------------------- */

/* Shifts of a row's logits: of the teacher and of the student. */
struct row_shifts {
    float t, s;
};

/* Sums the thread's pairs of a row in a tile. The LSE of the student's logits is not known yet, so each side has its
 * own shift, shifts(largest log2 P, largest logit); equal distributions still cancel. `reverse`: A is the student. */
template <int N, typename SHIFTS>
__device__ inline index_row sum_pairs(const float (&log_p)[N][4], const float (&y)[N][4], float scale, int half,
                                      const range32 &sees, bool reverse, SHIFTS shifts)
{
    float max_t = -INFINITY, max_s = -INFINITY;
    bool any = false;
#pragma unroll
    for (int n = 0; n < N; n++)
#pragma unroll
        for (int parity = 0; parity < 2; parity++) {
            const bool seen = acc_column(n, parity) >= sees.begin && acc_column(n, parity) < sees.end;
            max_t = seen ? fmaxf(max_t, log_p[n][half * 2 + parity]) : max_t;
            max_s = seen ? fmaxf(max_s, y[n][half * 2 + parity] * scale) : max_s;
            any = any || seen;
        }
    if (!any)
        return {skl_state_empty(), 0.0F};
    const row_shifts shift = shifts(max_t, max_s);
    const bool huge = is_huge(shift.s);
    float l_t = 0.0F, l_s = 0.0F, w = 0.0F, p_log_p = 0.0F;
#pragma unroll
    for (int n = 0; n < N; n++)
#pragma unroll
        for (int parity = 0; parity < 2; parity++) {
            const float of_t = log_p[n][half * 2 + parity] - shift.t, p = ex2(of_t);
            const float of_s = minus_shift(y[n][half * 2 + parity], scale, shift.s, huge);
            if (acc_column(n, parity) < sees.begin || acc_column(n, parity) >= sees.end)
                continue;
            const float s = ex2(of_s);
            l_t += p;
            l_s += s;
            w = reverse ? fmaf(s, of_s - of_t, w) : fmaf(p, of_t - of_s, w);
            p_log_p = fmaf(p, of_t, p_log_p);
        }
    if (reverse)
        return {{shift.s, l_s, shift.t, l_t, w}, p_log_p};
    return {{shift.t, l_t, shift.s, l_s, w}, p_log_p};
}

/* Sums a row from P, which becomes log2 P; NaN stays NaN. */
template <int N>
__device__ inline index_row sum_probabilities(float (&p)[N][4], const float (&y)[N][4], float scale, int half,
                                              const range32 &sees)
{
#pragma unroll
    for (int n = 0; n < N; n++)
#pragma unroll
        for (int parity = 0; parity < 2; parity++) {
            float &log_p = p[n][half * 2 + parity];
            log_p = fmaf(0.0F, log_p, log2_probability(log_p));
        }
    return sum_pairs(p, y, scale, half, sees, false, [](float max_t, float max_s) {
        return row_shifts{max_t, max_s};
    });
}

/* The thread's columns of a row in the tile whose first key is `first`. Without a teacher there is only the student's
 * LSE; a full tile is worth a separate path only then. */
template <int N>
__device__ inline index_row sum_row(const strip_params &params, const query_slot &slot, float (&p)[N][4],
                                    const float (&y)[N][4], int half, int row, int first)
{
    const float scale = params.b.scale;
    const range32 sees = visible_range(params, slot, row, first);
    if (params.with_teacher)
        return sum_probabilities(p, y, scale, half, sees);
    lse_row lse = {-INFINITY, 0.0F};
    if (is_full(slot, first, N * 8))
        add_logits(lse, y, scale, half, [](int, int) { return true; });
    else
        add_logits(lse, y, scale, half, [&](int, int column) { return column >= sees.begin && column < sees.end; });
    return {{-INFINITY, 0.0F, lse.m, lse.l, 0.0F}, 0.0F};
}

/* Merges the LANES neighboring lanes that hold a row; each of them gets the result. */
template <int LANES = 4> __device__ inline index_row merge_lanes(const index_row &row)
{
    index_row sum = {merge_lanes<LANES>(row.state), 0.0F};
    sum.p_log_p = p_log_p_at(row, sum.state.m_a);
#pragma unroll
    for (int offset = 1; offset < LANES; offset *= 2)
        sum.p_log_p += __shfl_xor_sync(~0U, sum.p_log_p, offset);
    return sum;
}

/* Stores G = S - P of a tile, with 0 for masked pairs and NaN where the upstream gradient is not finite. With PLANES
 * = 2 the residual of the rounding to f16 is stored, too, at g + params.rest_at. `rows`: the thread's two rows of the
 * slot; `first`: the tile's first key. */
template <int PLANES, int N>
__device__ inline void store_tile(const strip_params &params, const query_slot &slot, uint4 *g,
                                  const float (&p)[N][4], const float (&y)[N][4], const int (&rows)[2], int first)
{
    range32 sees[2];
    float lse[2], poison[2];
#pragma unroll
    for (int half = 0; half < 2; half++) {
        const int64_t query = query_of(slot, rows[half]);
        sees[half] = visible_range(params, slot, rows[half], first);
        lse[half] = lse2_of(skl_row_value(&params.call.inputs.lse_s, &slot.sequence, slot.head, query));
        poison[half] = 0.0F * upstream_of(params, slot, query);
    }
#pragma unroll
    for (int block = 0; block < N / 2; block++, g += 32) {
        uint32_t operand[4], residual[4];
#pragma unroll
        for (int reg = 0; reg < 4; reg++) {
            const int n = block * 2 + reg / 2, half = reg % 2;
            float pair[2];
#pragma unroll
            for (int parity = 0; parity < 2; parity++) {
                const int column = acc_column(n, parity), e = half * 2 + parity;
                const bool seen = column >= sees[half].begin && column < sees[half].end;
                const float s = ex2(fmaf(y[n][e], params.b.scale, -lse[half]));
                pair[parity] = seen ? fmaf(s - p[n][e], 1.0F / G_UNIT, poison[half]) : 0.0F;
            }
            operand[reg] = pack(pair[0], pair[1], skl_f16());
            const float2 rounded = unpack(operand[reg], skl_f16());
            residual[reg] = pack(pair[0] - rounded.x, pair[1] - rounded.y, skl_f16());
        }
        *g = make_uint4(operand[0], operand[1], operand[2], operand[3]);
        if (PLANES == 2)
            g[params.rest_at] = make_uint4(residual[0], residual[1], residual[2], residual[3]);
    }
}

/* ---- Row sums of a split ------------------------------------------------------------------------------------ */

__device__ inline index_row empty_row()
{
    return {skl_state_empty(), 0.0F};
}

/* The row sums of a slot in a split of its keys, [query]. */
__device__ inline index_row *rows_of_split(const strip_params &params, unsigned slot, int split)
{
    return params.split_rows + ((slot - params.strip_first) * params.num_splits + split) * SIDE;
}

/* Merges the parts of a tile that the four lanes of a row hold, and adds them to the row's sums in memory: P and Y
 * need the registers. */
__device__ inline void add_to_row(index_row *to, const index_row &row)
{
    const index_row sum = merge_lanes(row);
    if (threadIdx.x % 4 == 0)
        *to = merge_rows(*to, sum);
}

} // namespace tensor_core

#endif
