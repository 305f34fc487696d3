/* All rules about problems and options: refused values with their messages, and accepted values at the limits. */
#define _DEFAULT_SOURCE /* setenv */
#include "support.h"

#include <float.h>
#include <math.h>
#include <stdio.h>
#include <stdlib.h>

#include "edit.h"

#if defined(__x86_64__)
#include <immintrin.h>
#endif

#define SET(member, to)       SET_IN(skl_problem, member, to)
#define SET_FLOAT(member, to) SET_FLOAT_IN(skl_problem, member, to)
#define INDEXER               SET(student, SKL_STUDENT_INDEXER), SET(index_heads, 4)
#define POOLED                INDEXER, SET(pool, SKL_POOL_SUM), SET(pool_size, 4)
#define LENGTH_MAX            ((int64_t)1 << 40)

/* A plain problem, which one edit makes invalid. */
static skl_problem good_problem(void)
{
    skl_problem problem = skl_problem_default();
    problem.batch = 2;
    problem.len_q = problem.len_k = 8;
    problem.heads_t = problem.heads_s = 4;
    problem.dim_t = problem.dim_s = 16;
    return problem;
}

typedef struct problem_rule {
    const char *message; /* NULL: accepted */
    edit edits[8];
} problem_rule;

static const problem_rule problem_rules[] = {
    {NULL, {{0}}},
    {"problem.struct_size=0: must be ", {SET(struct_size, 0)}},
    {"; start from skl_problem_default()", {SET(struct_size, 8)}},

    {"dtype_t=3: must be 0..2", {SET(dtype_t, 3)}},
    {"dtype_s=9: must be 0..2", {SET(dtype_s, 9)}},
    {"grad_f32=2: must be 0..1", {SET(grad_f32, 2)}},
    {"gradients=256: must be 0..255", {SET(gradients, 256)}},
    {"gradients=32: SKL_DSINK_* need sinks=1", {SET(gradients, 32)}},
    {"gradients=64: SKL_DSINK_* need sinks=1", {SET(gradients, 64)}},
    {NULL, {SET(gradients, 111), SET(sinks, 1)}},
    {NULL, {SET(gradients, 140)}},
    {"gradients=142: with SKL_DV_S the teacher has no gradients", {SET(gradients, 142)}},
    {"gradients=140: SKL_DV_S needs sinks=0", {SET(gradients, 140), SET(sinks, 1)}},
    {"gradients=140: SKL_DV_S needs student=SKL_STUDENT_ATTENTION", {INDEXER, SET(gradients, 140)}},
    {"sinks=2: must be 0..1", {SET(sinks, 2)}},
    {"sinks=1: must be 0 for an indexer; a given lse_t that includes the teacher's sink",
     {SET(sinks, 1), SET(student, 1), SET(index_heads, 2)}},
    {"gradients=1: with sinks, teacher gradients need heads_t=8 to be heads_s=4",
     {SET(gradients, 1), SET(sinks, 1), SET(heads_t, 8)}},
    {NULL, {SET(gradients, 76), SET(sinks, 1), SET(heads_t, 8)}},
    {"direction=1: with sinks, KL(S || P) needs heads_t=8 to be heads_s=4",
     {SET(direction, 1), SET(sinks, 1), SET(heads_t, 8)}},
    {"row_bounds=-1: must be 0..1", {SET(row_bounds, -1)}},
    {NULL, {SET(gradients, 15)}},
    {NULL, {SET(gradients, 0)}},
    {"direction=2: must be 0..1", {SET(direction, 2)}},

    {"batch=-1: must be 0..2147483647", {SET(batch, -1)}},
    {"batch=2147483648: must be 0..2147483647", {SET(batch, 2147483648)}},
    {NULL, {SET(batch, 0)}},
    {"len_q=-1: must be 0..1099511627776", {SET(len_q, -1)}},
    {"len_q=1099511627777: must be 0..1099511627776", {SET(len_q, LENGTH_MAX + 1)}},
    {NULL, {SET(len_q, LENGTH_MAX)}},
    {"len_k=-1: must be 0..1099511627776", {SET(len_k, -1)}},
    {"len_k=1099511627777: must be", {SET(len_k, LENGTH_MAX + 1)}},
    {NULL, {SET(len_k, LENGTH_MAX)}},
    {NULL, {SET(len_q, 0), SET(len_k, 0)}},

    {"heads_t=0: must be 1..2147483647", {SET(heads_t, 0)}},
    {"heads_s=0: must be 1..2147483647", {SET(heads_s, 0)}},
    {"heads_s=-4: must be 1..", {SET(heads_s, -4)}},
    {"heads_t=3: must be a multiple of heads_s=2", {SET(heads_t, 3), SET(heads_s, 2)}},
    {"heads_t=4: must be a multiple of heads_s=8", {SET(heads_s, 8)}},
    {NULL, {SET(heads_t, 12)}},
    {"key_heads_t=-1: must be 0..", {SET(key_heads_t, -1)}},
    {"key_heads_s=-1: must be 0..", {SET(key_heads_s, -1)}},
    {"heads_t=4: must be a multiple of key_heads_t=3", {SET(key_heads_t, 3)}},
    {"heads_s=4: must be a multiple of key_heads_s=8", {SET(key_heads_s, 8)}},
    {NULL, {SET(key_heads_t, 1), SET(key_heads_s, 2)}},

    {"dim_t=0: must be 1..512", {SET(dim_t, 0)}},
    {"dim_t=513: must be 1..512", {SET(dim_t, 513)}},
    {NULL, {SET(dim_t, 512), SET(dim_s, 1)}},
    {"dim_s=0: must be 1..512", {SET(dim_s, 0)}},
    {"dim_s=513: must be 1..512", {SET(dim_s, 513)}},

    {"scale_t=nan: must be finite; 0 stands for 1/sqrt(dim_t)", {SET_FLOAT(scale_t, NAN)}},
    {"scale_t=inf: must be finite", {SET_FLOAT(scale_t, INFINITY)}},
    {"scale_s=-inf: must be finite; 0 stands for 1/sqrt(dim_s)", {SET_FLOAT(scale_s, -INFINITY)}},
    {NULL, {SET_FLOAT(scale_t, -1)}},
    {NULL, {SET_FLOAT(scale_t, FLT_MIN), SET_FLOAT(scale_s, -FLT_MIN)}},
    {"scale_t=1.4013e-45: must be 0, or at least 1.17549e-38 in magnitude", {SET_FLOAT(scale_t, 0x1p-149F)}},
    {"scale_t=-0: must be 0, or at least", {SET_FLOAT(scale_t, -0.0F)}},
    {"scale_s=-1.17549e-38: must be 0, or at least", {SET_FLOAT(scale_s, -0x1.fffffcp-127F)}},
    {"softcap_t=5.87747e-39: must be 0, or at least", {SET_FLOAT(softcap_t, 0x1p-127F)}},
    {"softcap_s=-0: must be 0, or at least", {SET_FLOAT(softcap_s, -0.0F)}},
    {NULL, {SET_FLOAT(softcap_t, FLT_MIN), SET_FLOAT(softcap_s, FLT_MIN)}},
    {"softcap_t=-1: must be finite and at least 0; 0 stands for none", {SET_FLOAT(softcap_t, -1)}},
    {"softcap_t=nan: must be finite", {SET_FLOAT(softcap_t, NAN)}},
    {"softcap_s=inf: must be finite and at least 0", {SET_FLOAT(softcap_s, INFINITY)}},

    {"causal=2: must be 0..1", {SET(causal, 2)}},
    {"window_left=-2: must be -1..1099511627776", {SET(window_left, -2)}},
    {"window_right=-2: must be -1..1099511627776", {SET(window_right, -2)}},
    {NULL, {SET(window_left, LENGTH_MAX), SET(window_right, 0)}},
    {"positions=2: must be 0..1", {SET(positions, 2)}},
    {"offset_q=5: must be 0 unless positions=SKL_POSITIONS_OFFSET", {SET(offset_q, 5)}},
    {"offset_k=-3: must be 0 unless", {SET(offset_k, -3)}},
    {"offset_q=1099511627777: must be -1099511627776..1099511627776",
     {SET(positions, SKL_POSITIONS_OFFSET), SET(offset_q, LENGTH_MAX + 1)}},
    {"offset_k=-1099511627777: must be", {SET(positions, SKL_POSITIONS_OFFSET), SET(offset_k, -LENGTH_MAX - 1)}},
    {NULL,
     {SET(positions, SKL_POSITIONS_OFFSET), SET(offset_q, LENGTH_MAX), SET(offset_k, -LENGTH_MAX), SET(causal, 1)}},

    {"packed=2: must be 0..1", {SET(packed, 2)}},
    {"total_q=-1: must be 0..2147483647", {SET(total_q, -1)}},
    {"total_k=2147483648: must be 0..2147483647", {SET(total_k, 2147483648)}},
    {"total_q=8: must be 0 unless packed=1", {SET(total_q, 8)}},
    {"total_k=8: must be 0 unless packed=1", {SET(total_k, 8)}},
    {"len_q=8: must be at most total_q=7", {SET(packed, 1), SET(total_q, 7), SET(total_k, 8)}},
    {"len_k=8: must be at most total_k=7", {SET(packed, 1), SET(total_q, 8), SET(total_k, 7)}},
    {NULL, {SET(packed, 1), SET(total_q, 8), SET(total_k, 8)}},

    {"student=2: must be 0..1", {SET(student, 2)}},
    {"index_heads=0: must be 1..256", {INDEXER, SET(index_heads, 0)}},
    {"index_heads=257: must be 1..256", {INDEXER, SET(index_heads, 257)}},
    {NULL, {INDEXER, SET(index_heads, 256)}},
    {NULL, {INDEXER, SET(gradients, SKL_DQ_S | SKL_DK_S | SKL_DW_S)}},
    {"gradients=5: an indexer's teacher is fixed; must be SKL_DQ_S | SKL_DK_S | SKL_DW_S or fewer",
     {INDEXER, SET(gradients, SKL_DQ_T | SKL_DQ_S)}},
    {"gradients=2: an indexer's teacher is fixed", {INDEXER, SET(gradients, SKL_DK_T)}},
    {"softcap_s=3: must be 0 for an indexer", {INDEXER, SET_FLOAT(softcap_s, 3)}},
    {"link_s=2: must be 0..1", {SET(link_s, 2)}},
    {"pool=3: must be 0..2", {SET(pool, 3)}},
    {"pool_heads=2: must be 0..1", {SET(pool_heads, 2)}},
    {"pool_blocks=3: must be 0..2", {SET(pool_blocks, 3)}},
    {"pool_size=-1: must be 0..1099511627776", {SET(pool_size, -1)}},
    {"pool_size=1099511627777: must be 0..1099511627776", {INDEXER, SET(pool, 1), SET(pool_size, LENGTH_MAX + 1)}},
    {"pool_heads=1: must be 0 unless pool is set", {INDEXER, SET(pool_heads, 1)}},
    {"pool_blocks=2: must be 0 unless pool is set", {INDEXER, SET(pool_blocks, 2)}},
    {"pool_size=4: must be 0 unless pool is set", {INDEXER, SET(pool_size, 4)}},
    {"pool=1: needs student=SKL_STUDENT_INDEXER; one with index_heads=1, index_linear=1 and weights of 1 is an "
     "attention",
     {SET(pool, SKL_POOL_MAX), SET(pool_size, 4)}},
    {"packed=1: must be 0 with pool; pad the sequences and give key_lengths",
     {POOLED, SET(packed, 1), SET(total_q, 8), SET(total_k, 8)}},
    {"pool_size=0: must be 1 or more with pool", {INDEXER, SET(pool, SKL_POOL_SUM)}},
    {"len_k=2147483648: must be at most 2147483647 with pool and top_k",
     {POOLED, SET(top_k, 1), SET(len_k, 2147483648)}},
    {NULL, {POOLED, SET(top_k, 1), SET(len_k, 2147483647)}},
    {NULL, {POOLED, SET(pool_size, LENGTH_MAX), SET(len_k, LENGTH_MAX)}},
    {NULL, {POOLED, SET(pool_heads, 1), SET(pool_blocks, 2), SET(pool_size, 1)}},
    {NULL, {SET(link_s, SKL_LINK_LINEAR)}},
    {"student=1: must be 0 with link_s=SKL_LINK_LINEAR", {INDEXER, SET(link_s, SKL_LINK_LINEAR)}},
    {"direction=1: must be 0 with link_s=SKL_LINK_LINEAR",
     {SET(link_s, SKL_LINK_LINEAR), SET(direction, SKL_KL_REVERSE)}},
    {"scale_s=0.5: must be 0 with link_s=SKL_LINK_LINEAR", {SET(link_s, SKL_LINK_LINEAR), SET_FLOAT(scale_s, 0.5F)}},
    {"softcap_s=1: must be 0 with link_s=SKL_LINK_LINEAR", {SET(link_s, SKL_LINK_LINEAR), SET_FLOAT(softcap_s, 1)}},
    {"gradients & SKL_DV_S=128: must be 0 with link_s=SKL_LINK_LINEAR",
     {SET(link_s, SKL_LINK_LINEAR), SET(gradients, SKL_DQ_S | SKL_DV_S)}},
    {"dim_t=577: must be 1..576", {INDEXER, SET(dim_t, 577)}},
    {NULL, {INDEXER, SET(dim_t, 576)}},
    {"dim_s=513: must be 1..512", {INDEXER, SET(dim_s, 513)}},
    {"dtype_w=3: must be 0..2", {INDEXER, SET(dtype_w, 3)}},
    {"index_linear=2: must be 0..1", {INDEXER, SET(index_linear, 2)}},
    {"top_k=-1: must be 0..2147483647", {INDEXER, SET(top_k, -1)}},
    {NULL, {INDEXER, SET(top_k, 100)}},
    {"index_heads=4: must be 0 unless student=SKL_STUDENT_INDEXER", {SET(index_heads, 4)}},
    {"dtype_w=2: must be 0 unless student=SKL_STUDENT_INDEXER", {SET(dtype_w, SKL_BF16)}},
    {"index_linear=1: must be 0 unless", {SET(index_linear, 1)}},
    {"top_k=7: must be 0 unless", {SET(top_k, 7)}},
    {"gradients & SKL_DW_S=16: must be 0 unless", {SET(gradients, SKL_DW_S)}},

    {"batch=2147483647 x heads_t=2147483644 x len_q=1099511627776: too many rows",
     {SET(batch, 2147483647), SET(heads_t, 2147483644), SET(len_q, LENGTH_MAX)}},
    {"batch=2147483647 x heads_t=4 x len_q=1099511627776: too many rows",
     {SET(batch, 2147483647), SET(len_q, LENGTH_MAX)}},
    /* 2^57 - 1 = INT64_MAX / 64 rows are allowed, 2^57 are not. */
    {NULL, {SET(batch, 226639), SET(heads_t, 1), SET(heads_s, 1), SET(len_q, 635879915089)}},
    {"batch=32768 x heads_t=4 x len_q=1099511627776: too many rows", {SET(batch, 32768), SET(len_q, LENGTH_MAX)}},
    {"batch=0 x heads_t=2147483644 x len_q=1099511627776: too many rows",
     {SET(batch, 0), SET(heads_t, INT32_MAX - 3), SET(len_q, LENGTH_MAX)}},
    {"batch=32768 x heads_t=4 x len_k=1099511627776: too many rows", {SET(batch, 32768), SET(len_k, LENGTH_MAX)}},
    {"x heads_t=2147483644 x total_q=2147483647: too many rows",
     {SET(heads_t, INT32_MAX - 3), SET(packed, 1), SET(total_q, INT32_MAX), SET(total_k, INT32_MAX)}},
};

