/* Tensor files on disk. Those that are written are complete or absent. Those that change while they are mapped crash
 * nothing, and give a message before results are used. */

#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>
#include <cmocka.h>

#include <dirent.h>
#include <fcntl.h>
#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <sys/wait.h>
#include <time.h>
#include <unistd.h>

#include "caught.h"
#include "cli/io/file_write.h"

/* Every test runs in a new, empty directory, so that paths are short and leftovers are detected. */
typedef struct test_directory {
    char directory[32];
    int origin; /* the directory to go back to */
} test_directory;

static int enter_directory(void **state)
{
    test_directory *const place = malloc(sizeof *place);
    strcpy(place->directory, "/tmp/tensor_disk_XXXXXX");
    place->origin = open(".", O_RDONLY);
    *state = place;
    return mkdtemp(place->directory) && chdir(place->directory) == 0 ? 0 : -1;
}

static int entry_count(const char *path)
{
    DIR *const directory = opendir(path);
    assert_non_null(directory);
    int count = -2; /* "." and ".." */
    while (readdir(directory))
        count++;
    closedir(directory);
    return count;
}

static int leave_directory(void **state)
{
    test_directory *const place = *state;
    DIR *const directory = opendir(".");
    for (const struct dirent *entry; (entry = readdir(directory));)
        (void)remove(entry->d_name);
    closedir(directory);
    const int left = fchdir(place->origin);
    close(place->origin);
    const int removed = rmdir(place->directory);
    free(place);
    return left == 0 && removed == 0 ? 0 : -1;
}

static void write_tensors(const char *path, const output_tensor *tensors, size_t tensor_count,
                          const output_metadata *metadata, size_t metadata_count)
{
    file_write_tensors(path, tensors, tensor_count, metadata, metadata_count);
    file_write_commit();
}

/* LeakSanitizer ignores what a failing call allocates: the end of the process frees it. */
__attribute__((weak)) void __lsan_disable(void);
__attribute__((weak)) void __lsan_enable(void);

static void expect_unwritten(const char *path, const output_tensor *tensors, size_t tensor_count,
                             const output_metadata *metadata, size_t metadata_count, const char *message)
{
    if (__lsan_disable)
        __lsan_disable();
    CATCH(write_tensors(path, tensors, tensor_count, metadata, metadata_count));
    file_write_abandon();
    if (__lsan_enable)
        __lsan_enable();
    assert_string_equal(caught.text, message);
}

static void put_text(const char *path, const char *text)
{
    FILE *const stream = fopen(path, "w");
    assert_non_null(stream);
    assert_true(fputs(text, stream) >= 0 && fclose(stream) == 0);
}

static void expect_text(const char *path, const char *text)
{
    char found[64] = "";
    FILE *const stream = fopen(path, "r");
    assert_non_null(stream);
    found[fread(found, 1, sizeof found - 1, stream)] = '\0';
    fclose(stream);
    assert_string_equal(found, text);
}

static const float loss[] = {1, 2, 3, 4, 5, 6};
static const uint16_t halves[] = {1, 2, 3};

static const output_tensor outputs[] = {
    {"h", SKL_F16, 1, {3}, halves},         {"kl", SKL_F32, 2, {2, 3}, loss},    {"b", SKL_BF16, 1, {1}, halves},
    {"empty", SKL_F32, 3, {4, 0, 2}, NULL}, {"\"\u00e9", SKL_F32, 0, {0}, loss},
};
enum { OUTPUT_COUNT = sizeof outputs / sizeof outputs[0] };

static const output_metadata metadata[] = {{"made by", "streamkl"}, {"scale", "0.125"}};

