/* Needs of operations: compared with a table written by hand, and with the checks of run calls. */
#include "runner.h"

#include <stdbool.h>

#include "any_call.h"
#include "base/needs.h"

enum { LEN_K = 3, DIM = 4, ROW_BITS = SKL_ROW_KL | SKL_ROW_LSE_T | SKL_ROW_LSE_S | SKL_ROW_DOT_T };
enum { LSES = SKL_ROW_LSE_T | SKL_ROW_LSE_S };

static skl_problem problem_of(skl_direction direction, int64_t heads_t, skl_student student, uint32_t gradients)
{
    skl_problem problem = skl_problem_default();
    problem.len_q = 1, problem.len_k = LEN_K;
    problem.dim_t = problem.dim_s = DIM;
    problem.heads_t = heads_t, problem.heads_s = 2;
    problem.direction = direction;
    problem.student = student;
    problem.index_heads = student == SKL_STUDENT_INDEXER;
    problem.gradients = gradients;
    return problem;
}

/* ---- By hand ------------------------------------------------------------------------------------------------ */

#define ATTENTION  SKL_STUDENT_ATTENTION
#define INDEXER    SKL_STUDENT_INDEXER
#define KL_FORWARD SKL_KL_FORWARD
#define KL_REVERSE SKL_KL_REVERSE

typedef struct need_rule {
    skl_direction direction;
    int64_t heads_t; /* heads_s is 2 */
    skl_student student;
    uint32_t gradients, backward, partial;
} need_rule;

static const need_rule need_rules[] = {
    {KL_FORWARD, 2, ATTENTION, 0, LSES, 0},
    {KL_FORWARD, 2, ATTENTION, SKL_DQ_S, LSES, 0},
    {KL_FORWARD, 2, ATTENTION, SKL_DK_S, LSES, 0},
    {KL_FORWARD, 2, ATTENTION, SKL_DQ_T, LSES | SKL_ROW_KL, 0},
    {KL_FORWARD, 2, ATTENTION, SKL_DK_T, LSES | SKL_ROW_KL, 0},
    {KL_FORWARD, 2, ATTENTION, SKL_DK_T | SKL_DQ_S, LSES | SKL_ROW_KL, 0},
    {KL_REVERSE, 2, ATTENTION, SKL_DQ_S, LSES | SKL_ROW_KL, 0},
    {KL_REVERSE, 2, ATTENTION, SKL_DK_S, LSES | SKL_ROW_KL, 0},
    {KL_REVERSE, 2, ATTENTION, SKL_DQ_T | SKL_DK_T, LSES, 0},
    {KL_FORWARD, 4, ATTENTION, SKL_DQ_S | SKL_DK_S, LSES, SKL_ROW_LSE_T},
    {KL_FORWARD, 4, ATTENTION, SKL_DQ_T, LSES | SKL_ROW_DOT_T, SKL_ROW_LSE_T},
    {KL_FORWARD, 4, ATTENTION, SKL_DK_T | SKL_DK_S, LSES | SKL_ROW_DOT_T, SKL_ROW_LSE_T},
    {KL_REVERSE, 4, ATTENTION, SKL_DQ_T, LSES | SKL_ROW_DOT_T, SKL_ROW_LSE_T},
    {KL_REVERSE, 4, ATTENTION, SKL_DQ_T | SKL_DQ_S, LSES | SKL_ROW_DOT_T | SKL_ROW_KL, SKL_ROW_LSE_T},
    {KL_FORWARD, 2, INDEXER, SKL_DQ_S | SKL_DK_S | SKL_DW_S, LSES, SKL_ROW_LSE_T},
    {KL_FORWARD, 4, INDEXER, SKL_DW_S, LSES, SKL_ROW_LSE_T},
    {KL_REVERSE, 4, INDEXER, 0, LSES, SKL_ROW_LSE_T},
    {KL_REVERSE, 4, INDEXER, SKL_DW_S, LSES | SKL_ROW_KL, SKL_ROW_LSE_T},
};

