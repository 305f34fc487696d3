#include "view/plot.h"
#include "view/axis.h"
#include "view/svg.h"

#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

enum {
    COLUMNS_MAX = 3,
    PANEL_WIDTH = 440,
    PANEL_HEIGHT = 350,
    HEADER_HEIGHT = 76,
    FOOTER_HEIGHT = 40,
    MARGIN_LEFT = 74,
    MARGIN_RIGHT = 140, /* for the names at the ends of the lines */
    MARGIN_TOP = 40,
    MARGIN_BOTTOM = 52,
    LABEL_GAP = 16 /* between the baselines of two names */
};

/* The colours of Okabe and Ito, darker on white and lighter on black for a contrast of at least 4.5 : 1. */
static const char style[] =
    "text{font:13px system-ui,-apple-system,'Segoe UI',Helvetica,Arial,sans-serif;fill:#1f2328}\n"
    ".paper{fill:#ffffff}.title{font-size:19px;font-weight:600}.panel{font-size:14px;font-weight:600}\n"
    ".name{font-weight:600;font-size:12px}.muted{fill:#59636e;font-size:12px;font-weight:400}\n"
    ".grid{stroke:#d1d9e0;stroke-width:1}.axis{stroke:#8c959f;stroke-width:1}\n"
    ".line{fill:none;stroke-width:2.5;stroke-linejoin:round;stroke-linecap:round}circle{stroke-width:2}\n"
    ".l0{stroke:#005f9e}.l1{stroke:#00755a}.l2{stroke:#9a6100}.l3{stroke:#b84300}\n"
    ".f0{fill:#005f9e}.f1{fill:#00755a}.f2{fill:#9a6100}.f3{fill:#b84300}\n"
    ".hollow{fill:#ffffff}\n"
    "@media (prefers-color-scheme:dark){\n"
    "text{fill:#f0f6fc}.paper,.hollow{fill:#0d1117}.muted{fill:#9198a1}.grid{stroke:#2a313c}.axis{stroke:#656c76}\n"
    ".l0{stroke:#5ab8f0}.l1{stroke:#2fc79a}.l2{stroke:#e6a92e}.l3{stroke:#ff8552}\n"
    ".f0{fill:#5ab8f0}.f1{fill:#2fc79a}.f2{fill:#e6a92e}.f3{fill:#ff8552}\n"
    "}\n";

/* ---- Text --------------------------------------------------------------------------------------------------- */

typedef struct short_text {
    char text[32];
} short_text;

/* A class of the style sheet: "line l" and the number of the colour. */
static short_text class_of(const char *prefix, const plot_series *series)
{
    short_text name;
    snprintf(name.text, sizeof name.text, "%s%d", prefix, series->colour);
    return name;
}

static short_text number_text(double number)
{
    short_text out;
    const int decimals = number >= 100 ? 0 : number >= 10 ? 1 : 2;
    snprintf(out.text, sizeof out.text, "%.*f", decimals, number);
    return out;
}

static short_text bytes_text(double size)
{
    static const char *const units[] = {"B", "KiB", "MiB", "GiB", "TiB", "PiB"};
    size_t unit = 0;
    for (; size >= 1024 && unit + 1 < sizeof units / sizeof units[0]; unit++)
        size /= 1024;
    short_text out;
    snprintf(out.text, sizeof out.text, "%.*f %s", size < 10 && size != floor(size) ? 1 : 0, size, units[unit]);
    return out;
}

/* 16384 is 16K, as in "a 16K context". */
static short_text length_text(double length)
{
    short_text out;
    if (fmod(length, 1024) == 0)
        snprintf(out.text, sizeof out.text, "%.0fK", length / 1024);
    else
        snprintf(out.text, sizeof out.text, "%.0f", length);
    return out;
}

static short_text value_text(plot_unit unit, double value)
{
    return unit == PLOT_BYTES ? bytes_text(value) : number_text(value);
}

/* ---- Axes --------------------------------------------------------------------------------------------------- */

/* Adds a margin, and a minimum range for data with few different values. */
static void widen(axis *along, double margin, double least_ratio)
{
    const double short_of = least_ratio / (along->most / along->least);
    const double factor = short_of > 1 ? sqrt(short_of) * margin : margin;
    along->least /= factor;
    along->most *= factor;
}

static void draw_y_tick(bytes *svg, const axis *x, const axis *y, plot_unit unit, double value)
{
    const double at = axis_at(y, value);
    svg_line(svg, "grid", x->begin, at, x->end, at);
    short_text label = value_text(unit, value);
    if (unit == PLOT_NUMBER)
        snprintf(label.text, sizeof label.text, "%g", value);
    svg_text(svg, "muted", SVG_END, x->begin - 8, at + 4, label.text);
}

/* 1, 2, 5, 10, ... for numbers; powers of two, at most seven of them, for bytes. */
static void draw_y_ticks(bytes *svg, const axis *x, const axis *y, plot_unit unit)
{
    if (unit == PLOT_NUMBER) {
        static const double steps[] = {1, 2, 5};
        for (int power = (int)floor(log10(y->least)); power <= (int)log10(y->most) + 1; power++) {
            for (int i = 0; i < 3; i++) {
                const double value = steps[i] * pow(10, power);
                if (value >= y->least && value <= y->most)
                    draw_y_tick(svg, x, y, unit, value);
            }
        }
        return;
    }
    enum { TICKS_MAX = 7 };
    int step = 1;
    while (log2(y->most / y->least) / step > TICKS_MAX)
        step++;
    for (int power = (int)ceil(log2(y->least) / step) * step; power <= log2(y->most); power += step)
        draw_y_tick(svg, x, y, unit, exp2(power));
}

