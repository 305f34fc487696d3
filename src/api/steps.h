/* The steps of a call: one run of the backend or, with sinks, runs over the keys and steps over rows that add the
 * sinks. A run call executes this list, and skl_plan_explain describes it. */
#ifndef SKL_API_STEPS_H
#define SKL_API_STEPS_H

#include "base/backend.h"

enum { SKL_STEPS_MAX = 4 };

typedef struct skl_step {
    enum { SKL_STEP_RUN, SKL_STEP_SINK_ROWS, SKL_STEP_SINK_GRADIENTS } kind;
    skl_call call;      /* run, sink gradients */
    skl_sink_rows rows; /* sink rows */
    skl_input kl;       /* sink gradients: the KL of each row, with the sink */
} skl_step;

typedef struct skl_steps {
    int count;
    skl_step at[SKL_STEPS_MAX];
} skl_steps;

/* Executes a checked call of a plan with sinks. */
skl_status skl_run_with_sinks(const skl_plan *plan, const skl_call *call);

/* Lists the steps of a call of a plan with sinks. */
void skl_steps_with_sinks(const skl_plan *plan, const skl_call *call, skl_steps *steps);

/* Adds what a plan with sinks needs to the workspace of SKL_OP_FORWARD_BACKWARD. */
void skl_sinks_extend_workspace(skl_plan *plan);

/* skl_states_finish of a plan with sinks. */
skl_status skl_finish_with_sinks(const skl_plan *plan, const skl_call *call);

#endif