static void test_needs_by_hand(void **state)
{
    (void)state;
    for (size_t n = 0; n < COUNT_OF(need_rules); n++) {
        const need_rule *const rule = &need_rules[n];
        const skl_problem problem = problem_of(rule->direction, rule->heads_t, rule->student, rule->gradients);
        assert_int_equal(skl_problem_needs(&problem, SKL_OP_FORWARD), 0);
        assert_int_equal(skl_problem_needs(&problem, SKL_OP_BACKWARD), rule->backward);
        assert_int_equal(skl_problem_needs(&problem, SKL_OP_FORWARD_BACKWARD), rule->backward);
        assert_int_equal(skl_problem_needs(&problem, SKL_OP_PARTIAL), rule->partial);

        const skl_needs needs = skl_needs_of(&problem, SKL_OP_FORWARD_BACKWARD, rule->gradients);
        assert_true(needs.gradients);
        assert_int_equal(needs.kl, (rule->backward & SKL_ROW_KL) != 0);
        assert_int_equal(needs.dot_t, (rule->backward & SKL_ROW_DOT_T) != 0);
        const skl_needs forward = skl_needs_of(&problem, SKL_OP_FORWARD, rule->gradients);
        assert_false(forward.gradients || forward.kl || forward.dot_t);
    }
}

static void test_needs_of_bad_arguments(void **state)
{
    (void)state;
    skl_problem problem = problem_of(KL_FORWARD, 2, ATTENTION, SKL_DQ_S);
    assert_int_equal(skl_problem_needs(NULL, SKL_OP_BACKWARD), 0);
    assert_string_equal(skl_last_error(), "problem=NULL: must be given");
    assert_int_equal(skl_problem_needs(&problem, (skl_op)7), 0);
    assert_string_equal(skl_last_error(), "op=7: must be 0..6");
    assert_int_equal(skl_problem_needs(&problem, (skl_op)-1), 0);
    assert_string_equal(skl_last_error(), "op=-1: must be 0..6");
    problem.dim_t = 0;
    assert_int_equal(skl_problem_needs(&problem, SKL_OP_BACKWARD), 0);
    assert_string_equal(skl_last_error(), "dim_t=0: must be 1..512");
}

/* ---- Against run calls -------------------------------------------------------------------------------------- */

/* Makes a call that has the row vectors `given` and no others: from inputs, and in a one-pass call kl and dot_t from
 * rows. */
static skl_status run_with(const fixture *f, const fixture_results *results, const skl_plan *plan, skl_op op,
                           uint32_t given)
{
    const bool both = skl_op_is_one_pass(op);
    any_call call;
    any_call_init(&call, (call_kind)op, f, results);
    const skl_inputs known = results_backward_inputs(f, results);
    if (given & SKL_ROW_LSE_T)
        call.inputs.lse_t = known.lse_t;
    if (given & SKL_ROW_LSE_S)
        call.inputs.lse_s = known.lse_s;
    if (given & SKL_ROW_KL && !both)
        call.inputs.kl = known.kl;
    if (given & SKL_ROW_DOT_T && !both)
        call.inputs.dot_t = known.dot_t;
    if (!(given & SKL_ROW_KL && both))
        call.rows.kl.data = NULL;
    if (!(given & SKL_ROW_DOT_T && both))
        call.rows.dot_t.data = NULL;

    call.plan = plan;
    call.states = states_create(f);
    const skl_status status = any_call_run_in_workspace((call_kind)op, &call);
    states_destroy(call.states);
    return status;
}

