#define _DEFAULT_SOURCE /* mmap and getpagesize */
#include "case_support.h"

#include "device.h"

#include <sys/mman.h>
#include <unistd.h>

/* ---- Random numbers ---------------------------------------------------------------------------------------- */

test_random random_for(const char *purpose)
{
    uint64_t hash = 14695981039346656037U ^ test_seed(); /* FNV-1a */
    for (const char *c = purpose; *c; c++)
        hash = (hash ^ (unsigned char)*c) * 1099511628211U;
    return (test_random){hash};
}

/* SplitMix64 */
uint64_t random_bits(test_random *random)
{
    uint64_t z = random->state += 0x9E3779B97F4A7C15U;
    z = (z ^ z >> 30) * 0xBF58476D1CE4E5B9U;
    z = (z ^ z >> 27) * 0x94D049BB133111EBU;
    return z ^ z >> 31;
}

double random_uniform(test_random *random, double low, double high)
{
    return low + (high - low) * (double)(random_bits(random) >> 11) * 0x1p-53;
}

int64_t random_between(test_random *random, int64_t low, int64_t high)
{
    return low + (int64_t)(random_bits(random) % (uint64_t)(high - low + 1));
}

/* ---- Memory ------------------------------------------------------------------------------------------------ */

test_memory memory_create(size_t size, size_t alignment)
{
    const size_t page = (size_t)getpagesize();
    const size_t usable = (size / page + 2) * page; /* at least a page of poison before the data */
    unsigned char *const mapping =
        mmap(NULL, usable + page, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    if (mapping == MAP_FAILED || mprotect(mapping + usable, page, PROT_NONE) != 0)
        test_abandon("%zu bytes of test memory could not be mapped", size);

    const size_t misalignment = (size_t)((uintptr_t)mapping + usable - size) % alignment;
    const test_memory memory = {mapping + usable - size - misalignment, size, mapping, usable};
    memory_poison(&memory);
    device_share(mapping, usable);
    return memory;
}

void memory_destroy(test_memory *memory)
{
    if (memory->mapping) {
        device_unshare(memory->mapping);
        munmap(memory->mapping, memory->mapping_size + (size_t)getpagesize());
    }
    *memory = (test_memory){0};
}

void memory_poison(const test_memory *memory)
{
    memset(memory->mapping, POISON, memory->mapping_size);
}

int memory_untouched(const test_memory *memory)
{
    size_t written = 0;
    for (size_t n = 0; n < memory->mapping_size; n++)
        written += memory->mapping[n] != POISON;
    return written == 0;
}

/* ---- The library ------------------------------------------------------------------------------------------- */

const char *test_kernel(int32_t index)
{
    skl_kernel_info info = {.struct_size = sizeof info};
    for (int32_t k = 0; skl_kernel_at(k, &info); k++)
        if (info.device == test_device() && info.usable && test_wants_kernel(info.name) && index-- == 0)
            return info.name;
    return NULL;
}

static skl_plan *plan_with(const skl_problem *problem, const char *kernel, int32_t threads, int32_t deterministic)
{
    skl_options options = skl_options_default();
    options.device = test_device();
    options.device_index = test_device_index();
    options.kernel = kernel;
    options.threads = threads;
    options.deterministic = deterministic;
    skl_plan *plan = NULL;
    assert_ok(skl_plan_create(&plan, problem, &options));
    return plan;
}

skl_plan *test_plan(const skl_problem *problem, const char *kernel, int32_t threads)
{
    return plan_with(problem, kernel, threads, 0);
}

skl_plan *test_deterministic_plan(const skl_problem *problem, const char *kernel)
{
    return plan_with(problem, kernel, 0, 1);
}

int32_t test_plan_kinds(void)
{
    return test_device() == SKL_CUDA ? 2 : 1;
}

skl_plan *test_plan_of_kind(const skl_problem *problem, const char *kernel, int32_t kind)
{
    return plan_with(problem, kernel, 2, kind);
}

void test_assert_ok(skl_status status, const char *call, const char *file, int line)
{
    if (status != SKL_OK)
        test_abandon("%s:%d: %s: %s: %s", file, line, call, skl_status_name(status), skl_last_error());
}
