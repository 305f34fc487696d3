#define _POSIX_C_SOURCE 200809L

#include <assert.h>
#include <errno.h>
#include <fcntl.h>
#include <inttypes.h>
#include <jansson.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <unistd.h>

#include "tensor_common.h"

_Static_assert(__BYTE_ORDER__ == __ORDER_LITTLE_ENDIAN__, "both formats are little-endian and used as they lie");
_Static_assert(sizeof(size_t) >= sizeof(int64_t), "files and shapes are counted in 64 bits");

static const struct {
    const char *name;
    size_t size;
} dtypes[] = {[SKL_F32] = {"F32", 4}, [SKL_F16] = {"F16", 2}, [SKL_BF16] = {"BF16", 2}};

const char *tensor_dtype_name(skl_dtype dtype)
{
    return dtypes[dtype].name;
}

size_t tensor_dtype_size(skl_dtype dtype)
{
    return dtypes[dtype].size;
}

/* ---- Messages and shapes ----------------------------------------------------------------------------------- */

/* The end of a long path says more than its beginning. */
static const char *path_tail(const char *path)
{
    const size_t shown_max = 300;
    const size_t length = strlen(path);
    return length > shown_max ? path + length - shown_max : path;
}

bool refuse(tensor_error *error, const char *path, const char *format, ...)
{
    if (!error)
        return false;

    const char *const tail = path_tail(path);
    const int prefix_length = snprintf(error->text, sizeof error->text, "%s%s: ", tail == path ? "" : "...", tail);
    assert(prefix_length > 0 && (size_t)prefix_length < sizeof error->text);

    va_list arguments;
    va_start(arguments, format);
    vsnprintf(error->text + prefix_length, sizeof error->text - (size_t)prefix_length, format, arguments);
    va_end(arguments);

    for (char *c = error->text; *c; c++) {
        const unsigned char byte = (unsigned char)*c;
        if (byte < ' ' || byte == 0x7f)
            *c = '?';
    }
    return false;
}

bool shape_size(const int64_t *shape, int rank, size_t item_size, size_t *size)
{
    assert(rank >= 0 && rank <= TENSOR_RANK_MAX);
    int64_t product = (int64_t)item_size;
    bool empty = false;
    for (int d = 0; d < rank; d++) {
        assert(shape[d] >= 0);
        if (shape[d] == 0) {
            empty = true;
            continue;
        }
        if (product > INT64_MAX / shape[d])
            return false;
        product *= shape[d];
    }
    *size = empty ? 0 : (size_t)product;
    return true;
}

shape_text shape_print(const int64_t *shape, int rank)
{
    shape_text shown = {"["};
    size_t length = 1;
    for (int d = 0; d < rank; d++) {
        const int added =
            snprintf(shown.text + length, sizeof shown.text - length, "%s%" PRId64, d ? ", " : "", shape[d]);
        length += (size_t)added;
    }
    assert(length + 2 <= sizeof shown.text);
    memcpy(shown.text + length, "]", 2);
    return shown;
}

/* ---- Open and close ---------------------------------------------------------------------------------------- */

/* Chooses by content: a file may have any name. */
static bool parse(tensor_file *file, tensor_error *error)
{
    if (npy_recognise(file->bytes, file->size))
        return npy_parse(file, error);
    return safetensors_parse(file, error);
}

tensor_file *tensor_file_parse(const void *bytes, size_t size, const char *path, tensor_error *error)
{
    const size_t path_size = strlen(path) + 1;
    tensor_file *const file = calloc(1, sizeof *file + path_size);
    if (!file) {
        refuse(error, path, "out of memory");
        return NULL;
    }
    file->bytes = bytes;
    file->size = size;
    memcpy(file->path, path, path_size);

    if (!parse(file, error)) {
        tensor_file_close(file);
        return NULL;
    }
    return file;
}

