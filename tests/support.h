/* Shared by all test executables: seed, random numbers, guarded memory and the kernels of this machine.
 *
 * Environment variables:
 *     SKL_TEST_SEED=n       repeats the random numbers of an earlier run; every run prints its seed
 *     SKL_TEST_SAMPLE=n     runs only every n-th case of the case table, for sanitizers and emulators
 *     SKL_TEST_SHARD=k      with SKL_TEST_SHARDS=n: test_kernels runs the k-th of n parts, counted from 0
 *     SKL_TEST_WORK=n       leaves out cases of the table with more than n million multiplications per pass
 *     SKL_TEST_RANDOM=n     number of random cases after the table
 *     SKL_TEST_SECONDS=n    length of differential fuzzing
 *     SKL_TEST_DEVICE=cuda  runs on the GPU: see device.h
 *     SKL_TEST_LONG=1       runs tests with more data, for the long tier
 *     SKL_TEST_EMULATED=1   leaves out what an emulator cannot do
 *     SKL_TEST_REPORT=1     prints the error of every result relative to the allowed error
 *     SKL_TEST_FILTER=x     runs only tests whose name matches the pattern x, which may contain * and ?
 *     SKL_TEST_KERNELS=x    runs only kernels whose name matches the pattern x
 */
#ifndef SKL_TESTS_SUPPORT_H
#define SKL_TESTS_SUPPORT_H

#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>
#include <cmocka.h>

#include "streamkl.h"

#define COUNT_OF(array) (sizeof(array) / sizeof *(array))

int64_t test_environment(const char *name, int64_t fallback);
uint64_t test_seed(void);

/* Prints the seed, sets the filter, runs a group of tests and returns the exit status of main. */
int test_run(const char *group, const struct CMUnitTest *tests, size_t count);

typedef struct test_random {
    uint64_t state;
} test_random;

/* Each purpose has a separate stream, so that a test draws the same numbers regardless of the tests before it. */
test_random random_for(const char *purpose);
uint64_t random_bits(test_random *random);
double random_uniform(test_random *random, double low, double high);
int64_t random_between(test_random *random, int64_t low, int64_t high); /* inclusive */

/* Memory followed by an unmapped page, so that an access past the end crashes. It starts poisoned: bytes 0xFF are NaN
 * in every floating-point type. */
typedef struct test_memory {
    unsigned char *data;
    size_t size;
    unsigned char *mapping; /* with poison before and after the data */
    size_t mapping_size;    /* without the unmapped page */
} test_memory;

enum { POISON = 0xFF };

/* Aligned to `alignment`, at most `alignment` - 1 bytes before the unmapped page. */
test_memory memory_create(size_t size, size_t alignment);
void memory_destroy(test_memory *memory);
void memory_poison(const test_memory *memory);

/* Names of the usable kernels of the device under test, best first; NULL past the end. */
const char *test_kernel(int32_t index);

/* A plan for `kernel` (NULL: the best); fails the test if it cannot be created. */
skl_plan *test_plan(const skl_problem *problem, const char *kernel, int32_t threads);
skl_plan *test_deterministic_plan(const skl_problem *problem, const char *kernel);

/* Kinds of plans: 0 and, on a GPU, 1, which is deterministic. CPU plans are always deterministic. */
int32_t test_plan_kinds(void);
skl_plan *test_plan_of_kind(const skl_problem *problem, const char *kernel, int32_t kind);

/* The call must succeed, or fail with this status and a message that contains this text. */
#define assert_ok(call) test_assert_ok((call), #call, __FILE__, __LINE__)
#define assert_refused(call, expected, text)                                                                         \
    test_assert_refused((call), (expected), (text), #call, __FILE__, __LINE__)

void test_assert_ok(skl_status status, const char *call, const char *file, int line);
void test_assert_refused(skl_status status, skl_status expected, const char *text, const char *call, const char *file,
                         int line);

#endif
