/* skl_attention_backward beyond the case table: what it becomes without a KL or without an output, and where it is
 * supported. */
#include "trial.h"

#include <math.h>

#include "case_words.h"
#include "device.h"

static const test_case plain[] = {
    {"attention", SHAPE(1, 197, 101), HEADS(2, 2), KEY_HEADS(1, 1), DIMS(16, 24), CAUSAL, WEIGHTED, ATTENTION},
};

/* Results of skl_attention_backward, from the LSEs of a forward; those of the student from `before`, unless it is
 * NULL. In a forward, they have bits that depend on the teacher: both sides of a tile are added again with new shifts
 * if one needs it. */
static void run_attention(const skl_plan *plan, const fixture *f, const fixture_results *before,
                          const fixture_results *r, int with_kl)
{
    const skl_rows rows = results_rows(r);
    run_forward(plan, &f->inputs, &rows);
    skl_inputs inputs = f->inputs;
    inputs.lse_t = tensor_input(&r->lse_t);
    inputs.lse_s = tensor_input(before != NULL ? &before->lse_s : &r->lse_s);
    const skl_rows only_kl = {.struct_size = sizeof(skl_rows), .kl = with_kl ? rows.kl : (skl_output){NULL, 0, 0, 0}};
    const skl_gradients gradients = results_gradients(r);
    const skl_attention attention = results_attention(f, r);
    assert_true(run_attention_backward(plan, &inputs, &attention, &only_kl, &gradients));
}

static void assert_same_gradients(const trial *t, const char *what)
{
    if (!tensor_equal(&t->one.dq_s, &t->other.dq_s) || !tensor_equal(&t->one.dk_s, &t->other.dk_s) ||
        !tensor_equal(&t->one.dv_s, &t->other.dv_s))
        trial_fail(t, "gradients differ: %s", what);
}

/* Without an upstream gradient of the output, dv is 0 and the rest is a one-pass call. */
static void clear_output_gradient(fixture *f)
{
    tensor_set_all(&f->do_s, 0);
    fixture_solve(f);
}

static void check_no_output_gradient(trial *t)
{
    run_attention(t->plan, t->f, NULL, &t->one, 1);
    assert_int_equal(attention_mismatch(t->f, &t->one, t->kernel, "do = 0"), 0);
    assert_elements(t, &t->one.dv_s, is_zero, "dv_s");
    run_one_pass(t->plan, t->f, &t->one, &t->other);
    tensor_copy(&t->other.dv_s, &t->one.dv_s); /* no result of a one-pass call */
    if (test_device() == SKL_CPU) {
        assert_same_gradients(t, "do = 0 and a one-pass call");
        assert_true(tensor_equal(&t->one.kl, &t->other.kl));
    }
}

/* With weight 0 the result is a plain attention backward: the oracle's, and the same for any teacher. */
static void clear_weight(fixture *f)
{
    tensor_set_all(&f->grad_kl, 0);
    fixture_solve(f);
}

static void check_no_weight(trial *t)
{
    run_attention(t->plan, t->f, NULL, &t->one, 1);
    assert_int_equal(attention_mismatch(t->f, &t->one, t->kernel, "weight 0"), 0);
    assert_int_equal(rows_mismatch(t->f, &t->one, "weight 0"), 0);

    fixture other;
    fixture_create(&other, t->f->test_case);
    tensor_set_all(&other.grad_kl, 0);
    test_random random = random_for("another teacher");
    tensor_fill(&other.q_t, &random, -1, 1);
    run_attention(t->plan, &other, &t->one, &t->other, 1);
    assert_false(tensor_equal(&t->one.kl, &t->other.kl));
    assert_same_gradients(t, "two teachers of weight 0");
    fixture_destroy(&other);
}

/* A row of weight 0 has no gradient of its KL, even if its teacher is NaN; on a GPU, NaN propagates. */
static void check_nan_teacher(trial *t)
{
    tensor_set_all(&t->f->grad_kl, 0);
    run_attention(t->plan, t->f, NULL, &t->one, 0);
    tensor_set_all(&t->f->q_t, (double)NAN);
    run_attention(t->plan, t->f, &t->one, &t->other, 0);
    assert_same_gradients(t, "a NaN teacher");
}

