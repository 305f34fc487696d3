/* skl_plan_explain and skl_plan_supports: passes on the CPU, reasons, buffer sizes, invalid arguments, and GPUs that
 * are not here. */
#define _POSIX_C_SOURCE 200809L /* setenv */
#include "support.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "case_words.h"
#include "cases.h"

enum { TEXT_SIZE = 2048 };

/* The kernel that every CPU can run. */
#if defined(__aarch64__)
#define PORTABLE "cpu_neon"
#else
#define PORTABLE "cpu_portable"
#endif

/* ---- Passes and reasons ------------------------------------------------------------------------------------- */

/* Gradients that a case leaves out. */
#define WITHOUT(bits)     .without = bits
#define TEACHER_GRADIENTS (SKL_DQ_T | SKL_DK_T)
#define STUDENT_GRADIENTS (SKL_DQ_S | SKL_DK_S)

/* 400 x 400 logits are several tiles for every kernel. */
#define MEDIUM SHAPE(1, 400, 400), HEADS(2, 2), DIMS(8, 8)
static const test_case student_f32 = {"student_f32", MEDIUM, WITHOUT(TEACHER_GRADIENTS)};
static const test_case student_bf16 = {"student_bf16", MEDIUM, TYPES(BF16, BF16), WITHOUT(TEACHER_GRADIENTS)};
static const test_case student_grad_f32 = {"student_grad_f32", MEDIUM, TYPES(BF16, BF16), .grad_f32 = 1,
                                           WITHOUT(TEACHER_GRADIENTS)};
static const test_case only_dq = {"only_dq", MEDIUM, WITHOUT(TEACHER_GRADIENTS | SKL_DK_S)};
static const test_case only_dk = {"only_dk",  SHAPE(1, 400, 8193), HEADS(2, 2),
                                  DIMS(8, 8), TYPES(BF16, BF16),   WITHOUT(TEACHER_GRADIENTS | SKL_DQ_S)};
static const test_case both_sides = {"both_sides", MEDIUM};
static const test_case both_sides_bf16 = {"both_sides_bf16", MEDIUM, TYPES(BF16, BF16)};
static const test_case groups_bf16 = {"groups_bf16", SHAPE(1, 400, 400), HEADS(4, 2), DIMS(8, 8), TYPES(BF16, BF16)};
static const test_case reverse = {"reverse", MEDIUM, REVERSE, WITHOUT(TEACHER_GRADIENTS)};
static const test_case groups = {"groups", SHAPE(1, 400, 400), HEADS(4, 2), DIMS(8, 8), WITHOUT(STUDENT_GRADIENTS)};
static const test_case attention_f32 = {"attention_f32", MEDIUM, ATTENTION};
static const test_case attention_bf16 = {"attention_bf16", MEDIUM, TYPES(BF16, BF16), ATTENTION};
static const test_case none = {"none", MEDIUM, WITHOUT(ALL_GRADIENTS)};
static const test_case one_row = {"one_row", SHAPE(1, 1, 3), HEADS(1, 1), DIMS(4, 4)};
static const test_case empty = {"empty", SHAPE(0, 4, 4), HEADS(1, 1), DIMS(4, 4)};
static const test_case dense = {"dense", MEDIUM, INDEXER(2)};
static const test_case sparse = {"sparse", MEDIUM, INDEXER(2), TOP_K(16)};
static const test_case pooled = {"pooled", MEDIUM, INDEXER(2), TOP_K(16), POOL(MAX, MEAN, COMPLETE, 5)};
static const test_case sparse_bf16 = {"sparse_bf16", MEDIUM, INDEXER(2), TOP_K(16), TYPES(BF16, BF16)};
static const test_case packed = {"packed", PACKED(2, LENGTHS(0, 3, 7), LENGTHS(0, 2, 7)), HEADS(2, 2), DIMS(4, 4)};

#define FORWARD  SKL_OP_FORWARD
#define BACKWARD SKL_OP_BACKWARD
#define ONE_PASS SKL_OP_FORWARD_BACKWARD
#define PARTIAL  SKL_OP_PARTIAL
#define CARRIED  SKL_OP_ATTENTION_BACKWARD

/* Lines in order, without the workspace; "|" divides them. NAMED stands for the reason of a forced kernel. */
#define NAMED "options.kernel names the kernel"

typedef struct explain_rule {
    skl_op op;
    const test_case *test_case;
    const char *lines;
} explain_rule;

