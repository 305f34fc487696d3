/* Charts as inline SVG. Their colours come from the style sheet of the page, so they follow its dark mode. */
#ifndef STREAMKL_VIEW_CHART_H
#define STREAMKL_VIEW_CHART_H

#include "view/bytes.h"

typedef struct chart_series {
    const char *name, *css_class;
    const double *x, *y;
    int64_t count;
    bool dots; /* draw a dot at every point */
} chart_series;

enum { CHART_SERIES_MAX = 4 };

typedef struct chart {
    const char *description; /* for screen readers */
    const char *x_label;
    bool log_y;
    double x_min, x_max;
    int series_count;
    chart_series series[CHART_SERIES_MAX];
} chart;

/* Line chart. A logarithmic axis omits points that are not above 0. */
void chart_lines(bytes *page, const chart *lines);

/* Bar chart of values in 0..1, labelled in per cent: series[s].y[g] is for group g; x is unused. NaN leaves a gap. */
void chart_bars(bytes *page, const chart *bars, const char *const *group_names, int group_count);

#endif
