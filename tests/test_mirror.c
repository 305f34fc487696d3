/* Copies of tensors for a device, tested with a fake GPU in host memory: the CPU works on the copies, and the results
 * equal those without copies. */
#include "trial.h"

#include "case_words.h"
#include "device/device.h"

#include <stdlib.h>

/* ---- A fake GPU --------------------------------------------------------------------------------------------- */

static int allocations, allocations_allowed;

/* Exactly the requested size, so that a sanitizer detects an overrun. */
skl_status gpu_allocate(size_t size, const char *what, void **memory)
{
    if (allocations == allocations_allowed)
        return device_fail(SKL_ERROR_MEMORY, "%s needs %zu bytes", what, size);
    allocations++;
    *memory = malloc(size);
    return SKL_OK;
}

void gpu_free(void *memory)
{
    allocations--;
    free(memory);
}

skl_status gpu_copy(void *to, const void *from, size_t size)
{
    memcpy(to, from, size);
    return SKL_OK;
}

#pragma GCC diagnostic ignored "-Wunused-parameter"
#define UNUSED(declaration)                                                                                          \
    skl_status declaration                                                                                           \
    {                                                                                                                \
        return SKL_OK;                                                                                               \
    }

UNUSED(gpu_open(int32_t index))
UNUSED(gpu_describe(char *name, size_t size))
UNUSED(gpu_timer_start(void *events[2]))
UNUSED(gpu_timer_stop(void *const events[2], double *seconds))

/* ---- Tests -------------------------------------------------------------------------------------------------- */

#define MODELS HEADS(4, 4), KEY_HEADS(2, 4), DIMS(33, 16)

static const test_case cases[] = {
    {"contiguous", SHAPE(3, 37, 41), MODELS},
    {"gaps", SHAPE(3, 37, 41), MODELS, LAYOUT(GAPS)},
    {"length first", SHAPE(3, 37, 41), MODELS, LAYOUT(LENGTH_FIRST), TYPES(BF16, F32)},
    {"sequence first", SHAPE(3, 37, 41), MODELS, LAYOUT(SEQUENCE_FIRST), TYPES(F16, F16), .grad_f32 = 1},
    {"expanded", SHAPE(3, 37, 41), MODELS, LAYOUT(EXPANDED)},
    {"repeated", SHAPE(3, 37, 41), MODELS, LAYOUT(REPEATED)},
    {"key lengths", SHAPE(3, 37, 41), MODELS, KEY_LENGTHS(5, 0, 41)},
    {"teacher groups", SHAPE(2, 37, 41), HEADS(6, 2), DIMS(16, 16), .lse = LSE_GIVEN},
    {"packed", PACKED(3, LENGTHS(0, 5, 38, 60), LENGTHS(0, 9, 9, 57)), HEADS(2, 2), DIMS(16, 16), TAILS(3, 5)},
    {"indexer", SHAPE(2, 37, 41), HEADS(6, 2), DIMS(16, 24), INDEXER(3), TYPES(BF16, F16), .grad_f32 = 1},
    {"sparse indexer", SHAPE(2, 37, 41), HEADS(6, 2), DIMS(16, 24), INDEXER(3), TOP_K(7), LAYOUT(GAPS)},
    {"row bounds", SHAPE(3, 37, 41), MODELS, BOUNDS(RANDOM), SINKS},
    {"packed row bounds", PACKED(3, LENGTHS(0, 5, 38, 60), LENGTHS(0, 9, 9, 57)), HEADS(2, 2), DIMS(16, 16),
     TAILS(3, 5), BOUNDS(RANDOM), SINKS},
    {"no queries", SHAPE(2, 0, 5), HEADS(2, 2), DIMS(8, 8)},
    {"no batch", SHAPE(0, 5, 5), HEADS(2, 2), DIMS(8, 8)},
};

