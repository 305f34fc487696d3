/* Teacher groups with softcaps, in both directions of the KL and with gradients of both sides, by mma.sync, sm_80 and
 * up: the scores. The other kernels for teacher groups know P; these know log2 P, which the reverse KL needs where P
 * is below the range of floats, and from which all gradients follow.
 *
 *   R = log2 A - log2 B      of a pair: what its gradients need besides the probability of their own head
 *
 * A launch has one output:
 *
 *   ROWS      row states of a split of the keys
 *   RATIOS    R of a strip (strip.cuh), for the gradients (ratio_gradients.cuh)
 *   DOTS      dot_t of every teacher head: R stays in registers while the teacher's heads stream past again
 *
 * Tiles, slabs and registers are those of difference_scores.cuh: log2 P, Y and the products of a head, 64 each.
 *
 *   head h    X = Q_h K_h^T  ->  log2 P = log2 of the running mean of 2^(X - lse_h)
 *
 * A running mean in log space, because the mean of equal heads is then exactly that head. LSEs are split into a float
 * and the rest (`low`); log2 P is relative to the low of a reference, the student's LSE or that of the first head. So
 * a student that equals its heads has R = 0 and KL 0 to the last bit. */
#ifndef SKL_CUDA_SM80_STRIPS_RATIO_SCORES_CUH
#define SKL_CUDA_SM80_STRIPS_RATIO_SCORES_CUH

#include "cuda/common/group_rows.cuh"
#include "cuda/sm80/strips/difference_scores.cuh"

