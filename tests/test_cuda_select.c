/* The kernels that run are those that skl_plan_explain names: for every case of the table, every kernel and every
 * operation, with the tensors' real strides and addresses. Run by ./test gpu. */
#include <stdbool.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "case_words.h"
#include "base/problem.h"
#include "cuda/backend.h"
#include "cuda/common/tensor_map.h"
#include "cuda/launch.h"
#include "device.h"
#include "runner.h"

/* "kernel, variant, 2 splits" per line, equal neighbors once: chunks of an indexer's rows repeat a launch. */
typedef struct launch_log {
    char text[4096];
    char last[256];
} launch_log;

static launch_log recorded;

static void log_add(launch_log *log, const char *line)
{
    if (strcmp(log->last, line) == 0)
        return;
    assert_true(strlen(log->text) + strlen(line) + 2 < sizeof log->text);
    snprintf(log->last, sizeof log->last, "%s", line);
    strcat(strcat(log->text, line), "\n");
}

static void record(const char *kernel, const char *variant, int32_t num_splits)
{
    char line[256];
    snprintf(line, sizeof line, "%s, %s, %d split%s", kernel, variant, (int)num_splits, num_splits == 1 ? "" : "s");
    log_add(&recorded, line);
}

/* Of "step: kernel, variant, 2 splits, 0 bytes of workspace (reason)" the part in the middle. */
static launch_log explained(const skl_plan *plan, const skl_inputs *inputs, skl_op op)
{
    static char text[8192];
    launch_log log = {.text = ""};
    assert_true(skl_plan_explain(plan, inputs, op, text, sizeof text) < sizeof text);
    if (strncmp(text, "nothing to launch", strlen("nothing to launch")) == 0)
        return log;
    for (char *line = strtok(text, "\n"); line != NULL; line = strtok(NULL, "\n")) {
        char *const first = strstr(line, ": "), *const splits = strstr(line, " split");
        assert_non_null(first);
        assert_non_null(splits);
        splits[splits[6] == 's' ? 7 : 6] = '\0';
        log_add(&log, first + 2);
    }
    return log;
}

static void assert_ran(const test_case *c, const skl_plan *plan, const skl_inputs *inputs, skl_op op)
{
    static const char *const names[] = {"forward", "backward", "forward_backward", "partial", "attention_backward"};
    const launch_log expected = explained(plan, inputs, op);
    if (strcmp(expected.text, recorded.text) != 0)
        fail_msg("%s: %s: %s\nexplained:\n%sran:\n%s", c->name, skl_plan_kernel(plan), names[op], expected.text,
                 recorded.text);
}

static void check_plan(const fixture *f, const skl_plan *plan, const fixture_results *results)
{
    const test_case *const c = f->test_case;
    const skl_rows rows = results_rows(results);
    const skl_gradients gradients = results_gradients(results);

    recorded = (launch_log){.text = ""};
    run_forward(plan, &f->inputs, &rows);
    assert_ran(c, plan, &f->inputs, SKL_OP_FORWARD);

    const skl_inputs saved = results_backward_inputs(f, results);
    recorded = (launch_log){.text = ""};
    run_backward(plan, &saved, &gradients);
    assert_ran(c, plan, &saved, SKL_OP_BACKWARD);

    if (c->lse != LSE_WIDER) { /* one pass has no teacher gradients under wider LSEs */
        const skl_inputs known = results_one_pass_inputs(f, results);
        const skl_rows wanted_rows = results_one_pass_rows(f, results);
        recorded = (launch_log){.text = ""};
        run_forward_backward(plan, &known, &wanted_rows, &gradients);
        assert_ran(c, plan, &known, SKL_OP_FORWARD_BACKWARD);
    }

    if (c->attention) {
        skl_inputs known = f->inputs;
        known.lse_t = saved.lse_t;
        known.lse_s = saved.lse_s;
        const skl_rows only_kl = {.struct_size = sizeof only_kl, .kl = rows.kl};
        const skl_attention attention = results_attention(f, results);
        recorded = (launch_log){.text = ""};
        if (run_attention_backward(plan, &known, &attention, &only_kl, &gradients))
            assert_ran(c, plan, &known, SKL_OP_ATTENTION_BACKWARD);
        else
            assert_string_equal(recorded.text, ""); /* nothing is launched before a refusal */
    }

    if (!skl_plan_supports(plan, SKL_OP_PARTIAL))
        return; /* a pooled teacher */
    skl_inputs partial = f->inputs;
    if (c->lse == LSE_COMPUTED)
        partial.lse_t = saved.lse_t;
    skl_row_state *const states = states_create(f);
    recorded = (launch_log){.text = ""};
    run_partial(plan, &partial, 0, f->problem.len_k, states);
    assert_ran(c, plan, &partial, SKL_OP_PARTIAL);
    states_destroy(states);
}

