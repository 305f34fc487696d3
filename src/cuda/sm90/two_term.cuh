/* f32 products on the tensor cores of f16, three wgmmas for one:
 *
 *   q k = factor_q factor_k (q_high k_high + q_high k_low + q_low k_high)
 *
 * common/two_term_rows.cu turns rows into high and low. f16 has the 11 significant bits of TF32 at twice its rate;
 * the factors of the rows make up for its smaller range. The product q_low k_low, which is left out, is below 2^-24
 * of the others. Tensor cores truncate their sums: small products are added first, while the sums are small, too.
 *
 * A two-term row in memory is [high | low], 2 DIM elements. */
#ifndef SKL_CUDA_SM90_TWO_TERM_CUH
#define SKL_CUDA_SM90_TWO_TERM_CUH

#include "cuda/common/row_stats.cuh"
#include "cuda/sm90/pipeline.cuh"

namespace sm90
{

using tensor_core::factors_of;
using tensor_core::product_of;

/* The element type of kernels for two-term rows. */
struct two_term_f32 {
};

/* Operands in memory: `type` is the element type, and a row of DIM has TERMS DIM elements. */
template <typename ELEMENT> struct operand {
    typedef ELEMENT type;
    static constexpr bool TWO_TERM = false;
    static constexpr int TERMS = 1;
};

template <> struct operand<two_term_f32> {
    typedef skl_f16 type;
    static constexpr bool TWO_TERM = true;
    static constexpr int TERMS = 2;
};

constexpr float TWO_TERM_LARGEST = 0x1p14F; /* to its double: largest magnitude of high in a row */

/* ---- Factors of streamed rows ------------------------------------------------------------------------------- */

/* Factors of a stage's rows: of A and of B, each in the 16 bits of bf16, which hold a power of two. */
struct alignas(8) stage_factors {
    uint32_t rows[STAGE_ROWS];
};

/* One warp fills it. */
template <int COUNT> struct factor_ring {
    stage_factors at[COUNT];
    uint64_t full[COUNT];

    __device__ void init_barriers()
    {
        for (uint64_t &barrier : full)
            barrier_init(barrier, 32);
    }
};

template <> struct factor_ring<0> {
    __device__ void init_barriers()
    {
    }
};

/* A lane's factors of a stage, in registers between load and store. */
struct lane_factors {
    float a[STAGE_ROWS / 32], b[STAGE_ROWS / 32];
};

/* Factor of a row of a tensor; 0 from row `end` on. */
__device__ inline float factor_of_row(const skl_input &factors, int64_t batch, int64_t head, int64_t row, int64_t end)
{
    return row < end ? ((const float *)factors.data)[SKL_ROW(factors, batch, head, row)] : 0.0F;
}

/* Executed by one warp, for the rows from `first` on. */
__device__ inline lane_factors load_stage_factors(const skl_input &factors_a, int64_t head_a,
                                                  const skl_input &factors_b, int64_t head_b, int64_t batch,
                                                  int64_t first, int64_t end)
{
    lane_factors loaded;
#pragma unroll
    for (int n = 0; n < STAGE_ROWS / 32; n++) {
        const int64_t row = first + n * 32 + threadIdx.x % 32;
        loaded.a[n] = factor_of_row(factors_a, batch, head_a, row, end);
        loaded.b[n] = factor_of_row(factors_b, batch, head_b, row, end);
    }
    return loaded;
}

__device__ inline void store_stage_factors(stage_factors &to, const lane_factors &from)
{
#pragma unroll
    for (int n = 0; n < STAGE_ROWS / 32; n++)
        to.rows[n * 32 + threadIdx.x % 32] =
            __byte_perm(__float_as_uint(from.a[n]), __float_as_uint(from.b[n]), 0x7632);
}

/* Factors of two adjacent streamed rows, which are columns of the logits. */
struct column_factors {
    float2 a, b;
};

__device__ inline column_factors load_column_factors(const stage_factors &stage, int column_block)
{
    const float2 rows = load_shared_2(*(const float *)(const void *)&stage.rows[acc_column(column_block, 0)]);
    const uint32_t first = __float_as_uint(rows.x), second = __float_as_uint(rows.y);
    return {make_float2(__uint_as_float(first << 16), __uint_as_float(second << 16)),
            make_float2(__uint_as_float(first & 0xFFFF0000U), __uint_as_float(second & 0xFFFF0000U))};
}

/* ---- Products ----------------------------------------------------------------------------------------------- */

/* Factors of a thread's two stationary rows. */
struct row_factors {
    float of[2];
};

/* `first`: first row of the tile, in the tensor. */
__device__ inline row_factors load_row_factors(const skl_input &factors, int64_t batch, int64_t head, int64_t first,
                                               int64_t end)
{
    return {{factor_of_row(factors, batch, head, first + acc_row<1>(0, 0), end),
             factor_of_row(factors, batch, head, first + acc_row<1>(0, 1), end)}};
}

/* Products of a stage for the row sums of a forward; of A, or of B (OF_B). */
template <bool OF_B> struct two_term_products {
    const stage_logits &x;
    const stage_factors &columns;
    const row_factors &rows;
};

template <bool OF_B> __device__ inline float2 factors_of(const two_term_products<OF_B> &products, int block)
{
    const column_factors factors = load_column_factors(products.columns, block);
    return OF_B ? factors.b : factors.a;
}

template <bool OF_B>
__device__ inline float product_of(const two_term_products<OF_B> &products, float2 factors, int block, int e)
{
    return products.x[block][e] * (e % 2 ? factors.y : factors.x) * products.rows.of[e / 2];
}

/* Factors of the logit gradients of a backward. */
struct two_term_factors {
    const stage_factors &stage;
    const row_factors &rows_a, &rows_b;
    column_factors columns;