static void *map_file(int fd, const char *path, size_t *size, tensor_error *error)
{
    struct stat status;
    const char *problem = NULL;
    if (fstat(fd, &status) != 0)
        problem = strerror(errno);
    else if (S_ISDIR(status.st_mode))
        problem = strerror(EISDIR);
    else if (!S_ISREG(status.st_mode))
        problem = "not a regular file";
    else if (status.st_size == 0)
        problem = "empty file: must be safetensors or .npy";
    if (problem) {
        refuse(error, path, "%s", problem);
        return NULL;
    }

    *size = (size_t)status.st_size;
    void *const bytes = mmap(NULL, *size, PROT_READ, MAP_PRIVATE, fd, 0);
    if (bytes == MAP_FAILED) {
        refuse(error, path, "cannot map %zu bytes: %s", *size, strerror(errno));
        return NULL;
    }
    return bytes;
}

tensor_file *tensor_file_open(const char *path, tensor_error *error)
{
    /* O_NONBLOCK: to open a FIFO would otherwise wait for somebody to write to it. */
    const int fd = open(path, O_RDONLY | O_NONBLOCK | O_CLOEXEC);
    if (fd < 0) {
        refuse(error, path, "cannot open: %s", strerror(errno));
        return NULL;
    }
    size_t size = 0;
    void *const bytes = map_file(fd, path, &size, error);
    close(fd); /* the mapping stays */
    if (!bytes)
        return NULL;

    tensor_file *const file = tensor_file_parse(bytes, size, path, error);
    if (!file) {
        munmap(bytes, size);
        return NULL;
    }
    file->mapped = true;
    return file;
}

void tensor_file_close(tensor_file *file)
{
    if (!file)
        return;
    for (aligned_copy *copy = file->copies; copy;) {
        aligned_copy *const next = copy->next;
        free(copy);
        copy = next;
    }
    free(file->tensors);
    json_decref(file->header);
    if (file->mapped)
        munmap((void *)file->bytes, file->size);
    free(file);
}

/* ---- Tensors ----------------------------------------------------------------------------------------------- */

const stored_tensor *tensor_file_at(const tensor_file *file, size_t index)
{
    return index < file->tensor_count ? &file->tensors[index] : NULL;
}

/* "\"k_s\", \"k_t\", ...": as many names as fit, to show a misspelling. */
static void list_names(const tensor_file *file, char *text, size_t text_size)
{
    static const char more[] = "...";
    size_t length = 0;
    text[0] = '\0';
    for (size_t i = 0; i < file->tensor_count; i++) {
        const size_t room = text_size - length;
        const int added = snprintf(text + length, room, "%s\"%s\"", i ? ", " : "", file->tensors[i].name);
        if (added < 0 || (size_t)added + sizeof more > room) {
            memcpy(text + length, more, sizeof more);
            return;
        }
        length += (size_t)added;
    }
}

const stored_tensor *tensor_file_find(const tensor_file *file, const char *name, tensor_error *error)
{
    for (size_t i = 0; i < file->tensor_count; i++)
        if (strcmp(file->tensors[i].name, name) == 0)
            return &file->tensors[i];

    char names[300];
    list_names(file, names, sizeof names);
    refuse(error, file->path, TENSOR_PREFIX "not found among %zu: %s", name, file->tensor_count, names);
    return NULL;
}

const void *tensor_file_data(tensor_file *file, const stored_tensor *tensor, tensor_error *error)
{
    assert(tensor >= file->tensors && tensor < file->tensors + file->tensor_count);
    if (!tensor->supported) {
        refuse(error, file->path, TENSOR_PREFIX "dtype %.32s: must be F32, F16 or BF16", tensor->name,
               tensor->dtype_name);
        return NULL;
    }
    if ((uintptr_t)tensor->bytes % tensor_dtype_size(tensor->dtype) == 0)
        return tensor->bytes;

    aligned_copy *const copy = malloc(sizeof *copy + tensor->size);
    if (!copy) {
        refuse(error, file->path, TENSOR_PREFIX "out of memory for an aligned copy of %zu bytes", tensor->name,
               tensor->size);
        return NULL;
    }
    copy->next = file->copies;
    file->copies = copy;
    memcpy(copy->data, tensor->bytes, tensor->size);
    file->tensors[tensor - file->tensors].bytes = (const unsigned char *)copy->data;
    return copy->data;
}

const char *tensor_file_metadata(const tensor_file *file, const char *key)
{
    return json_string_value(json_object_get(json_object_get(file->header, "__metadata__"), key));
}
