/* Partial states: keys or queries that are split over calls and merged, in forward and backward. */
#include "runner.h"

#include <math.h>

#include "case_words.h"

#define SMALL HEADS(2, 2), DIMS(16, 16)

/* ---- Merging ----------------------------------------------------------------------------------------------- */

static void finish_and_compare(const fixture *f, const skl_plan *plan, const skl_inputs *inputs,
                               const skl_row_state *states, const char *label)
{
    fixture_results all = results_create(f), wanted = all;
    wanted.dot_t.data = NULL;
    const skl_rows rows = results_rows(&wanted);
    run_finish(plan, inputs, states, &rows);
    assert_int_equal(rows_mismatch(f, &wanted, label), 0);
    results_destroy(&all);
}

static void merge_and_free(const skl_plan *plan, skl_row_state *into, skl_row_state *from)
{
    run_merge(plan, into, from);
    states_destroy(from);
}

static skl_row_state *states_over(const fixture *f, const skl_plan *plan, int64_t key_begin, int64_t key_end)
{
    skl_row_state *const states = states_create(f);
    run_partial(plan, &f->inputs, key_begin, key_end, states);
    return states;
}

/* Merges left to right, right to left and as a tree, over ranges of one key and more. */
static void check_any_order_and_any_tree(const test_case *c)
{
    static const int64_t cuts[] = {0, 1, 50, 96, 133};
    fixture f;
    fixture_create(&f, c);
    fixture_solve(&f);
    for (int32_t k = 0; case_kernel(c, k); k++) {
        skl_plan *const plan = test_plan(&f.problem, case_kernel(c, k), 2);
        skl_row_state *states[4];
        for (int n = 0; n < 4; n++)
            states[n] = states_over(&f, plan, cuts[n], cuts[n + 1]);
        for (int n = 1; n < 4; n++)
            merge_and_free(plan, states[0], states[n]);
        finish_and_compare(&f, plan, NULL, states[0], "left to right");
        states_destroy(states[0]);

        for (int n = 0; n < 4; n++)
            states[n] = states_over(&f, plan, cuts[n], cuts[n + 1]);
        for (int n = 2; n >= 0; n--)
            merge_and_free(plan, states[3], states[n]);
        finish_and_compare(&f, plan, NULL, states[3], "right to left");
        states_destroy(states[3]);

        for (int n = 0; n < 4; n++)
            states[n] = states_over(&f, plan, cuts[n], cuts[n + 1]);
        merge_and_free(plan, states[0], states[1]);
        merge_and_free(plan, states[2], states[3]);
        merge_and_free(plan, states[0], states[2]);
        finish_and_compare(&f, plan, NULL, states[0], "tree");
        states_destroy(states[0]);
        skl_plan_destroy(plan);
    }
    fixture_destroy(&f);
}

static void test_any_order_and_any_tree(void **state)
{
    (void)state;
    static const test_case c = {"order", SHAPE(2, 37, 133), SMALL, CAUSAL, .growth = 10};
    case_in_every_type(&c, check_any_order_and_any_tree);
}

/* An empty state changes no bit, on either side. */
static void check_empty_states(const test_case *c)
{
    fixture f;
    fixture_create(&f, c);
    const size_t size = (size_t)(f.problem.heads_s * f.length_q) * sizeof(skl_row_state);
    for (int32_t k = 0; case_kernel(c, k); k++) {
        skl_plan *const plan = test_plan(&f.problem, case_kernel(c, k), 2);
        skl_row_state *const all_keys = states_over(&f, plan, 0, 67), *const merged = states_over(&f, plan, 0, 67);
        skl_row_state *const empty = states_over(&f, plan, 40, 40);
        run_merge(plan, merged, empty);
        assert_memory_equal(merged, all_keys, size);
        run_merge(plan, empty, all_keys);
        assert_memory_equal(empty, all_keys, size);
        states_destroy(all_keys);
        states_destroy(merged);
        states_destroy(empty);
        skl_plan_destroy(plan);
    }
    fixture_destroy(&f);
}

static void test_empty_states_change_nothing(void **state)
{
    (void)state;
    static const test_case c = {"empty", SHAPE(1, 37, 67), SMALL, CAUSAL};
    case_in_every_type(&c, check_empty_states);
}

static void check_no_key_seen(const test_case *c)
{
    fixture f;
    fixture_create(&f, c);
    for (int32_t k = 0; case_kernel(c, k); k++) {
        skl_plan *const plan = test_plan(&f.problem, case_kernel(c, k), 2);
        skl_row_state *const empty = states_over(&f, plan, 0, 0);
        skl_row_state *const past_the_end = states_over(&f, plan, 67, 1000);
        merge_and_free(plan, empty, past_the_end);
        fixture_results results = results_create(&f);
        const skl_rows rows = results_rows(&results);
        run_finish(plan, NULL, empty, &rows);
        for (int64_t n = 0; n < tensor_count(&results.kl); n++) {
            assert_true(tensor_get(&results.kl, n) == 0);
            assert_true(tensor_get(&results.lse_t, n) == -(double)INFINITY);
            assert_true(tensor_get(&results.lse_s, n) == -(double)INFINITY);
        }
        states_destroy(empty);
        results_destroy(&results);
        skl_plan_destroy(plan);
    }
    fixture_destroy(&f);
}

