#include "view/chart.h"

#include <math.h>

/* Small enough that its text can still be read on a phone, where it is shown at its own size. */
enum { WIDTH = 400, HEIGHT = 236, LEFT = 46, RIGHT = 10, TOP = 30, BOTTOM = 36 };
enum { PLOT_WIDTH = WIDTH - LEFT - RIGHT, PLOT_HEIGHT = HEIGHT - TOP - BOTTOM };

static void begin(bytes *page, const chart *drawn)
{
    bytes_print(page, "<svg class=\"chart\" viewBox=\"0 0 %d %d\" role=\"img\" aria-label=\"", WIDTH, HEIGHT);
    bytes_add_escaped(page, drawn->description);
    bytes_print(page, "\">");
    int x = LEFT;
    for (int s = 0; s < drawn->series_count; s++) {
        const chart_series *const series = &drawn->series[s];
        bytes_print(page,
                    "<rect class=\"fill %s\" x=\"%d\" y=\"6\" width=\"10\" height=\"10\" rx=\"2\"/><text x=\"%d\" "
                    "y=\"15\">%s</text>",
                    series->css_class, x, x + 15, series->name);
        int letters = 0;
        while (series->name[letters])
            letters++;
        x += 32 + 6 * letters;
    }
    bytes_print(page, "<text class=\"axis\" x=\"%d\" y=\"%d\" text-anchor=\"middle\">%s</text>",
                LEFT + PLOT_WIDTH / 2, HEIGHT - 4, drawn->x_label);
}

static void grid_line(bytes *page, double y, const char *format, double value)
{
    bytes_print(page, "<line class=\"grid\" x1=\"%d\" x2=\"%d\" y1=\"%.1f\" y2=\"%.1f\"/>", LEFT, LEFT + PLOT_WIDTH,
                y, y);
    bytes_print(page, "<text class=\"axis\" x=\"%d\" y=\"%.1f\" text-anchor=\"end\">", LEFT - 6, y + 4);
    bytes_print(page, format, value);
    bytes_print(page, "</text>");
}

/* ---- Lines -------------------------------------------------------------------------------------------------- */

typedef struct value_axis {
    bool logarithmic;
    double low, high; /* values, or their decimal logarithms */
} value_axis;

static bool is_shown(const value_axis *axis, double y)
{
    return isfinite(y) && (!axis->logarithmic || y > 0);
}

static double axis_value(const value_axis *axis, double y)
{
    return axis->logarithmic ? log10(y) : y;
}

static value_axis axis_of(const chart *lines)
{
    value_axis axis = {lines->log_y, INFINITY, -INFINITY};
    for (int s = 0; s < lines->series_count; s++)
        for (int64_t i = 0; i < lines->series[s].count; i++) {
            const double y = lines->series[s].y[i];
            if (!is_shown(&axis, y))
                continue;
            axis.low = fmin(axis.low, axis_value(&axis, y));
            axis.high = fmax(axis.high, axis_value(&axis, y));
        }
    if (!(axis.low <= axis.high))
        return (value_axis){lines->log_y, 0, 1};
    if (axis.logarithmic) {
        axis.low = floor(axis.low);
        axis.high = fmax(ceil(axis.high), axis.low + 1);
    } else {
        axis.low = 0;
        axis.high = axis.high > 0 ? axis.high * 1.05 : 1;
    }
    return axis;
}

static double y_of(const value_axis *axis, double value)
{
    return TOP + PLOT_HEIGHT * (1 - (value - axis->low) / (axis->high - axis->low));
}

static void value_grid(bytes *page, const value_axis *axis)
{
    enum { LINES = 4 };
    if (!axis->logarithmic)
        for (int l = 0; l <= LINES; l++) {
            const double value = axis->low + (axis->high - axis->low) * l / LINES;
            grid_line(page, y_of(axis, value), "%.2g", value);
        }
    const int step = (int)ceil((axis->high - axis->low) / 6); /* no more than six decades have a line */
    for (double decade = axis->low; axis->logarithmic && decade <= axis->high; decade += step)
        grid_line(page, y_of(axis, decade), "%.3g", pow(10, decade));
}

static void draw_line(bytes *page, const chart *lines, const value_axis *axis, const chart_series *series)
{
    const double span = lines->x_max > lines->x_min ? lines->x_max - lines->x_min : 1;
    bytes_print(page, "<path class=\"line %s\" d=\"", series->css_class);
    char command = 'M';
    for (int64_t i = 0; i < series->count; i++) {
        if (!is_shown(axis, series->y[i]))
            continue;
        bytes_print(page, "%c%.1f %.1f", command, LEFT + PLOT_WIDTH * (series->x[i] - lines->x_min) / span,
                    y_of(axis, axis_value(axis, series->y[i])));
        command = 'L';
    }
    bytes_print(page, "\"/>");
    for (int64_t i = 0; i < series->count && series->dots; i++)
        if (is_shown(axis, series->y[i]))
            bytes_print(page, "<circle class=\"fill %s\" r=\"2.6\" cx=\"%.1f\" cy=\"%.1f\"/>", series->css_class,
                        LEFT + PLOT_WIDTH * (series->x[i] - lines->x_min) / span,
                        y_of(axis, axis_value(axis, series->y[i])));
}

void chart_lines(bytes *page, const chart *lines)
{
    const value_axis axis = axis_of(lines);
    begin(page, lines);
    value_grid(page, &axis);
    for (int tick = 0; tick <= 4; tick++)
        bytes_print(page, "<text class=\"axis\" x=\"%.1f\" y=\"%d\" text-anchor=\"%s\">%.0f</text>",
                    LEFT + PLOT_WIDTH * tick / 4.0, TOP + PLOT_HEIGHT + 15,
                    tick == 0   ? "start"
                    : tick == 4 ? "end"
                                : "middle",
                    lines->x_min + (lines->x_max - lines->x_min) * tick / 4);
    for (int s = 0; s < lines->series_count; s++)
        draw_line(page, lines, &axis, &lines->series[s]);
    bytes_print(page, "</svg>");
}

/* ---- Bars --------------------------------------------------------------------------------------------------- */

void chart_bars(bytes *page, const chart *bars, const char *const *group_names, int group_count)
{
    const value_axis axis = {false, 0, 1};
    const double group_width = (double)PLOT_WIDTH / group_count, gap = 0.24 * group_width;
    const double bar_width = (group_width - gap) / bars->series_count;
    begin(page, bars);
    for (int line = 0; line <= 4; line++)
        grid_line(page, y_of(&axis, line / 4.0), "%.0f %%", 25.0 * line);
    for (int g = 0; g < group_count; g++) {
        const double left = LEFT + group_width * g + gap / 2;
        bytes_print(page, "<text class=\"axis\" x=\"%.1f\" y=\"%d\" text-anchor=\"middle\">%s</text>",
                    LEFT + group_width * (g + 0.5), TOP + PLOT_HEIGHT + 15, group_names[g]);
        for (int s = 0; s < bars->series_count; s++) {
            const double value = bars->series[s].y[g];
            if (isnan(value))
                continue;
            const double y = y_of(&axis, value);
            bytes_print(
                page,
                "<rect class=\"fill %s\" x=\"%.1f\" y=\"%.1f\" width=\"%.1f\" height=\"%.1f\"><title>%s: %.1f "
                "%%</title></rect>",
                bars->series[s].css_class, left + bar_width * s, fmin(y, TOP + PLOT_HEIGHT - 1), bar_width * 0.92,
                fmax(TOP + PLOT_HEIGHT - y, 1), bars->series[s].name, 100 * value);
        }
    }
    bytes_print(page, "</svg>");
}
