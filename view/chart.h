/* Charts as inline SVG. Colours come from the classes of the page's style sheet, so that they follow its dark mode.
 */
#ifndef STREAMKL_VIEW_CHART_H
#define STREAMKL_VIEW_CHART_H

#include "view/bytes.h"

typedef struct chart_series {
    const char *name, *css_class;
    const double *x, *y;
    int64_t count;
    bool dots; /* mark every point */
} chart_series;

enum { CHART_SERIES_MAX = 4 };

typedef struct chart {
    const char *description; /* for those who cannot see it */
    const char *x_label;
    bool log_y;
    double x_min, x_max;
    int series_count;
    chart_series series[CHART_SERIES_MAX];
} chart;

/* Lines over x. Points that a logarithm cannot show are left out. */
void chart_lines(bytes *page, const chart *lines);

/* Groups of bars of 0..1, shown in per cent: series[s].y[g] for group g; x is not used. NaN leaves a gap. */
void chart_bars(bytes *page, const chart *bars, const char *const *group_names, int group_count);

#endif