static void test_no_key_seen(void **state)
{
    (void)state;
    static const test_case c = {"nothing", SHAPE(1, 5, 67), SMALL};
    case_in_every_type(&c, check_no_key_seen);
}

/* Ranges are clipped to the existing keys. */
static void check_ranges_past_the_keys(const test_case *c)
{
    fixture f;
    fixture_create(&f, c);
    fixture_solve(&f);
    for (int32_t k = 0; case_kernel(c, k); k++) {
        skl_plan *const plan = test_plan(&f.problem, case_kernel(c, k), 2);
        skl_row_state *const states = states_over(&f, plan, -5, INT64_MAX);
        finish_and_compare(&f, plan, NULL, states, "beyond");
        states_destroy(states);
        skl_plan_destroy(plan);
    }
    fixture_destroy(&f);
}

static void test_ranges_past_the_keys(void **state)
{
    (void)state;
    static const test_case c = {"beyond", SHAPE(1, 37, 67), SMALL};
    case_in_every_type(&c, check_ranges_past_the_keys);
}

/* ---- Shards: each rank has some of the keys or queries, and its own plan ------------------------------------ */

/* A tensor without its first `begin` rows. */
static skl_input rows_from(const skl_input *tensor, skl_dtype dtype, int64_t begin)
{
    skl_input rest = *tensor;
    rest.data = (const char *)tensor->data + begin * tensor->stride_row * (int64_t)dtype_size(dtype);
    return rest;
}

static skl_output output_rows_from(const skl_output *tensor, skl_dtype dtype, int64_t begin)
{
    skl_output rest = *tensor;
    rest.data = (char *)tensor->data + begin * tensor->stride_row * (int64_t)dtype_size(dtype);
    return rest;
}

static const test_case shard_cases[] = {
    {"causal", SHAPE(2, 61, 97), SMALL, CAUSAL},
    {"window", SHAPE(1, 97, 97), SMALL, WINDOW(20, 9)},
    {"reverse", SHAPE(1, 61, 97), SMALL, REVERSE, CAUSAL},
    {"teacher groups", SHAPE(1, 61, 97), HEADS(4, 2), DIMS(16, 16), CAUSAL, .lse = LSE_GIVEN},
    {"bf16", SHAPE(1, 61, 97), SMALL, TYPES(BF16, BF16), .grad_f32 = 1},
};

static const int64_t shard_cuts[] = {0, 31, 31, 80, 97};
enum { SHARDS = COUNT_OF(shard_cuts) - 1 };

/* The problem of a rank with keys [begin, end) of the sequence, with their positions. */
static skl_problem key_shard(const fixture *f, int64_t begin, int64_t end)
{
    skl_problem shard = f->problem;
    shard.len_k = end - begin;
    shard.positions = SKL_POSITIONS_OFFSET;
    shard.offset_q = f->problem.len_k - f->problem.len_q;
    shard.offset_k = begin;
    return shard;
}

static skl_inputs key_shard_inputs(const fixture *f, skl_inputs inputs, int64_t begin)
{
    inputs.k_t = rows_from(&f->inputs.k_t, f->problem.dtype_t, begin);
    inputs.k_s = rows_from(&f->inputs.k_s, f->problem.dtype_s, begin);
    return inputs;
}

/* Every rank reduces its keys; the merged states cover all keys. */
static void shard_forward(const fixture *f, const char *kernel, const fixture_results *results)
{
    skl_plan *const whole = test_plan(&f->problem, kernel, 2);
    skl_row_state *merged = NULL;
    for (int s = 0; s < SHARDS; s++) {
        const skl_problem shard = key_shard(f, shard_cuts[s], shard_cuts[s + 1]);
        const skl_inputs inputs = key_shard_inputs(f, f->inputs, shard_cuts[s]);
        skl_plan *const plan = test_plan(&shard, kernel, 2);
        skl_row_state *const states = states_create(f);
        run_partial(plan, &inputs, 0, shard.len_k, states);
        if (merged)
            merge_and_free(whole, merged, states);
        else
            merged = states;
        skl_plan_destroy(plan);
    }
    skl_rows rows = results_rows(results);
    rows.dot_t.data = NULL;
    run_finish(whole, &f->inputs, merged, &rows);
    states_destroy(merged);
    skl_plan_destroy(whole);
}

