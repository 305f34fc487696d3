/* One kernel on one case of `streamkl check`: every public call, every result compared. */
#ifndef STREAMKL_CLI_CHECK_KERNEL_H
#define STREAMKL_CLI_CHECK_KERNEL_H

#include "cli/check/cases.h"

/* The largest error of a kernel so far. */
typedef struct check_verdict {
    int cases;         /* that the kernel supports and ran */
    double worst;      /* largest error relative to the allowed error: above 1 it fails */
    char where[128];   /* "dq_s of backward, packed" */
    char failure[256]; /* why a call failed; "" if none did */
} check_verdict;

/* Updates the verdict, unless the kernel does not support the case. False: out of memory. `rounds_gradients` is that
 * of skl_kernel_info. */
bool check_kernel(check_verdict *verdict, const check_case *of, const skl_options *options, bool rounds_gradients);

#endif
