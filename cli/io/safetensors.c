/* The safetensors header:
 *
 *     u64 length, then `length` bytes of JSON
 *         {"__metadata__": {"key": "text"}, "name": {"dtype": "F32", "shape": [2, 3], "data_offsets": [0, 24]}, ...}
 *     then the data section, which the tensors cover without gaps or overlaps.
 */
#include <errno.h>
#include <jansson.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "cli/io/safetensors.h"

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

typedef struct header_parser {
    const char *path;
    const unsigned char *data; /* the data section */
    size_t data_size;
    tensor_error *error;
} header_parser;

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

/* Reads info[field], an array of at most `count_max` non-negative integers. */
static bool read_counts(const header_parser *parser, const char *name, const json_t *info, const char *field,
                        int64_t *counts, size_t count_max, size_t *count)
{
    const json_t *const array = json_object_get(info, field);
    if (!json_is_array(array))
        return tensor_refuse(parser->error, parser->path, TENSOR_PREFIX "%s %s: must be an array of integers", name,
                             field, value_print(array).text);
    *count = json_array_size(array);
    if (*count > count_max)
        return tensor_refuse(parser->error, parser->path, TENSOR_PREFIX "%s has %zu entries: must be at most %zu",
                             name, field, *count, count_max);
    for (size_t i = 0; i < *count; i++) {
        const json_t *const entry = json_array_get(array, i);
        if (!json_is_integer(entry) || json_integer_value(entry) < 0)
            return tensor_refuse(parser->error, parser->path,
                                 TENSOR_PREFIX "%s[%zu] %s: must be an integer of at least 0", name, field, i,
                                 value_print(entry).text);
        counts[i] = json_integer_value(entry);
    }
    return true;
}

/* `item_size` is 0 for a type of unknown size. */
static bool read_dtype(const header_parser *parser, const json_t *info, stored_tensor *tensor, size_t *item_size)
{
    const json_t *const dtype = json_object_get(info, "dtype");
    if (!json_is_string(dtype))
        return tensor_refuse(parser->error, parser->path, TENSOR_PREFIX "dtype %s: must be a string", tensor->name,
                             value_print(dtype).text);
    tensor->dtype_name = json_string_value(dtype);

    const skl_dtype supported[] = {SKL_F32, SKL_F16, SKL_BF16};
    for (size_t i = 0; i < sizeof supported / sizeof supported[0]; i++) {
        if (strcmp(tensor->dtype_name, tensor_dtype_name(supported[i])) == 0) {
            tensor->supported = true;
            tensor->dtype = supported[i];
            *item_size = tensor_dtype_size(supported[i]);
            return true;
        }
    }
    *item_size = 0;
    for (size_t i = 0; i < sizeof other_dtypes / sizeof other_dtypes[0]; i++)
        if (strcmp(tensor->dtype_name, other_dtypes[i].name) == 0)
            *item_size = other_dtypes[i].size;
    return true;
}

/* Sets address and size of the tensor. */
static bool read_offsets(const header_parser *parser, const json_t *info, stored_tensor *tensor)
{
    int64_t offsets[2] = {0};
    size_t count = 0;
    if (!read_counts(parser, tensor->name, info, "data_offsets", offsets, 2, &count))
        return false;
    if (count != 2)
        return tensor_refuse(parser->error, parser->path,
                             TENSOR_PREFIX "data_offsets has %zu entries: must be [begin, end]", tensor->name, count);
    const size_t begin = (size_t)offsets[0];
    const size_t end = (size_t)offsets[1];
    if (end < begin)
        return tensor_refuse(parser->error, parser->path, TENSOR_PREFIX "data_offsets [%zu, %zu]: end before begin",
                             tensor->name, begin, end);
    if (end > parser->data_size)
        return tensor_refuse(parser->error, parser->path,
                             TENSOR_PREFIX "data_offsets [%zu, %zu]: end past the %zu bytes of data", tensor->name,
                             begin, end, parser->data_size);
    tensor->bytes = parser->data + begin;
    tensor->size = end - begin;
    return true;
}

