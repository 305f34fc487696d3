/* Times streaming and the materialised baseline at a context length whose matrices fit into memory. */
#ifndef STREAMKL_CLI_DISTILL_TIMING_H
#define STREAMKL_CLI_DISTILL_TIMING_H

#include "cli/distill/distill.h"
#include "view/bytes.h"

/* Adds a table to the page, or the reason why there is none. */
void distill_timing_add(bytes *page, const distill_run *run);

#endif
