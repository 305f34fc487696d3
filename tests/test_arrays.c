/* Invalid values of cu_seqlens, key_lengths, row bounds and indices. Every entry point refuses them by name, whatever
 * results are requested, and writes nothing. The arrays end at an unmapped page. */
#include "runner.h"

#include "any_call.h"
#include "case_words.h"
#include "device.h"

#define SIZES    HEADS(2, 2), DIMS(4, 4)
#define GROUPS   HEADS(4, 2), DIMS(4, 4)
#define SEQUENCE PACKED(3, LENGTHS(0, 3, 3, 7), LENGTHS(0, 2, 7, 9))
#define PADDING  SHAPE(3, 5, 6), KEY_LENGTHS(6, 0, 3)
#define BOUNDED  SHAPE(2, 5, 6), BOUNDS(CHUNKS)

static const test_case cases[] = {
    {"packed", SEQUENCE, SIZES, TAILS(1, 2)},
    {"packed, groups", SEQUENCE, GROUPS},
    {"packed, sinks", SEQUENCE, SIZES, SINKS, TAILS(1, 2)},
    {"packed, sinks, groups", SEQUENCE, GROUPS, SINKS, STUDENT_ONLY},
    {"packed, sinks, bounds", SEQUENCE, SIZES, SINKS, BOUNDS(CHUNKS)},
    {"packed, bounds, attention", SEQUENCE, SIZES, BOUNDS(CHUNKS), ATTENTION},
    {"padded", PADDING, SIZES},
    {"padded, groups, attention", PADDING, GROUPS, ATTENTION},
    {"padded, sinks", PADDING, SIZES, SINKS},
    {"padded, sinks, groups", PADDING, GROUPS, SINKS, STUDENT_ONLY},
    {"bounded", BOUNDED, SIZES},
    {"bounded, sinks, groups", BOUNDED, GROUPS, SINKS, STUDENT_ONLY},
    {"packed indexer", SEQUENCE, SIZES, INDEXER(3)},
    {"packed sparse indexer", SEQUENCE, GROUPS, INDEXER(3), TOP_K(2), BOUNDS(CHUNKS)},
    {"padded sparse indexer", PADDING, GROUPS, INDEXER(3), TOP_K(2)},
};

/* One case, with what its calls need. */
typedef struct problem_run {
    fixture f;
    skl_plan *plan;
    fixture_results saved, results;
    skl_row_state *states;
    test_memory workspace;
} problem_run;

/* Makes a call that requests this subset of the results. skl_attention_forward always gets o_s, which it requires. */
static skl_status make_call(const problem_run *run, call_kind kind, const skl_inputs *inputs, uint32_t subset)
{
    const fixture_results wanted = results_subset(&run->results, subset);
    any_call call;
    any_call_init(&call, kind, &run->f, &wanted);
    call.plan = run->plan;
    call.inputs = *inputs;
    call.o_s = tensor_output(&run->results.o_s);
    call.states = run->states;
    call.workspace = run->workspace.data, call.workspace_size = run->workspace.size;
    return any_call_run(kind, &call);
}

/* ---- Requested subsets --------------------------------------------------------------------------------------- */

/* Every subset of KL and LSEs, alone and with all other results, and each other result alone. */
enum { ROW_SUBSETS = 8, RESULT_COUNT = 16, SUBSETS = 2 * ROW_SUBSETS + RESULT_COUNT - 3 };

static uint32_t subset_bits(int n)
{
    const uint32_t others = ALL_RESULTS & ~(uint32_t)(ROW_SUBSETS - 1);
    if (n < 2 * ROW_SUBSETS)
        return (uint32_t)n / 2 | (n % 2 ? others : 0);
    return 1U << (n - 2 * ROW_SUBSETS + 3);
}

/* ---- Invalid values ------------------------------------------------------------------------------------------ */

/* An array of the inputs: what its elements may be at most. */
typedef struct array {
    const char *name;
    int32_t *values;
    int64_t count;
    int64_t highest;
} array;

enum { ARRAYS_MAX = 5 };

static array array_of(const char *name, const test_memory *memory, int64_t count, int64_t highest)
{
    return (array){name, (int32_t *)(void *)memory->data, count, highest};
}

static int arrays_of(const fixture *f, array arrays[ARRAYS_MAX])
{
    const skl_problem *const p = &f->problem;
    const int64_t rows = p->packed ? f->inputs.cu_seqlens_q[p->batch] : p->batch * p->len_q;
    int count = 0;
    if (p->packed) {
        arrays[count++] = array_of("cu_seqlens_q", &f->lengths[1], p->batch + 1, p->total_q);
        arrays[count++] = array_of("cu_seqlens_k", &f->lengths[2], p->batch + 1, p->total_k);
    }
    if (f->inputs.key_lengths)
        arrays[count++] = array_of("key_lengths", &f->lengths[0], p->batch, p->len_k);
    if (f->inputs.key_begin) {
        arrays[count++] = array_of("key_begin", &f->bounds[0], rows, p->len_k);
        arrays[count++] = array_of("key_end", &f->bounds[1], rows, p->len_k);
    }
    if (p->top_k > 0) /* contiguous */
        arrays[count++] = (array){"indices", f->indices.data, p->heads_s * rows * p->top_k, p->len_k - 1};
    return count;
}

