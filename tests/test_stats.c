/* skl_attention_stats: the case table and random cases on every kernel against the oracle, properties that hold
 * whatever the oracle says, and what it refuses. */
#include "trial.h"

#include <math.h>
#include <stdio.h>
#include <stdlib.h>

#include "case_words.h"
#include "device.h"
#include "edit.h"
#include "stats_check.h"

/* The oracle keeps the whole matrix. */
enum { PAIRS_MAX = 4 * MILLION };

static int is_small(const test_case *c)
{
    const skl_problem p = case_problem(c);
    return p.batch * p.heads_s * p.len_q * p.len_k <= PAIRS_MAX;
}

/* ---- Against the oracle ---------------------------------------------------------------------------------------- */

static int check_kernel(const stats_setup *setup, stats_kind kind, const char *kernel, int32_t threads)
{
    char label[160];
    snprintf(label, sizeof label, "%s: %s: statistics %d", setup->f->test_case->name, kernel, (int)kind);
    skl_problem problem = setup->f->problem;
    problem.gradients = 0;
    skl_plan *const plan = test_plan(&problem, kernel, threads);
    stats_results results = stats_results_create(setup);
    const uint32_t bits = stats_requested(setup, kind);
    const skl_stats stats = stats_of(setup, &results, bits);
    const int wrong = stats_run(plan, setup, &stats) ? stats_mismatch(setup, &results, bits, label) : 0;
    stats_results_destroy(&results);
    skl_plan_destroy(plan);
    return wrong;
}

static void check_kinds(const test_case *c, int first_kind, int end_kind)
{
    fixture f;
    fixture_create(&f, c);
    int wrong = 0;
    for (int kind = first_kind; kind < end_kind; kind++) {
        stats_setup setup = stats_setup_create(&f, (stats_kind)kind);
        for (int32_t n = 0; case_kernel(c, n) != NULL; n++)
            wrong += check_kernel(&setup, (stats_kind)kind, case_kernel(c, n), 1 + kind);
        stats_setup_destroy(&setup);
    }
    fixture_destroy(&f);
    assert_int_equal(wrong, 0);
}

/* A given LSE is rounded by more than 2^10, so that the probability at distance 0 may be infinite. */
static const test_case own_key = {"own key, huge logits", SHAPE(1, 40, 40), HEADS(1, 1),
                                  DIMS(16, 16),           SCALES(1, 1e12F), WINDOW(0, 0)};

static void test_every_kind(void **state)
{
    check_kinds(*state, STATS_PLAIN, STATS_KINDS);
}

/* The oracle takes most of the time: a case of the table has one of the kinds, which its name decides about. */
static void test_one_kind(void **state)
{
    const test_case *const c = *state;
    test_random random = random_for(c->name);
    const int kind = (int)random_between(&random, STATS_PLAIN, STATS_KINDS - 1);
    check_kinds(c, kind, kind + 1);
}

/* ---- Huge logits ----------------------------------------------------------------------------------------------- */

static const test_case huge[] = {
    {"huge", SHAPE(1, 40, 50), HEADS(1, 1), DIMS(16, 16), SCALES(1, 1)},
    {"huge, bf16", SHAPE(1, 300, 50), HEADS(1, 1), DIMS(64, 64), SCALES(1, 1), TYPES(BF16, BF16)},
    {"huge, f16", SHAPE(1, 40, 50), HEADS(1, 1), DIMS(64, 64), SCALES(1, 1), TYPES(F16, F16)},
};

/* Logits are multiples of 2^20, plus 2^14 times the number of the key: exact in f32, and no two of a row are equal.
 */
