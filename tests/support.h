/* Shared by all test executables: cmocka and the environment. case_support.h has the rest.
 *
 * Environment variables:
 *     SKL_TEST_SEED=n       repeats the random numbers of an earlier run; every run prints its seed
 *     SKL_TEST_SAMPLE=n     runs only every n-th case of the case table, for sanitizers and emulators
 *     SKL_TEST_SHARD=k      with SKL_TEST_SHARDS=n: test_kernels and test_stats run the k-th of n parts, from 0
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

#include "case_support.h"

/* 1: built with ThreadSanitizer. */
#if defined(__SANITIZE_THREAD__)
#define THREAD_SANITIZER 1
#elif defined(__has_feature)
#define THREAD_SANITIZER __has_feature(thread_sanitizer)
#else
#define THREAD_SANITIZER 0
#endif

int64_t test_environment(const char *name, int64_t fallback);

/* Prints the seed, sets the filter, runs a group of tests and returns the exit status of main. */
int test_run(const char *group, const struct CMUnitTest *tests, size_t count);

/* Keeps the tests of this process's part, SKL_TEST_SHARD, and returns their number. Neighbors in the case table are
 * alike, and take about as long: parts take every n-th. */
size_t test_shard(struct CMUnitTest *tests, size_t count);

/* The call must fail with this status and a message that contains this text. */
#define assert_refused(call, expected, text)                                                                         \
    test_assert_refused((call), (expected), (text), #call, __FILE__, __LINE__)

void test_assert_refused(skl_status status, skl_status expected, const char *text, const char *call, const char *file,
                         int line);

#endif
