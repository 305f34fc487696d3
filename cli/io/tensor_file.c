#include "cli/io/tensor_file.h"
#include "cli/io/mapped_file.h"
#include "cli/io/npy.h"
#include "cli/io/safetensors.h"

#include <assert.h>
#include <jansson.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

/* A tensor that was copied to an aligned address. */
typedef struct aligned_copy {
    struct aligned_copy *next;
    max_align_t data[];
} aligned_copy;

struct tensor_file {
    tensor_contents contents;
    mapped_file *mapping; /* NULL: the bytes belong to the caller */
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

tensor_file *tensor_file_open(const char *path, tensor_error *error)
{
    mapped_file *const mapping = mapped_file_open(path, error);
    if (!mapping)
        return NULL;
    tensor_file *const file = tensor_file_parse(mapped_file_bytes(mapping), mapped_file_size(mapping), path, error);
    if (!file) {
        mapped_file_close(mapping);
        return NULL;
    }
    file->mapping = mapping;
    return file;
}

bool tensor_file_unchanged(const tensor_file *file, tensor_error *error)
{
    return !file->mapping || mapped_file_unchanged(file->mapping, file->path, error);
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
    mapped_file_close(file->mapping);
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
