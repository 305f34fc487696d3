/* Checks the oracle against closed forms, masks written as text and central differences. */
#include "case_words.h"
#include "fixture.h"
#include "support.h"

#include <float.h>
#include <math.h>
#include <stdlib.h>

/* ---- Element types ----------------------------------------------------------------------------------------- */

static void test_reads_every_type(void **state)
{
    (void)state;
    const float f32[] = {1.5F, -0.0F};
    const uint16_t f16[] = {0x3C00, 0xC000, 0x0001, 0x03FF, 0x0400, 0x7BFF, 0x7C00, 0xFC00, 0x7E00};
    const double f16_values[] = {1, -2, 0x1p-24, 0x3FFp-24, 0x1p-14, 65504, INFINITY, -INFINITY};
    const uint16_t bf16[] = {0x3F80, 0xC000, 0x0001, 0x7F80, 0x7FC0};
    const double bf16_values[] = {1, -2, 0x1p-133, INFINITY};

    assert_true(oracle_read(SKL_F32, f32, 0) == 1.5);
    assert_true(signbit(oracle_read(SKL_F32, f32, 1)));
    for (int64_t n = 0; n < (int64_t)COUNT_OF(f16_values); n++)
        assert_true(oracle_read(SKL_F16, f16, n) == f16_values[n]);
    for (int64_t n = 0; n < (int64_t)COUNT_OF(bf16_values); n++)
        assert_true(oracle_read(SKL_BF16, bf16, n) == bf16_values[n]);
    assert_true(isnan(oracle_read(SKL_F16, f16, COUNT_OF(f16_values))));
    assert_true(isnan(oracle_read(SKL_BF16, bf16, COUNT_OF(bf16_values))));
}

/* Rounding in the tests: every 16-bit value survives a round trip, and ties go to even. */
static void test_rounds_to_16_bits(void **state)
{
    (void)state;
    static const skl_dtype dtypes[] = {SKL_F16, SKL_BF16};
    test_tensor one = {.batch = 1, .heads = 1, .length = 1, .dim = 1};
    uint16_t stored;
    one.data = &stored;
    for (size_t t = 0; t < COUNT_OF(dtypes); t++) {
        one.dtype = dtypes[t];
        for (uint32_t bits = 0; bits < 0x10000; bits++) {
            const uint16_t given = (uint16_t)bits;
            const double value = oracle_read(one.dtype, &given, 0);
            tensor_set(&one, 0, value);
            assert_true(isnan(value) ? isnan(tensor_get(&one, 0)) : stored == given);
        }
        const double ulp = 2 * dtype_half_ulp(one.dtype, 1);
        tensor_set(&one, 0, 1 + 0.5 * ulp);
        assert_true(tensor_get(&one, 0) == 1);
        tensor_set(&one, 0, 1 + 1.5 * ulp);
        assert_true(tensor_get(&one, 0) == 1 + 2 * ulp);
    }
    one.dtype = SKL_F16;
    tensor_set(&one, 0, 65519);
    assert_true(tensor_get(&one, 0) == 65504);
    tensor_set(&one, 0, 65520);
    assert_true(isinf(tensor_get(&one, 0)));
}

/* ---- Masks ------------------------------------------------------------------------------------------------- */

/* One string per query row; '#' marks the visible keys. */
typedef struct mask_picture {
    const char *name;
    int64_t len_q, len_k;
    int32_t causal;
    int64_t window_left, window_right;
    int64_t offset_q, offset_k; /* not both 0: SKL_POSITIONS_OFFSET is set */
    int32_t key_length;         /* below 0: not given */
    const char *rows[5];
    const int32_t *key_begin, *key_end; /* row bounds; NULL: not given */
} mask_picture;

