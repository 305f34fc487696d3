/* A library for LD_PRELOAD: one call of the tool fails, falls short, or is the last one before a kill.
 *
 *     STREAMKL_INJECT="CALL NUMBER ACTION"    CALL is a name below, "allocate", or "any" that changes files
 *     STREAMKL_INJECT_MARK=FILE               is created when the call with that number, counted from 1, comes
 *
 * ACTION is an errno, with "+" for all later calls as well; "kill" (SIGKILL before the call) or "interrupt" (SIGTERM,
 * to any thread); for write "short" (all calls take one byte at most); for mmap "truncate" (the file is cut in half
 * after it is mapped) "rewrite" (its last byte changes) or "rewrite_hidden" (and the modification time is restored).
 */
#define _GNU_SOURCE
#include <dlfcn.h>
#include <errno.h>
#include <fcntl.h>
#include <limits.h>
#include <signal.h>
#include <stdarg.h>
#include <stdatomic.h>
#include <stdbool.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <sys/syscall.h>
#include <unistd.h>

/* glibc's own names: dlsym() allocates. */
void *__libc_malloc(size_t size);
void *__libc_calloc(size_t count, size_t size);
void *__libc_realloc(void *memory, size_t size);
void *__libc_memalign(size_t alignment, size_t size);

static struct {
    char call[16], action[16];
    long number;
    atomic_long count;
    bool active;
} plan;

typedef int main_function(int argc, char **argv, char **environment);
typedef int start_function(main_function *main, int argc, char **argv, void (*init)(void), void (*fini)(void),
                           void (*end)(void), void *stack_end);

static main_function *main_of_the_tool;

static void stop(void)
{
    plan.active = false;
}

/* Calls count from here to the end of the tool's exit handlers. What runs before, such as the registration of GPU
 * kernels, and after, such as the writing of branch counts, is not the tool's. */
static int planned_main(int argc, char **argv, char **environment)
{
    atexit(stop);
    const char *const text = getenv("STREAMKL_INJECT");
    plan.active = text && sscanf(text, "%15s %ld %15s", plan.call, &plan.number, plan.action) == 3;
    return main_of_the_tool(argc, argv, environment);
}

start_function __libc_start_main;
int __libc_start_main(main_function *main, int argc, char **argv, void (*init)(void), void (*fini)(void),
                      void (*end)(void), void *stack_end)
{
    main_of_the_tool = main;
    start_function *const start = (start_function *)dlsym(RTLD_NEXT, "__libc_start_main");
    return start(planned_main, argc, argv, init, fini, end, stack_end);
}

static bool action_is(const char *name)
{
    return strcmp(plan.action, name) == 0;
}

/* Is this the call? Allocates nothing. */
static bool is_chosen(const char *call, bool changes_files)
{
    if (!plan.active || !(strcmp(plan.call, call) == 0 || (changes_files && strcmp(plan.call, "any") == 0)))
        return false;
    const long number = atomic_fetch_add(&plan.count, 1) + 1;
    const bool repeats = plan.action[strlen(plan.action) - 1] == '+';
    if (repeats ? number < plan.number : number != plan.number)
        return false;
    const char *const mark = getenv("STREAMKL_INJECT_MARK");
    if (mark)
        syscall(SYS_close, (int)syscall(SYS_openat, AT_FDCWD, mark, O_CREAT | O_WRONLY, 0666));
    if (action_is("kill"))
        raise(SIGKILL);
    if (action_is("interrupt"))
        kill(getpid(), SIGTERM); /* a shell lets processes in the background ignore SIGINT */
    return true;
}

static bool fails(const char *call, bool changes_files)
{
    if (!is_chosen(call, changes_files) || atoi(plan.action) == 0)
        return false;
    errno = atoi(plan.action);
    return true;
}

#define REAL(name) ((__typeof__(&name))dlsym(RTLD_NEXT, #name))

/* ---- Memory ------------------------------------------------------------------------------------------------- */

void *malloc(size_t size)
{
    return fails("allocate", false) ? NULL : __libc_malloc(size);
}

void *calloc(size_t count, size_t size)
{
    return fails("allocate", false) ? NULL : __libc_calloc(count, size);
}

void *realloc(void *memory, size_t size)
{
    return fails("allocate", false) ? NULL : __libc_realloc(memory, size);
}

void *aligned_alloc(size_t alignment, size_t size)
{
    return fails("allocate", false) ? NULL : __libc_memalign(alignment, size);
}

/* ---- Files -------------------------------------------------------------------------------------------------- */

int open(const char *path, int flags, ...)
{
    va_list arguments;
    va_start(arguments, flags);
    const unsigned mode = flags & O_CREAT ? va_arg(arguments, unsigned) : 0;
    va_end(arguments);
    const bool creates = flags & O_CREAT;
    return fails(creates ? "create" : "open", creates) ? -1 : REAL(open)(path, flags, mode);
}

int fstat(int fd, struct stat *status)
{
    return fails("fstat", false) ? -1 : REAL(fstat)(fd, status);
}

ssize_t write(int fd, const void *data, size_t size)
{
    if (fails("write", true))
        return -1;
    const bool is_short = plan.active && action_is("short");
    return REAL(write)(fd, data, is_short && size > 1 ? 1 : size);
}

int fsync(int fd)
{
    return fails("fsync", true) ? -1 : REAL(fsync)(fd);
}

int close(int fd)
{
    const bool failed = fails("close", false);
    const int error_number = errno, result = REAL(close)(fd);
    errno = failed ? error_number : errno;
    return failed ? -1 : result;
}

int rename(const char *from, const char *to)
{
    return fails("rename", true) ? -1 : REAL(rename)(from, to);
}

int link(const char *from, const char *to)
{
    return fails("link", true) ? -1 : REAL(link)(from, to);
}

int unlink(const char *path)
{
    return fails("unlink", true) ? -1 : REAL(unlink)(path);
}

static void change(int fd)
{
    char link_path[64], path[PATH_MAX] = "";
    snprintf(link_path, sizeof link_path, "/proc/self/fd/%d", fd);
    struct stat status;
    if (readlink(link_path, path, sizeof path - 1) < 0 || stat(path, &status) != 0)
        abort();
    if (action_is("truncate") && truncate(path, status.st_size / 2) != 0)
        abort();
    if (action_is("rewrite") || action_is("rewrite_hidden")) {
        const int other = REAL(open)(path, O_WRONLY);
        if (pwrite(other, "\x3f", 1, status.st_size - 1) != 1)
            abort();
        const struct timespec times[2] = {status.st_atim, status.st_mtim};
        if (action_is("rewrite_hidden") && futimens(other, times) != 0)
            abort();
        REAL(close)(other);
    }
}

void *mmap(void *address, size_t size, int protection, int flags, int fd, off_t offset)
{
    const bool of_a_file = fd >= 0, chosen = of_a_file && is_chosen("mmap", false);
    if (chosen && atoi(plan.action)) {
        errno = atoi(plan.action);
        return MAP_FAILED;
    }
    void *const memory = REAL(mmap)(address, size, protection, flags, fd, offset);
    if (chosen)
        change(fd);
    return memory;
}
