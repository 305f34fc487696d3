/* All rules about the tensors of a run call. The structs are copies: see structs.h. */
#ifndef SKL_BASE_TENSORS_H
#define SKL_BASE_TENSORS_H

#include "base/backend.h"

/* Checks everything that a run call is given: arrays, tensors, workspace, the requirements of the operation. Values
 * of arrays are checked on the CPU; a GPU's are out of reach. */
skl_status skl_call_check(const skl_plan *plan, const skl_call *call, size_t workspace_size);

/* Checks the inputs of an operation alone: pointers and strides, but no value. */
skl_status skl_inputs_check_layout(const skl_problem *problem, const skl_inputs *inputs, skl_op op);

/* Checks the arrays of skl_states_merge. */
skl_status skl_merge_check(const skl_problem *problem, const skl_row_state *into, const skl_row_state *from);

#endif
