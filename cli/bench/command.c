/* streamkl bench: the command line and the order of the steps. */
#include "bench/cpu/blas.h"
#include "bench/cpu/csv.h"
#include "bench/cpu/figure.h"
#include "device/machine.h"
#include "bench/cpu/measure.h"
#include "cli/bench/table.h"
#include "cli/common/cli.h"
#include "cli/common/options.h"
#include "cli/term/term.h"
#include "cli/io/file_write.h"

#include <inttypes.h>
#include <stdlib.h>

static const char doc[] =
    "Compare streaming with a baseline that materialises the N x N matrices (BLAS sgemm and a vectorised softmax): "
    "forward, backward (student gradients), and both in one pass. All methods are sampled in the same rounds on the "
    "same inputs. On a GPU only streaming is timed, with events in its stream."
    "\vThe baseline runs in two variants: \"framework\" allocates a new buffer for every result and frees it after "
    "its "
    "last use, like autograd; \"in place\" reuses its buffers, the minimum for materialising.\n"
    "\n"
    "With --index-heads the student is an indexer, which learns the mean of all teacher heads. Then only streaming "
    "is "
    "timed. A forward also computes the teacher's LSEs, which are not counted.\n"
    "\n"
    "GFLOP/s counts the matmuls that a pass executes, \"useful\" those that the task needs: 4 d FLOP per visible "
    "pair "
    "forward, 8 d backward. For GPU kernels only the latter is known. \"speed-up\" is the time of a method divided "
    "by "
    "that of streaming.\n"
    "\n"
    "Examples:\n"
    "  streamkl bench                                  four lengths, two sizes\n"
    "  streamkl bench --lengths 4096 --dims 128        one length, one size\n"
    "  streamkl bench --threads 1,2                    speed-up of a second thread\n"
    "  streamkl bench --dtype bf16 --causal --heads 8\n"
    "  streamkl bench --lengths 16384,65536 --max-memory 4G\n"
    "  streamkl bench --device cuda --dtype bf16 --heads 16 --lengths 8192\n"
    "  streamkl bench --heads 64 --index-heads 32 --top-k 2048 --device cuda\n"
    "  streamkl bench --csv bench.csv --plot bench.svg";

/* ---- The command line --------------------------------------------------------------------------------------- */

typedef struct bench_request {
    bench_config config;
    const char *csv_path, *plot_path; /* NULL: none */
} bench_request;

enum {
    KEY_LENGTHS = OPTIONS_COMMAND_KEYS,
    KEY_DIMS,
    KEY_HEADS,
    KEY_INDEX_HEADS,
    KEY_KEY_HEADS,
    KEY_TOP_K,
    KEY_DTYPE,
    KEY_GRAD_F32,
    KEY_CAUSAL,
    KEY_DEVICE,
    KEY_THREADS,
    KEY_KERNEL,
    KEY_NO_BASELINE,
    KEY_MAX_MEMORY,
    KEY_REPEAT,
    KEY_EXPLAIN,
    KEY_CSV,
    KEY_PLOT,
};

static const struct argp_option options[] = {
    {NULL, 0, NULL, 0, "Problem:", 1},
    {"lengths", KEY_LENGTHS, "LIST", 0, "Context lengths N; default 1024,2048,4096,8192", 0},
    {"dims", KEY_DIMS, "LIST", 0, "Head sizes d; default 64,128", 0},
    {"heads", KEY_HEADS, "N", 0, "Heads; default 1", 0},
    {"index-heads", KEY_INDEX_HEADS, "N", 0, "The student is an indexer with N heads", 0},
    {"key-heads", KEY_KEY_HEADS, "N", 0, "Key heads of an indexer's teacher; default the number of heads", 0},
    {"top-k", KEY_TOP_K, "N", 0, "Sparse indexer with N indices per row; default dense", 0},
    {"dtype", KEY_DTYPE, "f32|f16|bf16", 0, "Type of the inputs; default f32. The baseline is always f32", 0},
    {"grad-f32", KEY_GRAD_F32, NULL, 0, "Gradients in f32 instead of the type of the inputs", 0},
    {"causal", KEY_CAUSAL, NULL, 0, "A query attends to no later key", 0},
    {NULL, 0, NULL, 0, "Measurement:", 2},
    {"device", KEY_DEVICE, "cpu|cuda[:N]", 0, "Where to compute; default cpu", 0},
    {"threads", KEY_THREADS, "LIST", 0, "CPU threads of all methods; default 1", 0},
    {"kernel", KEY_KERNEL, "NAME", 0, "A kernel that streamkl info lists; default STREAMKL_KERNEL, else the best", 0},
    {"no-baseline", KEY_NO_BASELINE, NULL, 0, "Time only streaming and sgemm", 0},
    {"max-memory", KEY_MAX_MEMORY, "SIZE", 0,
     "Skip a baseline with larger matrices, such as 500M or 8G; default half of the free memory", 0},
    {"repeat", KEY_REPEAT, "N", 0, "Rounds, of at least 0.2 s and one sample per method; default 5", 0},
    {NULL, 0, NULL, 0, "Result:", 3},
    {"explain", KEY_EXPLAIN, NULL, 0, "Show the kernels of streaming, and the reason for each choice", 0},
    {"csv", KEY_CSV, "FILE", 0, "Write every measurement as CSV", 0},
    {"plot", KEY_PLOT, "FILE", 0, "Draw speed and memory by N as SVG", 0},
    {0},
};

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

