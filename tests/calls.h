/* Run calls of tests: in a poisoned workspace of exactly the size that the plan requires. */
#ifndef SKL_TESTS_CALLS_H
#define SKL_TESTS_CALLS_H

#include "fixture.h"

/* Whether a usable kernel supports a problem. CPU kernels support every problem, GPU kernels only some types and
 * sizes. */
int kernel_supports(const char *kernel, const skl_problem *problem);

/* Names of the usable kernels that support a problem, best first; NULL past the end. */
const char *problem_kernel(const skl_problem *problem, int32_t index);
const char *case_kernel(const test_case *test_case, int32_t index);

/* Each fails the test unless the call succeeds. */
void run_forward(const skl_plan *plan, const skl_inputs *inputs, const skl_rows *rows);
void run_backward(const skl_plan *plan, const skl_inputs *inputs, const skl_gradients *gradients);
void run_forward_backward(const skl_plan *plan, const skl_inputs *inputs, const skl_rows *rows,
                          const skl_gradients *gradients);
void run_partial(const skl_plan *plan, const skl_inputs *inputs, int64_t key_begin, int64_t key_end,
                 skl_row_state *states);

/* Whether the call ran. A backend without a kernel for it must refuse it and say what to call instead; every other
 * failure fails the test. */
int run_attention_forward(const skl_plan *plan, const skl_inputs *inputs, const skl_input *v_s, const skl_rows *rows,
                          const skl_output *o_s);
int run_attention_backward(const skl_plan *plan, const skl_inputs *inputs, const skl_attention *attention,
                           const skl_rows *rows, const skl_gradients *gradients);

/* The kernels of problem_kernel whose plans have skl_attention_backward. */
const char *attention_kernel(const skl_problem *problem, int32_t index);

void run_merge(const skl_plan *plan, skl_row_state *into, const skl_row_state *from);
void run_finish(const skl_plan *plan, const skl_inputs *inputs, const skl_row_state *states, const skl_rows *rows);

/* Forward, then backward from its row results, with all results requested. */
void run_both(const skl_plan *plan, const fixture *f, const fixture_results *results);

/* Makes a new plan, and calls run_both. */
void run_kernel(const fixture *f, const char *kernel, int32_t threads, const fixture_results *results);

/* Poisoned states for all rows. */
skl_row_state *states_create(const fixture *f);
void states_destroy(skl_row_state *states);

#endif