static const mask_picture mask_pictures[] = {
    {"none", 2, 3, 0, -1, -1, 0, 0, -1, {"###", "###"}},
    {"causal", 3, 3, 1, -1, -1, 0, 0, -1, {"#..", "##.", "###"}},
    {"causal, more keys", 3, 5, 1, -1, -1, 0, 0, -1, {"###..", "####.", "#####"}},
    {"causal, more queries", 5, 3, 1, -1, -1, 0, 0, -1, {"...", "...", "#..", "##.", "###"}},
    {"window", 5, 5, 0, 1, 2, 0, 0, -1, {"###..", "####.", ".####", "..###", "...##"}},
    {"window without right limit", 4, 4, 0, 1, -1, 0, 0, -1, {"####", "####", ".###", "..##"}},
    {"window without left limit", 4, 4, 0, -1, 1, 0, 0, -1, {"##..", "###.", "####", "####"}},
    {"diagonal", 3, 4, 0, 0, 0, 0, 0, -1, {".#..", "..#.", "...#"}},
    {"causal window", 4, 4, 1, 1, 3, 0, 0, -1, {"#...", "##..", ".##.", "..##"}},
    {"key length", 3, 4, 0, -1, -1, 0, 0, 2, {"##..", "##..", "##.."}},
    {"key length 0", 2, 4, 0, -1, -1, 0, 0, 0, {"....", "...."}},
    {"a key length changes no position", 3, 4, 1, -1, -1, 0, 0, 3, {"##..", "###.", "###."}},
    {"later queries", 3, 4, 1, -1, -1, 1, 0, -1, {"##..", "###.", "####"}},
    {"later keys", 4, 3, 1, -1, -1, 0, 2, -1, {"...", "...", "#..", "##."}},
    {"a window before the keys", 3, 3, 0, 1, 0, 2, 0, -1, {".##", "..#", "..."}},
    {"bounds", 4, 4, 0, -1, -1, 0, 0, -1, {"#...", "....", ".##.", "..##"}, LENGTHS(0, 1, 1, 2), LENGTHS(1, 1, 3, 4)},
    {"a first bound", 3, 4, 0, -1, -1, 0, 0, -1, {"####", "..##", "...."}, LENGTHS(0, 2, 4), NULL},
    {"causal chunks", 4, 4, 1, -1, -1, 0, 0, -1, {"#...", "##..", "..#.", "..##"}, LENGTHS(0, 0, 2, 2), NULL},
    {"last bounds and a window", 3, 4, 0, 1, -1, 0, 0, 3, {"#...", ".##.", "..#."}, NULL, LENGTHS(1, 4, 4)},
};

static void test_masks_match_pictures(void **state)
{
    (void)state;
    for (size_t m = 0; m < COUNT_OF(mask_pictures); m++) {
        const mask_picture *const mask = &mask_pictures[m];
        skl_problem p = skl_problem_default();
        p.len_q = mask->len_q, p.len_k = mask->len_k;
        p.causal = mask->causal;
        p.window_left = mask->window_left, p.window_right = mask->window_right;
        p.positions = mask->offset_q || mask->offset_k ? SKL_POSITIONS_OFFSET : SKL_POSITIONS_BOTTOM_RIGHT;
        p.offset_q = mask->offset_q, p.offset_k = mask->offset_k;
        p.row_bounds = mask->key_begin || mask->key_end;
        const skl_inputs inputs = {.key_lengths = mask->key_length < 0 ? NULL : &mask->key_length,
                                   .key_begin = mask->key_begin,
                                   .key_end = mask->key_end};
        for (int64_t i = 0; i < p.len_q; i++) {
            const oracle_keys keys = oracle_visible_keys(&p, &inputs, 0, i);
            for (int64_t j = 0; j < p.len_k; j++)
                if ((keys.begin <= j && j < keys.end) != (mask->rows[i][j] == '#'))
                    fail_msg("%s: row %lld is wrong at key %lld", mask->name, (long long)i, (long long)j);
        }
    }
}

/* ---- Closed forms ------------------------------------------------------------------------------------------ */

