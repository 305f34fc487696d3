#include "cli/common/options.h"
#include "cli/common/cli.h"
#include "cli/term/term.h"
#include "device/device.h"

#include <assert.h>
#include <errno.h>
#include <inttypes.h>
#include <math.h>
#include <stdbool.h>
#include <stdlib.h>

/* ---- Values ------------------------------------------------------------------------------------------------- */

const char *parse_flag(const char *text, void *value)
{
    (void)text;
    *(int32_t *)value = 1;
    return NULL;
}

const char *parse_string(const char *text, void *value)
{
    *(const char **)value = text;
    return text[0] ? NULL : "not empty";
}

const char *parse_float(const char *text, void *value)
{
    char *end;
    errno = 0;
    const float number = strtof(text, &end);
    if (end == text || *end || !isfinite(number))
        return "a number";
    if (number == 0 && errno == ERANGE)
        return "0 or a number that does not round to 0"; /* 0 often stands for the default */
    *(float *)value = number;
    return NULL;
}

static bool integer_from_text(const char *text, int64_t least, int64_t most, int64_t *value)
{
    char *end;
    errno = 0;
    const long long number = strtoll(text, &end, 10);
    if (end == text || *end || errno || number < least || number > most)
        return false;
    *value = number;
    return true;
}

bool pair_from_text(const char *text, int64_t least, int64_t *first, int64_t *second)
{
    char *comma;
    errno = 0;
    *first = strtoll(text, &comma, 10);
    return comma != text && *comma == ',' && !errno && *first >= least &&
           integer_from_text(comma + 1, least, INT64_MAX, second);
}

const char *parse_int32(const char *text, void *value)
{
    int64_t number;
    if (!integer_from_text(text, 0, INT32_MAX, &number))
        return "an integer, 0 or more";
    *(int32_t *)value = (int32_t)number;
    return NULL;
}

const char *parse_int64(const char *text, void *value)
{
    return integer_from_text(text, INT64_MIN, INT64_MAX, value) ? NULL : "an integer";
}

const char *parse_count(const char *text, void *value)
{
    return integer_from_text(text, 1, INT64_MAX, value) ? NULL : "an integer, 1 or more";
}

/* ---- Names -------------------------------------------------------------------------------------------------- */

const char *const direction_names[] = {[SKL_KL_FORWARD] = "forward", [SKL_KL_REVERSE] = "reverse"};
const char *const device_names[] = {[SKL_CPU] = "cpu", [SKL_CUDA] = "cuda"};
const char *const dtype_names[] = {[SKL_F32] = "f32", [SKL_F16] = "f16", [SKL_BF16] = "bf16"};

const char *direction_formula(skl_direction direction)
{
    return direction == SKL_KL_FORWARD ? "teacher || student" : "student || teacher";
}

/* Stores the index of the text among words like "f32|f16|bf16". */
static const char *parse_word(const char *text, const char *words, void *value)
{
    static char accepted[64]; /* "f32, f16 or bf16" */
    accepted[0] = '\0';
    for (int index = 0; *words; index++) {
        const size_t length = strcspn(words, "|");
        if (length == strlen(text) && strncmp(text, words, length) == 0) {
            memcpy(value, &index, sizeof index); /* enums of the requests have the size of an int */
            return NULL;
        }
        const char *const before = index == 0 ? "" : words[length] ? ", " : " or ";
        snprintf(accepted + strlen(accepted), sizeof accepted - strlen(accepted), "%s%.*s", before, (int)length,
                 words);
        words += length + (words[length] == '|');
    }
    return accepted;
}

/* ---- The command line --------------------------------------------------------------------------------------- */

enum { OPTIONS_MAX = 64, GROUP_KEYS = 0x100 }; /* a key is GROUP_KEYS * (1 + group) + index in the group */

typedef struct parse_state {
    const command_line *command;
    char *request;
    int argument_count;
} parse_state;

