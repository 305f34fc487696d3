/* skl_attention_backward beyond the case table: what it becomes without a KL or without an output, and what it
 * refuses. */
#include "runner.h"

#include <math.h>

#include "case_words.h"
#include "device.h"

static const test_case plain = {
    "attention_plain", SHAPE(1, 197, 101), HEADS(2, 2), KEY_HEADS(1, 1), DIMS(16, 24), CAUSAL, WEIGHTED, ATTENTION};

/* Results of skl_attention_backward, from the LSEs of a forward; those of the student from `before`, unless it is
 * NULL. In a forward, they have bits that depend on the teacher: both sides of a tile are added again with new shifts
 * if one needs it. */
static fixture_results attention_results_after(const fixture *f, const fixture_results *before, const char *kernel,
                                               int32_t threads, int with_kl)
{
    skl_plan *const plan = test_plan(&f->problem, kernel, threads);
    fixture_results r = results_create(f);
    const skl_rows rows = results_rows(&r);
    run_forward(plan, &f->inputs, &rows);
    skl_inputs inputs = f->inputs;
    inputs.lse_t = tensor_input(&r.lse_t);
    inputs.lse_s = tensor_input(before != NULL ? &before->lse_s : &r.lse_s);
    const skl_rows only_kl = {.struct_size = sizeof(skl_rows), .kl = with_kl ? rows.kl : (skl_output){NULL, 0, 0, 0}};
    const skl_gradients gradients = results_gradients(&r);
    const skl_attention attention = results_attention(f, &r);
    assert_true(run_attention_backward(plan, &inputs, &attention, &only_kl, &gradients));
    skl_plan_destroy(plan);
    return r;
}

static fixture_results attention_results(const fixture *f, const char *kernel, int32_t threads, int with_kl)
{
    return attention_results_after(f, NULL, kernel, threads, with_kl);
}

static void assert_same_bits(const test_tensor *a, const test_tensor *b, const char *what)
{
    if (!tensor_equal(a, b))
        fail_msg("%s differ", what);
}

static void fill(const test_tensor *tensor, double value)
{
    for (int64_t n = 0; n < tensor_count(tensor); n++)
        tensor_set(tensor, n, value);
}

/* Without an upstream gradient of the output, dv is 0 and the rest is a one-pass call. */
static void check_no_output_gradient(const test_case *c)
{
    fixture f;
    fixture_create(&f, c);
    fill(&f.do_s, 0);
    fixture_solve(&f);
    for (int32_t k = 0; attention_kernel(&f.problem, k); k++) {
        const char *const kernel = attention_kernel(&f.problem, k);
        fixture_results carried = attention_results(&f, kernel, 2, 1);
        assert_int_equal(attention_mismatch(&f, &carried, kernel, "do = 0"), 0);
        for (int64_t n = 0; n < tensor_count(&carried.dv_s); n++)
            assert_true(tensor_get(&carried.dv_s, n) == 0);

        fixture_results one_pass = results_create(&f);
        skl_plan *const plan = test_plan(&f.problem, kernel, 2);
        skl_inputs inputs = f.inputs;
        inputs.lse_t = tensor_input(&carried.lse_t), inputs.lse_s = tensor_input(&carried.lse_s);
        const skl_rows rows = {.struct_size = sizeof rows, .kl = tensor_output(&one_pass.kl)};
        const skl_gradients gradients = results_gradients(&one_pass);
        run_forward_backward(plan, &inputs, &rows, &gradients);
        if (test_device() == SKL_CPU) {
            assert_same_bits(&carried.dq_s, &one_pass.dq_s, "dq_s of do = 0 and of a one-pass call");
            assert_same_bits(&carried.dk_s, &one_pass.dk_s, "dk_s of do = 0 and of a one-pass call");
            assert_same_bits(&carried.kl, &one_pass.kl, "KLs");
        }
        skl_plan_destroy(plan);
        results_destroy(&one_pass);
        results_destroy(&carried);
    }
    fixture_destroy(&f);
}