/* One row over two keys. With dim 1, scale 1 and keys {logit, 0}, the logits can be chosen freely. */
typedef struct two_keys {
    skl_problem problem;
    skl_inputs inputs;
    float query, teacher_keys[4], student_keys[2], given_lse[2];
} two_keys;

static void two_keys_init(two_keys *t, int64_t heads_t, double first_logit, double second_logit, double student_logit)
{
    *t = (two_keys){.problem = skl_problem_default(), .inputs = {.struct_size = sizeof(skl_inputs)}};
    t->problem.len_q = 1, t->problem.len_k = 2;
    t->problem.heads_t = heads_t;
    t->problem.dim_t = t->problem.dim_s = 1;
    t->problem.scale_t = t->problem.scale_s = 1;
    t->problem.gradients = ALL_GRADIENTS;
    t->query = 1;
    t->teacher_keys[0] = (float)first_logit;
    t->teacher_keys[2] = (float)second_logit;
    t->student_keys[0] = (float)student_logit;
    t->inputs.q_t = t->inputs.q_s = (skl_input){&t->query, 0, 0, 0};
    t->inputs.k_t = skl_input_contiguous(t->teacher_keys, heads_t, 2, 1);
    t->inputs.k_s = skl_input_contiguous(t->student_keys, 1, 2, 1);
}

#define assert_near(a, b) assert_true(fabs((a) - (b)) < 1e-6)

/* P = (3/4, 1/4), S = (1/2, 1/2) */
static void test_two_keys(void **state)
{
    (void)state;
    two_keys t;
    two_keys_init(&t, 1, log(3), 0, 0);
    oracle_result r = oracle_run(&t.problem, &t.inputs);
    const double kl = 0.75 * log(1.5) + 0.25 * log(0.5);
    assert_near(r.kl[0], kl);
    assert_near(r.lse_t[0], log(4));
    assert_near(r.lse_s[0], log(2));
    assert_near(r.dk_s[0], 0.5 - 0.75);
    assert_near(r.dk_s[1], 0.5 - 0.25);
    assert_near(r.dk_t[0], 0.75 * (log(1.5) - kl));
    assert_near(r.dk_t[1], 0.25 * (log(0.5) - kl));
    assert_near(r.dq_s[0], 0);
    assert_near(r.dq_t[0], r.dk_t[0] * log(3));
    oracle_free(&r);

    t.problem.direction = SKL_KL_REVERSE;
    r = oracle_run(&t.problem, &t.inputs);
    assert_near(r.kl[0], 0.5 * log(0.5 / 0.75) + 0.5 * log(0.5 / 0.25));
    assert_near(r.dk_t[0], 0.75 - 0.5);
    oracle_free(&r);
}

/* P = mean of (3/4, 1/4) and (1/4, 3/4), or of (3/4, 1/4) and (1/2, 1/2) */
static void test_two_keys_two_teachers(void **state)
{
    (void)state;
    two_keys t;
    two_keys_init(&t, 2, log(3), -log(3), 0);
    oracle_result r = oracle_run(&t.problem, &t.inputs);
    assert_near(r.kl[0], 0);
    oracle_free(&r);

    two_keys_init(&t, 2, log(3), 0, 0);
    r = oracle_run(&t.problem, &t.inputs);
    const double phi[] = {log(0.625 / 0.5), log(0.375 / 0.5)};
    assert_near(r.kl[0], 0.625 * phi[0] + 0.375 * phi[1]);
    assert_near(r.lse_t[0], log(4));
    assert_near(r.lse_t[1], log(2));
    assert_near(r.dot_t[0], 0.75 * phi[0] + 0.25 * phi[1]);
    assert_near(r.dot_t[1], 0.5 * phi[0] + 0.5 * phi[1]);
    assert_near(r.dk_t[0], 0.5 * 0.75 * (phi[0] - r.dot_t[0]));
    oracle_free(&r);
}

