#include "cli/io/file_write.h"
#include "cli/common/cli.h"

#include <errno.h>
#include <limits.h>
#include <signal.h>
#include <stdlib.h>
#include <sys/stat.h>
#include <unistd.h>

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

/* The folder must be writable, for the temporary file and the output. */
static void check_writable(const output_file *output)
{
    struct stat status;
    char folder[PATH_MAX];
    if (strlen(output->path) >= sizeof folder)
        cli_fail(CLI_BAD_INPUT, "%s=%.60s...: must be shorter than %d bytes", output->option, output->path, PATH_MAX);
    if (lstat(output->path, &status) == 0 && !S_ISREG(status.st_mode))
        cli_fail(CLI_BAD_INPUT, "%s=%s: must be a regular file or not exist", output->option, output->path);
    snprintf(folder, sizeof folder, "%.*s.", directory_length(output->path), output->path);
    if (access(folder, W_OK | X_OK) != 0)
        cli_fail(CLI_WRITE_FAILED, "%s=%s: cannot write there: %s", output->option, output->path, strerror(errno));
}

void file_outputs_check(const output_file *outputs, size_t output_count, const char *const *inputs,
                        size_t input_count)
{
    const size_t count = output_count + input_count;
    file_identity *const files = cli_allocate_zeros(count, sizeof *files, "the names of the files");
    for (size_t f = 0; f < count; f++)
        files[f] = identify(f < output_count ? outputs[f].path : inputs[f - output_count]);
    for (size_t o = 0; o < output_count; o++) {
        for (size_t i = output_count; i < count; i++)
            if (same_file(&files[o], &files[i]))
                cli_fail(CLI_BAD_INPUT, "%s=%s: must not be an input file", outputs[o].option, outputs[o].path);
        for (size_t other = 0; other < o; other++)
            if (same_file(&files[o], &files[other]))
                cli_fail(CLI_BAD_INPUT, "%s=%s and %s=%s: must be different files", outputs[other].option,
                         outputs[other].path, outputs[o].option, outputs[o].path);
        check_writable(&outputs[o]);
    }
    for (size_t o = 0; o < output_count; o++)
        if (o == 0 || !same_inode(&files[o].folder, &files[o - 1].folder))
            file_set_clean(files[o].path);
    free(files);
}

/* ---- Writing ------------------------------------------------------------------------------------------------ */

static file_set outputs_set;
static bool prepared;
static sigset_t signals_before;

static void remove_temporaries(void)
{
    file_set_free(&outputs_set);
}

/* Blocks interrupts until the commit: otherwise a temporary file could remain. */
static void prepare(void)
{
    if (prepared)
        return;
    prepared = true;
    atexit(remove_temporaries);
    sigset_t interrupts;
    sigemptyset(&interrupts);
    sigaddset(&interrupts, SIGINT);
    sigaddset(&interrupts, SIGTERM);
    sigaddset(&interrupts, SIGHUP);
    sigprocmask(SIG_BLOCK, &interrupts, &signals_before);
}

static struct {
    char *data;
    size_t size;
} content; /* of the stream that is open */

FILE *file_write_begin(void)
{
    FILE *const stream = open_memstream(&content.data, &content.size);
    if (stream == NULL)
        cli_fail(CLI_NO_MEMORY, "out of memory for a file");
    return stream;
}

void file_write_end(FILE *stream, const char *path)
{
    const bool failed = ferror(stream);
    if (fclose(stream) != 0 || failed)
        cli_fail(CLI_NO_MEMORY, "%s: out of memory for its contents", path);
    prepare();
    tensor_error error;
    const int fd = file_set_add(&outputs_set, path, &error);
    for (size_t at = 0; fd >= 0 && at < content.size;) {
        const ssize_t written = write(fd, content.data + at, content.size - at);
        if (written < 0 && errno != EINTR)
            cli_fail(CLI_WRITE_FAILED, "%s: %s", path, strerror(errno));
        at += written > 0 ? (size_t)written : 0;
    }
    if (fd < 0 || !file_set_close(&outputs_set, &error))
        cli_fail(CLI_WRITE_FAILED, "%s", error.text);
    free(content.data);
}

void file_write_tensors(const char *path, const output_tensor *tensors, size_t tensor_count,
                        const output_metadata *metadata, size_t metadata_count)
{
    tensor_error error;
    prepare();
    if (!tensor_write_into(&outputs_set, path, tensors, tensor_count, metadata, metadata_count, &error))
        cli_fail(CLI_WRITE_FAILED, "%s", error.text);
}

void file_write_commit(void)
{
    tensor_error error;
    if (!prepared)
        return; /* the command writes no file */
    if (!file_set_commit(&outputs_set, &error))
        cli_fail(CLI_WRITE_FAILED, "%s", error.text);
    file_set_free(&outputs_set);
    sigprocmask(SIG_SETMASK, &signals_before, NULL);
}