static void round_trip(void **state)
{
    (void)state;
    put_text("out", "old");
    write_tensors("out", outputs, OUTPUT_COUNT, metadata, 2);
    assert_int_equal(entry_count("."), 1);

    tensor_file file;
    tensor_file_open(&file, "out");
    const char *const wide_then_by_name[] = {"\"\u00e9", "empty", "kl", "b", "h"};
    for (size_t i = 0; i < OUTPUT_COUNT; i++)
        assert_string_equal(file.tensors[i].name, wide_then_by_name[i]);
    assert_int_equal(file.tensor_count, OUTPUT_COUNT);
    for (size_t i = 0; i < OUTPUT_COUNT; i++) {
        const output_tensor *const put = &outputs[i];
        const stored_tensor *const got = tensor_file_find(&file, put->name);
        assert_true(got->supported && got->dtype == put->dtype && got->rank == put->rank);
        assert_memory_equal(got->shape, put->shape, sizeof got->shape);
        const unsigned char *const data = tensor_file_data(&file, got);
        assert_ptr_equal(data, got->bytes); /* aligned as written */
        if (got->size > 0)
            assert_memory_equal(data, put->data, got->size);
    }
    tensor_file_close(&file);
}

static void writes_these_bytes(void **state)
{
    (void)state;
    static const char expected[] =
        "\x50\0\0\0\0\0\0\0"
        "{\"__metadata__\":{\"k\":\"v\"},\"h\":{\"dtype\":\"F16\",\"shape\":[2],\"data_offsets\":[0,4]}} "
        "\1\0\2\0";
    const size_t expected_size = sizeof expected - 1;
    const output_tensor tensor = {"h", SKL_F16, 1, {2}, halves};
    const output_metadata one = {"k", "v"};
    write_tensors("out", &tensor, 1, &one, 1);
    char found[200];
    FILE *const stream = fopen("out", "r");
    assert_non_null(stream);
    const size_t found_size = fread(found, 1, sizeof found, stream);
    fclose(stream);
    assert_int_equal(found_size, expected_size);
    assert_memory_equal(found, expected, expected_size);
}

static void writes_a_file_without_tensors(void **state)
{
    (void)state;
    write_tensors("out", NULL, 0, NULL, 0);
    tensor_file file;
    tensor_file_open(&file, "out");
    assert_int_equal(file.tensor_count, 0);
    assert_string_equal(tensor_file_names(&file).text, "");
    tensor_file_close(&file);
}

static void respects_umask(void **state)
{
    (void)state;
    const mode_t old_mask = umask(027);
    write_tensors("out", outputs, OUTPUT_COUNT, metadata, 2);
    umask(old_mask);
    struct stat status;
    assert_int_equal(stat("out", &status), 0);
    assert_int_equal(status.st_mode & 0777, 0640);
}

static void make_old(const char *path)
{
    const struct timespec past[2] = {{.tv_sec = time(NULL) - 7200}, {.tv_sec = time(NULL) - 7200}};
    assert_int_equal(utimensat(AT_FDCWD, path, past, AT_SYMLINK_NOFOLLOW), 0);
}

static void make_all_old(void)
{
    DIR *const entries = opendir(".");
    for (const struct dirent *entry; (entry = readdir(entries));)
        make_old(entry->d_name);
    closedir(entries);
}

static void add_text(const char *path, const char *text)
{
    file_write_parts(path, &(file_part){text, strlen(text)}, 1);
}

static void clean(const char *path)
{
    file_outputs_check(&(output_file){"--out", path}, 1, NULL, 0);
}

/* A file is locked until it has its name, also after its contents are complete. */
static void cleans_only_stale_temporary_files(void **state)
{
    (void)state;
    put_text(".streamkl-1.tmp", "of another process");
    put_text(".streamkl-.tmp", "no number");
    put_text("streamkl-1.tmp", "not ours");
    put_text(".streamkl-1.old", "not ours");
    assert_int_equal(symlink("out", ".streamkl-2.tmp"), 0);
    put_text("out", "old");
    add_text("./out", "new");
    clean("out");
    assert_int_equal(entry_count("."), 7); /* not old enough */
    make_all_old();
    clean("out");
    assert_int_equal(entry_count("."), 6);
    file_write_commit();
    expect_text("out", "new");
    assert_int_equal(entry_count("."), 5);
}

