/* Calls with sinks, as calls without them and steps over rows. */
#ifndef SKL_API_SINKS_H
#define SKL_API_SINKS_H

#include "base/backend.h"

/* Runs a checked call of a plan with sinks. */
skl_status skl_run_with_sinks(const skl_plan *plan, const skl_call *call);

/* Adds what such a plan needs to the workspace of SKL_OP_FORWARD_BACKWARD. */
void skl_sinks_extend_workspace(skl_plan *plan);

/* skl_states_finish of such a plan. */
skl_status skl_finish_with_sinks(const skl_plan *plan, const skl_call *call);

#endif
