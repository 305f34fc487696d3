/* streamkl distill: the command line and the order of the steps. */
#include "device/machine.h"
#include "cli/common/cli.h"
#include "cli/distill/distill.h"
#include "cli/common/options.h"
#include "cli/term/printable.h"
#include "cli/term/term.h"
#include "cli/io/file_write.h"

#include <errno.h>
#include <inttypes.h>
#include <signal.h>
#include <stdlib.h>
#include <sys/stat.h>

static const char doc[] =
    "Distill attention: train W_q and W_k of a student on the attention KL to a teacher at a long context, and "
    "measure whether the student then uses the whole context. Without files the task is synthetic: definitions, "
    "distractors, and references to definitions up to thousands of tokens back, which the teacher finds."
    "\vThe folder DIR gets student.safetensors (w_q and w_k) and report.html. Ctrl-C ends the training early, and "
    "both files then describe the student so far; the exit status is 130. Runs that take hours, with checkpoints, "
    "are what streamkl-distill of the Python package is for.\n"
    "\n"
    "With --teacher and --student, the teacher's file contains hidden [sequences, context, hidden], w_q [heads, dim, "
    "hidden] and w_k [key heads, dim, hidden]. The student's file contains the initial w_q and w_k, and optionally "
    "hidden. Weights of shape [heads * dim, hidden] need --heads-t and --heads-s. The last --held-out sequences are "
    "used for evaluation only. Attention is causal, without rotary embedding.\n"
    "\n"
    "With --device cuda the GPU computes the attention KL and its gradients, the CPU computes the projections.\n"
    "\n"
    "Examples:\n"
    "  streamkl distill\n"
    "  streamkl distill --context 32768 --steps 60\n"
    "  streamkl distill --out run7 --seed 7 --heads-t 8 --heads-s 2\n"
    "  streamkl distill --teacher big.safetensors --student small.safetensors";

/* ---- The command line --------------------------------------------------------------------------------------- */

enum {
    KEY_CONTEXT = OPTIONS_COMMAND_KEYS,
    KEY_NEEDLES,
    KEY_HIDDEN,
    KEY_HEADS_T,
    KEY_DIM_T,
    KEY_HEADS_S,
    KEY_DIM_S,
    KEY_STEPS,
    KEY_BATCH,
    KEY_RATE,
    KEY_DIRECTION,
    KEY_SEED,
    KEY_HELD_OUT,
    KEY_CONTROL_QUERIES,
    KEY_TEACHER,
    KEY_STUDENT,
    KEY_OUT,
    KEY_NO_BASELINE,
    KEY_JSON,
};

enum { GROUP_TASK = 1, GROUP_FILES, GROUP_TRAINING, GROUP_RESULT, GROUP_ENGINE };

