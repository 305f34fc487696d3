/* Memory-bound kernels over rows: rows after the last packed sequence, partial states, f32 sums of dk. */
#include "base/convert.h"
#include "base/kl_math.h"
#include "cuda/common/dk_sums.cuh"
#include "cuda/common/launch.cuh"
#include "cuda/common/ptx.cuh"
#include "cuda/common/sinks.cuh"

constexpr int ROW_THREADS = 256;

static unsigned blocks_for(int64_t count)
{
    const int64_t blocks_max = 1 << 16; /* grid-stride loops do the rest */
    return (unsigned)skl_max(1, skl_min(blocks_max, skl_ceil_div(count, ROW_THREADS)));
}

static __device__ int64_t first_index(void)
{
    return (int64_t)blockIdx.x * ROW_THREADS + threadIdx.x;
}

static __device__ int64_t index_step(void)
{
    return (int64_t)gridDim.x * ROW_THREADS;
}

/* ---- Tails of packed buffers -------------------------------------------------------------------------------- */

static __device__ void clear_rows(const skl_output &rows, int64_t heads, int64_t begin, int64_t end, float value)
{
    if (rows.data == NULL)
        return;
    for (int64_t index = first_index(); index < heads * (end - begin); index += index_step())
        ((float *)rows.data)[SKL_ROW(rows, 0, index % heads, begin + index / heads)] = value;
}

static __device__ void clear_tensor(const skl_output &tensor, skl_dtype dtype, int64_t heads, int64_t begin,
                                    int64_t end, int64_t dim)
{
    if (tensor.data == NULL)
        return;
    const int64_t size = (int64_t)skl_dtype_size(dtype);
    for (int64_t index = first_index(); index < heads * (end - begin) * dim; index += index_step()) {
        const int64_t row = index / dim;
        const int64_t offset = SKL_ROW(tensor, 0, row % heads, begin + row / heads) + index % dim;
        for (int64_t byte = 0; byte < size; byte++)
            ((char *)tensor.data)[offset * size + byte] = 0;
    }
}

static __global__ void __launch_bounds__(ROW_THREADS) clear_tails(const __grid_constant__ skl_cuda_params params)
{
    const skl_problem &p = params.problem;
    const skl_call &call = params.call;
    const int64_t used_q = skl_max(0, skl_min(p.total_q, call.inputs.cu_seqlens_q[p.batch]));
    const int64_t used_k = skl_max(0, skl_min(p.total_k, call.inputs.cu_seqlens_k[p.batch]));
    clear_rows(call.rows.kl, p.heads_s, used_q, p.total_q, 0.0F);
    clear_rows(call.rows.lse_s, p.heads_s, used_q, p.total_q, -INFINITY);
    clear_rows(call.rows.lse_t, p.heads_t, used_q, p.total_q, -INFINITY);
    clear_rows(call.rows.dot_t, p.heads_t, used_q, p.total_q, 0.0F);
    clear_rows(call.rows.cross_entropy, p.heads_s, used_q, p.total_q, 0.0F);
    clear_rows(call.rows.entropy, p.heads_s, used_q, p.total_q, 0.0F);
    clear_rows(call.rows.mass, p.heads_s, used_q, p.total_q, 0.0F);
    const skl_dtype grad_t = skl_grad_dtype(&p, p.dtype_t);
    const skl_dtype grad_s = skl_grad_dtype(&p, p.dtype_s);
    clear_tensor(call.o_s, p.dtype_s, p.heads_s, used_q, p.total_q, p.dim_s);
    clear_tensor(call.gradients.dq_t, grad_t, p.heads_t, used_q, p.total_q, p.dim_t);
    clear_tensor(call.gradients.dq_s, grad_s, skl_query_heads_s(&p), used_q, p.total_q, p.dim_s);
    clear_tensor(call.gradients.dw_s, skl_grad_dtype(&p, p.dtype_w), p.heads_s, used_q, p.total_q, p.index_heads);
    clear_tensor(call.gradients.dk_t, grad_t, p.key_heads_t, used_k, p.total_k, p.dim_t);
    clear_tensor(call.gradients.dk_s, grad_s, p.key_heads_s, used_k, p.total_k, p.dim_s);
    if (call.op != SKL_OP_PARTIAL)
        return;
    const int64_t tail = p.total_q - used_q;
    for (int64_t index = first_index(); index < p.heads_s * tail; index += index_step())
        call.states[index / tail * p.total_q + used_q + index % tail] = skl_state_empty();
}

