/* Features of indexers: indices, weights, strips and repeated runs. */
#include "trial.h"

#include <math.h>
#include <stdlib.h>

#include "case_words.h"
#include "device.h"

/* ---- Indices ----------------------------------------------------------------------------------------------- */

static int32_t *row_indices(const fixture *f, int64_t b, int64_t h, int64_t i)
{
    return (int32_t *)f->indices.data + b * f->indices.stride_batch + h * f->indices.stride_head +
           i * f->indices.stride_row;
}

static const test_case sparse_cases[] = {
    {"sparse", SHAPE(2, 5, 7), HEADS(4, 2), DIMS(8, 8), INDEXER(2), TOP_K(3)},
    {"packed", PACKED(2, LENGTHS(0, 4, 9), LENGTHS(0, 9, 16)), HEADS(4, 2), DIMS(8, 8), INDEXER(2), TOP_K(3)},
    {"bf16", SHAPE(2, 5, 7), HEADS(4, 2), DIMS(8, 8), INDEXER(2), TOP_K(3), TYPES(BF16, BF16)},
};
static const int32_t bad_keys[] = {-2, 7, INT32_MAX, INT32_MIN};

/* An entry of the last row of indices. */
static int32_t *last_entry(const fixture *f)
{
    const oracle_sequence last = oracle_sequence_at(&f->problem, &f->inputs, 1);
    return &row_indices(f, last.batch, 1, last.first_q + 4)[2];
}

/* A GPU cannot check indices before a launch: it treats such an index like -1. */
static void check_ignored(const test_case *c, int32_t bad_key)
{
    fixture f;
    fixture_create(&f, c);
    fixture_results none = results_create(&f), bad = results_create(&f);
    *last_entry(&f) = -1;
    run_kernel(&f, NULL, 0, &none);
    *last_entry(&f) = bad_key;
    run_kernel(&f, NULL, 0, &bad);
    assert_null(results_difference(&none, &bad));
    results_destroy(&none);
    results_destroy(&bad);
    fixture_destroy(&f);
}

static void test_bad_indices_are_ignored_on_a_gpu(void **state)
{
    (void)state;
    if (test_device() == SKL_CPU)
        skip();
    for (size_t c = 0; c < COUNT_OF(sparse_cases); c++)
        for (size_t n = 0; n < COUNT_OF(bad_keys); n++)
            check_ignored(&sparse_cases[c], bad_keys[n]);
}

static const test_case no_indices[] = {
    {"empty", SHAPE(2, 37, 41), HEADS(4, 2), DIMS(8, 8), INDEXER(3), TOP_K(5)},
};

static void check_rows_without_indices(trial *t)
{
    const fixture *const f = t->f;
    const fixture_results *const r = &t->one;
    for (int64_t row = 0; row < f->batch * f->problem.heads_s * f->length_q; row++)
        for (int64_t n = 0; n < f->problem.top_k; n++)
            row_indices(f, row / f->length_q / f->problem.heads_s, row / f->length_q % f->problem.heads_s,
                        row % f->length_q)[n] = -1;
    tensor_set(&f->w_s, 7, (double)NAN);
    run_both(t->plan, f, r);
    const test_tensor *const zeros[] = {&r->kl,   &r->cross_entropy, &r->entropy, &r->mass,
                                        &r->dq_s, &r->dk_s,          &r->dw_s};
    for (size_t n = 0; n < COUNT_OF(zeros); n++)
        assert_elements(t, zeros[n], is_zero, "a result");
    assert_elements(t, &r->lse_s, is_minus_infinity, "lse_s");
}

/* Whether a row has the key in its indices and sees it; causal, with as many queries as keys. */
static int is_in_indices(const fixture *f, int64_t key)
{
    for (int64_t h = 0; h < f->problem.heads_s; h++)
        for (int64_t i = key; i < f->length_q; i++)
            for (int64_t n = 0; n < f->problem.top_k; n++)
                if (row_indices(f, 0, h, i)[n] == key)
                    return 1;
    return 0;
}

/* Sets keys that are in no row's indices to NaN. */
static void poison_unused_keys(const fixture *f, const test_tensor *keys)
{
    for (int64_t key = 0; key < keys->length; key++)
        for (int64_t h = 0; h < keys->heads && !is_in_indices(f, key); h++)
            for (int64_t c = 0; c < keys->dim; c++)
                tensor_set(keys, tensor_index(keys, 0, h, key) + c, (double)NAN);
}

/* A key that is in no row's indices, or masked, is never read: it changes no bit. */
static const test_case unused_keys[] = {
    {"unused keys", SHAPE(1, 61, 61), HEADS(4, 2), DIMS(16, 16), INDEXER(3), TOP_K(2), CAUSAL},
};