static void test_rules_of_problems(void **state)
{
    (void)state;
    for (size_t n = 0; n < COUNT_OF(problem_rules); n++) {
        const problem_rule *const rule = &problem_rules[n];
        skl_problem problem = good_problem();
        edit_apply(&problem, rule->edits, COUNT_OF(rule->edits));
        skl_plan *plan = (skl_plan *)&problem; /* any address but NULL */
        const skl_status status = skl_plan_create(&plan, &problem, NULL);
        if (rule->message) {
            assert_refused(status, SKL_ERROR_ARGUMENT, rule->message);
            assert_null(plan);
        } else {
            assert_ok(status);
            skl_plan_destroy(plan);
        }
    }
}

/* Makes this thread treat subnormals as 0, or not. */
static void flush_subnormals(int flush)
{
#if defined(__x86_64__)
    const unsigned bits = 0x8040; /* flush to zero, denormals are zero */
    _mm_setcsr(flush ? _mm_getcsr() | bits : _mm_getcsr() & ~bits);
#elif defined(__aarch64__)
    const uint64_t bits = (uint64_t)1 << 24; /* FZ */
    uint64_t control = 0;
    __asm__ volatile("mrs %0, fpcr" : "=r"(control));
    control = flush ? control | bits : control & ~bits;
    __asm__ volatile("msr fpcr, %0" : : "r"(control));
#else
    (void)flush;
#endif
}

