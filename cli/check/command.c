/* streamkl check: runs the case table of the tests (tests/cases.c) on every kernel of this machine, and compares the
 * results with the float64 oracle. */
#include "cli/common/cli.h"
#include "cli/common/options.h"
#include "cli/term/term.h"
#include "device/device.h"
#include "tests/calls.h"
#include "tests/kernel_check.h"

#include <inttypes.h>
#include <stdarg.h>
#include <stdio.h>

static const char doc[] =
    "Compare the kernels of this machine with a float64 computation that shares no code with them: the table of "
    "shapes, masks, types and layouts that the tests of the library use; row vectors and all gradients, with NaN "
    "wherever a kernel must not read. The exit status is 1 if one disagrees. A GPU kernel may support some types and "
    "sizes only: it runs the cases that it supports."
    "\vErrors are relative to the allowed error: twice the largest error of a plain f32 computation in the same "
    "tensor, plus one rounding of every term of the element, to f32 and, for gradients of kernels that round "
    "intermediate results, to their 16-bit type. An unexpected NaN counts as infinite.\n"
    "\n"
    "Without --all, a kernel that has run four cases leaves out the large ones: seconds instead of minutes.\n"
    "\n"
    "Examples:\n"
    "  streamkl check\n"
    "  streamkl check --kernel cpu_portable --json\n"
    "  streamkl check --device cuda --all";

typedef struct check_request {
    skl_options options;
    int32_t all, json;
} check_request;

static const cli_option check_options_table[] = {
    {"all", NULL, parse_flag, offsetof(check_request, all), "Run every case of the table"},
    {"json", NULL, parse_flag, offsetof(check_request, json), "Print one JSON object instead of the table"},
    {0},
};

static const option_group groups[] = {
    {NULL, check_options_table, 0},
    {NULL, engine_options, offsetof(check_request, options)},
    {0},
};

enum { KERNELS_MAX = 64 };

typedef struct checked_kernel {
    const char *name;
    int64_t cases;
    double worst;      /* error relative to the allowed error, over all tensors of all calls */
    char where[160];   /* case, call and tensor of the worst error */
    char failure[400]; /* the first wrong result; "": none */
} checked_kernel;

static check_request request;
static checked_kernel *current; /* what the checks report about */

/* ---- What tests/case_support.h asks of a program ------------------------------------------------------------ */

skl_device test_device(void)
{
    return request.options.device;
}

int32_t test_device_index(void)
{
    return request.options.device_index;
}

int test_wants_kernel(const char *name)
{
    return request.options.kernel == NULL || strcmp(request.options.kernel, name) == 0;
}

uint64_t test_seed(void)
{
    return 1; /* every run checks the same numbers */
}

void test_measured(const char *label, const char *tensor, double error)
{
    if (error <= current->worst)
        return;
    current->worst = error;
    snprintf(current->where, sizeof current->where, "%s: %s", label, tensor);
}

void test_wrong(const char *format, ...)
{
    va_list arguments;
    va_start(arguments, format);
    if (current->failure[0] == '\0')
        vsnprintf(current->failure, sizeof current->failure, format, arguments);
    va_end(arguments);
}

void test_abandon(const char *format, ...)
{
    char text[512];
    va_list arguments;
    va_start(arguments, format);
    vsnprintf(text, sizeof text, format, arguments);
    va_end(arguments);
    cli_fail(CLI_NO_DEVICE, "%s", text);
}

/* ---- The check ---------------------------------------------------------------------------------------------- */

static int collect_kernels(checked_kernel *kernels)
{
    int count = 0;
    for (const char *name; count < KERNELS_MAX && (name = test_kernel(count)) != NULL; count++)
        kernels[count].name = name;
    if (count == 0) { /* a plan knows why the kernel or the device cannot be used */
        skl_problem problem = skl_problem_default();
        problem.dim_t = problem.dim_s = 64;
        skl_plan_destroy(plan_create(&problem, &request.options));
        cli_fail(CLI_NO_DEVICE, "--device=%s: has no kernel", device_names[request.options.device]);
    }
    return count;
}

