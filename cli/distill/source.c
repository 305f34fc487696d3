/* The synthetic task as a source of sequences. */
#include "cli/common/cli.h"
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

/* No product of the settings overflows 64 bits, and every step is a float of the history. */
static void check_settings(const distill_settings *settings)
{
    const count_rule rules[] = {
        {"steps", settings->steps, 1, 1 << 24},
        {"batch", settings->batch, 1, 1 << 20},
        {"context", settings->context, TASK_CONTEXT_MIN, INT32_MAX},
        {"hidden", settings->hidden, TASK_WIDTH_MIN, 65536},
        {"needles", settings->needles, 1, TASK_NEEDLES_MAX},
        {"dim-t", settings->dim_t, TASK_DIM_MIN, 512},
        {"dim-s", settings->dim_s, 1, 512},
        {"heads-t", settings->heads_t, 1, 1024},
        {"heads-s", settings->heads_s, 1, 1024},
        {"held-out", settings->held_out, 1, 1024},
    };
    for (size_t r = 0; r < sizeof rules / sizeof rules[0]; r++)
        if (rules[r].value < rules[r].least || rules[r].value > rules[r].most)
            cli_fail(CLI_BAD_INPUT, "--%s=%" PRId64 ": must be %" PRId64 "..%" PRId64, rules[r].name, rules[r].value,
                     rules[r].least, rules[r].most);
    if (settings->heads_t % settings->heads_s != 0)
        cli_fail(CLI_BAD_INPUT, "--heads-t=%" PRId64 ": must be a multiple of --heads-s=%" PRId64, settings->heads_t,
                 settings->heads_s);
    if (settings->needles > settings->context / 4)
        cli_fail(CLI_BAD_INPUT, "--needles=%" PRId64 ": must be at most a quarter of --context=%" PRId64,
                 settings->needles, settings->context);
}

void distill_source_open(distill_source *source, const distill_settings *settings, int threads)
{
    check_settings(settings);
    const layer_shape teacher = {settings->hidden, settings->heads_t, settings->heads_t, settings->dim_t};
    const layer_shape student = {settings->hidden, settings->heads_s, settings->heads_s, settings->dim_s};
    const task_shape shape = {settings->context, settings->needles, teacher, settings->heads_t / settings->heads_s};
    source->shape = (attention_pair_shape){settings->context, teacher, student, settings->direction};
    cli_check(task_create(&source->task, &shape, (uint64_t)settings->seed, threads));
    cli_check(layer_allocate(&source->initial_student, student));
    layer_randomise(&source->initial_student, random_stream((uint64_t)settings->seed, STREAM_INITIAL_STUDENT, 0));
    source->sequences = (sequence_source){&source->task, synthetic_at};
}

void distill_source_close(distill_source *source)
{
    task_free(&source->task);
    layer_free(&source->initial_student);
}
