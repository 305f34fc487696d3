/* General backward, split: dq with a query tile held fixed, dk with a key tile held fixed. No atomics, so the bits
 * are the same on every run. Each launch gives the gradient of one side. */
#include "cuda/general_tile.cuh"

constexpr int SLICE = 64; /* dimensions of the gradient that a launch gives; a thread owns OWN x OWN of them */

struct backward_memory {
    union {
        operands staged;
        float rows[TILE][SLICE + 1]; /* keys or queries of a product */
    };
    float gradient[TILE][TILE + 1]; /* logit gradient, [query][key] */
};

/* What a backward knows of a thread's rows. */
struct known {
    float lse_s, grad, kl, dot_t;
};

static __device__ known known_row(const skl_cuda_params &params, const place &at, int64_t teacher_head, int i)
{
    const skl_inputs &in = params.call.inputs;
    const skl_input kl = skl_known_rows(params.rows_known, &in.kl, &params.call.rows.kl);
    const skl_input dot_t = skl_known_rows(params.rows_known, &in.dot_t, &params.call.rows.dot_t);
    const int64_t query = at.query_first + row_of(i);
    known row = {0.0F, 1.0F, 0.0F, 0.0F};
    if (query >= at.sequence.query_count)
        return row;
    row.lse_s = skl_row_value(&in.lse_s, &at.sequence, at.head, query) * SKL_LOG2E;
    if (in.grad_kl.data != NULL)
        row.grad = skl_row_value(&in.grad_kl, &at.sequence, at.head, query);
    if (kl.data != NULL)
        row.kl = skl_row_value(&kl, &at.sequence, at.head, query);
    if (dot_t.data != NULL && params.teacher_side)
        row.dot_t = skl_row_value(&dot_t, &at.sequence, teacher_head, query);
    return row;
}

/* 1 - (logit / cap)^2 */
static __device__ float softcap_slope(const skl_side &side, float logit2)
{
    const float ratio = side.softcap > 0.0F ? logit2 * SKL_LN2 / side.softcap : 0.0F;
    return 1.0F - ratio * ratio;
}

/* Gradient of one pair of logits in the logit of one side. u, v: log2 of P and S; z: log2 of the head's own P_h. */
static __device__ float pair_gradient(const skl_problem &p, bool teacher_side, int64_t group, float u, float v,
                                      float z, const known &row)
{
    const bool reverse = p.direction == SKL_KL_REVERSE;
    if (!teacher_side)
        return reverse ? exp2f(v) * (SKL_LN2 * (v - u) - row.kl) : exp2f(v) - exp2f(u);
    if (group == 1)
        return reverse ? exp2f(u) - exp2f(v) : exp2f(u) * (SKL_LN2 * (u - v) - row.kl);
    const float head_p = exp2f(z);
    return (reverse ? -exp2f(z - u + v) - head_p * row.dot_t : head_p * (SKL_LN2 * (u - v) - row.dot_t)) /
           (float)group;
}

/* The logit gradient of a tile into shared memory; masked pairs are exactly 0. Returns whether there are any. */
static __device__ bool gradient_tile(const skl_cuda_params &params, backward_memory &memory, const place &at,
                                     int64_t teacher_head, const float *lse)
{
    const skl_problem &p = params.problem;
    const skl_side teacher = skl_teacher_of(&p, &params.call);
    const skl_side student = skl_student_of(&p, &params.call);
    const int64_t group = skl_group(&p);
    fragment x, y, z;
    teacher_tile(x, memory.staged, teacher, at, group, lse);
    logit_tile(y, memory.staged, student, at, at.head);
    if (params.teacher_side && group > 1)
        logit_tile(z, memory.staged, teacher, at, teacher_head);
    bool all_seen = true;
    for (int i = 0; i < OWN; i++) {
        const known row = known_row(params, at, teacher_head, i);
        const skl_range visible = row_visible(p, at, i);
        const float head_lse = lse[(teacher_head - at.head * group) * TILE + row_of(i)];
        for (int j = 0; j < OWN; j++) {
            const float u = group == 1 ? x[i][j] - lse[row_of(i)] : x[i][j];
            const float v = y[i][j] - row.lse_s;
            const float log_p = params.teacher_side && group > 1 ? z[i][j] - head_lse : u;
            const float own_logit = !params.teacher_side ? y[i][j] : group > 1 ? z[i][j] : x[i][j];
            const skl_side &side = params.teacher_side ? teacher : student;
            const float g = row.grad * side.scale * softcap_slope(side, own_logit) *
                            pair_gradient(p, params.teacher_side, group, u, v, log_p, row);
            const bool seen = sees(visible, at, j);
            memory.gradient[row_of(i)][column_of(j)] = seen ? g : 0.0F;
            all_seen = all_seen && seen;
        }
    }
    return __syncthreads_or(!all_seen) != 0; /* also: the gradient is complete, the operands are free */
}