static const struct argp_option options[] = {
    {NULL, 0, NULL, 0, "Synthetic task:", GROUP_TASK},
    {"context", KEY_CONTEXT, "N", 0, "Tokens per sequence; default 8192", 0},
    {"needles", KEY_NEEDLES, "N", 0, "Definitions per sequence, 1 to 256; default 32", 0},
    {"hidden", KEY_HIDDEN, "N", 0, "Size of a hidden state; default 64", 0},
    {"heads-t", KEY_HEADS_T, "N", 0, "Heads of the teacher, a multiple of the student's; default 4", 0},
    {"dim-t", KEY_DIM_T, "N", 0, "Size of a teacher head; default 48", 0},
    {"heads-s", KEY_HEADS_S, "N", 0, "Heads of the student; default 2", 0},
    {"dim-s", KEY_DIM_S, "N", 0, "Size of a student head; default 32", 0},
    {NULL, 0, NULL, 0, "Your own files:", GROUP_FILES},
    {"teacher", KEY_TEACHER, "FILE", 0, "Safetensors with hidden, w_q and w_k of the teacher", 0},
    {"student", KEY_STUDENT, "FILE", 0, "Safetensors with w_q and w_k of the student", 0},
    {NULL, 0, NULL, 0, "Training:", GROUP_TRAINING},
    {"steps", KEY_STEPS, "N", 0, "Steps of Adam; default 160", 0},
    {"batch", KEY_BATCH, "N", 0, "Sequences per step; default 1", 0},
    {"rate", KEY_RATE, "X", 0, "Peak learning rate, with warm-up and cosine decay; default 0.05", 0},
    {"direction", KEY_DIRECTION, "forward|reverse", 0,
     "KL(teacher || student), the default, or KL(student || teacher)", 0},
    {"seed", KEY_SEED, "N", 0, "Seed of data and initial weights; default 1", 0},
    {"held-out", KEY_HELD_OUT, "N", 0, "Sequences for evaluation only; default 4", 0},
    {"control-queries", KEY_CONTROL_QUERIES, "N", 0,
     "Queries per sequence for a control student, which learns from the outputs of attention instead of the KL; 0: "
     "no "
     "control; default a sixteenth of the context, with your own files 0",
     0},
    {"unguided", KEY_CONTROL_QUERIES, "N", OPTION_HIDDEN, NULL, 0}, /* its name in version 0.1 */
    {NULL, 0, NULL, 0, "Result:", GROUP_RESULT},
    {"out", KEY_OUT, "DIR", 0, "Folder for weights and report; default streamkl-distill", 0},
    {"no-baseline", KEY_NO_BASELINE, NULL, 0,
     "Do not time the materialised baseline for the report, which saves some seconds", 0},
    {"json", KEY_JSON, NULL, 0, "Print one JSON object instead of the tables", 0},
    {0},
};

#define SETTING(member) offsetof(distill_request, settings.member)

static const char *parse_rate(const char *text, void *value)
{
    return parse_float(text, value) || *(float *)value <= 0 ? "a number above 0" : NULL;
}

static const char *parse_control_queries(const char *text, void *value)
{
    return parse_int64(text, value) || *(int64_t *)value < 0 ? "an integer, 0 or more" : NULL;
}

static const option_field fields[] = {
    {KEY_CONTEXT, parse_count, SETTING(context)},
    {KEY_NEEDLES, parse_count, SETTING(needles)},
    {KEY_HIDDEN, parse_count, SETTING(hidden)},
    {KEY_HEADS_T, parse_count, SETTING(heads_t)},
    {KEY_DIM_T, parse_count, SETTING(dim_t)},
    {KEY_HEADS_S, parse_count, SETTING(heads_s)},
    {KEY_DIM_S, parse_count, SETTING(dim_s)},
    {KEY_STEPS, parse_count, SETTING(steps)},
    {KEY_BATCH, parse_count, SETTING(batch)},
    {KEY_RATE, parse_rate, SETTING(rate)},
    {KEY_DIRECTION, parse_direction, SETTING(direction)},
    {KEY_SEED, parse_int64, SETTING(seed)},
    {KEY_HELD_OUT, parse_count, SETTING(held_out)},
    {KEY_CONTROL_QUERIES, parse_control_queries, SETTING(control_queries)},
    {KEY_TEACHER, parse_string, SETTING(teacher_path)},
    {KEY_STUDENT, parse_string, SETTING(student_path)},
    {KEY_OUT, parse_string, offsetof(distill_request, folder)},
    {KEY_NO_BASELINE, parse_flag, offsetof(distill_request, no_baseline)},
    {KEY_JSON, parse_flag, offsetof(distill_request, json)},
    {0, NULL, 0},
};

static error_t parse_option(int key, char *text, struct argp_state *state)
{
    distill_request *const request = state->input;
    if (key == ARGP_KEY_INIT)
        state->child_inputs[0] = &request->options;
    if (key == ARGP_KEY_ARG)
        argp_error(state, "unexpected argument '%s'", text);
    return options_store(fields, options, key, text, request);
}

/* ---- Preparation -------------------------------------------------------------------------------------------- */

