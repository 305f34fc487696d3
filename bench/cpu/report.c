#include "bench/cpu/report.h"

#include <inttypes.h>

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

/* ---- CSV ---------------------------------------------------------------------------------------------------- */

static const char csv_header[] =
    "date,version,machine,cores,kernel,dtype,gradients,mask,heads,length,dim,threads,method,pass,"
    "status,samples,median_s,min_s,max_s,executed_gflops,useful_gflops,sgemm_gflops,"
    "percent_of_sgemm,memory_bytes,streaming_speedup,percent_waiting\n";

/* ",12.3", or "," for a missing number. */
static void write_number(FILE *file, double number)
{
    if (number > 0)
        fprintf(file, ",%.6g", number);
    else
        fprintf(file, ",");
}

static void write_configuration(FILE *file, const bench_report *report, const bench_point *point)
{
    const bench_config *const config = &report->config;
    fprintf(file, "%s,%s,\"%s\",%d,%s,%s,%s,%s,%" PRId64 ",%" PRId64 ",%" PRId64 ",%d", report->date, skl_version(),
            report->machine, report->cores, point->kernel, bench_type_name(config->dtype),
            bench_type_name(config->grad_f32 ? SKL_F32 : config->dtype), config->causal ? "causal" : "none",
            config->heads, point->length, point->dim, point->threads);
}

static void write_pass(FILE *file, const bench_report *report, const bench_point *point, bench_method method,
                       bench_pass pass)
{
    const bench_method_result *const result = &point->methods[method];
    const timing *const time = &result->passes[pass];
    const double executed = bench_executed_flops(&report->config, point, method, pass);
    const bool streams = method == BENCH_STREAMING;
    write_configuration(file, report, point);
    fprintf(file, ",%s,%s,ok,%d", bench_method_name(method), bench_pass_name(pass), time->sample_count);
    write_number(file, time->median);
    write_number(file, time->least);
    write_number(file, time->most);
    write_number(file, executed * 1e-9);
    write_number(file, streams ? bench_useful_flops(&report->config, point, pass) * 1e-9 : 0);
    write_number(file, point->sgemm_flops * 1e-9);
    write_number(file, point->sgemm_flops > 0 ? 100 * executed / point->sgemm_flops : 0);
    fprintf(file, ",%zu", result->memory_size);
    write_number(file, streams ? 0 : bench_speedup(point, method, pass));
    write_number(file, 100 * point->waiting_share);
    fprintf(file, "\n");
}

void bench_write_csv(FILE *file, const bench_report *report)
{
    fprintf(file, "%s", csv_header);
    for (const bench_point *point = report->points; point < report->points + report->point_count; point++) {
        for (int method = 0; method < BENCH_METHOD_COUNT; method++) {
            const bench_method_result *const result = &point->methods[method];
            for (int pass = 0; result->ran && pass < bench_pass_count((bench_method)method); pass++)
                write_pass(file, report, point, (bench_method)method, (bench_pass)pass);
            if (result->ran)
                continue;
            write_configuration(file, report, point);
            fprintf(file, ",%s,,skipped,,,,,,,,,%zu,,\n", bench_method_name((bench_method)method),
                    result->memory_size);
        }
    }
}
