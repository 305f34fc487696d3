/* Pictures and pages: palettes, scales, hostile texts. tests/cli/test_map.py decodes the pixels. */
#include "view/view.h"

#include <math.h>
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>
#include <stdlib.h>
#include <string.h>
#include <cmocka.h>

static void palettes(void **state)
{
    (void)state;
    assert_int_equal(palette_index(PALETTE_SHARE, 0, 1), 0);
    assert_int_equal(palette_index(PALETTE_SHARE, 1, 1), 255);
    assert_int_equal(palette_index(PALETTE_SHARE, 5, 1), 255);
    assert_int_equal(palette_index(PALETTE_SHARE, -1, 1), 0);
    assert_int_equal(palette_index(PALETTE_SHARE, 0.25, 1), 128);
    assert_int_equal(palette_index(PALETTE_SHARE, (double)NAN, 1), 0);
    assert_int_equal(palette_index(PALETTE_SIGNED, 0, 1), 128);
    assert_int_equal(palette_index(PALETTE_SIGNED, 1, 1), 255);
    assert_int_equal(palette_index(PALETTE_SIGNED, -1, 1), 0);
    assert_int_equal(palette_index(PALETTE_SIGNED, (double)NAN, 1), 128);
    const rgb *const share = palette_of(PALETTE_SHARE);
    for (int c = 1; c < 256; c++) { /* monotonic brightness */
        const int before = 299 * share[c - 1].red + 587 * share[c - 1].green + 114 * share[c - 1].blue;
        assert_true(299 * share[c].red + 587 * share[c].green + 114 * share[c].blue >= before);
    }
}

static void scales(void **state)
{
    (void)state;
    double values[200] = {[0] = -8, [1] = (double)NAN, [2] = (double)INFINITY, [3] = 2};
    assert_true(picture_top(values, 200) == 8);
    assert_true(picture_bright(values, 200) == 8); /* nearly all are 0: the largest */
    for (int i = 0; i < 200; i++)
        values[(i * 7) % 200] = i % 2 ? -1 - i : 1 + i;
    assert_true(picture_bright(values, 200) == 198); /* only 1 % is brighter */
    assert_true(picture_bright(values, 99) == picture_top(values, 99));
    const double nothing[3] = {0, 0, (double)NAN};
    assert_true(picture_top(nothing, 3) == 1);
    assert_true(picture_bright(nothing, 3) == 1);
}

/* A text of the document ends neither the script that contains it nor the page. */
static void pages_of_hostile_documents(void **state)
{
    (void)state;
    char *page = NULL;
    size_t size = 0;
    FILE *const stream = open_memstream(&page, &size);
    page_print(stream, "{\"title\":\"</script><b>\"}");
    fclose(stream);
    assert_non_null(strstr(page, ">{\"title\":\"\\u003c/script>\\u003cb>\"}</script>"));
    assert_null(strstr(page, "@DOCUMENT@"));
    assert_string_equal(page + size - strlen("</html>\n"), "</html>\n");
    free(page);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(palettes),
        cmocka_unit_test(scales),
        cmocka_unit_test(pages_of_hostile_documents),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
