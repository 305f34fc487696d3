/* The text of skl_plan_explain() on the heap. */
#ifndef STREAMKL_DEVICE_EXPLAIN_H
#define STREAMKL_DEVICE_EXPLAIN_H

#include "streamkl.h"

/* One line per launch; the caller frees it. `inputs` are those of the call, in device memory, or NULL for aligned,
 * contiguous tensors. On failure returns NULL, and device_error() or, if that is empty, skl_last_error() says why. */
char *explain_plan(const skl_plan *plan, const skl_inputs *inputs, skl_op op);

#endif
