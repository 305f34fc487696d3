#define _POSIX_C_SOURCE 200809L

#include <assert.h>
#include <errno.h>
#include <jansson.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#include "cli/io/tensor_write.h"
#include "cli/io/safetensors.h"

/* The header, followed by the tensors in this order. */
typedef struct file_contents {
    const output_tensor **tensors;
    size_t tensor_count;
    unsigned char *header; /* its length, the JSON text and padding */
    size_t header_size;
} file_contents;

/* ---- The header -------------------------------------------------------------------------------------------- */

/* Wide elements first, so that every tensor is aligned if the data section is; then by name, for a fixed order. */
static int by_alignment_and_name(const void *left, const void *right)
{
    const output_tensor *const a = *(const output_tensor *const *)left;
    const output_tensor *const b = *(const output_tensor *const *)right;
    const size_t size_a = tensor_dtype_size(a->dtype);
    const size_t size_b = tensor_dtype_size(b->dtype);
    if (size_a != size_b)
        return size_a > size_b ? -1 : 1;
    return strcmp(a->name, b->name);
}

static size_t output_size(const output_tensor *tensor)
{
    size_t size = 0;
    const bool countable = shape_size(tensor->shape, tensor->rank, tensor_dtype_size(tensor->dtype), &size);
    assert(countable && (tensor->data || size == 0)); /* it fits into memory */
    (void)countable;
    return size;
}

/* Jansson fails for two reasons and reports neither; errno of malloc() distinguishes them. Set errno = 0 before. */
static const char *json_problem(void)
{
    return errno == ENOMEM ? "out of memory" : "not valid UTF-8";
}

static json_t *describe_tensor(const output_tensor *tensor, size_t begin, size_t end)
{
    json_t *const shape = json_array();
    for (int d = 0; d < tensor->rank; d++) {
        if (json_array_append_new(shape, json_integer(tensor->shape[d])) != 0) {
            json_decref(shape);
            return NULL;
        }
    }
    return json_pack("{s:s, s:o, s:[I, I]}", "dtype", tensor_dtype_name(tensor->dtype), "shape", shape,
                     "data_offsets", (json_int_t)begin, (json_int_t)end);
}

static bool describe_metadata(json_t *header, const output_metadata *metadata, size_t metadata_count,
                              const char *path, tensor_error *error)
{
    json_t *const strings = json_object();
    if (json_object_set_new(header, "__metadata__", strings) != 0)
        return tensor_refuse(error, path, "__metadata__: %s", json_problem());
    for (size_t i = 0; i < metadata_count; i++)
        if (json_object_set_new(strings, metadata[i].key, json_string(metadata[i].value)) != 0)
            return tensor_refuse(error, path, "__metadata__ \"%.100s\": %s", metadata[i].key, json_problem());
    return true;
}

static bool describe_tensors(json_t *header, const file_contents *contents, const char *path, tensor_error *error)
{
    size_t end = 0;
    for (size_t i = 0; i < contents->tensor_count; i++) {
        const output_tensor *const tensor = contents->tensors[i];
        const size_t begin = end;
        end += output_size(tensor);
        if (strcmp(tensor->name, "__metadata__") == 0 || json_object_get(header, tensor->name))
            return tensor_refuse(error, path, TENSOR_PREFIX "the name is used twice or reserved", tensor->name);
        if (json_object_set_new(header, tensor->name, describe_tensor(tensor, begin, end)) != 0)
            return tensor_refuse(error, path, TENSOR_PREFIX "%s", tensor->name, json_problem());
    }
    return true;
}

/* u64 length, JSON text, spaces up to a multiple of 8. */
static bool encode_header(const json_t *header, file_contents *contents, const char *path, tensor_error *error)
{
    const size_t text_size = json_dumpb(header, NULL, 0, JSON_COMPACT);
    const uint64_t padded_size = (text_size + 7) / 8 * 8;
    if (padded_size > SAFETENSORS_HEADER_SIZE_MAX)
        return tensor_refuse(error, path, "header of %zu bytes: must be at most %d", text_size,
                             SAFETENSORS_HEADER_SIZE_MAX);

    contents->header_size = sizeof padded_size + padded_size;
    contents->header = malloc(contents->header_size);
    if (text_size == 0 || !contents->header)
        return tensor_refuse(error, path, "header: out of memory");
    memcpy(contents->header, &padded_size, sizeof padded_size);
    char *const text = (char *)contents->header + sizeof padded_size;
    memset(text, ' ', padded_size);
    if (json_dumpb(header, text, text_size, JSON_COMPACT) != text_size)
        return tensor_refuse(error, path, "header: out of memory");
    return true;
}

static bool make_header(file_contents *contents, const output_metadata *metadata, size_t metadata_count,
                        const char *path, tensor_error *error)
{
    errno = 0;
    json_t *const header = json_object();
    const bool made = (metadata_count == 0 || describe_metadata(header, metadata, metadata_count, path, error)) &&
                      describe_tensors(header, contents, path, error) && encode_header(header, contents, path, error);
    json_decref(header);
    return made;
}

/* ---- The file ---------------------------------------------------------------------------------------------- */

/* On failure returns false and sets errno. */
static bool write_all(int fd, const void *data, size_t size)
{
    const unsigned char *next = data;
    while (size > 0) {
        const ssize_t written = write(fd, next, size);
        if (written < 0 && errno == EINTR)
            continue;
        if (written < 0)
            return false;
        next += written;
        size -= (size_t)written;
    }
    return true;
}

static bool write_contents(int fd, const file_contents *contents)
{
    if (!write_all(fd, contents->header, contents->header_size))
        return false;
    for (size_t i = 0; i < contents->tensor_count; i++)
        if (!write_all(fd, contents->tensors[i]->data, output_size(contents->tensors[i])))
            return false;
    return fsync(fd) == 0;
}

static bool write_file(file_set *set, const char *path, const file_contents *contents, tensor_error *error)
{
    const int fd = file_set_add(set, path, error);
    if (fd < 0)
        return false;
    if (!write_contents(fd, contents))
        return tensor_refuse(error, path, "cannot write: %s", strerror(errno));
    return file_set_close(set, error);
}

bool tensor_write_into(file_set *set, const char *path, const output_tensor *tensors, size_t tensor_count,
                       const output_metadata *metadata, size_t metadata_count, tensor_error *error)
{
    file_contents contents = {.tensor_count = tensor_count};
    contents.tensors = calloc(tensor_count + 1, sizeof *contents.tensors); /* + 1: the size is never 0 */
    if (!contents.tensors)
        return tensor_refuse(error, path, "out of memory");
    for (size_t i = 0; i < tensor_count; i++)
        contents.tensors[i] = &tensors[i];
    qsort(contents.tensors, tensor_count, sizeof *contents.tensors, by_alignment_and_name);

    const bool written =
        make_header(&contents, metadata, metadata_count, path, error) && write_file(set, path, &contents, error);
    free(contents.header);
    free(contents.tensors);
    return written;
}
