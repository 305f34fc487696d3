/* streamkl info: the features of this build and of this machine. */
#include "cli/common/cli.h"
#include "cli/common/options.h"
#include "cli/common/runner.h"
#include "cli/term/term.h"
#include "device/device.h"

#include <inttypes.h>
#include <stdio.h>
#include <stdlib.h>

static const char doc[] =
    "Show the version, the CPU, the devices and the kernels, and the kernel that each device chooses. With "
    "--explain, show the kernels that a problem would run instead, and the reason for each choice."
    "\vAn explanation assumes aligned, contiguous tensors, student gradients, and equal shapes of teacher and "
    "student; streamkl kl --explain uses the tensors of a file.\n"
    "\n"
    "Examples:\n"
    "  streamkl info\n"
    "  streamkl info --json | jq -r '.kernels[] | select(.usable) | .name'\n"
    "  STREAMKL_KERNEL=cpu_portable streamkl info\n"
    "  streamkl info --explain --dtype bf16 --dim 128 --heads 16 --causal\n"
    "  streamkl info --explain --heads 64 --index-heads 32 --top-k 2048 --device cuda\n"
    "  streamkl info --explain --dtype bf16 --dim 128 --heads 16 --gpu h100";

typedef struct info_request {
    int32_t json, explain;
    int64_t context, heads, dim; /* of teacher and student */
    skl_dtype dtype;
    int32_t grad_teacher;
    skl_problem problem; /* masks, scales, direction, and the members that need no translation */
    skl_options options;
} info_request;

static const cli_option output_options[] = {
    {"explain", NULL, parse_flag, offsetof(info_request, explain), "Explain the choice of kernels for a problem"},
    {"gpu", "NAME", parse_string, offsetof(info_request, options.gpu),
     "Explain for a GPU that need not be here: a100, b200, h100, h200, l40s or rtx5090"},
    {"json", NULL, parse_flag, offsetof(info_request, json), "Print one JSON object instead of text"},
    {0},
};

static const cli_option shape_options[] = {
    {"batch", "N", parse_count, offsetof(info_request, problem.batch), "Sequences; default 1"},
    {"context", "N", parse_count, offsetof(info_request, context), "Queries and keys per sequence", .initial = 4096},
    {"heads", "N", parse_count, offsetof(info_request, heads), "Heads", .initial = 1},
    {"key-heads", "N", parse_count, offsetof(info_request, problem.key_heads_t),
     "Key heads of the teacher; default the number of heads"},
    {"dim", "N", parse_count, offsetof(info_request, dim), "Head size", .initial = 64},
    {"dtype", "f32|f16|bf16", PARSE_WORD, offsetof(info_request, dtype), "Type of the tensors; default f32"},
    {"grad-f32", NULL, parse_flag, offsetof(info_request, problem.grad_f32),
     "Gradients in f32 instead of the type of the tensors"},
    {"grad-teacher", NULL, parse_flag, offsetof(info_request, grad_teacher), "Gradients for the teacher, too"},
    {"index-heads", "N", parse_count, offsetof(info_request, problem.index_heads),
     "The student is an indexer with N heads"},
    {"top-k", "N", parse_count, offsetof(info_request, problem.top_k),
     "Sparse indexer with N indices per row; default dense"},
    {0},
};

static const option_group groups[] = {
    {"Output:", output_options, 0},
    {"Shape of the problem, with --explain:", shape_options, 0},
    {"Masks, with --explain:", mask_options, offsetof(info_request, problem)},
    {"Scales and direction, with --explain:", logit_options, offsetof(info_request, problem)},
    {"Engine, with --explain:", engine_options, offsetof(info_request, options)},
    {0},
};

static skl_problem problem_of(const info_request *request)
{
    skl_problem problem = request->problem;
    problem.len_q = problem.len_k = request->context;
    problem.heads_t = problem.heads_s = request->heads;
    problem.dim_t = problem.dim_s = request->dim;
    problem.dtype_t = problem.dtype_s = request->dtype;
    problem.gradients |= request->grad_teacher ? SKL_DQ_T | SKL_DK_T : 0;
    if (problem.index_heads) {
        problem.student = SKL_STUDENT_INDEXER;
        problem.heads_s = 1;
        problem.gradients |= SKL_DW_S;
    }
    return problem;
}

/* `gpu`: name of the GPU that the explanation is for; NULL: a device of this machine. */
static void print_problem(const skl_problem *problem, const char *gpu)
{
    const term_style style = term_style_for(stdout);
    printf("%sProblem%s  %" PRId64 " x %" PRId64 " queries x %" PRId64 " keys, %" PRId64 " head%s of size %" PRId64
           ", %s",
           style.bold, style.plain, problem->batch, problem->len_q, problem->len_k, problem->heads_t,
           cli_plural(problem->heads_t), problem->dim_t, dtype_names[problem->dtype_t]);
    if (problem->index_heads)
        printf(", indexer with %" PRId64 " head%s", problem->index_heads, cli_plural(problem->index_heads));
    if (problem->top_k)
        printf(", top-k %" PRId64, problem->top_k);
    printf("%s", problem->causal ? ", causal" : "");
    printf("%s%s\n", gpu != NULL ? ", GPU " : "", gpu != NULL ? gpu : "");
}