/* LSEs over four keys, two of them hidden: the heads put (3/8, 1/8) and (1/4, 1/4) on the visible keys, and P is
 * their normalized sum. The hidden half of a head is constant, so dot_t is the mean of the KL and the plain dot
 * product. */
static void test_two_keys_wider_lse(void **state)
{
    (void)state;
    two_keys t;
    two_keys_init(&t, 2, log(3), 0, 0);
    t.given_lse[0] = (float)log(8);
    t.given_lse[1] = (float)log(4);
    t.inputs.lse_t = skl_input_contiguous(t.given_lse, 2, 1, 1);
    oracle_result r = oracle_run(&t.problem, &t.inputs);
    const double phi[] = {log(0.625 / 0.5), log(0.375 / 0.5)};
    const double kl = 0.625 * phi[0] + 0.375 * phi[1];
    assert_near(r.kl[0], kl);
    assert_near(r.lse_t[0], log(8) + log(0.5));
    assert_near(r.lse_t[1], log(4) + log(0.5));
    assert_near(r.dot_t[0], 0.5 * kl + 0.5 * (0.75 * phi[0] + 0.25 * phi[1]));
    assert_near(r.dot_t[1], 0.5 * kl + 0.5 * (0.5 * phi[0] + 0.5 * phi[1]));
    assert_near(r.dk_t[0], 0.5 * 0.75 * (phi[0] - r.dot_t[0]));
    oracle_free(&r);
}

/* P = (1, e, e^2) / Z and S = (1, 1, e) / Z with the sink last: KL and gradients by hand. */
static void test_two_keys_and_a_sink(void **state)
{
    (void)state;
    const float sink_t = 2, sink_s = 1;
    two_keys t;
    two_keys_init(&t, 1, 1, 0, 0);
    t.problem.sinks = 1, t.inputs.sink_t = &sink_t, t.inputs.sink_s = &sink_s;
    t.problem.gradients |= SKL_DSINK_T | SKL_DSINK_S;
    oracle_result r = oracle_run(&t.problem, &t.inputs);
    const double z_t = 1 + exp(1.0) + exp(2.0), z_s = 2 + exp(1.0), p_sink = exp(2.0) / z_t, s_sink = exp(1.0) / z_s;
    const double kl =
        (exp(1.0) + exp(2.0)) / z_t - log(z_t) + log(z_s); /* x - y is 1 at the first key and the sink */
    assert_near(r.kl[0], kl);
    assert_near(r.lse_t[0], log(z_t));
    assert_near(r.lse_s[0], log(z_s));
    assert_near(r.dsink_s[0], s_sink - p_sink);
    assert_near(r.dsink_t[0], p_sink * (log(p_sink / s_sink) - kl));
    oracle_free(&r);
}

static void test_two_keys_softcap(void **state)
{
    (void)state;
    two_keys t;
    two_keys_init(&t, 1, 5, 0, 0);
    t.problem.softcap_t = 2;
    oracle_result r = oracle_run(&t.problem, &t.inputs);
    assert_near(r.lse_t[0], log(exp(2 * tanh(2.5)) + 1));
    oracle_free(&r);
}

/* ---- Central differences ----------------------------------------------------------------------------------- */

/* LSEs of the teacher over the visible keys. */
static double *visible_lse(const fixture *f)
{
    skl_problem forward_only = f->problem;
    forward_only.gradients = 0;
    skl_inputs not_given = f->inputs;
    not_given.lse_t.data = NULL;
    oracle_result result = oracle_run(&forward_only, &not_given);
    double *const lse = result.lse_t;
    result.lse_t = NULL;
    oracle_free(&result);
    return lse;
}

