/* A report as CSV: one self-contained line per pass. */
#ifndef STREAMKL_BENCH_CPU_CSV_H
#define STREAMKL_BENCH_CPU_CSV_H

#include "bench/cpu/report.h"

#include <stdio.h>

/* Columns that do not apply are empty. A skipped method has one line, with its memory and the status "skipped". */
void csv_write(FILE *file, const bench_report *report);

#endif
