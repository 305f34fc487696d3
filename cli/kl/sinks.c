/* Sinks: the logits of one more outcome per head, on the command line or in a file. */
#include "cli/common/cli.h"
#include "cli/kl/kl.h"

#include <ctype.h>
#include <inttypes.h>
#include <math.h>
#include <stdlib.h>

static float *allocate_sinks(kl_role role, int64_t heads)
{
    float *const sinks = malloc((size_t)heads * sizeof *sinks);
    if (sinks == NULL)
        cli_fail(CLI_NO_MEMORY, "out of memory: %s needs %" PRId64 " numbers", kl_role_names[role], heads);
    return sinks;
}

/* -inf is a head without a sink. */
static bool is_logit(float sink)
{
    return !isnan(sink) && sink < INFINITY;
}

static int sinks_from_list(kl_role role, const char *text, float *sinks, int64_t heads)
{
    const char *entry = text;
    for (int64_t h = 0; h < heads; h++) {
        char *end;
        sinks[h] = strtof(entry, &end);
        const char separator = h + 1 < heads ? ',' : '\0';
        if (end == entry || *end != separator || !is_logit(sinks[h]))
            return cli_fail(CLI_BAD_INPUT,
                            "%s=%s: must be %" PRId64
                            " numbers below infinity, one per head, separated by commas, or the name of a tensor",
                            kl_role_names[role], text, heads);
        entry = end + 1;
    }
    return CLI_OK;
}

static int sinks_from_tensor(kl_role role, const kl_found *found, float *sinks, int64_t heads)
{
    const stored_tensor *const tensor = found->tensor;
    tensor_error error;
    if (tensor->rank != 1 || tensor->shape[0] != heads)
        return cli_fail(CLI_BAD_INPUT, "%s %s: must be [H], one number for each of the %" PRId64 " heads",
                        kl_role_names[role], shape_print(tensor->shape, tensor->rank).text, heads);
    const void *const data = tensor_file_data(found->file->contents, tensor, &error);
    if (data == NULL)
        return cli_fail(CLI_BAD_INPUT, "%s: %s", kl_role_names[role], error.text);
    for (int64_t h = 0; h < heads; h++) {
        sinks[h] = tensor_number_at(data, tensor->dtype, h);
        if (!is_logit(sinks[h]))
            return cli_fail(CLI_BAD_INPUT, "%s[%" PRId64 "]=%g: must be a number below infinity", kl_role_names[role],
                            h, (double)sinks[h]);
    }
    return CLI_OK;
}

static int load_side(const kl_files *files, kl_role role, const char *text, int64_t heads, float **sinks)
{
    const bool is_list = text && (isdigit((unsigned char)text[0]) || strchr("+-.", text[0]));
    kl_found found = {NULL, NULL};
    if (!is_list) {
        const int exit_code = kl_files_find(files, role, text ? text : kl_role_names[role], text != NULL, &found);
        if (exit_code != CLI_OK || found.tensor == NULL)
            return exit_code;
    }
    *sinks = allocate_sinks(role, heads);
    if (*sinks == NULL)
        return CLI_NO_MEMORY;
    return is_list ? sinks_from_list(role, text, *sinks, heads) : sinks_from_tensor(role, &found, *sinks, heads);
}

int kl_sinks_load(kl_inputs *inputs, const kl_request *request)
{
    skl_problem *const problem = &inputs->problem;
    int exit_code =
        load_side(&inputs->files, ROLE_SINK_T, request->names[ROLE_SINK_T], problem->heads_t, &inputs->sink_t);
    if (exit_code == CLI_OK)
        exit_code =
            load_side(&inputs->files, ROLE_SINK_S, request->names[ROLE_SINK_S], problem->heads_s, &inputs->sink_s);
    if (exit_code != CLI_OK || (inputs->sink_t == NULL && inputs->sink_s == NULL))
        return exit_code;
    problem->sinks = 1; /* the library refuses it for an indexer */
    if (!kl_is_indexer(problem) && (inputs->sink_t == NULL || inputs->sink_s == NULL))
        return cli_fail(CLI_BAD_INPUT,
                        "%s is missing and %s is given: both must be given, or neither for the KL on the keys alone",
                        inputs->sink_t ? "sink_s" : "sink_t", inputs->sink_t ? "sink_t" : "sink_s");
    problem->gradients |=
        (problem->gradients & SKL_DQ_T ? SKL_DSINK_T : 0U) | (problem->gradients & SKL_DQ_S ? SKL_DSINK_S : 0U);
    inputs->tensors.sink_t = inputs->sink_t;
    inputs->tensors.sink_s = inputs->sink_s;
    return CLI_OK;
}
