#include "cli/io/file_write.h"
#include "cli/common/cli.h"

#include <dirent.h>
#include <errno.h>
#include <fcntl.h>
#include <limits.h>
#include <stdlib.h>
#include <sys/file.h>
#include <sys/random.h>
#include <time.h>
#include <unistd.h>

#define NAME_BEGIN ".streamkl-"

static const char temporary_begin[] = NAME_BEGIN, temporary_end[] = ".tmp";
enum {
    NAME_SIZE = 64, /* a temporary name fits, with room to spare */
    LOCKS_MAX = 64  /* processes have a limit of open files */
};
static const time_t stale_age = 3600;

/* A temporary file. */
typedef struct new_file {
    struct new_file *next;
    int index;                      /* in the list */
    int fd;                         /* open while it is written */
    int lock;                       /* a second descriptor, which keeps the lock after fd is closed; -1: none */
    bool existed, saved, committed; /* `path` existed; `backup` is a link to it; `path` is the new file */
    char *path, *temporary, *backup;
    char names[];
} new_file;

enum { INTERRUPTS = 3 };
static const int interrupts[INTERRUPTS] = {SIGINT, SIGTERM, SIGHUP};
static volatile sig_atomic_t interrupted[NSIG];

static struct {
    new_file *first, *last;
    bool prepared;
    struct sigaction before[INTERRUPTS];
} outputs;

/* ---- Names -------------------------------------------------------------------------------------------------- */

static int directory_length(const char *path)
{
    const char *const slash = strrchr(path, '/');
    return slash ? (int)(slash + 1 - path) : 0;
}

/* "./." for "./out", "." for "out"; cut if it is too long. */
static const char *folder_of(const char *path)
{
    static char folder[PATH_MAX];
    snprintf(folder, sizeof folder, "%.*s.", directory_length(path), path);
    return folder;
}

/* Unique among processes and machines, also where every process has the same id. */
static unsigned long long unique_number(void)
{
    unsigned long long number = 0;
    if (getrandom(&number, sizeof number, GRND_NONBLOCK) == (ssize_t)sizeof number)
        return number;
    struct timespec now;
    clock_gettime(CLOCK_REALTIME, &now);
    return (unsigned long long)now.tv_sec << 32 ^ (unsigned long long)now.tv_nsec << 8 ^ (unsigned long long)getpid();
}

static void make_temporary_name(char *name, const char *path)
{
    const int length = directory_length(path);
    snprintf(name, (size_t)length + NAME_SIZE, "%.*s%s%016llx%s", length, path, temporary_begin, unique_number(),
             temporary_end);
}

/* Contains the time: a link has the times of its file, and cannot be locked without it. */
static void make_backup_name(char *name, const char *path)
{
    const int length = directory_length(path);
    snprintf(name, (size_t)length + NAME_SIZE, "%.*s" NAME_BEGIN "%llx-%016llx.old", length, path,
             (unsigned long long)time(NULL), unique_number());
}

/* The time in the name of a backup; 0: the name is that of another file. */
static time_t backup_time(const char *name)
{
    unsigned long long seconds, number;
    int end = 0;
    const int found = sscanf(name, NAME_BEGIN "%llx-%16llx.old%n", &seconds, &number, &end);
    return found == 2 && end > 0 && name[end] == '\0' ? (time_t)seconds : 0;
}

static bool is_temporary(const char *name)
{
    const size_t length = strlen(name), begin = sizeof temporary_begin - 1, end = sizeof temporary_end - 1;
    return length > begin + end && strncmp(name, temporary_begin, begin) == 0 &&
           strcmp(name + length - end, temporary_end) == 0;
}

/* ---- Files that a killed process left ----------------------------------------------------------------------- */

/* A writer holds the lock, or has written recently. Where locks do not work, nothing is removed. */
static bool is_stale(int fd)
{
    struct stat status;
    return fstat(fd, &status) == 0 && S_ISREG(status.st_mode) && status.st_mtime + stale_age < time(NULL) &&
           flock(fd, LOCK_EX | LOCK_NB) == 0;
}

