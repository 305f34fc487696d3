/* streamkl bench: the command line and the order of the steps. */
#include "bench/cpu/blas.h"
#include "device/device.h"
#include "bench/cpu/measure.h"
#include "cli/common/cli.h"
#include "cli/common/options.h"
#include "cli/term/term.h"
#include "cli/io/file_write.h"

#include <inttypes.h>
#include <math.h>
#include <stdlib.h>

static const char doc[] =
    "Compare streaming with a baseline that materializes the N x N matrices (BLAS sgemm and a vectorized "
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

static const cli_option problem_options[] = {
    {"lengths", "LIST", parse_list, CONFIG(lengths), "Context lengths N; default 1024,2048,4096,8192"},
    {"dims", "LIST", parse_list, CONFIG(dims), "Head sizes d; default 64,128"},
    {"heads", "N", parse_count, CONFIG(heads), "Heads", .initial = 1},
    {"dtype", "f32|f16|bf16", PARSE_WORD, CONFIG(dtype),
     "Type of the inputs; default f32. The baseline is always f32"},
    {"grad-f32", NULL, parse_flag, CONFIG(grad_f32), "Gradients in f32 instead of the type of the inputs"},
    {"causal", NULL, parse_flag, CONFIG(causal), "A query attends to no later key"},
    {0},
};