/* A thread that treats subnormals as 0 gets the same answer, and not the default scale. */
static void test_subnormal_scales_are_refused_when_flushed(void **state)
{
    (void)state;
    skl_problem problem = good_problem();
    problem.scale_s = 0x1p-149F;
    skl_plan *plan = NULL;
    flush_subnormals(1);
    const skl_status status = skl_plan_create(&plan, &problem, NULL);
    flush_subnormals(0);
    assert_refused(status, SKL_ERROR_ARGUMENT, "scale_s=1.4013e-45: must be 0, or at least 1.17549e-38");
}

static void test_rules_of_pointers(void **state)
{
    (void)state;
    const skl_problem problem = good_problem();
    skl_plan *plan;
    assert_refused(skl_plan_create(NULL, &problem, NULL), SKL_ERROR_ARGUMENT, "plan=NULL: must point to");
    assert_refused(skl_plan_create(&plan, NULL, NULL), SKL_ERROR_ARGUMENT, "problem=NULL: must be given");
    skl_plan_destroy(NULL);
    assert_int_equal(skl_plan_workspace_size(NULL, SKL_OP_FORWARD), 0);
    assert_string_equal(skl_plan_kernel(NULL), "");
    assert_int_equal(skl_plan_threads(NULL), 0);
}

static skl_status create(const skl_options *options)
{
    const skl_problem problem = good_problem();
    skl_plan *plan = NULL;
    const skl_status status = skl_plan_create(&plan, &problem, options);
    skl_plan_destroy(plan);
    return status;
}

