/* The safetensors header:
 *
 *     u64 length, then `length` bytes of JSON
 *         {"__metadata__": {"key": "text"}, "name": {"dtype": "F32", "shape": [2, 3], "data_offsets": [0, 24]}, ...}
 *     then the data section, which the tensors cover without gaps or overlaps.
 */
#include "cli/common/cli.h"
#include "cli/io/file_write.h"

#include <assert.h>
#include <errno.h>
#include <stdlib.h>

/* Unsupported types whose sizes can be checked. For types that are not listed (smaller than a byte, or newer than
 * this table) only the offsets are checked. */
static const struct {
    const char *name;
    size_t size;
} other_dtypes[] = {
    {"BOOL", 1},        {"U8", 1},          {"I8", 1},  {"F8_E5M2", 1}, {"F8_E4M3", 1}, {"F8_E8M0", 1},
    {"F8_E4M3FNUZ", 1}, {"F8_E5M2FNUZ", 1}, {"I16", 2}, {"U16", 2},     {"I32", 4},     {"U32", 4},
    {"C64", 8},         {"F64", 8},         {"I64", 8}, {"U64", 8},
};

/* A JSON value in a message; NULL is a missing field. */
typedef struct value_text {
    char text[64];
} value_text;

static value_text value_print(const json_t *value)
{
    static const char *const spelled[] = {
        [JSON_OBJECT] = "{...}", [JSON_ARRAY] = "[...]", [JSON_TRUE] = "true",
        [JSON_FALSE] = "false",  [JSON_NULL] = "null",
    };
    value_text shown = {"missing"};
    if (json_is_integer(value))
        snprintf(shown.text, sizeof shown.text, "%lld", (long long)json_integer_value(value));
    else if (json_is_real(value))
        snprintf(shown.text, sizeof shown.text, "%g", json_real_value(value));
    else if (json_is_string(value))
        snprintf(shown.text, sizeof shown.text, "\"%.32s\"", json_string_value(value));
    else if (value)
        snprintf(shown.text, sizeof shown.text, "%s", spelled[json_typeof(value)]);
    return shown;
}

/* ---- One tensor -------------------------------------------------------------------------------------------- */

/* Reads info[field], an array of at most `count_max` non-negative integers. Returns their number. */
static size_t read_counts(const tensor_file *file, const char *name, const json_t *info, const char *field,
                          int64_t *counts, size_t count_max)
{
    const json_t *const array = json_object_get(info, field);
    if (!json_is_array(array))
        file_refuse(file->path, TENSOR_PREFIX "%s %s: must be an array of integers", name, field,
                    value_print(array).text);
    const size_t count = json_array_size(array);
    if (count > count_max)
        file_refuse(file->path, TENSOR_PREFIX "%s has %zu entries: must be at most %zu", name, field, count,
                    count_max);
    for (size_t i = 0; i < count; i++) {
        const json_t *const entry = json_array_get(array, i);
        if (!json_is_integer(entry) || json_integer_value(entry) < 0)
            file_refuse(file->path, TENSOR_PREFIX "%s[%zu] %s: must be an integer of at least 0", name, field, i,
                        value_print(entry).text);
        counts[i] = json_integer_value(entry);
    }
    return count;
}

/* Returns the size of an element; 0 for a type of unknown size. */
static size_t read_dtype(const tensor_file *file, const json_t *info, stored_tensor *tensor)
{
    const json_t *const dtype = json_object_get(info, "dtype");
    if (!json_is_string(dtype))
        file_refuse(file->path, TENSOR_PREFIX "dtype %s: must be a string", tensor->name, value_print(dtype).text);
    tensor->dtype_name = json_string_value(dtype);

    const skl_dtype supported[] = {SKL_F32, SKL_F16, SKL_BF16};
    for (size_t i = 0; i < sizeof supported / sizeof supported[0]; i++) {
        if (strcmp(tensor->dtype_name, tensor_dtype_name(supported[i])) == 0) {
            tensor->supported = true;
            tensor->dtype = supported[i];
            return tensor_dtype_size(supported[i]);
        }
    }
    for (size_t i = 0; i < sizeof other_dtypes / sizeof other_dtypes[0]; i++)
        if (strcmp(tensor->dtype_name, other_dtypes[i].name) == 0)
            return other_dtypes[i].size;
    return 0;
}

/* The data section, from its beginning to the end of the file. */
typedef struct data_section {
    const unsigned char *begin;
    size_t size;
} data_section;

/* Sets address and size of the tensor. */
static void read_offsets(const tensor_file *file, data_section data, const json_t *info, stored_tensor *tensor)
{
    int64_t offsets[2] = {0};
    const size_t count = read_counts(file, tensor->name, info, "data_offsets", offsets, 2);
    if (count != 2)
        file_refuse(file->path, TENSOR_PREFIX "data_offsets has %zu entries: must be [begin, end]", tensor->name,
                    count);
    const size_t begin = (size_t)offsets[0], end = (size_t)offsets[1];
    if (end < begin)
        file_refuse(file->path, TENSOR_PREFIX "data_offsets [%zu, %zu]: end before begin", tensor->name, begin, end);
    if (end > data.size)
        file_refuse(file->path, TENSOR_PREFIX "data_offsets [%zu, %zu]: end past the %zu bytes of data", tensor->name,
                    begin, end, data.size);
    tensor->bytes = data.begin + begin;
    tensor->size = end - begin;
}

