/* Maps on a terminal: coloured half blocks if the terminal supports them, otherwise a ramp of characters. */
#ifndef STREAMKL_CLI_MAP_PRINT_H
#define STREAMKL_CLI_MAP_PRINT_H

#include "view/picture.h"

#include <stdio.h>

void map_print(FILE *stream, palette_kind kind, const double *values, int64_t rows, int64_t columns, double top);

#endif