/* With weight 0 the result is a plain attention backward: the oracle's, and the same for any teacher. */
static void check_no_weight(const test_case *c)
{
    fixture f;
    fixture_create(&f, c);
    fill(&f.grad_kl, 0);
    fixture_solve(&f);
    for (int32_t k = 0; attention_kernel(&f.problem, k); k++) {
        const char *const kernel = attention_kernel(&f.problem, k);
        fixture_results results = attention_results(&f, kernel, 2, 1);
        assert_int_equal(attention_mismatch(&f, &results, kernel, "weight 0"), 0);
        assert_int_equal(rows_mismatch(&f, &results, "weight 0"), 0);

        fixture other;
        fixture_create(&other, c);
        fill(&other.grad_kl, 0);
        test_random random = random_for("another teacher");
        tensor_fill(&other.q_t, &random, -1, 1);
        fixture_results of_other = attention_results_after(&other, &results, kernel, 2, 1);
        assert_false(tensor_equal(&results.kl, &of_other.kl));
        assert_same_bits(&results.dq_s, &of_other.dq_s, "dq_s of two teachers of weight 0");
        assert_same_bits(&results.dk_s, &of_other.dk_s, "dk_s of two teachers of weight 0");
        assert_same_bits(&results.dv_s, &of_other.dv_s, "dv_s of two teachers of weight 0");
        results_destroy(&of_other);
        results_destroy(&results);
        fixture_destroy(&other);
    }
    fixture_destroy(&f);
}

static void test_no_output_gradient_is_one_pass(void **state)
{
    (void)state;
    case_in_every_type(&plain, check_no_output_gradient);
}

static void test_no_weight_is_plain_attention(void **state)
{
    (void)state;
    case_in_every_type(&plain, check_no_weight);
}

static void scale(const test_tensor *tensor, double factor)
{
    for (int64_t n = 0; n < tensor_count(tensor); n++)
        tensor_set(tensor, n, tensor_get(tensor, n) * factor);
}

/* f16 gradients of logits of 1e-7 and less: they are as accurate as larger ones. */
static void test_small_gradients_do_not_underflow(void **state)
{
    (void)state;
    const test_case c = {"attention_small", SHAPE(1, 197, 301), HEADS(2, 2), DIMS(64, 64),
                         TYPES(F16, F16),   .grad_f32 = 1,      WEIGHTED,    ATTENTION};
    fixture f;
    fixture_create(&f, &c);
    scale(&f.do_s, 0x1p-12), scale(&f.grad_kl, 0x1p-20);
    fixture_solve(&f);
    for (int32_t k = 0; attention_kernel(&f.problem, k); k++) {
        fixture_results results = attention_results(&f, attention_kernel(&f.problem, k), 2, 0);
        assert_int_equal(attention_mismatch(&f, &results, attention_kernel(&f.problem, k), "small gradients"), 0);
        results_destroy(&results);
    }
    fixture_destroy(&f);
}

/* A row of weight 0 has no gradient of its KL, even if its teacher is NaN; on a GPU, NaN propagates. */
static void test_teacher_of_weight_0_may_be_nan(void **state)
{
    (void)state;
    if (test_device() != SKL_CPU)
        skip();
    fixture f, poisoned;
    fixture_create(&f, &plain);
    fixture_create(&poisoned, &plain);
    fill(&f.grad_kl, 0), fill(&poisoned.grad_kl, 0);
    fill(&poisoned.q_t, (double)NAN);
    for (int32_t k = 0; test_kernel(k); k++) {
        fixture_results finite = attention_results(&f, test_kernel(k), 2, 0);
        fixture_results of_nan = attention_results_after(&poisoned, &finite, test_kernel(k), 2, 0);
        assert_same_bits(&finite.dq_s, &of_nan.dq_s, "dq_s with and without NaN");
        assert_same_bits(&finite.dk_s, &of_nan.dk_s, "dk_s with and without NaN");
        assert_same_bits(&finite.dv_s, &of_nan.dv_s, "dv_s with and without NaN");
        results_destroy(&finite);
        results_destroy(&of_nan);
    }
    fixture_destroy(&f);
    fixture_destroy(&poisoned);
}