#define SET_OPTION(member, to) SET_IN(skl_options, member, to)
static const struct {
    skl_status status;
    const char *message;
    edit edit;
} option_rules[] = {
    {SKL_ERROR_ARGUMENT, "options.struct_size=1: must be ", SET_OPTION(struct_size, 1)},
    {SKL_ERROR_ARGUMENT, "threads=-1: must be 0..1024", SET_OPTION(threads, -1)},
    {SKL_ERROR_ARGUMENT, "threads=1025: must be 0..1024", SET_OPTION(threads, 1025)},
    {SKL_ERROR_ARGUMENT, "options.deterministic=2: must be 0 or 1", SET_OPTION(deterministic, 2)},
    {SKL_ERROR_UNSUPPORTED, "device=7: ", SET_OPTION(device, 7)},
};

static void test_rules_of_options(void **state)
{
    (void)state;
    for (size_t n = 0; n < COUNT_OF(option_rules); n++) {
        skl_options options = skl_options_default();
        edit_apply(&options, &option_rules[n].edit, 1);
        assert_refused(create(&options), option_rules[n].status, option_rules[n].message);
    }
    skl_options unknown = skl_options_default();
    unknown.kernel = "no_such_kernel";
    assert_refused(create(&unknown), SKL_ERROR_ARGUMENT,
                   "options.kernel=no_such_kernel: no CPU kernel has this name");
}

