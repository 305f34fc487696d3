/* Sequence lengths: integers on the command line or in a file. */
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

static int lengths_from_tensor(kl_role role, const kl_found *found, int32_t **values, int64_t *count)
{
    if (found->tensor->rank != 1)
        return cli_fail(CLI_BAD_INPUT, "%s: %s has %d dimensions; must have 1", found->file->path,
                        kl_role_names[role], found->tensor->rank);
    return kl_integers_load(role, found, values, count);
}

int kl_lengths_load(const kl_files *files, kl_role role, const char *text, int32_t **values, int64_t *count)
{
    *values = NULL;
    *count = 0;
    const bool is_list = text && (isdigit((unsigned char)text[0]) || text[0] == '-');
    if (is_list)
        return lengths_from_list(role, text, values, count);
    kl_found found;
    const bool required = text != NULL;
    const int exit_code = kl_files_find(files, role, text ? text : kl_role_names[role], required, &found);
    if (exit_code != CLI_OK || found.tensor == NULL)
        return exit_code;
    return lengths_from_tensor(role, &found, values, count);
}
