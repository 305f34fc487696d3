/* A report as a figure: speed by length for each head size, and memory by length. */
#ifndef STREAMKL_BENCH_CPU_FIGURE_H
#define STREAMKL_BENCH_CPU_FIGURE_H

#include "bench/cpu/report.h"
#include "view/bytes.h"

/* Draws the points of the largest thread count as SVG. */
void figure_draw(bytes *svg, const bench_report *report);

#endif