static const explain_rule explain_rules[] = {
    {FORWARD, &student_f32, "forward: " PORTABLE ", 2 threads (" NAMED ")"},
    {FORWARD, &one_row, "forward: " PORTABLE ", 1 thread (" NAMED ")"},
    {PARTIAL, &groups, "partial states: " PORTABLE ", 2 threads (" NAMED ")"},
    {FORWARD, &packed, "forward: " PORTABLE ", 2 threads (" NAMED ")"},

    {BACKWARD, &student_f32,
     "dq_s and dk_s: " PORTABLE ", fused, 2 threads (" NAMED "; f32 key gradients are summed in place)"},
    {BACKWARD, &student_grad_f32,
     "dq_s and dk_s: " PORTABLE ", fused, 2 threads (" NAMED "; f32 key gradients are summed in place)"},
    {BACKWARD, &both_sides,
     "dq_t, dk_t, dq_s and dk_s: " PORTABLE ", fused, 2 threads (" NAMED "; f32 key gradients are summed in place)"},
    {BACKWARD, &student_bf16,
     "dq_s and dk_s: " PORTABLE ", fused, 2 threads (" NAMED "; key gradients are summed in f32)"},
    {BACKWARD, &both_sides_bf16,
     "dq_t, dk_t, dq_s and dk_s: " PORTABLE ", fused, 2 threads (" NAMED "; key gradients are summed in f32)"},
    {BACKWARD, &groups_bf16,
     "dq_t, dk_t, dq_s and dk_s: " PORTABLE ", fused, 2 threads (" NAMED "; key gradients are summed in f32)"},
    {BACKWARD, &only_dq, "dq_s: " PORTABLE ", 2 threads (" NAMED "; no key gradient is requested)"},
    {BACKWARD, &dense,
     "dq_s, dk_s and dw_s: " PORTABLE ", fused, 2 threads (" NAMED "; f32 key gradients are summed in place)"},
    {BACKWARD, &sparse,
     "dq_s and dw_s: " PORTABLE ", 2 threads (" NAMED "; key gradients follow)|"
     "dk_s: " PORTABLE ", 2 threads (indices come in any order, so key gradients are summed key by key)"},
    {CARRIED, &attention_f32,
     "KL, dq_s, dk_s and dv_s: " PORTABLE ", fused, one-pass, 2 threads (" NAMED
     "; both LSEs are given, and f32 key gradients are summed in place)"},
    {CARRIED, &attention_bf16,
     "KL, dq_s, dk_s and dv_s: " PORTABLE ", fused, one-pass, 2 threads (" NAMED
     "; both LSEs are given, and key gradients are summed in f32)"},
    {BACKWARD, &none, "nothing to launch (no row, no key or no gradient)"},
    {FORWARD, &empty, "nothing to launch (no row, no key or no gradient)"},

    {ONE_PASS, &student_f32,
     "KL, dq_s and dk_s: " PORTABLE ", fused, one-pass, 2 threads (" NAMED
     "; both LSEs are given, and f32 key gradients are summed in place)"},
    {ONE_PASS, &student_bf16,
     "KL, dq_s and dk_s: " PORTABLE ", fused, one-pass, 2 threads (" NAMED
     "; both LSEs are given, and key gradients are summed in f32)"},
    {ONE_PASS, &only_dq,
     "KL and dq_s: " PORTABLE ", one-pass, 2 threads (" NAMED "; both LSEs are given, so P and S are exact at once)"},
    {ONE_PASS, &only_dk,
     "KL and dk_s: " PORTABLE ", fused, one-pass, 2 threads (" NAMED
     "; both LSEs are given, and key gradients are summed in f32)"},
    {ONE_PASS, &both_sides,
     "forward: " PORTABLE ", 2 threads (" NAMED "; gradients of the first argument of the KL read the KL of their "
     "row)|dq_t, dk_t, dq_s and dk_s: " PORTABLE ", fused, 2 threads (f32 key gradients are summed in place)"},
    {ONE_PASS, &reverse,
     "forward: " PORTABLE ", 2 threads (" NAMED "; gradients of the first argument of the KL read the KL of their "
     "row)|dq_s and dk_s: " PORTABLE ", fused, 2 threads (f32 key gradients are summed in place)"},
    {ONE_PASS, &groups,
     "forward: " PORTABLE ", 2 threads (" NAMED "; teacher gradients under teacher groups read dot_t)|"
     "dq_t and dk_t: " PORTABLE ", fused, 2 threads (f32 key gradients are summed in place)"},
    {ONE_PASS, &none, "forward: " PORTABLE ", 2 threads (" NAMED "; no pass over the queries follows)"},
};