static void check_unused_keys(trial *t)
{
    run_both(t->plan, t->f, &t->one);
    poison_unused_keys(t->f, &t->f->k_t);
    poison_unused_keys(t->f, &t->f->k_s);
    run_both(t->plan, t->f, &t->other);
    assert_same_bits(t, "poison in unused keys");
}

/* With all keys in its indices, including masked ones and in reverse order, a sparse row matches a dense one. */
enum { ALL_KEYS = 53 };
static const test_case all_keys[] = {
    {"all keys", SHAPE(2, 37, ALL_KEYS), HEADS(4, 2), DIMS(16, 16), INDEXER(3), CAUSAL},
};

static void select_all_keys(fixture *f)
{
    fixture_solve(f);
    f->indices = tensor_create(SKL_F32, 1, 1, 1, ALL_KEYS, LAYOUT_CONTIGUOUS);
    for (int32_t n = 0; n < ALL_KEYS; n++)
        ((int32_t *)f->indices.data)[n] = ALL_KEYS - 1 - n;
    f->problem.top_k = ALL_KEYS;
    f->inputs.indices = (skl_input){f->indices.data, 0, 0, 0};
}

/* ---- Weights ----------------------------------------------------------------------------------------------- */

/* Equal up to rounding: rows that share a vector with a NaN may be summed in a different order. */
static void assert_other_rows_equal(const test_tensor *poisoned, const test_tensor *clean, int64_t row)
{
    for (int64_t n = 0; n < tensor_count(clean); n++)
        if (n / clean->dim % clean->length != row)
            assert_true(fabs(tensor_get(poisoned, n) - tensor_get(clean, n)) < 1e-5);
}

/* A NaN weight affects its row and, through dk, the keys, but no other row. */
static const test_case nan_weights[] = {
    {"dense", SHAPE(1, 230, 101), HEADS(2, 1), DIMS(16, 16), INDEXER(3)},
    {"sparse", SHAPE(1, 23, 101), HEADS(2, 1), DIMS(16, 16), INDEXER(3), TOP_K(40)},
    {"sparse bf16", SHAPE(1, 23, 101), HEADS(2, 1), DIMS(16, 16), INDEXER(3), TOP_K(40), TYPES(BF16, BF16)},
    {"sparse f16", SHAPE(1, 23, 101), HEADS(2, 1), DIMS(16, 16), INDEXER(3), TOP_K(40), TYPES(F16, F16)},
};

static void check_nan_weight(trial *t)
{
    enum { POISONED = 13 };
    if (t->f->problem.top_k)
        row_indices(t->f, 0, 0, POISONED)[0] = 5; /* so that the row sees a key */
    run_both(t->plan, t->f, &t->one);
    tensor_set(&t->f->w_s, tensor_index(&t->f->w_s, 0, 0, POISONED) + 1, (double)NAN);
    run_both(t->plan, t->f, &t->other);
    assert_true(isnan(tensor_get(&t->other.kl, POISONED)));
    assert_other_rows_equal(&t->other.kl, &t->one.kl, POISONED);
    assert_other_rows_equal(&t->other.dq_s, &t->one.dq_s, POISONED);
    assert_other_rows_equal(&t->other.dw_s, &t->one.dw_s, POISONED);
}

/* The student's LSE, requested alone, is the same as in a complete forward, and the teacher is not read. */
static const test_case lse_alone[] = {
    {"lse", SHAPE(1, 230, 101), HEADS(2, 1), DIMS(16, 16), INDEXER(3), CAUSAL},
    {"lse_sparse", SHAPE(1, 67, 101), HEADS(2, 1), DIMS(16, 16), INDEXER(3), TOP_K(33)},
};

static void poison_teacher(fixture *f)
{
    fixture_solve(f);
    tensor_set_all(&f->k_t, (double)NAN);
}

static void check_lse_of_the_student(trial *t)
{
    const fixture_results wanted = {.lse_s = t->one.lse_s};
    const skl_rows rows = results_rows(&wanted);
    run_forward(t->plan, &t->f->inputs, &rows);
    assert_int_equal(rows_mismatch(t->f, &wanted, t->kernel), 0);
}

/* ---- Strips ------------------------------------------------------------------------------------------------- */

/* Tensor-core kernels compute gradients in strips: as many slots of 128 queries as fit into 256 MiB of workspace.
 * Every sequence and head has as many slots as the longest sequence, with room for as many tiles of 128 keys, so that
 * short sequences fill strips with little work. Two sequences are long, where a strip of bf16 and a strip of f16 end:
 * after 2,048 and 1,024 slots, in the middle of the 9 slots of sequences 227 and 113. */
