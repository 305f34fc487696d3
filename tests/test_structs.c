/* struct_size: no byte of a struct is read before its size is checked, and none beyond that size. */
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

typedef struct struct_call {
    const char *name; /* of the argument, in messages */
    skl_status (*call)(const calls *c, const void *at);
    size_t size;
} struct_call;

static const struct_call struct_calls[] = {
    {"problem", plan_of_problem, sizeof(skl_problem)},
    {"problem", needs_of_problem, sizeof(skl_problem)},
    {"options", plan_of_options, sizeof(skl_options)},
    {"inputs", check_inputs, sizeof(skl_inputs)},
    {"inputs", explain_inputs, sizeof(skl_inputs)},
    {"inputs", forward_inputs, sizeof(skl_inputs)},
    {"rows", forward_rows, sizeof(skl_rows)},
    {"inputs", backward_inputs, sizeof(skl_inputs)},
    {"gradients", backward_gradients, sizeof(skl_gradients)},
    {"inputs", one_pass_inputs, sizeof(skl_inputs)},
    {"rows", one_pass_rows, sizeof(skl_rows)},
    {"gradients", one_pass_gradients, sizeof(skl_gradients)},
    {"inputs", attention_inputs, sizeof(skl_inputs)},
    {"attention", attention_attention, sizeof(skl_attention)},
    {"rows", attention_rows, sizeof(skl_rows)},
    {"gradients", attention_gradients, sizeof(skl_gradients)},
    {"inputs", partial_inputs, sizeof(skl_inputs)},
    {"inputs", finish_inputs, sizeof(skl_inputs)},
    {"rows", finish_rows, sizeof(skl_rows)},
};

/* No rows, so that calls need neither tensors nor results; no workspace is needed before the structs are checked. */
static void calls_create(calls *c, skl_plan **plan)
{
    *c = (calls){.problem = skl_problem_default(),
                 .inputs = {.struct_size = sizeof(skl_inputs)},
                 .rows = {.struct_size = sizeof(skl_rows)},
                 .gradients = {.struct_size = sizeof(skl_gradients)},
                 .attention = {.struct_size = sizeof(skl_attention)}};
    c->problem.gradients |= SKL_DV_S;
    c->problem.dim_t = c->problem.dim_s = 4;
    c->plan = *plan = test_plan(&c->problem, NULL, 1);
}

/* A struct of `size` bytes, with valid content as far as it goes, directly before an unmapped page. */
static test_memory place_struct(const calls *c, const struct_call *s, size_t size)
{
    const skl_options options = skl_options_default();
    const void *const content = strcmp(s->name, "problem") == 0     ? (const void *)&c->problem
                                : strcmp(s->name, "options") == 0   ? (const void *)&options
                                : strcmp(s->name, "inputs") == 0    ? (const void *)&c->inputs
                                : strcmp(s->name, "rows") == 0      ? (const void *)&c->rows
                                : strcmp(s->name, "attention") == 0 ? (const void *)&c->attention
                                                                    : (const void *)&c->gradients;
    const test_memory memory = memory_create(size, sizeof(size_t));
    memset(memory.data, 0, size);
    memcpy(memory.data, content, size < s->size ? size : s->size);
    memcpy(memory.data, &size, sizeof size);
    return memory;
}

static void test_short_structs_are_refused_unread(void **state)
{
    (void)state;
    calls c;
    skl_plan *plan;
    calls_create(&c, &plan);
    for (size_t n = 0; n < COUNT_OF(struct_calls); n++)
        for (size_t size = sizeof(size_t); size < struct_calls[n].size; size += 8) {
            char message[96];
            snprintf(message, sizeof message, "%s.struct_size=%zu: must be %zu", struct_calls[n].name, size,
                     struct_calls[n].size);
            test_memory memory = place_struct(&c, &struct_calls[n], size);
            assert_refused(struct_calls[n].call(&c, memory.data), SKL_ERROR_ARGUMENT, message);
            memory_destroy(&memory);
        }
    skl_plan_destroy(plan);
}

/* The structs themselves are accepted: a run call fails at its workspace and not before. */
static bool is_accepted(skl_status status)
{
    return status == SKL_OK || (status == SKL_ERROR_WORKSPACE && strstr(skl_last_error(), "workspace=NULL"));
}

static void test_longer_structs_must_end_in_zeros(void **state)
{
    (void)state;
    enum { STRUCT_SIZE_MAX = 4096 };
    calls c;
    skl_plan *plan;
    calls_create(&c, &plan);
    for (size_t n = 0; n < COUNT_OF(struct_calls); n++) {
        const struct_call *const s = &struct_calls[n];
        const size_t sizes[] = {s->size, s->size + 1, s->size + 8, STRUCT_SIZE_MAX};
        for (size_t k = 0; k < COUNT_OF(sizes); k++) {
            test_memory memory = place_struct(&c, s, sizes[k]);
            assert_true(is_accepted(s->call(&c, memory.data)));
            if (sizes[k] > s->size) {
                memory.data[sizes[k] - 1] = 1;
                char message[96];
                snprintf(message, sizeof message, "%s.struct_size=%zu: byte %zu is not 0", s->name, sizes[k],
                         sizes[k] - 1);
                assert_refused(s->call(&c, memory.data), SKL_ERROR_ARGUMENT, message);
            }
            memory_destroy(&memory);
        }
        const size_t garbage[] = {STRUCT_SIZE_MAX + 1, SIZE_MAX};
        for (size_t k = 0; k < COUNT_OF(garbage); k++) {
            test_memory memory = place_struct(&c, s, s->size);
            memcpy(memory.data, &garbage[k], sizeof garbage[k]);
            assert_refused(s->call(&c, memory.data), SKL_ERROR_ARGUMENT, "or up to 4096 if the rest is 0");
            memory_destroy(&memory);
        }
    }
    skl_plan_destroy(plan);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_short_structs_are_refused_unread),
        cmocka_unit_test(test_longer_structs_must_end_in_zeros),
    };
    return test_run("structs", tests, COUNT_OF(tests));
}