/* The first Ctrl-C ends the training, the second one the process. */
static void stop_on_signal(int number)
{
    distill_stop = 1;
    signal(number, SIG_DFL);
}

/* Every file that a run writes into its folder. */
static const char *const output_names[] = {"student.safetensors", "report.html"};
enum { OUTPUT_COUNT = sizeof output_names / sizeof output_names[0] };

static int check_outputs(const distill_request *request)
{
    distill_path paths[OUTPUT_COUNT];
    output_file outputs[OUTPUT_COUNT];
    if (strlen(request->folder) + 32 > sizeof paths[0].text) /* 32: the longest name, and more */
        return cli_fail(CLI_BAD_INPUT, "--out=%.60s...: must be shorter", request->folder);
    for (int o = 0; o < OUTPUT_COUNT; o++) {
        paths[o] = distill_path_of(request, output_names[o]);
        outputs[o] = (output_file){"--out", paths[o].text};
    }
    const distill_settings *const settings = &request->settings;
    const char *const inputs[] = {settings->teacher_path, settings->student_path};
    return file_outputs_check(outputs, OUTPUT_COUNT, inputs,
                              settings->teacher_path && settings->student_path ? 2 : 0);
}

static int make_folder(const distill_request *request)
{
    if (mkdir(request->folder, 0777) != 0 && errno != EEXIST)
        return cli_fail(CLI_WRITE_FAILED, "--out=%s: %s", request->folder, strerror(errno));
    int exit_code = CLI_OK;
    for (int o = 0; o < OUTPUT_COUNT && exit_code == CLI_OK; o++)
        exit_code = file_write_check(distill_path_of(request, output_names[o]).text);
    return exit_code;
}

static float *allocate_history(int64_t count)
{
    return calloc((size_t)count, sizeof(float));
}

static int open_run(distill_run *run)
{
    const distill_request *const request = run->request;
    const distill_source *const source = run->source;
    skl_status status = attention_pair_open(&run->pair, &source->shape, &request->options, run->pair.threads);
    if (status != SKL_OK)
        return run->pair.plan ? cli_fail_status(status) : fail_plan(status, &request->options);
    status = student_allocate(&run->student, &source->initial_student);
    if (status == SKL_OK && request->settings.control_queries)
        status = student_allocate(&run->control, &source->initial_student);
    if (status == SKL_OK && request->settings.control_queries)
        status = output_loss_open(&run->control_loss, &run->pair, request->settings.control_queries,
                                  source->shape.teacher.width);
    if (status != SKL_OK)
        return cli_fail_status(status);
    distill_history *const history = &run->history;
    const int64_t room = request->settings.steps + 1;
    history->loss = allocate_history(room);
    history->evaluation_step = allocate_history(room);
    history->evaluation_kl = allocate_history(room);
    history->evaluation_hits = allocate_history(room);
    if (!history->loss || !history->evaluation_step || !history->evaluation_kl || !history->evaluation_hits)
        return cli_fail(CLI_NO_MEMORY, "--steps=%" PRId64 ": out of memory for the history", request->settings.steps);
    return CLI_OK;
}

static void close_run(distill_run *run)
{
    attention_pair_close(&run->pair);
    student_free(&run->student);
    student_free(&run->control);
    output_loss_close(&run->control_loss);
    free(run->history.loss);
    free(run->history.evaluation_step);
    free(run->history.evaluation_kl);
    free(run->history.evaluation_hits);
}

/* ---- The run ------------------------------------------------------------------------------------------------ */

static void print_title(const distill_run *run)
{
    const distill_settings *const s = &run->request->settings;
    const term_style style = term_style_for(stdout);
    if (run->request->json)
        return;
    printf("%sDistilling attention%s at a context of %" PRId64 "\n", style.bold, style.plain, s->context);
    printf("  teacher: %" PRId64 " heads of size %" PRId64 "; student: %" PRId64 " of size %" PRId64 "; %" PRId64
           " steps of %" PRId64 " sequence%s; W_q and W_k are trained on KL(%s)\n\n",
           s->heads_t, s->dim_t, s->heads_s, s->dim_s, s->steps, s->batch, s->batch == 1 ? "" : "s",
           s->direction == SKL_KL_FORWARD ? "teacher || student" : "student || teacher");
}