    __device__ void load_columns(int column_block)
    {
        columns = load_column_factors(stage, column_block);
    }

    template <bool OF_B> __device__ float of_column(int parity) const
    {
        const float2 &factors = OF_B ? columns.b : columns.a;
        return parity ? factors.y : factors.x;
    }

    template <bool OF_B> __device__ float product(float accumulator, int half, int parity) const
    {
        return accumulator * of_column<OF_B>(parity) * (OF_B ? rows_b : rows_a).of[half];
    }
};

/* Issues the wgmmas of x = stationary rows times streamed rows. high(step), low(step): operands of the stationary
 * rows, in registers or shared memory. */
template <int DIM, typename HIGH, typename LOW>
__device__ inline void issue_two_term_logits(stage_logits &x, HIGH high, LOW low, uint32_t stage_smem)
{
    constexpr int STEPS = DIM / 16;
#pragma unroll
    for (int step = 0; step < STEPS; step++) {
        wgmma<false>(x, low(step), k_step_descriptor(stage_smem, step, STAGE_ROWS), step > 0, skl_f16());
        wgmma<false>(x, high(step), k_step_descriptor(stage_smem, STEPS + step, STAGE_ROWS), 1, skl_f16());
    }
#pragma unroll
    for (int step = 0; step < STEPS; step++)
        wgmma<false>(x, high(step), k_step_descriptor(stage_smem, step, STAGE_ROWS), 1, skl_f16());
}

/* ---- Gradients ---------------------------------------------------------------------------------------------- */

/* Two values as packed f16: high + low. */
struct two_terms {
    uint32_t high, low;
};

__device__ inline two_terms two_terms_of(float first, float second)
{
    const uint32_t high = pack(first, second, skl_f16());
    const float2 rounded = unpack(high, skl_f16());
    return {high, pack(first - rounded.x, second - rounded.y, skl_f16())};
}

/* Issues the wgmmas of sum = G times the 64 streamed rows of a stage. */
template <int DIM>
__device__ inline void issue_two_term_gradient(float (&sum)[DIM / 8][4], const uint32_t (&high)[4][4],
                                               const uint32_t (&low)[4][4], const row_stage<2 * DIM> &stage)
{
    constexpr int STEPS = STAGE_ROWS / 16, STEP = 16 * 128 / 16, LOW = DIM / 64 * STAGE_ROWS * 128 / 16;
    const uint32_t rows = mn_major_operand(&stage, STAGE_ROWS * 128);
#pragma unroll
    for (int step = 0; step < STEPS; step++) {
        wgmma<true>(sum, low[step], smem_descriptor(rows + step * STEP), step > 0, skl_f16());
        wgmma<true>(sum, high[step], smem_descriptor(rows + LOW + step * STEP), 1, skl_f16());
    }
#pragma unroll
    for (int step = 0; step < STEPS; step++)
        wgmma<true>(sum, high[step], smem_descriptor(rows + step * STEP), 1, skl_f16());
}

/* Units of f16 gradients (common/row_stats.cuh), one per stationary row: a key much larger than all others makes no
 * row less accurate that does not attend to it. */
struct row_units {
    gradient_unit<skl_f16> of[2] = {{-126}, {-126}}; /* the thread's rows */

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
