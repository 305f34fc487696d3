/* Public structs of older and newer programs: which sizes are accepted, and that no byte is read before the size is
 * checked, nor one beyond it. */
#include "support.h"

#include <stdbool.h>
#include <stdio.h>

#include "any_call.h"

/* A public struct: `first_size` is its size in the first release that had it, `end` the end of its last field. */
typedef struct struct_type {
    const char *name; /* of the argument, in messages */
    size_t size, first_size, end;
} struct_type;

/* clang-format off */
#define END_OF(type, last)                    (offsetof(type, last) + sizeof(((type *)0)->last))
#define UNCHANGED(name, type, last)           {name, sizeof(type), sizeof(type), END_OF(type, last)}
#define EXTENDED(name, type, first_new, last) {name, sizeof(type), offsetof(type, first_new), END_OF(type, last)}
/* clang-format on */

typedef enum struct_index {
    PROBLEM,
    OPTIONS,
    INPUTS,
    ROWS,
    GRADIENTS,
    ATTENTION,
    STATISTICS,
    STRUCT_COUNT
} struct_index;

static const struct_type struct_types[STRUCT_COUNT] = {
    [PROBLEM] = EXTENDED("problem", skl_problem, row_bounds, pool_size),
    [OPTIONS] = EXTENDED("options", skl_options, gpu, cancel),
    [INPUTS] = EXTENDED("inputs", skl_inputs, key_begin, sink_s),
    [ROWS] = UNCHANGED("rows", skl_rows, mass),
    [GRADIENTS] = EXTENDED("gradients", skl_gradients, dsink_t, dsink_s),
    [ATTENTION] = UNCHANGED("attention", skl_attention, dv_s),
    [STATISTICS] = UNCHANGED("stats", skl_stats, weights),
};

/* The other calls that take a public struct, after the kinds of any_call. */
enum { PLAN_CREATE = CALL_KINDS, PROBLEM_NEEDS, PLAN_EXPLAIN };

/* A call, and which of its structs is under test. */
typedef struct struct_call {
    int kind;
    struct_index type;
} struct_call;

static const struct_call struct_calls[] = {
    {PLAN_CREATE, PROBLEM},
    {PLAN_CREATE, OPTIONS},
    {PROBLEM_NEEDS, PROBLEM},
    {PLAN_EXPLAIN, INPUTS},
    {CHECK, INPUTS},
    {FORWARD, INPUTS},
    {FORWARD, ROWS},
    {BACKWARD, INPUTS},
    {BACKWARD, GRADIENTS},
    {ONE_PASS, INPUTS},
    {ONE_PASS, ROWS},
    {ONE_PASS, GRADIENTS},
    {ATTENTION_BACKWARD, INPUTS},
    {ATTENTION_BACKWARD, ATTENTION},
    {ATTENTION_BACKWARD, ROWS},
    {ATTENTION_BACKWARD, GRADIENTS},
    {ATTENTION_FORWARD, INPUTS},
    {ATTENTION_FORWARD, ROWS},
    {STATS, INPUTS},
    {STATS, STATISTICS},
    {PARTIAL, INPUTS},
    {FINISH, INPUTS},
    {FINISH, ROWS},
};

/* Valid structs. The problem has no rows, so that calls need neither tensors nor results; no workspace is needed
 * before the structs are checked. */
typedef struct structs {
    skl_plan *plan;
    skl_problem problem;
    skl_options options;
    skl_inputs inputs;
    skl_rows rows;
    skl_gradients gradients;
    skl_attention attention;
    skl_stats stats;
} structs;

static void structs_create(structs *s)
{
    *s = (structs){.problem = skl_problem_default(),
                   .options = skl_options_default(),
                   .inputs = {.struct_size = sizeof(skl_inputs)},
                   .rows = {.struct_size = sizeof(skl_rows)},
                   .gradients = {.struct_size = sizeof(skl_gradients)},
                   .attention = {.struct_size = sizeof(skl_attention)},
                   .stats = {.struct_size = sizeof(skl_stats)}};
    s->problem.gradients |= SKL_DV_S;
    s->problem.dim_t = s->problem.dim_s = 4;
    s->plan = test_plan(&s->problem, NULL, 1);
}

