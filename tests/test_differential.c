/* Differential fuzzing: draws whole problems, runs every call of every kernel on them, and compares the results with
 * an oracle in double that shares no code with the library.
 *
 *     test_differential [--seed N] [--count N] [--seconds N] [--case N] [--extreme] [--sinks]
 *
 * Case n of a seed is always the same problem: shapes, types, scales, softcaps, teacher groups, indexers, masks,
 * packed sequences, layouts and LSEs (case_draw_wide), and the way it is called: results that are requested, threads,
 * in place, key ranges of partial states. Outputs, workspaces, and inputs that no kernel may read are poisoned. One
 * problem in five has logits of up to 1e25; --extreme draws only such problems. --sinks leaves out problems without
 * sinks: of the others a third has teacher groups, and every one is also called in one pass.
 *
 * The bound. An element may be wrong by at most
 *
 *     2 x the largest error in its tensor of a naive implementation in f32, plus one f32 rounding of every number
 *     that the element is computed from (four for exponentials of a GPU; three for f32 on tensor cores, whose two
 * terms round both factors),
 *
 * plus half a step of a 16-bit output type; docs/design/maths.md, section 10, derives it. Rows that see no key and
 * keys that no row sees have exactly 0. No byte between elements is written. Where f32 does not determine a result,
 * any is right: which of two logits of 1e25 is larger, or what an LSE of that size stands for.
 *
 * It prints a reproducer for each case that fails, and their number in the end. --count is divided by
 * SKL_TEST_SAMPLE; SKL_TEST_SECONDS replaces it. SKL_TEST_DEVICE=cuda tests the GPU kernels. */
#define _POSIX_C_SOURCE 200809L
#include <getopt.h>
#include <math.h>
#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <time.h>
#include <unistd.h>

#include "device.h"
#include "kernel_check.h"
#include "runner.h"

enum { CASES = 80, CASE_TIMEOUT = 600 };

static struct {
    int64_t first, count, seconds;
    int64_t current; /* the case that is being checked; -1: none */
    int64_t kernels;
    int64_t rows, determined; /* of the KL */
    int extreme, only_extreme, only_sinks;
    const char *program;
} fuzz = {.count = -1, .current = -1};

/* How the calls of a case are made: half of the time with everything requested. */
static check_options draw_options(const fixture *f)
{
    char purpose[64];
    snprintf(purpose, sizeof purpose, "options of %s", f->test_case->name);
    test_random random = random_for(purpose);
    check_options options = check_options_default();
    options.threads = (int32_t)(random_between(&random, 1, 4) == 1 ? random_between(&random, 5, 40)
                                                                   : random_between(&random, 1, 4));
    options.range_count = (int32_t)random_between(&random, 1, 8);
    options.in_place = (int32_t)random_between(&random, 0, 1);
    options.sparing = (int32_t)random_between(&random, 0, 1);
    if (random_between(&random, 0, 1))
        options.results = (uint32_t)random_between(&random, 0, ALL_RESULTS);
    return options;
}

/* The results of a CPU kernel do not depend on the number of threads. */
static int check_threads(const fixture *f, const char *kernel, int32_t threads)
{
    fixture_results a = results_create(f), b = results_create(f);
    run_kernel(f, kernel, 1, &a);
    run_kernel(f, kernel, threads, &b);
    const char *const different = results_difference(&a, &b);
    if (different)
        print_error("%s: %s: %s differs between 1 and %d threads\n", f->test_case->name, kernel, different, threads);
    results_destroy(&a);
    results_destroy(&b);
    return different != NULL;
}

static const char *const type_names[] = {"f32", "f16", "bf16"};