/* Contribution of hidden keys to the sums of exponentials of the given LSEs; NULL if no LSE is given. */
static double *hidden_sums(const fixture *f)
{
    if (!f->lse_t.data)
        return NULL;
    double *const sums = visible_lse(f);
    for (int64_t n = 0; n < tensor_count(&f->lse_t); n++)
        sums[n] = exp(tensor_get(&f->lse_t, n)) - exp(sums[n]);
    return sums;
}

/* Updates the given LSEs for changed visible keys; the contribution of hidden keys is constant. */
static void update_lse(const fixture *f, const double *hidden)
{
    double *const lse = visible_lse(f);
    for (int64_t n = 0; n < tensor_count(&f->lse_t); n++)
        tensor_set(&f->lse_t, n, log(exp(lse[n]) + hidden[n]));
    free(lse);
}

/* sum_i grad_kl_i KL_i, and <do_s, o_s> */
static double loss_of(const fixture *f, const double *hidden)
{
    if (hidden)
        update_lse(f, hidden);
    skl_problem forward_only = f->problem;
    forward_only.gradients = 0;
    oracle_result result =
        oracle_run_attention(&forward_only, &f->inputs, f->test_case->attention ? &f->attention : NULL);
    double loss = 0;
    for (int64_t n = 0; n < f->batch * f->problem.heads_s * f->length_q; n++)
        if (result.kl[n] != 0)
            loss += result.kl[n] * (f->grad_kl.data ? tensor_get(&f->grad_kl, n) : 1);
    for (int64_t n = 0; n < tensor_count(&f->do_s); n++)
        if (result.o_s[n] != 0)
            loss += result.o_s[n] * tensor_get(&f->do_s, n);
    oracle_free(&result);
    return loss;
}

/* A step along a random direction v: loss(x + e v) - loss(x - e v) = <gradient, 2 e v> up to third order in e. */
typedef struct difference {
    double actual, expected;
    double allowed; /* between the two */
} difference;

static difference difference_along(const fixture *f, const double *hidden, const test_tensor *x,
                                   const double *gradient, double step, const char *name)
{
    const double tolerance = hidden ? 5e-5 : 1e-5;
    const int64_t count = tensor_count(x);
    double *const start = malloc(sizeof(double) * (size_t)(count + 1));
    assert_non_null(start);
    for (int64_t n = 0; n < count; n++)
        start[n] = tensor_get(x, n);

    double losses[2], expected = 0, size = 0;
    for (int side = 0; side < 2; side++) {
        test_random direction = random_for(name);
        for (int64_t n = 0; n < count; n++) {
            tensor_set(x, n, start[n] + (side ? 1 : -1) * random_uniform(&direction, -step, step));
            const double taken = (side ? 1 : -1) * (tensor_get(x, n) - start[n]); /* float rounds the step */
            if (gradient[n] == 0)
                continue; /* poisoned */
            expected += gradient[n] * taken;
            size += fabs(gradient[n] * taken);
        }
        losses[side] = loss_of(f, hidden);
    }
    for (int64_t n = 0; n < count; n++)
        tensor_set(x, n, start[n]);
    free(start);
    /* A small KL is a difference of larger numbers, and no more exact than they are: about one rounding per row. */
    const double roundings = DBL_EPSILON * (double)(f->batch * f->problem.heads_s * f->length_q);
    return (difference){losses[1] - losses[0], expected, tolerance * size + 1e-12 * fabs(losses[0]) + roundings};
}

/* The third-order term grows with the logits, which differ from seed to seed. It shrinks with the square of the step,
 * relative to the change; the error of a wrong gradient does not. So a gradient is right if any of a few steps
 * agrees. With hidden keys a smaller step says nothing: the given LSE is rounded to float. */
static difference closest_difference(const fixture *f, const double *hidden, const test_tensor *x,
                                     const double *gradient, double step, const char *name)
{
    enum { ATTEMPTS = 4, DIVISOR = 4 };
    difference d = difference_along(f, hidden, x, gradient, step, name);
    for (int n = 1; n < ATTEMPTS && !hidden && fabs(d.actual - d.expected) > d.allowed; n++) {
        step /= DIVISOR;
        d = difference_along(f, hidden, x, gradient, step, name);
    }
    return d;
}