/* sum += weight * value; where pairs are masked a weight of 0 may meet a value that is not finite, and must not. */
static __device__ float add_product(float sum, float weight, float value, bool masked)
{
    return masked && weight == 0.0F ? sum : sum + weight * value;
}

/* One slice of a product: sum[i][j] += sum_step weight(step, own row i) rows[step][own column j]. */
template <bool TRANSPOSED>
static __device__ void multiply_slice(fragment sum, const backward_memory &memory, bool masked)
{
#pragma unroll 4
    for (int step = 0; step < TILE; step++) {
        float weight[OWN], value[OWN];
        for (int i = 0; i < OWN; i++) {
            weight[i] = TRANSPOSED ? memory.gradient[step][row_of(i)] : memory.gradient[row_of(i)][step];
            value[i] = memory.rows[step][column_of(i)];
        }
        for (int i = 0; i < OWN; i++)
            for (int j = 0; j < OWN; j++)
                sum[i][j] = add_product(sum[i][j], weight[i], value[j], masked);
    }
}

static __device__ void store_sums(const fragment sum, const skl_output &grad, skl_dtype dtype, int64_t base,
                                  int64_t first, int64_t row_end, int64_t c_first, int64_t dim)
{
    for (int i = 0; i < OWN; i++)
        for (int j = 0; j < OWN; j++) {
            const int64_t row = first + row_of(i);
            const int64_t c = c_first + column_of(j);
            if (row < row_end && c < dim)
                skl_store(grad.data, dtype, base + row * grad.stride_row + c, sum[i][j]);
        }
}

static __device__ void clear_sums(fragment sum)
{
    for (int i = 0; i < OWN; i++)
        for (int j = 0; j < OWN; j++)
            sum[i][j] = 0.0F;
}

static __device__ void queries_tile(const skl_cuda_params &params, backward_memory &memory, place at,
                                    int64_t own_head, float *lse)
{
    const skl_problem &p = params.problem;
    const skl_side side = params.teacher_side ? skl_teacher_of(&p, &params.call) : skl_student_of(&p, &params.call);
    const int64_t group = skl_group(&p);
    const int64_t teacher_head = params.teacher_side ? own_head : at.head * group;
    __syncthreads();
    load_group_lse(lse, params.call.inputs.lse_t, at, group);
    fragment sum;
    clear_sums(sum);
    const skl_range keys = tile_keys(p, at);
    for (at.key_first = keys.begin; at.key_first < keys.end; at.key_first += TILE) {
        const bool masked = gradient_tile(params, memory, at, teacher_head, lse);
        __syncthreads();
        stage_rows<SLICE>(&memory.rows[0][0], SLICE + 1, *side.k, side.dtype, key_base(side, at.sequence, own_head),
                          at.key_first, at.sequence.key_count, params.dim_first, side.dim);
        __syncthreads();
        multiply_slice<false>(sum, memory, masked);
        __syncthreads();
    }
    store_sums(sum, *side.dq, side.grad_dtype,
               SKL_ROW(*side.dq, at.sequence.batch, own_head, at.sequence.query_begin), at.query_first,
               at.sequence.query_count, params.dim_first, side.dim);
}

