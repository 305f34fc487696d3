#include "bench/cpu/figure.h"
#include "view/plot.h"

#include <inttypes.h>
#include <stdio.h>
#include <stdlib.h>

typedef struct line_kind {
    const char *name;
    bench_method method;
    bool one_pass;
} line_kind;

static const line_kind line_kinds[] = {
    {"streaming", BENCH_STREAMING, false},
    {"one pass", BENCH_STREAMING, true},
    {"in place", BENCH_IN_PLACE, false},
    {"framework", BENCH_FRAMEWORK, false},
};
enum { LINE_KIND_COUNT = sizeof line_kinds / sizeof line_kinds[0] };

static int most_threads(const bench_report *report)
{
    int most = 0;
    for (int i = 0; i < report->point_count; i++)
        most = report->points[i].threads > most ? report->points[i].threads : most;
    return most;
}

/* Million query-key pairs per second, for the KL and both gradients. */
static double speed_of(const bench_config *config, const bench_point *point, const line_kind *kind)
{
    const double seconds = kind->one_pass ? point->methods[kind->method].passes[BENCH_ONE_PASS].median
                                          : bench_step_seconds(point, kind->method);
    return 1e-6 * bench_visible_pairs(config, point->length) / seconds;
}

static void add_point(plot_series *series, double x, double y, bool hollow)
{
    series->points[series->point_count++] = (plot_point){x, y, hollow};
}

static void fill_speed(plot_panel *panel, const bench_report *report, int64_t dim)
{
    snprintf(panel->title, sizeof panel->title, "Speed, head size %" PRId64, dim);
    panel->x_label = "context length N";
    panel->y_label = "million query-key pairs per second";
    panel->y_unit = PLOT_NUMBER;
    for (int k = 0; k < LINE_KIND_COUNT; k++) {
        plot_series *const series = &panel->series[panel->series_count++];
        series->name = line_kinds[k].name;
        series->colour = k;
        for (int i = 0; i < report->point_count; i++) {
            const bench_point *const point = &report->points[i];
            if (point->dim == dim && point->threads == most_threads(report) &&
                point->methods[line_kinds[k].method].ran)
                add_point(series, (double)point->length, speed_of(&report->config, point, &line_kinds[k]), false);
        }
    }
}

/* Memory hardly depends on the head size: show the largest. One pass uses the workspace of streaming. */
static void fill_memory(plot_panel *panel, const bench_report *report, int64_t dim)
{
    snprintf(panel->title, sizeof panel->title, "Memory in addition to inputs and outputs");
    panel->x_label = "context length N";
    panel->y_label = "peak bytes";
    panel->y_unit = PLOT_BYTES;
    for (int k = 0; k < LINE_KIND_COUNT; k++) {
        if (line_kinds[k].one_pass)
            continue;
        plot_series *const series = &panel->series[panel->series_count++];
        series->name = line_kinds[k].name;
        series->colour = k;
        for (int i = 0; i < report->point_count; i++) {
            const bench_point *const point = &report->points[i];
            const bench_method_result *const result = &point->methods[line_kinds[k].method];
            if (point->dim == dim && point->threads == most_threads(report) && result->memory_size > 0)
                add_point(series, (double)point->length, (double)result->memory_size, !result->ran);
        }
    }
}

void figure_draw(bytes *svg, const bench_report *report)
{
    const bench_config *const config = &report->config;
    plot *const drawn = calloc(1, sizeof *drawn);
    svg->failed |= drawn == NULL;
    if (drawn == NULL)
        return;
    const int threads = most_threads(report);
    drawn->title = "Attention KL and its gradients: streaming compared with materialising";
    drawn->note = "Speed: higher is better. Memory: lower is better. Hollow points are computed, not measured.";
    char place[32] = "";
    if (threads > 0) /* a GPU has none */
        snprintf(place, sizeof place, ", %d thread%s", threads, threads == 1 ? "" : "s");
    snprintf(drawn->subtitle, sizeof drawn->subtitle, "%s%s, %s, %" PRId64 " head%s, %s, kernel %s, streamkl %s, %s",
             report->machine, place, bench_type_name(config->dtype), config->heads, config->heads == 1 ? "" : "s",
             config->causal ? "causal" : "no mask", report->point_count ? report->points[0].kernel : "none",
             skl_version(), report->date);
    for (int i = 0; i < config->dims.count; i++)
        fill_speed(&drawn->panels[drawn->panel_count++], report, config->dims.values[i]);
    fill_memory(&drawn->panels[drawn->panel_count++], report, config->dims.values[config->dims.count - 1]);
    plot_draw(svg, drawn);
    free(drawn);
}