static void check_direction(const fixture *f, const double *hidden, const test_tensor *x, const double *gradient,
                            double step, const char *name)
{
    const difference d = closest_difference(f, hidden, x, gradient, step, name);
    if (fabs(d.actual - d.expected) > d.allowed)
        fail_msg("%s: %s: the loss changes by %.9g, its gradient says %.9g", f->test_case->name, name, d.actual,
                 d.expected);
}

/* Gives all numbers of a row the same sign, alternating with row + head. Dots of an index head are then far from 0,
 * where a ReLU is not differentiable, and half of them are negative. */
static void align_row_signs(const test_tensor *x)
{
    for (int64_t n = 0; n < tensor_count(x); n++) {
        const int64_t row = n / x->dim % x->length, head = n / x->dim / x->length % x->heads;
        tensor_set(x, n, (row + head) % 2 ? -fabs(tensor_get(x, n)) : fabs(tensor_get(x, n)));
    }
}

/* The sinks of one side as a tensor. */
static void check_sinks(const fixture *f, int side, int64_t heads, const double *gradient, double step,
                        const char *name)
{
    const test_tensor sinks = {
        .dtype = SKL_F32, .batch = 1, .heads = 1, .length = 1, .dim = heads, .data = f->sinks[side].data};
    check_direction(f, NULL, &sinks, gradient, step, name);
}

static void check_gradients(const test_case *c)
{
    fixture f;
    fixture_create(&f, c);
    const int indexer = f.problem.student == SKL_STUDENT_INDEXER; /* it has no teacher gradients */
    if (indexer && !c->index_linear) {
        align_row_signs(&f.q_s);
        align_row_signs(&f.k_s);
    }
    fixture_solve(&f);
    double *const hidden = indexer ? NULL : hidden_sums(&f);
    /* Larger than the rounding error of a given LSE, which is a float; smaller with large scales. */
    const double step = hidden ? 4e-3 : 1e-4 / (1 + fabs((double)c->scale_t) + fabs((double)c->scale_s));
    const double step_q = step / (1 + fabs(c->growth) / 3); /* smaller with large keys */
    if (indexer)
        check_direction(&f, hidden, &f.w_s, f.exact.dw_s, step, "dw_s");
    if (f.problem.gradients & SKL_DQ_T) {
        check_direction(&f, hidden, &f.q_t, f.exact.dq_t, step_q, "dq_t");
        check_direction(&f, hidden, &f.k_t, f.exact.dk_t, step, "dk_t");
    }
    if (f.problem.gradients & SKL_DSINK_T)
        check_sinks(&f, 0, f.problem.heads_t, f.exact.dsink_t, step, "dsink_t");
    if (f.problem.gradients & SKL_DSINK_S)
        check_sinks(&f, 1, f.problem.heads_s, f.exact.dsink_s, step, "dsink_s");
    const oracle_result *const student = c->attention ? &f.attention_exact : &f.exact;
    check_direction(&f, hidden, &f.q_s, student->dq_s, step_q, "dq_s");
    check_direction(&f, hidden, &f.k_s, student->dk_s, step, "dk_s");
    if (c->attention)
        check_direction(&f, hidden, &f.v_s, student->dv_s, step, "dv_s");
    free(hidden);
    fixture_destroy(&f);
}