static const void *struct_at(const structs *s, struct_index type)
{
    const void *const all[STRUCT_COUNT] = {&s->problem,   &s->options,   &s->inputs, &s->rows,
                                           &s->gradients, &s->attention, &s->stats};
    return all[type];
}

/* Makes a call in which the struct under test is at `at`. */
static skl_status make_call(const structs *s, const struct_call *c, const void *at)
{
    const void *all[STRUCT_COUNT];
    for (int n = 0; n < STRUCT_COUNT; n++)
        all[n] = n == (int)c->type ? at : struct_at(s, (struct_index)n);
    skl_row_state state;
    const any_call call = {.plan = s->plan,
                           .inputs_address = all[INPUTS],
                           .rows_address = all[ROWS],
                           .gradients_address = all[GRADIENTS],
                           .attention_address = all[ATTENTION],
                           .stats_address = all[STATISTICS],
                           .v_s_address = &call.attention.v_s,
                           .o_s_address = &call.o_s,
                           .key_end = 1,
                           .states = &state};
    skl_plan *plan = NULL;
    skl_status status = SKL_OK;
    switch (c->kind) {
    case PLAN_CREATE:
        status = skl_plan_create(&plan, all[PROBLEM], all[OPTIONS]);
        skl_plan_destroy(plan);
        return status;
    case PROBLEM_NEEDS:
        return skl_problem_needs(all[PROBLEM], SKL_OP_BACKWARD) != 0 ? SKL_OK : SKL_ERROR_ARGUMENT;
    case PLAN_EXPLAIN:
        return skl_plan_explain(s->plan, all[INPUTS], SKL_OP_FORWARD, NULL, 0) != 0 ? SKL_OK : SKL_ERROR_ARGUMENT;
    default:
        return any_call_run((call_kind)c->kind, &call);
    }
}

/* A struct of `size` bytes, with valid content as far as it goes, directly before an unmapped page. */
static test_memory place_struct(const structs *s, struct_index type, size_t size)
{
    const test_memory memory = memory_create(size, sizeof(size_t));
    memset(memory.data, 0, size);
    memcpy(memory.data, struct_at(s, type), size < struct_types[type].size ? size : struct_types[type].size);
    memcpy(memory.data, &size, sizeof size);
    return memory;
}

/* A struct of `size` bytes is refused, with this message. Its bytes end before what a full struct would need. */
static void assert_size_refused(const structs *s, const struct_call *c, size_t size, size_t struct_size)
{
    const struct_type *const type = &struct_types[c->type];
    char message[128];
    snprintf(message, sizeof message, "%s.struct_size=%zu: must be the sizeof of the struct, %zu, or %zu..4096",
             type->name, struct_size, type->size, type->first_size);
    test_memory memory = place_struct(s, c->type, size);
    memcpy(memory.data, &struct_size, sizeof struct_size);
    assert_refused(make_call(s, c, memory.data), SKL_ERROR_ARGUMENT, message);
    memory_destroy(&memory);
}

/* The structs themselves are accepted: a run call fails at its workspace and not before. */
static bool is_accepted(skl_status status)
{
    return status == SKL_OK || (status == SKL_ERROR_WORKSPACE && strstr(skl_last_error(), "workspace=NULL"));
}

static void assert_accepted(const structs *s, const struct_call *c, size_t size)
{
    test_memory memory = place_struct(s, c->type, size);
    if (!is_accepted(make_call(s, c, memory.data)))
        fail_msg("%s.struct_size=%zu: %s", struct_types[c->type].name, size, skl_last_error());
    memory_destroy(&memory);
}

typedef void (*check_of_call)(const structs *s, const struct_call *c);

static void for_every_call(check_of_call check)
{
    structs s;
    structs_create(&s);
    for (size_t n = 0; n < COUNT_OF(struct_calls); n++)
        check(&s, &struct_calls[n]);
    skl_plan_destroy(s.plan);
}

