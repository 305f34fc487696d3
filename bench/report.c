#include "report.h"

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

/* What the task needs without stored matrices: x and y, then dq and dk. */
static int useful_matmuls(bench_pass pass)
{
    return pass == BENCH_FORWARD ? 2 : 4;
}

/* The one place that knows how many N x N x d matmuls a pass executes a head.
 *
 * Streaming: forward x and y. Backward x, y, dq, dk; with f32 gradients the tiles of dk are summed in the sweep that
 * makes dq, but 16-bit gradients cannot be summed in place, and a second sweep recomputes x and y for dk. The one
 * pass is a backward that reports the KL on its way. (The scalar reference kernel never fuses: its rate is
 * understated.) Kernels of a GPU differ in what they compute again: for them only what is useful counts.
 * Materialised: x and y, then dq and dk from the stored P and S. */
static int executed_matmuls(const bench_config *config, bench_method method, bench_pass pass)
{
    if (config->engine.device != SKL_CPU)
        return useful_matmuls(pass);
    if (method != BENCH_STREAMING || pass == BENCH_FORWARD)
        return 2;
    const bool gradients_f32 = config->dtype == SKL_F32 || config->grad_f32;
    return gradients_f32 ? 4 : 6;
}

double bench_visible_pairs(const bench_config *config, int64_t length)
{
    const double n = (double)length;
    return (double)config->heads * (config->causal ? n * (n + 1) / 2 : n * n);
}

/* A multiply and an add for each of d terms of a pair. */
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
    const double flop = useful_matmuls(pass) * matmul_flop(pairs, point->dim);
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
