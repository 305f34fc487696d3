#include "bench/cpu/report.h"

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

const char *bench_type_name(skl_dtype type)
{
    static const char *const names[] = {[SKL_F32] = "f32", [SKL_F16] = "f16", [SKL_BF16] = "bf16"};
    return names[type];
}

int bench_pass_count(bench_method method)
{
    return method == BENCH_STREAMING ? BENCH_PASS_COUNT : BENCH_ONE_PASS;
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
    return problem;
}

/* FLOP of `count` N x N x d matmuls, of all pairs or of those that the mask leaves: a multiply-add for each of the d
 * terms of a pair. */
static double matmul_flop(const bench_config *config, const bench_point *point, int count, bool visible)
{
    const double n = (double)point->length, pairs = visible && config->causal ? n * (n + 1) / 2 : n * n;
    return 2 * count * (double)config->heads * pairs * (double)point->dim;
}

/* Streaming: forward x and y; backward x, y, dq and dk. With f32 gradients one pass over the keys computes dq and
 * sums the tiles of dk. 16-bit gradients cannot be accumulated in place, so a second pass recomputes x and y for dk.
 * One-pass is a backward that also returns the KL. Materialized: x and y, then dq and dk from the stored P and S. */
double bench_executed_flops(const bench_config *config, const bench_point *point, bench_method method,
                            bench_pass pass)
{
    const bool streams = method == BENCH_STREAMING, gradients_f32 = config->dtype == SKL_F32 || config->grad_f32;
    const int count = !streams || pass == BENCH_FORWARD ? 2 : gradients_f32 ? 4 : 6;
    return matmul_flop(config, point, count, streams) / point->methods[method].passes[pass].median;
}

double bench_useful_flops(const bench_config *config, const bench_point *point, bench_pass pass)
{
    const int count = pass == BENCH_FORWARD ? 2 : 4; /* x and y, then dq and dk */
    return matmul_flop(config, point, count, true) / point->methods[BENCH_STREAMING].passes[pass].median;
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
