#include "view/view.h"
#include "view/glyphs.h"

#include <assert.h>
#include <png.h>
#include <stdlib.h>
#include <string.h>

/* The palette of a picture, less two colors for what surrounds it. */
enum { COLORS = 254, PAPER = 254, INK = 255 };
enum { LETTER_ZOOM = 2, LETTER_STEP = LETTER_ZOOM * (GLYPH_WIDTH + 1), TICK = 5, GAP = 6 };
enum { BAR_GAP = 20, BAR_WIDTH = 18 };

typedef struct canvas {
    uint8_t *pixels;
    int64_t width, height;
} canvas;

static void fill(canvas *on, int64_t x, int64_t y, int64_t width, int64_t height, uint8_t color)
{
    for (int64_t row = y < 0 ? 0 : y; row < y + height && row < on->height; row++)
        for (int64_t column = x < 0 ? 0 : x; column < x + width && column < on->width; column++)
            on->pixels[row * on->width + column] = color;
}

static void draw_letter(canvas *on, int64_t x, int64_t y, const uint8_t glyph[GLYPH_HEIGHT])
{
    for (int row = 0; row < GLYPH_HEIGHT; row++)
        for (int column = 0; column < GLYPH_WIDTH; column++)
            if (glyph[row] >> (GLYPH_WIDTH - 1 - column) & 1)
                fill(on, x + column * LETTER_ZOOM, y + row * LETTER_ZOOM, LETTER_ZOOM, LETTER_ZOOM, INK);
}

static int64_t width_of(const char *text)
{
    return (int64_t)strlen(text) * LETTER_STEP - LETTER_ZOOM;
}

/* `y` is the top of the letters. */
static void draw_text(canvas *on, int64_t x, int64_t y, const char *text)
{
    for (; *text; text++, x += LETTER_STEP)
        if ((unsigned char)*text < 128)
            draw_letter(on, x, y, glyphs[(unsigned char)*text]);
}

static uint8_t color_of(const figure *drawn, double value)
{
    return (uint8_t)(palette_index(drawn->palette, value, drawn->top) * (COLORS - 1) / 255);
}

static void draw_map(canvas *on, const figure *drawn, int zoom)
{
    for (int64_t row = 0; row < drawn->rows; row++)
        for (int64_t column = 0; column < drawn->columns; column++)
            fill(on, FIGURE_LEFT + column * zoom, FIGURE_TOP + row * zoom, zoom, zoom,
                 color_of(drawn, drawn->values[row * drawn->columns + column]));
}

/* Positions of tokens, at equal distances. Short axes have room for two. */
static void draw_axes(canvas *on, const figure *drawn, int64_t width, int64_t height)
{
    enum { ROOM_FOR_FOUR = 400 };
    const int64_t bottom = FIGURE_TOP + height;
    char text[32];
    for (int64_t tick = 0, count = width < ROOM_FOR_FOUR ? 1 : 4; tick <= count; tick++) {
        const int64_t x = FIGURE_LEFT + (width - 1) * tick / count;
        snprintf(text, sizeof text, "%lld", (long long)(drawn->len_k * tick / count));
        fill(on, x, bottom, 1, TICK, INK);
        draw_text(on, x - width_of(text) / 2, bottom + TICK + GAP, text);
    }
    for (int64_t tick = 0, count = height < ROOM_FOR_FOUR ? 1 : 4; tick <= count; tick++) {
        const int64_t y = FIGURE_TOP + (height - 1) * tick / count;
        snprintf(text, sizeof text, "%lld", (long long)(drawn->len_q * tick / count));
        fill(on, FIGURE_LEFT - TICK, y, TICK, 1, INK);
        draw_text(on, FIGURE_LEFT - TICK - GAP - width_of(text), y - LETTER_ZOOM * GLYPH_HEIGHT / 2, text);
    }
    draw_text(on, GAP, GAP, "query");
    draw_text(on, FIGURE_LEFT + width / 2 - width_of("key") / 2, on->height - LETTER_ZOOM * GLYPH_HEIGHT - GAP,
              "key");
}

/* Colors follow the square root of a value; see palette_index. */
static void draw_bar(canvas *on, const figure *drawn, int64_t map_width, int64_t height)
{
    enum { TICKS = 4 };
    const int64_t x = FIGURE_LEFT + map_width + BAR_GAP;
    const bool is_signed = drawn->palette == PALETTE_SIGNED;
    for (int64_t y = 0; y < height; y++)
        fill(on, x, FIGURE_TOP + y, BAR_WIDTH, 1,
             (uint8_t)((height - 1 - y) * (COLORS - 1) / (height > 1 ? height - 1 : 1)));
    for (int tick = 0; tick <= TICKS; tick++) {
        const double share = (double)tick / TICKS, side = is_signed ? 2 * share - 1 : share;
        char text[32];
        snprintf(text, sizeof text, "%.2g", drawn->top * side * (side < 0 ? -side : side));
        const int64_t y = FIGURE_TOP + (height - 1) * (TICKS - tick) / TICKS;
        fill(on, x + BAR_WIDTH, y, TICK, 1, INK);
        draw_text(on, x + BAR_WIDTH + TICK + GAP, y - LETTER_ZOOM * GLYPH_HEIGHT / 2, text);
    }
}

/* The side of a cell in pixels: whole, so that the longer side of the map has at least 512 pixels. */
static int figure_zoom(int64_t rows, int64_t columns)
{
    enum { SIDE_LEAST = 512 };
    const int64_t longer = rows > columns ? rows : columns;
    return (int)(longer < SIDE_LEAST ? (SIDE_LEAST + longer - 1) / longer : 1);
}

bool figure_png(FILE *file, const figure *drawn)
{
    assert(drawn->rows > 0 && drawn->columns > 0); /* PNG has no empty pictures */
    const int zoom = figure_zoom(drawn->rows, drawn->columns);
    const int64_t width = drawn->columns * zoom, height = drawn->rows * zoom;
    canvas on = {NULL, FIGURE_LEFT + width + FIGURE_RIGHT, FIGURE_TOP + height + FIGURE_BOTTOM};
    on.pixels = malloc((size_t)(on.width * on.height));
    if (on.pixels == NULL)
        return false;
    memset(on.pixels, PAPER, (size_t)(on.width * on.height));
    draw_map(&on, drawn, zoom);
    draw_axes(&on, drawn, width, height);
    draw_bar(&on, drawn, width, height);
    draw_text(&on, FIGURE_LEFT, GAP, drawn->title);

    rgb palette[256];
    const rgb *const colors = palette_of(drawn->palette);
    for (int c = 0; c < COLORS; c++)
        palette[c] = colors[c * 255 / (COLORS - 1)];
    palette[PAPER] = (rgb){255, 255, 255};
    palette[INK] = (rgb){32, 36, 44};
    png_image image = {.version = PNG_IMAGE_VERSION,
                       .width = (png_uint_32)on.width,
                       .height = (png_uint_32)on.height,
                       .format = PNG_FORMAT_RGB_COLORMAP,
                       .colormap_entries = 256};
    const bool written = png_image_write_to_stdio(&image, file, 0, on.pixels, 0, palette);
    free(on.pixels);
    return written;
}
