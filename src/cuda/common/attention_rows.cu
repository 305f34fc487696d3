/* Memory-bound kernels around the attention backward that carries its KL. LANES lanes share a row, and each has
 * several rows in flight. */
#include "cuda/common/attention_rows.cuh"

#include "base/convert.h"
#include "cuda/common/launch.cuh"
#include "cuda/common/ptx.cuh"
#include "cuda/common/row_stats.cuh"

constexpr int THREADS = 256, ROWS = 4, OCTET = 8;              /* rows of a lane in flight; elements of a lane */
constexpr int WIDE = SKL_CARRYING_DIM_MAX / OCTET, NARROW = 8; /* lanes of a row, in one step */

template <int LANES> constexpr int BLOCK_ROWS = THREADS / LANES *ROWS;

/* A row of one head of one batch. */
struct row_position {
    int64_t batch, head, row;
};

static __host__ __device__ int64_t rows_per_head(const skl_problem &p)
{
    return p.packed ? p.total_q : p.len_q;
}

typedef void row_kernel(attention_backward_params);

/* Launches a kernel, as compiled for the lanes of a row. Rows of a head are in x, heads of all batches in y. */
static cudaError_t launch_rows(row_kernel *wide, row_kernel *narrow, const attention_backward_params &params)
{
    const skl_problem &p = params.problem;
    const bool is_wide = p.dim_s > NARROW * OCTET;
    const int64_t y_max = 65535, x_max = 1 << 16; /* grid-stride loops do the rest */
    const int64_t heads = (p.packed ? 1 : p.batch) * p.heads_s;
    const int64_t block_rows = is_wide ? BLOCK_ROWS<WIDE> : BLOCK_ROWS<NARROW>;
    const dim3 blocks((unsigned)skl_min(x_max, skl_ceil_div(rows_per_head(p), block_rows)),
                      (unsigned)skl_min(y_max, heads));
    return launch_blocks(is_wide ? wide : narrow, blocks, THREADS, 0, params);
}

/* Calls visit(positions, whether each exists) for the rows of these lanes, ROWS at a time. */
template <int LANES, typename VISIT> static __device__ void for_each_row(const skl_problem &p, VISIT visit)
{
    const int64_t rows = rows_per_head(p);
    const unsigned heads = (unsigned)p.heads_s, all_heads = (unsigned)((p.packed ? 1 : p.batch) * p.heads_s);
    for (unsigned head = blockIdx.y; head < all_heads; head += gridDim.y)
        for (int64_t first = blockIdx.x * BLOCK_ROWS<LANES>; first < rows; first += gridDim.x * BLOCK_ROWS<LANES>) {
            row_position at[ROWS];
            bool exists[ROWS];
#pragma unroll
            for (int n = 0; n < ROWS; n++) {
                const int64_t row = first + n * (THREADS / LANES) + threadIdx.x / LANES;
                exists[n] = row < rows;
                at[n] = {head / heads, head % heads, skl_min(row, rows - 1)};
            }
            visit(at, exists);
        }
}

static __device__ float row_value(const skl_input &rows, const row_position &at)
{
    return ((const float *)rows.data)[SKL_ROW(rows, at.batch, at.head, at.row)];
}

/* dv of the keys after the last packed sequence. */
static __device__ void clear_dv_tail(const attention_backward_params &params)
{
    const skl_problem &p = params.problem;
    const skl_output &dv = params.of.dv_s;
    if (!p.packed || dv.data == NULL)
        return;
    const int64_t begin = skl_max(0, skl_min(p.total_k, params.call.inputs.cu_seqlens_k[p.batch]));
    for (int64_t head = blockIdx.y; head < p.key_heads_s; head += gridDim.y)
        for (int64_t row = begin + blockIdx.x; row < p.total_k; row += gridDim.x)
            for (int c = (int)threadIdx.x; c < (int)p.dim_s; c += THREADS)
                skl_store(dv.data, skl_grad_dtype(&p, p.dtype_s), SKL_ROW(dv, 0, head, row) + c, 0.0F);
}

/* Rows of o and do are aligned for TMA. */
static __device__ uint4 load_octet(const skl_input &tensor, const row_position &at, int c)
{
    const int64_t offset = SKL_ROW(tensor, at.batch, at.head, at.row) + c;
    return *(const uint4 *)(const void *)((const uint16_t *)tensor.data + offset);
}

static __device__ float dot_of_pairs(uint32_t a, uint32_t b, skl_dtype dtype)
{
    const float2 x = dtype == SKL_BF16 ? unpack(a, skl_bf16()) : unpack(a, skl_f16());
    const float2 y = dtype == SKL_BF16 ? unpack(b, skl_bf16()) : unpack(b, skl_f16());
    return fmaf(x.x, y.x, x.y * y.y);
}