static void describe(const fixture *f, const check_options *o)
{
    const skl_problem *const p = &f->problem;
    const test_case *const c = f->test_case;
    print_error(
        "batch %lld, len %lld %lld, total %lld %lld, heads %lld %lld, key heads %lld %lld, dim %lld %lld, %s %s, "
        "grad_f32 %d, gradients %u, direction %d, scale %g %g, softcap %g %g, causal %d, window %lld %lld, "
        "offsets %lld %lld, lse %d, index heads %lld (%s, linear %d), top_k %lld, growth %g, apart %g, "
        "sizes %g %g %g %g, bounds %d, sinks %d, linear %d, pool %d %d %d %lld; threads %d, results %x, in place %d, "
        "sparing %d, ranges "
        "%d\n",
        (long long)p->batch, (long long)p->len_q, (long long)p->len_k, (long long)p->total_q, (long long)p->total_k,
        (long long)p->heads_t, (long long)p->heads_s, (long long)p->key_heads_t, (long long)p->key_heads_s,
        (long long)p->dim_t, (long long)p->dim_s, type_names[p->dtype_t], type_names[p->dtype_s], p->grad_f32,
        p->gradients, (int)p->direction, (double)p->scale_t, (double)p->scale_s, (double)p->softcap_t,
        (double)p->softcap_s, p->causal, (long long)p->window_left, (long long)p->window_right,
        (long long)p->offset_q, (long long)p->offset_k, (int)c->lse, (long long)p->index_heads,
        type_names[p->dtype_w], p->index_linear, (long long)p->top_k, c->growth, c->apart, c->sizes ? c->sizes[0] : 1,
        c->sizes ? c->sizes[1] : 1, c->sizes ? c->sizes[2] : 1, c->sizes ? c->sizes[3] : 1, (int)c->bounds, c->sinks,
        c->linear, (int)c->pool, (int)c->pool_heads, (int)c->pool_blocks, (long long)c->pool_size, o->threads,
        o->results, o->in_place, o->sparing, o->range_count);
}

static void print_reproducer(void)
{
    if (fuzz.current >= 0)
        fprintf(stderr, "reproduce with: %s%s --seed %llu --case %lld%s\n",
                test_device() == SKL_CUDA ? "SKL_TEST_DEVICE=cuda " : "", fuzz.program,
                (unsigned long long)test_seed(), (long long)fuzz.current, fuzz.extreme ? " --extreme" : "");
}

/* Returns the number of wrong results, after it has printed each. */
static int check_case(const test_case *drawn)
{
    fixture f;
    fixture_create(&f, drawn);
    fixture_solve(&f);
    const int64_t rows = f.batch * f.problem.heads_s * f.length_q;
    for (int64_t n = 0; n < rows; n++, fuzz.rows++)
        fuzz.determined += isfinite(f.exact.rounding.kl[n]) != 0;
    const check_options options = draw_options(&f);
    int mismatches = 0;
    for (int32_t k = 0; problem_kernel(&f.problem, k); k++, fuzz.kernels++) {
        const char *const kernel = problem_kernel(&f.problem, k);
        mismatches += kernel_check(&f, kernel, &options);
        if (test_device() == SKL_CPU && options.threads > 4)
            mismatches += check_threads(&f, kernel, options.threads);
    }
    if (mismatches) {
        describe(&f, &options);
        print_reproducer();
    }
    fixture_destroy(&f);
    return mismatches;
}

static double seconds_now(void)
{
    struct timespec now;
    clock_gettime(CLOCK_MONOTONIC, &now);
    return (double)now.tv_sec + 1e-9 * (double)now.tv_nsec;
}

static void check_cases(int64_t count, double seconds)
{
    const double end = seconds_now() + seconds;
    const int64_t enough_to_judge = 20;
    int64_t checked = 0, failed = 0;
    fuzz.kernels = fuzz.rows = fuzz.determined = 0;
    for (int64_t n = fuzz.first; checked < count && (!fuzz.seconds || seconds_now() < end); n++) {
        random_case drawn;
        case_draw_wide(&drawn, n, fuzz.extreme);
        if (fuzz.only_sinks && !drawn.test_case.sinks)
            continue;
        fuzz.current = n;
        alarm(CASE_TIMEOUT);
        failed += check_case(&drawn.test_case) != 0;
        checked++;
    }
    alarm(0);
    fuzz.current = -1;
    print_message("%lld problems, %lld of them wrong, %lld times a kernel, %.1f %% of the rows determined\n",
                  (long long)checked, (long long)failed, (long long)fuzz.kernels,
                  100 * (double)fuzz.determined / fmax(1, (double)fuzz.rows));
    assert_int_equal(failed, 0);
    assert_true(fuzz.kernels > 0);
    if (checked >= enough_to_judge)
        assert_true(2 * fuzz.determined > fuzz.rows);
}

