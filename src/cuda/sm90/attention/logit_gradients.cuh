/* Building blocks of the Hopper backward kernels.
 *
 * A launch computes gradients with respect to one argument of the KL: `wrt` in all names, A or B (WRT_B). The
 * remaining argument is `other`. G is the matrix of logit gradients, g_ij = grad_i dKL_i / dlogit_ij; then dq = scale
 * G k and dk = scale G^T q, with q and k of the wrt argument. */
#ifndef SKL_CUDA_SM90_ATTENTION_LOGIT_GRADIENTS_CUH
#define SKL_CUDA_SM90_ATTENTION_LOGIT_GRADIENTS_CUH

#include "cuda/common/gradient_row.cuh"
#include "cuda/common/row_stats.cuh"
#include "cuda/sm90/attention/softcap.cuh"
#include "cuda/sm90/two_term.cuh"

namespace sm90
{

template <bool WRT_B> __device__ inline const skl_cuda_argument &wrt_argument(const backward_params &params)
{
    return WRT_B ? params.b : params.a;
}

template <bool WRT_B> __device__ inline const skl_cuda_argument &other_argument(const backward_params &params)
{
    return WRT_B ? params.a : params.b;
}

/* wrt_of() and other_of() find the two arguments on the host. */
inline const skl_cuda_argument *wrt_of(const backward_params &params)
{
    return is_grad_of_b(params) ? &params.b : &params.a;
}

inline const skl_cuda_argument *other_of(const backward_params &params)
{
    return is_grad_of_b(params) ? &params.a : &params.b;
}

/* Log2 of a probability, and the derivative of its logit: of the softcap, or of the logarithm. */
struct log_probability {
    float value, slope;
};

/* How logits come from products: no argument has a softcap; by the polynomial of softcap.cuh, which covers the
 * products; B has a linear link and products above 0, and A no softcap; by tanhf, or with care for a linear link. */
enum class logits_kind { PLAIN, POLYNOMIAL, LINEAR_B, EXACT };

/* `product`: of a query and a key. */
template <logits_kind LOGITS>
__device__ inline log_probability log_probability_of(float product, const skl_cuda_argument &argument,
                                                     float minus_lse)
{
    if (LOGITS == logits_kind::POLYNOMIAL) {
        const float ratio = polynomial_tanh(product, argument);
        return {fmaf(argument.tanh_factor, ratio, minus_lse), fmaf(-ratio, ratio, 1.0F)};
    }
    if (LOGITS == logits_kind::LINEAR_B)
        return {lg2(product) + minus_lse, rcp(product)};
    if (LOGITS == logits_kind::PLAIN || !argument.capped)
        return {fmaf(product, argument.scale, minus_lse), 1.0F};
    if (argument.linear)
        return {linear_logit(product) + minus_lse, linear_slope(product)};
    const float ratio = tanhf(product * argument.scale);
    return {fmaf(argument.softcap_2, ratio, minus_lse), 1.0F - ratio * ratio};
}

/* ---- Non-finite values -------------------------------------------------------------------------------------- */

/* The gradient of a masked pair is 0, but 0 times a non-finite value is NaN. So rows with non-finite values are set
 * to 0 in shared memory before the product with G (sanitized). Poison, a NaN in place of their LSE or added to their
 * logits, makes G NaN for exactly the pairs that are not masked. */

/* Two threads check whether all of a row is finite; they set it to 0 if it is not, or if `keep` is false. The row has
 * TMA's swizzled layout. Each of the two threads checks every other chunk of 16 bytes. Threads of different rows
 * start at different chunks, which avoids bank conflicts. */
template <typename ELEMENT, int DIM, int ROWS>
__device__ inline bool sanitize_row(unsigned char (&slabs)[SLABS_OF<DIM>][ROWS][128], int row, bool keep)
{
    constexpr int CHUNKS = 4; /* per slab and thread */
    const int parity = (int)(threadIdx.x % 2);
    bool finite = true;
#pragma unroll(DIM > 128 ? 1 : SLABS_OF <DIM>) /* a producer warp has few registers */
    for (int slab = 0; slab < SLABS_OF<DIM>; slab++)
#pragma unroll
        for (int c = 0; c < CHUNKS; c++) {
            const int chunk = (c ^ row % CHUNKS) * 2 + parity;
            finite = all_finite<ELEMENT>(*(const uint4 *)(const void *)&slabs[slab][row][chunk * 16]) && finite;
        }
    finite = __shfl_xor_sync(~0U, (int)finite, 1) && finite;
    if (!finite || !keep)
        for (int slab = 0; slab < SLABS_OF<DIM>; slab++)
            for (int c = 0; c < CHUNKS; c++)
                *(uint4 *)(void *)&slabs[slab][row][(c * 2 + parity) * 16] = make_uint4(0, 0, 0, 0);
    return finite;
}

/* Executed by one warp, for all rows of a stage. */
template <typename ELEMENT, int DIM>
__device__ inline void sanitize_rows(row_stage<DIM> &rows, float (&poison)[STAGE_ROWS])
{
#pragma unroll 1
    for (int row = (int)(read_lane() / 2); row < STAGE_ROWS; row += 16)
        if (!sanitize_row<ELEMENT, DIM>(rows.slabs, row, true))
            poison[row] = NAN;
}

/* ---- Row stats ---------------------------------------------------------------------------------------------- */

/* Row stats of a stage of queries, one array per statistic: a thread loads the stats of two adjacent columns at once.
 * LSEs are in base 2. */
struct alignas(16) stage_row_stats {
    float lse_a[STAGE_ROWS], lse_b[STAGE_ROWS], kl[STAGE_ROWS], grad[STAGE_ROWS];
    float largest; /* finite upstream gradient of the queries that attend to a key of the block */
};

/* A lane's row stats of two queries of the stage, in registers between load and store: [query / 32][statistic]. */
struct lane_row_stats {
    float stat[STAGE_ROWS / 32][4];
};

/* Executed by one warp. `first`: the stage's first query, counted from the stream's first. Queries from `end` on,
 * after the last one that attends to any key of the block, get zeros: they are masked everywhere, and their upstream
 * gradients must not move the unit. */
__device__ inline lane_row_stats load_stage_row_stats(const backward_params &params, const skl_sequence &s,
                                                      const stage_schedule &queries, int end, int64_t head, int first)
{
    const int64_t origin = queries.row - s.query_begin;
    lane_row_stats stats = {};
#pragma unroll
    for (int n = 0; n < STAGE_ROWS / 32; n++) {
        const int query = first + n * 32 + (int)read_lane();
#pragma unroll
        for (int which = 0; which < 4 && query < end; which++)
            stats.stat[n][which] = row_stat(params, which, s, head, origin + query);
    }
    return stats;
}

__device__ inline void store_stage_row_stats(stage_row_stats &to, const lane_row_stats &stats)
{
    float largest = 0.0F;
#pragma unroll
    for (int n = 0; n < STAGE_ROWS / 32; n++) {
        const int row = n * 32 + (int)read_lane();
        to.lse_a[row] = lse2_of(stats.stat[n][0]);
        to.lse_b[row] = lse2_of(stats.stat[n][1]);
        to.kl[row] = stats.stat[n][2];
        to.grad[row] = stats.stat[n][3];
        const float size = fabsf(stats.stat[n][3]);
        largest = size < INFINITY ? fmaxf(largest, size) : largest;
    }
    to.largest = warp_max(largest);
}

/* Row stats of a stationary row. Loaded again in every stage: they need no registers while wgmmas are issued. */
__device__ inline row_stats load_row_stats(const row_stats &from)
{
    const float4 stats = load_shared(*(const float4 *)(const void *)&from);
    return {stats.x, stats.y, stats.z, stats.w};
}

/* ---- Gradients of logits ------------------------------------------------------------------------------------ */

/* The accumulators hold products; two-term rows have two_term_factors. */
struct no_row_factors {
    __device__ void load_columns(int)
    {
    }

