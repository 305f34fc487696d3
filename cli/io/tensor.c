#include "cli/io/tensor_file.h"

#include <assert.h>
#include <inttypes.h>
#include <stdio.h>
#include <string.h>

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

/* ---- Messages and shapes ----------------------------------------------------------------------------------- */

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