/* A kernel of this build that this machine cannot run is refused by name, or because there is no GPU. */
static void test_unusable_kernels_are_refused(void **state)
{
    (void)state;
    skl_kernel_info info = {.struct_size = sizeof info};
    for (int32_t k = 0; skl_kernel_at(k, &info); k++) {
        skl_options options = skl_options_default();
        options.device = info.device;
        options.kernel = info.name;
        if (info.usable && info.device == SKL_CPU)
            assert_ok(create(&options));
        else if (!info.usable && info.device == SKL_CPU)
            assert_refused(create(&options), SKL_ERROR_UNSUPPORTED, info.name);
        else if (!info.usable)
            assert_refused(create(&options), SKL_ERROR_DEVICE, info.detail);
    }
}

static void test_environment_sets_threads_and_kernel(void **state)
{
    (void)state;
    const skl_problem problem = good_problem();
    skl_plan *plan;
    if (test_kernel(1) == NULL)
        skip(); /* SKL_TEST_KERNELS allows only one kernel */
    setenv("STREAMKL_THREADS", "3", 1);
    setenv("STREAMKL_KERNEL", test_kernel(1), 1);
    assert_ok(skl_plan_create(&plan, &problem, NULL));
    assert_int_equal(skl_plan_threads(plan), 3);
    assert_string_equal(skl_plan_kernel(plan), test_kernel(1));
    skl_plan_destroy(plan);

    skl_options options = skl_options_default(); /* options take precedence over the environment */
    options.threads = 2;
    options.kernel = test_kernel(0);
    assert_ok(skl_plan_create(&plan, &problem, &options));
    assert_int_equal(skl_plan_threads(plan), 2);
    assert_string_equal(skl_plan_kernel(plan), test_kernel(0));
    skl_plan_destroy(plan);

    static const char *const bad_counts[] = {"0", "-1", "many", "3x", "1025", "99999999999999999999"};
    for (size_t n = 0; n < COUNT_OF(bad_counts); n++) {
        char message[64];
        snprintf(message, sizeof message, "STREAMKL_THREADS=%s: must be 1..1024", bad_counts[n]);
        setenv("STREAMKL_THREADS", bad_counts[n], 1);
        assert_refused(create(NULL), SKL_ERROR_ARGUMENT, message);
    }
    setenv("STREAMKL_THREADS", "", 1); /* same as unset */
    setenv("STREAMKL_KERNEL", "", 1);
    assert_ok(create(NULL));
    setenv("STREAMKL_KERNEL", "nonsense", 1);
    assert_refused(create(NULL), SKL_ERROR_ARGUMENT, "STREAMKL_KERNEL=nonsense: ");
    unsetenv("STREAMKL_KERNEL");
    unsetenv("STREAMKL_THREADS");
}

