/* Injected faults: every allocation fails once, and so does every system call of the writer.
 *
 * Needs linker options: -Wl,--wrap=malloc,--wrap=calloc,--wrap=free,--wrap=mmap,--wrap=write,--wrap=fsync,
 * --wrap=close,--wrap=rename,--wrap=open. */
#define _POSIX_C_SOURCE 200809L

#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>
#include <cmocka.h>

#include <dirent.h>
#include <errno.h>
#include <fcntl.h>
#include <jansson.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <unistd.h>

#include "cli/io/tensor_file.h"
#include "cli/io/tensor_write.h"

/* ---- The faults -------------------------------------------------------------------------------------------- */

static struct {
    int allocations_until_failure; /* -1: never */
    int allocations_live;
    int mmap_errno, fsync_errno, close_errno, rename_errno; /* 0: the call works */
    size_t disk_left;                                       /* bytes until write() fails with ENOSPC */
    size_t write_max;                                       /* bytes that one write() takes */
    int interruptions;                                      /* number of EINTR before each success */
    int names_taken;                                        /* number of new files whose name exists already */
} faults;

static void no_faults(void)
{
    memset(&faults, 0, sizeof faults);
    faults.allocations_until_failure = -1;
    faults.disk_left = faults.write_max = SIZE_MAX;
}

void *__real_malloc(size_t size);
void *__real_calloc(size_t count, size_t size);
void __real_free(void *memory);
void *__real_mmap(void *address, size_t size, int protection, int flags, int fd, off_t offset);
ssize_t __real_write(int fd, const void *data, size_t size);
int __real_fsync(int fd);
int __real_close(int fd);
int __real_rename(const char *from, const char *to);
int __real_open(const char *path, int flags, ...);

void *__wrap_malloc(size_t size);
void *__wrap_calloc(size_t count, size_t size);
void __wrap_free(void *memory);
void *__wrap_mmap(void *address, size_t size, int protection, int flags, int fd, off_t offset);
ssize_t __wrap_write(int fd, const void *data, size_t size);
int __wrap_fsync(int fd);
int __wrap_close(int fd);
int __wrap_rename(const char *from, const char *to);
int __wrap_open(const char *path, int flags, ...);

static bool allocation_fails(void)
{
    if (faults.allocations_until_failure == 0) {
        errno = ENOMEM;
        return true;
    }
    if (faults.allocations_until_failure > 0)
        faults.allocations_until_failure--;
    faults.allocations_live++;
    return false;
}

void *__wrap_malloc(size_t size)
{
    return allocation_fails() ? NULL : __real_malloc(size);
}

void *__wrap_calloc(size_t count, size_t size)
{
    return allocation_fails() ? NULL : __real_calloc(count, size);
}

void __wrap_free(void *memory)
{
    faults.allocations_live -= memory != NULL;
    __real_free(memory);
}

static int fail_with(int error_number)
{
    errno = error_number;
    return -1;
}

void *__wrap_mmap(void *address, size_t size, int protection, int flags, int fd, off_t offset)
{
    if (!faults.mmap_errno)
        return __real_mmap(address, size, protection, flags, fd, offset);
    errno = faults.mmap_errno;
    return MAP_FAILED;
}

static size_t smaller(size_t a, size_t b)
{
    return a < b ? a : b;
}

ssize_t __wrap_write(int fd, const void *data, size_t size)
{
    static int interruptions = 0;
    if (interruptions < faults.interruptions) {
        interruptions++;
        return fail_with(EINTR);
    }
    interruptions = 0;
    if (faults.disk_left == 0)
        return fail_with(ENOSPC);
    const size_t taken = smaller(smaller(size, faults.write_max), faults.disk_left);
    faults.disk_left -= taken;
    return __real_write(fd, data, taken);
}

int __wrap_fsync(int fd)
{
    return faults.fsync_errno ? fail_with(faults.fsync_errno) : __real_fsync(fd);
}

int __wrap_close(int fd)
{
    const int result = __real_close(fd);
    return faults.close_errno ? fail_with(faults.close_errno) : result;
}