/* The students before and after training, on all held-out sequences. */
static int evaluate_all(distill_run *run)
{
    static const volatile int never = 0;
    const distill_source *const source = run->source;
    const int64_t count = run->request->settings.held_out;
    skl_status status = evaluate(&run->before, &run->pair, source->teacher, &source->initial_student,
                                 &source->sequences, count, &never);
    if (status == SKL_OK)
        status = evaluate(&run->after, &run->pair, source->teacher, &run->student.weights, &source->sequences, count,
                          &never);
    if (status == SKL_OK && run->request->settings.control_queries)
        status = evaluate(&run->after_control, &run->pair, source->teacher, &run->control.weights, &source->sequences,
                          count, &never);
    return status == SKL_OK ? CLI_OK : cli_fail_status(status);
}

static int finish(distill_run *run)
{
    file_set set = {NULL, NULL};
    int exit_code = evaluate_all(run);
    if (exit_code == CLI_OK)
        exit_code = distill_student_save(&set, run);
    if (exit_code == CLI_OK)
        exit_code = distill_report_write(&set, run);
    if (exit_code == CLI_OK)
        exit_code = distill_source_unchanged(run->source);
    exit_code = file_write_commit(&set, exit_code);
    if (exit_code != CLI_OK)
        return exit_code;
    if (run->request->json)
        return distill_print_json(run);
    distill_print_result(run);
    printf("\nReport   %s\nStudent  %s\n", printable_of(distill_path_of(run->request, "report.html").text).text,
           printable_of(distill_path_of(run->request, "student.safetensors").text).text);
    return CLI_OK;
}

static int run_all(distill_run *run)
{
    enum { STOPPED = 130 }; /* 128 + SIGINT, the convention of shells */
    const distill_request *const request = run->request;
    int exit_code = open_run(run);
    if (exit_code == CLI_OK)
        exit_code = make_folder(request);
    if (exit_code == CLI_OK)
        print_title(run);
    if (exit_code == CLI_OK)
        exit_code = distill_train(run);
    const bool stopped = distill_stop;
    if (exit_code == CLI_OK && stopped && !request->json)
        printf("Stopped at step %" PRId64 "\n", run->student.step);
    if (exit_code == CLI_OK)
        exit_code = finish(run);
    return exit_code == CLI_OK && stopped ? STOPPED : exit_code;
}

int cmd_distill(int argc, char **argv)
{
    static const struct argp_child children[] = {{&engine_argp, 0, "Engine:", GROUP_ENGINE}, {0}};
    static const struct argp argp = {.options = options, .parser = parse_option, .doc = doc, .children = children};
    distill_request request = {
        .settings = {.context = 8192,
                     .needles = 32,
                     .hidden = 64,
                     .dim_t = 48,
                     .dim_s = 32,
                     .steps = 160,
                     .batch = 1,
                     .held_out = 4,
                     .seed = 1,
                     .control_queries = CONTROL_DEFAULT,
                     .rate = 0.05F},
        .options = skl_options_default(),
        .folder = "streamkl-distill",
    };
    const int refused = options_parse(&argp, argc, argv, 0, &request);
    if (refused)
        return refused;
    signal(SIGINT, stop_on_signal);
    signal(SIGTERM, stop_on_signal);
    distill_source source = {.retrieves = false};
    distill_run run = {.request = &request, .source = &source};
    run.pair.threads = request.options.threads > 0 ? request.options.threads : machine_cores();
    int exit_code = check_outputs(&request);
    if (exit_code == CLI_OK)
        exit_code = distill_source_open(&source, &request.settings, run.pair.threads);
    if (exit_code == CLI_OK)
        exit_code = run_all(&run);
    close_run(&run);
    distill_source_close(&source);
    return exit_code;
}
