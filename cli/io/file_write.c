#include "cli/io/file_write.h"
#include "cli/common/cli.h"

#include <errno.h>
#include <limits.h>
#include <stdlib.h>
#include <sys/stat.h>
#include <unistd.h>

static int fail_to_write(const char *path)
{
    return cli_fail(CLI_WRITE_FAILED, "%s: %s", path, strerror(errno));
}

static int directory_length(const char *path)
{
    const char *const slash = strrchr(path, '/');
    return slash ? (int)(slash + 1 - path) : 0;
}

/* ---- Inputs and outputs ------------------------------------------------------------------------------------- */

/* What a path names, whatever its spelling: an existing file, or a name in an existing folder. */
typedef struct file_identity {
    const char *path, *name;
    bool exists, folder_exists;
    struct stat file, folder;
} file_identity;

static file_identity identify(const char *path)
{
    file_identity identity = {.path = path, .name = path + directory_length(path)};
    char folder[PATH_MAX];
    const int length = snprintf(folder, sizeof folder, "%.*s.", directory_length(path), path);
    identity.exists = stat(path, &identity.file) == 0;
    identity.folder_exists = length < (int)sizeof folder && stat(folder, &identity.folder) == 0;
    return identity;
}

static bool same_inode(const struct stat *left, const struct stat *right)
{
    return left->st_dev == right->st_dev && left->st_ino == right->st_ino;
}

static bool same_file(const file_identity *left, const file_identity *right)
{
    if (left->exists && right->exists && same_inode(&left->file, &right->file))
        return true;
    if (left->folder_exists && right->folder_exists)
        return same_inode(&left->folder, &right->folder) && strcmp(left->name, right->name) == 0;
    return strcmp(left->path, right->path) == 0;
}

static int compare_outputs(const output_file *outputs, const file_identity *files, size_t output_count,
                           size_t input_count)
{
    for (size_t o = 0; o < output_count; o++) {
        for (size_t i = output_count; i < output_count + input_count; i++)
            if (same_file(&files[o], &files[i]))
                return cli_fail(CLI_BAD_INPUT, "%s=%s: must not be an input file", outputs[o].option,
                                outputs[o].path);
        for (size_t other = 0; other < o; other++)
            if (same_file(&files[o], &files[other]))
                return cli_fail(CLI_BAD_INPUT, "%s=%s and %s=%s: must be different files", outputs[other].option,
                                outputs[other].path, outputs[o].option, outputs[o].path);
    }
    return CLI_OK;
}

int file_outputs_check(const output_file *outputs, size_t output_count, const char *const *inputs, size_t input_count)
{
    file_identity *const files = calloc(output_count + input_count + 1, sizeof *files); /* + 1: never 0 */
    if (files == NULL)
        return cli_fail(CLI_NO_MEMORY, "out of memory for %zu file names", output_count + input_count);
    for (size_t o = 0; o < output_count; o++)
        files[o] = identify(outputs[o].path);
    for (size_t i = 0; i < input_count; i++)
        files[output_count + i] = identify(inputs[i]);
    const int exit_code = compare_outputs(outputs, files, output_count, input_count);
    for (size_t o = 0; o < output_count && exit_code == CLI_OK; o++)
        if (o == 0 || !same_inode(&files[o].folder, &files[o - 1].folder))
            file_set_clean(files[o].path);
    free(files);
    return exit_code;
}

/* ---- Writing ------------------------------------------------------------------------------------------------ */

int file_write_check(const char *path)
{
    struct stat status;
    if (lstat(path, &status) == 0 && !S_ISREG(status.st_mode))
        return cli_fail(CLI_WRITE_FAILED, "%s: exists and is not a regular file", path);
    char directory[PATH_MAX];
    const int length = directory_length(path);
    snprintf(directory, sizeof directory, "%.*s.", length, path);
    return access(directory, W_OK) == 0 ? CLI_OK : fail_to_write(path);
}

int file_write_into(file_set *set, const char *path, const bytes *content)
{
    if (content->failed)
        return cli_fail(CLI_NO_MEMORY, "%s: out of memory for its contents", path);
    tensor_error error;
    const int fd = file_set_add(set, path, &error);
    if (fd < 0)
        return cli_fail(CLI_WRITE_FAILED, "%s", error.text);
    for (size_t at = 0; at < content->size;) {
        const ssize_t written = write(fd, content->data + at, content->size - at);
        if (written < 0 && errno != EINTR)
            return fail_to_write(path);
        at += written > 0 ? (size_t)written : 0;
    }
    return file_set_close(set, &error) ? CLI_OK : cli_fail(CLI_WRITE_FAILED, "%s", error.text);
}

int file_write_commit(file_set *set, int exit_code)
{
    tensor_error error;
    if (exit_code == CLI_OK && !file_set_commit(set, &error))
        exit_code = cli_fail(CLI_WRITE_FAILED, "%s", error.text);
    file_set_free(set);
    return exit_code;
}