    template <bool OF_B> __device__ float product(float accumulator, int, int) const
    {
        return accumulator;
    }
};

/* Row stats where queries are streamed: they belong to columns of the logits. */
template <bool WRT_B, typename FACTORS = no_row_factors> struct streamed_query_stats {
    const stage_row_stats &stats;
    FACTORS factors;
    row_stats query[2];

    template <bool MASKED> __device__ void load_columns(int column_block)
    {
        factors.load_columns(column_block);
        const int column = acc_column(column_block, 0);
        const float2 lse_a = load_shared_2(stats.lse_a[column]), lse_b = load_shared_2(stats.lse_b[column]);
        const float2 kl = WRT_B ? make_float2(0.0F, 0.0F) : load_shared_2(stats.kl[column]);
        const float2 grad = load_shared_2(stats.grad[column]);
        query[0] = {lse_a.x, lse_b.x, kl.x, grad.x};
        query[1] = {lse_a.y, lse_b.y, kl.y, grad.y};
    }

    __device__ row_stats of(int, int parity) const
    {
        return query[parity];
    }

    __device__ void add_to_kl(int, float, float)
    {
    }
};

/* Logits of a stage: 64 stationary rows of a warpgroup x 64 streamed rows. */
struct argument_logits {
    int first; /* MASKED: first row of the stage, counted from the stream's first */
    stage_logits wrt, other;
};

/* The products of a pair of rows with respect to both arguments. */
struct pair_products {
    float a, b;
};

template <logits_kind LOGITS> using logits_constant = std::integral_constant<logits_kind, LOGITS>;

/* Whether the polynomials of both softcaps cover the warp's products of a block of 8 columns: asked for each block,
 * because a whole stage's answer would keep more values in registers than there are. */
__device__ inline bool polynomials_cover(const pair_products (&products)[4], const skl_cuda_params &params)
{
    bool covered = true;
#pragma unroll
    for (int e = 0; e < 4; e++)
        covered =
            covered && fabsf(products[e].a) <= params.a.product_max && fabsf(products[e].b) <= params.b.product_max;
    return __all_sync(~0U, (int)covered);
}

/* Calls emit(block of 8 columns, half, gradient, gradient of the next column) for the thread's logits. MASKED:
 * gradients of masked pairs are 0. VISIBLE: band32 or row_ranges. `stats` is a streamed_query_stats or a
 * stationary_query_stats. POLYNOMIALS: softcaps may be polynomials (softcap.cuh). The logits are only read: ptxas
 * serializes wgmmas whose accumulators are written by other instructions. */
template <bool MASKED, bool WRT_B, bool CAPPED, bool POLYNOMIALS, typename VISIBLE, typename QUERY_STATS,
          typename EMIT>
__device__ inline void for_each_logit_gradient(const backward_params &params, const argument_logits &logits,
                                               const VISIBLE &visible_rows, QUERY_STATS stats, EMIT emit)
{
    const stage_logits &x = WRT_B ? logits.other : logits.wrt, &y = WRT_B ? logits.wrt : logits.other;
    range32 visible[2]; /* counted from the thread's first column */
#pragma unroll
    for (int half = 0; half < 2 && MASKED; half++) {
        const range32 range = visible_rows.of(acc_row<1>(0, half));
        const int column = logits.first + acc_column(0, 0);
        visible[half] = {range.begin - column, range.end - column};
    }
#pragma unroll
    for (int i = 0; i < 8; i++) {
        stats.template load_columns<MASKED>(i);
        pair_products products[4];
#pragma unroll
        for (int e = 0; e < 4; e++)
            products[e] = {stats.factors.template product<false>(x[i][e], e / 2, e % 2),
                           stats.factors.template product<true>(y[i][e], e / 2, e % 2)};
        const auto emit_block = [&](auto kind) {
            constexpr logits_kind LOGITS = decltype(kind)::value;
            float gradients[4];
#pragma unroll
            for (int e = 0; e < 4; e++) {
                const int half = e / 2, column = i * 8 + e % 2;
                const row_stats query = stats.of(half, e % 2);
                const log_probability log_p_a = log_probability_of<LOGITS>(products[e].a, params.a, -query.lse_a);
                const log_probability log_p_b = log_probability_of<LOGITS>(products[e].b, params.b, -query.lse_b);
                float gradient = pair_gradient<WRT_B>(log_p_a.value, log_p_b.value, query) * query.grad;
                if (CAPPED)
                    gradient *= (WRT_B ? log_p_b : log_p_a).slope;
                const bool seen = !MASKED || (column >= visible[half].begin && column < visible[half].end);
                if (seen)
                    stats.add_to_kl(half, log_p_a.value, log_p_b.value);
                gradients[e] = seen ? gradient : 0.0F;
            }
            emit(i, 0, gradients[0], gradients[1]);
            emit(i, 1, gradients[2], gradients[3]);
        };
        if constexpr (!CAPPED)
            emit_block(logits_constant<logits_kind::PLAIN>());
        else if (POLYNOMIALS && polynomials_cover(products, params))
            emit_block(logits_constant<logits_kind::POLYNOMIAL>());
        else
            emit_block(logits_constant<logits_kind::EXACT>());
    }
}

/* G of a stage in f32. Returns its largest finite element in the warp, warp-uniform. Stationary rows from `count` on
 * are undefined and ignored. */
template <bool MASKED, bool WRT_B, bool CAPPED, bool POLYNOMIALS, typename VISIBLE, typename QUERY_STATS>
__device__ inline float compute_logit_gradients(stage_logits &g, const backward_params &params,
                                                const argument_logits &logits, const VISIBLE &visible_rows, int count,
                                                const QUERY_STATS &stats)
{
    float largest[2] = {};
    for_each_logit_gradient<MASKED, WRT_B, CAPPED, POLYNOMIALS>(
        params, logits, visible_rows, stats, [&](int i, int half, float low, float high) {
            g[i][half * 2] = low;
            g[i][half * 2 + 1] = high;
            const float size = fmaxf(fabsf(low), fabsf(high));
            largest[half] = size < INFINITY ? fmaxf(largest[half], size) : largest[half];
        });
    return warp_max(
        fmaxf(acc_row<1>(0, 0) < count ? largest[0] : 0.0F, acc_row<1>(0, 1) < count ? largest[1] : 0.0F));
}

/* `inverse`: of the unit of G. */
template <typename ELEMENT>
__device__ inline void pack_logit_gradients(uint32_t (&to)[4][4], const stage_logits &g, float inverse)
{
#pragma unroll
    for (int i = 0; i < 8; i++)
#pragma unroll
        for (int half = 0; half < 2; half++)
            to[i / 2][i % 2 * 2 + half] = pack(g[i][half * 2] * inverse, g[i][half * 2 + 1] * inverse, ELEMENT());
}

/* ---- Stores ------------------------------------------------------------------------------------------------- */

/* Stores the thread's elements of a gradient row, each times `first` and then `second`: the product of the two may be
 * below the normal numbers of f32, where it would have few digits. `offset`: the row's first element; `half` as in
 * acc_row. */
template <typename ELEMENT, int BLOCKS>
__device__ inline void store_row(void *gradient, int64_t offset, const skl_side &side, const float (&x)[BLOCKS][4],
                                 int half, float first, float second = 1.0F)
{
    const gradient_columns columns(gradient, offset, side.grad_dtype, (int)side.dim);
#pragma unroll
    for (int n = 0; n < BLOCKS; n++) {
        const float low = x[n][half * 2] * first * second, high = x[n][half * 2 + 1] * first * second;
        if constexpr (operand<ELEMENT>::TWO_TERM) { /* gradients of any type and size */
            const bool bf16 = side.grad_dtype == SKL_BF16;
            columns.store(n, 0, low, bf16 ? skl_to_bf16(low) : skl_to_f16(low));
            columns.store(n, 1, high, bf16 ? skl_to_bf16(high) : skl_to_f16(high));
        } else {
            columns.store_pair(n, low, high, ELEMENT());
        }
    }
}

} // namespace sm90

#endif
