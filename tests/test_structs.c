/* Public structs of older and newer programs: which sizes are accepted, and that no byte is read before the size is
 * checked, nor one beyond it. */
#include "support.h"

#include <stdbool.h>
#include <stdio.h>

/* Every call that takes a public struct. `at` replaces the struct under test. */
typedef struct calls {
    const skl_plan *plan;
    skl_problem problem;
    skl_inputs inputs;
    skl_rows rows;
    skl_gradients gradients;
    skl_attention attention;
    skl_stats stats;
} calls;

static skl_status plan_of_problem(const calls *c, const void *at)
{
    (void)c;
    skl_plan *plan = NULL;
    const skl_status status = skl_plan_create(&plan, at, NULL);
    skl_plan_destroy(plan);
    return status;
}

static skl_status needs_of_problem(const calls *c, const void *at)
{
    (void)c;
    return skl_problem_needs(at, SKL_OP_BACKWARD) != 0 ? SKL_OK : SKL_ERROR_ARGUMENT;
}

static skl_status plan_of_options(const calls *c, const void *at)
{
    skl_plan *plan = NULL;
    const skl_status status = skl_plan_create(&plan, &c->problem, at);
    skl_plan_destroy(plan);
    return status;
}

static skl_status check_inputs(const calls *c, const void *at)
{
    return skl_inputs_check(c->plan, at);
}

static skl_status explain_inputs(const calls *c, const void *at)
{
    return skl_plan_explain(c->plan, at, SKL_OP_FORWARD, NULL, 0) != 0 ? SKL_OK : SKL_ERROR_ARGUMENT;
}

static skl_status forward_inputs(const calls *c, const void *at)
{
    return skl_forward(c->plan, at, &c->rows, NULL, 0, NULL);
}

static skl_status forward_rows(const calls *c, const void *at)
{
    return skl_forward(c->plan, &c->inputs, at, NULL, 0, NULL);
}

static skl_status backward_inputs(const calls *c, const void *at)
{
    return skl_backward(c->plan, at, &c->gradients, NULL, 0, NULL);
}

static skl_status backward_gradients(const calls *c, const void *at)
{
    return skl_backward(c->plan, &c->inputs, at, NULL, 0, NULL);
}

static skl_status one_pass_inputs(const calls *c, const void *at)
{
    return skl_forward_backward(c->plan, at, &c->rows, &c->gradients, NULL, 0, NULL);
}

static skl_status one_pass_rows(const calls *c, const void *at)
{
    return skl_forward_backward(c->plan, &c->inputs, at, &c->gradients, NULL, 0, NULL);
}

static skl_status one_pass_gradients(const calls *c, const void *at)
{
    return skl_forward_backward(c->plan, &c->inputs, &c->rows, at, NULL, 0, NULL);
}

static skl_status attention_inputs(const calls *c, const void *at)
{
    return skl_attention_backward(c->plan, at, &c->attention, &c->rows, &c->gradients, NULL, 0, NULL);
}

static skl_status attention_attention(const calls *c, const void *at)
{
    return skl_attention_backward(c->plan, &c->inputs, at, &c->rows, &c->gradients, NULL, 0, NULL);
}

static skl_status attention_rows(const calls *c, const void *at)
{
    return skl_attention_backward(c->plan, &c->inputs, &c->attention, at, &c->gradients, NULL, 0, NULL);
}

static skl_status attention_gradients(const calls *c, const void *at)
{
    return skl_attention_backward(c->plan, &c->inputs, &c->attention, &c->rows, at, NULL, 0, NULL);
}

static skl_status attention_forward_inputs(const calls *c, const void *at)
{
    const skl_output o_s = {NULL, 0, 0, 0};
    return skl_attention_forward(c->plan, at, &c->attention.v_s, &c->rows, &o_s, NULL, 0, NULL);
}

static skl_status attention_forward_rows(const calls *c, const void *at)
{
    const skl_output o_s = {NULL, 0, 0, 0};
    return skl_attention_forward(c->plan, &c->inputs, &c->attention.v_s, at, &o_s, NULL, 0, NULL);
}

