#include "cli/io/mapped_file.h"
#include "cli/common/cli.h"

#include <errno.h>
#include <fcntl.h>
#include <stdarg.h>
#include <stdio.h>
#include <sys/mman.h>
#include <unistd.h>

void file_refuse(const char *path, const char *format, ...)
{
    const size_t shown_max = 300, length = strlen(path); /* the end of a long path says more than its beginning */
    const bool cut = length > shown_max;
    char text[1024];
    va_list arguments;
    va_start(arguments, format);
    vsnprintf(text, sizeof text, format, arguments);
    va_end(arguments);
    cli_fail(CLI_BAD_INPUT, "%s%s: %s", cut ? "..." : "", cut ? path + length - shown_max : path, text);
}

/* ---- Bus errors --------------------------------------------------------------------------------------------- */

static mapped_file *volatile open_files; /* changes only while no other thread reads a file */
static struct sigaction other_handler;

/* An access to a page that the file no longer has, or that the disk cannot read, ends the process by default. Zeros
 * let the computation end in the usual way; its results are not used. Runs in the thread of the access. */
static void replace_by_zeros(int number, siginfo_t *info, void *context)
{
    (void)context;
    for (mapped_file *file = open_files; file; file = file->next) {
        if ((uintptr_t)info->si_addr - (uintptr_t)file->bytes >= file->size)
            continue;
        file->unreadable = 1;
        const int flags = MAP_PRIVATE | MAP_ANONYMOUS | MAP_FIXED | MAP_NORESERVE;
        if (mmap((void *)(uintptr_t)file->bytes, file->size, PROT_READ, flags, -1, 0) != MAP_FAILED)
            return;
    }
    sigaction(number, &other_handler, NULL); /* the access repeats, and is not ours to handle */
}

/* The handler is installed while files are open. */
static void add_to_open_files(mapped_file *file)
{
    file->next = open_files;
    open_files = file;
    if (file->next)
        return;
    struct sigaction handler = {.sa_flags = SA_SIGINFO, .sa_sigaction = replace_by_zeros};
    sigemptyset(&handler.sa_mask);
    sigaction(SIGBUS, &handler, &other_handler);
}

static void remove_from_open_files(const mapped_file *file)
{
    if (open_files == file)
        open_files = file->next;
    for (mapped_file *before = open_files; before; before = before->next)
        if (before->next == file)
            before->next = file->next;
    if (!open_files)
        sigaction(SIGBUS, &other_handler, NULL);
}

/* ---- Open and close ----------------------------------------------------------------------------------------- */

static const char *problem_of(int fd, struct stat *status)
{
    if (fstat(fd, status) != 0)
        return strerror(errno);
    if (S_ISDIR(status->st_mode))
        return strerror(EISDIR);
    if (!S_ISREG(status->st_mode))
        return "not a regular file";
    return status->st_size == 0 ? "empty file: must be safetensors or .npy" : NULL;
}

void mapped_file_open(mapped_file *file, const char *path)
{
    /* O_NONBLOCK: otherwise opening a FIFO would wait for a writer. */
    *file = (mapped_file){.fd = open(path, O_RDONLY | O_NONBLOCK | O_CLOEXEC)};
    if (file->fd < 0)
        file_refuse(path, "cannot open: %s", strerror(errno));
    const char *const problem = problem_of(file->fd, &file->opened);
    if (problem)
        file_refuse(path, "%s", problem);
    file->size = (size_t)file->opened.st_size;
    void *const bytes = mmap(NULL, file->size, PROT_READ, MAP_PRIVATE, file->fd, 0);
    if (bytes == MAP_FAILED)
        file_refuse(path, "cannot map %zu bytes: %s", file->size, strerror(errno));
    file->bytes = bytes;
    add_to_open_files(file);
}

void mapped_file_close(mapped_file *file)
{
    if (!file->bytes)
        return;
    remove_from_open_files(file);
    munmap((void *)(uintptr_t)file->bytes, file->size);
    close(file->fd);
    file->bytes = NULL;
}

/* ---- Changes ------------------------------------------------------------------------------------------------ */

static bool same_time(struct timespec a, struct timespec b)
{
    return a.tv_sec == b.tv_sec && a.tv_nsec == b.tv_nsec;
}

/* Who writes a file can restore its modification time, but not its change time. Another file of the same name, and
 * every link, also set the change time; they change the number of links, too. */
void mapped_file_check(const mapped_file *file, const char *path)
{
    struct stat status;
    if (fstat(file->fd, &status) != 0)
        file_refuse(path, "cannot read: %s", strerror(errno));
    if ((size_t)status.st_size != file->size)
        file_refuse(path, "had %zu bytes and now has %lld: must not change while it is read", file->size,
                    (long long)status.st_size);
    if (!same_time(status.st_mtim, file->opened.st_mtim))
        file_refuse(path, "was written while it was read: must not change");
    if (file->unreadable)
        file_refuse(path, "cannot read: %s", strerror(EIO));
    if (!same_time(status.st_ctim, file->opened.st_ctim) && status.st_nlink == file->opened.st_nlink)
        file_refuse(path, "its content or attributes changed while it was read: must not change");
}
