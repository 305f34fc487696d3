#include "cli/io/tensor_file.h"
#include "cli/common/cli.h"

#include <assert.h>
#include <stdio.h>
#include <stdlib.h>

typedef struct aligned_copy {
    struct aligned_copy *next;
    max_align_t data[];
} aligned_copy;

/* ---- Open and close ---------------------------------------------------------------------------------------- */

/* The content decides, not the name of the file. */
static void parse(tensor_file *file)
{
    (npy_recognise(file) ? npy_parse : safetensors_parse)(file);
}

void tensor_file_parse(tensor_file *file, const void *bytes, size_t size, const char *path)
{
    *file = (tensor_file){.path = path, .bytes = bytes, .size = size};
    parse(file);
}

void tensor_file_open(tensor_file *file, const char *path)
{
    *file = (tensor_file){.path = path};
    mapped_file_open(&file->mapping, path);
    file->bytes = file->mapping.bytes;
    file->size = file->mapping.size;
    parse(file);
}

void tensor_file_close(tensor_file *file)
{
    for (aligned_copy *copy = file->copies; copy;) {
        aligned_copy *const next = copy->next;
        free(copy);
        copy = next;
    }
    free(file->tensors);
    json_decref(file->header);
    mapped_file_close(&file->mapping);
}

/* ---- Tensors ----------------------------------------------------------------------------------------------- */

tensor_names tensor_file_names(const tensor_file *file)
{
    static const char more[] = "...";
    tensor_names names = {""};
    size_t length = 0;
    for (size_t i = 0; i < file->tensor_count; i++) {
        const size_t room = sizeof names.text - length;
        const int added = snprintf(names.text + length, room, "%s\"%s\"", i ? ", " : "", file->tensors[i].name);
        if (added < 0 || (size_t)added + sizeof more > room) {
            memcpy(names.text + length, more, sizeof more);
            break;
        }
        length += (size_t)added;
    }
    return names;
}

const stored_tensor *tensor_file_find(const tensor_file *file, const char *name)
{
    for (size_t i = 0; i < file->tensor_count; i++)
        if (strcmp(file->tensors[i].name, name) == 0)
            return &file->tensors[i];
    return NULL;
}

const void *tensor_file_data(tensor_file *file, const stored_tensor *tensor)
{
    assert(tensor >= file->tensors && tensor < file->tensors + file->tensor_count);
    if (!tensor->supported)
        file_refuse(file->path, TENSOR_PREFIX "dtype %.32s: must be F32, F16 or BF16", tensor->name,
                    tensor->dtype_name);
    if ((uintptr_t)tensor->bytes % tensor_dtype_size(tensor->dtype) == 0)
        return tensor->bytes;

    aligned_copy *const copy = cli_allocate(sizeof *copy + tensor->size, "an aligned copy of a tensor");
    copy->next = file->copies;
    file->copies = copy;
    memcpy(copy->data, tensor->bytes, tensor->size);
    file->tensors[tensor - file->tensors].bytes = (const unsigned char *)copy->data;
    return copy->data;
}
