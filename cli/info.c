/* streamkl info: the features of this build and of this machine. */
#include "cli/common/cli.h"
#include "cli/common/explain.h"
#include "cli/common/options.h"
#include "cli/term/term.h"
#include "device/machine.h"

#include <inttypes.h>
#include <stdio.h>
#include <stdlib.h>

static const char doc[] = "Show the version, the CPU, the devices and the kernels, and the kernel that each device "
                          "chooses. With --explain, "
                          "show the kernels that a problem would run instead, and the reason for each choice."
                          "\vAn explanation assumes aligned, contiguous tensors, student gradients, and equal shapes "
                          "of teacher and student; "
                          "streamkl kl --explain uses the tensors of a file.\n"
                          "\n"
                          "Examples:\n"
                          "  streamkl info\n"
                          "  streamkl info --json | jq -r '.kernels[] | select(.usable) | .name'\n"
                          "  STREAMKL_KERNEL=cpu_portable streamkl info\n"
                          "  streamkl info --explain --dtype bf16 --dim 128 --heads 16 --causal\n"
                          "  streamkl info --explain --heads 64 --index-heads 32 --top-k 2048 --device cuda\n"
                          "  streamkl info --explain --dtype bf16 --dim 128 --heads 16 --gpu h100";

/* ---- The command line --------------------------------------------------------------------------------------- */

typedef struct info_request {
    int32_t json, explain;
    int64_t context, heads, dim; /* of teacher and student */
    skl_dtype dtype;
    int32_t grad_teacher;
    skl_problem problem; /* masks, scales, direction, and the members that need no translation */
    skl_options options;
} info_request;

enum {
    KEY_JSON = OPTIONS_COMMAND_KEYS,
    KEY_EXPLAIN,
    KEY_GPU,
    KEY_BATCH,
    KEY_CONTEXT,
    KEY_HEADS,
    KEY_KEY_HEADS,
    KEY_DIM,
    KEY_DTYPE,
    KEY_GRAD_F32,
    KEY_GRAD_TEACHER,
    KEY_INDEX_HEADS,
    KEY_TOP_K,
};

enum { GROUP_OUTPUT = 1, GROUP_SHAPE, GROUP_PROBLEM, GROUP_ENGINE };

static const struct argp_option options[] = {
    {NULL, 0, NULL, 0, "Output:", GROUP_OUTPUT},
    {"explain", KEY_EXPLAIN, NULL, 0, "Explain the choice of kernels for a problem", 0},
    {"gpu", KEY_GPU, "NAME", 0, "Explain for a GPU that need not be here: a100, b200, h100, h200, l40s or rtx5090",
     0},
    {"json", KEY_JSON, NULL, 0, "Print one JSON object instead of text", 0},
    {NULL, 0, NULL, 0, "Shape of the problem, with --explain:", GROUP_SHAPE},
    {"batch", KEY_BATCH, "N", 0, "Sequences; default 1", 0},
    {"context", KEY_CONTEXT, "N", 0, "Queries and keys per sequence; default 4096", 0},
    {"heads", KEY_HEADS, "N", 0, "Heads; default 1", 0},
    {"key-heads", KEY_KEY_HEADS, "N", 0, "Key heads of the teacher; default the number of heads", 0},
    {"dim", KEY_DIM, "N", 0, "Head size; default 64", 0},
    {"dtype", KEY_DTYPE, "f32|f16|bf16", 0, "Type of the tensors; default f32", 0},
    {"grad-f32", KEY_GRAD_F32, NULL, 0, "Gradients in f32 instead of the type of the tensors", 0},
    {"grad-teacher", KEY_GRAD_TEACHER, NULL, 0, "Gradients for the teacher, too", 0},
    {"index-heads", KEY_INDEX_HEADS, "N", 0, "The student is an indexer with N heads", 0},
    {"top-k", KEY_TOP_K, "N", 0, "Sparse indexer with N indices per row; default dense", 0},
    {0},
};

