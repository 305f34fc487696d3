/* All rules about the tensors of a run call. The structs are copies: see structs.h. */
#ifndef SKL_BASE_TENSORS_H
#define SKL_BASE_TENSORS_H

#include "base/backend.h"

/* Checks the tensors, the workspace and the requirements of the operation. Reads no array: see
 * skl_inputs_check_values. */
skl_status skl_call_check(const skl_plan *plan, const skl_call *call, size_t workspace_size);

/* Checks inputs alone: pointers and strides, but no value. */
skl_status skl_inputs_check_layout(const skl_problem *problem, const skl_inputs *inputs);

/* Checks the values of cu_seqlens, key_lengths, row bounds and indices, in host memory. */
skl_status skl_inputs_check_values(const skl_problem *problem, const skl_inputs *inputs);

/* Checks the arguments of skl_states_finish. */
skl_status skl_finish_check(const skl_problem *problem, const skl_call *call);

#endif
