/* streamkl check: compares every kernel of this machine with the float64 oracle. */
#include "cli/check/kernel.h"
#include "cli/common/cli.h"
#include "device/clock.h"
#include "device/device.h"
#include "cli/common/options.h"
#include "cli/term/term.h"

#include <errno.h>
#include <stdio.h>

static const char doc[] =
    "Compare the kernels of this machine with a float64 computation that shares no code with them: shapes, masks, "
    "types and both directions; row vectors and all gradients. The exit status is 1 if one disagrees. A GPU kernel "
    "may support some types and sizes only: it runs the cases that it supports."
    "\vErrors are relative to the allowed error: twice the largest error of a plain f32 computation in the same "
    "tensor, "
    "plus one rounding of every term of the element, to f32 and, for gradients of kernels that round intermediate "
    "results, to their 16-bit type. An unexpected NaN counts as infinite.\n"
    "\n"
    "Examples:\n"
    "  streamkl check\n"
    "  streamkl check --kernel cpu_portable --json\n"
    "  streamkl check --device cuda";

/* ---- The command line --------------------------------------------------------------------------------------- */

typedef struct check_request {
    skl_options options;
    int32_t json;
} check_request;

enum { KEY_JSON = OPTIONS_COMMAND_KEYS };

static const struct argp_option options[] = {
    {"json", KEY_JSON, NULL, 0, "Print one JSON object instead of the table", 0},
    {0},
};

static const option_field fields[] = {
    {KEY_JSON, parse_flag, offsetof(check_request, json)},
    {0, NULL, 0},
};

static error_t parse_option(int key, char *text, struct argp_state *state)
{
    check_request *const request = state->input;
    if (key == ARGP_KEY_INIT)
        state->child_inputs[0] = &request->options;
    if (key == ARGP_KEY_ARG)
        argp_error(state, "unexpected argument '%s'", text);
    return options_store(fields, options, key, text, request);
}

/* ---- The kernels -------------------------------------------------------------------------------------------- */

enum { KERNELS_MAX = 64 };

typedef struct checked_kernel {
    skl_kernel_info info;
    check_verdict verdict;
} checked_kernel;

static bool passed(const checked_kernel *kernel)
{
    const check_verdict *const verdict = &kernel->verdict;
    return verdict->cases > 0 && verdict->worst <= 1 && verdict->failure[0] == '\0';
}

/* The usable kernels of the device, or the requested one. */
static int collect_kernels(checked_kernel *kernels, const skl_options *wanted)
{
    int count = 0;
    skl_kernel_info info = {.struct_size = sizeof info};
    for (int32_t index = 0; skl_kernel_at(index, &info) && count < KERNELS_MAX; index++) {
        const bool named = wanted->kernel && strcmp(wanted->kernel, info.name) == 0;
        if (info.device != wanted->device || !info.usable || (wanted->kernel && !named))
            continue;
        kernels[count++] = (checked_kernel){.info = info};
    }
    return count;
}

/* Prints why the kernel or device cannot be used. */
static int fail_no_kernel(const skl_options *wanted)
{
    skl_problem problem = skl_problem_default();
    problem.dim_t = problem.dim_s = 64;
    skl_plan *plan = NULL;
    const skl_status status = skl_plan_create(&plan, &problem, wanted);
    if (status != SKL_OK)
        return fail_plan(status, wanted);
    skl_plan_destroy(plan);
    return cli_fail(CLI_NO_DEVICE, "--device=%s: has no kernel", device_name(wanted->device));
}

static int check_kernels(checked_kernel *kernels, int count, const skl_options *wanted)
{
    for (int c = 0; c < check_case_count(); c++) {
        check_case made;
        bool enough_memory = check_case_make(&made, c);
        for (int k = 0; k < count && enough_memory; k++) {
            skl_options forced = *wanted;
            forced.kernel = kernels[k].info.name;
            enough_memory = check_kernel(&kernels[k].verdict, &made, &forced, kernels[k].info.rounds_gradients);
        }
        check_case_free(&made);
        if (!enough_memory && device_error()[0])
            return cli_fail(CLI_NO_MEMORY, "%s", device_error());
        if (!enough_memory)
            return cli_fail(CLI_NO_MEMORY, "out of memory in case %d", c);
    }
    return CLI_OK;
}

/* ---- Output ------------------------------------------------------------------------------------------------- */

static int print_json(const checked_kernel *kernels, int count, int failures, double seconds)
{
    json_t *list = json_array();
    for (int k = 0; k < count; k++) {
        const check_verdict *const verdict = &kernels[k].verdict;
        cli_json_append(&list, json_pack("{s:s, s:b, s:i, s:o, s:s, s:s}", "name", kernels[k].info.name, "pass",
                                         passed(&kernels[k]), "cases", verdict->cases, "worst",
                                         cli_json_number(verdict->worst), "where", verdict->where, "failure",
                                         verdict->failure));
    }
    return cli_print_json(json_pack("{s:b, s:i, s:f, s:o}", "pass", failures == 0, "cases", check_case_count(),
                                    "seconds", seconds, "kernels", list));
}

static void print_table(const checked_kernel *kernels, int count, int failures, double seconds)
{
    const term_style style = term_style_for(stdout);
    printf("%s  %-20s %-6s %6s %12s  %s%s\n", style.dim, "kernel", "result", "cases", "worst error", "where",
           style.plain);
    for (int k = 0; k < count; k++) {
        const check_verdict *const verdict = &kernels[k].verdict;
        const bool good = passed(&kernels[k]);
        printf("  %-20s %s%-6s%s %6d %10.1f %%  %s\n", kernels[k].info.name, good ? style.good : style.bad,
               good ? "pass" : "FAIL", style.plain, verdict->cases, 100 * verdict->worst,
               verdict->failure[0] ? verdict->failure : verdict->where);
    }
    printf("\n%d kernel%s, %d cases, %s: ", count, count == 1 ? "" : "s", check_case_count(),
           cli_seconds_text(seconds).text);
    if (failures == 0)
        printf("%severy result agrees with the float64 oracle%s\n", style.good, style.plain);
    else
        printf("%s%d of %d disagree with the float64 oracle%s\n", style.bad, failures, count, style.plain);
}

int cmd_check(int argc, char **argv)
{
    static const struct argp_child children[] = {{&engine_argp, 0, NULL, 0}, {0}};
    static const struct argp argp = {.options = options, .parser = parse_option, .doc = doc, .children = children};
    check_request request = {.options = skl_options_default()};
    const int refused = options_parse(&argp, argc, argv, 0, &request);
    if (refused)
        return refused;
    static checked_kernel kernels[KERNELS_MAX];
    const double began = clock_seconds();
    const int count = collect_kernels(kernels, &request.options);
    if (count == 0)
        return fail_no_kernel(&request.options);
    const skl_status status = device_open(request.options.device, request.options.device_index);
    if (status != SKL_OK)
        return cli_fail_status(status);
    oracle_compare_gpu(request.options.device == SKL_CUDA);
    const int exit_code = check_kernels(kernels, count, &request.options);
    if (exit_code != CLI_OK)
        return exit_code;
    const double seconds = clock_seconds() - began;
    int failures = 0;
    for (int k = 0; k < count; k++)
        failures += !passed(&kernels[k]);
    if (!request.json)
        print_table(kernels, count, failures, seconds);
    else if (print_json(kernels, count, failures, seconds) != CLI_OK)
        return CLI_NO_MEMORY;
    return failures == 0 ? CLI_OK : CLI_CHECK_FAILED;
}
