/* The files of a `streamkl kl` command line, the tensors for each role, and lengths, row bounds and sinks: numbers on
 * the command line or in a file. */
#include "cli/common/cli.h"
#include "cli/kl/kl.h"

#include <ctype.h>
#include <inttypes.h>
#include <math.h>
#include <stdlib.h>
#include <unistd.h>

const char *const kl_role_names[ROLE_COUNT] = {
    [ROLE_Q_T] = "q_t",
    [ROLE_K_T] = "k_t",
    [ROLE_Q_S] = "q_s",
    [ROLE_K_S] = "k_s",
    [ROLE_LSE_T] = "lse_t",
    [ROLE_KEY_LENGTHS] = "key_lengths",
    [ROLE_CU_SEQLENS_Q] = "cu_seqlens_q",
    [ROLE_CU_SEQLENS_K] = "cu_seqlens_k",
    [ROLE_W_S] = "w_s",
    [ROLE_INDICES] = "indices",
    [ROLE_KEY_BEGIN] = "key_begin",
    [ROLE_KEY_END] = "key_end",
    [ROLE_SINK_T] = "sink_t",
    [ROLE_SINK_S] = "sink_s",
};

enum { ROLE_ANY = -1 };

/* ---- Arguments ---------------------------------------------------------------------------------------------- */

/* The role of "ROLE=FILE"; ROLE_ANY for a path, which may contain a '=' too. */
static int role_of_argument(const char *argument)
{
    const char *const equals = strchr(argument, '=');
    for (int role = 0; equals && role < ROLE_COUNT; role++) {
        const size_t length = strlen(kl_role_names[role]);
        if (length == (size_t)(equals - argument) && strncmp(argument, kl_role_names[role], length) == 0)
            return role;
    }
    return ROLE_ANY;
}

static const char *path_of_argument(const char *argument)
{
    return role_of_argument(argument) == ROLE_ANY ? argument : strchr(argument, '=') + 1;
}

static void open_argument(kl_file *file, const char *argument)
{
    file->role = role_of_argument(argument);
    file->path = path_of_argument(argument);
    const char *const equals = strchr(argument, '=');
    if (file->role == ROLE_ANY && equals && access(argument, F_OK) != 0)
        cli_fail(CLI_BAD_INPUT,
                 "%s: '%.*s' is not a role; must be q_t, k_t, q_s, k_s, lse_t, key_lengths, cu_seqlens_q, "
                 "cu_seqlens_k, w_s, indices, key_begin, key_end, sink_t or sink_s",
                 argument, (int)(equals - argument), argument);
    tensor_file_open(&file->contents, file->path);
    if (file->role == ROLE_ANY && npy_recognize(&file->contents))
        cli_fail(CLI_BAD_INPUT, "%s: an array in an .npy file has no name; give its role, for example q_t=%s",
                 file->path, file->path);
}

kl_files kl_files_open(char *const *arguments, size_t count)
{
    kl_files files = {cli_allocate_zeros(count, sizeof *files.files, "the list of files"), count};
    for (size_t f = 0; f < count; f++)
        open_argument(&files.files[f], arguments[f]);
    return files;
}

void kl_files_close(kl_files *files)
{
    for (size_t f = 0; f < files->count; f++)
        tensor_file_close(&files->files[f].contents);
    free(files->files);
}

void kl_files_unchanged(const kl_files *files)
{
    for (size_t f = 0; f < files->count; f++)
        mapped_file_check(&files->files[f].contents.mapping, files->files[f].path);
}

void kl_outputs_check(const kl_request *request, const output_file *outputs, size_t count)
{
    const char **const inputs = cli_allocate_zeros(request->file_count, sizeof *inputs, "the list of files");
    for (size_t f = 0; f < request->file_count; f++)
        inputs[f] = path_of_argument(request->files[f]);
    file_outputs_check(outputs, count, inputs, request->file_count);
    free(inputs);
}

/* ---- Roles -------------------------------------------------------------------------------------------------- */

static bool may_contain(const kl_file *file, kl_role role)
{
    return file->role == ROLE_ANY || file->role == (int)role;
}

/* If a file is given as ROLE=FILE and has a single tensor, the name of the tensor does not matter. */
static const stored_tensor *tensor_for_role(const kl_file *file, kl_role role, const char *name)
{
    if (!may_contain(file, role))
        return NULL;
    const bool single = file->role == (int)role && file->contents.tensor_count == 1;
    return single ? file->contents.tensors : tensor_file_find(&file->contents, name);
}

/* "--q-t" for "q_t". */
static cli_text option_for_role(kl_role role)
{
    cli_text option;
    snprintf(option.text, sizeof option.text, "--%s", kl_role_names[role]);
    for (char *letter = option.text; *letter; letter++)
        *letter = *letter == '_' ? '-' : *letter;
    return option;
}

/* The message is about the last file that could contain the tensor. */
_Noreturn static void fail_not_found(const kl_files *files, kl_role role, const char *name)
{
    const cli_text option = option_for_role(role);
    for (size_t f = files->count; f-- > 0;)
        if (may_contain(&files->files[f], role))
            file_refuse(files->files[f].path,
                        TENSOR_PREFIX "not found among %zu: %s (use %s NAME if %s has another name)", name,
                        files->files[f].contents.tensor_count, tensor_file_names(&files->files[f].contents).text,
                        option.text, kl_role_names[role]);
    cli_fail(CLI_BAD_INPUT, "no file was given (use %s NAME if %s has another name)", option.text,
             kl_role_names[role]);
}

kl_found kl_files_find(const kl_files *files, kl_role role, const char *name, bool required)
{
    kl_found found = {NULL, NULL};
    const char *const sought = name ? name : kl_role_names[role];
    for (size_t f = 0; f < files->count; f++) {
        kl_file *const file = &files->files[f];
        const stored_tensor *const tensor = tensor_for_role(file, role, sought);
        if (tensor && found.tensor)
            cli_fail(CLI_BAD_INPUT, "%s: found in %s and in %s; must be in only one", kl_role_names[role],
                     found.file->path, file->path);
        if (tensor)
            found = (kl_found){file, tensor};
    }
    if (found.tensor == NULL && (required || name))
        fail_not_found(files, role, sought);
    return found;
}

/* ---- Lists -------------------------------------------------------------------------------------------------- */

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