static const char *parse_rounds(const char *text, void *value)
{
    int64_t rounds;
    if (parse_count(text, &rounds) || rounds > SAMPLER_SAMPLES_MAX)
        return "an integer from 1 to 512";
    *(int32_t *)value = (int32_t)rounds;
    return NULL;
}

static const option_field fields[] = {
    {KEY_LENGTHS, parse_list, offsetof(bench_request, config.lengths)},
    {KEY_DIMS, parse_list, offsetof(bench_request, config.dims)},
    {KEY_HEADS, parse_count, offsetof(bench_request, config.heads)},
    {KEY_INDEX_HEADS, parse_count, offsetof(bench_request, config.index_heads)},
    {KEY_KEY_HEADS, parse_count, offsetof(bench_request, config.key_heads)},
    {KEY_TOP_K, parse_count, offsetof(bench_request, config.top_k)},
    {KEY_DTYPE, parse_dtype, offsetof(bench_request, config.dtype)},
    {KEY_GRAD_F32, parse_flag, offsetof(bench_request, config.grad_f32)},
    {KEY_CAUSAL, parse_flag, offsetof(bench_request, config.causal)},
    {KEY_THREADS, parse_list, offsetof(bench_request, config.threads)},
    {KEY_DEVICE, parse_device, offsetof(bench_request, config.engine)},
    {KEY_KERNEL, parse_string, offsetof(bench_request, config.engine.kernel)},
    {KEY_NO_BASELINE, parse_flag, offsetof(bench_request, config.no_baseline)},
    {KEY_MAX_MEMORY, parse_size, offsetof(bench_request, config.max_memory)},
    {KEY_REPEAT, parse_rounds, offsetof(bench_request, config.rounds)},
    {KEY_EXPLAIN, parse_flag, offsetof(bench_request, config.explain)},
    {KEY_CSV, parse_string, offsetof(bench_request, csv_path)},
    {KEY_PLOT, parse_string, offsetof(bench_request, plot_path)},
    {0, NULL, 0},
};

static error_t parse_option(int key, char *text, struct argp_state *state)
{
    if (key == ARGP_KEY_ARG)
        argp_error(state, "unexpected argument '%s'", text);
    return options_store(fields, options, key, text, state->input);
}

static int check_outputs(const bench_request *request)
{
    output_file outputs[2];
    size_t count = 0;
    if (request->csv_path)
        outputs[count++] = (output_file){"--csv", request->csv_path};
    if (request->plot_path)
        outputs[count++] = (output_file){"--plot", request->plot_path};
    int exit_code = file_outputs_check(outputs, count, NULL, 0);
    for (size_t o = 0; o < count && exit_code == CLI_OK; o++)
        exit_code = file_write_check(outputs[o].path);
    return exit_code;
}

static int parse_command_line(bench_request *request, int argc, char **argv)
{
    static const struct argp argp = {.options = options, .parser = parse_option, .doc = doc};
    request->config = (bench_config){
        .lengths = {4, {1024, 2048, 4096, 8192}},
        .dims = {2, {64, 128}},
        .threads = {1, {1}},
        .heads = 1,
        .rounds = 5,
        .max_memory = machine_available_memory() / 2,
        .engine = skl_options_default(),
    };
    const int refused = options_parse(&argp, argc, argv, 0, request);
    if (refused)
        return refused;
    const bench_config *const config = &request->config;
    const char *const needless = config->index_heads ? NULL
                                 : config->key_heads ? "key-heads"
                                 : config->top_k     ? "top-k"
                                                     : NULL;
    if (needless)
        return cli_fail(CLI_BAD_INPUT, "--%s: --index-heads must be given too", needless);
    if (request->config.engine.device != SKL_CPU)
        request->config.threads = (bench_list){1, {1}}; /* a GPU has no thread count */
    return check_outputs(request);
}