extern "C" cudaError_t skl_cuda_clear_tails(const skl_cuda_params *params, const skl_cuda_launch *)
{
    const skl_problem *const p = &params->problem;
    const int64_t rows = skl_max(p->total_q * p->heads_t, p->total_k * p->key_heads_t);
    record_launch("cuda_general", SKL_VARIANT_CLEAR, 1);
    return launch_blocks(clear_tails, blocks_for(rows), ROW_THREADS, 0, *params);
}

/* ---- Row bounds by key -------------------------------------------------------------------------------------- */

static __global__ void __launch_bounds__(ROW_THREADS) bounds_by_key(const __grid_constant__ skl_cuda_params params)
{
    const skl_problem &p = params.problem;
    const int64_t count = p.packed ? p.total_k : p.batch * p.len_k;
    for (int64_t index = first_index(); index < p.batch * p.len_k; index += index_step()) {
        const skl_sequence s = device_sequence(params, index / p.len_k);
        const int64_t key = index % p.len_k, to = (p.packed ? s.key_begin : index - key) + key;
        if (key >= s.key_count)
            continue;
        const skl_range queries = skl_queries_in_bounds(&s, key);
        params.key_bounds[to] = (int32_t)queries.begin;
        params.key_bounds[count + to] = (int32_t)queries.end;
    }
}

extern "C" cudaError_t skl_cuda_bounds_by_key(const skl_cuda_params *params, const skl_cuda_launch *)
{
    const skl_problem *const p = &params->problem;
    record_launch("cuda_general", SKL_VARIANT_BOUNDS, 1);
    return launch_blocks(bounds_by_key, blocks_for(p->batch * p->len_k), ROW_THREADS, 0, *params);
}

/* ---- Blocks of rows, with a pooled teacher ------------------------------------------------------------------- */

static __global__ void __launch_bounds__(ROW_THREADS) bounds_of_blocks(const __grid_constant__ skl_cuda_params params)
{
    const skl_problem &p = params.problem;
    const int64_t count = p.batch * p.len_q;
    for (int64_t index = first_index(); index < count; index += index_step()) {
        const skl_sequence s = device_sequence(params, index / p.len_q);
        const skl_range blocks = skl_pooled_range(&p, skl_visible(&p, &s, index % p.len_q));
        params.key_bounds[index] = (int32_t)blocks.begin;
        params.key_bounds[count + index] = (int32_t)blocks.end;
    }
}

extern "C" cudaError_t skl_cuda_bounds_of_blocks(const skl_cuda_params *params, const skl_cuda_launch *)
{
    const skl_problem *const p = &params->problem;
    const skl_cuda_params of_blocks = block_params_of(params);
    const int64_t blocks = p->batch * of_blocks.problem.len_k;
    record_launch("cuda_general", SKL_VARIANT_BLOCKS, 1);
    const cudaError_t error =
        launch_blocks(bounds_of_blocks, blocks_for(p->batch * p->len_q), ROW_THREADS, 0, *params);
    return error == cudaSuccess ? launch_blocks(bounds_by_key, blocks_for(blocks), ROW_THREADS, 0, of_blocks) : error;
}

/* ---- States ------------------------------------------------------------------------------------------------- */

static __global__ void __launch_bounds__(ROW_THREADS)
    merge_states(int64_t count, skl_row_state *into, const skl_row_state *from)
{
    for (int64_t index = first_index(); index < count; index += index_step())
        into[index] = skl_state_merge(into[index], from[index]);
}

extern "C" cudaError_t skl_cuda_states_merge(const skl_cuda_params *params, const void *from)
{
    const int64_t count = skl_state_count(&params->problem);
    merge_states<<<blocks_for(count), ROW_THREADS, 0, params->call.stream>>>(count, params->call.states,
                                                                             (const skl_row_state *)from);
    return cudaPeekAtLastError();
}