namespace sm80
{

enum group_output { GROUP_ROWS, GROUP_RATIOS, GROUP_DOTS };

/* What dot_t needs of a row, besides its keys. */
struct dot_row {
    group_row_lses lses;
    float mean; /* as in skl_dot_rule */
};
static_assert(sizeof(dot_row) == SKL_DOT_ROW_SIZE, "cuda/select plans the workspace");

/* `a` is the teacher and `b` the student, in both directions. */
struct ratio_params : strip_params {
    group_output output;
    bool reverse, of_teacher; /* of_teacher: gradients of the teacher */
    bool lse_computed;        /* an earlier launch wrote the teacher's LSEs, of the visible keys */
    skl_input lse, offset;    /* gradients: of the wrt side's heads; offset without data: -1 */
    unsigned query_blocks;    /* of a launch for gradients */
    dot_row *dot_rows;        /* [slot of the strip][query]; NULL: no dot_t */
    float *split_dots;        /* [slot of the strip][split][head][query] */
};

/* The side whose gradients are computed. */
__device__ inline const skl_cuda_argument &wrt_of(const ratio_params &params)
{
    return params.of_teacher ? params.a : params.b;
}

/* ---- Teacher ------------------------------------------------------------------------------------------------- */

/* Applies the softcap if the argument has one. Returns the factor that the logits still need. */
__device__ inline float cap_tile(tile_logits &x, const skl_cuda_argument &argument)
{
    if (!argument.capped)
        return argument.scale;
#pragma unroll
    for (int m = 0; m < M_TILES; m++)
#pragma unroll
        for (int e = 0; e < TILE_KEYS / 2; e++)
            x[m][e / 4][e % 4] = argument.softcap_2 * tanhf(x[m][e / 4][e % 4] * argument.scale);
    return 1.0F;
}

/* log2 of (1 - share) 2^mean + share 2^x; exactly the mean if x is. */
__device__ inline float log2_mean(float mean, float x, float share)
{
    const float distance = x == mean ? 0.0F : fabsf(x - mean), of_smaller = x > mean ? 1.0F - share : share;
    return fmaxf(mean, x) + lg2(fmaf(of_smaller, ex2(-distance) - 1.0F, 1.0F));
}

/* The lane that holds the values of a thread's row. */
__device__ inline int lane_of_row(int m, int half)
{
    return (m * 2 + half) * 8 + (int)(threadIdx.x % 32 / 4);
}

/* Calls visit(n, x, scale, lse of the lane's row) for each teacher head. */
template <typename ELEMENT, typename VISIT>
__device__ inline void for_teacher_heads(slab_stream<ELEMENT> &slabs, const head_list &heads, head_lse lse,
                                         VISIT visit)
{
    float next = lse.load();
#pragma unroll 1
    for (int n = 0; n < heads.count; n++) {
        const float now = next;
        if (n + 1 < heads.count) {
            lse.next();
            next = lse.load();
        }
        tile_logits x;
        slabs.multiply(x, heads.slabs);
        const float scale = cap_tile(x, slabs.params.a);
        visit(n, x, scale, split_lse2(now));
    }
}

/* log_p = log2 P + low, with the low of the lane's row. */
template <typename ELEMENT>
__device__ inline void log2_of_mean(tile_logits &log_p, slab_stream<ELEMENT> &slabs, const head_list &heads,
                                    const head_lse &lse, float low)
{
    for_teacher_heads(slabs, heads, lse, [&](int n, const tile_logits &x, float scale, const skl_lse2 &of_lane) {
        const float share = __fdividef(1.0F, (float)(n + 1));
#pragma unroll
        for (int m = 0; m < M_TILES; m++)
#pragma unroll
            for (int half = 0; half < 2; half++) {
                const float high = __shfl_sync(~0U, of_lane.value, lane_of_row(m, half));
                const float rest = __shfl_sync(~0U, low - of_lane.low, lane_of_row(m, half));
#pragma unroll
                for (int e = 0; e < TILE_KEYS / 4; e++) {
                    float &mean = log_p[m][e / 2][half * 2 + e % 2];
                    const float of_head = fmaf(x[m][e / 2][half * 2 + e % 2], scale, -high) + rest;
                    mean = n == 0 ? of_head : log2_mean(mean, of_head, share);
                }
            }
    });
}

/* ---- Rows ---------------------------------------------------------------------------------------------------- */

/* The state of the thread's columns of a row. Shifts are the maxima, or, where teacher and student have the same one,
 * as equal inputs do, the LSE of the reference, from which both have the same distances to the last bit. */
template <int N>
__device__ inline skl_row_state sum_log_pairs(const float (&log_p)[N][4], const float (&y)[N][4], float scale,
                                              int half, const range32 &sees, const skl_lse2 &reference, bool reverse)
{
    constexpr float SAME = 0x1p-8F, FAR = 100.0F;
    float max_t = -INFINITY, max_s = -INFINITY;
    bool any = false;
#pragma unroll
    for (int e = 0; e < N * 2; e++) {
        const int column = acc_column(e / 2, e % 2);
        const bool seen = column >= sees.begin && column < sees.end;
        max_t = seen ? fmaxf(max_t, log_p[e / 2][half * 2 + e % 2]) : max_t;
        max_s = seen ? fmaxf(max_s, y[e / 2][half * 2 + e % 2] * scale) : max_s;
        any = any || seen;
    }
    if (!any)
        return skl_state_empty();
    const bool same = fabsf(max_s - reference.value - max_t) < SAME && fabsf(max_t) < FAR;
    const float shift_t = same ? 0.0F : max_t, shift_s = same ? reference.value : max_s;
    const bool huge = is_huge(shift_s);
    float l_t = 0.0F, l_s = 0.0F, w = 0.0F;
#pragma unroll
    for (int e = 0; e < N * 2; e++) {
        const int column = acc_column(e / 2, e % 2);
        if (column < sees.begin || column >= sees.end)
            continue;
        const float of_t = log_p[e / 2][half * 2 + e % 2] - shift_t;
        const float of_s = minus_shift(y[e / 2][half * 2 + e % 2], scale, shift_s, huge);
        const float p = ex2(of_t), s = ex2(of_s);
        l_t += p;
        l_s += s;
        w = reverse ? fmaf(s, of_s - of_t, w) : fmaf(p, of_t - of_s, w);
    }
    const float m_t = shift_t - reference.low;
    return reverse ? skl_row_state{shift_s, l_s, m_t, l_t, w} : skl_row_state{m_t, l_t, shift_s, l_s, w};
}

/* ---- Ratios -------------------------------------------------------------------------------------------------- */

/* R of a masked pair: a NaN that no arithmetic gives. */
constexpr uint32_t MASKED_RATIO = 0xFFFFFFFFU;

__device__ inline bool is_masked(float ratio)
{
    return __float_as_uint(ratio) == MASKED_RATIO;
}

/* What R needs of a row. */
struct ratio_row {
    skl_lse2 lse_s;
    float log2_share; /* log2 of the probability of the visible keys under the teacher's LSEs */
    float poison;     /* 0, or NaN if the upstream gradient is not finite */
};

/* log_p = R. */
template <int N>
__device__ inline void ratios_of(float (&log_p)[N][4], const float (&y)[N][4], float scale, const range32 (&sees)[2],
                                 const ratio_row (&rows)[2], bool reverse)
{
#pragma unroll
    for (int n = 0; n < N; n++)
#pragma unroll
        for (int e = 0; e < 4; e++) {
            const ratio_row &row = rows[e / 2];
            const int column = acc_column(n, e % 2);
            const float log_s = fmaf(y[n][e], scale, -row.lse_s.value);
            const float forward = log_p[n][e] - log_s - row.log2_share, ratio = reverse ? -forward : forward;
            const bool seen = column >= sees[e / 2].begin && column < sees[e / 2].end;
            log_p[n][e] = seen ? ratio + row.poison : __uint_as_float(MASKED_RATIO);
        }
}

/* Stores R as A operands in two planes: the upper and the lower halves of its bits. */
template <int N> __device__ inline void store_ratios(uint4 *g, int64_t rest_at, const float (&ratio)[N][4])
{
#pragma unroll
    for (int block = 0; block < N / 2; block++, g += 32) {
        uint32_t upper[4], lower[4];
#pragma unroll
        for (int reg = 0; reg < 4; reg++) {
            const float(&of_rows)[4] = ratio[block * 2 + reg / 2];
            const uint32_t even = __float_as_uint(of_rows[reg % 2 * 2]);
            const uint32_t odd = __float_as_uint(of_rows[reg % 2 * 2 + 1]);
            upper[reg] = __byte_perm(even, odd, 0x7632);
            lower[reg] = __byte_perm(even, odd, 0x5410);
        }
        g[0] = make_uint4(upper[0], upper[1], upper[2], upper[3]);
        g[rest_at] = make_uint4(lower[0], lower[1], lower[2], lower[3]);
    }
}

/* ---- Dots ---------------------------------------------------------------------------------------------------- */

/* Sums of a split of a slot of the strip, [head][query]. */
__device__ inline float *split_dots_of(const ratio_params &params, unsigned slot, int split, int heads)
{
    return params.split_dots + ((int64_t)slot * params.num_splits + split) * heads * SIDE;
}

/* dot_t of a head is mean + sum p_h (phi - mean), where phi = dKL / dP is ln2 R, or -2^R for the reverse KL. Sums of
 * a tile are added to those of the split in memory. */
template <typename ELEMENT>
__device__ inline void add_dots(const ratio_params &params, const score_smem &smem, slab_stream<ELEMENT> &slabs,
                                const tile_logits &ratio, float mean)
{
    const head_list &heads = smem.streamed[2];
    const query_slot &slot = smem.slot;
    float *const dots =
        split_dots_of(params, smem.slot_index - (unsigned)params.strip_first, smem.split, heads.count);
    const head_lse lse = lse_of(params, slot, heads.first, query_of(slot, (int)threadIdx.x));
    for_teacher_heads(slabs, heads, lse, [&](int n, const tile_logits &x, float scale, const skl_lse2 &of_lane) {
#pragma unroll
        for (int m = 0; m < M_TILES; m++)
#pragma unroll
            for (int half = 0; half < 2; half++) {
                const int lane = lane_of_row(m, half);
                const float high = __shfl_sync(~0U, of_lane.value, lane), rest = __shfl_sync(~0U, of_lane.low, lane);
                const float of_row = __shfl_sync(~0U, mean, lane);
                float sum = 0.0F;
#pragma unroll
                for (int e = 0; e < TILE_KEYS / 4; e++) {
                    const float r = ratio[m][e / 2][half * 2 + e % 2];
                    const float log_p = fmaf(x[m][e / 2][half * 2 + e % 2], scale, -high) - rest, p = ex2(log_p);
                    const float term =
                        params.reverse ? fmaf(p, -of_row, -ex2(log_p + r)) : p * fmaf(SKL_LN2, r, -of_row);
                    sum += is_masked(r) ? 0.0F : term;
                }
                sum += __shfl_xor_sync(~0U, sum, 1);
                sum += __shfl_xor_sync(~0U, sum, 2);
                if (threadIdx.x % 4 == 0)
                    dots[n * SIDE + acc_row<M_TILES>(m, half)] += sum;
            }
    });
}

/* ---- Kernel -------------------------------------------------------------------------------------------------- */

/* The student's side of the lane's row. */
struct lane_row {
    skl_lse2 reference;
    float log2_share, poison, mean;
};

__device__ inline lane_row lane_row_of(const ratio_params &params, const score_smem &smem, const head_lse &lse)
{
    const query_slot &slot = smem.slot;
    const int64_t query = query_of(slot, (int)threadIdx.x);
    if (params.output == GROUP_ROWS)
        return {split_lse2(lse.load()), 0.0F, 0.0F, 0.0F};
    if (params.output == GROUP_DOTS) {
        const dot_row row =
            params.dot_rows[(int64_t)(smem.slot_index - (unsigned)params.strip_first) * SIDE + threadIdx.x];
        const float log2_share = params.lse_computed ? 0.0F : row.lses.mean_lse_t * SKL_LOG2E;
        return {split_lse2(row.lses.lse_s), log2_share, 0.0F, row.mean};
    }
    return {split_lse2(skl_row_value(&params.call.inputs.lse_s, &slot.sequence, slot.head, query)), 0.0F,
            0.0F * upstream_of(params, slot, query), 0.0F};
}

/* Ends a tile for 16 queries of a warp: row states or R. */
__device__ inline void finish_group_tile(const ratio_params &params, const score_smem &smem, const lane_row &lane,
                                         int m, int tile, float (&log_p)[TILE_KEYS / 8][4],
                                         const float (&y)[TILE_KEYS / 8][4], float scale)
{
    const query_slot &slot = smem.slot;
    range32 sees[2];
    ratio_row rows[2];
#pragma unroll
    for (int half = 0; half < 2; half++) {
        const int from = lane_of_row(m, half);
        sees[half] = visible_range(params, slot, acc_row<M_TILES>(m, half), tile * TILE_KEYS);
        rows[half] = {{__shfl_sync(~0U, lane.reference.value, from), __shfl_sync(~0U, lane.reference.low, from)},
                      __shfl_sync(~0U, lane.log2_share, from),
                      __shfl_sync(~0U, lane.poison, from)};
    }
    if (params.output == GROUP_ROWS) {
        index_row *const sums = rows_of_split(params, smem.slot_index, smem.split);
#pragma unroll
        for (int half = 0; half < 2; half++)
            add_to_row(sums + acc_row<M_TILES>(m, half),
                       {sum_log_pairs(log_p, y, scale, half, sees[half], rows[half].lse_s, params.reverse), 0.0F});
        return;
    }
    ratios_of(log_p, y, scale, sees, rows, params.reverse);
    if (params.output == GROUP_RATIOS)
        store_ratios(g_block(params, smem.slot_index, tile / TILES_PER_G_TILE, (int)(threadIdx.x / 32) * M_TILES + m,
                             tile % TILES_PER_G_TILE * (TILE_KEYS / 16)),
                     params.rest_at, log_p);
}

template <typename ELEMENT>
__global__ void __launch_bounds__(THREADS, 2) group_score_kernel(const __grid_constant__ ratio_params params)
{
    extern __shared__ __align__(128) unsigned char raw[];
    score_smem &smem = *(score_smem *)(void *)raw;
    if (threadIdx.x == 0) {
        init_split(smem, params);
        if (params.output == GROUP_DOTS)
            smem.streamed[smem.streamed_count++] = smem.streamed[0];
    }
    __syncthreads();
    const query_slot &slot = smem.slot;
    if (slot.count <= 0)
        return;
    if (params.output == GROUP_ROWS)
        rows_of_split(params, smem.slot_index, smem.split)[threadIdx.x] = empty_row();
    for (int n = 0; params.output == GROUP_DOTS && n < smem.streamed[0].count; n++)
        split_dots_of(params, smem.slot_index - (unsigned)params.strip_first, smem.split,
                      smem.streamed[0].count)[n * SIDE + threadIdx.x] = 0.0F;
    __syncwarp(); /* only this warp adds to its rows */
    slab_stream<ELEMENT> slabs = {params, smem, {smem.tile_begin, 0, 0, 0}, 0};
    slabs.prefetch();
    const head_lse lse = lse_of(params, slot, smem.streamed[0].first, query_of(slot, (int)threadIdx.x));
    const lane_row lane = lane_row_of(params, smem, lse);
#pragma unroll 1
    for (int tile = smem.tile_begin; tile < smem.tile_end; tile++) {
        tile_logits log_p, y;
        log2_of_mean(log_p, slabs, smem.streamed[0], lse, lane.reference.low);
        slabs.multiply(y, smem.streamed[1].slabs);
        const float scale = cap_tile(y, params.b);
#pragma unroll
        for (int m = 0; m < M_TILES; m++)
            finish_group_tile(params, smem, lane, m, tile, log_p[m], y[m], scale);
        if (params.output == GROUP_DOTS)
            add_dots(params, smem, slabs, log_p, lane.mean);
    }
}

/* Merges the splits of a strip's rows: one block per slot, one thread per query. */
static __global__ void __launch_bounds__(SIDE) finish_group_rows(const __grid_constant__ ratio_params params)
{
    const query_slot slot =
        slot_at(params, (unsigned)params.strip_first + blockIdx.x, (unsigned)params.problem.heads_s);
    if ((int)threadIdx.x >= slot.count)
        return;
    const index_row *const splits = params.split_rows + (int64_t)blockIdx.x * params.num_splits * SIDE + threadIdx.x;
    skl_row_state state = splits[0].state;
    for (int split = 1; split < params.num_splits; split++)
        state = skl_state_merge(state, splits[split * SIDE].state);
    const int64_t query = slot.first + (int)threadIdx.x;
    const group_row_lses lses = write_group_row(params, params.lse_computed, slot.sequence, slot.head, query, state);
    if (params.dot_rows == NULL)
        write_group_lse_t(params, params.lse_computed, slot.sequence, slot.head, query, lses.mean_lse_t);
    else
        params.dot_rows[(int64_t)blockIdx.x * SIDE + threadIdx.x] = {
            lses, skl_dot_rule_of(&state, params.reverse, !params.lse_computed).mean};
}

/* The same for dot_t, and then for the teacher's LSEs, which may replace those that dot_t is made of. */
static __global__ void __launch_bounds__(SIDE) finish_group_dots(const __grid_constant__ ratio_params params)
{
    const query_slot slot =
        slot_at(params, (unsigned)params.strip_first + blockIdx.x, (unsigned)params.problem.heads_s);
    if ((int)threadIdx.x >= slot.count)
        return;
    const int64_t group = skl_group_size(&params.problem), query = slot.first + (int)threadIdx.x;
    const dot_row row = params.dot_rows[(int64_t)blockIdx.x * SIDE + threadIdx.x];
    for (int64_t n = 0; n < group; n++) {
        float sum = 0.0F;
        for (int split = 0; split < params.num_splits; split++)
            sum += split_dots_of(params, blockIdx.x, split, (int)group)[n * SIDE + threadIdx.x];
        skl_row_set(&params.call.rows.dot_t, &slot.sequence, slot.head * group + n, query, row.mean + sum);
    }
    write_group_lse_t(params, params.lse_computed, slot.sequence, slot.head, query, row.lses.mean_lse_t);
}

} // namespace sm80

#endif
