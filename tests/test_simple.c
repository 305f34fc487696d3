/* The simple API against the oracle, on the device under test, and the arguments that it refuses. */
#include "runner.h"

#include "case_words.h"
#include "device.h"

#define SMALL SHAPE(2, 37, 41), HEADS(2, 2), DIMS(8, 8)
static const test_case cases[] = {
    {"plain", SMALL, STUDENT_ONLY},
    {"causal, upstream of ones", SMALL, CAUSAL, STUDENT_ONLY, .unit_upstream = 1},
    {"dims, key heads", SHAPE(1, 33, 70), HEADS(4, 4), KEY_HEADS(2, 1), DIMS(16, 5), CAUSAL, STUDENT_ONLY},
    {"teacher groups", SHAPE(2, 19, 23), HEADS(6, 2), KEY_HEADS(3, 2), DIMS(8, 4), STUDENT_ONLY},
    {"reverse", SMALL, REVERSE, STUDENT_ONLY},
    {"reverse, teacher groups", SHAPE(1, 19, 23), HEADS(4, 2), DIMS(8, 8), REVERSE, STUDENT_ONLY},
    {"window, offsets", SMALL, WINDOW(5, 3), OFFSETS(7, 2), STUDENT_ONLY},
    {"scales, softcaps", SMALL, SCALES(0.5F, -0.25F), SOFTCAPS(3, 2), STUDENT_ONLY},
    {"bf16", SHAPE(2, 64, 96), HEADS(2, 2), DIMS(64, 32), TYPES(BF16, BF16), CAUSAL, STUDENT_ONLY},
    {"f16, f32 gradients", SMALL, TYPES(F16, F16), STUDENT_ONLY, .grad_f32 = 1},
    {"mixed types", SMALL, TYPES(BF16, F32), STUDENT_ONLY},
    {"no keys", SHAPE(2, 5, 0), HEADS(2, 2), DIMS(4, 4), STUDENT_ONLY},
    {"no rows", SHAPE(2, 0, 5), HEADS(2, 2), DIMS(4, 4), STUDENT_ONLY},
    {"no sequence", SHAPE(0, 5, 5), HEADS(2, 2), DIMS(4, 4), STUDENT_ONLY},
};

static skl_options options_of_device(void)
{
    skl_options options = skl_options_default();
    options.device = test_device();
    options.threads = options.device == SKL_CPU ? 2 : 0;
    return options;
}

static skl_status kl_of(const fixture *f, float *kl)
{
    const skl_options options = options_of_device();
    return skl_attention_kl(&f->problem, &options, f->inputs.q_t.data, f->inputs.k_t.data, f->inputs.q_s.data,
                            f->inputs.k_s.data, kl, NULL);
}

static skl_status backward_of(const fixture *f, float *kl, void *dq_s, void *dk_s)
{
    const skl_options options = options_of_device();
    return skl_attention_kl_backward(&f->problem, &options, f->inputs.q_t.data, f->inputs.k_t.data,
                                     f->inputs.q_s.data, f->inputs.k_s.data, f->inputs.grad_kl.data, kl, dq_s, dk_s,
                                     NULL);
}

static const char *kernel_of(const fixture *f)
{
    static char name[64];
    skl_plan *const plan = test_plan(&f->problem, NULL, 2);
    strncpy(name, skl_plan_kernel(plan), sizeof name - 1);
    skl_plan_destroy(plan);
    return name;
}

/* Results that are not among `bits` must stay poisoned. */
static void assert_results(const fixture *f, const fixture_results *all, uint32_t bits)
{
    device_wait();
    const fixture_results wanted = results_subset(all, bits);
    assert_int_equal(rows_mismatch(f, &wanted, f->test_case->name), 0);
    assert_int_equal(gradients_mismatch(f, &wanted, kernel_of(f), f->test_case->name), 0);
    const fixture_results others = results_subset(all, ~bits);
    const test_tensor *const tensors[] = {&others.kl, &others.dq_s, &others.dk_s};
    for (size_t n = 0; n < COUNT_OF(tensors); n++)
        for (int64_t i = 0; tensors[n]->data && i < tensor_count(tensors[n]); i++)
            assert_true(tensor_get(tensors[n], i) != tensor_get(tensors[n], i));
    results_poison(all);
}

