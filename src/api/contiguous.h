/* Contiguous tensors of a problem: those of the simple API, and those that skl_plan_explain assumes. */
#ifndef SKL_API_CONTIGUOUS_H
#define SKL_API_CONTIGUOUS_H

#include "base/side.h"

/* Stands for the address of a tensor. Aligned for every copy instruction, and never read. */
#define SKL_PLACEHOLDER ((void *)(uintptr_t)4096)

/* A tensor at SKL_PLACEHOLDER. Strides wrap around where it would not fit into memory. */
skl_output skl_contiguous_output(int64_t heads, int64_t rows, int64_t dim);
skl_input skl_contiguous_input(int64_t heads, int64_t rows, int64_t dim);

/* All inputs that every call of a checked problem needs, at SKL_PLACEHOLDER. */
skl_inputs skl_contiguous_inputs(const skl_problem *problem);

#endif
