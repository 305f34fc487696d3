/* Row states with their sinks: base/sinks.h. */
#ifndef SKL_CUDA_COMMON_SINKS_CUH
#define SKL_CUDA_COMMON_SINKS_CUH

#include "base/sinks.h"
#include "cuda/common/sequence.cuh"

/* Logits of a forward with one teacher head per student head. */
#define NO_LSES                                                                                                      \
    skl_row_lses                                                                                                     \
    {                                                                                                                \
        1, NULL, 0, NULL                                                                                             \
    }

/* x log2 e as a float and the rest. */
__device__ inline skl_lse2 in_base_2(float x)
{
    const float value = __fmul_rn(x, SKL_LOG2E);
    const float low = fmaf(x, (float)(SKL_LOG2E_DOUBLE - (double)SKL_LOG2E), fmaf(x, SKL_LOG2E, -value));
    return {value, fabsf(x) < INFINITY ? low : 0.0F};
}

/* A sink as a shift and a sum of one exponential, l = 2^low. The sum keeps the rounding error of the shift: the LSE
 * of a row that a sink dominates is the sink. The rounding error of a huge logit is too large for an exponent. */
struct sink_term {
    float m, l, low;

    __device__ explicit sink_term(float logit)
    {
        const skl_lse2 split = in_base_2(logit);
        m = split.value;
        low = fabsf(m) < SKL_HUGE_LOGIT ? split.low : 0.0F;
        l = m == -INFINITY ? 0.0F : exp2f(low);
    }
};

/* A weight of 2^this or less is 0 in double, too, with which the CPU sums. */
constexpr float NO_WEIGHT = -1075.0F;

/* The state of a row's keys and its sink. Where P of the sink has weight and S is 0, the KL is infinite: f32 would
 * multiply an infinite w by a weight that it rounds to 0. */
__device__ inline skl_row_state add_sink(const skl_row_state &of_keys, const skl_sink_logits &sink, bool reverse)
{
    const sink_term a(reverse ? sink.s : sink.t), b(reverse ? sink.t : sink.s);
    skl_row_state sum = skl_state_merge(of_keys, {a.m, a.l, b.m, b.l, a.l * (a.low - b.low)});
    if (b.l == 0.0F && a.m - sum.m_a > NO_WEIGHT)
        sum.w = INFINITY;
    return sum;
}

/* A row that attends to no key has no sink. */
__device__ inline bool has_sink(const skl_problem &p, const skl_sequence &s, int64_t query)
{
    const skl_range sees = skl_visible(&p, &s, query);
    return p.sinks && sees.begin < sees.end;
}

/* The state of a row with its sink, if it has one. `lses`: to which the row's logits are relative. */
__device__ inline skl_row_state with_sink(const skl_cuda_params &params, const skl_sequence &s, int64_t head,
                                          int64_t query, const skl_row_state &state,
                                          const skl_row_lses &lses = NO_LSES)
{
    const skl_problem &p = params.problem;
    if (!p.sinks || !has_sink(p, s, query))
        return state;
    const skl_sink_logits sink = skl_sink_logits_of(&params.call.inputs, head, lses);
    return add_sink(state, sink, p.direction == SKL_KL_REVERSE);
}

/* The LSEs to which the logits of a forward are relative: the teacher's with a teacher group, else none. */
__device__ inline skl_row_lses group_lses(const skl_cuda_params &params, const skl_sequence &s, int64_t head,
                                          int64_t query, int64_t group)
{
    const skl_input &lse_t = params.call.inputs.lse_t;
    return {group, group > 1 ? skl_row_at(&lse_t, &s, head * group, query) : NULL, lse_t.stride_head, NULL};
}

#endif
