/* An axis of a chart: from values to coordinates. */
#ifndef STREAMKL_VIEW_AXIS_H
#define STREAMKL_VIEW_AXIS_H

#include <stdbool.h>

typedef struct axis {
    bool logarithmic;
    double least, most; /* values; above 0 on a logarithmic axis */
    double begin, end;  /* their coordinates */
} axis;

/* Can the axis show a value? Not if it is NaN or infinite, or has no logarithm where that is needed. */
bool axis_shows(const axis *along, double value);
double axis_at(const axis *along, double value);

/* Widens the range of the axis to a value that it can show. Begin with least = INFINITY and most = -INFINITY. */
void axis_include(axis *along, double value);
bool axis_is_empty(const axis *along);

#endif