static skl_status stats_inputs(const calls *c, const void *at)
{
    return skl_attention_stats(c->plan, at, &c->stats, NULL, 0, NULL);
}

static skl_status stats_stats(const calls *c, const void *at)
{
    return skl_attention_stats(c->plan, &c->inputs, at, NULL, 0, NULL);
}

static skl_status partial_inputs(const calls *c, const void *at)
{
    static skl_row_state states[1];
    return skl_partial(c->plan, at, 0, 1, states, NULL, 0, NULL);
}

static skl_status finish_inputs(const calls *c, const void *at)
{
    return skl_states_finish(c->plan, at, NULL, &c->rows, NULL);
}

static skl_status finish_rows(const calls *c, const void *at)
{
    return skl_states_finish(c->plan, NULL, NULL, at, NULL);
}

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

typedef enum struct_index { PROBLEM, OPTIONS, INPUTS, ROWS, GRADIENTS, ATTENTION, STATS, STRUCT_COUNT } struct_index;

static const struct_type struct_types[STRUCT_COUNT] = {
    [PROBLEM] = EXTENDED("problem", skl_problem, row_bounds, pool_size),
    [OPTIONS] = EXTENDED("options", skl_options, gpu, cancel),
    [INPUTS] = EXTENDED("inputs", skl_inputs, key_begin, sink_s),
    [ROWS] = UNCHANGED("rows", skl_rows, mass),
    [GRADIENTS] = EXTENDED("gradients", skl_gradients, dsink_t, dsink_s),
    [ATTENTION] = UNCHANGED("attention", skl_attention, dv_s),
    [STATS] = UNCHANGED("stats", skl_stats, weights),
};

typedef struct struct_call {
    struct_index type;
    skl_status (*call)(const calls *c, const void *at);
} struct_call;

static const struct_call struct_calls[] = {
    {PROBLEM, plan_of_problem},
    {PROBLEM, needs_of_problem},
    {OPTIONS, plan_of_options},
    {INPUTS, check_inputs},
    {INPUTS, explain_inputs},
    {INPUTS, forward_inputs},
    {ROWS, forward_rows},
    {INPUTS, backward_inputs},
    {GRADIENTS, backward_gradients},
    {INPUTS, one_pass_inputs},
    {ROWS, one_pass_rows},
    {GRADIENTS, one_pass_gradients},
    {INPUTS, attention_inputs},
    {ATTENTION, attention_attention},
    {ROWS, attention_rows},
    {GRADIENTS, attention_gradients},
    {INPUTS, attention_forward_inputs},
    {ROWS, attention_forward_rows},
    {INPUTS, stats_inputs},
    {STATS, stats_stats},
    {INPUTS, partial_inputs},
    {INPUTS, finish_inputs},
    {ROWS, finish_rows},
};

/* No rows, so that calls need neither tensors nor results; no workspace is needed before the structs are checked. */
static void calls_create(calls *c, skl_plan **plan)
{
    *c = (calls){.problem = skl_problem_default(),
                 .inputs = {.struct_size = sizeof(skl_inputs)},
                 .rows = {.struct_size = sizeof(skl_rows)},
                 .gradients = {.struct_size = sizeof(skl_gradients)},
                 .attention = {.struct_size = sizeof(skl_attention)},
                 .stats = {.struct_size = sizeof(skl_stats)}};
    c->problem.gradients |= SKL_DV_S;
    c->problem.dim_t = c->problem.dim_s = 4;
    c->plan = *plan = test_plan(&c->problem, NULL, 1);
}

/* A struct of `size` bytes, with valid content as far as it goes, directly before an unmapped page. */
static test_memory place_struct(const calls *c, struct_index type, size_t size)
{
    const skl_options options = skl_options_default();
    const void *const contents[STRUCT_COUNT] = {&c->problem,   &options,      &c->inputs, &c->rows,
                                                &c->gradients, &c->attention, &c->stats};
    const test_memory memory = memory_create(size, sizeof(size_t));
    memset(memory.data, 0, size);
    memcpy(memory.data, contents[type], size < struct_types[type].size ? size : struct_types[type].size);
    memcpy(memory.data, &size, sizeof size);
    return memory;
}