/* The last file cannot be renamed, because its name has become that of a folder. */
static void restores_all_files_of_a_set(void **state)
{
    (void)state;
    put_text("old", "kept");
    add_text("old", "a");
    add_text("new", "b");
    add_text("last", "c");
    assert_int_equal(mkdir("last", 0777), 0);
    CATCH(file_write_commit());
    assert_string_equal(caught.text, "last: cannot rename the temporary file: Is a directory");
    file_write_abandon();
    expect_text("old", "kept");
    assert_int_equal(entry_count("."), 2);

    assert_int_equal(rmdir("last"), 0);
    add_text("old", "a");
    add_text("new", "b");
    expect_text("old", "kept");
    file_write_commit();
    expect_text("old", "a");
    expect_text("new", "b");
    assert_int_equal(entry_count("."), 2);
}

static void refuses_targets(void **state)
{
    (void)state;
    static const struct {
        const char *path;
        const char *message;
    } cases[] = {
        {".", ".: cannot write: Is a directory"},
        {"absent/out", "absent/out: cannot create a temporary file next to it: No such file or directory"},
        {"file/out", "file/out: cannot write: Not a directory"},
        {"link", "link: cannot write: exists and is not a regular file"},
        {"/dev/null", "/dev/null: cannot write: exists and is not a regular file"},
        {"/proc/out", "/proc/out: cannot create a temporary file next to it: No such file or directory"},
        {"", ": cannot rename the temporary file: No such file or directory"},
    };
    put_text("file", "old");
    assert_int_equal(symlink("file", "link"), 0);
    for (size_t i = 0; i < sizeof cases / sizeof cases[0]; i++)
        expect_unwritten(cases[i].path, outputs, OUTPUT_COUNT, metadata, 2, cases[i].message);
    expect_text("file", "old");
    assert_int_equal(entry_count("."), 2);
}

static void refuses_names(void **state)
{
    (void)state;
    const output_tensor twice[] = {{"a", SKL_F32, 0, {0}, loss}, {"a", SKL_F16, 0, {0}, loss}};
    const output_tensor reserved = {"__metadata__", SKL_F32, 0, {0}, loss};
    const output_tensor latin1 = {"\xe9", SKL_F32, 0, {0}, loss};
    const output_metadata key = {"\xe9", "v"}, value = {"k", "\xe9"};
    expect_unwritten("out", twice, 2, NULL, 0, "out: tensor \"a\": the name is used twice or reserved");
    expect_unwritten("out", &reserved, 1, NULL, 0,
                     "out: tensor \"__metadata__\": the name is used twice or reserved");
    expect_unwritten("out", &latin1, 1, NULL, 0, "out: tensor \"\xe9\": not valid UTF-8");
    expect_unwritten("out", NULL, 0, &key, 1, "out: __metadata__ \"\xe9\": not valid UTF-8");
    expect_unwritten("out", NULL, 0, &value, 1, "out: __metadata__ \"k\": not valid UTF-8");
    assert_int_equal(entry_count("."), 0);
}

static void refuses_a_header_that_readers_would_refuse(void **state)
{
    (void)state;
    const size_t length = 100000000;
    char *const value = malloc(length + 1);
    assert_non_null(value);
    memset(value, 'v', length);
    value[length] = '\0';
    const output_metadata huge = {"k", value};
    expect_unwritten("out", NULL, 0, &huge, 1, "out: header of 100000025 bytes: must be at most 100000000");
    free(value);
}

/* ---- Mapped files ------------------------------------------------------------------------------------------- */

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

#define IN_DIRECTORY(test) cmocka_unit_test_setup_teardown(test, enter_directory, leave_directory)

int main(void)
{
    const struct CMUnitTest tests[] = {
        IN_DIRECTORY(round_trip),
        IN_DIRECTORY(writes_these_bytes),
        IN_DIRECTORY(writes_a_file_without_tensors),
        IN_DIRECTORY(respects_umask),
        IN_DIRECTORY(cleans_only_stale_temporary_files),
        IN_DIRECTORY(restores_all_files_of_a_set),
        IN_DIRECTORY(refuses_targets),
        IN_DIRECTORY(refuses_names),
        IN_DIRECTORY(refuses_a_header_that_readers_would_refuse),
        cmocka_unit_test(reading_changes_nothing),
        cmocka_unit_test(truncation_is_reported),
        cmocka_unit_test(a_page_that_was_missing_is_reported),
        cmocka_unit_test(other_bus_errors_are_fatal),
    };
    return cmocka_run_group_tests_name("tensor_disk", tests, NULL, NULL);
}