static void test_random_problems(void **state)
{
    (void)state;
    if (fuzz.only_extreme)
        skip();
    fuzz.extreme = 0;
    check_cases(fuzz.count, (double)fuzz.seconds);
}

static void test_extreme_problems(void **state)
{
    (void)state;
    if (!fuzz.only_extreme && (test_device() == SKL_CUDA || fuzz.count == 1))
        skip(); /* GPU kernels have NaN for LSEs of 2^20; --case repeats one of the others */
    if (fuzz.current >= 0)
        skip(); /* a case has crashed, and its reproducer is to be printed */
    fuzz.extreme = 1;
    const int64_t share = fuzz.only_extreme ? 1 : 5;
    check_cases((fuzz.count + share - 1) / share, (double)fuzz.seconds / (double)share);
}

static void give_up(int number)
{
    (void)number;
    fprintf(stderr, "a case did not end within %d s\n", CASE_TIMEOUT);
    print_reproducer();
    _exit(1);
}

/* Sanitizers end the process. They define this function. */
void __sanitizer_set_death_callback(void (*callback)(void)) __attribute__((weak));

static int64_t number_of(const char *option, const char *text)
{
    char *end;
    const long long value = strtoll(text, &end, 10);
    if (*text && !*end && value >= 0)
        return value;
    fprintf(stderr, "--%s %s: must be a number of at least 0\n", option, text);
    exit(2);
}

static void parse_options(int argc, char **argv)
{
    static const struct option options[] = {{"seed", required_argument, NULL, 's'},
                                            {"count", required_argument, NULL, 'c'},
                                            {"seconds", required_argument, NULL, 't'},
                                            {"case", required_argument, NULL, 'n'},
                                            {"extreme", no_argument, NULL, 'x'},
                                            {"sinks", no_argument, NULL, 'i'},
                                            {NULL, 0, NULL, 0}};
    int index = 0, option;
    fuzz.seconds = test_environment("SKL_TEST_SECONDS", 0);
    while ((option = getopt_long(argc, argv, "", options, &index)) != -1) {
        if (option == '?')
            exit(2);
        const int64_t value = optarg ? number_of(options[index].name, optarg) : 0;
        if (option == 's')
            setenv("SKL_TEST_SEED", optarg, 1);
        if (option == 'c')
            fuzz.count = value, fuzz.seconds = 0;
        if (option == 't')
            fuzz.seconds = value;
        if (option == 'n')
            fuzz.first = value, fuzz.count = 1, fuzz.seconds = 0;
        if (option == 'x')
            fuzz.only_extreme = 1;
        if (option == 'i')
            fuzz.only_sinks = 1;
    }
    if (fuzz.count < 0)
        fuzz.count = fuzz.seconds ? INT64_MAX / 2 : CASES / test_environment("SKL_TEST_SAMPLE", 1);
}

int main(int argc, char **argv)
{
    fuzz.program = argv[0];
    parse_options(argc, argv);
    signal(SIGALRM, give_up);
    if (__sanitizer_set_death_callback)
        __sanitizer_set_death_callback(print_reproducer);
    const struct CMUnitTest tests[] = {cmocka_unit_test(test_random_problems),
                                       cmocka_unit_test(test_extreme_problems)};
    const int failures = test_run("differential", tests, COUNT_OF(tests));
    if (failures) {
        print_reproducer();
        fflush(NULL);
        _exit(failures); /* after a crash inside a call, the library cannot clean up */
    }
    return 0;
}