static __device__ void keys_tile(const skl_cuda_params &params, backward_memory &memory, place at, int64_t key_head,
                                 int64_t key_rows, float *lse)
{
    const skl_problem &p = params.problem;
    const skl_side side = params.teacher_side ? skl_teacher_of(&p, &params.call) : skl_student_of(&p, &params.call);
    const int64_t group = skl_group(&p);
    const int64_t sharing = side.heads / side.key_heads;
    fragment sum;
    clear_sums(sum);
    for (int64_t own_head = key_head * sharing; own_head < (key_head + 1) * sharing; own_head++) {
        at.head = params.teacher_side ? own_head / group : own_head;
        const int64_t teacher_head = params.teacher_side ? own_head : at.head * group;
        for (at.query_first = 0; at.query_first < at.sequence.query_count; at.query_first += TILE) {
            const skl_range keys = tile_keys(p, at);
            if (keys.end <= at.key_first || keys.begin >= at.key_first + TILE)
                continue;
            __syncthreads();
            load_group_lse(lse, params.call.inputs.lse_t, at, group);
            const bool masked = gradient_tile(params, memory, at, teacher_head, lse);
            __syncthreads();
            stage_rows<SLICE>(&memory.rows[0][0], SLICE + 1, *side.q, side.dtype,
                              query_base(side, at.sequence, own_head), at.query_first, at.sequence.query_count,
                              params.dim_first, side.dim);
            __syncthreads();
            multiply_slice<true>(sum, memory, masked);
            __syncthreads();
        }
    }
    store_sums(sum, *side.dk, side.grad_dtype, SKL_ROW(*side.dk, at.sequence.batch, key_head, at.sequence.key_begin),
               at.key_first, key_rows, params.dim_first, side.dim);
}

static __global__ void __launch_bounds__(THREADS, 1) general_queries(const __grid_constant__ skl_cuda_params params)
{
    __shared__ backward_memory memory;
    const skl_problem &p = params.problem;
    const int64_t heads = params.teacher_side ? p.heads_t : p.heads_s;
    const int64_t tiles = skl_ceil_div(p.len_q, TILE);
    float *const lse = (float *)params.scratch + (int64_t)blockIdx.x * skl_group(&p) * TILE;
    for (int64_t item = blockIdx.x; item < p.batch * heads * tiles; item += gridDim.x) {
        place at;
        const int64_t own_head = item / tiles % heads;
        at.sequence = device_sequence(params, item / (heads * tiles));
        at.head = params.teacher_side ? own_head / skl_group(&p) : own_head;
        at.query_first = (tiles - 1 - item % tiles) * TILE;
        if (at.query_first < at.sequence.query_count)
            queries_tile(params, memory, at, own_head, lse);
    }
}

static __global__ void __launch_bounds__(THREADS, 1) general_keys(const __grid_constant__ skl_cuda_params params)
{
    __shared__ backward_memory memory;
    const skl_problem &p = params.problem;
    const int64_t heads = params.teacher_side ? p.key_heads_t : p.key_heads_s;
    const int64_t tiles = skl_ceil_div(p.len_k, TILE);
    float *const lse = (float *)params.scratch + (int64_t)blockIdx.x * skl_group(&p) * TILE;
    for (int64_t item = blockIdx.x; item < p.batch * heads * tiles; item += gridDim.x) {
        place at;
        at.sequence = device_sequence(params, item / (heads * tiles));
        at.key_first = item % tiles * TILE;
        const int64_t key_rows = p.packed ? at.sequence.key_count : p.len_k; /* padding keys get a gradient of 0 */
        if (at.key_first < key_rows)
            keys_tile(params, memory, at, item / tiles % heads, key_rows, lse);
    }
}

/* One launch for every slice of the gradient. */
static cudaError_t launch_slices(void (*kernel)(const skl_cuda_params), const skl_cuda_params *params)
{
    skl_cuda_params slice = *params;
    const int64_t dim = slice.teacher_side ? slice.problem.dim_t : slice.problem.dim_s;
    for (slice.dim_first = 0; slice.dim_first < dim; slice.dim_first += SLICE)
        kernel<<<(unsigned)slice.block_count, THREADS, 0, slice.call.stream>>>(slice);
    return cudaPeekAtLastError();
}

extern "C" cudaError_t skl_cuda_general_queries(const skl_cuda_params *params)
{
    return launch_slices(general_queries, params);
}

extern "C" cudaError_t skl_cuda_general_keys(const skl_cuda_params *params)
{
    return launch_slices(general_keys, params);
}
