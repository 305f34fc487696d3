#include "cli/distill/timing.h"
#include "bench/cpu/measure.h"
#include "cli/common/cli.h"
#include "cli/distill/document.h"

#include <inttypes.h>
#include <stdlib.h>

enum { TIMED_CONTEXT = 2048, TIMED_ROUNDS = 3, TIMED_MEMORY = 128 << 20 };

static const double waiting_to_mention = 0.02;

static skl_status measure(bench_report *report, const distill_run *run, const blas *library, int64_t length)
{
    const int64_t dim = run->pair.problem.dim_s;
    report->config = (bench_config){
        .lengths = {1, {length}},
        .dims = {1, {dim}},
        .threads = {1, {run->pair.threads}},
        .heads = 1,
        .dtype = SKL_F32,
        .causal = 1,
        .engine = run->request->options,
        .rounds = TIMED_ROUNDS,
        .max_memory = TIMED_MEMORY,
    };
    return bench_measure(report, library, length, dim, (sampler_progress){NULL, NULL});
}

static double step_seconds(const bench_method_result *method)
{
    return method->passes[BENCH_FORWARD].median + method->passes[BENCH_BACKWARD].median;
}

static void add_row(json_t **rows, const char *name, const bench_method_result *method,
                    const bench_method_result *streaming)
{
    if (method->ran)
        cli_json_append(rows, json_pack("[ssos]", name, cli_seconds_text(step_seconds(method)).text,
                                        json_sprintf("%.2f", step_seconds(method) / step_seconds(streaming)),
                                        cli_bytes_text((double)method->memory_size).text));
}

static json_t *table_of(const bench_report *report, const distill_run *run, const blas *library, int64_t length)
{
    static const char *const header[] = {"forward and backward", "time", "relative", "memory", NULL};
    const bench_method_result *const methods = report->points[0].methods;
    json_t *rows = json_array();
    add_row(&rows, "streaming", &methods[BENCH_STREAMING], &methods[BENCH_STREAMING]);
    add_row(&rows, "materialised, in place", &methods[BENCH_IN_PLACE], &methods[BENCH_STREAMING]);
    add_row(&rows, "materialised, framework", &methods[BENCH_FRAMEWORK], &methods[BENCH_STREAMING]);
    char waiting[128] = "";
    if (report->points[0].waiting_share > waiting_to_mention)
        snprintf(waiting, sizeof waiting,
                 " The times are unreliable: other processes occupied the cores for %.0f %% of the time.",
                 100 * report->points[0].waiting_share);
    return document_table(
        "Time", header, rows,
        json_sprintf("Median times of a short measurement on this machine: one head of size %" PRId64
                     " at a context of %" PRId64 ", where the matrices fit into memory. %s.%s",
                     run->pair.problem.dim_s, length, blas_description(library), waiting));
}

json_t *distill_timing_refused(const char *reason)
{
    return json_pack("{ss ss so}", "kind", "text", "title", "Time", "text", json_sprintf("Not measured: %s", reason));
}

json_t *distill_timing(const distill_run *run)
{
    const int64_t context = run->pair.problem.len_q, length = context < TIMED_CONTEXT ? context : TIMED_CONTEXT;
    blas *const library = run->request->options.device == SKL_CPU ? blas_open() : NULL;
    if (library == NULL)
        return distill_timing_refused(
            "the baseline runs on the CPU and needs OpenBLAS, which was not found. `streamkl "
            "bench` runs the full benchmark.");
    bench_report *const report = calloc(1, sizeof *report);
    const skl_status status = report ? measure(report, run, library, length) : SKL_ERROR_MEMORY;
    json_t *const block = status != SKL_OK || report->point_count == 0 ? distill_timing_refused(cli_status_text())
                                                                       : table_of(report, run, library, length);
    bench_report_free(report);
    blas_close(library);
    return block;
}
