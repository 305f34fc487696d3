/* The synthetic task as a source of sequences; files.c reads those of the user. */
#include "cli/common/cli.h"
#include "device/device.h"
#include "cli/distill/distill.h"
#include "distill/random.h"

#include <inttypes.h>

enum { STREAM_INITIAL_STUDENT = 301 };

static sequence synthetic_at(void *state, sequence_split split, uint64_t index)
{
    return task_sequence(state, (uint64_t)split, index);
}

typedef struct count_rule {
    const char *name;
    int64_t value, least, most;
} count_rule;

static void check_rules(const count_rule *rules, size_t count)
{
    for (size_t r = 0; r < count; r++)
        if (rules[r].value < rules[r].least || rules[r].value > rules[r].most)
            cli_fail(CLI_BAD_INPUT, "--%s=%" PRId64 ": must be %" PRId64 "..%" PRId64, rules[r].name, rules[r].value,
                     rules[r].least, rules[r].most);
}

/* No product of the settings overflows 64 bits, and every step is a float of the history. */
static void check_training(const distill_settings *settings)
{
    const count_rule rules[] = {
        {"steps", settings->steps, 1, 1 << 24},
        {"batch", settings->batch, 1, 1 << 20},
    };
    check_rules(rules, sizeof rules / sizeof rules[0]);
}

static void check_counts(const distill_settings *settings)
{
    const count_rule rules[] = {
        {"context", settings->context, TASK_CONTEXT_MIN, INT32_MAX},
        {"hidden", settings->hidden, TASK_WIDTH_MIN, 65536},
        {"needles", settings->needles, 1, TASK_NEEDLES_MAX},
        {"dim-t", settings->dim_t, TASK_DIM_MIN, 512},
        {"dim-s", settings->dim_s, 1, 512},
        {"heads-t", settings->heads_t, 1, 1024},
        {"heads-s", settings->heads_s, 1, 1024},
        {"held-out", settings->held_out, 1, 1024},
    };
    check_rules(rules, sizeof rules / sizeof rules[0]);
    if (settings->heads_t % settings->heads_s != 0)
        cli_fail(CLI_BAD_INPUT, "--heads-t=%" PRId64 ": must be a multiple of --heads-s=%" PRId64, settings->heads_t,
                 settings->heads_s);
    if (settings->needles > settings->context / 4)
        cli_fail(CLI_BAD_INPUT, "--needles=%" PRId64 ": must be at most a quarter of --context=%" PRId64,
                 settings->needles, settings->context);
}

static void open_synthetic(distill_source *source, distill_settings *settings, int threads)
{
    settings->heads_t = settings->heads_t ? settings->heads_t : 4;
    settings->heads_s = settings->heads_s ? settings->heads_s : 2;
    check_counts(settings);
    const layer_shape teacher = {settings->hidden, settings->heads_t, settings->heads_t, settings->dim_t};
    const layer_shape student = {settings->hidden, settings->heads_s, settings->heads_s, settings->dim_s};
    const task_shape shape = {settings->context, settings->needles, teacher, settings->heads_t / settings->heads_s};
    source->shape = (attention_pair_shape){settings->context, teacher, student, settings->direction};
    cli_check(task_create(&source->synthetic, &shape, (uint64_t)settings->seed, threads));
    cli_check(layer_allocate(&source->initial_student, student));
    layer_randomise(&source->initial_student, random_stream((uint64_t)settings->seed, STREAM_INITIAL_STUDENT, 0));
    source->teacher = &source->synthetic.teacher;
    source->sequences = (sequence_source){&source->synthetic, synthetic_at};
    source->retrieves = true;
}

void distill_source_open(distill_source *source, distill_settings *settings, int threads)
{
    if (!settings->teacher_path != !settings->student_path)
        cli_fail(CLI_BAD_INPUT, "--%s: --%s must be given too", settings->teacher_path ? "teacher" : "student",
                 settings->teacher_path ? "student" : "teacher");
    check_training(settings);
    if (settings->teacher_path)
        distill_files_open(source, settings);
    else
        open_synthetic(source, settings, threads);
}

void distill_source_unchanged(const distill_source *source)
{
    const tensor_file *const files[] = {source->files.teacher_file, source->files.student_file};
    tensor_error error;
    for (size_t f = 0; f < sizeof files / sizeof files[0]; f++)
        if (files[f] && !tensor_file_unchanged(files[f], &error))
            cli_fail(CLI_BAD_INPUT, "%s", error.text);
}

void distill_source_close(distill_source *source)
{
    task_free(&source->synthetic);
    layer_free(&source->initial_student);
    layer_free(&source->teacher_from_file);
    device_free(SKL_CPU, source->files.buffer_t);
    device_free(SKL_CPU, source->files.buffer_s);
    tensor_file_close(source->files.teacher_file);
    tensor_file_close(source->files.student_file);
}
