/* Gradients of a student from differences G = S - P of a strip (strip.cuh) by mma.sync: policies for gradients.cuh.
 *
 *   queries    D_g = (G [A_g > 0]) k             G [A > 0]: the ReLU's gate; without a ReLU all of G
 *   keys       dk += (w_g G [A_g > 0])^T q_g     w_g with the upstream gradient, of any magnitude
 *
 * There are no exponentials. common/strips/gradients.cuh makes dq and dw of D. */
#ifndef SKL_CUDA_SM80_STRIPS_DIFFERENCE_GRADIENTS_CUH
#define SKL_CUDA_SM80_STRIPS_DIFFERENCE_GRADIENTS_CUH

#include "cuda/sm80/strips/gradients.cuh"

namespace sm80
{

/* Two elements of G, from all of its planes. */
template <int PLANES> __device__ inline float2 g_pair(const uint4 (&planes)[PLANES], int reg)
{
    const float2 rounded = unpack(word_of(planes[0], reg), skl_f16());
    const float2 residual = unpack(word_of(planes[PLANES - 1], reg), skl_f16());
    return PLANES == 1 ? rounded : make_float2(rounded.x + residual.x, rounded.y + residual.y);
}

/* a = G [A > 0] of a 16 x 16 block, times weights. weights(block): of the thread's two columns in a block of 8. */
template <int M, int PLANES, typename WEIGHTS>
__device__ inline void gate_block(logits<M, 2> &a, int m, const uint4 (&planes)[PLANES], float least, WEIGHTS weights)
{
#pragma unroll
    for (int reg = 0; reg < 4; reg++) {
        const float2 g = g_pair(planes, reg), of_columns = weights(reg / 2);
        float(&pair)[4] = a.at[m][reg / 2];
        pair[reg % 2 * 2] = gate(g.x, pair[reg % 2 * 2], of_columns.x, least);
        pair[reg % 2 * 2 + 1] = gate(g.y, pair[reg % 2 * 2 + 1], of_columns.y, least);
    }
}

template <typename ELEMENT, int HEAD_DIM, int TILES> struct difference_queries {
    typedef ELEMENT element;
    typedef strip_params params_type;
    static constexpr int DIM = HEAD_DIM, M = TILES, PLANES = 1;
    static constexpr bool HAS_UNIT = false; /* |S - P| <= 1 */
    query_gradients<ELEMENT, DIM> gradients;
    float least;

    __device__ difference_queries(const strip_params &params, const query_slot &slot, int head, int)
        : gradients{params, slot, head}, least(params.least)
    {
    }

    __device__ void apply(logits<M, 2> &a, const uint4 (&planes)[M][PLANES]) const
    {
#pragma unroll
        for (int m = 0; m < M; m++)
            gate_block(a, m, planes[m], least, [](int) { return make_float2(1.0F, 1.0F); });
    }

    template <typename SUM> __device__ void store_row(int row, int, float, SUM sum) const
    {
        gradients.store_row(row, sum);
    }
};

/* The upstream gradient times G_UNIT of a query that attends to one of the keys [first, first + count). 0 for any
 * other query, so that its values do not change the unit of f16. */
__device__ inline float upstream_factor(const strip_params &params, const query_slot &slot, int row, int first,
                                        int count)
{
    const range32 sees = visible_range(params, slot, row, first);
    const bool any = sees.begin < sees.end && overlaps(sees, 0, count);
    return any ? upstream_of(params, slot, slot.first + row) * G_UNIT : 0.0F;
}

template <typename ELEMENT, int HEAD_DIM, int TILES> struct difference_keys {
    typedef ELEMENT element;
    typedef strip_params params_type;
    typedef float row; /* a query's weight times its factor */
    struct slot_values {
        float factors[SIDE]; /* upstream_factor of a slot's queries */
    };
    /* WIDTH: the sums of more dimensions do not fit into registers next to the stationary rows. */
    static constexpr int DIM = HEAD_DIM, M = TILES, PLANES = G_PLANES<ELEMENT>, WIDTH = DIM < 128 ? DIM : 128;
    static constexpr bool BOUNDED = true;
    const strip_params &params;
    key_smem<difference_keys> &smem;
    int first_head, heads;

    __device__ difference_keys(const strip_params &of_launch, key_smem<difference_keys> &of_block)
        : params(of_launch), smem(of_block), first_head(0), heads(of_launch.wrt.heads)
    {
    }

    __device__ void begin_slot(int first_key)
    {
        smem.factors[threadIdx.x] =
            upstream_factor(params, smem.slot, (int)threadIdx.x, first_key, BLOCK_ROWS<difference_keys>);
        __syncthreads();
    }

    /* Non-finite weights become 0: if they matter, G is NaN already. */
    __device__ float row_of(int head, int row) const
    {
        const query_slot &slot = smem.slot;
        const skl_sequence &s = slot.sequence;
        const float weight =
            weight_at(params, s.batch, slot.head, s.query_begin + query_of(slot, row), head) * smem.factors[row];
        return fabsf(weight) < INFINITY ? weight : 0.0F;
    }

    /* |S - P| <= 1: the weights bound their product with G. */
    __device__ float bound(int stage) const
    {
        const float(&weights)[STAGE_ROWS<DIM>] = smem.rows[stage];
        const int lane = (int)threadIdx.x % 32;
        return warp_max(fmaxf(fabsf(weights[lane]), fabsf(weights[STAGE_ROWS<DIM> - 32 + lane]))) / G_UNIT;
    }

    __device__ void apply(logits<M, 2> &a, const uint4 (&planes)[M][PLANES], const float *weights,
                          float inverse) const
    {
#pragma unroll
        for (int m = 0; m < M; m++)
            gate_block(a, m, planes[m], params.least, [&](int block) {
                const float2 pair = *(const float2 *)&weights[acc_column(block, 0)];
                return make_float2(pair.x * inverse, pair.y * inverse);
            });
    }
};

} // namespace sm80

#endif
