#include "cli/bench/table.h"
#include "cli/common/cli.h"
#include "cli/term/term.h"

#include <inttypes.h>
#include <math.h>

void bench_table_heading(const bench_report *report, const char *blas_description)
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

static const bench_point *single_thread_point(const bench_report *report, const bench_point *point)
{
    for (int i = 0; i < report->point_count; i++) {
        const bench_point *const other = &report->points[i];
        if (other->threads == 1 && other->length == point->length && other->dim == point->dim)
            return other;
    }
    return NULL;
}

static void print_thread_speedup(const bench_report *report, const bench_point *point)
{
    const bench_point *const single = single_thread_point(report, point);
    if (point->threads == 1 || single == NULL)
        return;
    printf("  %d threads compared with 1:", point->threads);
    for (int pass = 0; pass < BENCH_PASS_COUNT; pass++) {
        const double before = single->methods[BENCH_STREAMING].passes[pass].median;
        const double after = point->methods[BENCH_STREAMING].passes[pass].median;
        printf("%s %s %.2fx", pass ? "," : "", bench_pass_name((bench_pass)pass), before / after);
    }
    printf("\n");
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

void bench_table_points(const bench_report *report, int first)
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
        print_thread_speedup(report, point);
    }
    print_agreement(config, &report->points[first]);
    print_waiting(&report->points[first]);
    fflush(stdout);
}
