#define _POSIX_C_SOURCE 200809L

#include "cli/io/tensor_file.h"
#include "cli/io/npy.h"
#include "cli/io/safetensors.h"

#include <assert.h>
#include <errno.h>
#include <fcntl.h>
#include <jansson.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <unistd.h>

/* A tensor that was copied to an aligned address. */
typedef struct aligned_copy {
    struct aligned_copy *next;
    max_align_t data[];
} aligned_copy;

struct tensor_file {
    tensor_contents contents;
    bool mapped; /* closing unmaps the bytes */
    aligned_copy *copies;
    char path[];
};

/* ---- Open and close ---------------------------------------------------------------------------------------- */

/* The content decides, not the name of the file. */
static bool parse(tensor_contents *file, tensor_error *error)
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
        tensor_refuse(error, path, "out of memory");
        return NULL;
    }
    memcpy(file->path, path, path_size);
    file->contents = (tensor_contents){.path = file->path, .bytes = bytes, .size = size};

    if (!parse(&file->contents, error)) {
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
        tensor_refuse(error, path, "%s", problem);
        return NULL;
    }

    *size = (size_t)status.st_size;
    void *const bytes = mmap(NULL, *size, PROT_READ, MAP_PRIVATE, fd, 0);
    if (bytes == MAP_FAILED) {
        tensor_refuse(error, path, "cannot map %zu bytes: %s", *size, strerror(errno));
        return NULL;
    }
    return bytes;
}

tensor_file *tensor_file_open(const char *path, tensor_error *error)
{
    /* O_NONBLOCK: otherwise opening a FIFO would wait for a writer. */
    const int fd = open(path, O_RDONLY | O_NONBLOCK | O_CLOEXEC);
    if (fd < 0) {
        tensor_refuse(error, path, "cannot open: %s", strerror(errno));
        return NULL;
    }
    size_t size = 0;
    void *const bytes = map_file(fd, path, &size, error);
    close(fd); /* the mapping remains */
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
    free(file->contents.tensors);
    json_decref(file->contents.header);
    if (file->mapped)
        munmap((void *)file->contents.bytes, file->contents.size);
    free(file);
}

/* ---- Tensors ----------------------------------------------------------------------------------------------- */

const stored_tensor *tensor_file_at(const tensor_file *file, size_t index)
{
    return index < file->contents.tensor_count ? &file->contents.tensors[index] : NULL;
}

/* "\"k_s\", \"k_t\", ...": as many names as fit, to reveal a misspelling. */
static void list_names(const tensor_file *file, char *text, size_t text_size)
{
    static const char more[] = "...";
    size_t length = 0;
    text[0] = '\0';
    for (size_t i = 0; i < file->contents.tensor_count; i++) {
        const size_t room = text_size - length;
        const int added = snprintf(text + length, room, "%s\"%s\"", i ? ", " : "", file->contents.tensors[i].name);
        if (added < 0 || (size_t)added + sizeof more > room) {
            memcpy(text + length, more, sizeof more);
            return;
        }
        length += (size_t)added;
    }
}

const stored_tensor *tensor_file_find(const tensor_file *file, const char *name, tensor_error *error)
{
    for (size_t i = 0; i < file->contents.tensor_count; i++)
        if (strcmp(file->contents.tensors[i].name, name) == 0)
            return &file->contents.tensors[i];

    char names[300];
    list_names(file, names, sizeof names);
    tensor_refuse(error, file->path, TENSOR_PREFIX "not found among %zu: %s", name, file->contents.tensor_count,
                  names);
    return NULL;
}

const void *tensor_file_data(tensor_file *file, const stored_tensor *tensor, tensor_error *error)
{
    assert(tensor >= file->contents.tensors && tensor < file->contents.tensors + file->contents.tensor_count);
    if (!tensor->supported) {
        tensor_refuse(error, file->path, TENSOR_PREFIX "dtype %.32s: must be F32, F16 or BF16", tensor->name,
                      tensor->dtype_name);
        return NULL;
    }
    if ((uintptr_t)tensor->bytes % tensor_dtype_size(tensor->dtype) == 0)
        return tensor->bytes;

    aligned_copy *const copy = malloc(sizeof *copy + tensor->size);
    if (!copy) {
        tensor_refuse(error, file->path, TENSOR_PREFIX "out of memory for an aligned copy of %zu bytes", tensor->name,
                      tensor->size);
        return NULL;
    }
    copy->next = file->copies;
    file->copies = copy;
    memcpy(copy->data, tensor->bytes, tensor->size);
    file->contents.tensors[tensor - file->contents.tensors].bytes = (const unsigned char *)copy->data;
    return copy->data;
}

const char *tensor_file_metadata(const tensor_file *file, const char *key)
{
    return json_string_value(json_object_get(json_object_get(file->contents.header, "__metadata__"), key));
}
