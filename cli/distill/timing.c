#include "cli/distill/timing.h"
#include "bench/cpu/measure.h"
#include "cli/common/cli.h"

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

static void add_row(bytes *page, const char *name, const bench_method_result *method,
                    const bench_method_result *streaming)
{
    if (method->ran)
        bytes_print(page, "<tr><td>%s</td><td>%s</td><td>%.2f</td><td>%s</td></tr>", name,
                    cli_seconds_text(step_seconds(method)).text, step_seconds(method) / step_seconds(streaming),
                    cli_bytes_text((double)method->memory_size).text);
}

void distill_timing_add(bytes *page, const distill_run *run)
{
    const int64_t context = run->pair.problem.len_q, length = context < TIMED_CONTEXT ? context : TIMED_CONTEXT;
    blas *const library = run->request->options.device == SKL_CPU ? blas_open() : NULL;
    if (library == NULL) {
        bytes_print(page, "<p>Not measured: the baseline runs on the CPU and needs OpenBLAS, which was not found. "
                          "<code>streamkl bench</code> runs the full benchmark.</p>");
        return;
    }
    bench_report *const report = calloc(1, sizeof *report);
    const skl_status status = report ? measure(report, run, library, length) : SKL_ERROR_MEMORY;
    if (status != SKL_OK || report->point_count == 0) {
        bytes_print(page, "<p>Not measured: %s</p>", cli_status_text());
    } else {
        const bench_method_result *const methods = report->points[0].methods;
        bytes_print(page, "<table><tr><th>forward and backward</th><th>time</th><th>relative to "
                          "streaming</th><th>memory</th></tr>");
        add_row(page, "streaming", &methods[BENCH_STREAMING], &methods[BENCH_STREAMING]);
        add_row(page, "materialised, in place", &methods[BENCH_IN_PLACE], &methods[BENCH_STREAMING]);
        add_row(page, "materialised, framework", &methods[BENCH_FRAMEWORK], &methods[BENCH_STREAMING]);
        bytes_print(page,
                    "</table><p class=\"lead\"><small>Median times of a short measurement on this machine: one head "
                    "of size %" PRId64 " at a context of %" PRId64 ", where the matrices fit into memory. ",
                    run->pair.problem.dim_s, length);
        bytes_add_escaped(page, blas_description(library));
        bytes_print(page, ".");
        if (report->points[0].waiting_share > waiting_to_mention)
            bytes_print(page,
                        " The times are unreliable: other processes occupied the cores for %.0f %% of the time.",
                        100 * report->points[0].waiting_share);
        bytes_print(page, "</small></p>");
    }
    bench_report_free(report);
    blas_close(library);
}
