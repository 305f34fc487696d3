#include "tensor.h"

#include <math.h>
#include <stdlib.h>

#include "oracle.h"

/* ---- Element types ----------------------------------------------------------------------------------------- */

size_t dtype_size(skl_dtype dtype)
{
    return dtype == SKL_F32 ? 4 : 2;
}

/* Stored fraction bits, and exponent of the smallest normal number. */
static int fraction_bits(skl_dtype dtype)
{
    return dtype == SKL_F16 ? 10 : dtype == SKL_BF16 ? 7 : 23;
}

static int smallest_exponent(skl_dtype dtype)
{
    return dtype == SKL_F16 ? -14 : -126;
}

/* Exponent of the last bit of `value` in the type. */
static int ulp_exponent(skl_dtype dtype, double value)
{
    int exponent;
    frexp(value, &exponent); /* value = f * 2^exponent with f in [0.5, 1) */
    exponent--;
    const int lowest = smallest_exponent(dtype);
    return (value == 0 || exponent < lowest ? lowest : exponent) - fraction_bits(dtype);
}

double dtype_half_ulp(skl_dtype dtype, double value)
{
    return ldexp(1, ulp_exponent(dtype, value) - 1);
}

/* Rounds to nearest even. A carry into the exponent is correct because encodings are ordered like integers. */
static uint16_t to_16_bits(skl_dtype dtype, double value)
{
    const int fraction = fraction_bits(dtype);
    const int bias = dtype == SKL_F16 ? 15 : 127;
    const uint16_t sign = signbit(value) ? 0x8000 : 0;
    const uint16_t infinity = (uint16_t)((2 * bias + 1) << fraction);
    const double magnitude = fabs(value);
    if (isnan(value))
        return (uint16_t)(sign | infinity | 1U << (fraction - 1));

    const int ulp = ulp_exponent(dtype, magnitude);
    const double steps = isinf(magnitude) ? 0 : nearbyint(ldexp(magnitude, -ulp)); /* at least 2^fraction if normal */
    const double biased = ulp + fraction + bias - 1; /* exponent field minus 1, for the implicit bit */
    const double bits = biased * ldexp(1, fraction) + steps;
    if (isinf(magnitude) || bits >= infinity)
        return sign | infinity;
    return (uint16_t)(sign | (uint16_t)bits);
}

/* ---- Creation ---------------------------------------------------------------------------------------------- */

int layout_shares(test_layout layout)
{
    return layout == LAYOUT_EXPANDED || layout == LAYOUT_REPEATED;
}

/* Strides of [batch, heads, length]; `order` names the dimensions from the innermost to the outermost. */
static int64_t set_strides(test_tensor *t, const char *order, int64_t gap)
{
    int64_t step = t->dim + gap;
    for (const char *dimension = order; *dimension; dimension++) {
        int64_t *const stride = *dimension == 'b'   ? &t->stride_batch
                                : *dimension == 'h' ? &t->stride_head
                                                    : &t->stride_row;
        const int64_t extent = *dimension == 'b' ? t->batch : *dimension == 'h' ? t->heads : t->length;
        *stride = step;
        step = step * (extent > 0 ? extent : 1) + gap;
    }
    return step;
}

test_tensor tensor_create(skl_dtype dtype, int64_t batch, int64_t heads, int64_t length, int64_t dim,
                          test_layout layout)
{
    static const char *const orders[LAYOUT_COUNT] = {"ihb", "hib", "hbi", "ibh", "ihb", "ihb", "ihb", "ihb", "ihb"};
    test_tensor t = {.dtype = dtype, .layout = layout, .batch = batch, .heads = heads, .length = length, .dim = dim};
    int64_t element_count = set_strides(&t, orders[layout], layout == LAYOUT_GAPS ? 3 : 0);
    if (layout == LAYOUT_EXPANDED)
        t.stride_batch = t.stride_head = 0;
    if (layout == LAYOUT_REPEATED)
        t.stride_row = 0;
    if (layout == LAYOUT_FREE_STRIDES) {
        const int64_t unused = INT64_MAX - 63; /* a multiple of 64, never multiplied by more than 0 */
        t.stride_batch = batch == 1 ? unused : t.stride_batch;
        t.stride_head = heads == 1 ? unused : t.stride_head;
        t.stride_row = length == 1 ? unused : t.stride_row;
    }

    const size_t size = (size_t)element_count * dtype_size(dtype);
    const size_t element = dtype_size(dtype);
    if (layout != LAYOUT_MISALIGNED) {
        t.memory = memory_create(size, 64);
        t.data = t.memory.data;
        return t;
    }
    t.memory = memory_create(size, element);
    t.data = t.memory.data;
    if ((uintptr_t)t.data % (2 * element) == 0)
        t.data = t.memory.data -= element;
    return t;
}

