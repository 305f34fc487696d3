#include "cli/common/workload.h"
#include "oracle.h"

static int64_t query_heads_s(const skl_problem *problem)
{
    return problem->heads_s * (problem->student == SKL_STUDENT_INDEXER ? problem->index_heads : 1);
}

/* A logit takes 2 d FLOP, and so does each of dq and dk. */
static double flop_per_pair(const skl_problem *problem, uint32_t gradients)
{
    const double teacher = 2.0 * (double)problem->dim_t * (double)problem->heads_t;
    const double student = 2.0 * (double)problem->dim_s * (double)query_heads_s(problem);
    double flop = teacher + student;
    flop += gradients & SKL_DQ_T ? teacher : 0;
    flop += gradients & SKL_DK_T ? teacher : 0;
    flop += gradients & SKL_DQ_S ? student : 0;
    flop += gradients & SKL_DK_S ? student : 0;
    return flop;
}

workload workload_of(const skl_problem *problem, const skl_inputs *inputs)
{
    workload work = {0, 0, 0, 0};
    double all_pairs = 0; /* materialized matrices include masked pairs */
    for (int64_t b = 0; b < problem->batch; b++) {
        const oracle_sequence sequence = oracle_sequence_at(problem, inputs, b);
        all_pairs += (double)sequence.len_q * (double)sequence.len_k;
        for (int64_t i = 0; i < sequence.len_q; i++) {
            const oracle_keys keys = oracle_visible_keys(problem, inputs, b, i);
            const int64_t visible = keys.end - keys.begin;
            work.pairs += (double)(problem->top_k > 0 && problem->top_k < visible ? problem->top_k : visible);
        }
    }
    work.forward_flop = work.pairs * flop_per_pair(problem, 0);
    work.backward_flop = work.pairs * flop_per_pair(problem, problem->gradients);
    const int64_t teacher_matrices = problem->gradients & (SKL_DQ_T | SKL_DK_T) ? 2 : 1;
    const int64_t student_matrices = problem->gradients & (SKL_DQ_S | SKL_DK_S) ? 2 : 1;
    const int64_t matrices = teacher_matrices * problem->heads_t + student_matrices * query_heads_s(problem);
    work.materialized_size = all_pairs * (double)matrices * sizeof(float);
    return work;
}
