/* Row states on the host, without a kernel. */
#include "support.h"

#include <math.h>

#include "base/kl_math.h"
#include "base/sinks.h"

enum { STATES = 10000 };

static double lse2_of_a(const skl_row_state *state)
{
    return (double)state->m_a + log2((double)state->l_a);
}

static double lse2_of_b(const skl_row_state *state)
{
    return (double)state->m_b + log2((double)state->l_b);
}

static skl_row_state swapped(skl_row_state state)
{
    return (skl_row_state){state.m_b, state.l_b, state.m_a, state.l_a, state.w};
}

/* Rows that have seen one key, next to shifts that fit one side and not the other, by up to 2^120. What they round
 * must be small in the sum of a row of a few keys. */
static void test_one_key_keeps_both_sums(void **unused)
{
    (void)unused;
    test_random random = random_for("one key");
    for (int n = 0; n < STATES; n++) {
        const float far = (float)random_uniform(&random, -120.0, 0.0);
        const skl_row_state drawn = {(float)random_uniform(&random, -4.0, 4.0), exp2f(far),
                                     (float)random_uniform(&random, -4.0, 4.0),
                                     (float)random_uniform(&random, 0.5, 2.0), 1.0F};
        const skl_row_state state = n % 2 ? drawn : swapped(drawn), one = skl_state_of_one_key(state);
        assert_true(skl_state_kl(&one) == 0.0F);
        const skl_row_state others = {0.0F, 4.0F, 0.0F, 4.0F, 0.0F}, row = skl_state_merge(one, others);
        const double exact_a = log2(exp2(lse2_of_a(&state)) + 4.0), exact_b = log2(exp2(lse2_of_b(&state)) + 4.0);
        assert_true(fabs(lse2_of_a(&row) - exact_a) < 0x1p-21);
        assert_true(fabs(lse2_of_b(&row) - exact_b) < 0x1p-21);
    }
}

/* Sums further apart than f32 reaches. */
static void test_one_key_with_sums_far_apart(void **unused)
{
    (void)unused;
    const skl_row_state state = {0.0F, 0x1p-120F, 3.0F, 0x1p11F, 1.0F}, one = skl_state_of_one_key(state);
    assert_true(lse2_of_a(&one) == -120.0 && lse2_of_b(&one) == 14.0);
}

static void test_one_key_without_a_sum_stays_as_it_is(void **unused)
{
    (void)unused;
    const skl_row_state state = {1.0F, 0.0F, 2.0F, 3.0F, 0.0F}, one = skl_state_of_one_key(state);
    assert_memory_equal(&one, &state, sizeof one);
}

/* Outcomes of probability 0 add nothing, and a row of nothing else has no LSE: no NaN from inf - inf. */
static void test_sums_of_logits_that_are_minus_infinity(void **unused)
{
    (void)unused;
    const skl_log_sum none = {-INFINITY, 0.0F}, still_none = skl_log_sum_add(none, -INFINITY);
    assert_true(still_none.largest == -INFINITY && still_none.sum == 0.0F);
    const skl_log_sum one = skl_log_sum_add(still_none, 3.0F), same = skl_log_sum_add(one, -INFINITY);
    assert_true(one.largest == 3.0F && one.sum == 1.0F);
    assert_true(same.largest == 3.0F && same.sum == 1.0F);
    assert_true(skl_lse_with_sink(-INFINITY, -INFINITY) == -INFINITY);
    assert_true(skl_lse_with_sink(-INFINITY, 2.0) == 2.0 && skl_lse_with_sink(2.0, -INFINITY) == 2.0);
    assert_true(fabs(skl_lse_with_sink(1.0, 1.0) - 1.0 - log(2.0)) < 1e-15);
}

/* The logit of a group's sink is log mean_h e^sink_h, also where some or all heads have none. */
static void test_sinks_of_a_group_that_are_minus_infinity(void **unused)
{
    (void)unused;
    const float some[] = {-INFINITY, 2.0F, -INFINITY, 2.0F}, none[] = {-INFINITY, -INFINITY};
    skl_inputs inputs = {.sink_t = some, .sink_s = none};
    const skl_row_lses of_four = {.group = 4}, of_two = {.group = 2}, of_one = {.group = 1};
    const skl_sink_logits half = skl_sink_logits_of(&inputs, 0, of_four);
    assert_true(fabs((double)half.t - 2.0 + log(2.0)) < 1e-6 && half.s == -INFINITY);
    assert_true(skl_sink_logits_of(&inputs, 1, of_one).t == 2.0F);
    inputs.sink_t = none;
    assert_true(skl_sink_logits_of(&inputs, 0, of_two).t == -INFINITY);
    assert_true(skl_sink_logits_of(&inputs, 0, of_one).t == -INFINITY);
}

/* NaN in one head of a group makes the logit of its sink NaN; fmaxf() would prefer the other head. */
static void test_sinks_of_a_group_that_are_nan(void **unused)
{
    (void)unused;
    const float first[] = {NAN, 2.0F}, second[] = {2.0F, NAN}, *const both[] = {first, second};
    for (int n = 0; n < 2; n++) {
        const skl_inputs inputs = {.sink_t = both[n], .sink_s = first};
        const skl_row_lses of_two = {.group = 2}, of_one = {.group = 1};
        const skl_sink_logits one = skl_sink_logits_of(&inputs, n, of_one);
        assert_true(isnan(skl_sink_logits_of(&inputs, 0, of_two).t) && isnan(one.t));
    }
}

/* A state without keys changes nothing, on either side of a merge. */
static void test_merge_with_an_empty_state(void **unused)
{
    (void)unused;
    const skl_row_state empty = skl_state_empty(), state = {1.0F, 2.0F, 3.0F, 4.0F, 5.0F};
    const skl_row_state left = skl_state_merge(empty, state), right = skl_state_merge(state, empty);
    assert_memory_equal(&left, &state, sizeof state);
    assert_memory_equal(&right, &state, sizeof state);
    assert_true(skl_state_is_empty(&empty) && skl_state_kl(&empty) == 0.0F);
    const skl_row_state only_a = {1.0F, 2.0F, -INFINITY, 0.0F, 0.0F}; /* only A gives the keys mass */
    assert_true(skl_state_is_empty(&only_a) && skl_state_kl(&only_a) == 0.0F);
}

int main(void)
{
    const struct CMUnitTest tests[] = {cmocka_unit_test(test_one_key_keeps_both_sums),
                                       cmocka_unit_test(test_one_key_with_sums_far_apart),
                                       cmocka_unit_test(test_one_key_without_a_sum_stays_as_it_is),
                                       cmocka_unit_test(test_sums_of_logits_that_are_minus_infinity),
                                       cmocka_unit_test(test_sinks_of_a_group_that_are_minus_infinity),
                                       cmocka_unit_test(test_sinks_of_a_group_that_are_nan),
                                       cmocka_unit_test(test_merge_with_an_empty_state)};
    return test_run("kl_math", tests, COUNT_OF(tests));
}