/* Takes ", N bytes of workspace" out of a text, after comparing N with the plan's. */
static void cut_workspace(char *text, const skl_plan *plan, skl_op op)
{
    char expected[64];
    snprintf(expected, sizeof expected, ", %zu bytes of workspace", skl_plan_workspace_size(plan, op));
    for (char *at = strstr(text, expected); at != NULL; at = strstr(text, expected))
        memmove(at, at + strlen(expected), strlen(at + strlen(expected)) + 1);
    assert_null(strstr(text, "bytes of workspace"));
}

/* Every expected line begins the actual one; there are no others. */
static void assert_lines(const char *text, const char *expected)
{
    const char *line = text;
    for (const char *wanted = expected; wanted != NULL;) {
        const char *const divider = strchr(wanted, '|');
        const size_t length = divider != NULL ? (size_t)(divider - wanted) : strlen(wanted);
        if (strncmp(line, wanted, length) != 0)
            fail_msg("%s\n    should have the line\n%.*s", text, (int)length, wanted);
        line = strchr(line, '\n');
        assert_non_null(line);
        line++;
        wanted = divider != NULL ? divider + 1 : NULL;
    }
    assert_string_equal(line, "");
}

static void test_explain_passes(void **state)
{
    (void)state;
    for (size_t n = 0; n < COUNT_OF(explain_rules); n++) {
        const explain_rule *const rule = &explain_rules[n];
        const skl_problem problem = case_problem(rule->test_case);
        skl_plan *const plan = test_plan(&problem, PORTABLE, 2);
        char text[TEXT_SIZE];
        assert_in_range(skl_plan_explain(plan, NULL, rule->op, text, sizeof text), 1, TEXT_SIZE - 1);
        cut_workspace(text, plan, rule->op);
        assert_lines(text, rule->lines);
        skl_plan_destroy(plan);
    }
}

/* The kernel that a plan chooses for a case. */
static skl_kernel_info chosen_kernel(const test_case *c)
{
    const skl_problem problem = case_problem(c);
    skl_plan *const plan = test_plan(&problem, NULL, 2);
    skl_kernel_info info = {.struct_size = sizeof info};
    int32_t index = 0;
    while (skl_kernel_at(index, &info) && strcmp(info.name, skl_plan_kernel(plan)) != 0)
        index++;
    skl_plan_destroy(plan);
    return info;
}

/* Matrix units multiply bf16. Other types would gain nothing, and sparse indexers do not use them. */
static void test_only_bf16_is_multiplied_on_a_matrix_unit(void **state)
{
    (void)state;
    skl_kernel_info info = {.struct_size = sizeof info};
    int32_t index = 0;
    while (skl_kernel_at(index, &info) && (info.device != SKL_CPU || !info.usable))
        index++;
    assert_string_equal(chosen_kernel(&student_bf16).name, info.name);
    assert_false(chosen_kernel(&student_f32).rounds_gradients);
    assert_false(chosen_kernel(&sparse_bf16).rounds_gradients);
}

static void test_explain_who_chose_the_kernel(void **state)
{
    (void)state;
    const skl_problem problem = case_problem(&student_f32);
    char text[TEXT_SIZE];
    assert_int_equal(unsetenv("STREAMKL_KERNEL"), 0);
    skl_plan *plan = test_plan(&problem, NULL, 2);
    assert_true(skl_plan_explain(plan, NULL, SKL_OP_FORWARD, text, sizeof text) > 0);
    assert_non_null(strstr(text, "(best kernel for this CPU)"));
    assert_non_null(strstr(text, skl_plan_kernel(plan)));
    skl_plan_destroy(plan);

    assert_int_equal(setenv("STREAMKL_KERNEL", PORTABLE, 1), 0);
    plan = test_plan(&problem, NULL, 2);
    assert_int_equal(unsetenv("STREAMKL_KERNEL"), 0);
    assert_true(skl_plan_explain(plan, NULL, SKL_OP_FORWARD, text, sizeof text) > 0);
    assert_non_null(strstr(text, "forward: " PORTABLE));
    assert_non_null(strstr(text, "(STREAMKL_KERNEL names the kernel)"));
    skl_plan_destroy(plan);
}

/* ---- Buffers and arguments ---------------------------------------------------------------------------------- */

