/* Files that change while they are mapped: no crash, and a message before results are used. */

#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>
#include <cmocka.h>

#include <fcntl.h>
#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <sys/wait.h>
#include <unistd.h>

#include "caught.h"
#include "cli/io/mapped_file.h"

enum { PAGES = 4, TICK_US = 20000 }; /* file times advance at least that often */

/* A new file of ones in /tmp, written two seconds ago, so that every later write changes its time. */
typedef struct fixture {
    char path[32];
    int fd;
    size_t size;
} fixture;

static void make_file(fixture *f)
{
    strcpy(f->path, "/tmp/mapped_file_XXXXXX");
    f->fd = mkstemp(f->path);
    assert_true(f->fd >= 0);
    f->size = PAGES * (size_t)getpagesize();
    char *const ones = malloc(f->size);
    assert_non_null(ones);
    memset(ones, 1, f->size);
    assert_true(write(f->fd, ones, f->size) == (ssize_t)f->size);
    free(ones);
    struct stat status;
    assert_int_equal(fstat(f->fd, &status), 0);
    const struct timespec before[2] = {{.tv_sec = status.st_mtim.tv_sec - 2}, {.tv_sec = status.st_mtim.tv_sec - 2}};
    assert_int_equal(futimens(f->fd, before), 0);
}

static void remove_file(fixture *f)
{
    close(f->fd);
    unlink(f->path);
}

static void open_file(mapped_file *file, const fixture *f)
{
    mapped_file_open(file, f->path);
    assert_int_equal(file->size, f->size);
}

static int sum_of(const mapped_file *file)
{
    int sum = 0;
    for (size_t at = 0; at < file->size; at++)
        sum += file->bytes[at];
    return sum;
}

/* "": the file has not changed. */
static void expect_changed(const fixture *f, const mapped_file *file, const char *message)
{
    char expected[200] = "";
    if (message[0])
        snprintf(expected, sizeof expected, "%s: %s", f->path, message);
    CATCH(mapped_file_check(file, f->path));
    assert_string_equal(caught.text, expected);
}

static void reading_changes_nothing(void **state)
{
    (void)state;
    fixture f;
    make_file(&f);
    mapped_file file;
    open_file(&file, &f);
    assert_int_equal(sum_of(&file), f.size);
    expect_changed(&f, &file, "");
    assert_int_equal(usleep(TICK_US), 0);
    assert_int_equal(unlink(f.path), 0); /* replaced by another file of the name: the mapping keeps the old one */
    expect_changed(&f, &file, "");
    assert_int_equal(sum_of(&file), f.size);
    mapped_file_close(&file);
    remove_file(&f);
}

/* The first of two files, so that the handler has to find the right one. */
static void truncation_is_reported(void **state)
{
    (void)state;
    fixture f, other;
    make_file(&f);
    make_file(&other);
    for (size_t left = 0; left < f.size; left += f.size / 2 - 1) { /* nothing, within a page, nearly everything */
        assert_int_equal(ftruncate(f.fd, (off_t)f.size), 0);
        mapped_file file, second;
        open_file(&file, &f);
        open_file(&second, &other);
        assert_int_equal(ftruncate(f.fd, (off_t)left), 0);
        assert_true(sum_of(&file) < (int)f.size);
        char message[100];
        snprintf(message, sizeof message, "had %zu bytes and now has %zu: must not change while it is read", f.size,
                 left);
        expect_changed(&f, &file, message);
        expect_changed(&other, &second, "");
        assert_int_equal(sum_of(&second), other.size);
        mapped_file_close(&file);
        mapped_file_close(&second);
    }
    remove_file(&f);
    remove_file(&other);
}

/* The size is the old one again: only the pages that were read in between are lost. */
static void a_page_that_was_missing_is_reported(void **state)
{
    (void)state;
    fixture f;
    make_file(&f);
    struct stat before;
    assert_int_equal(fstat(f.fd, &before), 0);
    mapped_file file;
    open_file(&file, &f);
    assert_int_equal(ftruncate(f.fd, 0), 0);
    assert_int_equal(sum_of(&file), 0);
    assert_int_equal(ftruncate(f.fd, (off_t)f.size), 0);
    expect_changed(&f, &file, "was written while it was read: must not change");
    const struct timespec times[2] = {before.st_atim, before.st_mtim};
    assert_int_equal(futimens(f.fd, times), 0);
    expect_changed(&f, &file, "cannot read: Input/output error");
    mapped_file_close(&file);
    remove_file(&f);
}

/* A bus error outside of the files ends the process as before. */
static void other_bus_errors_are_fatal(void **state)
{
    (void)state;
    fixture f, foreign;
    make_file(&f);
    make_file(&foreign);
    signal(SIGBUS, SIG_DFL); /* cmocka has a handler, which would go on with the tests */
    mapped_file file;
    open_file(&file, &f);
    const pid_t child = fork();
    if (child == 0) {
        const volatile char *const bytes = mmap(NULL, foreign.size, PROT_READ, MAP_PRIVATE, foreign.fd, 0);
        _exit(ftruncate(foreign.fd, 0) == 0 ? bytes[0] : 0);
    }
    int status = 0;
    assert_int_equal(waitpid(child, &status, 0), child);
    assert_true(WIFSIGNALED(status) && WTERMSIG(status) == SIGBUS);
    mapped_file_close(&file);
    remove_file(&f);
    remove_file(&foreign);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(reading_changes_nothing),
        cmocka_unit_test(truncation_is_reported),
        cmocka_unit_test(a_page_that_was_missing_is_reported),
        cmocka_unit_test(other_bus_errors_are_fatal),
    };
    return cmocka_run_group_tests_name("mapped_file", tests, NULL, NULL);
}
