/* Runs every call of one kernel on a fixture and compares its results with the oracle. */
#ifndef SKL_TESTS_KERNEL_CHECK_H
#define SKL_TESTS_KERNEL_CHECK_H

#include "fixture.h"

/* How the calls are made. They all give the same results. */
typedef struct check_options {
    int32_t threads;
    uint32_t results;    /* bits of the results that are requested, as in results_subset() */
    int32_t in_place;    /* 1: row results are written to the tensors of the inputs of the same name */
    int32_t sparing;     /* 1: only the row vectors are given that skl_problem_needs() returns */
    int32_t range_count; /* key ranges of the partial states */
} check_options;

check_options check_options_default(void);

/* Returns the number of results that are wrong, after it has printed each. */
int kernel_check(const fixture *f, const char *kernel, const check_options *options);

#endif
