#ifndef _GNU_SOURCE
#define _GNU_SOURCE /* flock(), getrandom() */
#endif

#include "cli/io/file_set.h"

#include <dirent.h>
#include <errno.h>
#include <fcntl.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/file.h>
#include <sys/random.h>
#include <sys/stat.h>
#include <time.h>
#include <unistd.h>

#define NAME_BEGIN ".streamkl-"

static const char temporary_begin[] = NAME_BEGIN, temporary_end[] = ".tmp";
enum {
    NAME_SIZE = 64, /* of a temporary name, with room to spare */
    LOCKS_MAX = 64  /* of a set: processes have a limit of open files */
};
static const time_t stale_age = 3600;

typedef struct new_file {
    struct new_file *next;
    int index;                      /* in its set */
    int fd;                         /* -1: closed */
    int lock;                       /* a second descriptor, which keeps the lock after fd is closed; -1: none */
    bool existed, saved, committed; /* `path` existed; `backup` is a link to it; `path` is the new file */
    char *path, *temporary, *backup;
    char names[];
} new_file;

/* ---- Names -------------------------------------------------------------------------------------------------- */

static int directory_length(const char *path)
{
    const char *const slash = strrchr(path, '/');
    return slash ? (int)(slash + 1 - path) : 0;
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

void file_set_clean(const char *path)
{
    const int length = directory_length(path);
    char *const folder = malloc((size_t)length + sizeof ".");
    if (folder == NULL)
        return;
    snprintf(folder, (size_t)length + sizeof ".", "%.*s.", length, path);
    DIR *const entries = opendir(folder);
    free(folder);
    if (entries == NULL)
        return;
    for (const struct dirent *entry; (entry = readdir(entries));)
        remove_if_stale(dirfd(entries), entry->d_name);
    closedir(entries);
}

/* ---- Adding ------------------------------------------------------------------------------------------------- */

/* rename() would replace a device or a link by a file: as root, even /dev/null. */
static bool check_target(const char *path, tensor_error *error)
{
    struct stat status;
    if (lstat(path, &status) != 0)
        return errno == ENOENT || tensor_refuse(error, path, "cannot write: %s", strerror(errno));
    if (S_ISDIR(status.st_mode))
        return tensor_refuse(error, path, "cannot write: %s", strerror(EISDIR));
    if (!S_ISREG(status.st_mode))
        return tensor_refuse(error, path, "cannot write: exists and is not a regular file");
    return true;
}

/* False: file_set_clean() of another process was faster, and removes the file. */
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
        file->fd = -1;
        errno = EEXIST;
    }
    return false;
}

static new_file *allocate_file(const char *path)
{
    const size_t path_size = strlen(path) + 1, name_size = (size_t)directory_length(path) + NAME_SIZE;
    new_file *const file = calloc(1, sizeof *file + path_size + 2 * name_size);
    if (file == NULL)
        return NULL;
    file->fd = file->lock = -1;
    file->path = file->names;
    file->temporary = file->path + path_size;
    file->backup = file->temporary + name_size;
    memcpy(file->path, path, path_size);
    return file;
}

int file_set_add(file_set *set, const char *path, tensor_error *error)
{
    if (!check_target(path, error))
        return -1;
    new_file *const file = allocate_file(path);
    if (file == NULL) {
        tensor_refuse(error, path, "out of memory");
        return -1;
    }
    file->index = set->last ? set->last->index + 1 : 0;
    if (!create_temporary(file)) {
        tensor_refuse(error, path, "cannot create a temporary file next to it: %s", strerror(errno));
        free(file);
        return -1;
    }
    if (set->last)
        set->last->next = file;
    else
        set->first = file;
    set->last = file;
    return file->fd;
}

bool file_set_close(file_set *set, tensor_error *error)
{
    new_file *const file = set->last;
    const bool closed = close(file->fd) == 0;
    file->fd = -1;
    return closed || tensor_refuse(error, file->path, "cannot write: %s", strerror(errno));
}

/* ---- Committing --------------------------------------------------------------------------------------------- */

/* A second name for the old file. File systems without links have none: then an old file cannot be restored. */
static void save_old(new_file *file)
{
    make_backup_name(file->backup, file->path);
    file->saved = link(file->path, file->backup) == 0;
    file->existed = file->saved || errno != ENOENT;
}

/* Adds to the message of `error` where the old file is, if it cannot get its name back. */
static void restore(new_file *file, tensor_error *error)
{
    if (file->committed && file->saved) {
        file->saved = false; /* file_set_free() must not remove the only name of the old file */
        const tensor_error cause = *error;
        if (rename(file->backup, file->path) != 0)
            tensor_refuse(error, file->path, "cannot restore the old file, which is now %s next to it: %s; %s",
                          file->backup + directory_length(file->backup), strerror(errno), cause.text);
    } else if (file->committed && !file->existed)
        unlink(file->path); /* a part of the files would look like success */
}

bool file_set_commit(file_set *set, tensor_error *error)
{
    const bool several = set->first != set->last;
    bool committed = true;
    for (new_file *file = set->first; file && committed; file = file->next) {
        if (several)
            save_old(file);
        committed = file->committed = rename(file->temporary, file->path) == 0;
        if (!committed)
            tensor_refuse(error, file->path, "cannot rename the temporary file: %s", strerror(errno));
    }
    for (new_file *file = set->first; file && !committed; file = file->next)
        restore(file, error);
    return committed;
}

void file_set_free(file_set *set)
{
    for (new_file *file = set->first; file;) {
        new_file *const next = file->next;
        if (file->fd >= 0)
            close(file->fd);
        if (!file->committed)
            unlink(file->temporary);
        if (file->saved)
            unlink(file->backup);
        if (file->lock >= 0)
            close(file->lock);
        free(file);
        file = next;
    }
    *set = (file_set){NULL, NULL};
}