static __global__ void __launch_bounds__(ROW_THREADS) finish_states(const __grid_constant__ skl_cuda_params params)
{
    const skl_problem &p = params.problem;
    const skl_rows &rows = params.call.rows;
    const bool reverse = p.direction == SKL_KL_REVERSE;
    const int64_t length = p.packed ? p.total_q : p.len_q;
    const int64_t group = skl_group_size(&p);
    for (int64_t index = first_index(); index < skl_state_count(&p); index += index_step()) {
        const int64_t i = index % length;
        const int64_t head = index / length % p.heads_s;
        skl_sequence all_rows = {};
        all_rows.batch = index / length / p.heads_s;
        all_rows.query_count = length;
        const skl_row_state of_keys = params.call.states[index];
        const bool has_keys = !(of_keys.m_a == -INFINITY && of_keys.l_a == 0.0F);
        const skl_row_lses lses = group_lses(params, all_rows, head, i, group);
        const skl_row_state state =
            p.sinks && has_keys ? add_sink(of_keys, skl_sink_logits_of(&params.call.inputs, head, lses), reverse)
                                : of_keys;
        const float lse_a = skl_lse(state.m_a, state.l_a);
        const float lse_b = skl_lse(state.m_b, state.l_b);
        const float state_lse_t = reverse ? lse_b : lse_a; /* teacher groups: LSE of the mean, relative to lse_t */
        skl_row_set(&rows.kl, &all_rows, head, i, skl_kl_report(skl_state_kl(&state)));
        skl_row_set(&rows.lse_s, &all_rows, head, i, reverse ? lse_a : lse_b);
        for (int64_t h = head * group; rows.lse_t.data != NULL && h < (head + 1) * group; h++) {
            const float given_lse_t =
                skl_has_teacher_groups(&p) ? skl_row_value(&params.call.inputs.lse_t, &all_rows, h, i) : 0.0F;
            skl_row_set(&rows.lse_t, &all_rows, h, i,
                        state_lse_t == -INFINITY ? state_lse_t : given_lse_t + state_lse_t);
        }
    }
}

extern "C" cudaError_t skl_cuda_states_finish(const skl_cuda_params *params, const void *)
{
    return launch_blocks(finish_states, blocks_for(skl_state_count(&params->problem)), ROW_THREADS, 0, *params);
}

/* ---- f32 sums of dk ----------------------------------------------------------------------------------------- */

/* Heads of all sequences, one after the other; quads are four elements: head sizes are a multiple of 8, and sums are
 * aligned for TMA. */
struct sums_shape {
    int64_t heads, all_heads, rows;
    unsigned quads; /* quads per row */
};

static sums_shape shape_of(const backward_params *params)
{
    const skl_problem *const p = &params->problem;
    const skl_side side = side_of(*params);
    const skl_tensor_rows keys = params->teacher_side ? skl_key_rows(p) : skl_student_key_rows(p);
    return {side.key_heads, keys.batch * side.key_heads, keys.rows, (unsigned)side.dim / 4};
}

/* Every block of threads takes SUM_ROWS rows of a head at a time, so that it divides in 64 bits once for all of them.
 */
constexpr unsigned SUM_ROWS = 64;

static int64_t row_blocks(const sums_shape &shape)
{
    return shape.all_heads * skl_ceil_div(shape.rows, SUM_ROWS);
}

/* Calls visit(head of all, row, quad) for all quads. */
template <typename VISIT> static __device__ void for_each_quad(const sums_shape &shape, VISIT visit)
{
    const int64_t blocks_of_head = (shape.rows + SUM_ROWS - 1) / SUM_ROWS;
    for (int64_t block = blockIdx.x; block < shape.all_heads * blocks_of_head; block += gridDim.x) {
        const int64_t head = block / blocks_of_head, first = block % blocks_of_head * SUM_ROWS;
        const unsigned count = (unsigned)skl_min(SUM_ROWS, shape.rows - first) * shape.quads;
        for (unsigned item = threadIdx.x; item < count; item += ROW_THREADS)
            visit(head, first + item / shape.quads, item % shape.quads);
    }
}