static void fill_huge(const fixture *f)
{
    test_random random = random_for(f->test_case->name);
    for (int64_t n = 0; n < tensor_count(&f->q_s); n++)
        tensor_set(&f->q_s, n, n % f->q_s.dim == 0 ? 1024 : 1024 * (double)random_between(&random, -3, 3));
    for (int64_t n = 0; n < tensor_count(&f->k_s); n++)
        tensor_set(&f->k_s, n,
                   n % f->k_s.dim == 0 ? 16 * (double)(n / f->k_s.dim)
                                       : 1024 * (double)random_between(&random, -3, 3));
}

static double logit_of(const fixture *f, int64_t i, int64_t j)
{
    double logit = 0;
    for (int64_t d = 0; d < f->q_s.dim; d++)
        logit += tensor_get(&f->q_s, i * f->q_s.dim + d) * tensor_get(&f->k_s, j * f->k_s.dim + d);
    return logit;
}

static void assert_value(const char *kernel, const test_tensor *tensor, int64_t n, double expected, const char *what)
{
    const double value = tensor_get(tensor, n), error = fabs(value - expected);
    const int may_be_nan = test_device() == SKL_CUDA; /* from LSEs of 2^20 on: probabilities are not determined */
    if (!(error <= 1e-6 * fabs(expected)) && !(may_be_nan && isnan(value)))
        fail_msg("%s: %s[%lld] is %g, not %g", kernel, what, (long long)n, value, expected);
}

/* A row is a single peak: its entropy is 0. Maxima and top keys need no probabilities. */
static void check_one_peak(trial *t)
{
    const fixture *const f = t->f;
    fill_huge(f);
    stats_setup setup = stats_setup_create(f, STATS_PLAIN);
    stats_results results = stats_results_create(&setup);
    const skl_stats stats = stats_of(&setup, &results, ALL_STATS);
    const int ran = stats_run(t->plan, &setup, &stats);
    for (int64_t i = 0; ran && i < f->length_q; i++) {
        int64_t peak = 0;
        for (int64_t j = 1; j < f->length_k; j++)
            peak = logit_of(f, i, j) > logit_of(f, i, peak) ? j : peak;
        const double logit = logit_of(f, i, peak), most = tensor_get(&results.tensors[MAX_LOGIT], i);
        assert_true(fabs(most - logit) <= 1e-6 * fabs(logit));
        assert_int_equal(((const int32_t *)results.tensors[TOP_KEYS].data)[i * setup.options.top_k], peak);
        const double distance = fabs((double)(i + f->length_k - f->length_q - peak));
        assert_value(t->kernel, &results.tensors[ENTROPY], i, 0, "entropy");
        assert_value(t->kernel, &results.tensors[EXPECTED_DISTANCE], i, distance, "expected_distance");
        assert_value(t->kernel, &results.tensors[TOP_P], i * setup.options.top_k, 1, "top_p");
    }
    stats_results_destroy(&results);
    stats_setup_destroy(&setup);
}

/* ---- Order ----------------------------------------------------------------------------------------------------- */

static const test_case ordered[] = {
    {"ordered", SHAPE(2, 400, 500), HEADS(4, 4), KEY_HEADS(2, 2), DIMS(24, 24), CAUSAL},
    {"ordered, bf16", SHAPE(2, 1100, 1000), HEADS(2, 2), KEY_HEADS(1, 1), DIMS(64, 64), TYPES(BF16, BF16)},
};

/* Every result has one writer and sums have one order: bits depend neither on threads nor on the run. */
static void test_bits_are_the_same_in_every_run(void **state)
{
    fixture f;
    fixture_create(&f, *state);
    stats_setup setup = stats_setup_create(&f, STATS_WEIGHTED);
    stats_results one = stats_results_create(&setup), many = stats_results_create(&setup);
    const uint32_t bits = stats_requested(&setup, STATS_WEIGHTED);
    for (int32_t threads = 1; threads <= 9; threads += 4) {
        skl_plan *const plan = test_plan(&f.problem, NULL, threads);
        const stats_results *const results = threads == 1 ? &one : &many;
        const skl_stats stats = stats_of(&setup, results, bits);
        assert_true(stats_run(plan, &setup, &stats));
        skl_plan_destroy(plan);
        if (threads > 1)
            assert_null(stats_difference(&one, &many));
    }
    stats_results_destroy(&one);
    stats_results_destroy(&many);
    stats_setup_destroy(&setup);
    fixture_destroy(&f);
}

