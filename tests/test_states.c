/* Partial states: keys that are split over calls and merged, in forward and backward. */
#include "trial.h"

#include "case_words.h"

#define SMALL HEADS(2, 2), DIMS(16, 16)

/* ---- Merging: kernel_check.c merges random ranges in random order on every case ------------------------------- */

static skl_row_state *states_over(const trial *t, int64_t key_begin, int64_t key_end)
{
    skl_row_state *const states = states_create(t->f);
    run_partial(t->plan, &t->f->inputs, key_begin, key_end, states);
    return states;
}

static const test_case causal[] = {{"causal", SHAPE(1, 37, 67), SMALL, CAUSAL}};

/* An empty state changes no bit, on either side. */
static void check_empty_states(trial *t)
{
    const size_t size = (size_t)(t->f->problem.heads_s * t->f->length_q) * sizeof(skl_row_state);
    skl_row_state *const all_keys = states_over(t, 0, 67), *const merged = states_over(t, 0, 67);
    skl_row_state *const empty = states_over(t, 40, 40);
    run_merge(t->plan, merged, empty);
    assert_memory_equal(merged, all_keys, size);
    run_merge(t->plan, empty, all_keys);
    assert_memory_equal(empty, all_keys, size);
    states_destroy(all_keys);
    states_destroy(merged);
    states_destroy(empty);
}

static const test_case full[] = {{"full", SHAPE(1, 37, 67), SMALL}};

static void check_no_key_seen(trial *t)
{
    skl_row_state *const empty = states_over(t, 0, 0), *const past_the_end = states_over(t, 67, 1000);
    const skl_rows rows = results_rows(&t->one);
    run_merge(t->plan, empty, past_the_end);
    run_finish(t->plan, NULL, empty, &rows);
    assert_elements(t, &t->one.kl, is_zero, "kl");
    assert_elements(t, &t->one.lse_t, is_minus_infinity, "lse_t");
    assert_elements(t, &t->one.lse_s, is_minus_infinity, "lse_s");
    states_destroy(empty);
    states_destroy(past_the_end);
}

/* Ranges are clipped to the existing keys. */
static void check_ranges_past_the_keys(trial *t)
{
    skl_row_state *const states = states_over(t, -5, INT64_MAX);
    const skl_rows rows = results_rows(&t->one);
    run_finish(t->plan, NULL, states, &rows);
    assert_int_equal(rows_mismatch(t->f, &t->one, t->kernel), 0);
    states_destroy(states);
}

/* ---- Shards: each rank has some of the keys, and its own plan ------------------------------------------------ */

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
static void shard_forward(const trial *t, const fixture_results *results)
{
    skl_row_state *merged = NULL;
    for (int s = 0; s < SHARDS; s++) {
        const skl_problem shard = key_shard(t->f, shard_cuts[s], shard_cuts[s + 1]);
        const skl_inputs inputs = key_shard_inputs(t->f, t->f->inputs, shard_cuts[s]);
        skl_plan *const plan = test_plan(&shard, t->kernel, 2);
        skl_row_state *const states = states_create(t->f);
        run_partial(plan, &inputs, 0, shard.len_k, states);
        if (merged) {
            run_merge(t->plan, merged, states);
            states_destroy(states);
        } else {
            merged = states;
        }
        skl_plan_destroy(plan);
    }
    skl_rows rows = results_rows(results);
    rows.dot_t.data = NULL;
    run_finish(t->plan, &t->f->inputs, merged, &rows);
    states_destroy(merged);
}

/* From the row results over all keys, each rank computes dk of its keys and adds to dq. */
static void shard_backward(const trial *t, const fixture_results *sum, const fixture_results *contribution)
{
    const skl_inputs known = results_backward_inputs(t->f, sum);
    tensor_set_all(&sum->dq_t, 0), tensor_set_all(&sum->dq_s, 0);
    for (int s = 0; s < SHARDS; s++) {
        const skl_problem shard = key_shard(t->f, shard_cuts[s], shard_cuts[s + 1]);
        const skl_inputs inputs = key_shard_inputs(t->f, known, shard_cuts[s]);
        skl_plan *const plan = test_plan(&shard, t->kernel, 2);
        skl_gradients gradients = results_gradients(contribution);
        const skl_gradients whole = results_gradients(sum);
        gradients.dk_t = output_rows_from(&whole.dk_t, sum->dk_t.dtype, shard_cuts[s]);
        gradients.dk_s = output_rows_from(&whole.dk_s, sum->dk_s.dtype, shard_cuts[s]);
        run_backward(plan, &inputs, &gradients);
        tensor_add(&sum->dq_t, &contribution->dq_t), tensor_add(&sum->dq_s, &contribution->dq_s);
        skl_plan_destroy(plan);
    }
}

static void check_key_shards(trial *t)
{
    shard_forward(t, &t->one);
    const skl_rows only_dot = {.struct_size = sizeof only_dot, .dot_t = tensor_output(&t->one.dot_t)};
    run_forward(t->plan, &t->f->inputs, &only_dot);
    assert_int_equal(rows_mismatch(t->f, &t->one, t->kernel), 0);
    shard_backward(t, &t->one, &t->other);
    assert_int_equal(gradients_mismatch(t->f, &t->one, t->kernel, "shards"), 0);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        TRIALS(empty_states_change_nothing, causal, .every_type = 1, .check = check_empty_states),
        TRIALS(no_key_seen, full, .every_type = 1, .check = check_no_key_seen),
        TRIALS(ranges_past_the_keys, full, .every_type = 1, .prepare = fixture_solve,
               .check = check_ranges_past_the_keys),
        TRIALS(key_shards, shard_cases, .prepare = fixture_solve, .check = check_key_shards),
    };
    return test_run("states", tests, COUNT_OF(tests));
}