/* A step that is too large for the logits of its seed fails no gradient, and no step accepts a wrong one. */
static void test_differences_of_large_and_small_steps(void **state)
{
    (void)state;
    const double large_step = 1e-3, error = 1e-3;
    const test_case *c = NULL;
    for (size_t n = 0; n < test_case_count; n++)
        if (strcmp(test_cases[n].name, "sparse_f16_reverse") == 0)
            c = &test_cases[n];
    assert_non_null(c);
    test_case in_f32 = *c;
    in_f32.dtype_t = in_f32.dtype_s = in_f32.dtype_w = SKL_F32;
    fixture f;
    fixture_create(&f, &in_f32);
    align_row_signs(&f.q_s);
    align_row_signs(&f.k_s);
    fixture_solve(&f);
    check_direction(&f, NULL, &f.w_s, f.exact.dw_s, large_step, "dw_s");

    test_random direction = random_for("dw_s"); /* errors that do not cancel along it */
    for (int64_t n = 0; n < tensor_count(&f.w_s); n++)
        f.exact.dw_s[n] *= f.exact.dw_s[n] * random_uniform(&direction, -1, 1) > 0 ? 1 + error : 1;
    const difference d = closest_difference(&f, NULL, &f.w_s, f.exact.dw_s, large_step, "dw_s");
    const int measurable = error * fabs(d.expected) > d.allowed; /* not if all dots of a seed are below 0 */
    fixture_destroy(&f);
    if (!measurable)
        skip();
    assert_true(fabs(d.actual - d.expected) > d.allowed);
}

/* The oracle has no tiles: large cases run no other line of it. Every member of a case that it reads is set in some
 * case within this limit, in millions of multiplications. */
enum { ORACLE_WORK = 2 };

static int is_worth_checking(const test_case *c)
{
    const int has_all_gradients = !c->without; /* another case has the same shape with them */
    return has_all_gradients && case_work(c) <= ORACLE_WORK * MILLION;
}

static void test_gradients_are_differences(void **state)
{
    (void)state;
    const int64_t sample = test_environment("SKL_TEST_SAMPLE", 1);
    for (size_t n = 0; n < test_case_count; n += (size_t)sample) {
        test_case c = test_cases[n];
        if (!is_worth_checking(&c))
            continue;
        c.dtype_t = c.dtype_s = c.dtype_w = SKL_F32;
        c.layout = LAYOUT_CONTIGUOUS;
        c.lse = LSE_COMPUTED;
        check_gradients(&c);
    }
}

/* Both directions of every case with teacher groups, a given LSE and all gradients, except for large logits, whose
 * LSEs round too much. */
static void test_gradients_are_differences_with_hidden_keys(void **state)
{
    (void)state;
    for (size_t n = 0; n < test_case_count; n++) {
        test_case c = test_cases[n];
        if (c.lse == LSE_COMPUTED || c.heads_t == c.heads_s || c.growth != 0 || c.sinks || !is_worth_checking(&c))
            continue; /* with sinks, no key is hidden */
        c.dtype_t = c.dtype_s = c.dtype_w = SKL_F32;
        c.layout = LAYOUT_CONTIGUOUS;
        for (c.direction = SKL_KL_FORWARD; c.direction <= SKL_KL_REVERSE; c.direction++)
            check_gradients(&c);
    }
}

static void test_case_names_are_unique(void **state)
{
    (void)state;
    for (size_t a = 0; a < test_case_count; a++)
        for (size_t b = 0; b < a; b++)
            assert_string_not_equal(test_cases[a].name, test_cases[b].name);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_reads_every_type),
        cmocka_unit_test(test_rounds_to_16_bits),
        cmocka_unit_test(test_masks_match_pictures),
        cmocka_unit_test(test_two_keys),
        cmocka_unit_test(test_two_keys_two_teachers),
        cmocka_unit_test(test_two_keys_wider_lse),
        cmocka_unit_test(test_two_keys_and_a_sink),
        cmocka_unit_test(test_two_keys_softcap),
        cmocka_unit_test(test_differences_of_large_and_small_steps),
        cmocka_unit_test(test_gradients_are_differences),
        cmocka_unit_test(test_gradients_are_differences_with_hidden_keys),
        cmocka_unit_test(test_case_names_are_unique),
    };
    return test_run("oracle", tests, COUNT_OF(tests));
}