static const cli_option measurement_options[] = {
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

static const cli_option result_options[] = {
    {"csv", "FILE", parse_string, offsetof(bench_request, csv_path), "Write every measurement as CSV"},
    {0},
};

static const option_group groups[] = {
    {"Problem:", problem_options, 0}, {"Measurement:", measurement_options, 0}, {"Result:", result_options, 0}, {0}};

/* The machine, the problem and the BLAS. Without one, blas_description is NULL. */
static void print_report_heading(const bench_report *report, const char *blas_description)
{
    const bench_config *const config = &report->config;
    const term_style style = term_style_for(stdout);
    printf("%sstreamkl %s%s on %s, %d core%s, %s\n", style.bold, skl_version(), style.plain, report->machine,
           report->cores, cli_plural(report->cores), report->date);
    printf("%s inputs, %s gradients, %" PRId64 " head%s, %s; median of at least %" PRId64 " sample%s per method\n",
           bench_type_name(config->dtype), bench_type_name(config->grad_f32 ? SKL_F32 : config->dtype), config->heads,
           cli_plural(config->heads), config->causal ? "causal" : "no mask", config->rounds,
           cli_plural(config->rounds));
    if (blas_description)
        printf("%s; \"of sgemm\" is the share of its speed on 2048 x 2048 matrices\n", blas_description);
    else
        printf("No BLAS on this machine (apt install libopenblas0): only streaming is timed.\n");
}

/* ---- One point ---------------------------------------------------------------------------------------------- */

static void print_share_of_sgemm(double flops, double sgemm_flops)
{
    if (sgemm_flops > 0)
        printf(" %7.0f %%", 100 * flops / sgemm_flops);
    else
        printf(" %9s", "");
}

static void print_pass(const bench_config *config, const bench_point *point, bench_method method, bench_pass pass)
{
    const bench_method_result *const result = &point->methods[method];
    const timing *const time = &result->passes[pass];
    const double executed = bench_executed_flops(config, point, method, pass);
    printf("  %-10s %-9s %10s %10s %9.1f", pass == BENCH_FORWARD ? bench_method_name(method) : "",
           bench_pass_name(pass), cli_seconds_text(time->median).text, cli_seconds_text(time->least).text,
           executed * 1e-9);
    print_share_of_sgemm(executed, point->sgemm_flops);
    if (method == BENCH_STREAMING)
        printf(" %8.1f", bench_useful_flops(config, point, pass) * 1e-9);
    else
        printf(" %8s", "");
    printf(" %10s", cli_bytes_text((double)result->memory_size).text);
    if (method != BENCH_STREAMING)
        printf(" %8.2fx", bench_speedup(point, method, pass));
    printf("\n");
}

static void print_method(const bench_config *config, const bench_point *point, bench_method method)
{
    const bench_method_result *const result = &point->methods[method];
    if (result->ran) {
        for (int pass = 0; pass < bench_pass_count(method); pass++)
            print_pass(config, point, method, (bench_pass)pass);
        return;
    }
    if (point->sgemm_flops > 0 && !config->no_baseline)
        printf("  %-10s skipped: its matrices need %s, --max-memory is %s\n", bench_method_name(method),
               cli_bytes_text((double)result->memory_size).text, cli_bytes_text((double)config->max_memory).text);
}

/* ---- Ratios ------------------------------------------------------------------------------------------------- */

/* A training step needs the KL and the gradients: two calls, or one with one-pass. */
static void print_step_speedups(const bench_point *point)
{
    const double one_pass = point->methods[BENCH_STREAMING].passes[BENCH_ONE_PASS].median;
    const double two_passes = bench_step_seconds(point, BENCH_STREAMING);
    for (int method = BENCH_IN_PLACE; method < BENCH_METHOD_COUNT; method++) {
        if (!point->methods[method].ran)
            continue;
        const double baseline = bench_step_seconds(point, (bench_method)method);
        printf("  forward + backward: streaming %.2fx, one pass %.2fx as fast as %s\n", baseline / two_passes,
               baseline / one_pass, bench_method_name((bench_method)method));
    }
}

/* Both methods must have computed the same result. The bounds allow for f32 sums over N terms in different orders,
 * and for gradients that are stored in 16 bits. */
static void print_agreement(const bench_config *config, const bench_point *point)
{
    if (isnan(point->kl_difference) && !point->methods[BENCH_IN_PLACE].ran && !point->methods[BENCH_FRAMEWORK].ran)
        return;
    const bool gradients_f32 = config->dtype == SKL_F32 || config->grad_f32;
    const bool agree = point->kl_difference < 1e-4 && point->gradient_difference < (gradients_f32 ? 1e-4 : 1e-2);
    const term_style style = term_style_for(stdout);
    printf("  %sstreaming and the baseline %s: KL within %.1g, gradients within %.1g of the largest%s\n",
           agree ? style.dim : style.bad, agree ? "agree" : "DISAGREE", point->kl_difference,
           point->gradient_difference, style.plain);
}

/* Results from a busy machine are too low, by different amounts. */
static void print_waiting(const bench_point *point)
{
    const double harmless_share = 0.02;
    if (point->waiting_share < harmless_share)
        return;
    const term_style style = term_style_for(stdout);
    printf("  %sunreliable: the process waited for a core for %.0f %% of the time%s\n", style.bad,
           100 * point->waiting_share, style.plain);
}

/* The points from index `first` on: one length and head size, all thread counts. */
static void print_points(const bench_report *report, int first)
{
    const bench_config *const config = &report->config;
    const term_style style = term_style_for(stdout);
    for (int i = first; i < report->point_count; i++) {
        const bench_point *const point = &report->points[i];
        printf("\n%sN = %" PRId64 ", d = %" PRId64 ", %d thread%s%s, kernel %s", style.bold, point->length,
               point->dim, point->threads, cli_plural(point->threads), style.plain, point->kernel);
        if (point->sgemm_flops > 0)
            printf(", sgemm %.1f GFLOP/s", point->sgemm_flops * 1e-9);
        printf("\n%s  %-10s %-9s %10s %10s %9s %9s %8s %10s %9s%s\n", style.dim, "method", "pass", "median",
               "fastest", "GFLOP/s", "of sgemm", "useful", "memory", "speed-up", style.plain);
        for (int method = 0; method < BENCH_METHOD_COUNT; method++)
            print_method(config, point, (bench_method)method);
        print_step_speedups(point);
    }
    print_agreement(config, &report->points[first]);
    print_waiting(&report->points[first]);
    fflush(stdout);
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
    print_report_heading(report, library ? blas_description(library) : NULL);
    for (int l = 0; l < config->lengths.count; l++) {
        for (int d = 0; d < config->dims.count; d++) {
            char label[64];
            snprintf(label, sizeof label, "N=%" PRId64 " d=%" PRId64, config->lengths.values[l],
                     config->dims.values[d]);
            const int first_point = report->point_count;
            term_progress_begin(label);
            check_measured(bench_measure(report, library, config->lengths.values[l], config->dims.values[d],
                                         term_progress_update));
            print_points(report, first_point);
        }
    }
}

int cmd_bench(int argc, char **argv)
{
    static const command_line command = {doc, groups, NULL};
    bench_request request = {.config = {
                                 .lengths = {4, {1024, 2048, 4096, 8192}},
                                 .dims = {2, {64, 128}},
                                 .threads = {1, {1}},
                                 .max_memory = machine_available_memory() / 2,
                                 .engine = skl_options_default(),
                             }};
    options_parse(&command, argc, argv, &request);
    if (request.csv_path)
        file_outputs_check(&(output_file){"--csv", request.csv_path}, 1, NULL, 0);
    bench_report *const report = cli_allocate_zeros(1, sizeof *report, "the report");
    report->config = request.config;
    plan_check(bench_check(&report->config), &report->config.engine);
    machine_date(report->date, sizeof report->date);
    machine_cpu_model(report->machine, sizeof report->machine);
    report->cores = machine_cores();
    blas *const library = blas_open();
    measure_all(report, library);
    if (request.csv_path) {
        FILE *const file = file_write_begin();
        bench_write_csv(file, report);
        file_write_end(file, request.csv_path);
        file_write_commit();
    }
    blas_close(library);
    free(report);
    return CLI_OK;
}
