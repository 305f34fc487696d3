#include "view/chart.h"
#include "view/axis.h"
#include "view/svg.h"

#include <math.h>
#include <stdio.h>
#include <string.h>

/* Small enough that its text stays legible on a phone, which shows it in its natural size. */
enum { WIDTH = 400, HEIGHT = 236, LEFT = 46, RIGHT = 10, TOP = 30, BOTTOM = 36 };
enum { PLOT_WIDTH = WIDTH - LEFT - RIGHT, PLOT_HEIGHT = HEIGHT - TOP - BOTTOM, PLOT_END = TOP + PLOT_HEIGHT };

typedef struct class_name {
    char text[32];
} class_name;

static class_name class_of(const char *kind, const chart_series *series)
{
    class_name name;
    snprintf(name.text, sizeof name.text, "%s %s", kind, series->css_class);
    return name;
}

/* The frame: legend on top, name of the x axis at the bottom. */
static void begin(bytes *page, const chart *drawn)
{
    svg_begin_inline(page, "chart", WIDTH, HEIGHT, drawn->description);
    int x = LEFT;
    for (int s = 0; s < drawn->series_count; s++) {
        const chart_series *const series = &drawn->series[s];
        svg_rect(page, class_of("fill", series).text, x, 6, 10, 10, 2, NULL);
        svg_text(page, "name", SVG_START, x + 15, 15, series->name);
        x += 32 + 6 * (int)strlen(series->name);
    }
    svg_text(page, "axis", SVG_MIDDLE, LEFT + PLOT_WIDTH / 2, HEIGHT - 4, drawn->x_label);
}

/* `format` prints a double. */
static void grid_line(bytes *page, double y, const char *format, double value)
{
    char label[32];
    snprintf(label, sizeof label, format, value);
    svg_line(page, "grid", LEFT, y, LEFT + PLOT_WIDTH, y);
    svg_text(page, "axis", SVG_END, LEFT - 6, y + 4, label);
}

/* ---- Lines -------------------------------------------------------------------------------------------------- */

/* A logarithmic axis spans whole decades, a linear one starts at 0. */
static axis y_axis_of(const chart *lines)
{
    axis y = {lines->log_y, INFINITY, -INFINITY, PLOT_END, TOP};
    for (int s = 0; s < lines->series_count; s++)
        for (int64_t i = 0; i < lines->series[s].count; i++)
            axis_include(&y, lines->series[s].y[i]);
    if (axis_is_empty(&y)) {
        y.least = lines->log_y ? 1 : 0;
        y.most = lines->log_y ? 10 : 1;
    } else if (y.logarithmic) {
        const double decade = floor(log10(y.least));
        y.most = pow(10, fmax(ceil(log10(y.most)), decade + 1));
        y.least = pow(10, decade);
    } else {
        y.least = 0;
        y.most = y.most > 0 ? y.most * 1.05 : 1;
    }
    return y;
}

static void value_grid(bytes *page, const axis *y)
{
    enum { LINES = 4, DECADES_MAX = 6 };
    if (!y->logarithmic) {
        for (int l = 0; l <= LINES; l++) {
            const double value = y->least + (y->most - y->least) * l / LINES;
            grid_line(page, axis_at(y, value), "%.2g", value);
        }
        return;
    }
    const int first = (int)lround(log10(y->least)), last = (int)lround(log10(y->most));
    const int step = (last - first + DECADES_MAX - 1) / DECADES_MAX;
    for (int decade = first; decade <= last; decade += step)
        grid_line(page, axis_at(y, pow(10, decade)), "%.3g", pow(10, decade));
}

static void draw_line(bytes *page, const chart_series *series, const axis *x, const axis *y)
{
    svg_path_begin(page, class_of("line", series).text);
    bool first = true;
    for (int64_t i = 0; i < series->count; i++) {
        if (!axis_shows(y, series->y[i]))
            continue;
        svg_path_point(page, first, axis_at(x, series->x[i]), axis_at(y, series->y[i]));
        first = false;
    }
    svg_path_end(page);
    for (int64_t i = 0; i < series->count && series->dots; i++)
        if (axis_shows(y, series->y[i]))
            svg_circle(page, class_of("fill", series).text, axis_at(x, series->x[i]), axis_at(y, series->y[i]), 2.6);
}

void chart_lines(bytes *page, const chart *lines)
{
    enum { TICKS = 4 };
    const double x_span = lines->x_max > lines->x_min ? lines->x_max - lines->x_min : 1;
    const axis x = {false, lines->x_min, lines->x_min + x_span, LEFT, LEFT + PLOT_WIDTH};
    const axis y = y_axis_of(lines);
    begin(page, lines);
    value_grid(page, &y);
    for (int tick = 0; tick <= TICKS; tick++) {
        char label[32];
        snprintf(label, sizeof label, "%.0f", lines->x_min + (lines->x_max - lines->x_min) * tick / TICKS);
        svg_text(page, "axis",
                 tick == 0       ? SVG_START
                 : tick == TICKS ? SVG_END
                                 : SVG_MIDDLE,
                 LEFT + (double)PLOT_WIDTH * tick / TICKS, PLOT_END + 15, label);
    }
    for (int s = 0; s < lines->series_count; s++)
        draw_line(page, &lines->series[s], &x, &y);
    svg_end(page);
}

/* ---- Bars --------------------------------------------------------------------------------------------------- */

static void draw_bar(bytes *page, const chart_series *series, double value, double left, double width)
{
    const axis y = {false, 0, 1, PLOT_END, TOP};
    const double top = axis_at(&y, value);
    char tooltip[64];
    snprintf(tooltip, sizeof tooltip, "%s: %.1f %%", series->name, 100 * value);
    svg_rect(page, class_of("fill", series).text, left, fmin(top, PLOT_END - 1), width, fmax(PLOT_END - top, 1), 0,
             tooltip);
}

void chart_bars(bytes *page, const chart *bars, const char *const *group_names, int group_count)
{
    enum { LINES = 4 };
    const double group_width = (double)PLOT_WIDTH / group_count, gap = 0.24 * group_width;
    const double bar_width = (group_width - gap) / bars->series_count;
    begin(page, bars);
    for (int line = 0; line <= LINES; line++)
        grid_line(page, PLOT_END - (double)PLOT_HEIGHT * line / LINES, "%.0f %%", 100.0 * line / LINES);
    for (int g = 0; g < group_count; g++) {
        svg_text(page, "axis", SVG_MIDDLE, LEFT + group_width * (g + 0.5), PLOT_END + 15, group_names[g]);
        for (int s = 0; s < bars->series_count; s++)
            if (!isnan(bars->series[s].y[g]))
                draw_bar(page, &bars->series[s], bars->series[s].y[g],
                         LEFT + group_width * g + gap / 2 + bar_width * s, bar_width * 0.92);
    }
    svg_end(page);
}
