/* Splits rows of any type into pairs of f16 rows, for kernels that multiply f32 on tensor cores (sm90/two_term.cuh):
 *
 *   row = factor (high + low)      high = f16(row / factor), low = f16(row / factor - high)
 *
 * The factor is a power of two that takes the largest magnitude of the row to 2^14 .. 2^15. high and low together
 * have the 24 bits of f32; only elements below 2^-15 of the largest lose some, and never more than 2^-39 of the
 * largest.
 *
 * high and low are finite, whatever the row holds. The factor of a row with infinities is infinite, and high has
 * their signs; the factor of a row with a NaN is NaN. So a product is not finite exactly where a kernel multiplies it
 * by the factor, and masked rows need no further care.
 *
 * Memory bound: one warp per row, 4 elements per lane. */
#include "base/convert.h"
#include "cuda/common/ptx.cuh"
#include "cuda/common/params.cuh"
#include "cuda/common/tensor_map.h"

namespace two_term_rows
{

constexpr int THREADS = 256;
constexpr int QUAD = 4; /* elements per lane */

/* The conversion of one of the four tensors. */
struct two_term_task {
    skl_input from, to, factors;
    skl_dtype dtype;
    int dim, term_dim; /* elements of a row, and of its high or low row */
    bool vectorized;   /* one load per quad */
    int64_t heads, rows, count;
};

struct two_term_tasks {
    two_term_task at[4];
};

static __device__ float4 load_quad(const two_term_task &task, int64_t offset, int c)
{
    if (task.vectorized && c < task.dim) {
        if (task.dtype == SKL_F32)
            return __ldg((const float4 *)(const void *)((const float *)task.from.data + offset + c));
        const uint2 bits = __ldg((const uint2 *)(const void *)((const uint16_t *)task.from.data + offset + c));
        const bool f16 = task.dtype == SKL_F16;
        const float2 low = f16 ? unpack(bits.x, skl_f16()) : unpack(bits.x, skl_bf16());
        const float2 high = f16 ? unpack(bits.y, skl_f16()) : unpack(bits.y, skl_bf16());
        return make_float4(low.x, low.y, high.x, high.y);
    }
    float quad[QUAD];
#pragma unroll
    for (int e = 0; e < QUAD; e++)
        quad[e] = c + e < task.dim ? skl_load(task.from.data, task.dtype, offset + c + e) : 0.0F;
    return make_float4(quad[0], quad[1], quad[2], quad[3]);
}

static __device__ uint32_t magnitude_of(float value)
{
    return __float_as_uint(value) & 0x7FFFFFFFU;
}

static __device__ float power_of_2(uint32_t biased_exponent)
{
    return __uint_as_float(biased_exponent << 23);
}

/* Sign of an infinity, 0 for everything else. */
static __device__ float sign_of_infinity(float value)
{
    return isinf(value) ? copysignf(1.0F, value) : 0.0F;
}

static __device__ void store_terms(const two_term_task &task, int64_t index)
{
    constexpr uint32_t INFINITE = 0x7F800000U, LARGEST = 14; /* exponent of a row's largest magnitude */
    const int lane = (int)(threadIdx.x % 32), c = lane * QUAD;
    const int64_t row = index % task.rows, head = index / task.rows % task.heads,
                  batch = index / task.rows / task.heads;
    float4 x = load_quad(task, SKL_ROW(task.from, batch, head, row), c);
    const uint32_t largest = __reduce_max_sync(
        ~0U, max(max(magnitude_of(x.x), magnitude_of(x.y)), max(magnitude_of(x.z), magnitude_of(x.w))));
    const uint32_t exponent = max(largest >> 23, LARGEST + 1); /* biased; the factor is a normal number */
    float factor = power_of_2(exponent - LARGEST);
    if (largest < INFINITE) {
        const float inverse = power_of_2(254 + LARGEST - exponent);
        x = make_float4(x.x * inverse, x.y * inverse, x.z * inverse, x.w * inverse);
    } else if (largest == INFINITE) {
        factor = INFINITY;
        x = make_float4(sign_of_infinity(x.x), sign_of_infinity(x.y), sign_of_infinity(x.z), sign_of_infinity(x.w));
    } else {
        factor = NAN;
        x = make_float4(0.0F, 0.0F, 0.0F, 0.0F);
    }
    if (c < task.term_dim) {
        const uint2 high = make_uint2(pack(x.x, x.y, skl_f16()), pack(x.z, x.w, skl_f16()));
        const float2 left = unpack(high.x, skl_f16()), right = unpack(high.y, skl_f16());
        const uint2 low =
            make_uint2(pack(x.x - left.x, x.y - left.y, skl_f16()), pack(x.z - right.x, x.w - right.y, skl_f16()));
        uint16_t *const to = (uint16_t *)task.to.data + SKL_ROW(task.to, batch, head, row) + c;
        *(uint2 *)(void *)to = high;
        *(uint2 *)(void *)(to + task.term_dim) = low;
    }
    if (lane == 0)
        ((float *)task.factors.data)[SKL_ROW(task.factors, batch, head, row)] = factor;
}

static __global__ void __launch_bounds__(THREADS) two_term_rows(const __grid_constant__ two_term_tasks tasks)
{
    const two_term_task &task = tasks.at[blockIdx.y];
    constexpr int WARPS = THREADS / 32;
    for (int64_t index = (int64_t)blockIdx.x * WARPS + threadIdx.x / 32; index < task.count;
         index += (int64_t)gridDim.x * WARPS)
        store_terms(task, index);
}

static two_term_task task_of(const skl_input *from, skl_dtype dtype, int64_t dim, int64_t heads,
                             skl_tensor_rows shape, const skl_input *to, const skl_input *factors, int32_t pair_dim)
{
    const int64_t size = QUAD * (int64_t)skl_dtype_size(dtype);
    const bool vectorized = (uintptr_t)from->data % (uintptr_t)size == 0 && dim % QUAD == 0 &&
                            (from->stride_batch | from->stride_head | from->stride_row) % QUAD == 0;
    return {*from,        *to,        *factors, dtype,      (int)dim,
            pair_dim / 2, vectorized, heads,    shape.rows, shape.batch * heads * shape.rows};
}

extern "C" cudaError_t skl_cuda_two_term_rows(const skl_cuda_params *params, const skl_cuda_launch *launch)
{
    const skl_problem *const p = &params->problem;
    const bool reverse = p->direction == SKL_KL_REVERSE;
    const skl_cuda_argument &t = reverse ? params->b : params->a, &s = reverse ? params->a : params->b;
    const skl_inputs &in = params->call.inputs;
    const skl_tensor_rows queries = skl_query_rows(p), keys = skl_key_rows(p);
    const two_term_tasks tasks = {{
        task_of(&in.q_t, p->dtype_t, p->dim_t, p->heads_t, queries, &t.q, &t.q_factors, t.dim),
        task_of(&in.q_s, p->dtype_s, p->dim_s, p->heads_s, queries, &s.q, &s.q_factors, s.dim),
        task_of(&in.k_t, p->dtype_t, p->dim_t, p->key_heads_t, keys, &t.k, &t.k_factors, t.dim),
        task_of(&in.k_s, p->dtype_s, p->dim_s, p->key_heads_s, keys, &s.k, &s.k_factors, s.dim),
    }};
    int64_t rows = 1;
    for (const two_term_task &task : tasks.at)
        rows = skl_max(rows, task.count);
    const int64_t blocks_max = 1 << 14; /* grid-stride loops do the rest */
    record_launch(launch->kernel, SKL_VARIANT_TWO_TERM, 1);
    two_term_rows<<<dim3((unsigned)skl_min(blocks_max, skl_ceil_div(rows, THREADS / 32)), 4), THREADS, 0,
                    params->call.stream>>>(tasks);
    return cudaPeekAtLastError();
}

} // namespace two_term_rows
