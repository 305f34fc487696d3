/* Gradients of one side of a teacher group from ratios R of a strip (ratio_scores.cuh) by mma.sync: policies for
 * gradients.cuh.
 *
 *   wrt A   g = p (ln2 R - offset)          p: probability of the pair under the side's own head, recomputed
 *   wrt B   g = -p offset - p 2^R           offset: the KL, -1, or dot_t of a teacher head (docs/design/maths.md)
 *
 *   dq = scale G k,  dk = scale G^T q       scale: with the softcap's slope in G, and 1 / group_size for a teacher */
#ifndef SKL_CUDA_SM80_STRIPS_RATIO_GRADIENTS_CUH
#define SKL_CUDA_SM80_STRIPS_RATIO_GRADIENTS_CUH

#include "cuda/sm80/strips/gradients.cuh"
#include "cuda/sm80/strips/ratio_scores.cuh"

namespace sm80
{

/* Row statistics of a query for the gradients of a head. */
struct alignas(16) gradient_row {
    float lse, low, offset, grad; /* LSE in base 2 as two floats; upstream gradient */
};

/* `head`: of the side. */
__device__ inline gradient_row gradient_row_of(const ratio_params &params, const query_slot &slot, int64_t head,
                                               int row)
{
    const int64_t query = query_of(slot, row);
    const skl_lse2 lse = split_lse2(skl_row_value(&params.lse, &slot.sequence, head, query));
    const float offset =
        params.offset.data == NULL ? -1.0F : skl_row_value(&params.offset, &slot.sequence, head, query);
    return {lse.value, lse.low, offset, upstream_of(params, slot, query)};
}

/* Two neighboring R, from both planes. */
__device__ inline float2 ratio_pair(const uint4 (&planes)[2], int reg)
{
    const uint32_t upper = word_of(planes[0], reg), lower = word_of(planes[1], reg);
    return make_float2(__uint_as_float(__byte_perm(lower, upper, 0x5410)),
                       __uint_as_float(__byte_perm(lower, upper, 0x7632)));
}

template <bool WRT_B>
__device__ inline float ratio_gradient(float logit, float scale, float ratio, const gradient_row &row)
{
    const float log_p = fmaf(logit, scale, -row.lse) - row.low, p = ex2(log_p);
    return WRT_B ? fmaf(p, -row.offset, -ex2(log_p + ratio)) : p * fmaf(SKL_LN2, ratio, -row.offset);
}

/* x = G of a 16 x 16 block, from its logits x * scale. tanh_factor: 1 if x is the tanh of a softcap, otherwise 0.
 * row_of(block, e): the query of an element. */
template <bool WRT_B, typename ROW_OF>
__device__ inline void gradient_block(logits<1, 2> &x, float scale, float tanh_factor, const uint4 (&planes)[2],
                                      ROW_OF row_of)
{
#pragma unroll
    for (int reg = 0; reg < 4; reg++) {
        const float2 pair = ratio_pair(planes, reg);
#pragma unroll
        for (int parity = 0; parity < 2; parity++) {
            const int e = reg % 2 * 2 + parity;
            float &at = x.at[0][reg / 2][e];
            const float ratio = parity == 0 ? pair.x : pair.y, tanh = at * tanh_factor;
            const float gradient = ratio_gradient<WRT_B>(at, scale, ratio, row_of(reg / 2, e));
            at = is_masked(ratio) ? 0.0F : gradient * fmaf(-tanh, tanh, 1.0F);
        }
    }
}

/* x = G from products, of either argument of the KL. */
template <typename ROW_OF>
__device__ inline void gradient_block(logits<1, 2> &x, const ratio_params &params, const uint4 (&planes)[2],
                                      ROW_OF row_of)
{
    const skl_cuda_argument &wrt = wrt_of(params);
    const float scale = wrt.capped ? wrt.softcap_2 : wrt.scale, tanh_factor = wrt.capped ? 1.0F : 0.0F;
#pragma unroll
    for (int e = 0; wrt.capped && e < 8; e++)
        x.at[0][e / 4][e % 4] = tanhf(x.at[0][e / 4][e % 4] * wrt.scale);
    if (params.of_teacher == params.reverse)
        gradient_block<true>(x, scale, tanh_factor, planes, row_of);
    else
        gradient_block<false>(x, scale, tanh_factor, planes, row_of);
}

/* ---- Policies ----------------------------------------------------------------------------------------------- */

template <typename ELEMENT> struct ratio_pairs {
    typedef ELEMENT element;
    typedef ratio_params params_type;
    static constexpr int DIM = SKL_GROUP_DIM_MAX, M = 1, PLANES = 2, WIDTH = DIM;
    static constexpr bool HAS_UNIT = true, BOUNDED = false;
};

template <typename ELEMENT> struct ratio_queries : ratio_pairs<ELEMENT> {
    const ratio_params &params;
    const query_slot &slot;
    int head;
    gradient_row rows[2];

    __device__ ratio_queries(const ratio_params &of_launch, const query_slot &of_block, int of_side, int block_first)
        : params(of_launch), slot(of_block), head(of_side)
    {
#pragma unroll
        for (int half = 0; half < 2; half++)
            rows[half] = gradient_row_of(params, slot, head, block_first + acc_row<1>(0, half));
    }

    __device__ void apply(logits<1, 2> &x, const uint4 (&planes)[1][2]) const
    {
        gradient_block(x, params, planes[0], [&](int, int e) -> const gradient_row & { return rows[e / 2]; });
    }

    template <typename SUM> __device__ void store_row(int row, int half, float unit, SUM sum) const
    {
        if (row >= slot.count)
            return;
        const skl_side of = params.of_teacher ? skl_teacher_of(&params.problem, &params.call)
                                              : skl_student_of(&params.problem, &params.call);
        const skl_sequence &s = slot.sequence;
        const range32 sees = visible_range(params, slot, row, 0);
        const bool blind = sees.begin >= sees.end; /* exactly 0, whatever its upstream gradient is */
        const float factor = blind ? 0.0F : params.wrt.scale * rows[half].grad * unit;
        const gradient_columns columns(of.dq->data, SKL_ROW(*of.dq, s.batch, head, s.query_begin + slot.first + row),
                                       of.grad_dtype, (int)wrt_of(params).dim);
#pragma unroll
        for (int c = 0; c < SKL_GROUP_DIM_MAX / 8; c++)
            columns.store_pair(c, sum(c, 0) * factor, sum(c, 1) * factor, ELEMENT());
    }
};

template <typename ELEMENT> struct ratio_keys : ratio_pairs<ELEMENT> {
    typedef gradient_row row;
    struct slot_values {
    };
    const ratio_params &params;
    key_smem<ratio_keys> &smem;
    int first_head, heads;

    __device__ ratio_keys(const ratio_params &of_launch, key_smem<ratio_keys> &of_block)
        : params(of_launch), smem(of_block)
    {
    }

    /* A slot's teacher heads may have several key heads. */
    __device__ void begin_slot(int)
    {
        const int slot_first = smem.slot.head * params.wrt.heads;
        const int key_first = smem.work.key_head * params.wrt.heads_per_key;
        first_head = max(0, key_first - slot_first);
        heads = min(params.wrt.heads, key_first + params.wrt.heads_per_key - slot_first) - first_head;
    }

    __device__ gradient_row row_of(int of_slot, int row) const
    {
        return gradient_row_of(params, smem.slot, smem.slot.head * params.wrt.heads + of_slot, row);
    }

    __device__ void apply(logits<1, 2> &x, const uint4 (&planes)[1][2], const gradient_row *queries, float) const
    {
        gradient_row columns[2][2];
#pragma unroll
        for (int e = 0; e < 4; e++) {
            const float4 query = *(const float4 *)(const void *)&queries[acc_column(e / 2, e % 2)];
            columns[e / 2][e % 2] = {query.x, query.y, query.z, query.w};
        }
        gradient_block(x, params, planes[0],
                       [&](int block, int e) -> const gradient_row & { return columns[block][e % 2]; });
#pragma unroll
        for (int e = 0; e < 8; e++) { /* 0 stays 0: the pair may be masked */
            float &at = x.at[0][e / 4][e % 4];
            at = at == 0.0F ? 0.0F : at * columns[e / 4][e % 2].grad;
        }
    }
};

} // namespace sm80

#endif
