/* streamkl bench: the command line and the order of the steps. */
#include "bench/cpu/blas.h"
#include "bench/cpu/csv.h"
#include "device/device.h"
#include "bench/cpu/measure.h"
#include "cli/bench/table.h"
#include "cli/common/cli.h"
#include "cli/common/options.h"
#include "cli/term/term.h"
#include "cli/io/file_write.h"

#include <inttypes.h>
#include <stdlib.h>

static const char doc[] =
    "Compare streaming with a baseline that materializes the N x N matrices (BLAS sgemm and a vectorised "
    "softmax): forward, backward (student gradients), and both in one pass. All methods are sampled in the same "
    "rounds on the same inputs, on this CPU. bench/run.py of the sources measures GPUs and indexers."
    "\vThe baseline runs in two variants: \"framework\" allocates a new buffer for every result and frees it "
    "after its last use, like autograd; \"in place\" reuses its buffers, the minimum for materializing.\n"
    "\n"
    "GFLOP/s counts the matmuls that a pass executes, \"useful\" those that the task needs: 4 d FLOP per visible "
    "pair forward, 8 d backward. \"speed-up\" is the time of a method divided by that of streaming.\n"
    "\n"
    "Examples:\n"
    "  streamkl bench                                  four lengths, two sizes\n"
    "  streamkl bench --lengths 4096 --dims 128        one length, one size\n"
    "  streamkl bench --threads 1,2                    speed-up of a second thread\n"
    "  streamkl bench --dtype bf16 --causal --heads 8\n"
    "  streamkl bench --lengths 16384,65536 --max-memory 4G\n"
    "  streamkl bench --csv bench.csv";

/* ---- The command line --------------------------------------------------------------------------------------- */

typedef struct bench_request {
    bench_config config;
    const char *csv_path; /* NULL: none */
} bench_request;

static int compare_int64(const void *left, const void *right)
{
    const int64_t a = *(const int64_t *)left, b = *(const int64_t *)right;
    return (a > b) - (a < b);
}

/* "1024,2048" into a bench_list, sorted, each value once. */
static const char *parse_list(const char *text, void *value)
{
    static const char accepted[] = "up to 16 integers from 1 to 2^30, separated by commas";
    const long long most = 1LL << 30;
    bench_list list = {0};
    char *end;
    do {
        const long long number = strtoll(text, &end, 10);
        if (end == text || (*end && *end != ',') || number < 1 || number > most || list.count == BENCH_LIST_MAX)
            return accepted;
        list.values[list.count++] = number;
        text = end + 1;
    } while (*end);
    qsort(list.values, (size_t)list.count, sizeof list.values[0], compare_int64);
    bench_list *const unique = value;
    unique->count = 0;
    for (int i = 0; i < list.count; i++) {
        if (i == 0 || list.values[i] != list.values[i - 1])
            unique->values[unique->count++] = list.values[i];
    }
    return NULL;
}

/* "500M" into bytes. */
static const char *parse_size(const char *text, void *value)
{
    static const char accepted[] = "a size such as 800K, 500M or 8G";
    static const char units[] = "KMGT";
    char *end;
    const double number = strtod(text, &end);
    const char *const unit = *end ? strchr(units, *end) : NULL;
    if (end == text || unit == NULL || end[1] || !(number >= 0) || number > 1e6)
        return accepted;
    *(int64_t *)value = (int64_t)(number * (double)((int64_t)1024 << 10 * (unit - units)));
    return NULL;
}

#define CONFIG(member) offsetof(bench_request, config.member)

static const cli_option problem[] = {
    {"lengths", "LIST", parse_list, CONFIG(lengths), "Context lengths N; default 1024,2048,4096,8192"},
    {"dims", "LIST", parse_list, CONFIG(dims), "Head sizes d; default 64,128"},
    {"heads", "N", parse_count, CONFIG(heads), "Heads", .initial = 1},
    {"dtype", "f32|f16|bf16", parse_dtype, CONFIG(dtype),
     "Type of the inputs; default f32. The baseline is always f32"},
    {"grad-f32", NULL, parse_flag, CONFIG(grad_f32), "Gradients in f32 instead of the type of the inputs"},
    {"causal", NULL, parse_flag, CONFIG(causal), "A query attends to no later key"},
    {0},
};

