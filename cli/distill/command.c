/* streamkl distill: the command line and the order of the steps. */
#include "cli/common/cli.h"
#include "cli/common/random.h"
#include "cli/distill/distill.h"
#include "cli/term/term.h"
#include "cli/io/file_write.h"
#include "device/device.h"

#include <errno.h>
#include <inttypes.h>
#include <signal.h>
#include <stdlib.h>
#include <sys/stat.h>

static const char doc[] =
    "Distill attention: train W_q and W_k of a student on the attention KL to a teacher at a long context, and "
    "measure whether the student then uses the whole context. The task is synthetic: definitions, "
    "distractors, and references to definitions up to thousands of tokens back, which the teacher finds."
    "\vThe folder DIR gets student.safetensors (w_q and w_k) and report.html. Ctrl-C ends the training early, and "
    "both files then describe the student so far; the exit status is 130. To distill a model of your own, use "
    "streamkl-distill of the Python package.\n"
    "\n"
    "With --device cuda the GPU computes the attention KL and its gradients, the CPU computes the projections.\n"
    "\n"
    "Examples:\n"
    "  streamkl distill\n"
    "  streamkl distill --context 32768 --steps 60\n"
    "  streamkl distill --out run7 --seed 7 --heads-t 8 --heads-s 2";

#define SETTING(member) offsetof(distill_settings, member)

static const char *parse_rate(const char *text, void *value)
{
    return parse_float(text, value) || *(float *)value <= 0 ? "a number above 0" : NULL;
}

/* No product of the settings overflows 64 bits. */
const cli_option distill_task_options[] = {
    {"context", "N", parse_count, SETTING(context), "Tokens per sequence", 8192, TASK_CONTEXT_MIN, INT32_MAX},
    {"needles", "N", parse_count, SETTING(needles), "Definitions per sequence, 1 to 256", 32, 1, TASK_NEEDLES_MAX},
    {"hidden", "N", parse_count, SETTING(hidden), "Size of a hidden state", 64, TASK_WIDTH_MIN, 65536},
    {"heads-t", "N", parse_count, SETTING(heads_t), "Heads of the teacher, a multiple of the student's", 4, 1, 1024},
    {"dim-t", "N", parse_count, SETTING(dim_t), "Size of a teacher head", 48, TASK_DIM_MIN, 512},
    {"heads-s", "N", parse_count, SETTING(heads_s), "Heads of the student", 2, 1, 1024},
    {"dim-s", "N", parse_count, SETTING(dim_s), "Size of a student head", 32, 1, 512},
    {0},
};

const cli_option distill_training_options[] = {
    {"steps", "N", parse_count, SETTING(steps), "Steps of Adam", 160, 1, 1 << 24},
    {"batch", "N", parse_count, SETTING(batch), "Sequences per step", 1, 1, 1 << 20},
    {"rate", "X", parse_rate, SETTING(rate), "Peak learning rate, with warm-up and cosine decay; default 0.05"},
    {"direction", "forward|reverse", PARSE_WORD, SETTING(direction),
     "KL(teacher || student), the default, or KL(student || teacher)"},
    {"seed", "N", parse_int64, SETTING(seed), "Seed of data and initial weights", 1},
    {"held-out", "N", parse_count, SETTING(held_out), "Sequences for evaluation only", 4, 1, 1024},
    {0},
};

static const cli_option result_options[] = {
    {"out", "DIR", parse_string, offsetof(distill_request, folder),
     "Folder for weights and report; default streamkl-distill"},
    {"json", NULL, parse_flag, offsetof(distill_request, json), "Print one JSON object instead of the tables"},
    {0},
};

static const option_group groups[] = {
    {"Task:", distill_task_options, offsetof(distill_request, settings)},
    {"Training:", distill_training_options, offsetof(distill_request, settings)},
    {"Result:", result_options, 0},
    {"Engine:", engine_options, offsetof(distill_request, options)},
    {0},
};

/* ---- Preparation -------------------------------------------------------------------------------------------- */

/* The first Ctrl-C ends the training, the second one the process. */
static void stop_on_signal(int number)
{
    distill_stop = 1;
    signal(number, SIG_DFL);
}

/* Creates the folder and checks that the results can be written to it. */
static void make_folder(const distill_request *request)
{
    if (strlen(request->folder) + sizeof "/student.safetensors" > sizeof(distill_path))
        cli_fail(CLI_BAD_INPUT, "--out=%.60s...: must be shorter", request->folder);
    if (mkdir(request->folder, 0777) != 0 && errno != EEXIST)
        cli_fail(CLI_WRITE_FAILED, "--out=%s: %s", request->folder, strerror(errno));
    const distill_path student = distill_path_of(request, "student.safetensors");
    const distill_path report = distill_path_of(request, "report.html");
    const output_file outputs[] = {{"--out", student.text}, {"--out", report.text}};
    file_outputs_check(outputs, 2, NULL, 0);
}