/* Structs of older programs: every size since the first release. */
static void check_shorter(const structs *s, const struct_call *c)
{
    const struct_type *const type = &struct_types[c->type];
    for (size_t size = sizeof(size_t); size < type->first_size; size += sizeof(size_t))
        assert_size_refused(s, c, size, size);
    assert_size_refused(s, c, sizeof(size_t), 0);
    for (size_t size = type->first_size + 1; size < type->size; size++)
        if (size % sizeof(void *) != 0) /* the last field would be half of a pointer */
            assert_size_refused(s, c, size, size);
    for (size_t size = type->first_size; size <= type->size; size += sizeof(size_t))
        assert_accepted(s, c, size);
}

static void test_shorter_structs_are_accepted_since_the_first_release(void **state)
{
    (void)state;
    for_every_call(check_shorter);
}

/* Structs of newer programs. */
static void check_longer(const structs *s, const struct_call *c)
{
    enum { STRUCT_SIZE_MAX = 4096 };
    const struct_type *const type = &struct_types[c->type];
    const size_t sizes[] = {type->size + 1, type->size + 8, STRUCT_SIZE_MAX};
    for (size_t k = 0; k < COUNT_OF(sizes); k++) {
        assert_accepted(s, c, sizes[k]);
        const size_t unknown[] = {type->size, sizes[k] - 1};
        for (size_t n = 0; n < COUNT_OF(unknown); n++) {
            test_memory memory = place_struct(s, c->type, sizes[k]);
            memory.data[unknown[n]] = 1;
            char message[96];
            snprintf(message, sizeof message, "%s.struct_size=%zu: byte %zu is not 0", type->name, sizes[k],
                     unknown[n]);
            assert_refused(make_call(s, c, memory.data), SKL_ERROR_ARGUMENT, message);
            memory_destroy(&memory);
        }
    }
    assert_size_refused(s, c, type->size, STRUCT_SIZE_MAX + 1);
    assert_size_refused(s, c, type->size, SIZE_MAX);
}

static void test_longer_structs_must_end_in_zeros(void **state)
{
    (void)state;
    for_every_call(check_longer);
}

/* A new field must not use bytes that an older program never initialized. */
static void test_structs_have_no_padding_at_their_end(void **state)
{
    (void)state;
    for (int n = 0; n < STRUCT_COUNT; n++)
        assert_int_equal(struct_types[n].end, struct_types[n].size);
}

/* skl_kernel_info is written: known fields only. Unknown ones must be 0, as in structs that are read. */
static void test_structs_are_written_within_their_size(void **state)
{
    (void)state;
    const size_t known = sizeof(skl_kernel_info), sizes[] = {known, known + 1, known + 8, 4096};
    skl_kernel_info expected = {.struct_size = known};
    assert_true(skl_kernel_at(0, &expected));
    for (size_t n = 0; n < COUNT_OF(sizes); n++) {
        test_memory memory = memory_create(sizes[n], sizeof(size_t));
        memset(memory.data, 0, sizes[n]);
        memcpy(memory.data, &sizes[n], sizeof sizes[n]);
        assert_true(skl_kernel_at(0, (skl_kernel_info *)(void *)memory.data));
        expected.struct_size = sizes[n];
        assert_memory_equal(memory.data, &expected, END_OF(skl_kernel_info, rounds_gradients));
        for (size_t byte = known; byte < sizes[n]; byte++)
            assert_int_equal(memory.data[byte], 0);
        memory.data[sizes[n] - 1] = 1;
        assert_int_equal(skl_kernel_at(0, (skl_kernel_info *)(void *)memory.data), sizes[n] == known);
        memory_destroy(&memory);
    }
    const size_t refused[] = {0, known - 8, 4097, (size_t)(uintptr_t)expected.name};
    for (size_t n = 0; n < COUNT_OF(refused); n++) {
        skl_kernel_info info = {.struct_size = refused[n]};
        assert_false(skl_kernel_at(0, &info));
        assert_non_null(strstr(skl_last_error(), "info.struct_size="));
        assert_null(info.name);
    }
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_shorter_structs_are_accepted_since_the_first_release),
        cmocka_unit_test(test_longer_structs_must_end_in_zeros),
        cmocka_unit_test(test_structs_have_no_padding_at_their_end),
        cmocka_unit_test(test_structs_are_written_within_their_size),
    };
    return test_run("structs", tests, COUNT_OF(tests));
}
