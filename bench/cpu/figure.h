/* A report as a picture: speed against length for each head size, and memory against length. */
#ifndef STREAMKL_BENCH_CPU_FIGURE_H
#define STREAMKL_BENCH_CPU_FIGURE_H

#include "bench/cpu/report.h"

#include <stdbool.h>
#include <stdio.h>

/* Draws the points of the largest thread count as SVG. False: out of memory. */
bool figure_write(FILE *stream, const bench_report *report);

#endif