static bool read_tensor(const header_parser *parser, const char *name, const json_t *info, stored_tensor *tensor)
{
    tensor->name = name;
    if (!json_is_object(info))
        return tensor_refuse(parser->error, parser->path, TENSOR_PREFIX "%s: must be an object", name,
                             value_print(info).text);

    size_t item_size = 0;
    if (!read_dtype(parser, info, tensor, &item_size))
        return false;
    size_t rank = 0;
    if (!read_counts(parser, name, info, "shape", tensor->shape, TENSOR_RANK_MAX, &rank))
        return false;
    tensor->rank = (int)rank;
    if (!read_offsets(parser, info, tensor))
        return false;

    size_t size = 0;
    if (!shape_size(tensor->shape, tensor->rank, item_size ? item_size : 1, &size))
        return tensor_refuse(parser->error, parser->path, TENSOR_PREFIX "shape %s: its size overflows 64 bits", name,
                             shape_print(tensor->shape, tensor->rank).text);
    if (item_size && size != tensor->size)
        return tensor_refuse(parser->error, parser->path,
                             TENSOR_PREFIX "data_offsets span %zu bytes: shape %s of %s takes %zu", name,
                             tensor->size, shape_print(tensor->shape, tensor->rank).text, tensor->dtype_name, size);
    return true;
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
static bool check_cover(const header_parser *parser, const stored_tensor *tensors, size_t tensor_count)
{
    const unsigned char *covered = parser->data;
    for (size_t i = 0; i < tensor_count; i++) {
        const stored_tensor *const tensor = &tensors[i];
        const size_t begin = (size_t)(tensor->bytes - parser->data);
        if (tensor->bytes < covered)
            return tensor_refuse(parser->error, parser->path,
                                 TENSOR_PREFIX "data_offsets [%zu, %zu]: overlaps tensor \"%.100s\"", tensor->name,
                                 begin, begin + tensor->size, tensors[i - 1].name);
        if (tensor->bytes > covered)
            return tensor_refuse(parser->error, parser->path,
                                 TENSOR_PREFIX "data_offsets [%zu, %zu]: must begin at %zu, without a gap",
                                 tensor->name, begin, begin + tensor->size, (size_t)(covered - parser->data));
        covered = tensor->bytes + tensor->size;
    }
    const size_t covered_size = (size_t)(covered - parser->data);
    if (covered_size != parser->data_size)
        return tensor_refuse(parser->error, parser->path, "%zu bytes of data: the tensors end at %zu",
                             parser->data_size, covered_size);
    return true;
}

static bool check_metadata(const header_parser *parser, json_t *metadata)
{
    if (!json_is_object(metadata))
        return tensor_refuse(parser->error, parser->path, "__metadata__ %s: must be an object of strings",
                             value_print(metadata).text);
    const char *key;
    json_t *value;
    json_object_foreach(metadata, key, value)
    {
        if (!json_is_string(value))
            return tensor_refuse(parser->error, parser->path, "__metadata__ \"%.100s\" %s: must be a string", key,
                                 value_print(value).text);
    }
    return true;
}

/* Finds the JSON text and the data section after it. */
static bool split_file(const tensor_contents *file, header_parser *parser, const char **json, size_t *json_size)
{
    uint64_t length;
    if (file->size <= sizeof length)
        return tensor_refuse(parser->error, parser->path, "%zu bytes: too short for a safetensors header",
                             file->size);
    memcpy(&length, file->bytes, sizeof length);
    const unsigned char *const text = file->bytes + sizeof length;
    const size_t text_size_max = file->size - sizeof length;
    if (text[0] != '{')
        return tensor_refuse(parser->error, parser->path,
                             "neither safetensors (byte 8 is 0x%02x, not '{') nor .npy (byte 0 is 0x%02x, not 0x93)",
                             text[0], file->bytes[0]);
    if (length > SAFETENSORS_HEADER_SIZE_MAX)
        return tensor_refuse(parser->error, parser->path, "header length %llu: must be at most %d",
                             (unsigned long long)length, SAFETENSORS_HEADER_SIZE_MAX);
    if (length > text_size_max)
        return tensor_refuse(parser->error, parser->path, "header length %llu: only %zu bytes follow",
                             (unsigned long long)length, text_size_max);
    *json = (const char *)text;
    *json_size = (size_t)length;
    parser->data = text + length;
    parser->data_size = text_size_max - (size_t)length;
    return true;
}

static json_t *load_json(const header_parser *parser, const char *json, size_t json_size)
{
    json_error_t problem;
    errno = 0;
    json_t *const header = json_loadb(json, json_size, JSON_REJECT_DUPLICATES, &problem);
    if (header)
        return header;
    if (errno == ENOMEM) /* Jansson does not always report it */
        tensor_refuse(parser->error, parser->path, "header: out of memory");
    else
        tensor_refuse(parser->error, parser->path, "header byte %d: %s", problem.position, problem.text);
    return NULL;
}

bool safetensors_parse(tensor_contents *file, tensor_error *error)
{
    header_parser parser = {.path = file->path, .error = error};
    const char *json = NULL;
    size_t json_size = 0;
    if (!split_file(file, &parser, &json, &json_size))
        return false;
    file->header = load_json(&parser, json, json_size);
    if (!file->header)
        return false;

    file->tensors = calloc(json_object_size(file->header) + 1, sizeof *file->tensors); /* + 1: the size is never 0 */
    if (!file->tensors)
        return tensor_refuse(error, file->path, "header: out of memory");
    const char *name;
    json_t *info;
    json_object_foreach(file->header, name, info)
    {
        if (strcmp(name, "__metadata__") == 0) {
            if (!check_metadata(&parser, info))
                return false;
            continue;
        }
        if (!read_tensor(&parser, name, info, &file->tensors[file->tensor_count]))
            return false;
        file->tensor_count++;
    }
    qsort(file->tensors, file->tensor_count, sizeof *file->tensors, by_address);
    return check_cover(&parser, file->tensors, file->tensor_count);
}
