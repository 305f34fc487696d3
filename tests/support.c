#define _DEFAULT_SOURCE /* getpid and fnmatch */
#include "support.h"

#include <fnmatch.h>
#include <stdio.h>
#include <stdlib.h>
#include <time.h>
#include <unistd.h>

int64_t test_environment(const char *name, int64_t fallback)
{
    const char *const text = getenv(name);
    if (!text || !*text)
        return fallback;
    char *end;
    const long long value = strtoll(text, &end, 10);
    if (*end) {
        fprintf(stderr, "%s=%s: must be a number\n", name, text);
        exit(2);
    }
    return value;
}

uint64_t test_seed(void)
{
    static uint64_t seed;
    if (!seed)
        seed = (uint64_t)test_environment("SKL_TEST_SEED", (int64_t)time(NULL) * 1000 + getpid() % 1000);
    return seed;
}

size_t test_shard(struct CMUnitTest *tests, size_t count)
{
    const size_t shards = (size_t)test_environment("SKL_TEST_SHARDS", 1);
    size_t kept = 0;
    for (size_t n = (size_t)test_environment("SKL_TEST_SHARD", 0); n < count; n += shards)
        tests[kept++] = tests[n];
    return kept;
}

int test_run(const char *group, const struct CMUnitTest *tests, size_t count)
{
    printf("%s: SKL_TEST_SEED=%llu\n", group, (unsigned long long)test_seed());
    const char *const filter = getenv("SKL_TEST_FILTER");
    if (filter && *filter)
        cmocka_set_test_filter(filter);
    return _cmocka_run_group_tests(group, tests, count, NULL, NULL) != 0;
}

/* ---- What case_support.h asks of a program ------------------------------------------------------------------ */

skl_device test_device(void)
{
    const char *const name = getenv("SKL_TEST_DEVICE");
    return name != NULL && strcmp(name, "cuda") == 0 ? SKL_CUDA : SKL_CPU;
}

int32_t test_device_index(void)
{
    return 0;
}

int test_wants_kernel(const char *name)
{
    const char *const pattern = getenv("SKL_TEST_KERNELS");
    return pattern == NULL || fnmatch(pattern, name, 0) == 0;
}

void test_measured(const char *label, const char *tensor, double error)
{
    if (test_environment("SKL_TEST_REPORT", 0))
        print_message("%s: %s: %.2f of the allowed error\n", label, tensor, error);
}

static void print_line(const char *format, va_list arguments)
{
    char line[1024];
    vsnprintf(line, sizeof line, format, arguments);
    print_error("%s\n", line);
}

void test_wrong(const char *format, ...)
{
    va_list arguments;
    va_start(arguments, format);
    print_line(format, arguments);
    va_end(arguments);
}

void test_abandon(const char *format, ...)
{
    va_list arguments;
    va_start(arguments, format);
    print_line(format, arguments);
    va_end(arguments);
    fail();
    abort(); /* fail() does not return */
}

void test_assert_refused(skl_status status, skl_status expected, const char *text, const char *call, const char *file,
                         int line)
{
    if (status == expected && strstr(skl_last_error(), text))
        return;
    print_error("%s\n  expected %s with \"%s\"\n  but got  %s with \"%s\"\n", call, skl_status_name(expected), text,
                skl_status_name(status), status == SKL_OK ? "" : skl_last_error());
    _fail(file, line);
}
