/* f32 products on the tensor cores of f16, three wgmmas for one:
 *
 *   q k = factor_q factor_k (q_high k_high + q_high k_low + q_low k_high)
 *
 * common/split_rows.cu splits rows into high and low. f16 has the 11 significant bits of TF32 at twice its rate; what
 * it lacks in range, the factors of the rows make up for. The product q_low k_low, which is left out, is below 2^-24
 * of the others. Small products are added first, while the accumulators are small, too.
 *
 * A split row in memory is [high | low], 2 DIM elements. */
#ifndef SKL_CUDA_SM90_SPLIT_CUH
#define SKL_CUDA_SM90_SPLIT_CUH

#include "cuda/common/row_stats.cuh"
#include "cuda/sm90/pipeline.cuh"

namespace sm90
{

using tensor_core::factors_of;
using tensor_core::product_of;

constexpr float SPLIT_LARGEST = 0x1p14F; /* to its double: the largest magnitude of a split row, before its factor */

/* The element type of kernels for split rows. */
struct split_f32 {
};

/* Operands in memory: `type` is that of an element, a row of DIM has PARTS DIM of them. */
template <typename ELEMENT> struct operand {
    typedef ELEMENT type;
    static constexpr bool SPLIT = false;
    static constexpr int PARTS = 1;
};

template <> struct operand<split_f32> {
    typedef __half type;
    static constexpr bool SPLIT = true;
    static constexpr int PARTS = 2;
};

/* Factors of a stage of streamed rows: of A and of B, each in the 16 bits of bf16, which hold a power of two. */
struct alignas(8) stage_factors {
    uint32_t rows[STAGE_ROWS];

    __device__ void set(int row, float a, float b)
    {
        rows[row] = __byte_perm(__float_as_uint(a), __float_as_uint(b), 0x7632);
    }
};

/* Factors of two adjacent streamed rows, which are columns of the logits. */
struct column_factors {
    float2 a, b;
};

__device__ inline column_factors load_factors(const stage_factors &stage, int column_block)
{
    const float2 rows = load_shared_2(*(const float *)(const void *)&stage.rows[acc_column(column_block, 0)]);
    const uint32_t first = __float_as_uint(rows.x), second = __float_as_uint(rows.y);
    return {make_float2(__uint_as_float(first << 16), __uint_as_float(second << 16)),
            make_float2(__uint_as_float(first & 0xFFFF0000U), __uint_as_float(second & 0xFFFF0000U))};
}

template <int COUNT> struct factor_ring {
    stage_factors at[COUNT];
};

template <> struct factor_ring<0> {
};

/* Factor of a row of a tensor; 0 after its last row. */
__device__ inline float row_factor(const skl_input &factors, int64_t batch, int64_t head, int64_t row, int64_t rows)
{
    return row < rows ? ((const float *)factors.data)[SKL_ROW(factors, batch, head, row)] : 0.0F;
}

/* Products of a stage, times the factors of the streamed rows; of A, or of B (OF_B). */
template <bool OF_B> struct split_products {
    const stage_logits &x;
    const stage_factors &factors;
};

template <bool OF_B> __device__ inline float2 factors_of(const split_products<OF_B> &products, int block)
{
    const column_factors factors = load_factors(products.factors, block);
    return OF_B ? factors.b : factors.a;
}

template <bool OF_B>
__device__ inline float product_of(const split_products<OF_B> &products, float2 factors, int block, int e)
{
    return products.x[block][e] * (e % 2 ? factors.y : factors.x);
}

/* Scales of a thread's two rows: that of the argument times the rows' factors. */
struct row_scales {
    float of[2];
};

__device__ inline float scale_of(const row_scales &scales, int half)
{
    return scales.of[half];
}

/* For the logit gradients: factors of the streamed rows, and scales of the stationary ones. */
struct factored_products {
    const stage_factors &stage;
    const row_scales &scales_a, &scales_b;
    column_factors columns;

    __device__ void load_columns(int column_block)
    {
        columns = load_factors(stage, column_block);
    }