static void explain_problem(const info_request *request)
{
    static const skl_op ops[] = {SKL_OP_FORWARD, SKL_OP_BACKWARD, SKL_OP_FORWARD_BACKWARD};
    const skl_problem problem = problem_of(request);
    const char *const gpu = request->options.gpu;
    skl_plan *plan = NULL;
    const skl_status status = skl_plan_create(&plan, &problem, &request->options);
    if (gpu != NULL && status == SKL_ERROR_UNSUPPORTED)
        cli_fail(CLI_NO_DEVICE, "--gpu=%s: this build has no GPU kernels; it has %s", gpu, skl_build_info());
    plan_check(status, &request->options);
    json_t *const object = json_object();
    if (!request->json)
        print_problem(&problem, gpu);
    for (size_t o = 0; o < sizeof ops / sizeof ops[0]; o++) {
        char *const text = explain_plan(plan, NULL, ops[o]);
        if (text == NULL)
            cli_check(SKL_ERROR_MEMORY);
        if (request->json)
            explain_add_json(object, ops[o], text);
        else
            explain_print(stdout, ops[o], text);
        free(text);
    }
    if (request->json)
        cli_print_json(json_pack("{s:s, s:O}", "kernel", skl_plan_kernel(plan), "explain", object));
    json_decref(object);
    skl_plan_destroy(plan);
}

/* ---- The machine -------------------------------------------------------------------------------------------- */

/* The kernel of a device for a simple problem: head size 64, f32, no mask. */
typedef struct device_report {
    skl_device device;
    int usable;
    char kernel[256]; /* its name, or why it cannot be used */
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
        snprintf(report.kernel, sizeof report.kernel, "%s", skl_last_error());
        return report;
    }
    report.usable = 1;
    report.threads = skl_plan_threads(plan);
    snprintf(report.kernel, sizeof report.kernel, "%s", skl_plan_kernel(plan));
    skl_plan_destroy(plan);
    return report;
}

enum { DEVICE_COUNT = SKL_CUDA + 1 };

static void print_json(const device_report *devices)
{
    json_t *const device_list = json_array();
    for (int d = 0; d < DEVICE_COUNT; d++) {
        const device_report *report = &devices[d];
        cli_json_append(device_list,
                        json_pack("{s:s, s:b, s:s}", "device", device_names[report->device], "usable", report->usable,
                                  report->usable ? "kernel" : "why_not", report->kernel));
    }
    json_t *const kernel_list = json_array();
    skl_kernel_info kernel = {.struct_size = sizeof kernel};
    for (int32_t index = 0; skl_kernel_at(index, &kernel); index++) {
        cli_json_append(kernel_list,
                        json_pack("{s:s, s:s, s:b, s:b, s:s}", "name", kernel.name, "device",
                                  device_names[kernel.device], "usable", kernel.usable, "chosen",
                                  strcmp(kernel.name, devices[kernel.device].kernel) == 0, "detail", kernel.detail));
    }
    cli_print_json(json_pack("{s:s, s:s, s:s, s:i, s:i, s:o, s:o}", "version", skl_version(), "build",
                             skl_build_info(), "cpu_features", skl_cpu_features(), "cores", machine_cores(),
                             "threads", devices[SKL_CPU].threads, "devices", device_list, "kernels", kernel_list));
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
        printf("  %-8s %s%-4s%s %s%s\n", device_names[report->device], report->usable ? style.good : style.dim,
               report->usable ? "yes" : "no", style.plain, report->usable ? "chooses " : "", report->kernel);
    }

    printf("\n%sKernels%s, best first; * marks the choice for a simple f32 problem\n", style.bold, style.plain);
    skl_kernel_info kernel = {.struct_size = sizeof kernel};
    for (int32_t index = 0; skl_kernel_at(index, &kernel); index++) {
        const int chosen = strcmp(kernel.name, devices[kernel.device].kernel) == 0;
        printf("%s %-22s %s%-4s%s %s\n", chosen ? "*" : " ", kernel.name, kernel.usable ? style.good : style.dim,
               kernel.usable ? "yes" : "no", style.plain, kernel.detail);
    }
}

int cmd_info(int argc, char **argv)
{
    static const command_line command = {doc, groups, NULL};
    info_request request = {.problem = skl_problem_default(), .options = skl_options_default()};
    options_parse(&command, argc, argv, &request);
    if (request.options.gpu != NULL)
        request.options.device = SKL_CUDA;
    const bool only_json = argc == 1 || (argc == 2 && request.json);
    if (!request.explain && !only_json)
        cli_fail(CLI_BAD_INPUT, "--explain must be given too: the options describe a problem to explain");
    if (request.problem.top_k && !request.problem.index_heads)
        cli_fail(CLI_BAD_INPUT, "--top-k: --index-heads must be given too");
    if (request.grad_teacher && request.problem.index_heads)
        cli_fail(CLI_BAD_INPUT, "--grad-teacher: not available with --index-heads, whose teacher is fixed");
    if (request.explain) {
        explain_problem(&request);
        return CLI_OK;
    }
    device_report devices[DEVICE_COUNT];
    for (int d = 0; d < DEVICE_COUNT; d++)
        devices[d] = probe_device((skl_device)d);
    (request.json ? print_json : print_tables)(devices);
    return CLI_OK;
}