int __wrap_rename(const char *from, const char *to)
{
    return faults.rename_errno ? fail_with(faults.rename_errno) : __real_rename(from, to);
}

int __wrap_open(const char *path, int flags, ...)
{
    if ((flags & O_EXCL) == 0)
        return __real_open(path, flags);
    if (faults.names_taken == 0)
        return __real_open(path, flags, 0666);
    faults.names_taken--;
    return fail_with(EEXIST);
}

/* ---- Reading and writing ----------------------------------------------------------------------------------- */

static char directory[] = "/tmp/tensor_faults_XXXXXX";

static int clear_faults(void **state)
{
    (void)state;
    no_faults();
    return 0;
}

static int make_directory(void **state)
{
    (void)state;
    json_set_alloc_funcs(malloc, free); /* the wrapped ones */
    return mkdtemp(directory) && chdir(directory) == 0 ? 0 : -1;
}

static int remove_directory(void **state)
{
    (void)state;
    return remove("out") == 0 && chdir("/") == 0 && rmdir(directory) == 0 ? 0 : -1;
}

static bool write_example(float first, tensor_error *error)
{
    const float numbers[3] = {first, 2, 3};
    const output_tensor tensors[] = {{"b", SKL_F32, 1, {3}, numbers}, {"a", SKL_F32, 1, {3}, numbers}};
    const output_metadata metadata = {"key", "value"};
    return tensor_write("out", tensors, 2, &metadata, 1, error);
}

static void expect_example(float first)
{
    no_faults();
    tensor_error error;
    tensor_file *const file = tensor_file_open("out", &error);
    assert_non_null(file);
    const float *const numbers = tensor_file_data(file, tensor_file_find(file, "b", &error), &error);
    assert_non_null(numbers);
    assert_true(numbers[0] == first && numbers[2] == 3);
    tensor_file_close(file);
    assert_int_equal(faults.allocations_live, 0);

    DIR *const entries = opendir(".");
    int entry_count = 0;
    while (readdir(entries))
        entry_count++;
    closedir(entries);
    assert_int_equal(entry_count, 3); /* ".", ".." and "out": no temporary file */
}

/* Fails the first allocation, then the second, ... until all succeed. */
static void expect_every_failure(bool (*attempt)(const void *context, tensor_error *error), const void *context)
{
    int failure_count = 0;
    for (bool succeeded = false; !succeeded; failure_count++) {
        no_faults();
        faults.allocations_until_failure = failure_count;
        tensor_error error = {""};
        succeeded = attempt(context, &error);
        assert_int_equal(faults.allocations_live, 0);
        if (!succeeded && !strstr(error.text, "out of memory"))
            fail_msg("allocation %d: \"%s\"", failure_count, error.text);
    }
    assert_in_range(failure_count, 4, 1000); /* the file, its tensors, a copy; then success */
}

static bool attempt_write(const void *context, tensor_error *error)
{
    return write_example(*(const float *)context, error);
}

/* Reads `prefix`, `header` and 8 bytes of data at an odd address, which forces a copy. */
static bool read_unaligned(const void *prefix, size_t prefix_size, const char *header, tensor_error *error)
{
    enum { DATA_SIZE = 8, DATA_BEGIN = 201 };
    _Alignas(8) unsigned char memory[DATA_BEGIN + DATA_SIZE] = {0};
    const size_t header_size = strlen(header);
    unsigned char *const bytes = memory + DATA_BEGIN - prefix_size - header_size;
    memcpy(bytes, prefix, prefix_size);
    memcpy(bytes + prefix_size, header, header_size);

    tensor_file *const file = tensor_file_parse(bytes, prefix_size + header_size + DATA_SIZE, "in", error);
    if (!file)
        return false;
    const bool read = tensor_file_data(file, tensor_file_at(file, 0), error) != NULL;
    tensor_file_close(file);
    return read;
}

