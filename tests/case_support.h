/* What the case table and its checks need of a program: of the tests, which use cmocka, and of `streamkl check`,
 * which does not. Random numbers, guarded memory and the kernels of this machine are shared. */
#ifndef SKL_TESTS_CASE_SUPPORT_H
#define SKL_TESTS_CASE_SUPPORT_H

#include <stddef.h>
#include <stdint.h>
#include <string.h>

#include "streamkl.h"

#define COUNT_OF(array) (sizeof(array) / sizeof *(array))

/* ---- Implemented by the program: tests/support.c, cli/check/command.c --------------------------------------- */

skl_device test_device(void); /* the device under test: see device.h */
int32_t test_device_index(void);
int test_wants_kernel(const char *name);
uint64_t test_seed(void);

/* Gets the largest error of every tensor that is compared, relative to the allowed error. */
void test_measured(const char *label, const char *tensor, double error);

/* Describes a wrong result in one line. The check goes on. */
void test_wrong(const char *format, ...) __attribute__((format(printf, 1, 2)));

/* The check cannot go on. */
_Noreturn void test_abandon(const char *format, ...) __attribute__((format(printf, 1, 2)));

/* ---- Random numbers ----------------------------------------------------------------------------------------- */

typedef struct test_random {
    uint64_t state;
} test_random;

/* Each purpose has a separate stream, so that a test draws the same numbers regardless of the tests before it. */
test_random random_for(const char *purpose);
uint64_t random_bits(test_random *random);
double random_uniform(test_random *random, double low, double high);
int64_t random_between(test_random *random, int64_t low, int64_t high); /* inclusive */

/* ---- Memory ------------------------------------------------------------------------------------------------- */

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
int memory_untouched(const test_memory *memory); /* 1: all poison */

/* ---- The library -------------------------------------------------------------------------------------------- */

/* Names of the usable kernels of the device under test, best first; NULL past the end. */
const char *test_kernel(int32_t index);

/* A plan for `kernel` (NULL: the best); fails the test if it cannot be created. */
skl_plan *test_plan(const skl_problem *problem, const char *kernel, int32_t threads);
skl_plan *test_deterministic_plan(const skl_problem *problem, const char *kernel);

/* Kinds of plans: 0 and, on a GPU, 1, which is deterministic. CPU plans are always deterministic. */
int32_t test_plan_kinds(void);
skl_plan *test_plan_of_kind(const skl_problem *problem, const char *kernel, int32_t kind);

/* The call must succeed. */
#define assert_ok(call) test_assert_ok((call), #call, __FILE__, __LINE__)
void test_assert_ok(skl_status status, const char *call, const char *file, int line);

#endif