static void test_explain_fills_a_buffer_as_snprintf_does(void **state)
{
    (void)state;
    const skl_problem problem = case_problem(&both_sides_bf16);
    skl_plan *const plan = test_plan(&problem, NULL, 2);
    char whole[TEXT_SIZE];
    const size_t length = skl_plan_explain(plan, NULL, SKL_OP_FORWARD_BACKWARD, whole, sizeof whole);
    assert_int_equal(length, strlen(whole));
    assert_int_equal(skl_plan_explain(plan, NULL, SKL_OP_FORWARD_BACKWARD, NULL, 0), length);
    for (size_t size = 1; size <= length + 1; size++) {
        test_memory memory = memory_create(size, 1); /* one byte more is not mapped */
        char *const buffer = (char *)memory.data;
        assert_int_equal(skl_plan_explain(plan, NULL, SKL_OP_FORWARD_BACKWARD, buffer, size), length);
        assert_int_equal(strlen(buffer), size - 1);
        assert_memory_equal(buffer, whole, size - 1);
        memory_destroy(&memory);
    }
    skl_plan_destroy(plan);
}

/* skl_plan_supports gives the same answer where it reads the same arguments. */
static void assert_unexplained(const skl_plan *plan, const skl_inputs *inputs, int op, const char *message)
{
    char text[TEXT_SIZE] = "old";
    if (inputs == NULL) {
        assert_int_equal(skl_plan_supports(plan, (skl_op)op), 0);
        assert_non_null(strstr(skl_last_error(), message));
    }
    assert_int_equal(skl_plan_explain(plan, inputs, (skl_op)op, text, sizeof text), 0);
    assert_string_equal(text, "");
    assert_non_null(strstr(skl_last_error(), message));
}

/* An address that may not be read. */
static const void *const unread = (const void *)(uintptr_t)64;

static skl_inputs unread_inputs(const skl_problem *p)
{
    skl_inputs in = {.struct_size = sizeof in};
    in.q_t = skl_input_contiguous(unread, p->heads_t, p->len_q, p->dim_t);
    in.k_t = skl_input_contiguous(unread, p->heads_t, p->len_k, p->dim_t);
    in.q_s = skl_input_contiguous(unread, p->heads_s, p->len_q, p->dim_s);
    in.k_s = skl_input_contiguous(unread, p->heads_s, p->len_k, p->dim_s);
    if (p->packed)
        in.cu_seqlens_q = in.cu_seqlens_k = unread;
    return in;
}

static void test_bad_arguments_are_refused(void **state)
{
    (void)state;
    const skl_problem problem = case_problem(&student_f32);
    skl_plan *const plan = test_plan(&problem, NULL, 2);
    assert_unexplained(NULL, NULL, SKL_OP_FORWARD, "plan=NULL: must be given");
    assert_unexplained(plan, NULL, 7, "op=7: must be 0..6");
    assert_unexplained(plan, NULL, -1, "op=-1: must be 0..6");
    assert_int_equal(skl_plan_explain(plan, NULL, SKL_OP_FORWARD, NULL, 7), 0);
    assert_string_equal(skl_last_error(), "buffer=NULL: must be given unless size=0");
    skl_inputs inputs = unread_inputs(&problem);
    inputs.struct_size = 8;
    assert_unexplained(plan, &inputs, SKL_OP_FORWARD, "inputs.struct_size=8: must be ");
    inputs = unread_inputs(&problem);
    inputs.k_s.data = NULL;
    assert_unexplained(plan, &inputs, SKL_OP_BACKWARD, "k_s=NULL: must be given");
    inputs = unread_inputs(&problem);
    inputs.q_t.stride_row = -1;
    assert_unexplained(plan, NULL, SKL_OP_ATTENTION_BACKWARD, "skl_attention_backward needs a plan whose");
    assert_unexplained(plan, &inputs, SKL_OP_PARTIAL, "q_t.stride_row=-1: must be at least 0");
    skl_plan_destroy(plan);
}

/* No tensor is read, and row vectors that an operation needs may be missing. */
static void test_explain_reads_no_tensor(void **state)
{
    (void)state;
    const test_case *const cases[] = {&student_f32, &groups, &packed};
    for (size_t n = 0; n < COUNT_OF(cases); n++) {
        const skl_problem problem = case_problem(cases[n]);
        skl_plan *const plan = test_plan(&problem, NULL, 2);
        skl_inputs inputs = unread_inputs(&problem);
        if (problem.heads_t > problem.heads_s)
            inputs.dot_t = skl_input_contiguous(unread, problem.heads_t, problem.len_q, 1);
        for (int op = SKL_OP_FORWARD; op <= SKL_OP_PARTIAL; op++) {
            char given[TEXT_SIZE], assumed[TEXT_SIZE];
            assert_true(skl_plan_explain(plan, &inputs, (skl_op)op, given, sizeof given) > 0);
            assert_true(skl_plan_explain(plan, NULL, (skl_op)op, assumed, sizeof assumed) > 0);
            assert_string_equal(given, assumed);
        }
        skl_plan_destroy(plan);
    }
}