static void store(const parse_state *parsing, int key, const char *text)
{
    const option_group *const group = &parsing->command->groups[key / GROUP_KEYS - 1];
    const cli_option *const given = &group->options[key % GROUP_KEYS];
    char *const value = parsing->request + group->target + given->offset;
    const char *const accepted = given->parse ? given->parse(text, value) : parse_word(text, given->argument, value);
    if (given->most && (accepted || *(int64_t *)value < given->least || *(int64_t *)value > given->most))
        cli_fail(CLI_BAD_INPUT, "--%s=%s: must be an integer, %" PRId64 "..%" PRId64, given->name, text, given->least,
                 given->most);
    if (accepted)
        cli_fail(CLI_BAD_INPUT, "--%s=%s: must be %s", given->name, text, accepted);
}

typedef struct option_doc {
    char text[256];
} option_doc;

static option_doc doc_of(const cli_option *option)
{
    option_doc doc;
    const size_t length = (size_t)snprintf(doc.text, sizeof doc.text, "%s", option->doc);
    assert(length + 32 < sizeof doc.text);
    if (option->initial)
        snprintf(doc.text + length, sizeof doc.text - length, "; default %" PRId64, option->initial);
    return doc;
}

static error_t parse_key(int key, char *text, struct argp_state *state)
{
    parse_state *const parsing = state->input;
    const char *const arguments = parsing->command->arguments;
    if (key >= GROUP_KEYS && key < ARGP_KEY_END) {
        store(parsing, key, text);
        return 0;
    }
    if (key == ARGP_KEY_ARG && arguments == NULL)
        argp_error(state, "unexpected argument '%s'", text);
    if (key == ARGP_KEY_ARGS) {
        parsing->argument_count = state->argc - state->next;
        return 0;
    }
    if (key == ARGP_KEY_NO_ARGS && arguments)
        cli_fail(CLI_BAD_INPUT, "%.*s: at least one must be given; see %s --help", (int)strcspn(arguments, "."),
                 arguments, program_invocation_name);
    return ARGP_ERR_UNKNOWN;
}

int options_parse(const command_line *command, int argc, char **argv, void *request)
{
    struct argp_option all[OPTIONS_MAX] = {{0}};
    option_doc docs[OPTIONS_MAX];
    int count = 0;
    for (int g = 0; command->groups[g].options; g++) {
        all[count++] = (struct argp_option){.doc = command->groups[g].title, .group = g + 1};
        for (const cli_option *o = command->groups[g].options; o->name; o++) {
            assert(count + 1 < OPTIONS_MAX);
            const int key = GROUP_KEYS * (1 + g) + (int)(o - command->groups[g].options);
            docs[count] = doc_of(o);
            all[count] = (struct argp_option){o->name, key, o->argument, 0, docs[count].text, g + 1};
            count++;
            if (o->initial)
                memcpy((char *)request + command->groups[g].target + o->offset, &o->initial, sizeof o->initial);
        }
    }
    const struct argp argp = {
        .options = all, .parser = parse_key, .args_doc = command->arguments, .doc = command->doc};
    parse_state parsing = {command, request, 0};
    const error_t refused = argp_parse(&argp, argc, argv, 0, NULL, &parsing);
    if (refused) /* argp prints the other errors, and exits */
        cli_fail(refused == ENOMEM ? CLI_NO_MEMORY : CLI_BAD_INPUT, "the command line: %s", strerror(refused));
    return parsing.argument_count;
}

/* ---- The problem: masks and scales -------------------------------------------------------------------------- */

/* "LEFT,RIGHT" into an skl_problem; -1 stands for no limit. */
static const char *parse_window(const char *text, void *value)
{
    skl_problem *const problem = value;
    return pair_from_text(text, -1, &problem->window_left, &problem->window_right)
               ? NULL
               : "LEFT,RIGHT, two integers of -1 (no limit) or more";
}