/* ---- Refusals ---------------------------------------------------------------------------------------------------
 */

/* A statistics call with all results, which an edit makes invalid. */
typedef struct refusal {
    edit edits[2];
    const char *message;
} refusal;

/* clang-format off */
#define SET(member, to) SET_IN(skl_stats, member, to)
static const refusal refusals[] = {
    {{SET(struct_size, 8)}, "stats.struct_size=8: must be the sizeof of the struct, "},
    {{SET(row_begin, -((int64_t)1 << 41))}, "stats.row_begin=-2199023255552: must be "},
    {{SET(row_end, (int64_t)1 << 41)}, "stats.row_end=2199023255552: must be "},
    {{SET(per_key_head, 2)}, "stats.per_key_head=2: must be 0..1"},
    {{SET(distance_count, 0)}, "stats.distance_count=0: must be 1..64"},
    {{SET(distance_count, 65)}, "stats.distance_count=65: must be 1..64"},
    {{SET(distance_mass, 0), SET(distance_count, -1)}, "stats.distance_count=-1: must be 0..64"},
    {{SET(range_count, 0)}, "stats.range_count=0: must be 1..64"},
    {{SET(range_count, 65)}, "stats.range_count=65: must be 1..64"},
    {{SET(key_ranges, 0)}, "stats.key_ranges=NULL: must be given: range_mass and range_sum need it"},
    {{SET(top_k, 0)}, "stats.top_k=0: must be 1..64"},
    {{SET(top_k, 65)}, "stats.top_k=65: must be 1..64"},
    {{SET(top_keys.data, 0), SET(top_k, 0)}, "stats.top_k=0: must be 1..64"},
    {{SET(chosen_count, 0)}, "stats.chosen_count=0: must be 1..2147483647"},
    {{SET(chosen_rows, 0)}, "stats.chosen_rows=NULL: must be given: weights need it"},
    {{SET(chosen_count, INT32_MAX)}, "overlap: "},
    {{SET(key_sum.stride_row, -1)}, "stats.key_sum.stride_row=-1: must be at least 0"},
    {{SET(entropy.stride_row, 0)}, "stats.entropy.stride_row=0: elements of an output overlap; must be at least 1"},
    {{COPY_IN(skl_stats, entropy, lse)}, " overlap: an output must not share memory with another tensor"},
    {{COPY_IN(skl_stats, head_max_logit, distance_mass)}, " overlap: an output must not share memory"},
    {{ADD_IN(skl_stats, top_p.data, 1)}, "must be aligned to its element size, 4 bytes"},
};
/* clang-format on */

/* A range and a row that the CPU refuses; a GPU cannot see them. */
static void refuse_values(const skl_plan *plan, const stats_setup *setup, const skl_stats *stats)
{
    const struct {
        const test_memory *memory;
        int at;
        int32_t value;
        const char *message;
    } values[] = {{&setup->ranges, 0, -1, "stats.key_ranges[0, 0]=-1.."},
                  {&setup->ranges, 1, 501, "..501: must be 0 <= begin <= end <= 500, the keys of the sequence"},
                  {&setup->ranges, 0, INT32_MAX, "stats.key_ranges[0, 0]=2147483647.."},
                  {&setup->rows, 0, -2, "stats.chosen_rows[0, 0]=-2: must be -1 (none) or a row of the sequence"},
                  {&setup->rows, 0, 400, "stats.chosen_rows[0, 0]=400: must be -1 (none) or a row of the sequence"}};
    test_memory workspace =
        memory_create(skl_plan_workspace_size(plan, SKL_OP_ATTENTION_STATS), SKL_WORKSPACE_ALIGNMENT);
    for (size_t n = 0; n < COUNT_OF(values); n++) {
        int32_t *const value = (int32_t *)(void *)values[n].memory->data + values[n].at;
        const int32_t valid = *value;
        *value = values[n].value;
        assert_refused(skl_attention_stats(plan, &setup->inputs, stats, workspace.data, workspace.size, NULL),
                       SKL_ERROR_ARGUMENT, values[n].message);
        *value = valid;
    }
    memory_destroy(&workspace);
}

