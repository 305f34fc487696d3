/* Times streaming and the materialised baseline at a context length whose matrices fit into memory. */
#ifndef STREAMKL_CLI_DISTILL_TIMING_H
#define STREAMKL_CLI_DISTILL_TIMING_H

#include "cli/distill/distill.h"

#include <jansson.h>

/* A table for the report, or the reason why there is none; NULL: out of memory. */
json_t *distill_timing(const distill_run *run);
json_t *distill_timing_refused(const char *reason);

#endif