static const option_field fields[] = {
    {KEY_EXPLAIN, parse_flag, offsetof(info_request, explain)},
    {KEY_GPU, parse_string, offsetof(info_request, options.gpu)},
    {KEY_JSON, parse_flag, offsetof(info_request, json)},
    {KEY_BATCH, parse_count, offsetof(info_request, problem.batch)},
    {KEY_CONTEXT, parse_count, offsetof(info_request, context)},
    {KEY_HEADS, parse_count, offsetof(info_request, heads)},
    {KEY_KEY_HEADS, parse_count, offsetof(info_request, problem.key_heads_t)},
    {KEY_DIM, parse_count, offsetof(info_request, dim)},
    {KEY_DTYPE, parse_dtype, offsetof(info_request, dtype)},
    {KEY_GRAD_F32, parse_flag, offsetof(info_request, problem.grad_f32)},
    {KEY_GRAD_TEACHER, parse_flag, offsetof(info_request, grad_teacher)},
    {KEY_INDEX_HEADS, parse_count, offsetof(info_request, problem.index_heads)},
    {KEY_TOP_K, parse_count, offsetof(info_request, problem.top_k)},
    {0, NULL, 0},
};

static error_t parse_option(int key, char *text, struct argp_state *state)
{
    info_request *const request = state->input;
    if (key == ARGP_KEY_INIT) {
        state->child_inputs[0] = &request->problem;
        state->child_inputs[1] = &request->options;
    }
    if (key == ARGP_KEY_ARG)
        argp_error(state, "unexpected argument '%s'", text);
    return options_store(fields, options, key, text, request);
}

static int parse_command_line(info_request *request, int argc, char **argv)
{
    static const struct argp_child children[] = {
        {&problem_argp, 0, "Masks, scales and direction, with --explain:", GROUP_PROBLEM},
        {&engine_argp, 0, "Engine, with --explain:", GROUP_ENGINE},
        {0},
    };
    static const struct argp argp = {.options = options, .parser = parse_option, .doc = doc, .children = children};
    *request = (info_request){
        .context = 4096, .heads = 1, .dim = 64, .problem = skl_problem_default(), .options = skl_options_default()};
    const int refused = options_parse(&argp, argc, argv, 0, request);
    if (refused)
        return refused;
    if (request->options.gpu != NULL)
        request->options.device = SKL_CUDA;
    const bool only_json = argc == 1 || (argc == 2 && request->json);
    if (!request->explain && !only_json)
        return cli_fail(CLI_BAD_INPUT, "--explain must be given too: the options describe a problem to explain");
    if (request->problem.top_k && !request->problem.index_heads)
        return cli_fail(CLI_BAD_INPUT, "--top-k: --index-heads must be given too");
    if (request->grad_teacher && request->problem.index_heads)
        return cli_fail(CLI_BAD_INPUT, "--grad-teacher: not available with --index-heads, whose teacher is fixed");
    return CLI_OK;
}

/* ---- One problem -------------------------------------------------------------------------------------------- */

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

static const skl_op explained_ops[] = {SKL_OP_FORWARD, SKL_OP_BACKWARD, SKL_OP_FORWARD_BACKWARD};
enum { EXPLAINED_COUNT = sizeof explained_ops / sizeof explained_ops[0] };

/* `gpu`: name of the GPU that the explanation is for; NULL: a device of this machine. */
static void print_problem(const skl_problem *problem, const char *gpu)
{
    const term_style style = term_style_for(stdout);
    printf("%sProblem%s  %" PRId64 " x %" PRId64 " queries x %" PRId64 " keys, %" PRId64 " head%s of size %" PRId64
           ", %s",
           style.bold, style.plain, problem->batch, problem->len_q, problem->len_k, problem->heads_t,
           problem->heads_t == 1 ? "" : "s", problem->dim_t, dtype_name(problem->dtype_t));
    if (problem->index_heads)
        printf(", indexer with %" PRId64 " head%s", problem->index_heads, problem->index_heads == 1 ? "" : "s");
    if (problem->top_k)
        printf(", top-k %" PRId64, problem->top_k);
    printf("%s", problem->causal ? ", causal" : "");
    printf("%s%s\n", gpu != NULL ? ", GPU " : "", gpu != NULL ? gpu : "");
}

