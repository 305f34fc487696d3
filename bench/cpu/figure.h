/* A report as a picture: speed against length for each head size, and memory against length. */
#ifndef STREAMKL_BENCH_CPU_FIGURE_H
#define STREAMKL_BENCH_CPU_FIGURE_H

#include "bench/cpu/report.h"
#include "view/bytes.h"

/* Draws the points of the largest thread count as SVG. */
void figure_draw(bytes *svg, const bench_report *report);

#endif
