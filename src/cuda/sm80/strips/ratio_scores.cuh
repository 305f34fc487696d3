/* Scores of a strip as ratios by mma.sync: a policy for scores.cuh. Teacher groups with softcaps, in both directions
 * of the KL and with gradients of both sides. The other kernels for teacher groups know P; these know log2 P, which
 * the reverse KL needs where P is below the range of floats, and from which all gradients follow.
 *
 *   R = log2 A - log2 B      of a pair: what its gradients need besides the probability of their own head
 *
 * A launch has one output:
 *
 *   ROWS      row states of a split of the keys
 *   RATIOS    R of a strip (strip.cuh), for the gradients (ratio_gradients.cuh)
 *   DOTS      dot_t of every teacher head: R stays in registers while the teacher's heads stream past again
 *
 *   teacher head h   log2 P = log2 of the running mean of 2^(X - lse_h)
 *   student head     Y = X
 *
 * A running mean in log space, because the mean of equal heads is then exactly that head. LSEs are split into a float
 * and the rest (`low`); log2 P is relative to the low of a reference, the student's LSE or that of the first head. So
 * a student that equals its heads has R = 0 and KL 0 to the last bit. */
#ifndef SKL_CUDA_SM80_STRIPS_RATIO_SCORES_CUH
#define SKL_CUDA_SM80_STRIPS_RATIO_SCORES_CUH

#include "cuda/common/group_rows.cuh"
#include "cuda/common/strips/rows.cuh"
#include "cuda/sm80/strips/scores.cuh"

namespace sm80
{

enum ratio_output { OUTPUT_ROWS, OUTPUT_RATIOS, OUTPUT_DOTS };

/* Row statistics for dot_t. */
struct dot_row {
    group_row_lses lses;
    float mean; /* mean of skl_dot_rule */
};
static_assert(sizeof(dot_row) == SKL_DOT_ROW_SIZE, "cuda/select plans the workspace");

/* `a` is the teacher and `b` the student, in both directions. */
struct ratio_params : strip_params {
    ratio_output output;
    bool reverse, of_teacher; /* of_teacher: gradients of the teacher */
    bool lse_computed;        /* an earlier launch wrote the teacher's LSEs, of the visible keys */
    skl_input lse, offset;    /* gradients: of the wrt side's heads; offset without data: -1 */
    unsigned query_blocks;    /* gradients: blocks whose tiles are queries */
    dot_row *dot_rows;        /* [slot of the strip][query]; NULL: no dot_t */
    float *split_dots;        /* [slot of the strip][split][head][2][query]: sums of p (phi - mean) and of p */
};

/* Whether dot_t is divided by the sum of its head's probabilities: see skl_dot_rule. */
__device__ inline bool normalizes_dots(const ratio_params &params)
{
    return params.lse_computed || skl_op_is_one_pass(params.call.op);
}

/* The side whose gradients are computed. */
__device__ inline const skl_cuda_argument &wrt_of(const ratio_params &params)
{
    return params.of_teacher ? params.a : params.b;
}

/* ---- Teacher ------------------------------------------------------------------------------------------------- */

/* log2 of (1 - share) 2^mean + share 2^x; exactly the mean if x is. */
__device__ inline float log2_mean(float mean, float x, float share)
{
    const float distance = x == mean ? 0.0F : fabsf(x - mean), of_smaller = x > mean ? 1.0F - share : share;
    return fmaxf(mean, x) + lg2(fmaf(of_smaller, ex2(-distance) - 1.0F, 1.0F));
}

/* Reads the LSEs of a row. With value() = {value, rest}, x - value + rest is log2 of the probability, plus `low`. */
struct relative_lse : head_lse {
    float low;

