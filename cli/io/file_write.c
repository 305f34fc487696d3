#include "cli/io/file_write.h"
#include "cli/common/cli.h"

#include <errno.h>
#include <limits.h>
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

int file_write(const char *path, const bytes *content)
{
    if (content->failed)
        return cli_fail(CLI_NO_MEMORY, "%s: out of memory for its contents", path);
    char temporary[PATH_MAX];
    snprintf(temporary, sizeof temporary, "%.*s.streamkl-%ld.tmp", directory_length(path), path, (long)getpid());
    FILE *const stream = fopen(temporary, "wx");
    if (stream == NULL)
        return fail_to_write(path);
    const bool written = fwrite(content->data, 1, content->size, stream) == content->size;
    const bool closed = fclose(stream) == 0;
    if (written && closed && rename(temporary, path) == 0)
        return CLI_OK;
    const int exit_code = fail_to_write(path);
    remove(temporary);
    return exit_code;
}
