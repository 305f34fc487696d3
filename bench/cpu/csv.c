#include "bench/cpu/csv.h"

#include <inttypes.h>

static const char header[] =
    "date,version,machine,cores,kernel,dtype,gradients,mask,heads,length,dim,threads,method,pass,"
    "status,samples,median_s,min_s,max_s,executed_gflops,useful_gflops,sgemm_gflops,"
    "percent_of_sgemm,memory_bytes,streaming_speedup,percent_waiting\n";

static void write_quoted(FILE *file, const char *text)
{
    fprintf(file, "\"");
    for (; *text; text++)
        if (*text == '"')
            fprintf(file, "\"\"");
        else
            fprintf(file, "%c", *text);
    fprintf(file, "\"");
}

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
    fprintf(file, "%s,%s,", report->date, skl_version());
    write_quoted(file, report->machine);
    fprintf(file, ",%d,%s,%s,%s,%s,%" PRId64 ",%" PRId64 ",%" PRId64 ",%d", report->cores, point->kernel,
            bench_type_name(config->dtype), bench_type_name(config->grad_f32 ? SKL_F32 : config->dtype),
            config->causal ? "causal" : "none", config->heads, point->length, point->dim, point->threads);
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

static void write_skipped(FILE *file, const bench_report *report, const bench_point *point, bench_method method)
{
    write_configuration(file, report, point);
    fprintf(file, ",%s,,skipped,,,,,,,,,%zu,,\n", bench_method_name(method), point->methods[method].memory_size);
}

void csv_write(FILE *file, const bench_report *report)
{
    fprintf(file, "%s", header);
    for (int i = 0; i < report->point_count; i++) {
        const bench_point *const point = &report->points[i];
        for (int method = 0; method < BENCH_METHOD_COUNT; method++) {
            if (!point->methods[method].ran)
                write_skipped(file, report, point, (bench_method)method);
            for (int pass = 0; point->methods[method].ran && pass < bench_pass_count((bench_method)method); pass++)
                write_pass(file, report, point, (bench_method)method, (bench_pass)pass);
        }
    }
}