/* Offset of a quad in a tensor, in elements. */
static __device__ int64_t quad_offset(const skl_output &tensor, const sums_shape &shape, int64_t head, int64_t row,
                                      unsigned quad)
{
    return SKL_ROW(tensor, head / shape.heads, head % shape.heads, row) + quad * 4;
}

static __global__ void __launch_bounds__(ROW_THREADS) clear_sums(skl_output sums, sums_shape shape)
{
    for_each_quad(shape, [&](int64_t head, int64_t row, unsigned quad) {
        *(float4 *)(void *)((float *)sums.data + quad_offset(sums, shape, head, row, quad)) =
            make_float4(0.0F, 0.0F, 0.0F, 0.0F);
    });
}

/* Four elements at once where they are aligned, one by one otherwise. */
static __device__ void store_quad(void *data, skl_dtype dtype, int64_t first, const float4 &sum)
{
    uint16_t *const to = (uint16_t *)data + first;
    if (dtype != SKL_F32 && (uintptr_t)to % 8 == 0) {
        const skl_f16 half = skl_f16();
        const skl_bf16 bf16 = skl_bf16();
        *(uint2 *)(void *)to = dtype == SKL_F16 ? make_uint2(pack(sum.x, sum.y, half), pack(sum.z, sum.w, half))
                                                : make_uint2(pack(sum.x, sum.y, bf16), pack(sum.z, sum.w, bf16));
        return;
    }
    skl_store(data, dtype, first, sum.x);
    skl_store(data, dtype, first + 1, sum.y);
    skl_store(data, dtype, first + 2, sum.z);
    skl_store(data, dtype, first + 3, sum.w);
}

static __global__ void __launch_bounds__(ROW_THREADS)
    store_sums(skl_output sums, sums_shape shape, skl_output to, skl_dtype dtype)
{
    for_each_quad(shape, [&](int64_t head, int64_t row, unsigned quad) {
        const void *const from = (const float *)sums.data + quad_offset(sums, shape, head, row, quad);
        store_quad(to.data, dtype, quad_offset(to, shape, head, row, quad), *(const float4 *)from);
    });
}

/* The sums fill one piece of memory, heads after rows or rows after heads. */
static bool is_dense(const skl_output &sums, const sums_shape &shape)
{
    const int64_t dim = shape.quads * 4;
    const bool by_head = sums.stride_row == dim && sums.stride_head == shape.rows * dim;
    const bool by_row = sums.stride_head == dim && sums.stride_row == shape.heads * dim;
    return (by_head || by_row) &&
           (shape.all_heads == shape.heads || sums.stride_batch == shape.heads * shape.rows * dim);
}

cudaError_t clear_dk_sums(const backward_params *params)
{
    const sums_shape shape = shape_of(params);
    const int64_t size = shape.all_heads * shape.rows * shape.quads * (int64_t)sizeof(float4);
    if (params->dk_sums.data == NULL || size == 0)
        return cudaSuccess;
    if (is_dense(params->dk_sums, shape))
        return cudaMemsetAsync(params->dk_sums.data, 0, (size_t)size, params->call.stream);
    clear_sums<<<blocks_for(row_blocks(shape) * ROW_THREADS), ROW_THREADS, 0, params->call.stream>>>(params->dk_sums,
                                                                                                     shape);
    return cudaPeekAtLastError();
}

cudaError_t store_dk_sums(const backward_params *params)
{
    const sums_shape shape = shape_of(params);
    const skl_side side = side_of(*params);
    if (params->dk_sums.data == NULL || params->dk_sums.data == side.dk->data || row_blocks(shape) == 0)
        return cudaSuccess;
    store_sums<<<blocks_for(row_blocks(shape) * ROW_THREADS), ROW_THREADS, 0, params->call.stream>>>(
        params->dk_sums, shape, *side.dk, side.grad_dtype);
    return cudaPeekAtLastError();
}