void tensor_destroy(test_tensor *tensor)
{
    memory_destroy(&tensor->memory);
    *tensor = (test_tensor){0};
}

skl_input tensor_input(const test_tensor *t)
{
    return (skl_input){t->data, t->stride_batch, t->stride_head, t->stride_row};
}

skl_output tensor_output(const test_tensor *t)
{
    return (skl_output){t->data, t->stride_batch, t->stride_head, t->stride_row};
}

/* ---- Elements ---------------------------------------------------------------------------------------------- */

int64_t tensor_count(const test_tensor *t)
{
    return t->batch * t->heads * t->length * t->dim;
}

int64_t tensor_index(const test_tensor *t, int64_t b, int64_t h, int64_t i)
{
    return ((b * t->heads + h) * t->length + i) * t->dim;
}

/* Offset of element n from `data`. */
static int64_t offset_of(const test_tensor *t, int64_t n)
{
    const int64_t row = n / t->dim, head = row / t->length, batch = head / t->heads;
    return batch * t->stride_batch + head % t->heads * t->stride_head + row % t->length * t->stride_row + n % t->dim;
}

double tensor_get(const test_tensor *t, int64_t n)
{
    return oracle_read(t->dtype, t->data, offset_of(t, n));
}

void tensor_set(const test_tensor *t, int64_t n, double value)
{
    if (t->dtype == SKL_F32)
        ((float *)t->data)[offset_of(t, n)] = (float)value;
    else
        ((uint16_t *)t->data)[offset_of(t, n)] = to_16_bits(t->dtype, value);
}

void tensor_fill(const test_tensor *t, test_random *random, double low, double high)
{
    for (int64_t n = 0; n < tensor_count(t); n++)
        tensor_set(t, n, random_uniform(random, low, high));
}

void tensor_set_all(const test_tensor *t, double value)
{
    for (int64_t n = 0; n < tensor_count(t); n++)
        tensor_set(t, n, value);
}

void tensor_scale(const test_tensor *t, double factor)
{
    for (int64_t n = 0; n < tensor_count(t); n++)
        tensor_set(t, n, tensor_get(t, n) * factor);
}

void tensor_add(const test_tensor *to, const test_tensor *from)
{
    for (int64_t n = 0; n < tensor_count(to); n++)
        tensor_set(to, n, tensor_get(to, n) + tensor_get(from, n));
}

void tensor_copy(const test_tensor *to, const test_tensor *from)
{
    for (int64_t n = 0; n < tensor_count(to); n++)
        tensor_set(to, n, tensor_get(from, n));
}

static unsigned char *element_bytes(const test_tensor *t, int64_t n)
{
    return (unsigned char *)t->data + offset_of(t, n) * (int64_t)dtype_size(t->dtype);
}

int64_t tensor_stray_writes(const test_tensor *t)
{
    const unsigned char *const begin = t->memory.mapping;
    const size_t size = t->memory.mapping_size;
    unsigned char *const is_element = calloc(size, 1);
    if (is_element == NULL)
        test_abandon("out of memory: %zu bytes", size);
    for (int64_t n = 0; n < tensor_count(t); n++)
        memset(is_element + (element_bytes(t, n) - begin), 1, dtype_size(t->dtype));

    int64_t strays = 0;
    for (size_t byte = 0; byte < size; byte++)
        strays += !is_element[byte] && begin[byte] != POISON;
    free(is_element);
    return strays;
}

int tensor_equal(const test_tensor *a, const test_tensor *b)
{
    for (int64_t n = 0; n < tensor_count(a); n++)
        if (memcmp(element_bytes(a, n), element_bytes(b, n), dtype_size(a->dtype)) != 0)
            return 0;
    return 1;
}
