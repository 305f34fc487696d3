/* The int32 and float arrays of a call, besides its tensors: cu_seqlens, key_lengths, row bounds, indices and sinks.
 * Every entry point checks them here, before anything reads through them. */
#ifndef SKL_BASE_ARRAYS_H
#define SKL_BASE_ARRAYS_H

#include "base/visible.h"

/* Checks that the arrays of the problem are given for an operation, and no others. Reads none of them. */
skl_status skl_arrays_check_given(const skl_problem *problem, const skl_inputs *inputs, skl_op op);

/* Checks the values of cu_seqlens, key_lengths, row bounds and indices, which are in host memory. Requires that the
 * call's tensors and arrays are checked. */
skl_status skl_arrays_check_values(const skl_problem *problem, const skl_inputs *inputs);

#endif
