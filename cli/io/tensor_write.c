/* Writes safetensors files. */
#include "cli/common/cli.h"
#include "cli/io/file_write.h"

#include <assert.h>
#include <errno.h>
#include <stdlib.h>

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

/* Fails unless a part of the header was made. Jansson fails for two reasons and reports neither; errno of malloc()
 * distinguishes them. */
static void check_header(bool made, const char *path, const char *what, const char *name)
{
    if (!made && errno == ENOMEM)
        cli_fail(CLI_NO_MEMORY, "%s: %s \"%.100s\": out of memory", path, what, name);
    if (!made)
        cli_fail(CLI_WRITE_FAILED, "%s: %s \"%.100s\": not valid UTF-8", path, what, name);
}

static json_t *describe_tensor(const output_tensor *tensor, size_t begin, size_t end)
{
    json_t *const shape = json_array();
    for (int d = 0; d < tensor->rank; d++)
        cli_json_append(shape, json_integer(tensor->shape[d]));
    return json_pack("{s:s, s:o, s:[I, I]}", "dtype", tensor_dtype_name(tensor->dtype), "shape", shape,
                     "data_offsets", (json_int_t)begin, (json_int_t)end);
}

static void describe_metadata(json_t *header, const char *path, const output_metadata *metadata, size_t count)
{
    json_t *const strings = json_object();
    for (size_t i = 0; i < count; i++)
        check_header(json_object_set_new(strings, metadata[i].key, json_string(metadata[i].value)) == 0, path,
                     "__metadata__", metadata[i].key);
    cli_json_set(header, "__metadata__", strings);
}

static void describe_tensors(json_t *header, const char *path, const output_tensor *const *tensors, size_t count)
{
    size_t end = 0;
    for (size_t i = 0; i < count; i++) {
        const output_tensor *const tensor = tensors[i];
        const size_t begin = end;
        end += output_size(tensor);
        if (strcmp(tensor->name, "__metadata__") == 0 || json_object_get(header, tensor->name))
            cli_fail(CLI_WRITE_FAILED, "%s: " TENSOR_PREFIX "the name is used twice or reserved", path, tensor->name);
        check_header(json_object_set_new(header, tensor->name, describe_tensor(tensor, begin, end)) == 0, path,
                     "tensor", tensor->name);
    }
}

/* u64 length, JSON text, spaces up to a multiple of 8. */
static file_part encode_header(const json_t *header, const char *path)
{
    const size_t text_size = json_dumpb(header, NULL, 0, JSON_COMPACT);
    const uint64_t padded_size = (text_size + 7) / 8 * 8;
    if (padded_size > SAFETENSORS_HEADER_SIZE_MAX)
        cli_fail(CLI_WRITE_FAILED, "%s: header of %zu bytes: must be at most %d", path, text_size,
                 SAFETENSORS_HEADER_SIZE_MAX);
    const size_t size = sizeof padded_size + padded_size;
    char *const bytes = cli_allocate(size, "the header of a file");
    memcpy(bytes, &padded_size, sizeof padded_size);
    char *const text = bytes + sizeof padded_size;
    memset(text, ' ', padded_size);
    if (text_size == 0 || json_dumpb(header, text, text_size, JSON_COMPACT) != text_size)
        cli_fail(CLI_NO_MEMORY, "%s: header: out of memory", path);
    return (file_part){bytes, size};
}

void file_write_tensors(const char *path, const output_tensor *tensors, size_t tensor_count,
                        const output_metadata *metadata, size_t metadata_count)
{
    const output_tensor **const sorted = cli_allocate_zeros(tensor_count, sizeof *sorted, "the list of tensors");
    file_part *const parts = cli_allocate_zeros(tensor_count + 1, sizeof *parts, "the list of tensors");
    for (size_t i = 0; i < tensor_count; i++)
        sorted[i] = &tensors[i];
    qsort(sorted, tensor_count, sizeof *sorted, by_alignment_and_name);
    errno = 0;
    json_t *const header = json_object();
    if (metadata_count > 0)
        describe_metadata(header, path, metadata, metadata_count);
    describe_tensors(header, path, sorted, tensor_count);
    parts[0] = encode_header(header, path);
    for (size_t i = 0; i < tensor_count; i++)
        parts[1 + i] = (file_part){sorted[i]->data, output_size(sorted[i])};
    file_write_parts(path, parts, tensor_count + 1);
    json_decref(header);
    free((void *)parts[0].data);
    free(parts);
    free(sorted);
}