    __device__ skl_lse2 value(float lse) const
    {
        const skl_lse2 lse2 = split_lse2(lse);
        return {lse2.value, low - lse2.low};
    }
};

/* ---- Rows ---------------------------------------------------------------------------------------------------- */

/* The state of the thread's columns of a row. Shifts are the maxima, or, where teacher and student have the same one,
 * as equal inputs do, the LSE of the reference, from which both have the same distances to the last bit. */
template <int N>
__device__ inline skl_row_state sum_ratio_pairs(const float (&log_p)[N][4], const float (&y)[N][4], float scale,
                                                int half, const range32 &sees, const skl_lse2 &reference,
                                                bool reverse)
{
    constexpr float SAME = 0x1p-8F, FAR = 100.0F;
    skl_row_state state = sum_pairs(log_p, y, scale, half, sees, reverse, [&](float max_t, float max_s) {
                              const bool same = fabsf(max_s - reference.value - max_t) < SAME && fabsf(max_t) < FAR;
                              return row_shifts{same ? 0.0F : max_t, same ? reference.value : max_s};
                          }).state;
    (reverse ? state.m_b : state.m_a) -= reference.low;
    return state;
}

/* ---- Ratios -------------------------------------------------------------------------------------------------- */

/* R of a masked pair: a NaN that no arithmetic gives. */
constexpr uint32_t MASKED_RATIO = 0xFFFFFFFFU;

__device__ inline bool is_masked(float ratio)
{
    return __float_as_uint(ratio) == MASKED_RATIO;
}

/* Row statistics for R. */
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

/* Sums of a split of a slot of the strip, [head][2][query]. */
__device__ inline float *split_dots_of(const ratio_params &params, unsigned slot, int split, int heads)
{
    return params.split_dots + ((int64_t)slot * params.num_splits + split) * heads * 2 * SIDE;
}

/* ---- Policy --------------------------------------------------------------------------------------------------- */

/* The student's side of the lane's row. */
struct lane_row {
    skl_lse2 reference;
    float log2_share, poison, mean;
};

__device__ inline lane_row lane_row_of(const ratio_params &params, const score_smem &smem, const head_lse &lse)
{
    const query_slot &slot = smem.slot;
    const int64_t query = query_of(slot, (int)threadIdx.x);
    if (params.output == OUTPUT_ROWS)
        return {split_lse2(lse.load()), 0.0F, 0.0F, 0.0F};
    if (params.output == OUTPUT_DOTS) {
        const dot_row row =
            params.dot_rows[(int64_t)(smem.slot_index - (unsigned)params.strip_first) * SIDE + threadIdx.x];
        /* The LSEs of the gradients, to the last bit: at the peak of a row phi - dot_t is far smaller than phi. */
        const float lse_s = skl_op_is_one_pass(params.call.op)
                                ? skl_row_value(&params.call.inputs.lse_s, &slot.sequence, slot.head, query)
                                : row.lses.lse_s;
        const float log2_share = normalizes_dots(params) ? 0.0F : row.lses.mean_lse_t * SKL_LOG2E;
        return {split_lse2(lse_s), log2_share, 0.0F, row.mean};
    }
    return {split_lse2(skl_row_value(&params.call.inputs.lse_s, &slot.sequence, slot.head, query)), 0.0F,
            0.0F * upstream_of(params, slot, query), 0.0F};
}

template <typename ELEMENT> struct ratio_scores {
    typedef ELEMENT element;
    typedef ratio_params params_type;
    const ratio_params &params;
    const score_smem &smem;
    head_lse lse;
    lane_row lane;

    __device__ ratio_scores(const ratio_params &of_launch, const score_smem &of_block)
        : params(of_launch), smem(of_block),
          lse(lse_of(params, smem.slot, smem.streamed[0].first, query_of(smem.slot, (int)threadIdx.x))),
          lane(lane_row_of(params, smem, lse))
    {
        if (params.output == OUTPUT_ROWS)
            rows_of_split(params, smem.slot_index, smem.split)[threadIdx.x] = empty_row();
        for (int n = 0; params.output == OUTPUT_DOTS && n < smem.streamed[0].count * 2; n++)
            dots()[n * SIDE + threadIdx.x] = 0.0F;
    }

    __device__ static bool teacher_again(const ratio_params &params)
    {
        return params.output == OUTPUT_DOTS;
    }

    __device__ float *dots() const
    {
        return split_dots_of(params, smem.slot_index - (unsigned)params.strip_first, smem.split,
                             smem.streamed[0].count);
    }

    /* log_p = log2 P + low, with the low of the lane's row. */
    __device__ void teacher(tile_logits &log_p, int, slab_stream<ELEMENT> &slabs) const
    {
        slabs.for_heads(smem.streamed[0], relative_lse{lse, lane.reference.low},
                        [&](int n, tile_logits &x, const skl_lse2 &lse2) {
                            const float scale = cap_logits(x, params.a), share = __fdividef(1.0F, (float)(n + 1));
                            combine_tile(log_p, x, lse2, [=](float mean, float of_pair, const skl_lse2 &of_row) {
                                const float of_head = fmaf(of_pair, scale, -of_row.value) + of_row.low;
                                return n == 0 ? of_head : log2_mean(mean, of_head, share);
                            });
                        });
    }

    /* y is the tanh of a softcap, times the cap, or the products without their scale: scale_of_y. */
    __device__ void student(tile_logits &y, slab_stream<ELEMENT> &slabs) const
    {
        slabs.multiply(y, smem.streamed[1].slabs);
        cap_logits(y, params.b);
    }

    __device__ float scale_of_y() const
    {
        return params.b.capped ? 1.0F : params.b.scale;
    }

    /* Row states, or log_p = R, which is stored if it is wanted. */
    __device__ void finish(int m, int tile, float (&log_p)[TILE_KEYS / 8][4],
                           const float (&y)[TILE_KEYS / 8][4]) const
    {
        range32 sees[2];
        ratio_row rows[2];
#pragma unroll
        for (int half = 0; half < 2; half++) {
            const int from = lane_of_row(m, half);
            sees[half] = visible_range(params, smem.slot, acc_row<M_TILES>(m, half), tile * TILE_KEYS);
            rows[half] = {broadcast(lane.reference, from), broadcast(lane.log2_share, from),
                          broadcast(lane.poison, from)};
        }
        if (params.output == OUTPUT_ROWS) {
            index_row *const sums = rows_of_split(params, smem.slot_index, smem.split);
#pragma unroll
            for (int half = 0; half < 2; half++)
                add_to_row(
                    sums + acc_row<M_TILES>(m, half),
                    {sum_ratio_pairs(log_p, y, scale_of_y(), half, sees[half], rows[half].lse_s, params.reverse),
                     0.0F});
            return;
        }
        ratios_of(log_p, y, scale_of_y(), sees, rows, params.reverse);
        if (params.output == OUTPUT_RATIOS)
            store_ratios(planes_of(params, smem, m, tile), params.rest_at, log_p);
    }

    /* dot_t of a head needs the sums of p_h and of p_h (phi - mean), where phi = dKL / dP is ln2 R, or -2^R for the
     * reverse KL. Sums of a tile are added to the sums of the split in memory. */
    __device__ void end_tile(slab_stream<ELEMENT> &slabs, const tile_logits &ratio) const
    {
        if (params.output != OUTPUT_DOTS)
            return;
        slabs.for_heads(smem.streamed[2], relative_lse{lse, 0.0F}, [&](int n, tile_logits &x, const skl_lse2 &lse2) {
            const float scale = cap_logits(x, params.a);
#pragma unroll
            for (int m = 0; m < M_TILES; m++)
#pragma unroll
                for (int half = 0; half < 2; half++) {
                    const skl_lse2 of_row = broadcast(lse2, lane_of_row(m, half));
                    const float mean = broadcast(lane.mean, lane_of_row(m, half));
                    float sum = 0.0F, mass = 0.0F;
#pragma unroll
                    for (int e = 0; e < TILE_KEYS / 4; e++) {
                        const float r = ratio[m][e / 2][half * 2 + e % 2];
                        const float log_p = fmaf(x[m][e / 2][half * 2 + e % 2], scale, -of_row.value) + of_row.low;
                        const float p = ex2(log_p);
                        const float term =
                            params.reverse ? fmaf(p, -mean, -ex2(log_p + r)) : p * fmaf(SKL_LN2, r, -mean);
                        sum += is_masked(r) ? 0.0F : term;
                        mass += is_masked(r) ? 0.0F : p;
                    }
                    sum = quad_sum(sum);
                    mass = quad_sum(mass);
                    float *const of_head = dots() + n * 2 * SIDE + acc_row<M_TILES>(m, half);
                    if (threadIdx.x % 4 == 0) {
                        of_head[0] += sum;
                        of_head[SIDE] += mass;
                    }
                }
        });
    }
};

/* ---- Rows of a strip ------------------------------------------------------------------------------------------ */

__device__ inline void write_strip_row(const ratio_params &params, const query_slot &slot, int64_t query,
                                       const index_row &row)
{
    const group_row_lses lses =
        write_group_row(params, params.lse_computed, slot.sequence, slot.head, query, row.state);
    if (params.dot_rows == NULL)
        write_group_lse_t(params, params.lse_computed, slot.sequence, slot.head, query, lses.mean_lse_t);
    else
        params.dot_rows[(int64_t)blockIdx.x * SIDE + threadIdx.x] = {
            lses, skl_dot_rule_of(&row.state, params.reverse, !normalizes_dots(params)).mean};
}

/* Writes dot_t, and then the teacher's LSEs, which may overwrite the LSEs that dot_t reads. */
template <typename PARAMS>
static __global__ void __launch_bounds__(SIDE) finish_dots(const __grid_constant__ PARAMS params)
{
    for_query_of_thread(params, [&](const query_slot &slot, int64_t query) {
        const int64_t group = skl_group_size(&params.problem);
        const dot_row row = params.dot_rows[(int64_t)blockIdx.x * SIDE + threadIdx.x];
        for (int64_t n = 0; n < group; n++) {
            float sum = 0.0F, mass = 0.0F;
            for (int split = 0; split < params.num_splits; split++) {
                const float *const of_head =
                    split_dots_of(params, blockIdx.x, split, (int)group) + n * 2 * SIDE + threadIdx.x;
                sum += of_head[0];
                mass += of_head[SIDE];
            }
            skl_row_set(&params.call.rows.dot_t, &slot.sequence, slot.head * group + n, query,
                        row.mean + (normalizes_dots(params) && mass > 0.0F ? sum / mass : sum));
        }
        write_group_lse_t(params, params.lse_computed, slot.sequence, slot.head, query, row.lses.mean_lse_t);
    });
}

} // namespace sm80

#endif