/* f32: key gradients are summed in place; bf16: in the workspace. */
static void check_threads(const test_case *c)
{
    fixture f;
    fixture_create(&f, c);
    for (int32_t k = 0; attention_kernel(&f.problem, k); k++) {
        fixture_results one = attention_results(&f, attention_kernel(&f.problem, k), 1, 1);
        for (int32_t threads = 2; threads <= 7; threads += 5) {
            fixture_results many = attention_results(&f, attention_kernel(&f.problem, k), threads, 1);
            assert_null(results_difference(&one, &many));
            results_destroy(&many);
        }
        fixture_results without_kl = attention_results(&f, attention_kernel(&f.problem, k), 2, 0);
        assert_same_bits(&one.dq_s, &without_kl.dq_s, "dq_s with and without the KL");
        assert_same_bits(&one.dk_s, &without_kl.dk_s, "dk_s with and without the KL");
        results_destroy(&without_kl);
        results_destroy(&one);
    }
    fixture_destroy(&f);
}

static void test_bits_depend_on_no_thread_count(void **state)
{
    (void)state;
    if (test_device() != SKL_CPU)
        skip();
    case_in_every_type(&plain, check_threads);
}

/* ---- Refusals ----------------------------------------------------------------------------------------------- */

static void assert_no_plan(const skl_problem *problem, const char *message)
{
    skl_plan *plan = NULL;
    assert_refused(skl_plan_create(&plan, problem, NULL), SKL_ERROR_ARGUMENT, message);
    assert_null(plan);
}

static void test_refused_problems(void **state)
{
    (void)state;
    const skl_problem attention = case_problem(&plain);
    skl_problem p = attention;
    p.gradients |= SKL_DK_T;
    assert_no_plan(&p, "gradients=142: with SKL_DV_S the teacher has no gradients");
    p = attention;
    p.sinks = 1;
    assert_no_plan(&p, "gradients=140: SKL_DV_S needs sinks=0");
    p = attention;
    p.student = SKL_STUDENT_INDEXER, p.index_heads = 1;
    assert_no_plan(&p, "gradients=140: SKL_DV_S needs student=SKL_STUDENT_ATTENTION");
}

/* The call of a fixture with one thing changed. */
typedef struct changed_call {
    fixture f;
    fixture_results results;
    skl_inputs inputs;
    skl_attention attention;
    skl_rows rows;
    skl_gradients gradients;
} changed_call;

static void assert_call_refused(const changed_call *c, skl_status expected, const char *message, size_t missing)
{
    skl_plan *const plan = test_plan(&c->f.problem, NULL, 1);
    const size_t size = skl_plan_workspace_size(plan, SKL_OP_ATTENTION_BACKWARD);
    test_memory workspace = memory_create(size, SKL_WORKSPACE_ALIGNMENT);
    assert_refused(skl_attention_backward(plan, &c->inputs, &c->attention, &c->rows, &c->gradients, workspace.data,
                                          size - missing, NULL),
                   expected, message);
    memory_destroy(&workspace);
    skl_plan_destroy(plan);
}