/* From the row results over all keys, each rank computes dk of its keys and adds to dq. */
static void shard_backward(const fixture *f, const char *kernel, const skl_inputs *known, fixture_results *sum)
{
    fixture_results contribution = results_create(f);
    for (int64_t n = 0; n < tensor_count(&sum->dq_t); n++)
        tensor_set(&sum->dq_t, n, 0);
    for (int64_t n = 0; n < tensor_count(&sum->dq_s); n++)
        tensor_set(&sum->dq_s, n, 0);
    for (int s = 0; s < SHARDS; s++) {
        const skl_problem shard = key_shard(f, shard_cuts[s], shard_cuts[s + 1]);
        const skl_inputs inputs = key_shard_inputs(f, *known, shard_cuts[s]);
        skl_plan *const plan = test_plan(&shard, kernel, 2);
        skl_gradients gradients = results_gradients(&contribution);
        const skl_gradients whole = results_gradients(sum);
        gradients.dk_t = output_rows_from(&whole.dk_t, sum->dk_t.dtype, shard_cuts[s]);
        gradients.dk_s = output_rows_from(&whole.dk_s, sum->dk_s.dtype, shard_cuts[s]);
        run_backward(plan, &inputs, &gradients);
        for (int64_t n = 0; n < tensor_count(&sum->dq_t); n++)
            tensor_set(&sum->dq_t, n, tensor_get(&sum->dq_t, n) + tensor_get(&contribution.dq_t, n));
        for (int64_t n = 0; n < tensor_count(&sum->dq_s); n++)
            tensor_set(&sum->dq_s, n, tensor_get(&sum->dq_s, n) + tensor_get(&contribution.dq_s, n));
        skl_plan_destroy(plan);
    }
    results_destroy(&contribution);
}

static void test_key_shards(void **state)
{
    (void)state;
    for (size_t c = 0; c < COUNT_OF(shard_cases); c++)
        for (int32_t k = 0; case_kernel(&shard_cases[c], k); k++) {
            fixture f;
            fixture_create(&f, &shard_cases[c]);
            fixture_solve(&f);
            fixture_results results = results_create(&f);
            shard_forward(&f, case_kernel(&shard_cases[c], k), &results);

            skl_plan *const whole = test_plan(&f.problem, case_kernel(&shard_cases[c], k), 2);
            skl_rows only_dot = {.struct_size = sizeof only_dot, .dot_t = tensor_output(&results.dot_t)};
            run_forward(whole, &f.inputs, &only_dot);
            skl_plan_destroy(whole);
            assert_int_equal(rows_mismatch(&f, &results, case_kernel(&shard_cases[c], k)), 0);

            const skl_inputs known = results_backward_inputs(&f, &results);
            shard_backward(&f, case_kernel(&shard_cases[c], k), &known, &results);
            assert_int_equal(gradients_mismatch(&f, &results, case_kernel(&shard_cases[c], k), "shards"), 0);
            results_destroy(&results);
            fixture_destroy(&f);
        }
}

/* Each rank has some of the queries and all keys: there is nothing to merge, but positions must be right. */
static void test_query_shards(void **state)
{
    (void)state;
    static const int64_t cuts[] = {0, 20, 61};
    for (size_t c = 0; c < COUNT_OF(shard_cases); c++)
        for (int32_t k = 0; case_kernel(&shard_cases[c], k); k++) {
            fixture f;
            fixture_create(&f, &shard_cases[c]);
            fixture_solve(&f);
            fixture_results all = results_create(&f), results = all;
            results.dot_t.data = NULL;
            const skl_rows all_rows = results_rows(&results);
            const int64_t len_q = f.problem.len_q;
            for (int s = 0; s < 2; s++) {
                const int64_t begin = cuts[s], end = s == 1 ? len_q : cuts[s + 1];
                skl_problem shard = f.problem;
                shard.len_q = end - begin;
                shard.positions = SKL_POSITIONS_OFFSET;
                shard.offset_q = f.problem.len_k - len_q + begin;
                skl_inputs inputs = f.inputs;
                inputs.q_t = rows_from(&f.inputs.q_t, f.problem.dtype_t, begin);
                inputs.q_s = rows_from(&f.inputs.q_s, f.problem.dtype_s, begin);
                if (inputs.lse_t.data)
                    inputs.lse_t = rows_from(&f.inputs.lse_t, SKL_F32, begin);
                skl_rows rows = all_rows;
                rows.kl = output_rows_from(&all_rows.kl, SKL_F32, begin);
                rows.lse_t = output_rows_from(&all_rows.lse_t, SKL_F32, begin);
                rows.lse_s = output_rows_from(&all_rows.lse_s, SKL_F32, begin);
                skl_plan *const plan = test_plan(&shard, case_kernel(&shard_cases[c], k), 2);
                run_forward(plan, &inputs, &rows);
                skl_plan_destroy(plan);
            }
            assert_int_equal(rows_mismatch(&f, &results, case_kernel(&shard_cases[c], k)), 0);
            results_destroy(&all);
            fixture_destroy(&f);
        }
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_any_order_and_any_tree),
        cmocka_unit_test(test_empty_states_change_nothing),
        cmocka_unit_test(test_no_key_seen),
        cmocka_unit_test(test_ranges_past_the_keys),
        cmocka_unit_test(test_key_shards),
        cmocka_unit_test(test_query_shards),
    };
    return test_run("states", tests, COUNT_OF(tests));
}
