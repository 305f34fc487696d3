/* Pictures and pages: checksums compared with published values, palettes, hostile texts, plots of special values.
 * tests/cli/test_map.py decodes the compressed pixels with zlib. */
#include "view/page.h"
#include "view/figure.h"
#include "view/plot.h"

#include <math.h>
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>
#include <string.h>
#include <cmocka.h>

static void assert_bytes(const bytes *found, const char *expected)
{
    assert_false(found->failed);
    assert_int_equal(found->size, strlen(expected));
    assert_memory_equal(found->data, expected, found->size);
}

static bool contains(const bytes *page, const char *words)
{
    const size_t length = strlen(words);
    for (size_t at = 0; at + length <= page->size; at++)
        if (memcmp(page->data + at, words, length) == 0)
            return true;
    return false;
}

static void checksums(void **state)
{
    (void)state;
    assert_int_equal(png_crc32("123456789", 9), 0xcbf43926); /* the check value of CRC-32 */
    assert_int_equal(png_crc32("IEND", 4), 0xae426082);      /* the last bytes of every PNG */
    assert_int_equal(png_crc32("", 0), 0);
    assert_int_equal(png_adler32("Wikipedia", 9), 0x11e60398);
    assert_int_equal(png_adler32("", 0), 1);
}

static void escaping(void **state)
{
    (void)state;
    bytes text = {0};
    bytes_add_escaped(&text, "a<b> & \"c\" 'd'");
    assert_bytes(&text, "a&#60;b&#62; &#38; &#34;c&#34; &#39;d&#39;");
    bytes_free(&text);
}

static void png_header_and_trailer(void **state)
{
    static const uint8_t pixels[] = {0, 1, 2, 3, 4, 5};
    static const uint8_t head[] = {0x89, 'P', 'N', 'G', '\r', '\n', 0x1a, '\n', 0, 0, 0, 13, 'I', 'H', 'D',
                                   'R',  0,   0,   0,   3,    0,    0,    0,    2, 8, 3, 0,  0,   0};
    static const uint8_t tail[] = {0, 0, 0, 0, 'I', 'E', 'N', 'D', 0xae, 0x42, 0x60, 0x82};
    (void)state;
    bytes file = {0};
    png_encode(&file, pixels, 3, 2, palette_of(PALETTE_SHARE));
    assert_false(file.failed);
    assert_memory_equal(file.data, head, sizeof head);
    assert_memory_equal(file.data + file.size - sizeof tail, tail, sizeof tail);
    bytes_free(&file);
}

static void constant_picture_is_small(void **state)
{
    (void)state;
    static const double values[64 * 64] = {0};
    bytes file = {0};
    const figure drawn = {"P", PALETTE_SHARE, values, 64, 64, 1, 64, 64};
    figure_png(&file, &drawn);
    assert_true(file.size < 16384); /* 448,440 pixels */
    bytes_free(&file);
}

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
    bytes page = {0};
    page_print(&page, "{\"title\":\"</script><b>\"}");
    assert_false(page.failed);
    assert_true(contains(&page, ">{\"title\":\"\\u003c/script>\\u003cb>\"}</script>"));
    assert_false(contains(&page, "@DOCUMENT@"));
    assert_memory_equal(page.data + page.size - strlen("</html>\n"), "</html>\n", strlen("</html>\n"));
    bytes_free(&page);
}

static void plots_of_special_values(void **state)
{
    (void)state;
    static const plot drawn = {
        .title = "a<b",
        .subtitle = "c&d",
        .note = "",
        .panel_count = 3,
        .panels =
            {{.title = "empty", .x_label = "x", .y_label = "y", .series_count = 1, .series = {{.name = "none"}}},
             {.title = "single",
              .x_label = "x",
              .y_label = "y",
              .series_count = 1,
              .series = {{.name = "e<f", .point_count = 1, .points = {{1024, 3, false}}}}},
             {.title = "hollow",
              .x_label = "x",
              .y_label = "y",
              .y_unit = PLOT_BYTES,
              .series_count = 1,
              .series = {{.name = "g", .point_count = 2, .points = {{1, 1024, false}, {2, 1 << 30, true}}}}}},
    };
    bytes svg = {0};
    plot_draw(&svg, &drawn);
    assert_false(svg.failed);
    assert_true(contains(&svg, ">a&#60;b</text>") && contains(&svg, ">c&#38;d</text>") &&
                contains(&svg, ">e&#60;f<"));
    assert_true(contains(&svg, "hollow l0") && contains(&svg, ">1 GiB<") && contains(&svg, ">1K</text>"));
    assert_false(contains(&svg, "nan") || contains(&svg, "inf"));
    bytes_free(&svg);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(checksums),
        cmocka_unit_test(escaping),
        cmocka_unit_test(png_header_and_trailer),
        cmocka_unit_test(constant_picture_is_small),
        cmocka_unit_test(palettes),
        cmocka_unit_test(scales),
        cmocka_unit_test(pages_of_hostile_documents),
        cmocka_unit_test(plots_of_special_values),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
