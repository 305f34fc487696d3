#include "bench/cpu/csv.h"

#include <inttypes.h>

static const char header[] =
    "date,version,machine,cores,kernel,dtype,gradients,mask,heads,length,dim,threads,method,pass,"
    "status,samples,median_s,min_s,max_s,executed_gflops,useful_gflops,sgemm_gflops,"
    "percent_of_sgemm,memory_bytes,streaming_speedup,percent_waiting,index_heads,key_heads,top_k\n";

static void write_quoted(FILE *stream, const char *text)
{
    putc('"', stream);
    for (; *text; text++) {
        if (*text == '"')
            putc('"', stream);
        putc(*text, stream);
    }
    putc('"', stream);
}

/* ",12.3", or "," for a number that is not there. */
static void write_number(FILE *stream, double number)
{
    if (number > 0)
        fprintf(stream, ",%.6g", number);
    else
        putc(',', stream);
}

static void write_circumstances(FILE *stream, const bench_report *report, const bench_point *point)
{
    const bench_config *const config = &report->config;
    fprintf(stream, "%s,%s,", report->date, skl_version());
    write_quoted(stream, report->machine);
    fprintf(stream, ",%d,%s,%s,%s,%s,%" PRId64 ",%" PRId64 ",%" PRId64 ",%d", report->cores, point->kernel,
            bench_type_name(config->dtype), bench_type_name(config->grad_f32 ? SKL_F32 : config->dtype),
            config->causal ? "causal" : "none", config->heads, point->length, point->dim, point->threads);
}

/* What only an indexer has. */
static void write_student(FILE *stream, const bench_config *config)
{
    write_number(stream, (double)config->index_heads);
    write_number(stream, (double)(config->index_heads && !config->key_heads ? config->heads : config->key_heads));
    write_number(stream, (double)config->top_k);
    putc('\n', stream);
}

static void write_pass(FILE *stream, const bench_report *report, const bench_point *point, bench_method method,
                       bench_pass pass)
{
    const bench_method_result *const result = &point->methods[method];
    const timing *const time = &result->passes[pass];
    const double executed = bench_executed_flops(&report->config, point, method, pass);
    const bool streams = method == BENCH_STREAMING;
    write_circumstances(stream, report, point);
    fprintf(stream, ",%s,%s,ok,%d", bench_method_name(method), bench_pass_name(pass), time->sample_count);
    write_number(stream, time->median);
    write_number(stream, time->least);
    write_number(stream, time->most);
    write_number(stream, executed * 1e-9);
    write_number(stream, streams ? bench_useful_flops(&report->config, point, pass) * 1e-9 : 0);
    write_number(stream, point->sgemm_flops * 1e-9);
    write_number(stream, point->sgemm_flops > 0 ? 100 * executed / point->sgemm_flops : 0);
    fprintf(stream, ",%zu", result->memory_size);
    write_number(stream, streams ? 0 : bench_speedup(point, method, pass));
    write_number(stream, 100 * point->waiting_share);
    write_student(stream, &report->config);
}

static void write_skipped(FILE *stream, const bench_report *report, const bench_point *point, bench_method method)
{
    write_circumstances(stream, report, point);
    fprintf(stream, ",%s,,skipped,,,,,,,,,%zu,,", bench_method_name(method), point->methods[method].memory_size);
    write_student(stream, &report->config);
}

void csv_write(FILE *stream, const bench_report *report)
{
    fputs(header, stream);
    for (int i = 0; i < report->point_count; i++) {
        const bench_point *const point = &report->points[i];
        for (int method = 0; method < BENCH_METHOD_COUNT; method++) {
            if (!point->methods[method].ran) {
                if (report->config.index_heads == 0) /* there is no other method for an indexer */
                    write_skipped(stream, report, point, (bench_method)method);
                continue;
            }
            for (int pass = 0; pass < bench_pass_count((bench_method)method); pass++)
                write_pass(stream, report, point, (bench_method)method, (bench_pass)pass);
        }
    }
}