/* ---- Measurement -------------------------------------------------------------------------------------------- */

static void show_progress(void *progress, int rounds_done, int rounds)
{
    term_progress_update(progress, rounds_done, rounds);
}

static int fail_measuring(skl_status status)
{
    if (status == SKL_ERROR_MEMORY && !device_error()[0])
        return cli_fail(CLI_NO_MEMORY, "out of memory: try a smaller --max-memory or --no-baseline");
    return cli_fail_status(status);
}

static int measure_heading(const bench_report *report, const blas *library, term_progress *progress)
{
    double flops[BENCH_LIST_MAX];
    if (library) {
        const sampler_progress shown = {show_progress, progress};
        term_progress_begin(progress, "sgemm");
        const skl_status status = bench_measure_sgemm(&report->config, library, flops, shown);
        term_progress_end(progress);
        if (status != SKL_OK)
            return fail_measuring(status);
    }
    bench_table_heading(report, library ? blas_description(library) : NULL, flops);
    return CLI_OK;
}

static int measure_size(bench_report *report, const blas *library, int64_t length, int64_t dim,
                        term_progress *progress)
{
    char label[64];
    snprintf(label, sizeof label, "N=%" PRId64 " d=%" PRId64, length, dim);
    const sampler_progress shown = {show_progress, progress};
    const int first_point = report->point_count;
    term_progress_begin(progress, label);
    const skl_status status = bench_measure(report, library, length, dim, shown);
    term_progress_end(progress);
    if (status != SKL_OK)
        return fail_measuring(status);
    bench_table_points(report, first_point);
    return CLI_OK;
}

static int measure_all(bench_report *report, const blas *library)
{
    const bench_config *const config = &report->config;
    term_progress progress = {0};
    int exit_code = measure_heading(report, library, &progress);
    for (int l = 0; l < config->lengths.count; l++) {
        for (int d = 0; exit_code == CLI_OK && d < config->dims.count; d++)
            exit_code = measure_size(report, library, config->lengths.values[l], config->dims.values[d], &progress);
    }
    return exit_code;
}

typedef void report_writer(bytes *file, const bench_report *report);

static int write_report(file_set *set, const char *path, report_writer *write, const bench_report *report)
{
    if (path == NULL)
        return CLI_OK;
    bytes file = {0};
    write(&file, report);
    const int exit_code = file_write_into(set, path, &file);
    bytes_free(&file);
    return exit_code;
}

static int write_files(const bench_request *request, const bench_report *report)
{
    file_set set = {NULL, NULL};
    int exit_code = write_report(&set, request->csv_path, csv_write, report);
    if (exit_code == CLI_OK)
        exit_code = write_report(&set, request->plot_path, figure_draw, report);
    return file_write_commit(&set, exit_code);
}

/* Checks the configuration, and notes machine and date. */
static int open_device(bench_report *report)
{
    const skl_options *const engine = &report->config.engine;
    skl_status status = bench_check(&report->config);
    if (status != SKL_OK)
        return fail_plan(status, engine);
    machine_date(report->date, sizeof report->date);
    if (engine->device == SKL_CPU) {
        report->cores = machine_cores();
        machine_cpu_model(report->machine, sizeof report->machine);
        return CLI_OK;
    }
    device_properties gpu;
    status = device_open(engine->device, engine->device_index);
    if (status == SKL_OK)
        status = device_describe(engine->device, &gpu);
    if (status != SKL_OK)
        return cli_fail_status(status);
    report->cores = gpu.sm_count;
    snprintf(report->machine, sizeof report->machine, "%s", gpu.name);
    return CLI_OK;
}

int cmd_bench(int argc, char **argv)
{
    bench_request request = {0};
    int exit_code = parse_command_line(&request, argc, argv);
    if (exit_code != CLI_OK)
        return exit_code;
    bench_report *const report = calloc(1, sizeof *report);
    if (report == NULL)
        return cli_fail(CLI_NO_MEMORY, "out of memory for the report");
    report->config = request.config;
    exit_code = open_device(report);
    if (exit_code != CLI_OK) {
        bench_report_free(report);
        return exit_code;
    }
    const bool compared = request.config.engine.device == SKL_CPU && request.config.index_heads == 0;
    blas *const library = compared ? blas_open() : NULL;
    exit_code = measure_all(report, library);
    if (exit_code == CLI_OK)
        exit_code = write_files(&request, report);
    blas_close(library);
    bench_report_free(report);
    return exit_code;
}