static void test_workspace_does_not_grow_with_the_lengths(void **state)
{
    (void)state;
    for (int32_t k = 0; test_kernel(k); k++) {
        skl_problem problem = good_problem();
        skl_plan *const small = test_plan(&problem, test_kernel(k), 2);
        problem.len_q = problem.len_k = LENGTH_MAX;
        skl_plan *const large = test_plan(&problem, test_kernel(k), 2);
        for (skl_op op = SKL_OP_FORWARD; op <= SKL_OP_PARTIAL; op++)
            assert_int_equal(skl_plan_workspace_size(small, op), skl_plan_workspace_size(large, op));
        assert_int_equal(skl_plan_workspace_size(small, (skl_op)(SKL_OP_ATTENTION_BACKWARD + 1)), 0);
        assert_int_equal(skl_plan_workspace_size(small, (skl_op)99), 0);
        assert_int_equal(skl_plan_workspace_size(small, (skl_op)-1), 0);
        skl_plan_destroy(small);
        skl_plan_destroy(large);
    }
}

/* A problem of one tile needs the workspace of one thread, however many are allowed. */
static void test_threads_without_work_need_no_workspace(void **state)
{
    (void)state;
    for (int32_t k = 0; test_kernel(k); k++) {
        skl_problem problem = good_problem();
        problem.batch = problem.heads_t = problem.heads_s = 1;
        problem.len_q = 8, problem.len_k = 9;
        skl_plan *const one = test_plan(&problem, test_kernel(k), 1);
        skl_plan *const many = test_plan(&problem, test_kernel(k), 1024);
        problem.batch = 1024;
        skl_plan *const busy = test_plan(&problem, test_kernel(k), 1024);
        assert_int_equal(skl_plan_threads(many), 1024);
        for (skl_op op = SKL_OP_FORWARD; op <= SKL_OP_PARTIAL; op++) {
            const size_t size = skl_plan_workspace_size(one, op);
            assert_int_equal(skl_plan_workspace_size(many, op), size);
            assert_int_equal(skl_plan_workspace_size(busy, op), 1024 * size);
        }
        skl_plan_destroy(one);
        skl_plan_destroy(many);
        skl_plan_destroy(busy);
    }
}