/* A commit takes milliseconds. The only name of a file stays: an old file that could not be restored has no other. */
static bool is_stale_backup(int folder, const char *name)
{
    const time_t saved = backup_time(name);
    struct stat status;
    return saved > 0 && time(NULL) - saved > stale_age && fstatat(folder, name, &status, AT_SYMLINK_NOFOLLOW) == 0 &&
           status.st_nlink > 1;
}

static void remove_if_stale(int folder, const char *name)
{
    if (is_stale_backup(folder, name))
        unlinkat(folder, name, 0);
    if (!is_temporary(name))
        return;
    const int fd = openat(folder, name, O_RDONLY | O_NOFOLLOW | O_NONBLOCK | O_CLOEXEC);
    if (fd < 0)
        return;
    if (is_stale(fd))
        unlinkat(folder, name, 0); /* before the lock is given up, see lock_temporary() */
    close(fd);
}

static void clean_folder_of(const char *path)
{
    DIR *const entries = opendir(folder_of(path));
    if (entries == NULL)
        return;
    for (const struct dirent *entry; (entry = readdir(entries));)
        remove_if_stale(dirfd(entries), entry->d_name);
    closedir(entries);
}

/* ---- Inputs and outputs ------------------------------------------------------------------------------------- */

/* What a path names, whatever its spelling: an existing file, or a name in an existing folder. What does not exist
 * has no inode. */
typedef struct file_identity {
    const char *path, *name;
    struct stat file, folder;
} file_identity;

static file_identity identify(const char *path)
{
    file_identity identity = {.path = path, .name = path + directory_length(path)};
    (void)stat(path, &identity.file);
    (void)stat(folder_of(path), &identity.folder);
    return identity;
}

static bool same_inode(const struct stat *left, const struct stat *right)
{
    return left->st_ino != 0 && left->st_ino == right->st_ino && left->st_dev == right->st_dev;
}

static bool same_file(const file_identity *left, const file_identity *right)
{
    return same_inode(&left->file, &right->file) || strcmp(left->path, right->path) == 0 ||
           (same_inode(&left->folder, &right->folder) && strcmp(left->name, right->name) == 0);
}

/* The folder must be writable, for the temporary file and the output. */
static void check_writable(const output_file *output)
{
    struct stat status;
    if (strlen(output->path) >= PATH_MAX)
        cli_fail(CLI_BAD_INPUT, "%s=%.60s...: must be shorter than %d bytes", output->option, output->path, PATH_MAX);
    if (lstat(output->path, &status) == 0 && !S_ISREG(status.st_mode))
        cli_fail(CLI_BAD_INPUT, "%s=%s: must be a regular file or not exist", output->option, output->path);
    if (access(folder_of(output->path), W_OK | X_OK) != 0)
        cli_fail(CLI_WRITE_FAILED, "%s=%s: cannot write there: %s", output->option, output->path, strerror(errno));
}

void file_outputs_check(const output_file *wanted, size_t output_count, const char *const *inputs, size_t input_count)
{
    const size_t count = output_count + input_count;
    file_identity *const files = cli_allocate_zeros(count, sizeof *files, "the names of the files");
    for (size_t f = 0; f < count; f++)
        files[f] = identify(f < output_count ? wanted[f].path : inputs[f - output_count]);
    for (size_t o = 0; o < output_count; o++) {
        for (size_t i = output_count; i < count; i++)
            if (same_file(&files[o], &files[i]))
                cli_fail(CLI_BAD_INPUT, "%s=%s: must not be an input file", wanted[o].option, wanted[o].path);
        for (size_t other = 0; other < o; other++)
            if (same_file(&files[o], &files[other]))
                cli_fail(CLI_BAD_INPUT, "%s=%s and %s=%s: must be different files", wanted[other].option,
                         wanted[other].path, wanted[o].option, wanted[o].path);
        check_writable(&wanted[o]);
    }
    for (size_t o = 0; o < output_count; o++)
        if (o == 0 || !same_inode(&files[o].folder, &files[o - 1].folder))
            clean_folder_of(files[o].path);
    free(files);
}

