/* A report as CSV: one line a pass, every line complete in itself. */
#ifndef STREAMKL_BENCH_CPU_CSV_H
#define STREAMKL_BENCH_CPU_CSV_H

#include "bench/cpu/report.h"
#include "view/bytes.h"

/* A column that does not apply is empty. A method that was skipped has one line, with its memory and "skipped". */
void csv_write(bytes *file, const bench_report *report);

#endif
