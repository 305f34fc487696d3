/* streamkl info: the features of this build and of this machine. */
#include "cli/common/cli.h"
#include "cli/common/options.h"
#include "cli/term/term.h"
#include "device/machine.h"

#include <stdio.h>

static const char doc[] = "Show the version, the CPU, the devices and the kernels, and which kernel would be chosen."
                          "\vExamples:\n"
                          "  streamkl info\n"
                          "  streamkl info --json | jq -r '.kernels[] | select(.usable) | .name'\n"
                          "  STREAMKL_KERNEL=cpu_reference streamkl info";

enum { KEY_JSON = OPTIONS_COMMAND_KEYS };

typedef struct info_request {
    int32_t json;
} info_request;

static const struct argp_option options[] = {
    {"json", KEY_JSON, NULL, 0, "Print one JSON object instead of the tables", 0},
    {0},
};

static const option_field fields[] = {
    {KEY_JSON, parse_flag, offsetof(info_request, json)},
    {0, NULL, 0},
};

static error_t parse_option(int key, char *text, struct argp_state *state)
{
    if (key == ARGP_KEY_ARG)
        argp_error(state, "unexpected argument '%s'", text);
    return options_store(fields, options, key, text, state->input);
}

/* The kernel of a device for a simple problem: head size 64, f32, no mask. */
typedef struct device_report {
    skl_device device;
    int usable;
    char kernel[64];
    char why_not[256];
    int32_t threads;
} device_report;

static device_report probe_device(skl_device device)
{
    skl_problem problem = skl_problem_default();
    problem.len_q = problem.len_k = 1024;
    problem.dim_t = problem.dim_s = 64;
    skl_options engine = skl_options_default();
    engine.device = device;
    device_report report = {.device = device};
    skl_plan *plan = NULL;
    if (skl_plan_create(&plan, &problem, &engine) != SKL_OK) {
        snprintf(report.why_not, sizeof report.why_not, "%s", skl_last_error());
        return report;
    }
    report.usable = 1;
    report.threads = skl_plan_threads(plan);
    snprintf(report.kernel, sizeof report.kernel, "%s", skl_plan_kernel(plan));
    skl_plan_destroy(plan);
    return report;
}

enum { DEVICE_COUNT = SKL_CUDA + 1 };

static int print_json(const device_report *devices)
{
    json_t *device_list = json_array();
    for (int d = 0; d < DEVICE_COUNT; d++) {
        const device_report *report = &devices[d];
        json_array_append_new(device_list, report->usable
                                               ? json_pack("{s:s, s:b, s:s}", "device", device_name(report->device),
                                                           "usable", 1, "kernel", report->kernel)
                                               : json_pack("{s:s, s:b, s:s}", "device", device_name(report->device),
                                                           "usable", 0, "why_not", report->why_not));
    }
    json_t *kernel_list = json_array();
    skl_kernel_info kernel;
    for (int32_t index = 0; skl_kernel_at(index, &kernel); index++) {
        json_array_append_new(kernel_list, json_pack("{s:s, s:s, s:b, s:b, s:s}", "name", kernel.name, "device",
                                                     device_name(kernel.device), "usable", kernel.usable, "chosen",
                                                     strcmp(kernel.name, devices[kernel.device].kernel) == 0,
                                                     "detail", kernel.detail));
    }
    return cli_print_json(json_pack("{s:s, s:s, s:s, s:i, s:i, s:o, s:o}", "version", skl_version(), "build",
                                    skl_build_info(), "cpu_features", skl_cpu_features(), "cores", machine_cores(),
                                    "threads", devices[SKL_CPU].threads, "devices", device_list, "kernels",
                                    kernel_list));
}

static void print_tables(const device_report *devices)
{
    const term_style style = term_style_for(stdout);
    printf("%sstreamkl %s%s\n", style.bold, skl_version(), style.plain);
    printf("  build    %s\n", skl_build_info());
    printf("  cpu      %s\n", skl_cpu_features());
    printf("  cores    %d; %d threads by default (--threads, STREAMKL_THREADS)\n", machine_cores(),
           devices[SKL_CPU].threads);

    printf("\n%sDevices%s\n", style.bold, style.plain);
    for (int d = 0; d < DEVICE_COUNT; d++) {
        const device_report *report = &devices[d];
        printf("  %-8s %s%-4s%s %s%s\n", device_name(report->device), report->usable ? style.good : style.dim,
               report->usable ? "yes" : "no", style.plain, report->usable ? "chooses " : "",
               report->usable ? report->kernel : report->why_not);
    }

    printf("\n%sKernels%s, best first; * marks the choice for a simple f32 problem\n", style.bold, style.plain);
    skl_kernel_info kernel;
    for (int32_t index = 0; skl_kernel_at(index, &kernel); index++) {
        const int chosen = strcmp(kernel.name, devices[kernel.device].kernel) == 0;
        printf("%s %-22s %s%-4s%s %s\n", chosen ? "*" : " ", kernel.name, kernel.usable ? style.good : style.dim,
               kernel.usable ? "yes" : "no", style.plain, kernel.detail);
    }
}

int cmd_info(int argc, char **argv)
{
    static const struct argp argp = {.options = options, .parser = parse_option, .doc = doc};
    info_request request = {0};
    if (argp_parse(&argp, argc, argv, 0, NULL, &request))
        return CLI_BAD_INPUT;
    device_report devices[DEVICE_COUNT];
    for (int d = 0; d < DEVICE_COUNT; d++)
        devices[d] = probe_device((skl_device)d);
    if (request.json)
        return print_json(devices);
    print_tables(devices);
    return CLI_OK;
}