/* ---- Writing ------------------------------------------------------------------------------------------------ */

/* False: file_outputs_check() of another process was faster, and removes the file. */
static bool lock_temporary(int fd)
{
    return flock(fd, LOCK_EX | LOCK_NB) == 0 || errno != EWOULDBLOCK;
}

/* Unlike mkstemp(), respects the umask. */
static bool create_temporary(new_file *file)
{
    const int attempt_max = 100;
    for (int attempt = 0; attempt < attempt_max; attempt++) {
        make_temporary_name(file->temporary, file->path);
        file->fd = open(file->temporary, O_WRONLY | O_CREAT | O_EXCL | O_CLOEXEC, 0666);
        if (file->fd < 0 && errno != EEXIST)
            return false;
        if (file->fd < 0)
            continue;
        if (lock_temporary(file->fd)) {
            file->lock = file->index < LOCKS_MAX ? fcntl(file->fd, F_DUPFD_CLOEXEC, 0) : -1;
            return true;
        }
        close(file->fd);
        errno = EEXIST;
    }
    return false;
}

static void remember(int number)
{
    interrupted[number] = 1;
}

/* Holds interrupts back until the commit: otherwise a temporary file could remain. Blocked ones would reach the
 * threads of the library. */
static void prepare(void)
{
    if (outputs.prepared)
        return;
    outputs.prepared = true;
    atexit(file_write_abandon);
    const struct sigaction action = {.sa_handler = remember, .sa_flags = SA_RESTART};
    for (int n = 0; n < INTERRUPTS; n++)
        sigaction(interrupts[n], &action, &outputs.before[n]);
}

static void deliver_interrupts(void)
{
    for (int n = 0; n < INTERRUPTS; n++)
        sigaction(interrupts[n], &outputs.before[n], NULL);
    for (int n = 0; n < INTERRUPTS; n++)
        if (interrupted[interrupts[n]])
            raise(interrupts[n]);
}

/* rename() would replace a device or a link by a file: as root, even /dev/null. */
static void check_target(const char *path)
{
    struct stat status;
    const bool exists = lstat(path, &status) == 0;
    if (exists ? S_ISREG(status.st_mode) : errno == ENOENT)
        return;
    const char *const reason = !exists                   ? strerror(errno)
                               : S_ISDIR(status.st_mode) ? strerror(EISDIR)
                                                         : "exists and is not a regular file";
    cli_fail(CLI_WRITE_FAILED, "%s: cannot write: %s", path, reason);
}

/* A new temporary file, the last of the list. */
static new_file *add_file(const char *path)
{
    prepare();
    check_target(path);
    const size_t path_size = strlen(path) + 1, name_size = (size_t)directory_length(path) + NAME_SIZE;
    new_file *const file = cli_allocate_zeros(1, sizeof *file + path_size + 2 * name_size, path);
    file->lock = -1;
    file->path = file->names;
    file->temporary = file->path + path_size;
    file->backup = file->temporary + name_size;
    file->index = outputs.last ? outputs.last->index + 1 : 0;
    memcpy(file->path, path, path_size);
    *(outputs.last ? &outputs.last->next : &outputs.first) = file;
    outputs.last = file;
    if (!create_temporary(file)) {
        file->temporary[0] = '\0'; /* the name is that of another file */
        cli_fail(CLI_WRITE_FAILED, "%s: cannot create a temporary file next to it: %s", path, strerror(errno));
    }
    return file;
}

/* On failure returns false and sets errno. */
static bool write_all(int fd, file_part part)
{
    const unsigned char *next = part.data;
    while (part.size > 0) {
        const ssize_t written = write(fd, next, part.size);
        if (written < 0 && errno == EINTR)
            continue;
        if (written < 0)
            return false;
        next += written;
        part.size -= (size_t)written;
    }
    return true;
}