/* The largest finite number that a thread has met, for all threads of the grid. */
static __device__ void publish_largest(uint32_t *largest, float of_thread)
{
    const uint32_t of_warp = __reduce_max_sync(~0U, __float_as_uint(of_thread));
    if (threadIdx.x % 32 == 0 && of_warp > 0)
        atomicMax(largest, of_warp);
}

static __device__ float larger_finite(float largest, float size)
{
    return size < INFINITY ? fmaxf(largest, size) : largest;
}

template <int LANES> static __device__ float sum_of_lanes(float value)
{
#pragma unroll
    for (int offset = LANES / 2; offset > 0; offset /= 2)
        value += __shfl_xor_sync(~0U, value, offset);
    return value;
}

static __device__ float dot_of_octets(const uint4 &a, const uint4 &b, skl_dtype dtype)
{
    return dot_of_pairs(a.x, b.x, dtype) + dot_of_pairs(a.y, b.y, dtype) + dot_of_pairs(a.z, b.z, dtype) +
           dot_of_pairs(a.w, b.w, dtype);
}

/* Returns the row without <do, o>, which its shift lacks. All lanes of a row load the same values: the loads are in
 * flight together with the loads of o and do, and cost no time. */
static __device__ attention_row row_without_dot(const attention_backward_params &params, const row_position &at)
{
    const skl_inputs &in = params.call.inputs;
    const float weight = in.grad_kl.data != NULL ? row_value(in.grad_kl, at) : 1.0F;
    return {tensor_core::lse2_of(row_value(in.lse_s, at)), -weight,
            tensor_core::lse2_of(row_value(in.lse_t, at)) - log2f(fabsf(weight)), weight};
}

template <int LANES>
static __global__ void __launch_bounds__(THREADS, 1)
    prepare_rows(const __grid_constant__ attention_backward_params params)
{
    const skl_problem &p = params.problem;
    const int lane = (int)(threadIdx.x % LANES), c = lane * OCTET;
    const bool inside = c < (int)p.dim_s;
    clear_dv_tail(params);
    float largest = 0.0F, weight = 0.0F; /* |do|^2 and |g| */
    for_each_row<LANES>(p, [&](const row_position(&at)[ROWS], const bool(&exists)[ROWS]) {
        uint4 o[ROWS], d_o[ROWS];
        attention_row row[ROWS];
#pragma unroll
        for (int n = 0; n < ROWS; n++) {
            row[n] = row_without_dot(params, at[n]);
            o[n] = inside ? load_octet(params.of.o_s, at[n], c) : make_uint4(0, 0, 0, 0);
            d_o[n] = inside ? load_octet(params.of.do_s, at[n], c) : make_uint4(0, 0, 0, 0);
        }
#pragma unroll
        for (int n = 0; n < ROWS; n++) {
            row[n].shift += sum_of_lanes<LANES>(dot_of_octets(o[n], d_o[n], p.dtype_s));
            if (p.dtype_s == SKL_F16)
                largest = larger_finite(largest, sum_of_lanes<LANES>(dot_of_octets(d_o[n], d_o[n], p.dtype_s)));
            if (!exists[n])
                continue;
            weight = larger_finite(weight, fabsf(row[n].weight));
            if (lane == 0)
                params.rows[(at[n].batch * p.heads_s + at[n].head) * rows_per_head(p) + at[n].row] = row[n];
            if (lane == 0 && row[n].weight < 0.0F)
                params.largest->negative = 1;
            float4 *const sums = (float4 *)(void *)((float *)params.dq_sums.data +
                                                    SKL_ROW(params.dq_sums, at[n].batch, at[n].head, at[n].row) + c);
            if (inside)
                sums[0] = sums[1] = make_float4(0.0F, 0.0F, 0.0F, 0.0F);
        }
    });
    if (p.dtype_s != SKL_F16)
        return;
    publish_largest(&params.largest->d_out, sqrtf(largest));
    publish_largest(&params.largest->weight, weight);
}

