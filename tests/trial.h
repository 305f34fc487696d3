/* A test as data: cases, and a check that runs with every kernel on each of them. */
#ifndef SKL_TESTS_TRIAL_H
#define SKL_TESTS_TRIAL_H

#include "runner.h"

/* One kernel on one case. */
typedef struct trial {
    fixture *f;
    const char *kernel;
    skl_plan *plan;             /* for two threads on a CPU */
    fixture_results one, other; /* poisoned buffers for two runs */
} trial;

typedef struct trials {
    const test_case *cases;
    size_t count;
    void (*prepare)(
        fixture *f); /* Runs once per case. NULL: every kernel has new inputs, which its check may change. */
    void (*check)(trial *t);
    int every_type;  /* 1: each case in f32, f16 and bf16, since a kernel may support only one type */
    int every_kind;  /* 1: also with deterministic plans, on a GPU */
    int attention;   /* 1: only kernels whose plans have skl_attention_backward */
    int only_cpu;    /* 1: skipped on a GPU */
    int best_on_cpu; /* 1: only the best CPU kernel; all have the same schedule */
    size_t sample;   /* > 1: every sample-th case, with the best kernel, if SKL_TEST_SAMPLE is set */
} trials;

/* An entry of a table of tests: TRIALS(name, cases, .check = check_this, .prepare = fixture_solve). */
/* clang-format off */
#define TRIALS(name, array, ...)                                                                                      \
    {#name, run_trials, NULL, NULL, &(trials){.cases = array, .count = COUNT_OF(array), __VA_ARGS__}}
/* clang-format on */

void run_trials(void **state);

/* Rows without LSEs and gradients of a one-pass call, from the LSEs of an earlier forward. The buffers may be equal.
 */
void run_one_pass(const skl_plan *plan, const fixture *f, const fixture_results *lse, const fixture_results *results);

/* Fails with the names of case and kernel. */
#define trial_fail(t, ...) trial_fail_at(t, __FILE__, __LINE__, __VA_ARGS__)
void trial_fail_at(const trial *t, const char *file, int line, const char *format, ...)
    __attribute__((format(printf, 4, 5)));

/* Fail unless both runs have the same bits, results match the oracle, or a property holds for every element. A tensor
 * that was never created has none. */
void assert_same_bits(const trial *t, const char *what);
void assert_exact(const trial *t, const fixture_results *results);
void assert_elements(const trial *t, const test_tensor *tensor, int (*holds)(double), const char *what);

/* Properties of an element. */
int is_zero(double value);
int is_nan(double value);
int is_finite(double value);
int is_not_finite(double value);
int is_infinity(double value);
int is_minus_infinity(double value);
int is_not_negative(double value);

/* A check: forward and backward match the oracle. Needs .prepare = fixture_solve. */
void check_oracle(trial *t);

#endif