static void test_invalid_arguments_are_refused(void **state)
{
    (void)state;
    fixture f;
    fixture_create(&f, &ordered[0]);
    stats_setup setup = stats_setup_create(&f, STATS_PLAIN);
    stats_results results = stats_results_create(&setup);
    skl_plan *const plan = test_plan(&f.problem, NULL, 1);
    const skl_stats valid = stats_of(&setup, &results, ALL_STATS);
    for (size_t n = 0; n < COUNT_OF(refusals); n++) {
        skl_stats stats = valid;
        edit_apply(&stats, refusals[n].edits, COUNT_OF(refusals[n].edits));
        assert_refused(skl_attention_stats(plan, &setup.inputs, &stats, NULL, 0, NULL), SKL_ERROR_ARGUMENT,
                       refusals[n].message);
    }
    if (test_device() == SKL_CPU)
        refuse_values(plan, &setup, &valid);
    skl_plan_destroy(plan);
    stats_results_destroy(&results);
    stats_setup_destroy(&setup);
    fixture_destroy(&f);
}

/* Without a sequence there is no array to read. */
static void test_no_sequences(void **state)
{
    (void)state;
    static const test_case none = {"no sequences", SHAPE(0, 5, 6), HEADS(2, 2), DIMS(8, 8)};
    fixture f;
    fixture_create(&f, &none);
    stats_setup setup = stats_setup_create(&f, STATS_PLAIN);
    stats_results results = stats_results_create(&setup);
    skl_plan *const plan = test_plan(&f.problem, NULL, 1);
    skl_stats stats = stats_of(&setup, &results, ALL_STATS);
    stats.key_ranges = stats.chosen_rows = NULL;
    assert_true(stats_run(plan, &setup, &stats));
    skl_plan_destroy(plan);
    stats_results_destroy(&results);
    stats_setup_destroy(&setup);
    fixture_destroy(&f);
}

static void test_other_students_have_no_statistics(void **state)
{
    (void)state;
    static const struct {
        test_case test_case;
        const char *reason;
    } others[] = {
        {{"indexer", SHAPE(2, 5, 6), HEADS(1, 1), DIMS(4, 4), INDEXER(1)},
         "student=1: skl_attention_stats needs SKL_STUDENT_ATTENTION"},
        {{"linear", SHAPE(2, 5, 6), HEADS(1, 1), DIMS(4, 4), LINEAR},
         "link_s=1: skl_attention_stats needs SKL_LINK_SOFTMAX"},
    };
    for (size_t n = 0; n < COUNT_OF(others); n++) {
        const skl_problem problem = case_problem(&others[n].test_case);
        skl_plan *const plan = test_plan(&problem, NULL, 1);
        assert_int_equal(skl_plan_workspace_size(plan, SKL_OP_ATTENTION_STATS), 0);
        assert_false(skl_plan_supports(plan, SKL_OP_ATTENTION_STATS));
        assert_non_null(strstr(skl_last_error(), others[n].reason));
        skl_plan_destroy(plan);
    }
}

/* ---- Explanation ------------------------------------------------------------------------------------------------
 */

