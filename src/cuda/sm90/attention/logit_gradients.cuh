/* What the gradient kernels on Hopper share. "Own" is the argument of the KL that gets its gradients, "other" the
 * remaining one. */
#ifndef SKL_CUDA_SM90_ATTENTION_LOGIT_GRADIENTS_CUH
#define SKL_CUDA_SM90_ATTENTION_LOGIT_GRADIENTS_CUH

#include "cuda/common/row_stats.cuh"
#include "cuda/sm90/pipeline.cuh"

namespace sm90
{

template <bool OF_B> __device__ inline const skl_cuda_argument &wrt_argument(const backward_params &params)
{
    return OF_B ? params.b : params.a;
}

template <bool OF_B> __device__ inline const skl_cuda_argument &other_argument(const backward_params &params)
{
    return OF_B ? params.a : params.b;
}

/* Log2 of a probability, and what its cap lets through of a gradient. */
struct log_probability {
    float value, slope;
};

/* From a product of a query and a key. CAPPED: the argument may have a softcap. */
template <bool CAPPED>
__device__ inline log_probability log_of(float product, const skl_cuda_argument &argument, float minus_lse)
{
    if (!CAPPED || !argument.capped)
        return {fmaf(product, argument.scale, minus_lse), 1.0F};
    const float ratio = tanhf(product * argument.scale);
    return {fmaf(argument.softcap_2, ratio, minus_lse), 1.0F - ratio * ratio};
}

/* Two threads look at a row as the copy engine leaves it: whether all of it is finite. If not, or if it is not
 * wanted, it becomes 0. Each has every other chunk of 16 bytes; threads of different rows begin at different ones: so
 * no bank is met twice. */
template <typename ELEMENT, int DIM, int ROWS>
__device__ inline bool clean_row(unsigned char (&slabs)[DIM / 64][ROWS][128], int row, bool wanted)
{
    constexpr int CHUNKS = 4; /* of a half, a thread's */
    const int parity = (int)threadIdx.x % 2;
    bool finite = true;
#pragma unroll(DIM > 128 ? 1 : DIM / 64) /* a staging warp has few registers */
    for (int half = 0; half < DIM / 64; half++)
#pragma unroll
        for (int c = 0; c < CHUNKS; c++) {
            const int chunk = (c ^ row % CHUNKS) * 2 + parity;
            finite = all_finite<ELEMENT>(*(const uint4 *)(const void *)&slabs[half][row][chunk * 16]) && finite;
        }
    finite = __shfl_xor_sync(~0U, (int)finite, 1) && finite;
    if (!finite || !wanted)
        for (int half = 0; half < DIM / 64; half++)
            for (int c = 0; c < CHUNKS; c++)
                *(uint4 *)(void *)&slabs[half][row][(c * 2 + parity) * 16] = make_uint4(0, 0, 0, 0);
    return finite;
}

/* By a warp: a masked pair weighs 0, but 0 times a value that is not finite is NaN. Such rows become 0 before the
 * product with G, and their marks NaN, for just those own rows that see them. */
template <typename ELEMENT, int DIM>
__device__ inline void clean_rows(row_stage<DIM> &rows, float (&marks)[STAGE_ROWS])
{
    for (int row = (int)threadIdx.x % 32 / 2; row < STAGE_ROWS; row += 16)
        if (!clean_row<ELEMENT, DIM>(rows.slabs, row, true))
            marks[row] = NAN;
}

/* ---- Gradients of logits ------------------------------------------------------------------------------------ */

/* What is known of a stage's queries, each fact in a row, so that a thread loads those of two columns at once. LSEs
 * are in base 2. */
struct alignas(16) stage_row_stats {
    float lse_a[STAGE_ROWS], lse_b[STAGE_ROWS], kl[STAGE_ROWS], grad[STAGE_ROWS];
    float largest; /* finite upstream gradient, of those queries that see a key of the block */
};

/* Facts of two of the stage's queries, on their way to where all can read them: [query / 32][as row_stats]. */
struct lane_row_stats {
    float of[STAGE_ROWS / 32][4];
};

/* By a warp; `first`: of the stage, counted from the stream's first. Queries behind the last that one of the block's
 * `count` keys sees have none: they are masked everywhere, and whatever comes from upstream for them must not move
 * the unit. */
__device__ inline lane_row_stats load_stage_row_stats(const backward_params &params, const skl_sequence &s,
                                                      const row_stream &queries, int count, int64_t head, int first)
{
    const int64_t origin = queries.row - s.query_begin;
    const int end = queries.band.of(count - 1).end;
    lane_row_stats stats = {};
#pragma unroll
    for (int n = 0; n < STAGE_ROWS / 32; n++) {
        const int query = first + n * 32 + (int)threadIdx.x % 32;
#pragma unroll
        for (int which = 0; which < 4 && query < end; which++)
            stats.of[n][which] = row_stat(params, which, s, head, origin + query);
    }
    return stats;
}

__device__ inline void store_stage_row_stats(stage_row_stats &to, const lane_row_stats &stats)
{
    float largest = 0.0F;
#pragma unroll
    for (int n = 0; n < STAGE_ROWS / 32; n++) {
        const int row = n * 32 + (int)threadIdx.x % 32;
        to.lse_a[row] = stats.of[n][0] * SKL_LOG2E;
        to.lse_b[row] = stats.of[n][1] * SKL_LOG2E;
        to.kl[row] = stats.of[n][2];
        to.grad[row] = stats.of[n][3];
        const float size = fabsf(stats.of[n][3]);
        largest = size < INFINITY ? fmaxf(largest, size) : largest;
    }
    to.largest = warp_max(largest);
}

/* Facts of an own query, anew for every stage: they hold no registers while products are started. */
__device__ inline row_stats load_row_stats(const row_stats &from)
{
    const float4 stats = load_shared(*(const float4 *)(const void *)&from);
    return {stats.x, stats.y, stats.z, stats.w};
}

/* Queries that are streamed: their facts belong to columns of the logits. */
template <bool OF_B> struct streamed_queries {
    const stage_row_stats &stats;
    row_stats query[2];

    template <bool MASKED> __device__ void load_columns(int column_block)
    {
        const int column = acc_column(column_block, 0);
        const float2 lse_a = load_shared_2(stats.lse_a[column]), lse_b = load_shared_2(stats.lse_b[column]);
        const float2 kl = OF_B ? make_float2(0.0F, 0.0F) : load_shared_2(stats.kl[column]);
        const float2 grad = load_shared_2(stats.grad[column]);
        query[0] = {lse_a.x, lse_b.x, kl.x, grad.x};
        query[1] = {lse_a.y, lse_b.y, kl.y, grad.y};
    }

    __device__ row_stats of(int, int parity) const
    {
        return query[parity];
    }

    __device__ void meet(int, float, float)
    {
    }
};

/* Logits of a stage: 64 own rows of a warpgroup x 64 streamed rows. */
struct logits_of_stage {
    int first; /* streamed row of an edge, counted from the stream's first */
    stage_logits wrt, other;
};

/* Gives the thread's gradients of logits to take(block of 8 columns, half, two neighbours). MASKED: those of masked
 * pairs are 0. The logits are only read: ptxas wants accumulators for itself. */
template <bool MASKED, bool OF_B, bool CAPPED, typename QUERIES, typename TAKE>
__device__ inline void weigh_pairs(const backward_params &params, const logits_of_stage &logits, const band32 &band,
                                   QUERIES queries, TAKE take)
{
    const stage_logits &x = OF_B ? logits.other : logits.wrt, &y = OF_B ? logits.wrt : logits.other;
    range32 meets[2]; /* counted from the thread's first column */
#pragma unroll
    for (int half = 0; half < 2 && MASKED; half++) {
        const range32 range = band.of(acc_row<1>(0, half));
        const int column = logits.first + acc_column(0, 0);
        meets[half] = {range.begin - column, range.end - column};
    }
#pragma unroll
    for (int i = 0; i < 8; i++) {
        queries.template load_columns<MASKED>(i);
#pragma unroll
        for (int half = 0; half < 2; half++) {
            float pair[2];
#pragma unroll
            for (int parity = 0; parity < 2; parity++) {
                const int e = half * 2 + parity, at = i * 8 + parity;
                const row_stats query = queries.of(half, parity);
                const log_probability u = log_of<CAPPED>(x[i][e], params.a, -query.lse_a);
                const log_probability v = log_of<CAPPED>(y[i][e], params.b, -query.lse_b);
                float gradient = pair_gradient<OF_B>(u.value, v.value, query) * query.grad;
                if (CAPPED)
                    gradient *= (OF_B ? v : u).slope;
                const bool seen = !MASKED || (at >= meets[half].begin && at < meets[half].end);
                if (seen)
                    queries.meet(half, u.value, v.value);
                pair[parity] = seen ? gradient : 0.0F;
            }
            take(i, half, pair[0], pair[1]);
        }
    }
}

/* The warp's largest finite gradient of a logit, the same for all lanes. Own rows behind the last one hold anything,
 * and do not count. */
template <bool MASKED, bool OF_B, bool CAPPED, typename QUERIES>
__device__ inline float largest_pair(const backward_params &params, const logits_of_stage &logits, const band32 &band,
                                     int count, const QUERIES &queries)
{
    float largest[2] = {};
    weigh_pairs<MASKED, OF_B, CAPPED>(params, logits, band, queries, [&](int, int half, float low, float high) {
        const float size = fmaxf(fabsf(low), fabsf(high));
        largest[half] = size < INFINITY ? fmaxf(largest[half], size) : largest[half];
    });
    return warp_max(
        fmaxf(acc_row<1>(0, 0) < count ? largest[0] : 0.0F, acc_row<1>(0, 1) < count ? largest[1] : 0.0F));
}

/* ---- Stores ------------------------------------------------------------------------------------------------- */

/* Elements of a gradient's row that the thread holds; `half` is that of acc_row. */
template <typename OUT, int BLOCKS>
__device__ inline void store_elements(OUT *row, int dim, const float (&x)[BLOCKS][4], int half, float factor)
{
#pragma unroll
    for (int n = 0; n < BLOCKS; n++)
#pragma unroll
        for (int parity = 0; parity < 2; parity++)
            if (acc_column(n, parity) < dim)
                row[acc_column(n, parity)] = (OUT)(x[n][half * 2 + parity] * factor);
}

/* The same, in the gradient's type; `at`: the row's first element. */
template <typename ELEMENT, int BLOCKS>
__device__ inline void store_row(void *gradient, int64_t at, const skl_side &side, const float (&x)[BLOCKS][4],
                                 int half, float factor)
{
    if (side.grad_dtype == SKL_F32)
        store_elements((float *)gradient + at, (int)side.dim, x, half, factor);
    else
        store_elements((ELEMENT *)gradient + at, (int)side.dim, x, half, factor);
}

} // namespace sm90

#endif
