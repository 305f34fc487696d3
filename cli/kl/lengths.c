/* Sequence lengths and row bounds: integers on the command line or in a file. */
#include "cli/common/cli.h"
#include "cli/kl/kl.h"

#include <ctype.h>
#include <errno.h>
#include <inttypes.h>
#include <stdlib.h>

static int32_t *allocate_lengths(int64_t count)
{
    int32_t *const values = malloc((size_t)(count > 0 ? count : 1) * sizeof *values);
    if (values == NULL)
        cli_fail(CLI_NO_MEMORY, "out of memory for %" PRId64 " lengths", count);
    return values;
}

static int64_t entries_in_list(const char *text)
{
    int64_t entries = 1;
    for (; *text; text++)
        entries += *text == ',';
    return entries;
}

static int lengths_from_list(kl_role role, const char *text, int32_t **values, int64_t *count)
{
    const int64_t entries = entries_in_list(text);
    *values = allocate_lengths(entries);
    if (*values == NULL)
        return CLI_NO_MEMORY;
    const char *entry = text;
    for (int64_t i = 0; i < entries; i++) {
        char *end;
        errno = 0;
        const long value = strtol(entry, &end, 10);
        const char separator = i + 1 < entries ? ',' : '\0';
        if (end == entry || *end != separator || errno || value < INT32_MIN || value > INT32_MAX)
            return cli_fail(CLI_BAD_INPUT, "%s=%s: must be integers separated by commas, or the name of a tensor",
                            kl_role_names[role], text);
        (*values)[i] = (int32_t)value;
        entry = end + 1;
    }
    *count = entries;
    return CLI_OK;
}

int kl_integers_load(kl_role role, const kl_found *found, int32_t **values, int64_t *count)
{
    const stored_tensor *const tensor = found->tensor;
    const bool wide = strcmp(tensor->dtype_name, "I64") == 0;
    if (!wide && strcmp(tensor->dtype_name, "I32") != 0)
        return cli_fail(CLI_BAD_INPUT, "%s: %s has dtype %s; must be I32 or I64", found->file->path,
                        kl_role_names[role], tensor->dtype_name);
    const int64_t entries = (int64_t)(tensor->size / (wide ? 8 : 4));
    *values = allocate_lengths(entries);
    if (*values == NULL)
        return CLI_NO_MEMORY;
    for (int64_t i = 0; i < entries; i++) {
        int64_t value = 0; /* the bytes may be misaligned */
        if (wide) {
            memcpy(&value, tensor->bytes + i * 8, 8);
        } else {
            int32_t narrow;
            memcpy(&narrow, tensor->bytes + i * 4, 4);
            value = narrow;
        }
        if (value < INT32_MIN || value > INT32_MAX)
            return cli_fail(CLI_BAD_INPUT, "%s: %s[%" PRId64 "]=%" PRId64 ": must fit into 32 bits",
                            found->file->path, kl_role_names[role], i, value);
        (*values)[i] = (int32_t)value;
    }
    *count = entries;
    return CLI_OK;
}

/* The list, or else the tensor in *found. */
static int list_or_tensor(const kl_files *files, kl_role role, const char *text, kl_found *found, int32_t **values,
                          int64_t *count)
{
    *found = (kl_found){NULL, NULL};
    *values = NULL;
    *count = 0;
    const bool is_list = text && (isdigit((unsigned char)text[0]) || text[0] == '-');
    if (is_list)
        return lengths_from_list(role, text, values, count);
    const bool required = text != NULL;
    return kl_files_find(files, role, text ? text : kl_role_names[role], required, found);
}

int kl_lengths_load(const kl_files *files, kl_role role, const char *text, int32_t **values, int64_t *count)
{
    kl_found found;
    const int exit_code = list_or_tensor(files, role, text, &found, values, count);
    if (exit_code != CLI_OK || found.tensor == NULL)
        return exit_code;
    if (found.tensor->rank != 1)
        return cli_fail(CLI_BAD_INPUT, "%s: %s has %d dimensions; must have 1", found.file->path, kl_role_names[role],
                        found.tensor->rank);
    return kl_integers_load(role, &found, values, count);
}

int kl_bounds_load(const kl_files *files, kl_role role, const char *text, int64_t batch, int64_t length,
                   int32_t **values)
{
    kl_found found;
    int64_t count;
    const int exit_code = list_or_tensor(files, role, text, &found, values, &count);
    if (exit_code != CLI_OK || (found.tensor == NULL && *values == NULL))
        return exit_code;
    if (found.tensor == NULL)
        return count == batch * length
                   ? CLI_OK
                   : cli_fail(CLI_BAD_INPUT, "%s has %" PRId64 " entries: must be one per query, %" PRId64,
                              kl_role_names[role], count, batch * length);
    const int64_t *const shape = found.tensor->shape;
    const int rank = found.tensor->rank;
    const bool fits =
        (rank == 2 && shape[0] == batch && shape[1] == length) || (rank == 1 && batch == 1 && shape[0] == length);
    if (!fits)
        return cli_fail(CLI_BAD_INPUT, "%s %s: must be [B, N] of the queries, [%" PRId64 ", %" PRId64 "]",
                        kl_role_names[role], shape_print(shape, rank).text, batch, length);
    return kl_integers_load(role, &found, values, &count);
}