/* The needed row vectors are sufficient, and each of them is necessary. */
static void check_calls(const test_case *c)
{
    fixture f;
    fixture_create(&f, c);
    fixture_results results = results_create(&f);
    skl_plan *const plan = test_plan(&f.problem, NULL, 1);
    for (int op = 0; op < SKL_OP_COUNT; op++) {
        if (!skl_plan_supports(plan, (skl_op)op))
            continue;
        const uint32_t needed = skl_problem_needs(&f.problem, (skl_op)op);
        assert_ok(run_with(&f, &results, plan, (skl_op)op, needed));
        for (uint32_t bit = 1; bit < ROW_BITS; bit <<= 1)
            if (needed & bit)
                assert_refused(run_with(&f, &results, plan, (skl_op)op, needed & ~bit), SKL_ERROR_ARGUMENT,
                               "=NULL: must be given: ");
    }
    skl_plan_destroy(plan);
    results_destroy(&results);
    fixture_destroy(&f);
}

static void test_needs_as_calls_check_them(void **state)
{
    (void)state;
    for (int direction = SKL_KL_FORWARD; direction <= SKL_KL_REVERSE; direction++)
        for (int64_t heads_t = 2; heads_t <= 4; heads_t += 2)
            for (uint32_t gradients = 0; gradients < 16; gradients++) {
                const test_case attention = {.name = "attention",
                                             .batch = 1,
                                             .len_q = 1,
                                             .len_k = LEN_K,
                                             .heads_t = heads_t,
                                             .heads_s = 2,
                                             .dim_t = DIM,
                                             .dim_s = DIM,
                                             .direction = (skl_direction)direction,
                                             .without = ~gradients};
                test_case with_values = attention, indexer = attention;
                with_values.attention = 1;
                indexer.index_heads = 1, indexer.without = ~(gradients << 1);
                check_calls(&attention);
                check_calls(&with_values);
                check_calls(&indexer);
            }
}

/* A backend asks which results a call has by its buffers. */
static void test_needs_of_a_call(void **state)
{
    (void)state;
    float buffer = 0;
    const skl_problem problem = problem_of(KL_FORWARD, 2, ATTENTION, SKL_DQ_T | SKL_DQ_S);
    skl_call call = {.op = SKL_OP_FORWARD_BACKWARD};
    assert_false(skl_op_has_rows(call.op, skl_row_bits(&call.rows)));
    assert_int_equal(skl_gradient_bits(&call.gradients), 0);
    assert_false(skl_call_needs(&problem, &call).kl);
    call.gradients.dq_s.data = &buffer;
    assert_int_equal(skl_gradient_bits(&call.gradients), SKL_DQ_S);
    assert_false(skl_call_needs(&problem, &call).kl);
    call.gradients.dk_t.data = call.gradients.dw_s.data = &buffer;
    assert_int_equal(skl_gradient_bits(&call.gradients), SKL_DQ_S | SKL_DK_T | SKL_DW_S);
    assert_true(skl_call_needs(&problem, &call).kl);

    skl_output *const results[] = {&call.rows.kl, &call.rows.dot_t, &call.rows.cross_entropy, &call.rows.entropy,
                                   &call.rows.lse_t};
    for (size_t n = 0; n < COUNT_OF(results); n++) {
        results[n]->data = &buffer;
        assert_true(skl_op_has_rows(call.op, skl_row_bits(&call.rows)));
        results[n]->data = NULL;
        assert_false(skl_op_has_rows(call.op, skl_row_bits(&call.rows)));
    }
    call.op = SKL_OP_FORWARD;
    assert_true(skl_op_has_rows(call.op, skl_row_bits(&call.rows)));
    call.op = SKL_OP_PARTIAL;
    assert_true(skl_op_has_rows(call.op, skl_row_bits(&call.rows)));
    call.op = SKL_OP_BACKWARD;
    call.rows.kl.data = &buffer;
    assert_false(skl_op_has_rows(call.op, skl_row_bits(&call.rows)));
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_needs_by_hand),
        cmocka_unit_test(test_needs_of_bad_arguments),
        cmocka_unit_test(test_needs_as_calls_check_them),
        cmocka_unit_test(test_needs_of_a_call),
    };
    return test_run("needs", tests, COUNT_OF(tests));
}