static void test_version_status_names_and_kernels(void **state)
{
    (void)state;
    char version[32];
    snprintf(version, sizeof version, "%d.%d.%d", SKL_VERSION_MAJOR, SKL_VERSION_MINOR, SKL_VERSION_PATCH);
    assert_string_equal(skl_version(), version);
    assert_true(strlen(skl_build_info()) > 0);
    assert_null(strchr(skl_build_info(), '\n'));
    assert_non_null(skl_cpu_features());
#define assert_status_name(status) assert_string_equal(skl_status_name(status), #status)
    assert_status_name(SKL_OK), assert_status_name(SKL_ERROR_ARGUMENT), assert_status_name(SKL_ERROR_UNSUPPORTED);
    assert_status_name(SKL_ERROR_MEMORY), assert_status_name(SKL_ERROR_WORKSPACE),
        assert_status_name(SKL_ERROR_DEVICE);
    assert_non_null(skl_status_name((skl_status)-1));
    assert_non_null(skl_status_name((skl_status)6));

    skl_kernel_info info = {.struct_size = sizeof info};
    int32_t count = 0;
    while (skl_kernel_at(count, &info)) {
        assert_true(strlen(info.name) > 0);
        assert_true(strlen(info.detail) > 0);
        count++;
    }
    assert_true(count > 0);
    assert_false(skl_kernel_at(count + 100, &info));
    assert_false(skl_kernel_at(-1, &info));
    assert_false(skl_kernel_at(0, NULL));
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_rules_of_problems),
        cmocka_unit_test(test_subnormal_scales_are_refused_when_flushed),
        cmocka_unit_test(test_rules_of_pointers),
        cmocka_unit_test(test_rules_of_options),
        cmocka_unit_test(test_unusable_kernels_are_refused),
        cmocka_unit_test(test_environment_sets_threads_and_kernel),
        cmocka_unit_test(test_workspace_does_not_grow_with_the_lengths),
        cmocka_unit_test(test_threads_without_work_need_no_workspace),
        cmocka_unit_test(test_version_status_names_and_kernels),
    };
    return test_run("problem", tests, COUNT_OF(tests));
}