    template <bool OF_B> __device__ float factor(int parity) const
    {
        const float2 &factors = OF_B ? columns.b : columns.a;
        return parity ? factors.y : factors.x;
    }

    template <bool OF_B> __device__ float product(float product, int parity) const
    {
        return product * factor<OF_B>(parity);
    }

    template <bool OF_B> __device__ float scale(const skl_cuda_argument &, int half) const
    {
        return (OF_B ? scales_b : scales_a).of[half];
    }
};

/* high + low = the two values, in f16. */
struct split_pair {
    uint32_t high, low;
};

__device__ inline split_pair split(float first, float second)
{
    const uint32_t high = pack(first, second, __half());
    const float2 rounded = unpack(high, __half());
    return {high, pack(first - rounded.x, second - rounded.y, __half())};
}

/* Issues the wgmmas of x = stationary rows times streamed rows. high(step), low(step): operands of the stationary
 * rows, in registers or shared memory. */
template <int DIM, typename HIGH, typename LOW>
__device__ inline void issue_split_logits(stage_logits &x, HIGH high, LOW low, uint32_t stage_smem)
{
    constexpr int STEPS = DIM / 16;
#pragma unroll
    for (int step = 0; step < STEPS; step++) {
        wgmma<false>(x, low(step), k_step_descriptor(stage_smem, step, STAGE_ROWS), step > 0, __half());
        wgmma<false>(x, high(step), k_step_descriptor(stage_smem, STEPS + step, STAGE_ROWS), 1, __half());
    }
#pragma unroll
    for (int step = 0; step < STEPS; step++)
        wgmma<false>(x, high(step), k_step_descriptor(stage_smem, step, STAGE_ROWS), 1, __half());
}

/* Issues the wgmmas of sum = g times the 64 streamed rows of a stage. */
template <int DIM>
__device__ inline void issue_split_gradient(float (&sum)[DIM / 8][4], const uint32_t (&high)[4][4],
                                            const uint32_t (&low)[4][4], const row_stage<2 * DIM> &stage)
{
    constexpr int STEPS = STAGE_ROWS / 16, STEP = 16 * 128 / 16, LOW = DIM / 64 * STAGE_ROWS * 128 / 16;
    const uint32_t rows = mn_major_operand(&stage, STAGE_ROWS * 128);
#pragma unroll
    for (int step = 0; step < STEPS; step++) {
        wgmma<true>(sum, low[step], smem_descriptor(rows + step * STEP), step > 0, __half());
        wgmma<true>(sum, high[step], smem_descriptor(rows + LOW + step * STEP), 1, __half());
    }
#pragma unroll
    for (int step = 0; step < STEPS; step++)
        wgmma<true>(sum, high[step], smem_descriptor(rows + step * STEP), 1, __half());
}

/* Units of f16 gradients (common/row_stats.cuh), one per stationary row: what one row attends to, such as a key much
 * larger than all others, makes no other row less accurate. */
struct row_units {
    gradient_unit<__half> of[2] = {{-126}, {-126}}; /* the thread's rows */

    /* Grows the units for values up to `largest` and rescales the gradient. */
    template <int BLOCKS> __device__ void fit(float (&gradient)[BLOCKS][4], const float (&largest)[2])
    {
        const int former[2] = {of[0].exponent, of[1].exponent};
        no_gradient none;
        of[0].fit(none, largest[0]);
        of[1].fit(none, largest[1]);
        if (!__any_sync(~0U, of[0].exponent != former[0] || of[1].exponent != former[1]))
            return;
#pragma unroll
        for (int half = 0; half < 2; half++) {
            const float factor = power_of_2(max(former[half] - of[half].exponent, -127));
#pragma unroll
            for (int e = 0; e < BLOCKS * 2; e++)
                gradient[e / 2][half * 2 + e % 2] *= factor;
        }
    }

  private:
    struct no_gradient {
        __device__ void scale(float)
        {
        }
    };
};

} // namespace sm90

#endif