static void check_case(const test_case *c)
{
    fixture f;
    fixture_create(&f, c);
    fixture_results results = results_create(&f);
    for (int32_t k = 0; case_kernel(c, k); k++)
        for (int32_t kind = 0; kind < test_plan_kinds(); kind++) {
            skl_plan *const plan = test_plan_of_kind(&f.problem, case_kernel(c, k), kind);
            results_poison(&results);
            check_plan(&f, plan, &results);
            skl_plan_destroy(plan);
        }
    results_destroy(&results);
    fixture_destroy(&f);
}

static void test_every_case_runs_the_kernels_that_are_explained(void **state)
{
    (void)state;
    for (size_t n = 0; n < test_case_count; n++)
        check_case(&test_cases[n]);
}

/* ---- Layouts ------------------------------------------------------------------------------------------------ */

static void test_strides_and_addresses_that_copies_cannot_read(void **state)
{
    (void)state;
    test_case c = {"aligned", SHAPE(2, 96, 96), HEADS(2, 2), DIMS(64, 64), TYPES(BF16, BF16)};
    check_case(&c);
    c.layout = LAYOUT_GAPS;
    check_case(&c);
    c.layout = LAYOUT_MISALIGNED;
    check_case(&c);
}

/* Kernels with tensor cores store pairs of a gradient: rows that begin at an odd element are for the general one. */
static void test_gradient_rows_at_odd_elements(void **state)
{
    (void)state;
    const test_layout layouts[ROLE_COUNT] = {[ROLE_RESULTS] = LAYOUT_GAPS};
    const test_case even = {"even", SHAPE(2, 96, 96), HEADS(2, 2), DIMS(64, 64), TYPES(BF16, BF16)};
    test_case odd = even;
    odd.name = "odd";
    odd.layouts = layouts;
    for (int is_odd = 0; is_odd < 2; is_odd++) {
        fixture f;
        fixture_create(&f, is_odd ? &odd : &even);
        fixture_results results = results_create(&f);
        const skl_rows rows = results_rows(&results);
        const skl_gradients gradients = results_gradients(&results);
        skl_plan *const plan = test_plan(&f.problem, NULL, 0);
        run_forward(plan, &f.inputs, &rows);
        const skl_inputs saved = results_backward_inputs(&f, &results);
        recorded = (launch_log){.text = ""};
        run_backward(plan, &saved, &gradients);
        if ((strstr(recorded.text, "cuda_general") != NULL) != (is_odd != 0))
            fail_msg("%s rows of gradients ran:\n%s", is_odd ? "odd" : "even", recorded.text);
        skl_plan_destroy(plan);
        results_destroy(&results);
        fixture_destroy(&f);
    }
}

static bool is_usable(const char *name)
{
    for (int32_t k = 0; test_kernel(k) != NULL; k++)
        if (strcmp(test_kernel(k), name) == 0)
            return true;
    return false;
}

/* ---- Tensor maps --------------------------------------------------------------------------------------------- */

/* A stride in bytes: one that TMA takes, or one near a limit. */
static int64_t random_stride(test_random *random)
{
    const int64_t end = (int64_t)1 << 40;
    switch (random_between(random, 0, 5)) {
    case 0:
        return 0;
    case 1:
        return random_between(random, 0, 1 << 20); /* often not a multiple of 16 */
    case 2:
        return end + 16 * random_between(random, -2, 2);
    case 3:
        return 16 * random_between(random, 0, (int64_t)1 << 40); /* often beyond the limit */
    default:
        return 16 * random_between(random, 0, 1 << 24);
    }
}

static int64_t random_count(test_random *random)
{
    const int64_t largest = (int64_t)1 << 32;
    switch (random_between(random, 0, 5)) {
    case 0:
        return random_between(random, 0, 2);
    case 1:
        return largest + random_between(random, -1, 1);
    default:
        return random_between(random, 1, 100000);
    }
}

/* Selection knows the limits of tensor maps by heart. The driver must agree: it encodes exactly the tensors that
 * skl_cuda_tma_addresses accepts. */
