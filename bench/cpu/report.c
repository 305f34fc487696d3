#include "bench/cpu/report.h"

#include <stdlib.h>

const char *bench_method_name(bench_method method)
{
    static const char *const names[] = {
        [BENCH_STREAMING] = "streaming", [BENCH_IN_PLACE] = "in place", [BENCH_FRAMEWORK] = "framework"};
    return names[method];
}

const char *bench_pass_name(bench_pass pass)
{
    static const char *const names[] = {
        [BENCH_FORWARD] = "forward", [BENCH_BACKWARD] = "backward", [BENCH_ONE_PASS] = "one pass"};
    return names[pass];
}

skl_op bench_pass_op(bench_pass pass)
{
    static const skl_op ops[] = {[BENCH_FORWARD] = SKL_OP_FORWARD,
                                 [BENCH_BACKWARD] = SKL_OP_BACKWARD,
                                 [BENCH_ONE_PASS] = SKL_OP_FORWARD_BACKWARD};
    return ops[pass];
}

const char *bench_type_name(skl_dtype type)
{
    static const char *const names[] = {[SKL_F32] = "f32", [SKL_F16] = "f16", [SKL_BF16] = "bf16"};
    return names[type];
}

int bench_pass_count(bench_method method)
{
    return method == BENCH_STREAMING ? BENCH_PASS_COUNT : BENCH_ONE_PASS;
}

void bench_report_free(bench_report *report)
{
    for (int i = 0; report && i < report->point_count; i++)
        for (int pass = 0; pass < BENCH_PASS_COUNT; pass++)
            free(report->points[i].explanations[pass]);
    free(report);
}

skl_problem bench_problem(const bench_config *config, int64_t length, int64_t dim)
{
    skl_problem problem = skl_problem_default();
    problem.dtype_t = problem.dtype_s = config->dtype;
    problem.grad_f32 = config->grad_f32;
    problem.causal = config->causal;
    problem.len_q = problem.len_k = length;
    problem.heads_t = problem.heads_s = config->heads;
    problem.dim_t = problem.dim_s = dim;
    if (config->index_heads > 0) {
        problem.student = SKL_STUDENT_INDEXER;
        problem.gradients |= SKL_DW_S;
        problem.heads_s = 1;
        problem.key_heads_t = config->key_heads;
        problem.index_heads = config->index_heads;
        problem.top_k = config->top_k;
    }
    return problem;
}

/* Matmuls that the task needs without stored matrices: x and y, then dq and dk. */
static double useful_matmuls(const bench_config *config, bench_pass pass)
{
    if (config->index_heads > 0)
        return (double)(config->heads + (pass == BENCH_FORWARD ? 1 : 3) * config->index_heads);
    return pass == BENCH_FORWARD ? 2 : 4;
}

/* N x N x d matmuls that a pass executes per student head.
 *
 * Streaming: forward x and y; backward x, y, dq and dk. With f32 gradients one pass over the keys computes dq and
 * sums the tiles of dk. 16-bit gradients cannot be accumulated in place, so a second pass recomputes x and y for dk.
 * One-pass is a backward that also returns the KL. GPU kernels and indexer kernels recompute different amounts: only
 * useful matmuls count for them. Materialized: x and y, then dq and dk from the stored P and S. */
static double executed_matmuls(const bench_config *config, bench_method method, bench_pass pass)
{
    if (config->engine.device != SKL_CPU || config->index_heads > 0)
        return useful_matmuls(config, pass);
    if (method != BENCH_STREAMING || pass == BENCH_FORWARD)
        return 2;
    const bool gradients_f32 = config->dtype == SKL_F32 || config->grad_f32;
    return gradients_f32 ? 4 : 6;
}

double bench_visible_pairs(const bench_config *config, int64_t length)
{
    const double n = (double)length, top_k = (double)config->top_k;
    const double heads = config->index_heads > 0 ? 1 : (double)config->heads;
    if (config->top_k > 0 && config->top_k < length) /* causal: the first rows see fewer than top_k keys */
        return heads * (config->causal ? top_k * (top_k + 1) / 2 + (n - top_k) * top_k : n * top_k);
    return heads * (config->causal ? n * (n + 1) / 2 : n * n);
}

/* One multiply-add for each of the d terms of a pair. */
static double matmul_flop(double pairs, int64_t dim)
{
    return 2 * pairs * (double)dim;
}

double bench_executed_flops(const bench_config *config, const bench_point *point, bench_method method,
                            bench_pass pass)
{
    const double all_pairs = (double)config->heads * (double)point->length * (double)point->length;
    const double pairs = method == BENCH_STREAMING ? bench_visible_pairs(config, point->length) : all_pairs;
    const double flop = executed_matmuls(config, method, pass) * matmul_flop(pairs, point->dim);
    return flop / point->methods[method].passes[pass].median;
}

double bench_useful_flops(const bench_config *config, const bench_point *point, bench_pass pass)
{
    const double pairs = bench_visible_pairs(config, point->length);
    const double flop = useful_matmuls(config, pass) * matmul_flop(pairs, point->dim);
    return flop / point->methods[BENCH_STREAMING].passes[pass].median;
}

double bench_speedup(const bench_point *point, bench_method over, bench_pass pass)
{
    const bench_method_result *const other = &point->methods[over];
    return other->ran ? other->passes[pass].median / point->methods[BENCH_STREAMING].passes[pass].median : 0;
}

double bench_step_seconds(const bench_point *point, bench_method method)
{
    const timing *const passes = point->methods[method].passes;
    return passes[BENCH_FORWARD].median + passes[BENCH_BACKWARD].median;
}
