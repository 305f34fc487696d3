/* What people see: charts, maps and progress on a terminal, and as plain text in a file; palettes, scales and the
 * page of reports. tests/cli/test_map.py decodes the pixels of pictures. */
#include <fcntl.h>
#include <locale.h>
#include <math.h>
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>
#include <stdlib.h>
#include <string.h>
#include <termios.h>
#include <unistd.h>
#include <cmocka.h>

#include "cli/map/attention_map.h"
#include "cli/term/term.h"
#include "device/device.h"

static double now = 1000;

double clock_seconds(void)
{
    return now;
}

/* ---- A file or a pseudo-terminal, and the text that was written to it --------------------------------------- */

enum { TEXT_SIZE = 1 << 16 };

typedef struct screen {
    FILE *stream;
    int master; /* -1: a file */
    char text[TEXT_SIZE];
} screen;

static screen *open_file(void)
{
    screen *const s = calloc(1, sizeof *s);
    assert_non_null(s);
    *s = (screen){.stream = tmpfile(), .master = -1};
    assert_non_null(s->stream);
    return s;
}

static screen *open_terminal(void)
{
    screen *const s = calloc(1, sizeof *s);
    assert_non_null(s);
    s->master = posix_openpt(O_RDWR | O_NOCTTY);
    assert_true(s->master >= 0 && grantpt(s->master) == 0 && unlockpt(s->master) == 0);
    const int slave = open(ptsname(s->master), O_RDWR | O_NOCTTY);
    struct termios raw;
    assert_int_equal(tcgetattr(slave, &raw), 0);
    cfmakeraw(&raw); /* keeps "\n" as it is */
    assert_int_equal(tcsetattr(slave, TCSANOW, &raw), 0);
    s->stream = fdopen(slave, "w");
    assert_non_null(s->stream);
    return s;
}

static const char *text_of(screen *s)
{
    fflush(s->stream);
    size_t length = 0;
    if (s->master < 0) {
        rewind(s->stream);
        length = fread(s->text, 1, TEXT_SIZE - 1, s->stream);
    } else {
        fcntl(s->master, F_SETFL, O_NONBLOCK);
        for (ssize_t got; (got = read(s->master, s->text + length, TEXT_SIZE - 1 - length)) > 0;)
            length += (size_t)got;
    }
    s->text[length] = '\0';
    return s->text;
}

static void close_screen(screen *s)
{
    fclose(s->stream);
    if (s->master >= 0)
        close(s->master);
    free(s);
}

static int set_terminal(void **state)
{
    (void)state;
    setenv("TERM", "xterm", 1);
    unsetenv("NO_COLOR");
    return setlocale(LC_ALL, "C.UTF-8") == NULL;
}

/* ---- Tests -------------------------------------------------------------------------------------------------- */

static void test_style(void **state)
{
    (void)state;
    screen *const file = open_file(), *const terminal = open_terminal();
    assert_string_equal(term_style_for(file->stream).bold, "");
    assert_false(term_has_blocks(file->stream));
    const term_style style = term_style_for(terminal->stream);
    assert_string_equal(style.bold, "\033[1m");
    assert_string_equal(style.dim, "\033[2m");
    assert_string_equal(style.good, "\033[32m");
    assert_string_equal(style.bad, "\033[31m");
    assert_string_equal(style.accent, "\033[36m");
    assert_string_equal(style.plain, "\033[0m");
    assert_true(term_has_blocks(terminal->stream));
    setenv("NO_COLOR", "1", 1);
    assert_string_equal(term_style_for(terminal->stream).bold, "");
    assert_true(term_has_blocks(terminal->stream)); /* blocks are no color */
    setenv("NO_COLOR", "", 1);
    assert_string_equal(term_style_for(terminal->stream).bold, "\033[1m");
    setenv("TERM", "dumb", 1);
    assert_string_equal(term_style_for(terminal->stream).bold, "");
    assert_false(term_has_blocks(terminal->stream));
    unsetenv("TERM");
    assert_false(term_has_blocks(terminal->stream));
    setenv("TERM", "xterm", 1);
    setlocale(LC_ALL, "C");
    assert_false(term_has_blocks(terminal->stream));
    close_screen(file);
    close_screen(terminal);
}

/* What a call draws on `stream`. */
#define EXPECT_DRAWN(open, expected, call)                                                                           \
    do {                                                                                                             \
        screen *const drawn = open();                                                                                \
        FILE *const stream = drawn->stream;                                                                          \
        call;                                                                                                        \
        assert_string_equal(text_of(drawn), expected);                                                               \
        close_screen(drawn);                                                                                         \
    } while (0)

static void test_chart(void **state)
{
    (void)state;
    /* 8 of 16 fill 2 of 4 lines, and 9 reach the third; 1e-9 still shows. Powers of 2 leave no rounding. */
    const double values[] = {0, 1e-9, 8, 9, 10, 12, 16, (double)NAN}, few[] = {1, 8, 12, 16};
    EXPECT_DRAWN(open_file,
                 "         16 |      # \n"
                 "            |   .:## \n"
                 "            |  ##### \n"
                 "          0 | .##### \n",
                 term_chart(stream, values, 8, 4));
    EXPECT_DRAWN(open_terminal,
                 "         16 |\033[36m  ▄█\033[0m\n"
                 "          0 |\033[36m▁███\033[0m\n",
                 term_chart(stream, few, 4, 2));
    /* without a scale */
    const double zeros[] = {0, 0}, infinite[] = {1, (double)INFINITY};
    EXPECT_DRAWN(open_file, "          1 |  \n          0 |  \n", term_chart(stream, zeros, 2, 2));
    EXPECT_DRAWN(open_file, "          1 |##\n          0 |##\n", term_chart(stream, infinite, 2, 2));
}