static void assert_named(const char *call, const test_case *c, uint32_t subset, const array *a, int64_t at)
{
    const size_t length = strlen(a->name);
    if (strncmp(skl_last_error(), a->name, length) != 0 || skl_last_error()[length] != '[')
        fail_msg("%s, %s, results %x, %s[%d]=%d: \"%s\" does not name the array", call, c->name, subset, a->name,
                 (int)at, a->values[at], skl_last_error());
}

/* Calls an entry point with each invalid value at the first, a middle and the last element. */
static int check_array(const problem_run *run, call_kind kind, const skl_inputs *inputs, uint32_t subset,
                       const array *a)
{
    const int64_t values[] = {INT32_MIN, -2, a->highest + 1, INT32_MAX};
    const int64_t places[] = {0, a->count / 2, a->count - 1};
    int calls = 0;
    for (size_t v = 0; v < COUNT_OF(values); v++)
        for (size_t n = 0; n < COUNT_OF(places); n++, calls++) {
            const int32_t valid = a->values[places[n]];
            a->values[places[n]] = (int32_t)values[v];
            const skl_status status = make_call(run, kind, inputs, subset);
            if (status != SKL_ERROR_ARGUMENT)
                fail_msg("%s, %s, results %x, %s[%d]=%d: %s instead of a refusal", call_names[kind],
                         run->f.test_case->name, subset, a->name, (int)places[n], a->values[places[n]],
                         skl_status_name(status));
            assert_named(call_names[kind], run->f.test_case, subset, a, places[n]);
            a->values[places[n]] = valid;
        }
    return calls;
}

/* Subsets that the call refuses with valid arrays are left out: they have their own tests. */
static int check_subset(const problem_run *run, call_kind kind, const skl_inputs *inputs, uint32_t subset)
{
    const skl_status status = make_call(run, kind, inputs, subset);
    results_poison(&run->results);
    if (status != SKL_OK && status != SKL_ERROR_UNSUPPORTED) /* the CPU has no skl_attention_forward */
        return 0;
    array arrays[ARRAYS_MAX];
    const int count = arrays_of(&run->f, arrays);
    int calls = 0;
    for (int n = 0; n < count; n++)
        calls += check_array(run, kind, inputs, subset, &arrays[n]);
    assert_true(results_untouched(&run->results));
    return calls;
}

static void problem_run_create(problem_run *run, const test_case *c)
{
    fixture_create(&run->f, c);
    run->plan = test_plan(&run->f.problem, NULL, 1);
    run->saved = results_create(&run->f);
    run->results = results_create(&run->f);
    run->states = states_create(&run->f);
    size_t size = 0;
    for (int op = SKL_OP_FORWARD; op <= SKL_OP_ATTENTION_STATS; op++)
        if (skl_plan_workspace_size(run->plan, (skl_op)op) > size)
            size = skl_plan_workspace_size(run->plan, (skl_op)op);
    run->workspace = memory_create(size, SKL_WORKSPACE_ALIGNMENT);
    const skl_rows rows = results_rows(&run->saved);
    run_forward(run->plan, &run->f.inputs, &rows);
}

static void problem_run_destroy(problem_run *run)
{
    memory_destroy(&run->workspace);
    states_destroy(run->states);
    results_destroy(&run->saved);
    results_destroy(&run->results);
    skl_plan_destroy(run->plan);
    fixture_destroy(&run->f);
}

/* With and without the row vectors of a forward as inputs. */
static void test_invalid_values_are_refused_by_name(void **state)
{
    (void)state;
    if (test_device() != SKL_CPU)
        skip();
    int calls_of[CALL_KINDS] = {0};
    for (size_t n = 0; n < COUNT_OF(cases); n++) {
        problem_run run;
        problem_run_create(&run, &cases[n]);
        const skl_inputs inputs[] = {run.f.inputs, results_backward_inputs(&run.f, &run.saved)};
        for (int kind = 0; kind < CALL_KINDS; kind++)
            for (int subset = 0; subset < 2 * SUBSETS; subset++)
                calls_of[kind] += check_subset(&run, (call_kind)kind, &inputs[subset % 2], subset_bits(subset / 2));
        problem_run_destroy(&run);
    }
    for (int kind = 0; kind < CALL_KINDS; kind++) {
        print_message("%s: %d refused calls\n", call_names[kind], calls_of[kind]);
        assert_true(calls_of[kind] > 0 || kind == MERGE); /* skl_states_merge reads no array */
    }
}

int main(void)
{
    const struct CMUnitTest tests[] = {cmocka_unit_test(test_invalid_values_are_refused_by_name)};
    return test_run("arrays", tests, COUNT_OF(tests));
}