/* The largest norm of a row of v. */
template <int LANES>
static __global__ void __launch_bounds__(THREADS, 1)
    largest_value(const __grid_constant__ attention_backward_params params)
{
    const skl_problem &p = params.problem;
    const int c = (int)(threadIdx.x % LANES) * OCTET;
    const unsigned heads = (unsigned)p.key_heads_s, all_heads = (unsigned)((p.packed ? 1 : p.batch) * heads);
    const int64_t rows = p.packed ? p.total_k : p.len_k;
    float largest = 0.0F;
    for (unsigned head = blockIdx.y; head < all_heads; head += gridDim.y)
        for (int64_t first = blockIdx.x * (THREADS / LANES); first < rows; first += gridDim.x * (THREADS / LANES)) {
            const row_position at = {head / heads, head % heads, skl_min(first + threadIdx.x / LANES, rows - 1)};
            const uint4 v = c < (int)p.dim_s ? load_octet(params.of.v_s, at, c) : make_uint4(0, 0, 0, 0);
            largest = larger_finite(largest, sum_of_lanes<LANES>(dot_of_octets(v, v, p.dtype_s)));
        }
    publish_largest(&params.largest->value, sqrtf(largest));
}

template <int LANES>
static __global__ void __launch_bounds__(THREADS, 1)
    store_sums(const __grid_constant__ attention_backward_params params)
{
    const skl_problem &p = params.problem;
    const skl_output &sums = params.dq_sums, &dq = params.call.gradients.dq_s;
    const skl_dtype dtype = skl_grad_dtype(&p, p.dtype_s);
    const int c = (int)(threadIdx.x % LANES) * OCTET;
    const int64_t size = (int64_t)skl_dtype_size(dtype);
    const bool aligned = size == 2 && ((uintptr_t)dq.data | (uintptr_t)(dq.stride_batch * size) |
                                       (uintptr_t)(dq.stride_head * size) | (uintptr_t)(dq.stride_row * size)) %
                                              16 ==
                                          0;
    if (c >= (int)p.dim_s)
        return;
    const float unit = p.dtype_s == SKL_F16 ? log2_unit<skl_f16>(*params.largest) : 0.0F;
    const float factor = p.scale_s * exp2f(-unit);
    for_each_row<LANES>(p, [&](const row_position(&at)[ROWS], const bool(&exists)[ROWS]) {
        float4 even[ROWS], odd[ROWS]; /* dimensions */
#pragma unroll
        for (int n = 0; n < ROWS; n++) {
            const float4 *const from =
                (const float4 *)(const void *)((const float *)sums.data +
                                               SKL_ROW(sums, at[n].batch, at[n].head, at[n].row) + c);
            even[n] = from[0];
            odd[n] = from[1];
        }
#pragma unroll
        for (int n = 0; n < ROWS; n++) {
            const float values[OCTET] = {even[n].x, odd[n].x, even[n].y, odd[n].y,
                                         even[n].z, odd[n].z, even[n].w, odd[n].w};
            const int64_t to = SKL_ROW(dq, at[n].batch, at[n].head, at[n].row) + c;
            if (!exists[n])
                continue;
            uint32_t pairs[OCTET / 2];
#pragma unroll
            for (int i = 0; i < OCTET / 2 && aligned; i++) {
                const float low = values[i * 2] * factor, high = values[i * 2 + 1] * factor;
                pairs[i] = dtype == SKL_BF16 ? pack(low, high, skl_bf16()) : pack(low, high, skl_f16());
            }
            if (aligned)
                *(uint4 *)(void *)((uint16_t *)dq.data + to) = make_uint4(pairs[0], pairs[1], pairs[2], pairs[3]);
#pragma unroll
            for (int i = 0; i < OCTET && !aligned; i++)
                skl_store(dq.data, dtype, to + i, values[i] * factor);
        }
    });
}

attention_backward_params attention_backward_params_of(const skl_cuda_params *params, const skl_cuda_launch *launch)
{
    const skl_problem *const p = &params->problem;
    attention_row *const rows = (attention_row *)params->call.workspace;
    attention_largest *const largest = (attention_largest *)(void *)(rows + skl_state_count(p));
    const size_t sums_at = skl_aligned_size((size_t)skl_state_count(p) * sizeof *rows + sizeof *largest);
    const skl_output sums =
        skl_output_contiguous((char *)params->call.workspace + sums_at, p->heads_s, skl_query_rows(p).rows, p->dim_s);
    return {*params, *params->call.attention, rows, largest, sums, launch->head_group};
}

cudaError_t prepare_attention_rows(const attention_backward_params *params)
{
    cudaError_t error = cudaMemsetAsync(params->largest, 0, sizeof *params->largest, params->call.stream);
    if (error == cudaSuccess)
        error = launch_rows(prepare_rows<WIDE>, prepare_rows<NARROW>, *params);
    return error == cudaSuccess && params->problem.dtype_s == SKL_F16
               ? launch_rows(largest_value<WIDE>, largest_value<NARROW>, *params)
               : error;
}

cudaError_t store_dq_sums(const attention_backward_params *params)
{
    return params->call.gradients.dq_s.data == NULL ? cudaSuccess
                                                    : launch_rows(store_sums<WIDE>, store_sums<NARROW>, *params);
}