/* A tick at every x of the data. */
static void draw_x_ticks(bytes *svg, const plot_panel *panel, const axis *x, const axis *y)
{
    const plot_series *longest = &panel->series[0];
    for (int i = 1; i < panel->series_count; i++) {
        if (panel->series[i].point_count > longest->point_count)
            longest = &panel->series[i];
    }
    for (int i = 0; i < longest->point_count; i++) {
        const double value = longest->points[i].x, at = axis_at(x, value);
        svg_line(svg, "axis", at, y->begin, at, y->begin + 4);
        svg_text(svg, "muted", SVG_MIDDLE, at, y->begin + 18, length_text(value).text);
    }
}

/* ---- Lines and their names ---------------------------------------------------------------------------------- */

static void draw_line(bytes *svg, const plot_series *series, const axis *x, const axis *y)
{
    svg_path_begin(svg, class_of("line l", series).text);
    for (int i = 0; i < series->point_count; i++)
        svg_path_point(svg, i == 0, axis_at(x, series->points[i].x), axis_at(y, series->points[i].y));
    svg_path_end(svg);
    for (int i = 0; i < series->point_count; i++) {
        const plot_point *const point = &series->points[i];
        char colours[32] = "hollow";
        if (!point->hollow)
            snprintf(colours, sizeof colours, "f%d", series->colour);
        snprintf(colours + strlen(colours), sizeof colours - strlen(colours), " l%d", series->colour);
        svg_circle(svg, colours, axis_at(x, point->x), axis_at(y, point->y), 3.5);
    }
}

typedef struct end_label {
    const plot_series *series;
    double x, y;
} end_label;

static int compare_heights(const void *left, const void *right)
{
    const double a = ((const end_label *)left)->y, b = ((const end_label *)right)->y;
    return (a > b) - (a < b);
}

/* Moves labels apart that would overlap: first downwards, then upwards from the bottom of the panel. */
static void spread(end_label *labels, int count, double lowest)
{
    qsort(labels, (size_t)count, sizeof labels[0], compare_heights);
    for (int i = 1; i < count; i++)
        labels[i].y = fmax(labels[i].y, labels[i - 1].y + LABEL_GAP);
    for (int i = count - 1; i >= 0; i--) {
        labels[i].y = fmin(labels[i].y, lowest);
        lowest = labels[i].y - LABEL_GAP;
    }
}

static void draw_names(bytes *svg, const plot_panel *panel, const axis *x, const axis *y)
{
    end_label labels[PLOT_SERIES_MAX];
    int count = 0;
    for (int i = 0; i < panel->series_count; i++) {
        const plot_series *const series = &panel->series[i];
        if (series->point_count == 0)
            continue;
        const plot_point *const last = &series->points[series->point_count - 1];
        labels[count++] = (end_label){series, axis_at(x, last->x) + 9, axis_at(y, last->y) + 4};
    }
    spread(labels, count, y->begin);
    for (int i = 0; i < count; i++) {
        const plot_series *const series = labels[i].series;
        const double value = series->points[series->point_count - 1].y;
        svg_text_pair(svg, class_of("name f", series).text, labels[i].x, labels[i].y, series->name, "muted",
                      value_text(panel->y_unit, value).text);
    }
}

/* ---- Panels ------------------------------------------------------------------------------------------------- */

static void draw_panel(bytes *svg, const plot_panel *panel, double left, double top)
{
    axis x = {true, INFINITY, -INFINITY, left + MARGIN_LEFT, left + PANEL_WIDTH - MARGIN_RIGHT};
    axis y = {true, INFINITY, -INFINITY, top + PANEL_HEIGHT - MARGIN_BOTTOM, top + MARGIN_TOP};
    for (int i = 0; i < panel->series_count; i++) {
        for (int j = 0; j < panel->series[i].point_count; j++) {
            axis_include(&x, panel->series[i].points[j].x);
            axis_include(&y, panel->series[i].points[j].y);
        }
    }
    svg_text(svg, "panel", SVG_START, x.begin, top + 18, panel->title);
    if (axis_is_empty(&x))
        return; /* no data */
    widen(&x, 1.08, 2);
    widen(&y, 1.2, 4);

    draw_y_ticks(svg, &x, &y, panel->y_unit);
    svg_line(svg, "axis", x.begin, y.begin, x.end, y.begin);
    draw_x_ticks(svg, panel, &x, &y);
    svg_text(svg, "muted", SVG_MIDDLE, (x.begin + x.end) / 2, y.begin + 38, panel->x_label);
    svg_text(svg, "muted", SVG_START, x.begin, top + 34, panel->y_label);
    for (int i = 0; i < panel->series_count; i++)
        draw_line(svg, &panel->series[i], &x, &y);
    draw_names(svg, panel, &x, &y);
}

void plot_draw(bytes *svg, const plot *drawn)
{
    const int columns = drawn->panel_count < COLUMNS_MAX ? drawn->panel_count : COLUMNS_MAX;
    const int rows = (drawn->panel_count + columns - 1) / columns;
    const int width = columns * PANEL_WIDTH;
    const int height = HEADER_HEIGHT + rows * PANEL_HEIGHT + FOOTER_HEIGHT;
    svg_begin_file(svg, width, height, drawn->title, style);
    svg_rect(svg, "paper", 0, 0, width, height);
    svg_text(svg, "title", SVG_START, 24, 36, drawn->title);
    svg_text(svg, "muted", SVG_START, 24, 58, drawn->subtitle);
    for (int i = 0; i < drawn->panel_count; i++)
        draw_panel(svg, &drawn->panels[i], i % columns * PANEL_WIDTH, HEADER_HEIGHT + i / columns * PANEL_HEIGHT);
    svg_text(svg, "muted", SVG_START, 24, height - 16, drawn->note);
    svg_end(svg);
}