static const cli_option measurement[] = {
    {"threads", "LIST", parse_list, CONFIG(threads), "CPU threads of all methods; default 1"},
    {"kernel", "NAME", parse_string, CONFIG(engine.kernel),
     "A kernel that streamkl info lists; default STREAMKL_KERNEL, else the best"},
    {"no-baseline", NULL, parse_flag, CONFIG(no_baseline), "Time only streaming and sgemm"},
    {"max-memory", "SIZE", parse_size, CONFIG(max_memory),
     "Skip a baseline with larger matrices, such as 500M or 8G; default half of the free memory"},
    {"repeat", "N", parse_count, CONFIG(rounds), "Rounds, of at least 0.2 s and one sample per method", .initial = 5,
     .least = 1, .most = SAMPLER_SAMPLES_MAX},
    {0},
};

static const cli_option result[] = {
    {"csv", "FILE", parse_string, offsetof(bench_request, csv_path), "Write every measurement as CSV"},
    {0},
};

static const option_group groups[] = {
    {"Problem:", problem, 0}, {"Measurement:", measurement, 0}, {"Result:", result, 0}, {0}};

static void parse_command_line(bench_request *request, int argc, char **argv)
{
    static const command_line command = {doc, groups, NULL};
    request->config = (bench_config){
        .lengths = {4, {1024, 2048, 4096, 8192}},
        .dims = {2, {64, 128}},
        .threads = {1, {1}},
        .max_memory = machine_available_memory() / 2,
        .engine = skl_options_default(),
    };
    options_parse(&command, argc, argv, request);
    if (request->csv_path)
        file_outputs_check(&(output_file){"--csv", request->csv_path}, 1, NULL, 0);
}

/* ---- Measurement -------------------------------------------------------------------------------------------- */

static void check_measured(skl_status status)
{
    term_progress_end();
    if (status == SKL_ERROR_MEMORY)
        cli_fail(CLI_NO_MEMORY, "out of memory: try a smaller --max-memory or --no-baseline");
    cli_check(status);
}

static void measure_all(bench_report *report, const blas *library)
{
    const bench_config *const config = &report->config;
    bench_table_heading(report, library ? blas_description(library) : NULL);
    for (int l = 0; l < config->lengths.count; l++) {
        for (int d = 0; d < config->dims.count; d++) {
            char label[64];
            snprintf(label, sizeof label, "N=%" PRId64 " d=%" PRId64, config->lengths.values[l],
                     config->dims.values[d]);
            const int first_point = report->point_count;
            term_progress_begin(label);
            check_measured(bench_measure(report, library, config->lengths.values[l], config->dims.values[d],
                                         term_progress_update));
            bench_table_points(report, first_point);
        }
    }
}

/* Checks the configuration, and notes machine and date. */
static void begin_report(bench_report *report)
{
    plan_check(bench_check(&report->config), &report->config.engine);
    machine_date(report->date, sizeof report->date);
    machine_cpu_model(report->machine, sizeof report->machine);
    report->cores = machine_cores();
}

int cmd_bench(int argc, char **argv)
{
    bench_request request = {0};
    parse_command_line(&request, argc, argv);
    bench_report *const report = cli_allocate_zeros(1, sizeof *report, "the report");
    report->config = request.config;
    begin_report(report);
    blas *const library = blas_open();
    measure_all(report, library);
    if (request.csv_path) {
        FILE *const file = file_write_begin();
        csv_write(file, report);
        file_write_end(file, request.csv_path);
        file_write_commit();
    }
    blas_close(library);
    free(report);
    return CLI_OK;
}