/* A struct of `size` bytes is refused, with this message. Its bytes end before what a full struct would need. */
static void assert_size_refused(const calls *c, const struct_call *s, size_t size, size_t struct_size)
{
    const struct_type *const type = &struct_types[s->type];
    char message[128];
    snprintf(message, sizeof message, "%s.struct_size=%zu: must be the sizeof of the struct, %zu, or %zu..4096",
             type->name, struct_size, type->size, type->first_size);
    test_memory memory = place_struct(c, s->type, size);
    memcpy(memory.data, &struct_size, sizeof struct_size);
    assert_refused(s->call(c, memory.data), SKL_ERROR_ARGUMENT, message);
    memory_destroy(&memory);
}

/* The structs themselves are accepted: a run call fails at its workspace and not before. */
static bool is_accepted(skl_status status)
{
    return status == SKL_OK || (status == SKL_ERROR_WORKSPACE && strstr(skl_last_error(), "workspace=NULL"));
}

static void assert_accepted(const calls *c, const struct_call *s, size_t size)
{
    test_memory memory = place_struct(c, s->type, size);
    if (!is_accepted(s->call(c, memory.data)))
        fail_msg("%s.struct_size=%zu: %s", struct_types[s->type].name, size, skl_last_error());
    memory_destroy(&memory);
}

typedef void (*check_of_call)(const calls *c, const struct_call *s);

static void for_every_call(check_of_call check)
{
    calls c;
    skl_plan *plan;
    calls_create(&c, &plan);
    for (size_t n = 0; n < COUNT_OF(struct_calls); n++)
        check(&c, &struct_calls[n]);
    skl_plan_destroy(plan);
}

/* Structs of older programs: every size since the first release. */
static void check_shorter(const calls *c, const struct_call *s)
{
    const struct_type *const type = &struct_types[s->type];
    for (size_t size = sizeof(size_t); size < type->first_size; size += sizeof(size_t))
        assert_size_refused(c, s, size, size);
    assert_size_refused(c, s, sizeof(size_t), 0);
    for (size_t size = type->first_size + 1; size < type->size; size++)
        if (size % sizeof(void *) != 0) /* the last field would be half of a pointer */
            assert_size_refused(c, s, size, size);
    for (size_t size = type->first_size; size <= type->size; size += sizeof(size_t))
        assert_accepted(c, s, size);
}

static void test_shorter_structs_are_accepted_since_the_first_release(void **state)
{
    (void)state;
    for_every_call(check_shorter);
}

/* Structs of newer programs. */
static void check_longer(const calls *c, const struct_call *s)
{
    enum { STRUCT_SIZE_MAX = 4096 };
    const struct_type *const type = &struct_types[s->type];
    const size_t sizes[] = {type->size + 1, type->size + 8, STRUCT_SIZE_MAX};
    for (size_t k = 0; k < COUNT_OF(sizes); k++) {
        assert_accepted(c, s, sizes[k]);
        const size_t unknown[] = {type->size, sizes[k] - 1};
        for (size_t n = 0; n < COUNT_OF(unknown); n++) {
            test_memory memory = place_struct(c, s->type, sizes[k]);
            memory.data[unknown[n]] = 1;
            char message[96];
            snprintf(message, sizeof message, "%s.struct_size=%zu: byte %zu is not 0", type->name, sizes[k],
                     unknown[n]);
            assert_refused(s->call(c, memory.data), SKL_ERROR_ARGUMENT, message);
            memory_destroy(&memory);
        }
    }
    assert_size_refused(c, s, type->size, STRUCT_SIZE_MAX + 1);
    assert_size_refused(c, s, type->size, SIZE_MAX);
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