static void test_the_passes_of_a_cpu_are_explained(void **state)
{
    (void)state;
    if (test_device() != SKL_CPU)
        skip();
    fixture f;
    fixture_create(&f, &ordered[0]);
    skl_plan *const plan = test_plan(&f.problem, NULL, 1);
    char text[1024], rows[128], keys[128];
    snprintf(rows, sizeof rows, "statistics of rows: %s, 1 thread, ", skl_plan_kernel(plan));
    snprintf(keys, sizeof keys, "computes the LSEs)\nstatistics of keys: %s, ", skl_plan_kernel(plan));
    assert_true(skl_plan_explain(plan, NULL, SKL_OP_ATTENTION_STATS, text, sizeof text) < sizeof text);
    assert_non_null(strstr(text, rows));
    assert_non_null(strstr(text, keys));
    skl_inputs inputs = f.inputs;
    inputs.q_t.data = inputs.k_t.data = NULL;
    inputs.lse_s = tensor_input(&f.grad_kl);
    assert_true(skl_plan_explain(plan, &inputs, SKL_OP_ATTENTION_STATS, text, sizeof text) < sizeof text);
    assert_non_null(strstr(text, "lse_s is given, so probabilities are exact at once"));
    skl_plan_destroy(plan);
    fixture_destroy(&f);
}

int main(void)
{
    const int64_t sample = test_environment("SKL_TEST_SAMPLE", 1), work = test_environment("SKL_TEST_WORK", 1000);
    const size_t random_count = (size_t)(test_environment("SKL_TEST_RANDOM", 40) / sample);
    random_case *const drawn = calloc(2 * random_count + 1, sizeof *drawn);
    struct CMUnitTest *const tests = calloc(test_case_count + 2 * random_count + 11, sizeof *tests);
    if (drawn == NULL || tests == NULL)
        return 2;
    const int every_kind = test_environment("SKL_TEST_LONG", 0) != 0 || test_device() == SKL_CUDA;
    size_t count = 0, small = 0;
    for (size_t n = 0; n < COUNT_OF(ordered); n++)
        tests[count++] = (struct CMUnitTest){ordered[n].name, test_bits_are_the_same_in_every_run, NULL, NULL,
                                             (void *)(uintptr_t)&ordered[n]};
    tests[count++] = (struct CMUnitTest)TRIALS(huge_logits_have_one_peak, huge, .check = check_one_peak);
    tests[count++] = (struct CMUnitTest){own_key.name, test_every_kind, NULL, NULL, (void *)(uintptr_t)&own_key};
    tests[count++] = (struct CMUnitTest)cmocka_unit_test(test_invalid_arguments_are_refused);
    tests[count++] = (struct CMUnitTest)cmocka_unit_test(test_no_sequences);
    tests[count++] = (struct CMUnitTest)cmocka_unit_test(test_other_students_have_no_statistics);
    tests[count++] = (struct CMUnitTest)cmocka_unit_test(test_the_passes_of_a_cpu_are_explained);
    for (size_t n = 0; n < test_case_count; n++) {
        const test_case *const c = &test_cases[n];
        if (c->index_heads > 0 || c->linear || !is_small(c) || case_work(c) > work * MILLION ||
            small++ % (size_t)sample != 0)
            continue;
        tests[count++] = (struct CMUnitTest){c->name, every_kind ? test_every_kind : test_one_kind, NULL, NULL,
                                             (void *)(uintptr_t)c};
    }
    for (size_t n = 0; n < 2 * random_count; n++) {
        if (n % 2)
            case_draw(&drawn[n], (int64_t)n);
        else
            case_draw_wide(&drawn[n], (int64_t)n, n % 10 == 0);
        const test_case *const c = &drawn[n].test_case;
        if (c->index_heads == 0 && !c->linear && is_small(c))
            tests[count++] = (struct CMUnitTest){drawn[n].name, test_every_kind, NULL, NULL, (void *)(uintptr_t)c};
    }
    const int failures = test_run("stats", tests, test_shard(tests, count));
    free(tests);
    free(drawn);
    return failures;
}
