/* Rows around the attention backward that carries its KL: what its kernel reads per query, and f32 sums of dq. */
#ifndef SKL_CUDA_COMMON_ATTENTION_ROWS_CUH
#define SKL_CUDA_COMMON_ATTENTION_ROWS_CUH

#include <type_traits>

#include "cuda/common/element.cuh"
#include "cuda/common/params.cuh"

/* Row statistics of a query. LSEs are in base 2. log2 |g| is subtracted from the teacher's, so that it gives |g| P. g
 * is the weight of the row's KL, D = <do, o>. */
struct alignas(16) attention_row {
    float lse_b, shift; /* the student's LSE; D - g */
    float lse_a, weight;
};
static_assert(sizeof(attention_row) == SKL_CARRYING_ROW_SIZE, "cuda/select sizes the workspace");

/* Numbers that bound dS, as bits of floats that are not negative: the largest norm of a row of do and of v, and the
 * largest |g|. The norms are known for f16 alone. */
struct attention_largest {
    uint32_t d_out, value, weight;
    int32_t negative; /* whether a weight is negative */
};
static_assert(sizeof(attention_largest) == SKL_CARRYING_LARGEST_SIZE, "cuda/select sizes the workspace");

struct attention_backward_params : skl_cuda_params {
    skl_attention of;           /* in the constant bank: call.attention is a host address */
    attention_row *rows;        /* [batch, heads_s, len_q], packed [heads_s, total_q] */
    attention_largest *largest; /* maxima over all rows */
    skl_output dq_sums;         /* f32 sums of dq, without its scale, in blocks of 8 dimensions: first the even
                                 * ones */
    int32_t head_group;         /* key heads whose tiles run together */
};

/* log2 of a factor of S and P, and so of all gradients until they are stored. It keeps small dS of f16 from
 * underflow: |dS| <= 2 |do| |v| + |g|. At least 0, so that S loses no bits: a dS above 65504 overflows, as in any
 * attention backward of f16. */
template <typename ELEMENT> __device__ inline float log2_unit(const attention_largest &largest)
{
    if constexpr (!std::is_same<ELEMENT, skl_f16>::value)
        return 0.0F;
    const float bound =
        2.0F * __uint_as_float(largest.d_out) * __uint_as_float(largest.value) + __uint_as_float(largest.weight);
    return fminf(14.0F, fmaxf(0.0F, floorf(14.0F - log2f(bound))));
}

attention_backward_params attention_backward_params_of(const skl_cuda_params *params, const skl_cuda_launch *launch);

/* Computes the rows, and clears the sums. */
cudaError_t prepare_attention_rows(const attention_backward_params *params);

/* dq = scale sums, in dq's type. */
cudaError_t store_dq_sums(const attention_backward_params *params);

#endif
