/* Steps over rows for sinks: base/sinks.h has the formulas. Memory-bound: a row takes a few numbers. */
#include "base/sinks.h"
#include "cuda/common/sequence.cuh"

namespace sink_kernels
{

constexpr int THREADS = 256;

static __global__ void __launch_bounds__(THREADS)
    sink_rows(const __grid_constant__ skl_cuda_params params, const __grid_constant__ skl_sink_rows rows)
{
    const skl_problem &p = params.problem;
    const int64_t count = p.batch * p.heads_s * p.len_q;
    const int64_t first = (int64_t)blockIdx.x * THREADS + threadIdx.x, step = (int64_t)gridDim.x * THREADS;
    skl_sequence tail = {};
    if (p.packed) {
        tail.query_begin = skl_max(0, skl_min(p.total_q, params.call.inputs.cu_seqlens_q[p.batch]));
        tail.query_count = p.total_q - tail.query_begin;
    }
    for (int64_t index = first; index < tail.query_count * p.heads_s; index += step)
        skl_sink_tail(&p, &rows, &tail, index / tail.query_count, index % tail.query_count);
    for (int64_t index = first; index < count; index += step) {
        const skl_sequence s = device_sequence(params, index / p.len_q / p.heads_s);
        const int64_t i = index % p.len_q;
        if (i < s.query_count)
            skl_sink_row(&p, &rows, &s, index / p.len_q % p.heads_s, i);
    }
}

extern "C" cudaError_t skl_cuda_sink_rows(const skl_cuda_params *params, const void *argument)
{
    const skl_sink_rows *const rows = (const skl_sink_rows *)argument;
    const skl_problem *const p = &params->problem;
    const int64_t count = p->heads_s * skl_max(p->batch * p->len_q, p->total_q), blocks_max = 1 << 16;
    if (count == 0)
        return cudaSuccess;
    record_launch("cuda_general", SKL_VARIANT_SINK_ROWS, 1);
    sink_rows<<<(unsigned)skl_min(blocks_max, skl_ceil_div(count, THREADS)), THREADS, 0, rows->stream>>>(*params,
                                                                                                         *rows);
    return cudaPeekAtLastError();
}

/* One block per head and side, which sums its rows in a fixed order. */
static __global__ void __launch_bounds__(THREADS)
    sink_gradients(const __grid_constant__ skl_cuda_params params, skl_input kl)
{
    __shared__ double sums[THREADS];
    const skl_problem &p = params.problem;
    const skl_inputs &inputs = params.call.inputs;
    const int64_t head = blockIdx.x;
    const bool of_teacher = blockIdx.y != 0;
    float *const to = of_teacher ? params.call.gradients.dsink_t : params.call.gradients.dsink_s;
    if (to == NULL)
        return;
    double sum = 0.0;
    for (int64_t b = 0; b < p.batch; b++) {
        const skl_sequence s = device_sequence(params, b);
        for (int64_t i = threadIdx.x; i < s.query_count; i += THREADS) {
            const skl_range sees = skl_visible(&p, &s, i);
            const float grad = inputs.grad_kl.data != NULL ? skl_row_value(&inputs.grad_kl, &s, head, i) : 1.0F;
            if (sees.begin < sees.end && grad != 0.0F)
                sum += (double)grad * skl_sink_gradient(&p, &inputs, &kl, &s, head, i, of_teacher);
        }
    }
    sums[threadIdx.x] = sum;
    __syncthreads();
    for (unsigned half = THREADS / 2; half > 0; half /= 2) {
        if (threadIdx.x < half)
            sums[threadIdx.x] += sums[threadIdx.x + half];
        __syncthreads();
    }
    if (threadIdx.x == 0)
        to[head] = (float)sums[0];
}

extern "C" cudaError_t skl_cuda_sink_gradients(const skl_cuda_params *params, const void *kl)
{
    record_launch("cuda_general", SKL_VARIANT_SINK_GRADIENTS, 1);
    const dim3 blocks((unsigned)params->problem.heads_s, 2);
    sink_gradients<<<blocks, THREADS, 0, params->call.stream>>>(*params, *(const skl_input *)kl);
    return cudaPeekAtLastError();
}

} // namespace sink_kernels