/* Tensors that fit into no machine: their strides overflow. */
static void test_explain_huge_problem(void **state)
{
    (void)state;
    skl_problem problem = skl_problem_default();
    problem.len_q = problem.len_k = (int64_t)1 << 40;
    problem.dim_t = problem.dim_s = 512;
    problem.heads_t = problem.heads_s = 1 << 16;
    skl_plan *const plan = test_plan(&problem, PORTABLE, 2);
    char text[TEXT_SIZE];
    assert_true(skl_plan_explain(plan, NULL, SKL_OP_BACKWARD, text, sizeof text) > 0);
    assert_non_null(strstr(text, "f32 key gradients are summed in place)"));
    skl_plan_destroy(plan);
}

/* ---- Support ------------------------------------------------------------------------------------------------- */

/* The CPU has every operation of every problem, except that a plan has the attention backward only if it was made for
 * it, and partial states only without a pooled teacher. */
static void test_a_plan_says_what_it_supports(void **state)
{
    (void)state;
    const test_case *const cases[] = {&student_f32, &attention_bf16, &groups, &sparse,
                                      &pooled,      &packed,         &empty,  &none};
    for (size_t n = 0; n < COUNT_OF(cases); n++) {
        const skl_problem problem = case_problem(cases[n]);
        skl_plan *const plan = test_plan(&problem, NULL, 2);
        for (int op = SKL_OP_FORWARD; op <= SKL_OP_ATTENTION_BACKWARD; op++) {
            const int explained = skl_plan_explain(plan, NULL, (skl_op)op, NULL, 0) > 0;
            assert_int_equal(skl_plan_supports(plan, (skl_op)op), explained);
        }
        assert_int_equal(skl_plan_supports(plan, SKL_OP_FORWARD), 1);
        assert_int_equal(skl_plan_supports(plan, SKL_OP_BACKWARD), 1);
        assert_int_equal(skl_plan_supports(plan, SKL_OP_FORWARD_BACKWARD), 1);
        assert_int_equal(skl_plan_supports(plan, SKL_OP_PARTIAL), cases[n]->pool == SKL_POOL_NONE);
        assert_int_equal(skl_plan_supports(plan, SKL_OP_ATTENTION_BACKWARD), cases[n]->attention);
        skl_plan_destroy(plan);
    }
}

/* ---- GPUs that are not here ---------------------------------------------------------------------------------- */

static skl_status create_for_gpu(skl_plan **plan, const test_case *c, const char *gpu)
{
    const skl_problem problem = case_problem(c);
    skl_options options = skl_options_default();
    options.device = SKL_CUDA;
    options.gpu = gpu;
    return skl_plan_create(plan, &problem, &options);
}

static void skip_without_gpu_kernels(void)
{
    if (strstr(skl_build_info(), "CUDA") == NULL)
        skip();
}

static void test_explain_for_a_gpu_that_is_not_here(void **state)
{
    (void)state;
    skip_without_gpu_kernels();
    const char *const gpus[] = {"a100", "b200", "h100", "h200", "l40s", "rtx5090"};
    for (size_t n = 0; n < COUNT_OF(gpus); n++) {
        skl_plan *plan = NULL;
        char text[TEXT_SIZE];
        assert_ok(create_for_gpu(&plan, &attention_bf16, gpus[n]));
        assert_in_range(skl_plan_explain(plan, NULL, SKL_OP_FORWARD, text, sizeof text), 1, TEXT_SIZE - 1);
        assert_non_null(strstr(text, "forward: cuda_sm"));
        assert_int_equal(skl_plan_supports(plan, SKL_OP_ATTENTION_BACKWARD), gpus[n][0] == 'h');
        if (gpus[n][0] != 'h')
            assert_string_equal(skl_last_error(),
                                "skl_attention_backward on a GPU: no kernel carries the KL here (a GPU "
                                "other than Hopper); call skl_forward_backward and the backward of "
                                "your attention, and add their gradients");
        skl_plan_destroy(plan);
    }
}

