#include "cli/io/tensor_file.h"
#include "cli/common/cli.h"

#include <assert.h>
#include <inttypes.h>
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
    (npy_recognize(file) ? npy_parse : safetensors_parse)(file);
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

/* ---- Types and shapes --------------------------------------------------------------------------------------- */

_Static_assert(__BYTE_ORDER__ == __ORDER_LITTLE_ENDIAN__, "both formats are little-endian and used in memory order");
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

static float float_of_f16(uint16_t half)
{
    const uint32_t sign = (uint32_t)(half & 0x8000) << 16, exponent = half >> 10 & 31, fraction = half & 0x3ff;
    if (exponent == 0) { /* zero and subnormals: fraction * 2^-24 */
        const float value = (float)fraction * 0x1p-24F;
        return sign ? -value : value;
    }
    const uint32_t wide = exponent == 31 ? 255 : exponent + 112;
    const uint32_t bits = sign | wide << 23 | fraction << 13;
    float value;
    memcpy(&value, &bits, sizeof value);
    return value;
}

static float float_of_bf16(uint16_t upper)
{
    const uint32_t bits = (uint32_t)upper << 16;
    float value;
    memcpy(&value, &bits, sizeof value);
    return value;
}

float tensor_number_at(const void *data, skl_dtype dtype, int64_t index)
{
    if (dtype == SKL_F32)
        return ((const float *)data)[index];
    const uint16_t bits = ((const uint16_t *)data)[index];
    return dtype == SKL_F16 ? float_of_f16(bits) : float_of_bf16(bits);
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
