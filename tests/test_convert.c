/* Conversions to and from 16-bit floats: every 16-bit number, and the floats around it. */
#include "support.h"

#include <math.h>
#include <stdbool.h>

#include "base/convert.h"
#include "oracle.h"

typedef struct format {
    skl_dtype dtype;
    uint16_t (*to)(float value);
    float (*from)(uint16_t bits);
    uint16_t infinity;       /* bits; numbers below it are finite */
    float after_the_largest; /* the number that would follow the largest if the exponent had no limit */
} format;

static const format formats[] = {
    {SKL_F16, skl_to_f16, skl_from_f16, 0x7C00, 65536.0F},
    {SKL_BF16, skl_to_bf16, skl_from_bf16, 0x7F80, INFINITY},
};

static void assert_converts(const format *f, float value, uint16_t expected)
{
    if (f->to(value) != expected || f->to(-value) != (expected | 0x8000))
        fail_msg("dtype %d: %a becomes 0x%04x, -%a becomes 0x%04x; 0x%04x was expected", (int)f->dtype, (double)value,
                 f->to(value), (double)value, f->to(-value), expected);
}

static void test_every_number_and_its_neighbors(void **state)
{
    (void)state;
    for (size_t t = 0; t < COUNT_OF(formats); t++) {
        const format *const f = &formats[t];
        for (uint16_t bits = 0; bits < f->infinity; bits++) {
            const float value = f->from(bits);
            assert_true((double)value == oracle_read(f->dtype, &bits, 0));
            const bool largest = bits + 1 == f->infinity;
            const float next = largest ? f->after_the_largest : f->from((uint16_t)(bits + 1));
            /* After the largest bf16, 2^127 (2 - 2^-7), comes 2^128, which is no float. */
            const float middle = isinf(next) ? 0x1.FFp127F : value + (next - value) / 2;
            assert_converts(f, value, bits);
            assert_converts(f, nextafterf(value, INFINITY), bits);
            assert_converts(f, nextafterf(middle, 0.0F), bits);
            assert_converts(f, middle, (uint16_t)(bits + (bits & 1))); /* ties go to even */
            assert_converts(f, nextafterf(middle, INFINITY), (uint16_t)(bits + 1));
        }
    }
}

static void test_infinities_and_nans(void **state)
{
    (void)state;
    for (size_t t = 0; t < COUNT_OF(formats); t++) {
        const format *const f = &formats[t];
        assert_converts(f, INFINITY, f->infinity);
        assert_true(f->from(f->infinity) == INFINITY);
        assert_true(f->from((uint16_t)(f->infinity | 0x8000)) == -INFINITY);
        for (uint32_t bits = f->infinity + 1U; bits < 0x8000; bits++) {
            const float nan_value = f->from((uint16_t)bits);
            assert_true(isnan(nan_value) && isnan(f->from((uint16_t)(bits | 0x8000))));
            assert_true(isnan(f->from(f->to(nan_value))));
        }
        assert_true(isnan(f->from(f->to(skl_float_of_bits(0x7F800001U))))); /* the payload is in the low bits only */
    }
    assert_converts(&formats[0], 65504.0F, 0x7BFF);
    assert_converts(&formats[0], 65519.996F, 0x7BFF);
    assert_converts(&formats[0], 65520.0F, 0x7C00);
    assert_converts(&formats[0], 3e38F, 0x7C00);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_every_number_and_its_neighbors),
        cmocka_unit_test(test_infinities_and_nans),
    };
    return test_run("convert", tests, COUNT_OF(tests));
}
