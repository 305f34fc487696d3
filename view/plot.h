/* Line plots as an SVG file, with logarithmic axes, for light and dark pages. */
#ifndef STREAMKL_VIEW_PLOT_H
#define STREAMKL_VIEW_PLOT_H

#include "view/bytes.h"

enum { PLOT_POINTS_MAX = 16, PLOT_SERIES_MAX = 4, PLOT_PANELS_MAX = 17, PLOT_COLOURS = 4 };

/* Both coordinates are above 0. A hollow point was computed, not measured. */
typedef struct plot_point {
    double x, y;
    bool hollow;
} plot_point;

/* Points in the order of x. The name is placed at the end of the line instead of in a legend. */
typedef struct plot_series {
    const char *name;
    int colour; /* below PLOT_COLOURS */
    int point_count;
    plot_point points[PLOT_POINTS_MAX];
} plot_series;

typedef enum plot_unit { PLOT_NUMBER, PLOT_BYTES } plot_unit;

typedef struct plot_panel {
    char title[64];
    const char *x_label, *y_label;
    plot_unit y_unit;
    int series_count;
    plot_series series[PLOT_SERIES_MAX];
} plot_panel;

typedef struct plot {
    const char *title;
    char subtitle[256];
    const char *note; /* below the panels */
    int panel_count;
    plot_panel panels[PLOT_PANELS_MAX];
} plot;

void plot_draw(bytes *svg, const plot *drawn);

#endif