static void test_unknown_gpus_are_refused(void **state)
{
    (void)state;
    skl_plan *plan = NULL;
    const skl_problem problem = case_problem(&student_f32);
    skl_options of_cpu = skl_options_default();
    of_cpu.gpu = "h100";
    assert_refused(skl_plan_create(&plan, &problem, &of_cpu), SKL_ERROR_ARGUMENT,
                   "options.gpu=h100: needs options.device=SKL_CUDA");
    if (strstr(skl_build_info(), "CUDA") == NULL) {
        assert_refused(create_for_gpu(&plan, &student_f32, "h100"), SKL_ERROR_UNSUPPORTED,
                       "this build has no backend");
        skip();
    }
    const char *const unknown[] = {"", "H100", "h1000", "h10"};
    for (size_t n = 0; n < COUNT_OF(unknown); n++) {
        char message[128];
        snprintf(message, sizeof message, "options.gpu=%s: must be a100, b200, h100, h200, l40s or rtx5090",
                 unknown[n]);
        assert_refused(create_for_gpu(&plan, &student_f32, unknown[n]), SKL_ERROR_ARGUMENT, message);
        assert_null(plan);
    }
}

/* A plan for a named GPU runs nothing, even where there is such a GPU. */
static void test_plans_for_named_gpus_run_nothing(void **state)
{
    (void)state;
    skip_without_gpu_kernels();
    const skl_problem problem = case_problem(&both_sides_bf16);
    const int64_t heads = problem.heads_s, len_q = problem.len_q, len_k = problem.len_k, dim = problem.dim_s;
    skl_plan *plan = NULL;
    assert_ok(create_for_gpu(&plan, &both_sides_bf16, "h100"));
    test_memory memory = memory_create((size_t)(1 << 20) + skl_plan_workspace_size(plan, SKL_OP_BACKWARD), 64);
    char *const bytes = (char *)memory.data;
    skl_inputs inputs = unread_inputs(&problem);
    inputs.lse_t = inputs.lse_s = inputs.kl = skl_input_contiguous(unread, heads, len_q, 1);
    skl_rows rows = {.struct_size = sizeof rows, .kl = skl_output_contiguous(bytes, heads, len_q, 1)};
    const skl_gradients gradients = {.struct_size = sizeof gradients,
                                     .dq_s = skl_output_contiguous(bytes + (1 << 16), heads, len_q, dim),
                                     .dk_s = skl_output_contiguous(bytes + (1 << 17), heads, len_k, dim)};
    skl_row_state *const states = (skl_row_state *)(void *)(bytes + (1 << 18));
    void *const workspace = bytes + (1 << 20);
    const size_t size = memory.size - (1 << 20);
    const char *const message = "options.gpu=h100: such a plan explains its launches and runs none";
    assert_refused(skl_forward(plan, &inputs, &rows, workspace, size, NULL), SKL_ERROR_UNSUPPORTED, message);
    assert_refused(skl_backward(plan, &inputs, &gradients, workspace, size, NULL), SKL_ERROR_UNSUPPORTED, message);
    assert_refused(skl_partial(plan, &inputs, 0, len_k, states, workspace, size, NULL), SKL_ERROR_UNSUPPORTED,
                   message);
    assert_refused(skl_states_merge(plan, states, states + heads * len_q, NULL), SKL_ERROR_UNSUPPORTED, message);
    assert_refused(skl_states_finish(plan, &inputs, states, &rows, NULL), SKL_ERROR_UNSUPPORTED, message);
    memory_destroy(&memory);
    skl_plan_destroy(plan);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_explain_passes),
        cmocka_unit_test(test_only_bf16_is_multiplied_on_a_matrix_unit),
        cmocka_unit_test(test_explain_who_chose_the_kernel),
        cmocka_unit_test(test_explain_fills_a_buffer_as_snprintf_does),
        cmocka_unit_test(test_bad_arguments_are_refused),
        cmocka_unit_test(test_explain_reads_no_tensor),
        cmocka_unit_test(test_explain_huge_problem),
        cmocka_unit_test(test_a_plan_says_what_it_supports),
        cmocka_unit_test(test_explain_for_a_gpu_that_is_not_here),
        cmocka_unit_test(test_unknown_gpus_are_refused),
        cmocka_unit_test(test_plans_for_named_gpus_run_nothing),
    };
    return test_run("explain", tests, COUNT_OF(tests));
}
