/* A sequence of the batch, read on the device. */
#ifndef SKL_CUDA_COMMON_SEQUENCE_CUH
#define SKL_CUDA_COMMON_SEQUENCE_CUH

#include "cuda/launch.h"

/* cu_seqlens and key_lengths are in device memory and cannot be checked before the launch. Their values are clamped
 * here, so that no kernel forms an address outside the buffers. Row bounds are clamped where they are read. */
__device__ inline skl_sequence device_sequence(const skl_cuda_params &params, int64_t b)
{
    const skl_problem &p = params.problem;
    skl_sequence s = skl_sequence_at(&p, &params.call.inputs, params.call.keys, b);
    if (p.packed) {
        s.query_begin = skl_min(skl_max(s.query_begin, 0), p.total_q);
        s.query_count = skl_min(skl_max(s.query_count, 0), skl_min(p.len_q, p.total_q - s.query_begin));
        s.key_begin = skl_min(skl_max(s.key_begin, 0), p.total_k);
        s.key_count = skl_min(s.key_count, p.total_k - s.key_begin);
    }
    s.key_count = skl_max(0, skl_min(s.key_count, p.len_k));
    s.key_first = skl_min(s.key_first, s.key_count);
    const int64_t first_query = p.packed ? s.query_begin : b * p.len_q;
    s.key_begins = params.call.inputs.key_begin != NULL ? params.call.inputs.key_begin + first_query : NULL;
    s.key_ends = params.call.inputs.key_end != NULL ? params.call.inputs.key_end + first_query : NULL;
    if (params.key_bounds != NULL) {
        s.query_begins = params.key_bounds + (p.packed ? s.key_begin : b * p.len_k);
        s.query_ends = s.query_begins + (p.packed ? p.total_k : p.batch * p.len_k);
    }
    return s;
}

/* A sink is an outcome next to a single key. */
__device__ inline bool has_one_outcome(const skl_problem &problem, const skl_sequence &s, int64_t query)
{
    const skl_range sees = skl_visible(&problem, &s, query);
    return sees.end - sees.begin == 1 && !problem.sinks;
}

/* The partial state that a kernel returns: without a shift for a row that sees no key, and exact for a single key. */
__device__ inline skl_row_state partial_state(const skl_problem &problem, const skl_sequence &s, int64_t query,
                                              const skl_row_state &state)
{
    const skl_range sees = skl_visible(&problem, &s, query);
    return sees.begin >= sees.end       ? skl_state_empty()
           : sees.end - sees.begin == 1 ? skl_state_of_one_key(state)
                                        : state;
}

/* The KL that a kernel reports for a row. Over a single outcome it is 0, whatever the rounding of its logits;
 * infinity and NaN still show. */
__device__ inline float reported_kl(bool one_outcome, float kl)
{
    return one_outcome && fabsf(kl) < INFINITY ? 0.0F : skl_kl_report(kl);
}

__device__ inline float reported_kl(const skl_problem &problem, const skl_sequence &s, int64_t query, float kl)
{
    return reported_kl(has_one_outcome(problem, s, query), kl);
}

#endif