static void check_settings(const distill_settings *settings)
{
    if (settings->heads_t % settings->heads_s != 0)
        cli_fail(CLI_BAD_INPUT, "--heads-t=%" PRId64 ": must be a multiple of --heads-s=%" PRId64, settings->heads_t,
                 settings->heads_s);
    if (settings->needles > settings->context / 4)
        cli_fail(CLI_BAD_INPUT, "--needles=%" PRId64 ": must be at most a quarter of --context=%" PRId64,
                 settings->needles, settings->context);
}

static void open_run(distill_run *run)
{
    enum { STREAM_INITIAL_STUDENT = 301 };
    const distill_settings *const s = &run->request->settings;
    const skl_options *const options = &run->request->options;
    const layer_shape student = {s->hidden, s->heads_s, s->dim_s};
    const task_shape task = {
        s->context, s->needles, {s->hidden, s->heads_t, s->dim_t}, s->heads_t / s->heads_s, (uint64_t)s->seed};
    const int threads = options->threads > 0 ? options->threads : machine_cores();
    task_create(&run->task, &task, threads);
    attention_pair_open(&run->pair, &task, student, s->direction, options, threads);
    run->initial_student = layer_zeros(student);
    layer_randomize(&run->initial_student, random_stream(task.seed, STREAM_INITIAL_STUDENT, 0));
    run->student = student_of(&run->initial_student);
    double **const histories[] = {&run->history.loss, &run->history.evaluation_step, &run->history.evaluation_kl};
    for (size_t h = 0; h < sizeof histories / sizeof histories[0]; h++)
        *histories[h] = cli_allocate_zeros((size_t)s->steps + 1, sizeof(double), "the history");
}

static void close_run(distill_run *run)
{
    attention_pair_close(&run->pair);
    student_free(&run->student);
    task_free(&run->task);
    free(run->initial_student.w_q);
    free(run->history.loss);
    free(run->history.evaluation_step);
    free(run->history.evaluation_kl);
}

/* ---- The run ------------------------------------------------------------------------------------------------ */

static void print_title(const distill_run *run)
{
    const distill_settings *const s = &run->request->settings;
    const term_style style = term_style_for(stdout);
    printf("%sDistilling attention%s at a context of %" PRId64 "\n", style.bold, style.plain, s->context);
    printf("  teacher: %" PRId64 " heads of size %" PRId64 "; student: %" PRId64 " of size %" PRId64 "; %" PRId64
           " steps of %" PRId64 " sequence%s; W_q and W_k are trained on KL(%s)\n\n",
           s->heads_t, s->dim_t, s->heads_s, s->dim_s, s->steps, s->batch, cli_plural(s->batch),
           direction_formula(s->direction));
}

/* Evaluates the students before and after training on all held-out sequences, and writes the results. */
static void finish(distill_run *run)
{
    const int64_t held_out = run->request->settings.held_out;
    run->before = evaluate(&run->pair, &run->task, &run->initial_student, held_out);
    run->after = evaluate(&run->pair, &run->task, &run->student.weights, held_out);
    distill_student_save(run);
    distill_report_write(run);
    file_write_commit();
    if (run->request->json) {
        distill_print_json(run);
        return;
    }
    distill_print_result(run);
    printf("\nReport   %s\nStudent  %s\n", printable_of(distill_path_of(run->request, "report.html").text).text,
           printable_of(distill_path_of(run->request, "student.safetensors").text).text);
}

int cmd_distill(int argc, char **argv)
{
    enum { STOPPED = 130 }; /* 128 + SIGINT, the convention of shells */
    static const command_line command = {doc, groups, NULL};
    distill_request request = {
        .settings = {.rate = 0.05F}, .options = skl_options_default(), .folder = "streamkl-distill"};
    options_parse(&command, argc, argv, &request);
    check_settings(&request.settings);
    signal(SIGINT, stop_on_signal);
    signal(SIGTERM, stop_on_signal);
    distill_run run = {.request = &request};
    open_run(&run);
    make_folder(&request);
    if (!request.json)
        print_title(&run);
    distill_train(&run);
    const bool stopped = distill_stop;
    if (stopped && !request.json)
        printf("Stopped at step %" PRId64 "\n", run.student.step);
    finish(&run);
    close_run(&run);
    return stopped ? STOPPED : CLI_OK;
}
