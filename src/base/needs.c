#include "base/needs.h"

#include "base/problem.h"

skl_needs skl_needs_of(const skl_problem *p, skl_op op, uint32_t gradients)
{
    const bool has_gradients = skl_op_has_gradients(op);
    const bool groups = skl_has_teacher_groups(p);
    const bool teacher = has_gradients && (gradients & (SKL_DQ_T | SKL_DK_T | SKL_DSINK_T)) != 0;
    const bool student = has_gradients && (gradients & (SKL_DQ_S | SKL_DK_S | SKL_DW_S | SKL_DSINK_S)) != 0;
    const skl_needs needs = {.gradients = has_gradients,
                             .lse_t = has_gradients || (op == SKL_OP_PARTIAL && groups),
                             .lse_s = has_gradients,
                             .kl = p->direction == SKL_KL_REVERSE ? student : teacher && !groups,
                             /* an indexer's teacher is fixed */
                             .dot_t = teacher && groups && !skl_is_indexer(p)};
    return needs;
}

skl_needs skl_call_needs(const skl_problem *problem, const skl_call *call)
{
    return skl_needs_of(problem, call->op, skl_gradient_bits(&call->gradients));
}

uint32_t skl_row_bits(const skl_rows *rows)
{
    return (rows->kl.data != NULL ? SKL_ROW_KL : 0U) | (rows->lse_t.data != NULL ? SKL_ROW_LSE_T : 0U) |
           (rows->lse_s.data != NULL ? SKL_ROW_LSE_S : 0U) | (rows->dot_t.data != NULL ? SKL_ROW_DOT_T : 0U) |
           (rows->cross_entropy.data != NULL || rows->entropy.data != NULL ? SKL_ROW_ENTROPIES : 0U) |
           (rows->mass.data != NULL ? SKL_ROW_MASS : 0U);
}

bool skl_op_has_rows(skl_op op, uint32_t rows)
{
    const uint32_t of_one_pass = SKL_ROW_KL | SKL_ROW_DOT_T | SKL_ROW_ENTROPIES | SKL_ROW_LSE_T;
    return op != SKL_OP_BACKWARD && (!skl_op_is_one_pass(op) || (rows & of_one_pass) != 0);
}

uint32_t skl_gradient_bits(const skl_gradients *gradients)
{
    const struct {
        const skl_output *gradient;
        uint32_t bit;
    } all[] = {{&gradients->dq_t, SKL_DQ_T},
               {&gradients->dk_t, SKL_DK_T},
               {&gradients->dq_s, SKL_DQ_S},
               {&gradients->dk_s, SKL_DK_S},
               {&gradients->dw_s, SKL_DW_S}};
    uint32_t bits = 0;
    for (size_t i = 0; i < sizeof all / sizeof all[0]; i++)
        bits |= all[i].gradient->data != NULL ? all[i].bit : 0;
    bits |= gradients->dsink_t != NULL ? SKL_DSINK_T : 0;
    bits |= gradients->dsink_s != NULL ? SKL_DSINK_S : 0;
    return bits;
}

uint32_t skl_problem_needs(const skl_problem *problem, skl_op op)
{
    skl_problem checked;
    if (skl_op_check(op) != SKL_OK || skl_problem_check(&checked, problem) != SKL_OK)
        return 0;
    const skl_needs needs = skl_needs_of(&checked, op, checked.gradients);
    return (needs.kl ? SKL_ROW_KL : 0U) | (needs.lse_t ? SKL_ROW_LSE_T : 0U) | (needs.lse_s ? SKL_ROW_LSE_S : 0U) |
           (needs.dot_t ? SKL_ROW_DOT_T : 0U);
}