/* Whether a kernel supports a case and is to run it. */
static bool runs(const checked_kernel *kernel, const test_case *tested)
{
    enum { SMALL_WORK = 1, LEAST_CASES = 4 }; /* million multiplications; f16 kernels have few small cases */
    const bool small = case_work(tested) <= SMALL_WORK * MILLION;
    if (!request.all && !small && kernel->cases >= LEAST_CASES)
        return false;
    const skl_problem problem = case_problem(tested);
    return kernel_supports(kernel->name, &problem);
}

static void check_case(checked_kernel *kernels, int count, const test_case *tested)
{
    fixture f = {.test_case = NULL};
    for (int k = 0; k < count; k++) {
        if (!runs(&kernels[k], tested))
            continue;
        if (f.test_case == NULL) {
            fixture_create(&f, tested);
            fixture_solve(&f);
        }
        check_options options = check_options_default();
        options.in_place = tested->lse != LSE_COMPUTED;
        current = &kernels[k];
        kernel_check(&f, current->name, &options);
        current->cases++;
    }
    if (f.test_case)
        fixture_destroy(&f);
}

static bool passed(const checked_kernel *kernel)
{
    return kernel->cases > 0 && kernel->worst <= 1 && kernel->failure[0] == '\0';
}

/* ---- Output ------------------------------------------------------------------------------------------------- */

static void print_json(const checked_kernel *kernels, int count, int failures, double seconds)
{
    json_t *const list = json_array();
    for (int k = 0; k < count; k++)
        cli_json_append(list, json_pack("{s:s, s:b, s:I, s:o, s:s, s:s}", "name", kernels[k].name, "pass",
                                        passed(&kernels[k]), "cases", (json_int_t)kernels[k].cases, "worst",
                                        cli_json_number(kernels[k].worst), "where", kernels[k].where, "failure",
                                        kernels[k].failure));
    cli_print_json(json_pack("{s:b, s:I, s:f, s:o}", "pass", failures == 0, "cases", (json_int_t)test_case_count,
                             "seconds", seconds, "kernels", list));
}

static void print_table(const checked_kernel *kernels, int count, int failures, double seconds)
{
    const term_style style = term_style_for(stdout);
    printf("%s  %-24s %-6s %6s %12s  %s%s\n", style.dim, "kernel", "result", "cases", "worst error", "where",
           style.plain);
    for (int k = 0; k < count; k++) {
        const bool good = passed(&kernels[k]);
        printf("  %-24s %s%-6s%s %6" PRId64 " %10.1f %%  %s\n", kernels[k].name, good ? style.good : style.bad,
               good ? "pass" : "FAIL", style.plain, kernels[k].cases, 100 * kernels[k].worst,
               kernels[k].failure[0] ? kernels[k].failure : kernels[k].where);
    }
    printf("\n%d kernel%s, %s of the %zu cases, %s: ", count, cli_plural(count), request.all ? "all" : "the smaller",
           test_case_count, cli_seconds_text(seconds).text);
    if (failures == 0)
        printf("%severy result agrees with the float64 oracle%s\n", style.good, style.plain);
    else
        printf("%s%d of %d kernels disagree with the float64 oracle%s\n", style.bad, failures, count, style.plain);
}

int cmd_check(int argc, char **argv)
{
    static const command_line command = {doc, groups, NULL};
    static checked_kernel kernels[KERNELS_MAX];
    request.options = skl_options_default();
    options_parse(&command, argc, argv, &request);
    const double began = clock_seconds();
    const int count = collect_kernels(kernels);
    cli_check(device_open(request.options.device, request.options.device_index));
    term_progress_begin("check");
    for (size_t c = 0; c < test_case_count; c++) {
        check_case(kernels, count, &test_cases[c]);
        term_progress_update(NULL, (int64_t)c + 1, (int64_t)test_case_count);
    }
    term_progress_end();
    int failures = 0;
    for (int k = 0; k < count; k++)
        failures += !passed(&kernels[k]);
    (request.json ? print_json : print_table)(kernels, count, failures, clock_seconds() - began);
    return failures == 0 ? CLI_OK : CLI_CHECK_FAILED;
}
