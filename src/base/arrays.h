/* The int32 arrays of a call: cu_seqlens, key_lengths, row bounds and indices. Every entry point whose arrays are in
 * host memory checks their values here, before anything uses them. */
#ifndef SKL_BASE_ARRAYS_H
#define SKL_BASE_ARRAYS_H

#include "base/visible.h"

/* Checks the values of cu_seqlens, key_lengths, row bounds and indices, which are in host memory. Requires that the
 * call's tensors and arrays are checked. */
skl_status skl_arrays_check_values(const skl_problem *problem, const skl_inputs *inputs);

#endif
