#include "view/plot.h"

#include <math.h>
#include <stdlib.h>

/* All lengths are in pixels of the SVG's own grid. */
enum {
    COLUMNS_MAX = 3,
    PANEL_WIDTH = 440,
    PANEL_HEIGHT = 350,
    HEADER_HEIGHT = 76,
    FOOTER_HEIGHT = 40,
    MARGIN_LEFT = 74,
    MARGIN_RIGHT = 140, /* room for the names at the ends of the lines */
    MARGIN_TOP = 40,
    MARGIN_BOTTOM = 52,
    LABEL_GAP = 16 /* between the baselines of two names */
};

/* Colours of Okabe and Ito, made darker on white and lighter on black until each reads well: 4.5 : 1 or more. */
static const char style[] =
    "<style>\n"
    "text{font:13px system-ui,-apple-system,'Segoe UI',Helvetica,Arial,sans-serif;fill:#1f2328}\n"
    ".paper{fill:#ffffff}.title{font-size:19px;font-weight:600}.panel{font-size:14px;font-weight:600}\n"
    ".name{font-weight:600;font-size:12px}.muted{fill:#59636e;font-size:12px;font-weight:400}\n"
    ".grid{stroke:#d1d9e0;stroke-width:1}.axis{stroke:#8c959f;stroke-width:1}\n"
    "polyline{fill:none;stroke-width:2.5;stroke-linejoin:round;stroke-linecap:round}circle{stroke-width:2}\n"
    ".l0{stroke:#005f9e}.l1{stroke:#00755a}.l2{stroke:#9a6100}.l3{stroke:#b84300}\n"
    ".f0{fill:#005f9e}.f1{fill:#00755a}.f2{fill:#9a6100}.f3{fill:#b84300}\n"
    ".hollow{fill:#ffffff}\n"
    "@media (prefers-color-scheme:dark){\n"
    "text{fill:#f0f6fc}.paper,.hollow{fill:#0d1117}.muted{fill:#9198a1}.grid{stroke:#2a313c}.axis{stroke:#656c76}\n"
    ".l0{stroke:#5ab8f0}.l1{stroke:#2fc79a}.l2{stroke:#e6a92e}.l3{stroke:#ff8552}\n"
    ".f0{fill:#5ab8f0}.f1{fill:#2fc79a}.f2{fill:#e6a92e}.f3{fill:#ff8552}\n"
    "}\n"
    "</style>\n";

/* ---- Text --------------------------------------------------------------------------------------------------- */

static void write_escaped(FILE *stream, const char *text)
{
    for (; *text; text++) {
        if (*text == '&')
            fputs("&amp;", stream);
        else if (*text == '<')
            fputs("&lt;", stream);
        else
            putc(*text, stream);
    }
}

static void write_text(FILE *stream, const char *class, const char *anchor, double x, double y, const char *text)
{
    fprintf(stream, "<text class=\"%s\" text-anchor=\"%s\" x=\"%.1f\" y=\"%.1f\">", class, anchor, x, y);
    write_escaped(stream, text);
    fputs("</text>\n", stream);
}

typedef struct short_text {
    char text[32];
} short_text;

static short_text number_text(double number)
{
    short_text out;
    const int decimals = number >= 100 ? 0 : number >= 10 ? 1 : 2;
    snprintf(out.text, sizeof out.text, "%.*f", decimals, number);
    return out;
}

