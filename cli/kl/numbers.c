/* Sequence lengths, row bounds and sinks: numbers on the command line or in a file. */
#include "cli/common/cli.h"
#include "cli/kl/kl.h"

#include <ctype.h>
#include <inttypes.h>
#include <math.h>
#include <stdlib.h>

static bool is_list(const char *text)
{
    return text && (isdigit((unsigned char)text[0]) || strchr("+-.", text[0]));
}

/* The numbers of a list. *count is 0 if an entry is no number. */
static double *numbers_of_list(const char *text, int64_t *count)
{
    int64_t entries = 1;
    for (const char *comma = text; (comma = strchr(comma, ',')); comma++)
        entries++;
    double *const numbers = cli_allocate_zeros((size_t)entries, sizeof *numbers, "a list");
    *count = entries;
    for (int64_t i = 0; i < entries; i++) {
        char *end;
        numbers[i] = strtod(text, &end);
        if (end == text || *end != (i + 1 < entries ? ',' : '\0')) {
            *count = 0;
            break;
        }
        text = end + 1;
    }
    return numbers;
}

/* ---- Integers ----------------------------------------------------------------------------------------------- */

static int32_t *integers_of_list(kl_role role, const char *text, int64_t *count)
{
    double *const numbers = numbers_of_list(text, count);
    int32_t *const integers = cli_allocate_zeros((size_t)*count, sizeof *integers, "a list");
    bool fit = *count > 0;
    for (int64_t i = 0; i < *count && fit; i++) {
        fit = numbers[i] == floor(numbers[i]) && numbers[i] >= INT32_MIN && numbers[i] <= INT32_MAX;
        integers[i] = fit ? (int32_t)numbers[i] : 0;
    }
    if (!fit)
        cli_fail(CLI_BAD_INPUT, "%s=%s: must be integers separated by commas, or the name of a tensor",
                 kl_role_names[role], text);
    free(numbers);
    return integers;
}

int32_t *kl_integers_load(kl_role role, const kl_found *found, int64_t *count)
{
    const stored_tensor *const tensor = found->tensor;
    const bool wide = strcmp(tensor->dtype_name, "I64") == 0;
    if (!wide && strcmp(tensor->dtype_name, "I32") != 0)
        cli_fail(CLI_BAD_INPUT, "%s: %s has dtype %s; must be I32 or I64", found->file->path, kl_role_names[role],
                 tensor->dtype_name);
    *count = (int64_t)(tensor->size / (wide ? 8 : 4));
    int32_t *const values = cli_allocate((size_t)*count * sizeof *values, kl_role_names[role]);
    if (!wide)
        memcpy(values, tensor->bytes, tensor->size);
    for (int64_t i = 0; wide && i < *count; i++) {
        int64_t value; /* the bytes may be misaligned */
        memcpy(&value, tensor->bytes + i * 8, 8);
        if (value < INT32_MIN || value > INT32_MAX)
            cli_fail(CLI_BAD_INPUT, "%s: %s[%" PRId64 "]=%" PRId64 ": must fit into 32 bits", found->file->path,
                     kl_role_names[role], i, value);
        values[i] = (int32_t)value;
    }
    return values;
}

int32_t *kl_lengths_load(const kl_files *files, kl_role role, const char *text, int64_t *count)
{
    if (is_list(text))
        return integers_of_list(role, text, count);
    const kl_found found = kl_files_find(files, role, text, false);
    if (found.tensor == NULL)
        return NULL;
    if (found.tensor->rank != 1)
        cli_fail(CLI_BAD_INPUT, "%s: %s has %d dimensions; must have 1", found.file->path, kl_role_names[role],
                 found.tensor->rank);
    return kl_integers_load(role, &found, count);
}

int32_t *kl_bounds_load(const kl_files *files, kl_role role, const char *text, int64_t batch, int64_t length)
{
    int64_t count;
    if (is_list(text)) {
        int32_t *const values = integers_of_list(role, text, &count);
        if (count != batch * length)
            cli_fail(CLI_BAD_INPUT, "%s has %" PRId64 " entries: must be one per query, %" PRId64,
                     kl_role_names[role], count, batch * length);
        return values;
    }
    const kl_found found = kl_files_find(files, role, text, false);
    if (found.tensor == NULL)
        return NULL;
    const int64_t *const shape = found.tensor->shape;
    const int rank = found.tensor->rank;
    const bool fits =
        (rank == 2 && shape[0] == batch && shape[1] == length) || (rank == 1 && batch == 1 && shape[0] == length);
    if (!fits)
        cli_fail(CLI_BAD_INPUT, "%s %s: must be [B, N] of the queries, [%" PRId64 ", %" PRId64 "]",
                 kl_role_names[role], shape_print(shape, rank).text, batch, length);
    return kl_integers_load(role, &found, &count);
}

/* ---- Sinks -------------------------------------------------------------------------------------------------- */

/* -inf is a head without a sink. */
static bool is_logit(float sink)
{
    return !isnan(sink) && sink < INFINITY;
}

static void sinks_of_list(kl_role role, const char *text, float *sinks, int64_t heads)
{
    int64_t count;
    double *const numbers = numbers_of_list(text, &count);
    bool fit = count == heads;
    for (int64_t h = 0; h < heads && fit; h++) {
        sinks[h] = (float)numbers[h];
        fit = is_logit(sinks[h]);
    }
    if (!fit)
        cli_fail(CLI_BAD_INPUT,
                 "%s=%s: must be %" PRId64
                 " numbers below infinity, one per head, separated by commas, or the name of a tensor",
                 kl_role_names[role], text, heads);
    free(numbers);
}

float *kl_sinks_load(const kl_files *files, kl_role role, const char *text, int64_t heads)
{
    const kl_found found = is_list(text) ? (kl_found){NULL, NULL} : kl_files_find(files, role, text, false);
    const stored_tensor *const tensor = found.tensor;
    if (!is_list(text) && tensor == NULL)
        return NULL;
    float *const sinks = cli_allocate_zeros((size_t)heads, sizeof *sinks, kl_role_names[role]);
    if (tensor == NULL) {
        sinks_of_list(role, text, sinks, heads);
        return sinks;
    }
    if (tensor->rank != 1 || tensor->shape[0] != heads)
        cli_fail(CLI_BAD_INPUT, "%s %s: must be [H], one number for each of the %" PRId64 " heads",
                 kl_role_names[role], shape_print(tensor->shape, tensor->rank).text, heads);
    const void *const data = tensor_file_data(&found.file->contents, tensor);
    for (int64_t h = 0; h < heads; h++) {
        sinks[h] = tensor_number_at(data, tensor->dtype, h);
        if (!is_logit(sinks[h]))
            cli_fail(CLI_BAD_INPUT, "%s[%" PRId64 "]=%g: must be a number below infinity", kl_role_names[role], h,
                     (double)sinks[h]);
    }
    return sinks;
}