/* f16 gradients of logits of 1e-7 and less: they are as accurate as larger ones. */
static const test_case small[] = {{"attention_small", SHAPE(1, 197, 301), HEADS(2, 2), DIMS(64, 64), TYPES(F16, F16),
                                   .grad_f32 = 1, WEIGHTED, ATTENTION}};

static void make_gradients_small(fixture *f)
{
    tensor_scale(&f->do_s, 0x1p-12), tensor_scale(&f->grad_kl, 0x1p-20);
    fixture_solve(f);
}

static void check_small_gradients(trial *t)
{
    run_attention(t->plan, t->f, NULL, &t->one, 0);
    assert_int_equal(attention_mismatch(t->f, &t->one, t->kernel, "small gradients"), 0);
}

/* f32: key gradients are summed in place; bf16: in the workspace. */
static void check_threads(trial *t)
{
    run_attention(t->plan, t->f, NULL, &t->one, 1);
    for (int32_t threads = 1; threads <= 7; threads += 6) {
        skl_plan *const plan = test_plan(&t->f->problem, t->kernel, threads);
        run_attention(plan, t->f, NULL, &t->other, 1);
        assert_same_bits(t, "another number of threads");
        skl_plan_destroy(plan);
    }
    run_attention(t->plan, t->f, NULL, &t->other, 0);
    assert_same_gradients(t, "with and without the KL");
}

/* ---- Support ------------------------------------------------------------------------------------------------ */

/* The CPU has every attention backward. A GPU has those that carry the KL, on Hopper; elsewhere neither a plan nor a
 * call nor an explanation promises more. */
#define SUPPORT SHAPE(1, 197, 101), KEY_HEADS(1, 1), CAUSAL, WEIGHTED, ATTENTION
static const test_case supports[] = {
    {"plain", SUPPORT, HEADS(2, 2), DIMS(16, 24)},
    {"reverse", SUPPORT, HEADS(2, 2), DIMS(16, 24), REVERSE},
    {"softcap", SUPPORT, HEADS(2, 2), DIMS(16, 24), SOFTCAPS(0, 30)},
    {"wide", SUPPORT, HEADS(2, 2), DIMS(16, 136)},
    {"teacher groups", SUPPORT, HEADS(4, 2), DIMS(16, 24)},
};

static void check_support(trial *t)
{
    const skl_inputs inputs = results_backward_inputs(t->f, &t->one);
    const skl_attention attention = results_attention(t->f, &t->one);
    const skl_gradients gradients = results_gradients(&t->one);
    const skl_rows rows = {.struct_size = sizeof rows, .kl = tensor_output(&t->one.kl)};
    tensor_set_all(&t->one.lse_t, 0), tensor_set_all(&t->one.lse_s, 0);
    const int supported = skl_plan_supports(t->plan, SKL_OP_ATTENTION_BACKWARD);
    assert_int_equal(run_attention_backward(t->plan, &inputs, &attention, &rows, &gradients), supported);
    assert_true(supported || test_device() == SKL_CUDA);
    assert_int_equal(skl_plan_supports(t->plan, SKL_OP_FORWARD_BACKWARD), 1);
}

int main(void)
{
#define CARRIED .every_type = 1, .attention = 1
    const struct CMUnitTest tests[] = {
        TRIALS(no_output_gradient_is_one_pass, plain, CARRIED, .prepare = clear_output_gradient,
               .check = check_no_output_gradient),
        TRIALS(no_weight_is_plain_attention, plain, CARRIED, .prepare = clear_weight, .check = check_no_weight),
        TRIALS(small_gradients_do_not_underflow, small, .attention = 1, .prepare = make_gradients_small,
               .check = check_small_gradients),
        TRIALS(teacher_of_weight_0_may_be_nan, plain, .only_cpu = 1, .check = check_nan_teacher),
        TRIALS(bits_depend_on_no_thread_count, plain, CARRIED, .only_cpu = 1, .check = check_threads),
        TRIALS(supported_calls_run_and_others_are_refused, supports, .every_type = 1, .check = check_support),
    };
    return test_run("attention", tests, COUNT_OF(tests));
}