enum {
    SEQUENCES = 310,
    STRIP_HEADS = 3,
    LONG_Q = 300,
    LONG_K = 500,
    SLOTS = SEQUENCES * STRIP_HEADS * 3,
    SLOT_SIZE = 4 * 128 * 128 * 2 /* bytes for bf16; twice as many for f16 */
};

static int is_long(int sequence)
{
    return sequence == 113 || sequence == 227;
}

static void check_strips(trial *t)
{
    if (strncmp(t->kernel, "cuda_sm", strlen("cuda_sm")) == 0) { /* a full strip, but not all slots */
        const size_t size = skl_plan_workspace_size(t->plan, SKL_OP_BACKWARD);
        assert_true(size > (size_t)1 << 28 && size < (size_t)SLOTS * SLOT_SIZE);
    }
    check_oracle(t);
}

static void test_more_slots_than_fit_in_a_strip(void **state)
{
    (void)state;
    if (test_device() == SKL_CPU)
        skip(); /* no strips on the CPU */
    static int32_t begin_q[SEQUENCES + 1], begin_k[SEQUENCES + 1];
    for (int n = 0; n < SEQUENCES; n++) {
        begin_q[n + 1] = begin_q[n] + (is_long(n) ? LONG_Q : 1);
        begin_k[n + 1] = begin_k[n] + (is_long(n) ? LONG_K : 2);
    }
    const test_case c = {"strips",
                         PACKED(SEQUENCES, begin_q, begin_k),
                         HEADS(6, STRIP_HEADS),
                         KEY_HEADS(6, 1),
                         DIMS(16, 16),
                         INDEXER(2),
                         CAUSAL};
    trials all = {&c, 1, .every_type = 1, .prepare = fixture_solve, .check = check_strips};
    void *context = &all;
    run_trials(&context);
}

/* ---- Determinism -------------------------------------------------------------------------------------------- */

/* Bits depend neither on the contents of the workspace nor on the order in which blocks or threads run. Many keys are
 * in the indices of many rows, and some twice. */
static const test_case repeated[] = {
    {"dense", SHAPE(2, 300, 270), HEADS(4, 2), KEY_HEADS(2, 1), DIMS(40, 24), INDEXER(5), CAUSAL},
    {"sparse", SHAPE(2, 300, 70), HEADS(4, 2), KEY_HEADS(2, 1), DIMS(40, 24), INDEXER(5), TOP_K(90)},
    {"sparse bf16", SHAPE(1, 150, 270), HEADS(4, 1), DIMS(40, 136), INDEXER(20), TOP_K(70), TYPES(BF16, BF16)},
    {"sparse bf16, 70 heads", SHAPE(1, 150, 270), HEADS(70, 1), KEY_HEADS(1, 1), DIMS(40, 64), INDEXER(20), TOP_K(70),
     TYPES(BF16, BF16)},
    {"blocks", SHAPE(2, 150, 270), HEADS(4, 2), DIMS(40, 24), INDEXER(2), POOL(SUM, MEAN, VISIBLE, 9), CAUSAL},
    {"blocks bf16", SHAPE(1, 300, 700), HEADS(8, 2), KEY_HEADS(2, 1), DIMS(128, 64), INDEXER(2), TYPES(BF16, BF16),
     POOL(SUM, MEAN, VISIBLE, 16), CAUSAL},
};

static void check_repeats(trial *t)
{
    const int repeats = test_environment("SKL_TEST_SAMPLE", 1) > 1 ? 1 : 5;
    skl_plan *const plan = test_plan_of_kind(&t->f->problem, t->kernel, test_plan_kinds() - 1);
    run_both(plan, t->f, &t->one);
    for (int n = 0; n < repeats; n++) {
        results_poison(&t->other);
        run_both(plan, t->f, &t->other);
        assert_same_bits(t, "a repeated run");
    }
    skl_plan_destroy(plan);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_bad_indices_are_ignored_on_a_gpu),
        TRIALS(rows_without_indices, no_indices, .every_type = 1, .check = check_rows_without_indices),
        TRIALS(keys_outside_indices_are_not_read, unused_keys, .every_type = 1, .check = check_unused_keys),
        TRIALS(indices_of_all_keys_match_dense, all_keys, .every_type = 1, .prepare = select_all_keys,
               .check = check_oracle),
        TRIALS(a_nan_weight_stays_in_its_row, nan_weights, .check = check_nan_weight),
        TRIALS(lse_of_the_student_alone, lse_alone, .every_type = 1, .prepare = poison_teacher,
               .check = check_lse_of_the_student),
        cmocka_unit_test(test_more_slots_than_fit_in_a_strip),
        TRIALS(every_run_has_the_same_bits, repeated, .check = check_repeats),
    };
    return test_run("indexer", tests, COUNT_OF(tests));
}
