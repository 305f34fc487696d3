/* Gradients of sinks: base/sinks.h has the formula. Memory-bound: a row takes a few numbers. */
#include "base/sinks.h"
#include "cuda/common/launch.cuh"
#include "cuda/common/sequence.cuh"

namespace sink_kernels
{

constexpr int THREADS = 256;

/* One block per head and side, which sums its rows in a fixed order. */
static __global__ void __launch_bounds__(THREADS) sink_gradients(const __grid_constant__ skl_cuda_params params)
{
    __shared__ double sums[THREADS];
    const skl_problem &p = params.problem;
    const skl_inputs &inputs = params.call.inputs;
    const skl_input kl = skl_known_rows(skl_op_is_one_pass(params.call.op), &inputs.kl, &params.call.rows.kl);
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

extern "C" cudaError_t skl_cuda_sink_gradients(const skl_cuda_params *params, const void *)
{
    record_launch("cuda_general", SKL_VARIANT_SINK_GRADIENTS, 1);
    return launch_blocks(sink_gradients, dim3((unsigned)params->problem.heads_s, 2), THREADS, 0, *params);
}

} // namespace sink_kernels
