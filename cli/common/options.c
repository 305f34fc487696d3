#include "cli/common/options.h"
#include "cli/common/cli.h"

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
    const float number = strtof(text, &end);
    if (end == text || *end || !isfinite(number))
        return "a number";
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

static const char *const direction_names[] = {[SKL_KL_FORWARD] = "forward", [SKL_KL_REVERSE] = "reverse"};
static const char *const device_names[] = {[SKL_CPU] = "cpu", [SKL_CUDA] = "cuda"};
static const char *const dtype_names[] = {[SKL_F32] = "f32", [SKL_F16] = "f16", [SKL_BF16] = "bf16"};

const char *direction_name(skl_direction direction)
{
    return direction_names[direction];
}

const char *device_name(skl_device device)
{
    return device_names[device];
}

const char *dtype_name(skl_dtype dtype)
{
    return dtype_names[dtype];
}

const char *parse_direction(const char *text, void *value)
{
    for (int direction = SKL_KL_FORWARD; direction <= SKL_KL_REVERSE; direction++) {
        if (strcmp(text, direction_names[direction]) == 0) {
            *(skl_direction *)value = (skl_direction)direction;
            return NULL;
        }
    }
    return "forward or reverse";
}

const char *parse_dtype(const char *text, void *value)
{
    for (int dtype = SKL_F32; dtype <= SKL_BF16; dtype++) {
        if (strcmp(text, dtype_names[dtype]) == 0) {
            *(skl_dtype *)value = (skl_dtype)dtype;
            return NULL;
        }
    }
    return "f32, f16 or bf16";
}

/* ---- Tables ------------------------------------------------------------------------------------------------- */

static const char *option_name(const struct argp_option *options, int key)
{
    while (options->key != key)
        options++;
    return options->name;
}

error_t options_store(const option_field *fields, const struct argp_option *options, int key, const char *text,
                      void *target)
{
    for (; fields->key; fields++) {
        if (fields->key != key)
            continue;
        const char *accepted = fields->parse(text, (char *)target + fields->offset);
        if (accepted == NULL)
            return 0;
        cli_fail(CLI_BAD_INPUT, "--%s=%s: must be %s", option_name(options, key), text, accepted);
        return EINVAL;
    }
    return ARGP_ERR_UNKNOWN;
}

int options_parse(const struct argp *argp, int argc, char **argv, unsigned flags, void *request)
{
    const error_t refused = argp_parse(argp, argc, argv, flags, NULL, request);
    if (refused == ENOMEM)
        return cli_fail(CLI_NO_MEMORY, "out of memory for the command line");
    return refused ? CLI_BAD_INPUT : CLI_OK; /* argp, or the parser of an option, has printed why */
}

/* ---- The problem: masks and scales -------------------------------------------------------------------------- */

