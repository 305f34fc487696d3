/* Any entry point that takes a plan, with its arguments in a struct: an edit can make one of them invalid. */
#ifndef SKL_TESTS_ANY_CALL_H
#define SKL_TESTS_ANY_CALL_H

#include "fixture.h"

/* An operation has the number of its skl_op. */
typedef enum call_kind {
    FORWARD = SKL_OP_FORWARD,
    BACKWARD = SKL_OP_BACKWARD,
    ONE_PASS = SKL_OP_FORWARD_BACKWARD,
    PARTIAL = SKL_OP_PARTIAL,
    ATTENTION_BACKWARD = SKL_OP_ATTENTION_BACKWARD,
    ATTENTION_FORWARD = SKL_OP_ATTENTION_FORWARD,
    STATS = SKL_OP_ATTENTION_STATS,
    MERGE,
    FINISH,
    CHECK,
    CALL_KINDS
} call_kind;

extern const char *const call_names[CALL_KINDS];

/* The arguments of a call. any_call_init makes each address that of the struct here. */
typedef struct any_call {
    const skl_plan *plan;
    const skl_inputs *inputs_address;
    const skl_rows *rows_address;
    const skl_gradients *gradients_address;
    const skl_attention *attention_address;
    const skl_stats *stats_address;
    const skl_input *v_s_address;
    const skl_output *o_s_address;
    skl_inputs inputs;
    skl_rows rows;
    skl_gradients gradients;
    skl_attention attention;
    skl_stats stats;
    skl_output o_s; /* of skl_attention_forward */
    int64_t key_begin, key_end;
    skl_row_state *states, *from;
    void *workspace;
    size_t workspace_size;
} any_call;

/* All results that calls of this kind have, and the inputs of a fixture, for all keys. The caller adds the plan, the
 * workspace and the states. */
void any_call_init(any_call *call, call_kind kind, const fixture *f, const fixture_results *results);

skl_status any_call_run(call_kind kind, const any_call *call);

/* Makes the call in a poisoned workspace of exactly the size that the plan requires, and waits for the device. */
skl_status any_call_run_in_workspace(call_kind kind, const any_call *call);

#endif