static bool attempt_safetensors(const void *context, tensor_error *error)
{
    (void)context;
    static const char header[] = "{\"__metadata__\":{\"k\":\"v\"},"
                                 "\"a\":{\"dtype\":\"F32\",\"shape\":[1],\"data_offsets\":[0,4]},"
                                 "\"b\":{\"dtype\":\"I32\",\"shape\":[],\"data_offsets\":[4,8]}}";
    const uint64_t length = sizeof header - 1;
    return read_unaligned(&length, sizeof length, header, error);
}

static bool attempt_npy(const void *context, tensor_error *error)
{
    (void)context;
    static const char header[] = "{'descr': '<f4', 'fortran_order': False, 'shape': (2,)}";
    const unsigned char prefix[10] = {0x93, 'N', 'U', 'M', 'P', 'Y', 1, 0, sizeof header - 1, 0};
    return read_unaligned(prefix, sizeof prefix, header, error);
}

static void allocations_fail(void **state)
{
    (void)state;
    tensor_error error;
    assert_true(write_example(1, &error));
    const float second = 2;
    expect_every_failure(attempt_write, &second);
    expect_example(2);
    expect_every_failure(attempt_safetensors, NULL);
    expect_every_failure(attempt_npy, NULL);
}

static void short_and_interrupted_writes_continue(void **state)
{
    (void)state;
    tensor_error error;
    faults.write_max = 7;
    faults.interruptions = 2;
    assert_true(write_example(3, &error));
    expect_example(3);
}

static void mapping_fails(void **state)
{
    (void)state;
    tensor_error error;
    faults.mmap_errno = ENOMEM;
    assert_null(tensor_file_open("out", &error));
    assert_non_null(strstr(error.text, "out: cannot map "));
    assert_non_null(strstr(error.text, " bytes: Cannot allocate memory"));
}

static void full_disk_keeps_the_old_file(void **state)
{
    (void)state;
    tensor_error error = {""};
    assert_true(write_example(4, &error));
    size_t disk_size = 0;
    for (bool fits = false; !fits; disk_size++) {
        faults.disk_left = disk_size;
        fits = write_example(5, &error);
        if (!fits)
            assert_string_equal(error.text, "out: cannot write: No space left on device");
        expect_example(fits ? 5 : 4);
    }
    assert_in_range(disk_size, 100, 300); /* it failed in the header, and in each of the tensors */
}

static void failing_calls_keep_the_old_file(void **state)
{
    (void)state;
    static const struct {
        int fsync_errno, close_errno, rename_errno;
        const char *message;
    } cases[] = {
        {EIO, 0, 0, "out: cannot write: Input/output error"},
        {0, EDQUOT, 0, "out: cannot write: Disk quota exceeded"},
        {EIO, EDQUOT, 0, "out: cannot write: Input/output error"},
        {0, 0, EXDEV, "out: cannot rename the temporary file: Invalid cross-device link"},
    };
    for (size_t i = 0; i < sizeof cases / sizeof cases[0]; i++) {
        tensor_error error = {""};
        assert_true(write_example(6, &error));
        faults.fsync_errno = cases[i].fsync_errno;
        faults.close_errno = cases[i].close_errno;
        faults.rename_errno = cases[i].rename_errno;
        assert_false(write_example(7, &error));
        assert_string_equal(error.text, cases[i].message);
        expect_example(6);
    }
}

static void names_of_temporary_files_are_taken(void **state)
{
    (void)state;
    tensor_error error = {""};
    faults.names_taken = 3;
    assert_true(write_example(8, &error));
    expect_example(8);
    faults.names_taken = 1 << 20;
    assert_false(write_example(9, &error));
    assert_string_equal(error.text, "out: cannot create a temporary file next to it: File exists");
    expect_example(8);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test_setup(allocations_fail, clear_faults),
        cmocka_unit_test_setup(short_and_interrupted_writes_continue, clear_faults),
        cmocka_unit_test_setup(mapping_fails, clear_faults),
        cmocka_unit_test_setup(full_disk_keeps_the_old_file, clear_faults),
        cmocka_unit_test_setup(failing_calls_keep_the_old_file, clear_faults),
        cmocka_unit_test_setup(names_of_temporary_files_are_taken, clear_faults),
    };
    return cmocka_run_group_tests_name("tensor_faults", tests, make_directory, remove_directory);
}