/* "LEFT,RIGHT" into an skl_problem; -1 stands for no limit. */
static const char *parse_window(const char *text, void *value)
{
    static const char accepted[] = "LEFT,RIGHT, two integers of -1 (no limit) or more";
    skl_problem *problem = value;
    char *comma;
    errno = 0;
    const long long left = strtoll(text, &comma, 10);
    if (comma == text || *comma != ',' || errno || left < -1)
        return accepted;
    if (!integer_from_text(comma + 1, -1, INT64_MAX, &problem->window_right))
        return accepted;
    problem->window_left = left;
    return NULL;
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

enum {
    KEY_CAUSAL = OPTIONS_PROBLEM_KEYS,
    KEY_WINDOW,
    KEY_OFFSET_Q,
    KEY_OFFSET_K,
    KEY_SCALE_T,
    KEY_SCALE_S,
    KEY_SOFTCAP_T,
    KEY_SOFTCAP_S,
    KEY_DIRECTION,
};

enum { WHOLE_STRUCT = 0 }; /* offset for parsers that set several members */

static const option_field problem_fields[] = {
    {KEY_CAUSAL, parse_flag, offsetof(skl_problem, causal)},
    {KEY_WINDOW, parse_window, WHOLE_STRUCT},
    {KEY_OFFSET_Q, parse_offset_q, WHOLE_STRUCT},
    {KEY_OFFSET_K, parse_offset_k, WHOLE_STRUCT},
    {KEY_SCALE_T, parse_float, offsetof(skl_problem, scale_t)},
    {KEY_SCALE_S, parse_float, offsetof(skl_problem, scale_s)},
    {KEY_SOFTCAP_T, parse_float, offsetof(skl_problem, softcap_t)},
    {KEY_SOFTCAP_S, parse_float, offsetof(skl_problem, softcap_s)},
    {KEY_DIRECTION, parse_direction, offsetof(skl_problem, direction)},
    {0, NULL, 0},
};

static const struct argp_option problem_options[] = {
    {"causal", KEY_CAUSAL, NULL, 0, "A query attends to no later key", 0},
    {"window", KEY_WINDOW, "L,R", 0,
     "A query attends to at most L keys before its position and R keys after it; -1: no limit", 0},
    {"offset-q", KEY_OFFSET_Q, "N", 0,
     "Position of query 0, for a shard of a longer sequence; without offsets bottom-right aligned", 0},
    {"offset-k", KEY_OFFSET_K, "N", 0, "Position of key 0", 0},
    {"scale-t", KEY_SCALE_T, "X", 0, "Logit scale of the teacher; default 1/sqrt(D)", 0},
    {"scale-s", KEY_SCALE_S, "X", 0, "Logit scale of the student; default 1/sqrt(D)", 0},
    {"softcap-t", KEY_SOFTCAP_T, "X", 0, "Logits of the teacher become X tanh(logit / X); default none", 0},
    {"softcap-s", KEY_SOFTCAP_S, "X", 0, "Logits of the student become X tanh(logit / X); default none", 0},
    {"direction", KEY_DIRECTION, "forward|reverse", 0,
     "KL(teacher || student), the default, or KL(student || teacher)", 0},
    {0},
};

static error_t parse_problem_option(int key, char *text, struct argp_state *state)
{
    return options_store(problem_fields, problem_options, key, text, state->input);
}

const struct argp problem_argp = {.options = problem_options, .parser = parse_problem_option};

/* ---- The engine: device, threads, kernel -------------------------------------------------------------------- */

/* "cpu", "cuda" or "cuda:INDEX" into an skl_options. */
const char *parse_device(const char *text, void *value)
{
    static const char accepted[] = "cpu, cuda or cuda:INDEX";
    skl_options *options = value;
    int64_t index = 0;
    const char *colon = strchr(text, ':');
    if (colon && !integer_from_text(colon + 1, 0, INT32_MAX, &index))
        return accepted;
    const size_t name_length = colon ? (size_t)(colon - text) : strlen(text);
    for (int device = SKL_CPU; device <= SKL_CUDA; device++) {
        const char *name = device_names[device];
        if (strlen(name) != name_length || strncmp(text, name, name_length) != 0)
            continue;
        if (colon && device == SKL_CPU)
            return accepted;
        options->device = (skl_device)device;
        options->device_index = (int32_t)index;
        return NULL;
    }
    return accepted;
}

int fail_plan(skl_status status, const skl_options *options)
{
    const bool no_device = status == SKL_ERROR_DEVICE || status == SKL_ERROR_UNSUPPORTED;
    if (!no_device || options->device == SKL_CPU)
        return cli_fail_status(status);
    return cli_fail(CLI_NO_DEVICE, "--device=%s:%" PRId32 ": %s", device_name(options->device), options->device_index,
                    skl_last_error());
}

enum { KEY_DEVICE = OPTIONS_ENGINE_KEYS, KEY_THREADS, KEY_KERNEL };

static const option_field engine_fields[] = {
    {KEY_DEVICE, parse_device, WHOLE_STRUCT},
    {KEY_THREADS, parse_int32, offsetof(skl_options, threads)},
    {KEY_KERNEL, parse_string, offsetof(skl_options, kernel)},
    {0, NULL, 0},
};

static const struct argp_option engine_options[] = {
    {"device", KEY_DEVICE, "cpu|cuda[:N]", 0, "Where to compute; default cpu", 0},
    {"threads", KEY_THREADS, "N", 0, "CPU threads; default STREAMKL_THREADS, else every core", 0},
    {"kernel", KEY_KERNEL, "NAME", 0, "A kernel that streamkl info lists; default STREAMKL_KERNEL, else the best", 0},
    {0},
};

static error_t parse_engine_option(int key, char *text, struct argp_state *state)
{
    return options_store(engine_fields, engine_options, key, text, state->input);
}

const struct argp engine_argp = {.options = engine_options, .parser = parse_engine_option};