/* One offset is enough to give both queries and keys explicit positions. */
static const char *parse_offset_q(const char *text, void *value)
{
    skl_problem *problem = value;
    problem->positions = SKL_POSITIONS_OFFSET;
    return parse_int64(text, &problem->offset_q);
}

static const char *parse_offset_k(const char *text, void *value)
{
    skl_problem *problem = value;
    problem->positions = SKL_POSITIONS_OFFSET;
    return parse_int64(text, &problem->offset_k);
}

enum { WHOLE_STRUCT = 0 }; /* offset for parsers that set several members */

const cli_option mask_options[] = {
    {"causal", NULL, parse_flag, offsetof(skl_problem, causal), "A query attends to no later key"},
    {"window", "L,R", parse_window, WHOLE_STRUCT,
     "A query attends to at most L keys before its position and R keys after it; -1: no limit"},
    {"offset-q", "N", parse_offset_q, WHOLE_STRUCT,
     "Position of query 0, for a shard of a longer sequence; without offsets bottom-right aligned"},
    {"offset-k", "N", parse_offset_k, WHOLE_STRUCT, "Position of key 0"},
    {0},
};

const cli_option logit_options[] = {
    {"scale-t", "X", parse_float, offsetof(skl_problem, scale_t), "Logit scale of the teacher; default 1/sqrt(D)"},
    {"scale-s", "X", parse_float, offsetof(skl_problem, scale_s), "Logit scale of the student; default 1/sqrt(D)"},
    {"softcap-t", "X", parse_float, offsetof(skl_problem, softcap_t),
     "Logits of the teacher become X tanh(logit / X); default none"},
    {"softcap-s", "X", parse_float, offsetof(skl_problem, softcap_s),
     "Logits of the student become X tanh(logit / X); default none"},
    {"direction", "forward|reverse", PARSE_WORD, offsetof(skl_problem, direction),
     "KL(teacher || student), the default, or KL(student || teacher)"},
    {0},
};

/* ---- The engine: device, threads, kernel -------------------------------------------------------------------- */

/* "cpu", "cuda" or "cuda:INDEX" into an skl_options. */
const char *parse_device(const char *text, void *value)
{
    static const char accepted[] = "cpu, cuda or cuda:INDEX";
    skl_options *options = value;
    int64_t index = 0;
    const char *const name = device_names[SKL_CUDA];
    const size_t length = strlen(name);
    if (strcmp(text, device_names[SKL_CPU]) == 0) {
        options->device = SKL_CPU;
        return NULL;
    }
    if (strncmp(text, name, length) != 0 ||
        (text[length] && (text[length] != ':' || !integer_from_text(text + length + 1, 0, INT32_MAX, &index))))
        return accepted;
    options->device = SKL_CUDA;
    options->device_index = (int32_t)index;
    return NULL;
}

const cli_option engine_options[] = {
    {"device", "cpu|cuda[:N]", parse_device, WHOLE_STRUCT, "Where to compute; default cpu"},
    {"threads", "N", parse_int32, offsetof(skl_options, threads),
     "CPU threads; default STREAMKL_THREADS, else every core"},
    {"kernel", "NAME", parse_string, offsetof(skl_options, kernel),
     "A kernel that streamkl info lists; default STREAMKL_KERNEL, else the best"},
    {0},
};

skl_options options_watched(void)
{
    skl_options options = skl_options_default();
    options.progress = term_progress_update;
    return options;
}

void plan_check(skl_status status, const skl_options *options)
{
    const bool no_device = status == SKL_ERROR_DEVICE || status == SKL_ERROR_UNSUPPORTED;
    if (no_device && options->device != SKL_CPU && !device_error()[0])
        cli_fail(CLI_NO_DEVICE, "--device=%s:%" PRId32 ": %s", device_names[options->device], options->device_index,
                 skl_last_error());
    cli_check(status);
}

skl_plan *plan_create(const skl_problem *problem, const skl_options *options)
{
    skl_plan *plan = NULL;
    plan_check(skl_plan_create(&plan, problem, options), options);
    return plan;
}