void file_write_parts(const char *path, const file_part *parts, size_t count)
{
    new_file *const file = add_file(path);
    bool written = true;
    for (size_t p = 0; p < count && written; p++)
        written = write_all(file->fd, parts[p]);
    written = written && fsync(file->fd) == 0;
    const int reason = errno;
    const bool closed = close(file->fd) == 0; /* network file systems report a full disk here */
    if (!written || !closed)
        cli_fail(CLI_WRITE_FAILED, "%s: cannot write: %s", path, strerror(written ? errno : reason));
}

/* The text of the open stream. open_memstream loses what it has no memory for, without an error. */
static struct {
    char *data;
    size_t size;
    bool failed;
} content;

static ssize_t append(void *cookie, const char *text, size_t size)
{
    (void)cookie;
    char *const data = realloc(content.data, content.size + size);
    if (data == NULL) {
        content.failed = true;
        return 0;
    }
    memcpy(data + content.size, text, size);
    content.data = data;
    content.size += size;
    return (ssize_t)size;
}

FILE *file_write_begin(void)
{
    FILE *const stream = fopencookie(NULL, "w", (cookie_io_functions_t){.write = append});
    if (stream == NULL)
        cli_fail(CLI_NO_MEMORY, "out of memory for a file");
    return stream;
}

void file_write_end(FILE *stream, const char *path)
{
    if (fclose(stream) != 0 || content.failed)
        cli_fail(CLI_NO_MEMORY, "%s: out of memory for its contents", path);
    file_write_parts(path, &(file_part){content.data, content.size}, 1);
    free(content.data);
    content.data = NULL;
    content.size = 0;
}

/* ---- Committing --------------------------------------------------------------------------------------------- */

/* A second name for the old file. File systems without links have none: then an old file cannot be restored. */
static void save_old(new_file *file)
{
    make_backup_name(file->backup, file->path);
    file->saved = link(file->path, file->backup) == 0;
    file->existed = file->saved || errno != ENOENT;
}

/* False: the old file cannot get its name back, but keeps that of its backup. */
static bool restore(new_file *file)
{
    if (!file->committed)
        return true;
    if (!file->saved) {
        if (!file->existed)
            unlink(file->path); /* a part of the files would look like success */
        return true;
    }
    file->saved = false; /* file_write_abandon() must not remove the only name of the old file */
    return rename(file->backup, file->path) == 0;
}

/* Restores all old files. The message names those that cannot be restored, and why `file` could not be renamed. */
_Noreturn static void roll_back(const new_file *failed)
{
    char cause[1536];
    snprintf(cause, sizeof cause, "%.300s: cannot rename the temporary file: %s", failed->path, strerror(errno));
    for (new_file *file = outputs.first; file; file = file->next) {
        char before[sizeof cause];
        memcpy(before, cause, sizeof before);
        if (!restore(file))
            snprintf(cause, sizeof cause,
                     "%.300s: cannot restore the old file, which is now %s next to it: %s; %.900s", file->path,
                     file->backup + directory_length(file->backup), strerror(errno), before);
    }
    cli_fail(CLI_WRITE_FAILED, "%s", cause);
}

void file_write_commit(void)
{
    if (!outputs.prepared)
        return; /* the command writes no file */
    const bool several = outputs.first != outputs.last;
    for (new_file *file = outputs.first; file; file = file->next) {
        if (several)
            save_old(file);
        file->committed = rename(file->temporary, file->path) == 0;
        if (!file->committed)
            roll_back(file);
    }
    file_write_abandon();
    deliver_interrupts();
}

void file_write_abandon(void)
{
    for (new_file *file = outputs.first; file;) {
        new_file *const next = file->next;
        if (!file->committed)
            unlink(file->temporary);
        if (file->saved)
            unlink(file->backup);
        if (file->lock >= 0)
            close(file->lock);
        free(file);
        file = next;
    }
    outputs.first = outputs.last = NULL;
}