static void test_tma_addresses_what_the_driver_encodes(void **state)
{
    (void)state;
    if (!is_usable("cuda_sm90_bf16_128"))
        skip();
    test_random random = random_for("tensor maps");
    const skl_dtype dtypes[] = {SKL_F32, SKL_F16, SKL_BF16};
    int64_t accepted = 0, refused = 0;
    for (int n = 0; n < 100000; n++) {
        const skl_dtype dtype = dtypes[random_between(&random, 0, 2)];
        const int64_t size = dtype == SKL_F32 ? 4 : 2;
        const uintptr_t address =
            (uintptr_t)(random_between(&random, 1, 1 << 20) * (random_between(&random, 0, 3) == 0 ? size : 64));
        const skl_input tensor = {(const void *)address, random_stride(&random) / size, random_stride(&random) / size,
                                  random_stride(&random) / size};
        const int64_t dim = random_between(&random, 1, 256), heads = random_count(&random);
        const skl_tensor_rows shape = {random_count(&random), random_count(&random)};
        CUtensorMap map;
        const CUresult result = skl_tensor_map(&map, dtype, &tensor, dim, heads, shape, 64);
        const bool addressed = skl_cuda_tma_addresses(dtype, &tensor, dim, heads, shape);
        if (result != CUDA_SUCCESS)
            assert_int_equal(result, CUDA_ERROR_INVALID_VALUE);
        if ((result == CUDA_SUCCESS) != addressed)
            fail_msg(
                "type %d at %p, strides %lld, %lld, %lld, dim %lld, %lld heads, %lld rows, batch %lld: the driver "
                "returns %d, and selection says %d",
                (int)dtype, tensor.data, (long long)tensor.stride_batch, (long long)tensor.stride_head,
                (long long)tensor.stride_row, (long long)dim, (long long)heads, (long long)shape.rows,
                (long long)shape.batch, (int)result, addressed);
        accepted += addressed;
        refused += !addressed;
    }
    assert_true(accepted > 1000 && refused > 1000);
}

/* ---- Shared memory ------------------------------------------------------------------------------------------- */

/* Lets every call of a plan select again, for a GPU without shared memory. */
static void leave_no_shared_memory(skl_plan *plan)
{
    skl_cuda_plan *const of_cuda = plan->of_backend;
    of_cuda->target.device.smem_per_sm = 0;
    for (int op = 0; op < SKL_OP_COUNT; op++)
        of_cuda->usual[op].keys = -1; /* no call asks for this */
}

/* Gives the teacher's LSEs of one forward to both plans. Splits, and so the roundings of an LSE, depend on shared
 * memory. */
static void give_lse(fixture *f, const char *kernel, fixture_results *saved)
{
    if (f->test_case->lse != LSE_COMPUTED)
        return;
    skl_plan *const plan = test_deterministic_plan(&f->problem, kernel);
    const skl_rows rows = results_rows(saved);
    run_forward(plan, &f->inputs, &rows);
    skl_plan_destroy(plan);
    f->inputs.lse_t = tensor_input(&saved->lse_t);
}

/* On a consumer card, the kernels for teacher groups in tiles have one slot for streamed rows instead of two. */
static void test_tiles_of_groups_in_less_shared_memory(void **state)
{
    (void)state;
    int compared = 0;
    for (size_t n = 0; n < test_case_count; n++) {
        const test_case *const c = &test_cases[n];
        for (int32_t k = 0; case_kernel(c, k); k++) {
            if (strstr(case_kernel(c, k), "group_tiles") == NULL)
                continue;
            fixture f;
            fixture_create(&f, c);
            fixture_results saved = results_create(&f);
            give_lse(&f, case_kernel(c, k), &saved);
            fixture_results results[2] = {results_create(&f), results_create(&f)};
            for (int less = 0; less < 2; less++) {
                skl_plan *const plan = test_deterministic_plan(&f.problem, case_kernel(c, k));
                if (less)
                    leave_no_shared_memory(plan); /* heads of 64 have room for two slots everywhere */
                results_poison(&results[less]);
                recorded = (launch_log){.text = ""};
                run_both(plan, &f, &results[less]);
                skl_plan_destroy(plan);
            }
            const char *const different = results_difference(&results[0], &results[1]);
            if (different)
                fail_msg("%s: %s differs", c->name, different);
            compared++;
            results_destroy(&results[0]);
            results_destroy(&results[1]);
            results_destroy(&saved);
            fixture_destroy(&f);
        }
    }
    if (compared == 0)
        skip();
}

int main(void)
{
    skl_cuda_launch_hook = record;
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_strides_and_addresses_that_copies_cannot_read),
        cmocka_unit_test(test_gradient_rows_at_odd_elements),
        cmocka_unit_test(test_tma_addresses_what_the_driver_encodes),
        cmocka_unit_test(test_tiles_of_groups_in_less_shared_memory),
        cmocka_unit_test(test_every_case_runs_the_kernels_that_are_explained),
    };
    return test_run("cuda_select", tests, COUNT_OF(tests));
}
