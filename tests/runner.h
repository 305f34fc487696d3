/* Run calls as tests make them: in a poisoned workspace of exactly the size that the plan asks for. */
#ifndef SKL_TESTS_RUNNER_H
#define SKL_TESTS_RUNNER_H

#include "fixture.h"

/* Each fails the test unless the call succeeds. */
void run_forward(const skl_plan *plan, const skl_inputs *inputs, const skl_rows *rows);
void run_backward(const skl_plan *plan, const skl_inputs *inputs, const skl_gradients *gradients);
void run_forward_backward(const skl_plan *plan, const skl_inputs *inputs, const skl_rows *rows,
                          const skl_gradients *gradients);
void run_partial(const skl_plan *plan, const skl_inputs *inputs, int64_t key_begin, int64_t key_end,
                 skl_row_state *states);

/* Forward, then backward from its rows, all results wanted. */
void run_both(const skl_plan *plan, const fixture *f, const fixture_results *results);

/* The same with a plan of its own. */
void run_kernel(const fixture *f, const char *kernel, int32_t threads, const fixture_results *results);

/* Poisoned states for all rows. */
skl_row_state *states_create(const fixture *f);
void states_destroy(skl_row_state *states);

#endif