/* Two sequences; the row that attends to no key does not count. Then 128 positions in 64 columns: the mean of two. */
static void test_chart_by_position(void **state)
{
    (void)state;
    const float kl[] = {2, 1, 2, 0, 3, 4}, lse_s[] = {0, 0, 0, -(float)INFINITY, 0, 0};
    EXPECT_DRAWN(open_file,
                 "          3 |  #\n"
                 "            |  #\n"
                 "            |###\n"
                 "            |###\n"
                 "            |###\n"
                 "          0 |###\n"
                 "      query  0 2\n",
                 term_position_chart(stream, kl, lse_s, 2, 3)); /* means 2, 2, 3 */
    enum { LENGTH = 128 };
    float many[LENGTH], lse[LENGTH] = {0};
    for (int i = 0; i < LENGTH; i++)
        many[i] = i % 2 ? 6 : i == 0 ? 6 : 0;
    screen *const wide = open_file();
    term_position_chart(wide->stream, many, lse, 1, LENGTH);
    const char *const text = text_of(wide);
    assert_non_null(strstr(text, "          6 |#                    "));
    assert_non_null(strstr(text, "          0 |################################################################\n"));
    assert_non_null(strstr(text, "      query  0                                                            127\n"));
    close_screen(wide);
}

static void test_map_of_characters(void **state)
{
    (void)state;
    /* Shares are drawn as sqrt(value / top) in tenths: 1/81, 4/81, ... are whole steps of nine. */
    const double shares[] = {0, 1 / 81.0, 4 / 81.0, 9 / 81.0, 36 / 81.0, 1, 2, (double)NAN};
    EXPECT_DRAWN(open_file, "   .:-*@@ \n", map_print(stream, PALETTE_SHARE, shares, 1, 8, 1));
    const double contributions[] = {-1, -0.25, 0, 0.25, 1, -4};
    EXPECT_DRAWN(open_file, "  <; +@<\n", map_print(stream, PALETTE_SIGNED, contributions, 1, 6, 1));
    /* More rows than half the columns: two rows per line, averaged; the last line has one. Else one row per line. */
    const double tall[] = {1, 0, 1, 0, 0.25, 1}, wide[] = {1, 0, 0, 0, 0, 0, 0, 1};
    EXPECT_DRAWN(open_file, "  @ \n  +@\n", map_print(stream, PALETTE_SHARE, tall, 3, 2, 1));
    EXPECT_DRAWN(open_file, "  @   \n     @\n", map_print(stream, PALETTE_SHARE, wide, 2, 4, 1));
}

/* Three rows in two lines: the lower half of the second line keeps the background of the terminal. */
static void test_map_of_blocks(void **state)
{
    (void)state;
    const double values[] = {0, 1, 0.25};
    const rgb *const palette = palette_of(PALETTE_SHARE);
    const rgb low = palette[palette_index(PALETTE_SHARE, 0, 1)], high = palette[palette_index(PALETTE_SHARE, 1, 1)],
              middle = palette[palette_index(PALETTE_SHARE, 0.25, 1)];
    char expected[256];
    snprintf(expected, sizeof expected,
             "  \033[38;2;%d;%d;%dm\033[48;2;%d;%d;%dm▀\033[0m\n  \033[38;2;%d;%d;%dm▀\033[0m\n", low.red, low.green,
             low.blue, high.red, high.green, high.blue, middle.red, middle.green, middle.blue);
    EXPECT_DRAWN(open_terminal, expected, map_print(stream, PALETTE_SHARE, values, 3, 1, 1));
    setenv("NO_COLOR", "1", 1);
    EXPECT_DRAWN(open_terminal, "   @+\n", map_print(stream, PALETTE_SHARE, values, 1, 3, 1));
}

/* The progress line is on stderr, after 0.3 s, at most every 0.1 s. */
static void test_progress(void **state)
{
    (void)state;
    screen *const terminal = open_terminal();
    const int saved = dup(STDERR_FILENO);
    assert_true(saved >= 0 && dup2(fileno(terminal->stream), STDERR_FILENO) >= 0);
    term_progress_begin("forward");
    term_progress_update(NULL, 1, 2); /* too early */
    term_progress_end();
    now += 10;
    term_progress_update(NULL, 0, 4);
    term_progress_update(NULL, 1, 0);
    term_progress_update(NULL, 1, 4);
    term_progress_update(NULL, 2, 4); /* too soon */
    term_progress_end();
    term_progress_end(); /* nothing is left to clear */
    dup2(saved, STDERR_FILENO);
    close(saved);
    assert_string_equal(text_of(terminal),
                        "\rforward    [#######.......................]  25 %  30 s left \033[K\r\033[K");
    close_screen(terminal);
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
        cmocka_unit_test_setup(test_style, set_terminal),
        cmocka_unit_test_setup(test_chart, set_terminal),
        cmocka_unit_test_setup(test_chart_by_position, set_terminal),
        cmocka_unit_test_setup(test_map_of_characters, set_terminal),
        cmocka_unit_test_setup(test_map_of_blocks, set_terminal),
        cmocka_unit_test_setup(test_progress, set_terminal),
        cmocka_unit_test(palettes),
        cmocka_unit_test(scales),
        cmocka_unit_test(pages_of_hostile_documents),
    };
    return cmocka_run_group_tests_name("term", tests, NULL, NULL);
}