static void test_refused_calls(void **state)
{
    (void)state;
    changed_call call = {.inputs = {0}};
    test_case bf16 = plain;
    bf16.dtype_t = bf16.dtype_s = SKL_BF16; /* Hopper has a kernel for it */
    fixture_create(&call.f, &bf16);
    call.results = results_create(&call.f);
    call.inputs = results_backward_inputs(&call.f, &call.results);
    call.attention = results_attention(&call.f, &call.results);
    call.rows = (skl_rows){.struct_size = sizeof(skl_rows)};
    call.gradients = results_gradients(&call.results);

    changed_call c = call;
    c.attention.v_s.data = NULL;
    assert_call_refused(&c, SKL_ERROR_ARGUMENT, "v_s=NULL: must be given", 0);
    c = call;
    c.attention.o_s.data = NULL;
    assert_call_refused(&c, SKL_ERROR_ARGUMENT, "o_s=NULL: must be given", 0);
    c = call;
    c.attention.do_s.data = NULL;
    assert_call_refused(&c, SKL_ERROR_ARGUMENT, "do_s=NULL: must be given", 0);
    c = call;
    c.attention.do_s.stride_row = -1;
    assert_call_refused(&c, SKL_ERROR_ARGUMENT, "do_s.stride_row=-1: must be at least 0", 0);
    c = call;
    c.attention.dv_s = c.gradients.dk_s;
    assert_call_refused(&c, SKL_ERROR_ARGUMENT, "overlap: an output must not share memory", 0);
    c = call;
    c.attention.dv_s.data = (void *)(uintptr_t)c.attention.v_s.data;
    assert_call_refused(&c, SKL_ERROR_ARGUMENT, "overlap: an output must not share memory", 0);
    c = call;
    c.inputs.lse_s.data = NULL;
    assert_call_refused(&c, SKL_ERROR_ARGUMENT, "lse_s=NULL: must be given", 0);
    c = call;
    c.rows.lse_t = tensor_output(&c.results.lse_t);
    assert_call_refused(&c, SKL_ERROR_ARGUMENT, "rows.lse_t given: must be NULL in a one-pass call", 0);
    c = call;
    c.attention.struct_size--;
    assert_call_refused(&c, SKL_ERROR_ARGUMENT, "attention.struct_size=", 0);
    if (attention_kernel(&call.f.problem, 0) != NULL) /* a refused operation needs no workspace */
        assert_call_refused(&call, SKL_ERROR_WORKSPACE, "workspace_size=", 1);

    c = call;
    c.f.problem.gradients = SKL_DQ_S | SKL_DK_S; /* a plan for other calls */
    assert_call_refused(&c, SKL_ERROR_ARGUMENT, "gradients=12: skl_attention_backward needs a plan whose", 0);

    skl_plan *const plan = test_plan(&call.f.problem, NULL, 1);
    assert_refused(skl_attention_backward(plan, &call.inputs, NULL, &call.rows, &call.gradients, NULL, 0, NULL),
                   SKL_ERROR_ARGUMENT, "attention=NULL: must be given");
    skl_plan_destroy(plan);
    results_destroy(&call.results);
    fixture_destroy(&call.f);
}

/* The CPU has every attention backward. A GPU has those that carry the KL, on Hopper; elsewhere neither a plan nor a
 * call nor an explanation promises more. */
static void check_support(const test_case *c)
{
    fixture f;
    fixture_create(&f, c);
    fixture_results r = results_create(&f);
    skl_inputs inputs = results_backward_inputs(&f, &r);
    const skl_attention attention = results_attention(&f, &r);
    const skl_gradients gradients = results_gradients(&r);
    const skl_rows rows = {.struct_size = sizeof rows, .kl = tensor_output(&r.kl)};
    for (int32_t k = 0; problem_kernel(&f.problem, k); k++) {
        skl_plan *const plan = test_plan(&f.problem, problem_kernel(&f.problem, k), 1);
        fill(&r.lse_t, 0), fill(&r.lse_s, 0);
        const int supported = skl_plan_supports(plan, SKL_OP_ATTENTION_BACKWARD);
        assert_int_equal(run_attention_backward(plan, &inputs, &attention, &rows, &gradients), supported);
        assert_true(supported || test_device() == SKL_CUDA);
        assert_int_equal(skl_plan_supports(plan, SKL_OP_FORWARD_BACKWARD), 1);
        skl_plan_destroy(plan);
    }
    results_destroy(&r);
    fixture_destroy(&f);
}

static void test_supported_calls_run_and_others_are_refused(void **state)
{
    (void)state;
    test_case c = plain;
    case_in_every_type(&c, check_support);
    c.direction = SKL_KL_REVERSE;
    case_in_every_type(&c, check_support);
    c = plain, c.softcap_s = 30;
    case_in_every_type(&c, check_support);
    c = plain, c.dim_s = 136;
    case_in_every_type(&c, check_support);
    c = plain, c.heads_t = 4;
    case_in_every_type(&c, check_support);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_no_output_gradient_is_one_pass),
        cmocka_unit_test(test_no_weight_is_plain_attention),
        cmocka_unit_test(test_small_gradients_do_not_underflow),
        cmocka_unit_test(test_teacher_of_weight_0_may_be_nan),
        cmocka_unit_test(test_bits_depend_on_no_thread_count),
        cmocka_unit_test(test_refused_problems),
        cmocka_unit_test(test_refused_calls),
        cmocka_unit_test(test_supported_calls_run_and_others_are_refused),
    };
    return test_run("attention", tests, COUNT_OF(tests));
}