/* Forward and backward like run_both(), but on copies. */
static void run_on_copies(const skl_plan *plan, const fixture *f, const fixture_results *results)
{
    mirror tensors = mirror_of(&f->problem, SKL_CUDA);
    skl_inputs inputs = f->inputs;
    skl_rows rows = results_rows(results);
    assert_ok(mirror_call(&tensors, &inputs, &rows, NULL));
    assert_true(inputs.q_t.data != f->inputs.q_t.data && rows.kl.data != results->kl.data);
    run_forward(plan, &inputs, &rows);
    assert_ok(mirror_fetch(&tensors));

    const int before = tensors.count;
    inputs = results_backward_inputs(f, results);
    skl_gradients gradients = results_gradients(results);
    assert_ok(mirror_call(&tensors, &inputs, NULL, &gradients));
    const int gradient_count = (f->problem.student == SKL_STUDENT_INDEXER ? 3 : 4) + (f->problem.sinks ? 2 : 0);
    assert_int_equal(tensors.count, before + gradient_count); /* everything else had been copied before */
    run_backward(plan, &inputs, &gradients);
    assert_ok(mirror_fetch(&tensors));
    mirror_destroy(&tensors);
    assert_int_equal(allocations, 0);
}

static void check_copies(trial *t)
{
    allocations_allowed = 1000;
    run_both(t->plan, t->f, &t->one);
    run_on_copies(t->plan, t->f, &t->other);
    assert_same_bits(t, "copies");
    const test_tensor *const copied[] = {&t->other.kl, &t->other.dq_s, &t->other.dk_s, &t->other.dk_t};
    for (size_t n = 0; n < COUNT_OF(copied); n++)
        assert_true(copied[n]->data == NULL || tensor_stray_writes(copied[n]) == 0);
}

/* Whichever allocation fails, the message names the tensor, and nothing leaks. The case has both row bounds. */
static void test_every_allocation_can_fail(void **state)
{
    (void)state;
    fixture f;
    static const test_case bounds_and_sinks = {"bounds and sinks", SHAPE(2, 5, 6), MODELS, BOUNDS(CHUNKS), SINKS};
    fixture_create(&f, &bounds_and_sinks);
    fixture_results results = results_create(&f);
    static const char *const names[] = {"q_t",     "k_t",    "q_s",    "k_s",  "grad_kl", "key_begin",
                                        "key_end", "sink_t", "sink_s", "kl",   "lse_t",   "lse_s",
                                        "dq_t",    "dk_t",   "dq_s",   "dk_s", "dsink_t", "dsink_s"};
    for (int allowed = 0; allowed < (int)COUNT_OF(names); allowed++) {
        allocations_allowed = allowed;
        mirror tensors = mirror_of(&f.problem, SKL_CUDA);
        skl_inputs inputs = f.inputs;
        skl_rows rows = results_rows(&results);
        skl_gradients gradients = results_gradients(&results);
        assert_int_equal(mirror_call(&tensors, &inputs, &rows, &gradients), SKL_ERROR_MEMORY);
        assert_memory_equal(device_error(), names[allowed], strlen(names[allowed]));
        mirror_destroy(&tensors);
        assert_int_equal(allocations, 0);
    }
    results_destroy(&results);
    fixture_destroy(&f);
}

static void test_cpu_uses_the_tensors_themselves(void **state)
{
    (void)state;
    fixture f;
    fixture_create(&f, &cases[0]);
    mirror tensors = mirror_of(&f.problem, SKL_CPU);
    skl_inputs inputs = f.inputs;
    assert_ok(mirror_call(&tensors, &inputs, NULL, NULL));
    assert_memory_equal(&inputs, &f.inputs, sizeof inputs);
    assert_int_equal(tensors.count, 0);
    fixture_destroy(&f);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        TRIALS(copies_give_bitwise_equal_results, cases, .check = check_copies, .best_on_cpu = 1),
        cmocka_unit_test(test_every_allocation_can_fail),
        cmocka_unit_test(test_cpu_uses_the_tensors_themselves),
    };
    return test_run("mirror", tests, COUNT_OF(tests));
}