static stored_tensor read_tensor(const tensor_file *file, data_section data, const char *name, const json_t *info)
{
    stored_tensor tensor = {.name = name};
    if (!json_is_object(info))
        file_refuse(file->path, TENSOR_PREFIX "%s: must be an object", name, value_print(info).text);
    const size_t item_size = read_dtype(file, info, &tensor);
    tensor.rank = (int)read_counts(file, name, info, "shape", tensor.shape, TENSOR_RANK_MAX);
    read_offsets(file, data, info, &tensor);

    const shape_text shape = shape_print(tensor.shape, tensor.rank);
    size_t size = 0;
    if (!shape_size(tensor.shape, tensor.rank, item_size ? item_size : 1, &size))
        file_refuse(file->path, TENSOR_PREFIX "shape %s: its size overflows 64 bits", name, shape.text);
    if (item_size && size != tensor.size)
        file_refuse(file->path, TENSOR_PREFIX "data_offsets span %zu bytes: shape %s of %s takes %zu", name,
                    tensor.size, shape.text, tensor.dtype_name, size);
    return tensor;
}

/* ---- All of them ------------------------------------------------------------------------------------------- */

static int by_address(const void *left, const void *right)
{
    const stored_tensor *const a = left;
    const stored_tensor *const b = right;
    if (a->bytes != b->bytes)
        return a->bytes < b->bytes ? -1 : 1;
    return (a->size > b->size) - (a->size < b->size); /* empty tensors first: they overlap nothing */
}

/* Sorted by address, every tensor begins at the end of the previous one, and the last one ends with the file. */
static void check_cover(const tensor_file *file, data_section data)
{
    size_t covered = 0;
    for (size_t i = 0; i < file->tensor_count; i++) {
        const stored_tensor *const tensor = &file->tensors[i];
        const size_t begin = (size_t)(tensor->bytes - data.begin), end = begin + tensor->size;
        if (begin < covered)
            file_refuse(file->path, TENSOR_PREFIX "data_offsets [%zu, %zu]: overlaps tensor \"%.100s\"", tensor->name,
                        begin, end, file->tensors[i - 1].name);
        if (begin > covered)
            file_refuse(file->path, TENSOR_PREFIX "data_offsets [%zu, %zu]: must begin at %zu, without a gap",
                        tensor->name, begin, end, covered);
        covered = end;
    }
    if (covered != data.size)
        file_refuse(file->path, "%zu bytes of data: the tensors end at %zu", data.size, covered);
}

static void check_metadata(const tensor_file *file, json_t *metadata)
{
    if (!json_is_object(metadata))
        file_refuse(file->path, "__metadata__ %s: must be an object of strings", value_print(metadata).text);
    const char *key;
    json_t *value;
    json_object_foreach(metadata, key, value)
    {
        if (!json_is_string(value))
            file_refuse(file->path, "__metadata__ \"%.100s\" %s: must be a string", key, value_print(value).text);
    }
}

/* Loads the JSON text, which the data section follows. */
static data_section load_header(tensor_file *file)
{
    uint64_t length;
    if (file->size <= sizeof length)
        file_refuse(file->path, "%zu bytes: too short for a safetensors header", file->size);
    memcpy(&length, file->bytes, sizeof length);
    const unsigned char *const text = file->bytes + sizeof length;
    const size_t text_size_max = file->size - sizeof length;
    if (text[0] != '{')
        file_refuse(file->path,
                    "neither safetensors (byte 8 is 0x%02x, not '{') nor .npy (byte 0 is 0x%02x, not 0x93)", text[0],
                    file->bytes[0]);
    if (length > SAFETENSORS_HEADER_SIZE_MAX)
        file_refuse(file->path, "header length %llu: must be at most %d", (unsigned long long)length,
                    SAFETENSORS_HEADER_SIZE_MAX);
    if (length > text_size_max)
        file_refuse(file->path, "header length %llu: only %zu bytes follow", (unsigned long long)length,
                    text_size_max);
    json_error_t problem;
    errno = 0;
    file->header = json_loadb((const char *)text, (size_t)length, JSON_REJECT_DUPLICATES, &problem);
    if (!file->header && errno == ENOMEM) /* Jansson does not always report it */
        cli_fail(CLI_NO_MEMORY, "%s: header: out of memory", file->path);
    if (!file->header)
        file_refuse(file->path, "header byte %d: %s", problem.position, problem.text);
    return (data_section){text + length, text_size_max - (size_t)length};
}

void safetensors_parse(tensor_file *file)
{
    const data_section data = load_header(file);
    file->tensors = cli_allocate_zeros(json_object_size(file->header), sizeof *file->tensors, "the list of tensors");
    const char *name;
    json_t *info;
    json_object_foreach(file->header, name, info)
    {
        if (strcmp(name, "__metadata__") == 0)
            check_metadata(file, info);
        else
            file->tensors[file->tensor_count++] = read_tensor(file, data, name, info);
    }
    qsort(file->tensors, file->tensor_count, sizeof *file->tensors, by_address);
    check_cover(file, data);
}

/* ---- Writing ------------------------------------------------------------------------------------------------ */

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