enum { KL = 1 << 0, DQ_S = 1 << 9, DK_S = 1 << 10 }; /* bits of results_subset */

static void test_results_against_the_oracle(void **state)
{
    (void)state;
    for (size_t n = 0; n < COUNT_OF(cases); n++) {
        fixture f;
        fixture_create(&f, &cases[n]);
        fixture_solve(&f);
        fixture_results r = results_create(&f);
        const uint32_t subsets[] = {KL | DQ_S | DK_S, DQ_S | DK_S, DQ_S, DK_S, KL | DK_S};
        assert_ok(kl_of(&f, r.kl.data));
        assert_results(&f, &r, KL);
        for (size_t k = 0; k < COUNT_OF(subsets); k++) {
            const uint32_t bits = subsets[k];
            assert_ok(backward_of(&f, bits & KL ? r.kl.data : NULL, bits & DQ_S ? r.dq_s.data : NULL,
                                  bits & DK_S ? r.dk_s.data : NULL));
            assert_results(&f, &r, bits);
        }
        results_destroy(&r);
        fixture_destroy(&f);
    }
}

static void test_refused_arguments(void **state)
{
    (void)state;
    fixture f;
    fixture_create(&f, &cases[0]);
    fixture_results r = results_create(&f);
    const skl_problem valid = f.problem;
    const struct {
        const char *message;
        int32_t *field;
    } fields[] = {{"packed=1: must be 0 in the simple API", &f.problem.packed},
                  {"row_bounds=1: must be 0 in the simple API", &f.problem.row_bounds},
                  {"sinks=1: must be 0 in the simple API", &f.problem.sinks},
                  {"causal=2: must be 0..1", &f.problem.causal}};
    for (size_t n = 0; n < COUNT_OF(fields); n++) {
        *fields[n].field = n == COUNT_OF(fields) - 1 ? 2 : 1;
        assert_refused(kl_of(&f, r.kl.data), SKL_ERROR_ARGUMENT, fields[n].message);
        assert_refused(backward_of(&f, NULL, r.dq_s.data, NULL), SKL_ERROR_ARGUMENT, fields[n].message);
        f.problem = valid;
    }
    f.problem.student = SKL_STUDENT_INDEXER;
    assert_refused(kl_of(&f, r.kl.data), SKL_ERROR_ARGUMENT, "student=1: must be 0 in the simple API");
    f.problem = valid;

    assert_refused(kl_of(&f, NULL), SKL_ERROR_ARGUMENT, "kl=NULL: must be given");
    assert_refused(backward_of(&f, r.kl.data, NULL, NULL), SKL_ERROR_ARGUMENT, "dq_s=NULL, dk_s=NULL: at least one");
    assert_refused(backward_of(&f, r.kl.data, r.dq_s.data, r.dq_s.data), SKL_ERROR_ARGUMENT, "overlap");
    const skl_input grad_kl = f.inputs.grad_kl;
    f.inputs.grad_kl.data = r.kl.data;
    assert_refused(backward_of(&f, r.kl.data, r.dq_s.data, NULL), SKL_ERROR_ARGUMENT, " and rows.kl=");
    f.inputs.grad_kl = grad_kl;
    assert_results(&f, &r, 0); /* a call that fails has no effect: its forward has not run */
    f.inputs.k_t.data = NULL;
    assert_refused(kl_of(&f, r.kl.data), SKL_ERROR_ARGUMENT, "k_t=NULL: must be given");
    assert_refused(skl_attention_kl(NULL, NULL, NULL, NULL, NULL, NULL, r.kl.data, NULL), SKL_ERROR_ARGUMENT,
                   "problem=NULL: must be given");
    results_destroy(&r);
    fixture_destroy(&f);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_results_against_the_oracle),
        cmocka_unit_test(test_refused_arguments),
    };
    return test_run("simple", tests, COUNT_OF(tests));
}
