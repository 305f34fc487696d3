/* Compares the overlap check of strided layouts with a byte map. */
#include "support.h"

#include "base/overlap.h"

enum { BYTES = 600, LEVELS = 3, LAYOUTS = 100000 }; /* the longest layout has 528 bytes */

/* A small random layout inside a buffer: with or without gaps, sometimes expanded, sometimes with strides below the
 * span. */
static skl_layout draw_layout(test_random *random, const unsigned char *buffer, unsigned char *map)
{
    uint64_t counts[LEVELS], strides[LEVELS];
    const uint64_t run = (uint64_t)random_between(random, 1, 8);
    uint64_t span = run;
    for (int level = 0; level < LEVELS; level++) {
        const uint64_t gap = (uint64_t)(random_between(random, 0, 1) * random_between(random, 0, 12));
        counts[level] = (uint64_t)random_between(random, 1, 3);
        strides[level] = random_between(random, 0, 9) ? span + gap : level > 0 ? strides[level - 1] : 0;
        span += (counts[level] - 1) * strides[level];
    }
    const unsigned char *const begin = buffer + random_between(random, 0, BYTES - (int64_t)span - 1);
    skl_layout layout = skl_layout_run(begin, run);
    for (int level = 0; level < LEVELS; level++)
        skl_layout_repeat(&layout, counts[level], strides[level]);

    memset(map, 0, BYTES);
    for (uint64_t a = 0; a < counts[0]; a++)
        for (uint64_t b = 0; b < counts[1]; b++)
            for (uint64_t c = 0; c < counts[2]; c++)
                memset(map + (begin - buffer) + a * strides[0] + b * strides[1] + c * strides[2], 1, (size_t)run);
    return layout;
}

static void test_overlap_matches_byte_map(void **state)
{
    (void)state;
    static unsigned char buffer[BYTES];
    unsigned char map_a[BYTES], map_b[BYTES];
    test_random random = random_for("overlap");
    for (int n = 0; n < LAYOUTS; n++) {
        const skl_layout a = draw_layout(&random, buffer, map_a), b = draw_layout(&random, buffer, map_b);
        int shared = 0;
        for (int byte = 0; byte < BYTES; byte++)
            shared |= map_a[byte] & map_b[byte];
        assert_int_equal(skl_layouts_overlap(&a, &b), shared);
        assert_int_equal(skl_layouts_overlap(&b, &a), shared);
    }
}

int main(void)
{
    const struct CMUnitTest tests[] = {cmocka_unit_test(test_overlap_matches_byte_map)};
    return test_run("overlap", tests, COUNT_OF(tests));
}