static int print_explanations(const skl_plan *plan, const skl_problem *problem, const char *gpu, bool json)
{
    json_t *const object = json ? json_object() : NULL;
    if (!json)
        print_problem(problem, gpu);
    bool complete = true;
    for (int o = 0; o < EXPLAINED_COUNT && complete; o++) {
        char *const text = explain_plan(plan, NULL, explained_ops[o]);
        complete = text != NULL;
        if (complete && json)
            complete = explain_add_json(object, explained_ops[o], text);
        else if (complete)
            explain_print(stdout, explained_ops[o], text);
        free(text);
    }
    if (!complete) {
        json_decref(object);
        return cli_fail(CLI_NO_MEMORY, "%s", cli_status_text());
    }
    return json ? cli_print_json(json_pack("{s:s, s:o}", "kernel", skl_plan_kernel(plan), "explain", object))
                : CLI_OK;
}

static int explain_problem(const info_request *request)
{
    const skl_problem problem = problem_of(request);
    skl_plan *plan = NULL;
    const skl_status status = skl_plan_create(&plan, &problem, &request->options);
    const char *const gpu = request->options.gpu;
    if (gpu != NULL && status == SKL_ERROR_UNSUPPORTED)
        return cli_fail(CLI_NO_DEVICE, "--gpu=%s: this build has no GPU kernels; it has %s", gpu, skl_build_info());
    if (status != SKL_OK)
        return fail_plan(status, &request->options);
    const int exit_code = print_explanations(plan, &problem, gpu, request->json);
    skl_plan_destroy(plan);
    return exit_code;
}

/* ---- The machine -------------------------------------------------------------------------------------------- */

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
        cli_json_append(&device_list, report->usable
                                          ? json_pack("{s:s, s:b, s:s}", "device", device_name(report->device),
                                                      "usable", 1, "kernel", report->kernel)
                                          : json_pack("{s:s, s:b, s:s}", "device", device_name(report->device),
                                                      "usable", 0, "why_not", report->why_not));
    }
    json_t *kernel_list = json_array();
    skl_kernel_info kernel = {.struct_size = sizeof kernel};
    for (int32_t index = 0; skl_kernel_at(index, &kernel); index++) {
        cli_json_append(&kernel_list,
                        json_pack("{s:s, s:s, s:b, s:b, s:s}", "name", kernel.name, "device",
                                  device_name(kernel.device), "usable", kernel.usable, "chosen",
                                  strcmp(kernel.name, devices[kernel.device].kernel) == 0, "detail", kernel.detail));
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
    skl_kernel_info kernel = {.struct_size = sizeof kernel};
    for (int32_t index = 0; skl_kernel_at(index, &kernel); index++) {
        const int chosen = strcmp(kernel.name, devices[kernel.device].kernel) == 0;
        printf("%s %-22s %s%-4s%s %s\n", chosen ? "*" : " ", kernel.name, kernel.usable ? style.good : style.dim,
               kernel.usable ? "yes" : "no", style.plain, kernel.detail);
    }
}

int cmd_info(int argc, char **argv)
{
    info_request request;
    const int exit_code = parse_command_line(&request, argc, argv);
    if (exit_code != CLI_OK)
        return exit_code;
    if (request.explain)
        return explain_problem(&request);
    device_report devices[DEVICE_COUNT];
    for (int d = 0; d < DEVICE_COUNT; d++)
        devices[d] = probe_device((skl_device)d);
    if (request.json)
        return print_json(devices);
    print_tables(devices);
    return CLI_OK;
}
