/* streamkl distill: the command line and the order of the steps. */
#include "device/device.h"
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

/* ---- The command line --------------------------------------------------------------------------------------- */

#define SETTING(member) offsetof(distill_request, settings.member)

static const char *parse_rate(const char *text, void *value)
{
    return parse_float(text, value) || *(float *)value <= 0 ? "a number above 0" : NULL;
}

static const cli_option task_options[] = {
    {"context", "N", parse_count, SETTING(context), "Tokens per sequence; default 8192"},
    {"needles", "N", parse_count, SETTING(needles), "Definitions per sequence, 1 to 256; default 32"},
    {"hidden", "N", parse_count, SETTING(hidden), "Size of a hidden state; default 64"},
    {"heads-t", "N", parse_count, SETTING(heads_t), "Heads of the teacher, a multiple of the student's; default 4"},
    {"dim-t", "N", parse_count, SETTING(dim_t), "Size of a teacher head; default 48"},
    {"heads-s", "N", parse_count, SETTING(heads_s), "Heads of the student; default 2"},
    {"dim-s", "N", parse_count, SETTING(dim_s), "Size of a student head; default 32"},
    {0},
};

static const cli_option training_options[] = {
    {"steps", "N", parse_count, SETTING(steps), "Steps of Adam; default 160"},
    {"batch", "N", parse_count, SETTING(batch), "Sequences per step; default 1"},
    {"rate", "X", parse_rate, SETTING(rate), "Peak learning rate, with warm-up and cosine decay; default 0.05"},
    {"direction", "forward|reverse", parse_direction, SETTING(direction),
     "KL(teacher || student), the default, or KL(student || teacher)"},
    {"seed", "N", parse_int64, SETTING(seed), "Seed of data and initial weights; default 1"},
    {"held-out", "N", parse_count, SETTING(held_out), "Sequences for evaluation only; default 4"},
    {0},
};

static const cli_option result_options[] = {
    {"out", "DIR", parse_string, offsetof(distill_request, folder),
     "Folder for weights and report; default streamkl-distill"},
    {"json", NULL, parse_flag, offsetof(distill_request, json), "Print one JSON object instead of the tables"},
    {0},
};

static const option_group groups[] = {
    {"Task:", task_options, 0},
    {"Training:", training_options, 0},
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

static void open_run(distill_run *run)
{
    const distill_request *const request = run->request;
    const distill_source *const source = run->source;
    plan_check(attention_pair_open(&run->pair, &source->shape, &request->options, run->pair.threads),
               &request->options);
    cli_check(student_allocate(&run->student, &source->initial_student));
    const size_t room = (size_t)request->settings.steps + 1;
    float **const histories[] = {&run->history.loss, &run->history.evaluation_step, &run->history.evaluation_kl};
    for (size_t h = 0; h < sizeof histories / sizeof histories[0]; h++)
        *histories[h] = cli_allocate_zeros(room, sizeof(float), "the history");
}

static void close_run(distill_run *run)
{
    attention_pair_close(&run->pair);
    student_free(&run->student);
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

static void evaluate_student(distill_run *run, evaluation *result, const layer *student)
{
    static const volatile int never = 0;
    cli_check(evaluate(result, &run->pair, &run->source->task.teacher, student, &run->source->sequences,
                       run->request->settings.held_out, &never));
}

/* Evaluates the students before and after training on all held-out sequences, and writes the results. */
static void finish(distill_run *run)
{
    evaluate_student(run, &run->before, &run->source->initial_student);
    evaluate_student(run, &run->after, &run->student.weights);
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
        .settings = {.context = 8192,
                     .needles = 32,
                     .hidden = 64,
                     .heads_t = 4,
                     .heads_s = 2,
                     .dim_t = 48,
                     .dim_s = 32,
                     .steps = 160,
                     .batch = 1,
                     .held_out = 4,
                     .seed = 1,
                     .rate = 0.05F},
        .options = skl_options_default(),
        .folder = "streamkl-distill",
    };
    options_parse(&command, argc, argv, &request);
    signal(SIGINT, stop_on_signal);
    signal(SIGTERM, stop_on_signal);
    distill_source source = {.sequences = {NULL, NULL}};
    distill_run run = {.request = &request, .source = &source};
    run.pair.threads = request.options.threads > 0 ? request.options.threads : machine_cores();
    distill_source_open(&source, &request.settings, run.pair.threads);
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
    distill_source_close(&source);
    return stopped ? STOPPED : CLI_OK;
}