static short_text bytes_text(double bytes)
{
    static const char *const units[] = {"B", "KiB", "MiB", "GiB", "TiB", "PiB"};
    size_t unit = 0;
    for (; bytes >= 1024 && unit + 1 < sizeof units / sizeof units[0]; unit++)
        bytes /= 1024;
    short_text out;
    snprintf(out.text, sizeof out.text, "%.*f %s", bytes < 10 && bytes != floor(bytes) ? 1 : 0, bytes, units[unit]);
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

/* A logarithmic axis from pixel `begin` to pixel `end`. */
typedef struct axis {
    double least, most;
    double begin, end;
} axis;

static double axis_at(const axis *along, double value)
{
    const double share = log(value / along->least) / log(along->most / along->least);
    return along->begin + share * (along->end - along->begin);
}

static void include(axis *along, double value)
{
    along->least = fmin(along->least, value);
    along->most = fmax(along->most, value);
}

/* Room around the data; a single value, or nearly one, still gets an axis. */
static void widen(axis *along, double margin, double least_ratio)
{
    const double short_of = least_ratio / (along->most / along->least);
    const double factor = short_of > 1 ? sqrt(short_of) * margin : margin;
    along->least /= factor;
    along->most *= factor;
}

static void write_y_tick(FILE *stream, const axis *x, const axis *y, plot_unit unit, double value)
{
    const double at = axis_at(y, value);
    fprintf(stream, "<line class=\"grid\" x1=\"%.1f\" x2=\"%.1f\" y1=\"%.1f\" y2=\"%.1f\"/>\n", x->begin, x->end, at,
            at);
    short_text label = value_text(unit, value);
    if (unit == PLOT_NUMBER)
        snprintf(label.text, sizeof label.text, "%g", value);
    write_text(stream, "muted", "end", x->begin - 8, at + 4, label.text);
}

/* 1, 2, 5, 10, ... for numbers; powers of two, at most seven of them, for bytes. */
static void write_y_ticks(FILE *stream, const axis *x, const axis *y, plot_unit unit)
{
    if (unit == PLOT_NUMBER) {
        static const double steps[] = {1, 2, 5};
        for (int power = (int)floor(log10(y->least)); power <= (int)log10(y->most) + 1; power++) {
            for (int i = 0; i < 3; i++) {
                const double value = steps[i] * pow(10, power);
                if (value >= y->least && value <= y->most)
                    write_y_tick(stream, x, y, unit, value);
            }
        }
        return;
    }
    enum { TICKS_MAX = 7 };
    int step = 1;
    while (log2(y->most / y->least) / step > TICKS_MAX)
        step++;
    for (int power = (int)ceil(log2(y->least) / step) * step; power <= log2(y->most); power += step)
        write_y_tick(stream, x, y, unit, exp2(power));
}

/* A tick at every x that was measured. */
static void write_x_ticks(FILE *stream, const plot_panel *panel, const axis *x, const axis *y)
{
    const plot_series *longest = &panel->series[0];
    for (int i = 1; i < panel->series_count; i++) {
        if (panel->series[i].point_count > longest->point_count)
            longest = &panel->series[i];
    }
    for (int i = 0; i < longest->point_count; i++) {
        const double value = longest->points[i].x, at = axis_at(x, value);
        fprintf(stream, "<line class=\"axis\" x1=\"%.1f\" x2=\"%.1f\" y1=\"%.1f\" y2=\"%.1f\"/>\n", at, at, y->begin,
                y->begin + 4);
        write_text(stream, "muted", "middle", at, y->begin + 18, length_text(value).text);
    }
}

/* ---- Lines and their names ---------------------------------------------------------------------------------- */

static void write_line(FILE *stream, const plot_series *series, const axis *x, const axis *y)
{
    fprintf(stream, "<polyline class=\"l%d\" points=\"", series->colour);
    for (int i = 0; i < series->point_count; i++)
        fprintf(stream, "%.1f,%.1f ", axis_at(x, series->points[i].x), axis_at(y, series->points[i].y));
    fputs("\"/>\n", stream);
    for (int i = 0; i < series->point_count; i++) {
        const plot_point *const point = &series->points[i];
        fprintf(stream, "<circle class=\"l%d ", series->colour);
        fprintf(stream, point->hollow ? "hollow" : "f%d", series->colour);
        fprintf(stream, "\" cx=\"%.1f\" cy=\"%.1f\" r=\"3.5\"/>\n", axis_at(x, point->x), axis_at(y, point->y));
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

/* Names of lines that end close together are pushed apart: downwards, then up again from the foot of the panel. */
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

static void write_names(FILE *stream, const plot_panel *panel, const axis *x, const axis *y)
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
        fprintf(stream, "<text class=\"name f%d\" x=\"%.1f\" y=\"%.1f\">", series->colour, labels[i].x, labels[i].y);
        write_escaped(stream, series->name);
        fprintf(stream, "<tspan class=\"muted\" dx=\"6\">%s</tspan></text>\n", value_text(panel->y_unit, value).text);
    }
}

/* ---- Panels ------------------------------------------------------------------------------------------------- */

static void write_panel(FILE *stream, const plot_panel *panel, double left, double top)
{
    axis x = {INFINITY, 0, left + MARGIN_LEFT, left + PANEL_WIDTH - MARGIN_RIGHT};
    axis y = {INFINITY, 0, top + PANEL_HEIGHT - MARGIN_BOTTOM, top + MARGIN_TOP};
    for (int i = 0; i < panel->series_count; i++) {
        for (int j = 0; j < panel->series[i].point_count; j++) {
            include(&x, panel->series[i].points[j].x);
            include(&y, panel->series[i].points[j].y);
        }
    }
    write_text(stream, "panel", "start", x.begin, top + 18, panel->title);
    if (x.most == 0)
        return; /* nothing was measured */
    widen(&x, 1.08, 2);
    widen(&y, 1.2, 4);

    write_y_ticks(stream, &x, &y, panel->y_unit);
    fprintf(stream, "<line class=\"axis\" x1=\"%.1f\" x2=\"%.1f\" y1=\"%.1f\" y2=\"%.1f\"/>\n", x.begin, x.end,
            y.begin, y.begin);
    write_x_ticks(stream, panel, &x, &y);
    write_text(stream, "muted", "middle", (x.begin + x.end) / 2, y.begin + 38, panel->x_label);
    write_text(stream, "muted", "start", x.begin, top + 34, panel->y_label);
    for (int i = 0; i < panel->series_count; i++)
        write_line(stream, &panel->series[i], &x, &y);
    write_names(stream, panel, &x, &y);
}

void plot_write(FILE *stream, const plot *drawn)
{
    const int columns = drawn->panel_count < COLUMNS_MAX ? drawn->panel_count : COLUMNS_MAX;
    const int rows = (drawn->panel_count + columns - 1) / columns;
    const int width = columns * PANEL_WIDTH;
    const int height = HEADER_HEIGHT + rows * PANEL_HEIGHT + FOOTER_HEIGHT;
    fprintf(
        stream,
        "<svg xmlns=\"http://www.w3.org/2000/svg\" viewBox=\"0 0 %d %d\" width=\"%d\" height=\"%d\" role=\"img\">\n",
        width, height, width, height);
    fputs("<title>", stream);
    write_escaped(stream, drawn->title);
    fputs("</title>\n", stream);
    fputs(style, stream);
    fprintf(stream, "<rect class=\"paper\" width=\"%d\" height=\"%d\"/>\n", width, height);
    write_text(stream, "title", "start", 24, 36, drawn->title);
    write_text(stream, "muted", "start", 24, 58, drawn->subtitle);
    for (int i = 0; i < drawn->panel_count; i++)
        write_panel(stream, &drawn->panels[i], i % columns * PANEL_WIDTH, HEADER_HEIGHT + i / columns * PANEL_HEIGHT);
    write_text(stream, "muted", "start", 24, height - 16, drawn->note);
    fputs("</svg>\n", stream);
}
