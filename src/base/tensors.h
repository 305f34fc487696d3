/* Every rule about the tensors of a run call lives here, once. */
#ifndef SKL_BASE_TENSORS_H
#define SKL_BASE_TENSORS_H

#include "base/backend.h"

/* Checks tensors, workspace and whatever each operation requires. cu_seqlens and key_lengths are read only when
 * they lie in host memory: see skl_inputs_check_values. */
skl_status skl_call_check(const skl_plan *plan, const skl_call *call, size_t workspace_size);

/* Checks inputs alone: struct_size, pointers and strides, but no value. */
skl_status skl_inputs_check_layout(const skl_problem *problem, const skl_inputs *inputs);

/* Checks the values of cu_seqlens, key_lengths and indices, in host memory. */
skl_status skl_inputs_check_values(const skl_problem *problem, const skl_inputs *inputs);

/* Checks what skl_states_finish takes. */
skl_status skl_finish_check(const skl_problem *problem, const skl_call *call);

#endif
