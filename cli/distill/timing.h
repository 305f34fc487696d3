/* How long materialising takes, measured beside streaming at a context that memory allows. */
#ifndef STREAMKL_CLI_DISTILL_TIMING_H
#define STREAMKL_CLI_DISTILL_TIMING_H

#include "cli/distill/distill.h"
#include "view/bytes.h"

/* Adds a table, or says why there is none. */
void distill_timing_add(bytes *page, const distill_run *run);

#endif
